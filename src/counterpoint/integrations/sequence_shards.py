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
    rows = rows_of(shard, dim)
    num_rows = rows.shape[0] * route.num_ranks
    transposed = [weight.t() for weight in weights]
    products = operators.all_gather_matmul(rows, transposed, num_rows, route.group_name, route.schedule)
    shape = (shard.shape[dim] * route.num_ranks, *shard.shape[:dim], *shard.shape[dim + 1 : -1])
    return tuple(with_tokens_at(dim, product, shape) for product in products)


def multiply_scatter(activation: torch.Tensor, weight: torch.Tensor, dim: int, route: Route) -> torch.Tensor:
    """This rank's part along `dim` of the sum of all ranks' activation times (N, K) weight, transposed."""
    require_equal_parts(activation.shape[dim], route.num_ranks)
    product = operators.matmul_reduce_scatter(rows_of(activation, dim), weight.t(), route.group_name, route.schedule)
    shape = (activation.shape[dim] // route.num_ranks, *activation.shape[:dim], *activation.shape[dim + 1 : -1])
    return with_tokens_at(dim, product, shape)


def require_equal_parts(num_tokens: int, num_ranks: int) -> None:
    """Raise `IntegrationError` for a sequence that ranks cannot share equally."""
    if num_tokens % num_ranks:
        raise IntegrationError(
            f"A sequence must divide by the {num_ranks} ranks that share it; found {num_tokens} tokens. Pad it."
        )


def rows_of(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """A tensor as a matrix of rows, the tokens of dimension `dim` first."""
    if not is_one_sequence(tensor.shape, dim):
        tensor = tensor.movedim(dim, 0)
    return tensor.reshape(-1, tensor.shape[-1])


def is_one_sequence(sizes: Sequence[int], dim: int) -> bool:
    """Whether the tokens of dimension `dim` come first as they are."""
    return all([size == 1 for size in sizes[:dim]])  # noqa: C419  a list is faster than a generator


def with_tokens_at(dim: int, product: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Rows of `shape` as they were before their tokens came to the front.

    With one sequence the strides are a linear's own, too: torch.compile takes others for another tensor, and torch 2.11 and
    2.13 fail on a DTensor whose strides it therefore holds to be dynamic ("unhashable type: non-nested SymInt").
    """
    if is_one_sequence(shape[1:], dim):
        return product.view(*shape[1 : dim + 1], shape[0], *shape[dim + 1 :], product.shape[1])
    return product.view(*shape, product.shape[1]).movedim(0, dim)


def multiply_all_reduce(activation: torch.Tensor, weight: torch.Tensor, route: Route) -> torch.Tensor:
    """The sum of all ranks' activation times (N, K) weight, transposed; whole on every rank."""
    product = operators.matmul_all_reduce(rows_of(activation, 0), weight.t(), route.group_name, route.schedule)
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
