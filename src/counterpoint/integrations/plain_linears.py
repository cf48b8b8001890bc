"""Linears whose weight is a plain tensor, a rank's part, and whose tokens are the first dimension, as in Megatron-LM and
TransformerEngine: their products by operators.
"""

from typing import final

import torch

from counterpoint.integrations.eager_linears import OPERATORS, EagerLinear
from counterpoint.integrations.main_gradients import MainGradient, ToMainGradient
from counterpoint.integrations.sequence_shards import (
    Route,
    cast_for_matmul,
    gather_multiply,
    multiply_all_reduce,
    multiply_scatter,
    multiply_whole,
)
from counterpoint.ops import operators
from counterpoint.ops.dispatch import Operator


@final
class PlainLinear:
    """The products of one linear of a group; `main` takes the gradient of its weight, if there is one."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._eager = {operator.name: EagerLinear(operator, 0, route) for operator in OPERATORS}

    def columns(
        self, given: torch.Tensor, weight: torch.Tensor, main: MainGradient | None = None, *, is_gathered: bool
    ) -> torch.Tensor:
        """Return all tokens times this rank's (columns, K) weight: of this rank's tokens if `is_gathered`, otherwise of all,
        whose gradient is summed.
        """
        operator = operators.all_gather_matmul if is_gathered else operators.column_parallel_matmul
        products = self._eagerly(operator, given, weight, main)
        if products is None:
            activation, part = _operands(given, weight, main)
            products = (
                gather_multiply(activation, [part], 0, self._route)
                if is_gathered
                else multiply_whole(activation, [part], self._route)
            )
        return products[0]

    def rows(
        self, given: torch.Tensor, weight: torch.Tensor, main: MainGradient | None = None, *, is_scattered: bool
    ) -> torch.Tensor:
        """Return the sum over ranks of all tokens times this rank's (N, K) weight: this rank's tokens of it, or all."""
        operator = operators.matmul_reduce_scatter if is_scattered else operators.matmul_all_reduce
        products = self._eagerly(operator, given, weight, main)
        if products is not None:
            return products[0]
        activation, part = _operands(given, weight, main)
        if is_scattered:
            return multiply_scatter(activation, part, 0, self._route)
        return multiply_all_reduce(activation, part, self._route)

    def _eagerly(
        self, operator: Operator, given: torch.Tensor, weight: torch.Tensor, main: MainGradient | None
    ) -> tuple[torch.Tensor, ...] | None:
        return None if torch.compiler.is_compiling() else self._eager[operator.name](given, (weight,), main)


def _operands(given: torch.Tensor, weight: torch.Tensor, main: MainGradient | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return operands for an operator that torch has to see whole."""
    part = weight if main is None else ToMainGradient.apply(weight, main)
    return cast_for_matmul(given), cast_for_matmul(part)
