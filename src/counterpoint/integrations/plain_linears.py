"""Linears whose weight is a plain tensor, a rank's part, and whose tokens are the first dimension, as in Megatron-LM and
TransformerEngine: their products by operators.
"""

from functools import cached_property
from typing import final

import torch

from counterpoint.integrations.eager_linears import EagerLinear
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
        self.route = route

    def columns(
        self, given: torch.Tensor, weight: torch.Tensor, main: MainGradient | None = None, *, is_gathered: bool
    ) -> torch.Tensor:
        """Return all tokens times this rank's (columns, K) weight: of this rank's tokens if `is_gathered`, otherwise of all,
        whose gradient is summed.
        """
        products = self._eagerly(self._gathering if is_gathered else self._summing_gradients, given, weight, main)
        if products is None:
            activation, weights = _operands(given, weight, main)
            products = (
                gather_multiply(activation, [weights], 0, self.route)
                if is_gathered
                else multiply_whole(activation, [weights], self.route)
            )
        return products[0]

    def rows(
        self, given: torch.Tensor, weight: torch.Tensor, main: MainGradient | None = None, *, is_scattered: bool
    ) -> torch.Tensor:
        """Return the sum over ranks of all tokens times this rank's (N, K) weight: this rank's tokens of it, or all."""
        products = self._eagerly(self._scattering if is_scattered else self._summing, given, weight, main)
        if products is not None:
            return products[0]
        activation, part = _operands(given, weight, main)
        if is_scattered:
            return multiply_scatter(activation, part, 0, self.route)
        return multiply_all_reduce(activation, part, self.route)

    def _eagerly(
        self, eager: EagerLinear, given: torch.Tensor, weight: torch.Tensor, main: MainGradient | None
    ) -> tuple[torch.Tensor, ...] | None:
        return None if torch.compiler.is_compiling() else eager(given, (weight,), main)

    @cached_property
    def _gathering(self) -> EagerLinear:
        return self._of(operators.all_gather_matmul)

    @cached_property
    def _summing_gradients(self) -> EagerLinear:
        return self._of(operators.column_parallel_matmul)

    @cached_property
    def _scattering(self) -> EagerLinear:
        return self._of(operators.matmul_reduce_scatter)

    @cached_property
    def _summing(self) -> EagerLinear:
        return self._of(operators.matmul_all_reduce)

    def _of(self, operator: Operator) -> EagerLinear:
        return EagerLinear(operator, 0, self.route)


def _operands(given: torch.Tensor, weight: torch.Tensor, main: MainGradient | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return operands for an operator that torch has to see whole."""
    part = weight if main is None else ToMainGradient.apply(weight, main)
    return cast_for_matmul(given), cast_for_matmul(part)
