"""The weights of experts that are a parameter each, as in Megatron-LM, for grouped matmuls, which take one tensor of all.

Megatron-LM's buffers hold the parameters of a linear one after the other, in reverse order of the experts. A view of the
buffer is then one tensor of all weights, in this order.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from counterpoint.integrations.main_gradients import MainGradient
from counterpoint.ops.grouped_matmul import ExpertTotals

Weights = Sequence[torch.Tensor]


def are_reversed(weights: Weights) -> bool:
    """Return whether weights lie in memory at equal distances, the last one first."""
    return (_distance(weights) or 0) < 0


def join(weights: Weights) -> None:
    """Move weights that each have memory of their own into one piece of it, in this order. Others stay, since something else
    may hold them, such as the buffer of a distributed optimizer.
    """
    if _distance(weights) is not None or any(each.untyped_storage().nbytes() != each.nbytes for each in weights):
        return
    whole = torch.stack([each.detach() for each in weights])
    for each, part in zip(weights, whole, strict=True):
        each.data = part


def stacked(weights: Weights, mains: Sequence[MainGradient | None]) -> torch.Tensor:
    """Return weights (N, K) as one tensor (E, N, K): a view where they lie at equal distances in this order, and a copy
    otherwise. Their gradients go to them, or, as `totals_of` says, to main gradients.
    """
    found: torch.Tensor = Stacked.apply(mains, *weights)
    return found


def totals_of(mains: Sequence[MainGradient | None]) -> Callable[[], ExpertTotals] | None:
    """Return what gives a backward pass the main gradients of weights, if any has one."""
    return partial(_totals, mains) if any(mains) else None


class Stacked(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """See `stacked`."""

    @staticmethod
    def forward(ctx: Any, mains: Sequence[MainGradient | None], *weights: torch.Tensor) -> torch.Tensor:
        """See `torch.autograd.Function.forward`."""
        ctx.mains = mains
        ctx.set_materialize_grads(False)
        first, distance = weights[0], _distance(weights)
        if distance is None or distance < 0:
            return torch.stack(weights)
        return first.as_strided((len(weights), *first.shape), (distance, *first.stride()))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """See `torch.autograd.Function.backward`. Without a gradient, the main gradients have got it."""
        if gradient is not None:
            return None, *gradient.unbind()
        return None, *(None if each is None else each.sign() for each in ctx.mains)


def _distance(weights: Weights) -> int | None:
    """Return the numbers from each weight to the next in memory, if it is the same for all; they overlap in none."""
    first, *others = weights
    if not others:
        return int(first.numel())
    places = [each.data_ptr() for each in weights]
    step = places[1] - places[0]
    storage, nbytes = first.untyped_storage(), first.nbytes
    is_regular = (
        abs(step) >= max(1, nbytes)
        and step % first.itemsize == 0
        and places == list(range(places[0], places[-1] + step, step))
        and storage.data_ptr() <= min(places[0], places[-1])
        and max(places[0], places[-1]) + nbytes <= storage.data_ptr() + storage.nbytes()  # so all are within it
        and all(each.is_contiguous() for each in weights)
    )
    return step // first.itemsize if is_regular else None


def _totals(mains: Sequence[MainGradient | None]) -> ExpertTotals:
    is_first = any(each.is_first for each in mains if each is not None)
    return ExpertTotals([None if each is None else each.total for each in mains], is_first)
