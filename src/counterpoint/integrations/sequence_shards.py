"""Tensor-parallel linears on local tensors: what their forward and backward passes compute by operators.

Column-parallel: every rank has some tokens with all features, gathers all tokens, and multiplies them by its columns; or it
has all tokens, and their gradient is summed over the ranks.
Row-parallel: every rank has all tokens with some features, multiplies by its rows, and keeps its tokens of the sum, or all
of them. The sharded dimension is moved to the front, so that a rank's tokens are consecutive rows; with one sequence that
is free.

Several column-parallel weights on one input share one gather, or one sum.
"""

import copy
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Shard

from counterpoint.ops import operators
from counterpoint.ops.operator_call import calls_of

READY = "_counterpoint_ready"  # attribute of an input: the products of its linears that were not asked for yet

# What one look of torch.compile at a function tells the next, by the route and the weights of neighbors, because equal
# blocks share code: the last input on which products were left, and neighbors of which one was seen with another input
_left_on: dict[tuple[object, ...], weakref.ref[torch.Tensor]] = {}
_apart: set[tuple[object, ...]] = set()


class Route(NamedTuple):
    """The arguments of a linear's operator other than tensors: the group, its number of ranks, the schedule as text."""

    group_name: str
    num_ranks: int
    schedule: str


def gather_multiply(
    shard: torch.Tensor, weights: Sequence[torch.Tensor], dim: int, route: Route
) -> tuple[torch.Tensor, ...]:
    """Return all ranks' shards, joined along `dim`, times each of the (columns, K) weights; the gather happens once."""
    rows = rows_of(shard, dim)
    num_rows = rows.shape[0] * route.num_ranks
    transposed = [weight.t() for weight in weights]
    products = operators.all_gather_matmul(rows, transposed, num_rows, route.group_name, route.schedule)
    shape = (shard.shape[dim] * route.num_ranks, *shard.shape[:dim], *shard.shape[dim + 1 : -1])
    return tuple(with_tokens_at(dim, product, shape) for product in products)


def multiply_whole(activation: torch.Tensor, weights: Sequence[torch.Tensor], route: Route) -> tuple[torch.Tensor, ...]:
    """Return an activation that every rank has, times each of the (columns, K) weights; its gradient is summed once."""
    transposed = [weight.t() for weight in weights]
    products = operators.column_parallel_matmul(rows_of(activation, 0), transposed, route.group_name, route.schedule)
    return tuple(product.view(*activation.shape[:-1], product.shape[1]) for product in products)


