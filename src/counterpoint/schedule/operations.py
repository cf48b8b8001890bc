"""The operators as values: of each pass, which matrices a rank has, what its results hold, and which phases make its
schedule.

All code that looks up an operator by its name reads it here: generator, checks, estimate, heuristic, command line, messages
and benchmark. torch's definitions of the operators are in `ops/operators.py`. The phases themselves are in
`gather_schedules.py` (blocks go to the matmul) and `reduce_schedules.py` (blocks leave the matmul).
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from counterpoint.errors import ScheduleError
from counterpoint.schedule.actions import Home, Operation, Pass, Problem, Region
from counterpoint.schedule.builder import Builder, Rows, region, require_pattern
from counterpoint.schedule.gather_schedules import (
    gather_and_multiply,
    place_own,
    send_all,
    shard_route,
    token_route,
    weight_gradient,
)
from counterpoint.schedule.reduce_schedules import reduce_blocks, send_partials

Blocks = Sequence[Rows]
DIRECTIONS: tuple[Pass, ...] = ("forward", "backward")


class BufferDefinition(NamedTuple):
    """A matrix that every rank has. `rows`: of the undivided matrix, of the rank's own block, as many blocks of that length
    as there are ranks, or as many as a weight has."""

    name: str
    home: Home
    rows: Literal["all", "own", "received", "inner"]
    columns: Literal["inner", "columns"]

    def shape(self, problem: Problem, num_own_rows: int) -> tuple[int, int]:
        """Return rows and columns on a rank whose block has `num_own_rows`."""
        rows = {
            "all": problem.num_rows,
            "own": num_own_rows,
            "received": problem.num_ranks * num_own_rows,
            "inner": problem.num_inner,
        }
        return rows[self.rows], problem.num_inner if self.columns == "inner" else problem.num_columns


class Source(NamedTuple):
    """Rows of a given buffer of some rank, from row `start` on, times the weights of these ranks."""

    owner: int
    buffer: str
    start: int
    weights: tuple[int, ...] = ()


class Part(NamedTuple):
    """The next rows of a result: the sum of these sources."""

    num_rows: int
    sources: tuple[Source, ...]


Content = Callable[[Blocks, int], list[Part]]  # (every rank's rows of the undivided matrix, a rank) -> its result


class PassDefinition(NamedTuple):
    """One pass of an operator.

    `generate` adds the actions; `buffers` are declared before, and phases declare further ones. `product` is the content of
    a rank's result; `gathered` are the rows from which its weight's gradient is computed. `is_reduction`: matmul pieces are
    sent, and no piece can wait for all peers. The library needs `num_collectives`, in each of which the rows cross
    `num_crossings` times.
    """

    buffers: tuple[BufferDefinition, ...]
    generate: Callable[[Builder], None]
    product: Content
    is_reduction: bool
    gathered: Content | None = None
    num_collectives: int = 1
    num_crossings: int = 1


class OperatorDefinition(NamedTuple):
    """An operator. `left_name` is the callers' name of its left operand; a pass that is None copies nothing."""

    left_name: str
    forward: PassDefinition | None
    backward: PassDefinition | None
    takes_several_weights: bool = False

    def of_pass(self, direction: Pass) -> PassDefinition | None:
        """Return the definition of one pass; None if it copies nothing."""
        return self.forward if direction == "forward" else self.backward

    def passes(self) -> tuple[Pass, ...]:
        """Return the passes that have schedules."""
        return tuple(direction for direction in DIRECTIONS if self.of_pass(direction) is not None)


# --- what results hold ---


def _own_sum(blocks: Blocks, rank: int) -> list[Part]:
    """Return this rank's block of the sum of all ranks' products."""
    return [_sum_of(blocks[rank], len(blocks))]


def _whole_sum(blocks: Blocks, _rank: int) -> list[Part]:
    return [_sum_of((0, blocks[-1][1]), len(blocks))]


def _sum_of(rows: Rows, num_ranks: int) -> Part:
    return Part(rows[1] - rows[0], tuple(Source(each, "activation", rows[0], (each,)) for each in range(num_ranks)))


def _own_rows(blocks: Blocks, rank: int) -> list[Part]:
    num_rows = blocks[-1][1]
    return [Part(num_rows, (Source(rank, "left", 0),))]


