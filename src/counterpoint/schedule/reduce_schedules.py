"""The phases in which blocks leave the matmul: of matmul + reduce-scatter, matmul + all-reduce, and the backward passes
that need them. `operations.py` combines them.

Direct patterns: matmul pieces for other ranks come first; each goes to its rank, which stores the W partial products
separately and adds them up in rank order, once, in the accumulation precision of a sum. Ring: a block is sent from rank to
rank, and each adds its part inside its matmul, so there is no sum and no second buffer; the block is rounded once per rank,
as in NCCL's ring. Phases: begin; pieces and their copies; a rank's own piece last, which hides the last copies; sums; end.
"""

from collections.abc import Callable, Sequence

from counterpoint.machine import ELEMENT_BYTES
from counterpoint.schedule.actions import Region
from counterpoint.schedule.builder import (
    Arrivals,
    Builder,
    Rows,
    group_units,
    merged,
    region,
    require_granularity,
)

# (rank, rows of its own block, position of the action that finished them)
Finished = Callable[[int, Rows, int], None]
Meanwhile = Callable[[int], None]  # (rank)


def reduce_blocks(
    builder: Builder,
    begins: Sequence[int],
    product_starts: Sequence[int],
    num_columns: int,
    *,
    finished: Finished | None = None,
    meanwhile: Meanwhile | None = None,
) -> None:
    """Add matmul pieces of all blocks, each reduced into its rank's `product` from row `product_starts[rank]` on.

    `finished` is called with rows of the product as they are issued; `meanwhile` may add a rank's other work before its
    own block.
    """
    if builder.description.pattern == "ring":
        _reduce_in_matmul(builder, begins, product_starts, num_columns, finished=finished, meanwhile=meanwhile)
        return
    num_ranks, longest = builder.num_ranks, _longest(builder)
    builder.buffer("partial", "local", builder.problem.num_rows, num_columns)
    builder.buffer("staging", "symmetric", num_ranks * longest, num_columns)

    def route(rank: int, receiver: int, rows: Rows) -> tuple[Region, Region]:
        source = region(rank, "partial", builder.blocks[receiver][0], rows)
        return source, region(receiver, "staging", rank * longest, rows)

    arrivals = Arrivals()
    for target, position in send_partials(builder, begins, route, lambda _rank, receiver: _length(builder, receiver)):
        arrivals.note(target, position)
    for rank in range(num_ranks):
        if meanwhile:
            meanwhile(rank)
    for rows_of in _own_pieces(builder):
        for rank in range(num_ranks):
            rows = rows_of(rank)
            if rows[0] < rows[1]:
                position = _multiply_and_sum(builder, arrivals, rank, rows, product_starts[rank])
                if finished:
                    finished(rank, rows, position)


def send_partials(
    builder: Builder,
    begins: Sequence[int],
    route: Callable[[int, int, Rows], tuple[Region, Region]],
    length: Callable[[int, int], int],
) -> list[tuple[Region, int]]:
    """Add matmul pieces for other ranks and their copies, which are issued one step later, after the next piece. Return
    (target, copy)."""
    require_granularity(builder, "chunk", "peer", "fused")
    num_ranks = builder.num_ranks
    sent: list[tuple[Region, int]] = []
    waiting: list[tuple[int, str, Region, Region, int]] = []

    def flush() -> None:
        for rank, stream, source, target, position in waiting:
            copy = builder.add("copy", stream, rank, reads=[source], writes=[target], after=[position, begins[rank]])
            sent.append((target, copy))
        waiting.clear()

    for group in group_units(builder, builder.units()):
        fresh = []
        for rank in range(num_ranks):
            pairs = []
            for turn, chunk in group:
                receiver = (rank - turn) % num_ranks
                rows = dict(builder.chunks(length(rank, receiver))).get(chunk, (0, 0))
                if rows[0] < rows[1]:
                    pairs.append((builder.copy_stream(turn, chunk), *route(rank, receiver, rows)))
            if not pairs:
                continue
            written = merged(source for _, source, _ in pairs)
            position = builder.add(
                "matmul",
                builder.compute_stream(rank),
                rank,
                reads=[Region(rank=rank, buffer="activation", start=each.start, stop=each.stop) for each in written],
                writes=written,
            )
            fresh += [(rank, stream, source, target, position) for stream, source, target in pairs]
        flush()
        waiting += fresh
    flush()
    return sent


def _multiply_and_sum(builder: Builder, arrivals: Arrivals, rank: int, rows: Rows, product_start: int) -> int:
    """Add the matmul of a rank's own rows, then its sum with what arrived from the others."""
    longest = _longest(builder)
    stream = builder.compute_stream(rank)
    own = region(rank, "staging", rank * longest, rows)
    activation = region(rank, "activation", builder.blocks[rank][0], rows)
    builder.add("matmul", stream, rank, reads=[activation], writes=[own])
    parts = [region(rank, "staging", other * longest, rows) for other in range(builder.num_ranks)]
    target = region(rank, "product", product_start, rows)
    return builder.add("sum", stream, rank, reads=parts, writes=[target], after=arrivals.of(parts))


def _reduce_in_matmul(
    builder: Builder,
    begins: Sequence[int],
    product_starts: Sequence[int],
    num_columns: int,
    *,
    finished: Finished | None,
    meanwhile: Meanwhile | None,
) -> None:
    """Add the ring: block b starts at rank b - 1, goes down from rank to rank, and ends at rank b, which returns it."""
    require_granularity(builder, "chunk")
    num_ranks, blocks = builder.num_ranks, builder.blocks
    builder.buffer("partial", "local", _longest(builder), num_columns)
    builder.buffer("accumulated", "symmetric", builder.problem.num_rows, num_columns)
    arrivals = Arrivals()
    for step in range(num_ranks):
        if step == num_ranks - 1 and meanwhile:
            for rank in range(num_ranks):
                meanwhile(rank)
        for chunk in range(builder.description.chunks):
            for rank in range(num_ranks):
                block = (rank + 1 + step) % num_ranks
                rows = dict(builder.chunks(_length(builder, block))).get(chunk, (0, 0))
                if rows[0] == rows[1]:
                    continue
                here = region(rank, "accumulated", blocks[block][0], rows)
                if step == num_ranks - 1:
                    target = region(rank, "product", product_starts[rank], rows)
                    position = _finish(builder, arrivals, here, target)
                    if finished:
                        finished(rank, rows, position)
                    continue
                source, position = _accumulate(builder, arrivals, here, rows, is_first=step == 0)
                sent = region((rank - 1) % num_ranks, "accumulated", blocks[block][0], rows)
                stream = builder.copy_stream(1, chunk)
                arrivals.note(
                    sent, builder.add("copy", stream, rank, reads=[source], writes=[sent], after=[position, begins[rank]])
                )


def _accumulate(builder: Builder, arrivals: Arrivals, here: Region, rows: Rows, *, is_first: bool) -> tuple[Region, int]:
    """Add a rank's part of a chunk in transit; return the rows to send on, and the action that finished them."""
    if is_first:
        target = region(here.rank, "partial", 0, rows)
        return target, _multiply(builder, here, target)
    return here, _multiply(builder, here, here, arrivals.of([here]))


def _finish(builder: Builder, arrivals: Arrivals, here: Region, target: Region) -> int:
    """Add the last part of a chunk: the product is what arrived plus the rank's own part.

    A matmul of half precision adds both in one kernel. For other types torch would copy first what arrived, so it is placed
    in the product at once, beside other matmuls.
    """
    came = arrivals.of([here])
    if not came or builder.problem.element_bytes == ELEMENT_BYTES["bf16"]:
        return _multiply(builder, here, target, came)
    placed = builder.add("place", "place 0", here.rank, reads=[here], writes=[target], after=came)
    return _multiply(builder, here, target, [placed], added=target)


def _multiply(
    builder: Builder, here: Region, target: Region, after: Sequence[int] = (), *, added: Region | None = None
) -> int:
    """Add the matmul of a rank's part of a chunk, which writes `target`. If the chunk arrived by the actions `after`, the
    matmul adds to it, or to `added`."""
    activation = Region(rank=here.rank, buffer="activation", start=here.start, stop=here.stop)
    stream = builder.compute_stream(here.rank)
    if after:
        return builder.add("add_matmul", stream, here.rank, reads=[activation, added or here], writes=[target], after=after)
    return builder.add("matmul", stream, here.rank, reads=[activation], writes=[target])


def _own_pieces(builder: Builder) -> list[Callable[[int], Rows]]:
    """Return the pieces in which a rank multiplies its own block: the whole block if matmuls are whole blocks, else
    chunks."""
    if builder.description.matmul == "peer":
        return [lambda rank: (0, _length(builder, rank))]
    numbers = range(builder.description.chunks)
    return [
        lambda rank, number=number: dict(builder.chunks(_length(builder, rank))).get(number, (0, 0))  # type: ignore[misc]
        for number in numbers
    ]


def _length(builder: Builder, rank: int) -> int:
    start, stop = builder.blocks[rank]
    return stop - start


def _longest(builder: Builder) -> int:
    return max(stop - start for start, stop in builder.blocks)