def multiply_scatter(activation: torch.Tensor, weight: torch.Tensor, dim: int, route: Route) -> torch.Tensor:
    """Return this rank's part along `dim` of the sum of all ranks' activation times (N, K) weight, transposed."""
    product = operators.matmul_reduce_scatter(rows_of(activation, dim), weight.t(), route.group_name, route.schedule)
    shape = (activation.shape[dim] // route.num_ranks, *activation.shape[:dim], *activation.shape[dim + 1 : -1])
    return with_tokens_at(dim, product, shape)


def why_not_multiplied(sizes: Sequence[int], dim: int, num_parts: int) -> str:
    """Return why no operator multiplies an activation of these sizes, or nothing; the same on every rank.

    `dim` is sharded, into `num_parts` more parts. The linear's original forward takes such activations.
    """
    if len(sizes) < 2:
        return "an activation of one dimension has no tokens"
    if dim >= len(sizes) - 1:
        return f"Shard({dim}) of an activation of {len(sizes)} dimensions means its features"
    if 0 in sizes:
        return "an activation without tokens"
    if sizes[dim] % num_parts:
        return f"tokens that do not divide by the {num_parts} ranks that share them"
    return ""


def runs_originally(activation: tuple[Sequence[int], int, int], route: Route, obstacle: str = "") -> bool:
    """Return whether no operator multiplies an activation (see `why_not_multiplied`), or another obstacle is known, and
    count a call by the library if so. Code made by torch.compile does not count it.
    """
    reason = obstacle or why_not_multiplied(*activation)
    if reason and not torch.compiler.is_compiling():
        calls_of(route.group_name).add_library(reason, is_original=True)
    return bool(reason)


def rows_of(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a tensor as a matrix of rows, the tokens of dimension `dim` first."""
    if not is_one_sequence(tensor.shape, dim):
        tensor = tensor.movedim(dim, 0)
    return tensor.reshape(-1, tensor.shape[-1])


def is_one_sequence(sizes: Sequence[int], dim: int) -> bool:
    """Return whether the tokens of dimension `dim` come first already."""
    return all([size == 1 for size in sizes[:dim]])  # noqa: C419  a list is faster than a generator


def with_tokens_at(dim: int, product: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return rows of `shape` in the order before their tokens came to the front.

    With one sequence, the strides equal a linear's as well: torch.compile treats others as another tensor, and torch
    2.11 and 2.13 fail on a DTensor whose strides it therefore takes as dynamic ("unhashable type: non-nested SymInt").
    """
    if is_one_sequence(shape[1:], dim):
        return product.view(*shape[1 : dim + 1], shape[0], *shape[dim + 1 :], product.shape[1])
    return product.view(*shape, product.shape[1]).movedim(0, dim)


def multiply_all_reduce(activation: torch.Tensor, weight: torch.Tensor, route: Route) -> torch.Tensor:
    """Return the sum of all ranks' activation times (N, K) weight, transposed; whole on every rank."""
    product = operators.matmul_all_reduce(rows_of(activation, 0), weight.t(), route.group_name, route.schedule)
    return product.view(*activation.shape[:-1], product.shape[1])


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]  # torch is untyped here
def neighbor_product(
    given: torch.Tensor, weights: list[torch.Tensor], position: int, route: tuple[str, int, str]
) -> torch.Tensor:
    """Return the product of the weight at `position`, for code made by torch.compile: as `gather_multiply` of a DTensor
    of parts, and as `multiply_whole` of what is whole.

    Dynamo does not trace inside. Neighbors must share one operator, but under activation checkpointing dynamo rejects
    code that keeps a product for the next linear. The later stages of torch.compile run this function with fake tensors
    and see one operator for all neighbors: products that are not asked for yet are kept on the input itself. Dynamo's own
    look finds out whether these neighbors have one input; if not, each has an operator of its own.
    """
    conditions = conditions_of(given.device.type, [given, *weights])
    neighbors = (*route, *[tuple(weight.shape) for weight in weights])
    left_on = _left_on.get(neighbors, lambda: None)()
    if left_on is not None and left_on is not given and position in vars(left_on).get(READY, (None, {}))[1]:
        _apart.add(neighbors)
    if neighbors in _apart:
        weights, position = [weights[position]], 0
    earlier, waiting = vars(given).get(READY, (None, {}))
    if earlier != conditions or position not in waiting:
        parts = local_parts(weights)
        local = cast_for_matmul(given.to_local() if isinstance(given, DTensor) else given)
        if isinstance(given, DTensor) and isinstance(given.placements[0], Shard):
            products = gather_multiply(local, parts, given.placements[0].dim, Route(*route))
        else:
            products = multiply_whole(local, parts, Route(*route))
        waiting = dict(enumerate(products))
        vars(given)[READY] = conditions, waiting
        _left_on[neighbors] = weakref.ref(given)
    product: torch.Tensor = waiting.pop(position)
    if not waiting:
        del vars(given)[READY]
    return product


def conditions_of(kind: str, tensors: Sequence[torch.Tensor]) -> tuple[object, ...]:
    """Return under which conditions neighbors' products are made on this kind of device; under others, a product is made
    anew. `tensors`: their input and weights.

    A product that was made without gradients, or in a checkpoint that holds only its neighbor, would lose gradients. All
    ranks must find the same, so nothing depends on addresses: parametrized weights are new tensors each time.
    """
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    try:
        versions = [each._version for each in tensors]
    except RuntimeError:  # tensors made in inference mode have none
        versions = []
    return *recording(), torch.is_inference_mode_enabled(), cast, versions


def recording() -> tuple[object, ...]:
    """Return whether autograd records, and which hooks take what it saves: each checkpoint has hooks of its own."""
    return torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(True)


def cast_for_matmul(tensor: torch.Tensor) -> torch.Tensor:
    """Cast to the type that autocast uses for linears, if it is on; it leaves double precision alone."""
    kind = tensor.device.type
    is_cast = tensor.dtype != torch.float64 and torch.is_autocast_enabled(kind)
    return tensor.to(torch.get_autocast_dtype(kind)) if is_cast else tensor


def local_parts(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's parts of neighbors' weights, as a matmul takes them. Plain weights are parts already."""
    return [cast_for_matmul(_LocalPart.apply(weight) if isinstance(weight, DTensor) else weight) for weight in weights]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, without gradients, or a plain tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _LocalPart(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """`DTensor.to_local`, which in torch 2.11 turns the missing gradient of an unused product into zeros."""

    @staticmethod
    def forward(ctx: Any, weight: DTensor) -> torch.Tensor:
        ctx.spec = weight._spec
        ctx.set_materialize_grads(False)
        return weight._local_tensor.view_as(weight._local_tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return distributed(gradient, ctx.spec)


def distributed(gradient: torch.Tensor | None, spec: Any) -> torch.Tensor | None:
    """Return a local gradient as a DTensor like its weight, with a contiguous local tensor and its own spec, as
    `to_local` does; or as it is, without a spec.
    """
    if gradient is None or spec is None:
        return gradient
    if gradient.is_contiguous():
        return DTensor.__new__(DTensor, gradient, copy.copy(spec), requires_grad=False)
    return DTensor.from_local(gradient, spec.mesh, spec.placements, run_check=False)
