"""The phases that bring blocks to the matmul: of all-gather + matmul, all-to-all + matmul, and backward of matmul +
reduce-scatter. `operations.py` combines them.

Phases: begin; blocks are sent chunk by chunk, beside the matmul of a rank's own rows; matmul pieces as chunks arrive;
end. In turn t a rank sends to its t-th neighbor below and receives from the t-th above, so every port is used once
per turn.
"""

from collections.abc import Callable, Sequence

from counterpoint.schedule.actions import FIRST_COMPUTE, Region
from counterpoint.schedule.builder import Arrivals, Builder, Rows, group_units, merged, region

# (sender, receiver) -> the sender's buffer, its first row there, the receiver's first row, and how many rows
Route = Callable[[int, int], tuple[str, int, int, int]]


def shard_route(builder: Builder) -> Route:
    """Return the route of an all-gather: a rank's whole shard goes to every rank, to the place of its block."""

    def route(sender: int, _receiver: int) -> tuple[str, int, int, int]:
        start, stop = builder.blocks[sender]
        return "shard", 0, start, stop - start

    return route


def token_route(builder: Builder) -> Route:
    """Return the route of an all-to-all: block d of a rank's tokens goes to rank d, which keeps blocks in rank order."""

    def route(sender: int, receiver: int) -> tuple[str, int, int, int]:
        start, stop = builder.blocks[receiver]
        return "shard", start, sender * (stop - start), stop - start

    return route


def place_own(builder: Builder, route: Route) -> list[int]:
    """Place each rank's own rows among the gathered ones, for a matmul that needs all rows in one piece."""
    positions = []
    for rank in range(builder.num_ranks):
        buffer, source_start, target_start, num_rows = route(rank, rank)
        rows = (0, num_rows)
        reads = merged([region(rank, buffer, source_start, rows)])
        writes = merged([region(rank, "gathered", target_start, rows)])
        positions.append(builder.add("place", FIRST_COMPUTE, rank, reads=reads, writes=writes))
    return positions


def weight_gradient(builder: Builder, operands: tuple[str, str], rows: Region, after: Sequence[int]) -> int:
    """Add the matmul over all `rows` of both operands that gives the weight's gradient."""
    rank = rows.rank
    reads = [Region(rank=rank, buffer=name, start=rows.start, stop=rows.stop) for name in operands]
    writes = [region(rank, "weight_gradient", 0, (0, builder.problem.num_inner))]
    return builder.add("weight_gradient", builder.compute_stream(rank), rank, reads=reads, writes=writes, after=after)


def send_all(builder: Builder, route: Route, begins: Sequence[int]) -> "Arrivals":
    """Send all blocks, without matmuls."""
    sends = Sends(builder, route, begins)
    for turn, chunk in builder.units():
        for rank in range(builder.num_ranks):
            sends.send(rank, turn, chunk)
    return sends.arrivals


def gather_and_multiply(builder: Builder, route: Route, begins: Sequence[int]) -> Arrivals:
    """Send all blocks, and multiply own and arrived rows in pieces."""
    sends = Sends(builder, route, begins)
    units = list(builder.units())
    local_first = builder.description.local == "first"
    for number, (turn, chunk) in enumerate(units):
        for rank in range(builder.num_ranks):
            sends.send(rank, turn, chunk)
        if number == 0 and local_first:
            _multiply_own(builder, route)
    if not units and local_first:
        _multiply_own(builder, route)
    for group in group_units(builder, units):
        for rank in range(builder.num_ranks):
            rows = merged(sends.target(rank, turn, chunk) for turn, chunk in group)
            if rows:
                _multiply(builder, rank, rows, sends.arrivals.of(rows))
    if not local_first:
        _multiply_own(builder, route)
    return sends.arrivals


class Sends:
    """The copies of a gather, and where their rows arrive."""

    def __init__(self, builder: Builder, route: Route, begins: Sequence[int]) -> None:
        self._builder, self._route, self._begins = builder, route, begins
        self.arrivals = Arrivals()

    def send(self, rank: int, turn: int, chunk: int) -> None:
        """Send the block of `rank` in this turn: its own, or in a ring the block that arrived in the previous turn."""
        builder, num_ranks = self._builder, self._builder.num_ranks
        is_ring = builder.description.pattern == "ring"
        receiver = (rank - (1 if is_ring else turn)) % num_ranks
        target = self.target(receiver, turn, chunk)
        if not target.num_rows:
            return
        after = [self._begins[rank]]
        if is_ring and turn > 1:
            source = Region(rank=rank, buffer="gathered", start=target.start, stop=target.stop)
            after += self.arrivals.of([source])
        else:
            buffer, source_start, target_start, _ = self._route(rank, receiver)
            offset = target.start - target_start
            source = region(rank, buffer, source_start, (offset, offset + target.num_rows))
        stream = builder.copy_stream(turn, chunk)
        position = builder.add("copy", stream, rank, reads=[source], writes=[target], after=after)
        self.arrivals.note(target, position)

    def target(self, receiver: int, turn: int, chunk: int) -> Region:
        """Return where the rows of a turn and chunk land; an empty region if the block has fewer chunks."""
        sender = (receiver + turn) % self._builder.num_ranks
        _, _, start, num_rows = self._route(sender, receiver)
        rows = dict(self._builder.chunks(num_rows)).get(chunk, (0, 0))
        return region(receiver, "gathered", start, rows)


def _multiply_own(builder: Builder, route: Route) -> None:
    for rank in range(builder.num_ranks):
        buffer, source_start, target_start, num_rows = route(rank, rank)
        if num_rows:
            rows: Rows = (0, num_rows)
            builder.add(
                "matmul",
                builder.compute_stream(rank),
                rank,
                reads=[region(rank, buffer, source_start, rows)],
                writes=[region(rank, "product", target_start, rows)],
            )


def _multiply(builder: Builder, rank: int, rows: Sequence[Region], after: Sequence[int]) -> None:
    products = [Region(rank=rank, buffer="product", start=each.start, stop=each.stop) for each in rows]
    builder.add("matmul", builder.compute_stream(rank), rank, reads=rows, writes=products, after=after)