def _all_shards(blocks: Blocks, _rank: int) -> list[Part]:
    return [Part(stop - start, (Source(owner, "shard", 0),)) for owner, (start, stop) in enumerate(blocks)]


def _tokens_for_rank(blocks: Blocks, rank: int) -> list[Part]:
    start, stop = blocks[rank]
    return [Part(stop - start, (Source(owner, "shard", start),)) for owner in range(len(blocks))]


def _returned_tokens(blocks: Blocks, rank: int) -> list[Part]:
    """Return, of every rank's gradients, those of the tokens that this rank sent there."""
    lengths = [stop - start for start, stop in blocks]
    return [Part(length, (Source(owner, "activation", rank * length, (owner,)),)) for owner, length in enumerate(lengths)]


def _times_own_weight(gathered: Content) -> Content:
    def product(blocks: Blocks, rank: int) -> list[Part]:
        return [
            Part(part.num_rows, tuple(source._replace(weights=(rank,)) for source in part.sources))
            for part in gathered(blocks, rank)
        ]

    return product


# --- which phases make their schedules ---


def _all_gather_matmul(builder: Builder) -> None:
    gather_and_multiply(builder, shard_route(builder), builder.begin())


def _all_gather_matmul_backward(builder: Builder) -> None:
    """Send the shards first, so that they arrive beside the matmul pieces; the weight gradient's matmul hides the last
    pieces' copies."""
    problem = builder.problem
    begins = builder.begin()
    route = shard_route(builder)
    places = place_own(builder, route)
    gathered = send_all(builder, route, begins)

    def multiply_gathered(rank: int) -> None:
        everything = region(rank, "gathered", 0, (0, problem.num_rows))
        weight_gradient(builder, ("gathered", "activation"), everything, [*gathered.of([everything]), places[rank]])

    reduce_blocks(builder, begins, [0] * builder.num_ranks, problem.num_inner, meanwhile=multiply_gathered)


def _matmul_reduce_scatter(builder: Builder) -> None:
    begins = builder.begin()
    reduce_blocks(builder, begins, [0] * builder.num_ranks, builder.problem.num_columns)


def _matmul_reduce_scatter_backward(builder: Builder) -> None:
    begins = builder.begin()
    route = shard_route(builder)
    places = place_own(builder, route)
    arrivals = gather_and_multiply(builder, route, begins)
    for rank in range(builder.num_ranks):
        everything = region(rank, "gathered", 0, (0, builder.problem.num_rows))
        weight_gradient(builder, ("activation", "gathered"), everything, [*arrivals.of([everything]), places[rank]])


def _matmul_all_reduce(builder: Builder) -> None:
    _place_landed(builder, _all_reduce(builder, builder.problem.num_columns))


def _column_parallel_matmul_backward(builder: Builder) -> None:
    """Sum the gradient of the left operand first: the weight gradient's matmul hides the copies that send the sums out."""
    problem = builder.problem
    pushed = _all_reduce(builder, problem.num_inner)
    for rank in range(builder.num_ranks):
        weight_gradient(builder, ("left", "activation"), region(rank, "left", 0, (0, problem.num_rows)), ())
    _place_landed(builder, pushed)


def _all_reduce(builder: Builder, num_columns: int) -> list[tuple[Region, int]]:
    """Send what reduce-scatter finishes to all peers, chunk by chunk. Return (target, copy)."""
    num_ranks = builder.num_ranks
    starts = [start for start, _ in builder.blocks]
    begins = builder.begin()
    pushed: list[tuple[Region, int]] = []

    def send_out(rank: int, rows: Rows, position: int) -> None:
        source = region(rank, "product", starts[rank], rows)
        for turn in range(1, num_ranks):
            target = region((rank - turn) % num_ranks, "reduced", starts[rank], rows)
            stream = builder.copy_stream(turn, turn)
            after = [position, begins[rank]]
            pushed.append((target, builder.add("copy", stream, rank, reads=[source], writes=[target], after=after)))

    reduce_blocks(builder, begins, starts, num_columns, finished=send_out)
    return pushed


