"""Tensor-parallel linears in eager code: one autograd step from the input and the weights to the products.

The public way consists of `DTensor.to_local`, a transposition, an operator, a view and `DTensor.from_local`. Each is an
autograd step that takes the host some 5 to 50 us forward and backward, more than the operator itself
(docs/integrations_measured.md has the times). The results have the same bits. Dispatch modes, function transforms, autocast,
torch.compile and unusual tensors use the public way.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional

from counterpoint.integrations.main_gradients import MainGradient
from counterpoint.integrations.sequence_shards import (
    Route,
    distributed,
    is_one_sequence,
    local_of,
    rows_of,
    with_tokens_at,
)
from counterpoint.ops import operators
from counterpoint.ops.dispatch import NO_TOTALS, PLAIN_TYPES, Kept, MainTotals, Operator, is_observed
from counterpoint.ops.operator_call import Key, earlier_call, key_of

# Inputs of up to so many elements may skip the operator: those of decoding. Their calls take the host longer than the GPU.
MOST_OF_SMALL = 1 << 19
MOST_SIZES = 256
OPERATORS = (
    operators.all_gather_matmul,
    operators.matmul_reduce_scatter,
    operators.matmul_all_reduce,
    operators.column_parallel_matmul,
)


@final
class EagerLinear:
    """One of `OPERATORS` for inputs whose tokens are dimension `dim`; those of columns take several weights."""

    def __init__(self, operator: Operator, dim: int, route: Route) -> None:
        self.operator, self.dim, self.route = operator, dim, route
        self._gathers = operator is operators.all_gather_matmul
        self._sums_gradient = operator is operators.column_parallel_matmul
        self._scatters = operator is operators.matmul_reduce_scatter
        self._sums = operator is operators.matmul_all_reduce
        self._small: dict[torch.Size, Key] = {}  # calls without gradients, by the sizes of their inputs

    def __deepcopy__(self, _memo: dict[int, Any]) -> "EagerLinear":
        return self  # operators cannot be copied; a copy of the model makes calls of the same sizes

    def __call__(
        self, given: torch.Tensor, weights: Sequence[torch.Tensor], main: MainGradient | None = None
    ) -> tuple[torch.Tensor, ...] | None:
        """Return the products of the input (a DTensor or its local part) and each weight; None if the public way is
        needed. `main` takes the gradient of the one weight.
        """
        local = given._local_tensor if type(given) is DTensor else given
        if type(local) not in PLAIN_TYPES or not all(map(_is_plain, weights)):
            return None
        if local is not given and not local.is_contiguous():
            return None
        if is_observed() or torch.is_autocast_enabled(local.device.type):
            return None
        products: tuple[torch.Tensor, ...] | None = None
        if torch.is_grad_enabled() and (given.requires_grad or any(weight.requires_grad for weight in weights)):
            products = _Multiply.apply(self, main, given, *weights)
        elif self._sums and local.numel() <= MOST_OF_SMALL and not torch.autograd._profiler_enabled():
            products = self._sum_small(local, weights[0])
        if products is None:
            products = self.multiply(None, local, weights)
        if is_one_sequence(local.shape, self.dim):
            return products
        return tuple(product.movedim(0, self.dim) for product in products)

    def _sum_small(self, local: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor] | None:
        """Return the sum of all ranks' products where the operator leaves calls of these sizes to the library, without its
        look-ups; None at first, and for other calls.
        """
        key, (group_name, _, schedule) = self._small.get(local.shape), self.route
        if key is None:
            operands = rows_of(local, self.dim), local_of(weight).t()
            if len(self._small) >= MOST_SIZES:
                self._small.clear()
            self._small[local.shape] = key_of((operators.ALL_REDUCE, group_name, schedule), *operands)
            return None
        known = earlier_call(key, group_name)
        if known is None or not known.is_by_library:
            return None
        product = functional.linear(local, local_of(weight))
        known.sum_by_library(product)
        return (product,)

    def multiply(self, ctx: Any, local: torch.Tensor, weights: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the products; with several sequences, tokens come first. `ctx`, if given, keeps what backward needs.

        The products are reshaped in place, because autograd forbids in-place changes of views that a function returned.
        """
        own = [local_of(weight) for weight in weights]
        rows, transposed = rows_of(local, self.dim), [weight.t() for weight in own]
        group_name, num_ranks, schedule = self.route
        if ctx is not None:
            ctx.sizes = local.shape
            ctx.set_materialize_grads(False)
            # weights themselves, which some hooks of the job know; and of tokens only their number, if weights are frozen
            ctx.save_for_backward(rows if any(ctx.needs_input_grad[3:]) else rows.new_empty(rows.shape[0], 0), *own)
        sizes, dim = local.shape, self.dim
        num_tokens = sizes[dim]
        if self._gathers:
            products = self.operator.run_unobserved(rows, transposed, num_ranks * rows.shape[0], group_name, schedule)
            num_tokens *= num_ranks
        elif self._sums_gradient:
            products = self.operator.run_unobserved(rows, transposed, group_name, schedule)
        else:
            products = (self.operator.run_unobserved(rows, transposed[0], group_name, schedule),)
            num_tokens //= num_ranks if self._scatters else 1
        front = (*sizes[:dim], num_tokens) if is_one_sequence(sizes, dim) else (num_tokens, *sizes[:dim])
        shape = *front, *sizes[dim + 1 : -1]
        return tuple([product.resize_((*shape, product.shape[1])) for product in products])

    def differentiate(
        self,
        ctx: Any,
        gradients: Sequence[torch.Tensor | None],
        is_wanted: tuple[bool, bool],
        totals: MainTotals = NO_TOTALS,
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """Return the gradients of the local input and of the local weights, from those of the results of `multiply`. Those
        of the weights go to the `totals` instead, if there are any.
        """
        rows = [None if gradient is None else gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
        left, *own = ctx.saved_tensors
        kept = Kept(left, [weight.t() for weight in own], (self.route.group_name, self.route.schedule), totals)
        of_rows, of_weights = self.operator.differentiate_kept(kept, rows, is_wanted)
        sizes, dim = ctx.sizes, self.dim
        of_input = (
            None if of_rows is None else with_tokens_at(dim, of_rows, (sizes[dim], *sizes[:dim], *sizes[dim + 1 : -1]))
        )
        return of_input, [None if each is None else each.t() for each in of_weights]


@final
class EagerLinears:
    """An `EagerLinear` for each dimension in which inputs were sharded: usually one."""

    def __init__(self, operator: Operator, route: Route) -> None:
        self._operator, self._route = operator, route
        self._by_dim: dict[int, EagerLinear] = {}

    def __deepcopy__(self, _memo: dict[int, Any]) -> "EagerLinears":
        return self

    def of(self, dim: int) -> EagerLinear:
        """Return the one for inputs whose tokens are dimension `dim`."""
        found = self._by_dim.get(dim)
        if found is None:
            found = self._by_dim[dim] = EagerLinear(self._operator, dim, self._route)
        return found


class _Multiply(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """An `EagerLinear`, what takes the gradient of its weight if something does, its input and its weights."""

    @staticmethod
    def forward(
        ctx: Any, linear: EagerLinear, main: MainGradient | None, given: torch.Tensor, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.linear, ctx.main, ctx.specs = linear, main, [_spec_of(weight) for weight in weights]
        ctx.spec = _spec_of(given)
        return linear.multiply(ctx, given if ctx.spec is None else given._local_tensor, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        is_wanted, main = (ctx.needs_input_grad[2], any(ctx.needs_input_grad[3:])), ctx.main
        is_total = main is not None and is_wanted[1] and gradients[0] is not None
        totals = MainTotals((main.total.t(),), main.is_first) if is_total else NO_TOTALS
        of_input, of_weights = ctx.linear.differentiate(ctx, gradients, is_wanted, totals)
        if is_total:
            of_weights = [main.sign()]
        else:
            of_weights = [distributed(each, spec) for each, spec in zip(of_weights, ctx.specs, strict=True)]
        return None, None, distributed(of_input, ctx.spec), *of_weights


def _spec_of(tensor: torch.Tensor) -> Any | None:
    """Return how a DTensor is spread; None of a plain tensor."""
    return tensor._spec if type(tensor) is DTensor else None


def _is_plain(weight: torch.Tensor) -> bool:
    """Return whether a weight is plain, or a one-dimensional DTensor, and its gradient has the same memory layout."""
    if type(weight) is DTensor and len(weight._spec.placements) != 1:
        return False
    local = local_of(weight)
    return type(local) in PLAIN_TYPES and local.is_contiguous()
