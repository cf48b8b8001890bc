"""Linears between sequence shards and feature shards, on local tensors: what tensor parallelism computes, by operators.

Column-parallel: every rank has some tokens with all features, gathers all tokens, and multiplies them by its columns.
Row-parallel: every rank has all tokens with some features, multiplies by its rows, and keeps its tokens of the sum. The
sharded dimension is moved to the front, so that a rank's tokens are consecutive rows; with one sequence that is free.

Several column-parallel weights on one input share one gather.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from counterpoint.errors import IntegrationError
from counterpoint.ops import operators
from counterpoint.value import require


def gather_multiply(
    shard: torch.Tensor, weights: Sequence[torch.Tensor], dim: int, group: dist.ProcessGroup, schedule: str
) -> tuple[torch.Tensor, ...]:
    """All ranks' shards, put together along `dim`, times each of the (columns, K) weights; the gather happens once."""
    front = shard.movedim(dim, 0)
    rows = front.reshape(-1, front.shape[-1])
    num_rows = rows.shape[0] * group.size()
    transposed = [weight.t() for weight in weights]
    products = operators.all_gather_matmul(rows, transposed, num_rows, group.group_name, schedule)
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