def _all_to_all_matmul(builder: Builder) -> None:
    """Send block d of a rank's tokens to rank d."""
    require_pattern(builder, "one_peer", "all_peers")
    gather_and_multiply(builder, token_route(builder), builder.begin())


def _all_to_all_matmul_backward(builder: Builder) -> None:
    """Send tokens again, as in all-gather's backward pass, and send back the gradients of arrived tokens."""
    require_pattern(builder, "one_peer", "all_peers")
    num_ranks, blocks = builder.num_ranks, builder.blocks
    lengths = [stop - start for start, stop in blocks]

    def outgoing(rank: int, receiver: int, rows: Rows) -> tuple[Region, Region]:
        source = region(rank, "partial", receiver * lengths[rank], rows)
        return source, region(receiver, "returned", blocks[rank][0], rows)

    begins = builder.begin()
    route = token_route(builder)
    places = place_own(builder, route)
    gathered = send_all(builder, route, begins)
    arrivals = send_partials(builder, begins, outgoing, lambda rank, _receiver: lengths[rank])
    for rank in range(num_ranks):
        own = (0, lengths[rank])
        if lengths[rank]:
            reads = [region(rank, "activation", rank * lengths[rank], own)]
            writes = [region(rank, "product", blocks[rank][0], own)]
            builder.add("matmul", builder.compute_stream(rank), rank, reads=reads, writes=writes)
        everything = region(rank, "gathered", 0, (0, num_ranks * lengths[rank]))
        weight_gradient(builder, ("gathered", "activation"), everything, [*gathered.of([everything]), places[rank]])
    _place_landed(builder, arrivals)


def _place_landed(builder: Builder, arrivals: Sequence[tuple[Region, int]]) -> None:
    """Place the rows that arrived last in the product."""
    for target, position in arrivals:
        landed = Region(rank=target.rank, buffer="product", start=target.start, stop=target.stop)
        builder.add("place", "place 0", target.rank, reads=[target], writes=[landed], after=[position])


# --- the operators ---

