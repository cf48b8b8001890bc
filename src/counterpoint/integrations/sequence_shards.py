"""Linears of tensor parallelism on local tensors: what their forward and backward passes compute, by operators.

Column-parallel: every rank has some tokens with all features, gathers all tokens, and multiplies them by its columns.
Row-parallel: every rank has all tokens with some features, multiplies by its rows, and keeps its tokens of the sum, or all
of them. The sharded dimension is moved to the front, so that a rank's tokens are consecutive rows; with one sequence that
is free.

Several column-parallel weights on one input share one gather.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from counterpoint.errors import IntegrationError
from counterpoint.ops import operators
from counterpoint.value import require

READY = "_counterpoint_ready"  # on an input: the products of its linears that were not asked for yet


class Route(NamedTuple):
    """What a linear's operator is told besides its tensors: the group, how many ranks it has, the schedule as text."""

    group_name: str
    num_ranks: int
    schedule: str


def gather_multiply(
    shard: torch.Tensor, weights: Sequence[torch.Tensor], dim: int, route: Route
) -> tuple[torch.Tensor, ...]:
    """All ranks' shards, put together along `dim`, times each of the (columns, K) weights; the gather happens once."""
    front = shard.movedim(dim, 0)
    rows = front.reshape(-1, front.shape[-1])
    num_rows = rows.shape[0] * route.num_ranks
    transposed = [weight.t() for weight in weights]
    products = operators.all_gather_matmul(rows, transposed, num_rows, route.group_name, route.schedule)
    shape = (front.shape[0] * route.num_ranks, *front.shape[1:-1])
    return tuple(_with_tokens_at(dim, product, shape) for product in products)


def multiply_scatter(activation: torch.Tensor, weight: torch.Tensor, dim: int, route: Route) -> torch.Tensor:
    """This rank's part along `dim` of the sum of all ranks' activation times (N, K) weight, transposed."""
    front = activation.movedim(dim, 0)
    num_ranks = route.num_ranks
    require(
        front.shape[0] % num_ranks == 0,
        IntegrationError,
        f"A sequence must divide by the {num_ranks} ranks that share it; found {front.shape[0]} tokens. Pad it.",
    )
    rows = front.reshape(-1, front.shape[-1])
    product = operators.matmul_reduce_scatter(rows, weight.t(), route.group_name, route.schedule)
    return _with_tokens_at(dim, product, (front.shape[0] // num_ranks, *front.shape[1:-1]))


def _with_tokens_at(dim: int, product: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Rows of `shape` as they were before their tokens came to the front.

    With one sequence the strides are a linear's own, too: torch.compile takes others for another tensor, and torch 2.11 and
    2.13 fail on a DTensor whose strides it therefore holds to be dynamic ("unhashable type: non-nested SymInt").
    """
    if all(size == 1 for size in shape[1 : dim + 1]):
        return product.view(*shape[1 : dim + 1], shape[0], *shape[dim + 1 :], product.shape[1])
    return product.view(*shape, product.shape[1]).movedim(0, dim)


def multiply_all_reduce(activation: torch.Tensor, weight: torch.Tensor, route: Route) -> torch.Tensor:
    """The sum of all ranks' activation times (N, K) weight, transposed; whole on every rank."""
    rows = activation.reshape(-1, activation.shape[-1])
    product = operators.matmul_all_reduce(rows, weight.t(), route.group_name, route.schedule)
    return product.view(*activation.shape[:-1], product.shape[1])


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]  # torch is untyped here
def neighbor_product(given: DTensor, weights: list[DTensor], position: int, route: tuple[str, int, str]) -> torch.Tensor:
    """The product of the weight at `position`, for code that torch.compile makes; (tokens, K) as in `gather_multiply`.

    Dynamo does not look inside: neighbors must share one operator, and under activation checkpointing dynamo refuses code
    that keeps a product for the next linear. The later stages of torch.compile run this function, with tensors without
    numbers, and see one operator for all neighbors: whatever is not asked for yet waits on the input itself.
    """
    waiting: dict[int, torch.Tensor] | None = vars(given).get(READY)
    if waiting is None or position not in waiting:
        dim = given.placements[0].dim
        parts = [cast_for_matmul(weight.to_local()) for weight in weights]
        products = gather_multiply(cast_for_matmul(given.to_local()), parts, dim, Route(*route))
        waiting = vars(given)[READY] = dict(enumerate(products))
    product = waiting.pop(position)
    if not waiting:
        del vars(given)[READY]
    return product


def cast_for_matmul(tensor: torch.Tensor) -> torch.Tensor:
    """To the type that autocast gives to linears, if it is on."""
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor
