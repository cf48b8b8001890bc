"""Linears between sequence shards and feature shards, on local tensors: what tensor parallelism computes, by operators.

Column-parallel: every rank has some tokens with all features, gathers all tokens, and multiplies them by its columns.
Row-parallel: every rank has all tokens with some features, multiplies by its rows, and keeps its tokens of the sum. The
sharded dimension is moved to the front, so that a rank's tokens are consecutive rows; with one sequence that is free.

Several column-parallel weights on one input are one matmul: their rows adjoin in memory (`adjoin`), or are copied together.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from counterpoint.errors import IntegrationError
from counterpoint.ops import operators
from counterpoint.ops.dispatch import Kept, refuse_second_derivative
from counterpoint.value import require


def gather_multiply(
    shard: torch.Tensor, weights: Sequence[torch.Tensor], dim: int, group: dist.ProcessGroup, schedule: str
) -> tuple[torch.Tensor, ...]:
    """All ranks' shards, put together along `dim`, times each of the (columns, K) weights; the gather happens once."""
    front = shard.movedim(dim, 0)
    rows = front.reshape(-1, front.shape[-1])
    products = _GatherMultiply.apply(rows, group, schedule, *weights)
    shape = (front.shape[0] * group.size(), *front.shape[1:-1])
    return tuple(product.view(*shape, product.shape[1]).movedim(0, dim) for product in products)


def multiply_scatter(
    activation: torch.Tensor, weight: torch.Tensor, dim: int, group: dist.ProcessGroup, schedule: str
) -> torch.Tensor:
    """This rank's part along `dim` of the sum of all ranks' activation times (N, K) weight, transposed."""
    front = activation.movedim(dim, 0)
    num_ranks = group.size()
    require(
        front.shape[0] % num_ranks == 0,
        IntegrationError,
        f"A sequence must divide by the {num_ranks} ranks that share it; found {front.shape[0]} tokens. Pad it.",
    )
    rows = front.reshape(-1, front.shape[-1])
    product = operators.matmul_reduce_scatter(rows, weight.t(), group.group_name, schedule)
    return product.view(front.shape[0] // num_ranks, *front.shape[1:-1], product.shape[1]).movedim(0, dim)


class _GatherMultiply(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """all-gather(rows) times every weight, transposed. Nothing gathered is kept: rows are sent again in backward."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup, schedule: str, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.schedule = group, schedule
        ctx.save_for_backward(rows, *weights)
        num_rows = rows.shape[0] * group.size()
        stacked = _stacked(weights)
        product = operators.all_gather_matmul(rows, stacked.t(), num_rows, group.group_name, schedule)
        return tuple(product.split([len(weight) for weight in weights], 1))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_derivative("all_gather_matmul")
        rows, *weights = ctx.saved_tensors
        kept = Kept(rows, _stacked(weights).t(), ctx.group.group_name, ctx.schedule)
        gradient = gradients[0] if len(gradients) == 1 else torch.cat(gradients, 1)
        of_rows, of_weights = operators.all_gather_gradients(kept, gradient, any(ctx.needs_input_grad[3:]))
        parts = [None] * len(weights) if of_weights is None else of_weights.t().split([len(weight) for weight in weights])
        return of_rows, None, None, *parts


def adjoin(parameters: Sequence[torch.Tensor]) -> None:
    """Let the rows of these matrices follow each other in memory, so that they can be multiplied as one."""
    together = torch.cat([parameter.detach() for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = together[start : start + len(parameter)]
        start += len(parameter)


def _stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The weights one below the other, without a copy where they adjoin."""
    first = weights[0].detach()
    expected = first.data_ptr()
    for weight in weights:
        if weight.data_ptr() != expected or not weight.is_contiguous():
            return torch.cat([each.detach() for each in weights])
        expected += weight.nbytes
    num_rows = sum(len(weight) for weight in weights)
    fits = first.storage_offset() + num_rows * first.shape[1] <= first.untyped_storage().nbytes() // first.itemsize
    return first.as_strided((num_rows, first.shape[1]), first.stride()) if fits else torch.cat([w.detach() for w in weights])