OPERATORS: Mapping[Operation, OperatorDefinition] = MappingProxyType(
    {
        "all_gather_matmul": OperatorDefinition(
            left_name="shard",
            takes_several_weights=True,
            forward=PassDefinition(  # product = all-gather(shard) @ weight
                buffers=(
                    BufferDefinition("shard", "given", "own", "inner"),
                    BufferDefinition("gathered", "symmetric", "all", "inner"),
                    BufferDefinition("product", "result", "all", "columns"),
                ),
                generate=_all_gather_matmul,
                product=_times_own_weight(_all_shards),
                is_reduction=False,
            ),
            backward=PassDefinition(  # product = reduce-scatter(gradient @ weight^T); all-gather(shard)^T @ gradient
                buffers=(
                    BufferDefinition("shard", "given", "own", "inner"),
                    BufferDefinition("activation", "given", "all", "columns"),
                    BufferDefinition("gathered", "symmetric", "all", "inner"),
                    BufferDefinition("product", "result", "own", "inner"),
                    BufferDefinition("weight_gradient", "result", "inner", "columns"),
                ),
                generate=_all_gather_matmul_backward,
                product=_own_sum,
                is_reduction=True,
                gathered=_all_shards,
                num_collectives=2,  # the rows are gathered a second time, and their gradients are sent back
            ),
        ),
        "matmul_reduce_scatter": OperatorDefinition(
            left_name="activation",
            forward=PassDefinition(  # product = reduce-scatter(activation @ weight)
                buffers=(
                    BufferDefinition("activation", "given", "all", "inner"),
                    BufferDefinition("product", "result", "own", "columns"),
                ),
                generate=_matmul_reduce_scatter,
                product=_own_sum,
                is_reduction=True,
            ),
            backward=PassDefinition(  # product = all-gather(gradient) @ weight^T; activation^T @ all-gather(gradient)
                buffers=(
                    BufferDefinition("shard", "given", "own", "columns"),
                    BufferDefinition("activation", "given", "all", "inner"),
                    BufferDefinition("gathered", "symmetric", "all", "columns"),
                    BufferDefinition("product", "result", "all", "inner"),
                    BufferDefinition("weight_gradient", "result", "inner", "columns"),
                ),
                generate=_matmul_reduce_scatter_backward,
                product=_times_own_weight(_all_shards),
                is_reduction=False,
                gathered=_all_shards,
            ),
        ),
        "matmul_all_reduce": OperatorDefinition(
            left_name="activation",
            forward=PassDefinition(  # product = all-reduce(activation @ weight)
                buffers=(
                    BufferDefinition("activation", "given", "all", "inner"),
                    BufferDefinition("product", "result", "all", "columns"),
                    BufferDefinition("reduced", "symmetric", "all", "columns"),
                ),
                generate=_matmul_all_reduce,
                product=_whole_sum,
                is_reduction=True,
                num_crossings=2,  # a reduce-scatter and an all-gather
            ),
            backward=None,  # the product's gradient is the same on every rank
        ),
        "column_parallel_matmul": OperatorDefinition(
            left_name="activation",
            takes_several_weights=True,
            forward=None,  # product = activation @ weight: every rank has the whole activation
            backward=PassDefinition(  # product = all-reduce(gradient @ weight^T); activation^T @ gradient
                buffers=(
                    BufferDefinition("left", "given", "all", "inner"),
                    BufferDefinition("activation", "given", "all", "columns"),
                    BufferDefinition("product", "result", "all", "inner"),
                    BufferDefinition("reduced", "symmetric", "all", "inner"),
                    BufferDefinition("weight_gradient", "result", "inner", "columns"),
                ),
                generate=_column_parallel_matmul_backward,
                product=_whole_sum,
                is_reduction=True,
                gathered=_own_rows,
                num_crossings=2,
            ),
        ),
        "all_to_all_matmul": OperatorDefinition(
            left_name="tokens",
            forward=PassDefinition(  # product = all-to-all(tokens) @ weight
                buffers=(
                    BufferDefinition("shard", "given", "all", "inner"),
                    BufferDefinition("gathered", "symmetric", "received", "inner"),
                    BufferDefinition("product", "result", "received", "columns"),
                ),
                generate=_all_to_all_matmul,
                product=_times_own_weight(_tokens_for_rank),
                is_reduction=False,
            ),
            backward=PassDefinition(  # product = all-to-all(gradient @ weight^T); all-to-all(tokens)^T @ gradient
                buffers=(
                    BufferDefinition("shard", "given", "all", "inner"),
                    BufferDefinition("activation", "given", "received", "columns"),
                    BufferDefinition("gathered", "symmetric", "received", "inner"),
                    BufferDefinition("partial", "local", "received", "inner"),
                    BufferDefinition("returned", "symmetric", "all", "inner"),
                    BufferDefinition("product", "result", "all", "inner"),
                    BufferDefinition("weight_gradient", "result", "inner", "columns"),
                ),
                generate=_all_to_all_matmul_backward,
                product=_returned_tokens,
                is_reduction=True,
                gathered=_tokens_for_rank,
                num_collectives=2,
            ),
        ),
    }
)


def scheduled_pass(operation: Operation, direction: Pass) -> PassDefinition:
    """Return the definition of a pass that has schedules. Raises `ScheduleError` for a pass that copies nothing."""
    definition = OPERATORS[operation].of_pass(direction)
    if definition is None:
        raise ScheduleError(
            f"{operation} copies nothing in its {direction} pass, so it has no schedule. Use the "
            f"{'forward' if direction == 'backward' else 'backward'} pass."
        )
    return definition


def only_reduces(problem: Problem, direction: Pass) -> bool:
    """Return whether a pass sends products, and no matmul of it takes in rows of other ranks."""
    definition = OPERATORS[problem.operation].of_pass(direction)
    if definition is None or not definition.is_reduction:
        return False
    return all(buffer.name != "gathered" for buffer in definition.buffers)


def most_block_bytes(problem: Problem) -> int:
    """Return what the ranks with the largest blocks send to a peer, in forward if that pass copies anything."""
    return -(-problem.num_rows // problem.num_ranks) * num_sent_columns(problem) * problem.element_bytes


def num_sent_columns(problem: Problem) -> int:
    """Return the columns of the rows sent in forward: those of the product if it is reduced, else of the left operand,
    whose gradient is sent where forward copies nothing.
    """
    forward = OPERATORS[problem.operation].forward
    return problem.num_columns if forward is not None and forward.is_reduction else problem.num_inner
