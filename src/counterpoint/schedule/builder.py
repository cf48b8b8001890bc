"""Shared code of the generators: adds actions in issue order, with their streams, and the phases of a call.

A phase is all-gather (blocks are sent, matmul pieces consume them) or reduce (matmul pieces are sent, sums or accumulating
matmuls consume them). Every loop runs over turns first and ranks second, so that all ranks can issue in the resulting
order.
"""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from counterpoint.errors import ScheduleError
from counterpoint.schedule.actions import (
    COMPUTATION_KINDS,
    FIRST_COMPUTE,
    Action,
    Buffer,
    CopySchedule,
    Home,
    Kind,
    Pass,
    Problem,
    Region,
    graded,
    split,
)
from counterpoint.schedule.description import ScheduleDescription
from counterpoint.units import format_choice
from counterpoint.value import require

Rows = tuple[int, int]


class ActionList:
    """Collects the actions of all ranks."""

    def __init__(self, num_ranks: int, description: ScheduleDescription) -> None:
        self.num_ranks, self.description = num_ranks, description
        self.actions: list[Action] = []
        self._num_pieces = [0] * num_ranks
        self._begins: list[int] = []
        self._streams: list[set[str]] = [set() for _ in range(num_ranks)]

    def add(
        self,
        kind: Kind,
        stream: str,
        rank: int,
        *,
        reads: Sequence[Region] = (),
        writes: Sequence[Region] = (),
        after: Iterable[int] = (),
        expert_rows: tuple[int, ...] = (),
        layer: int = 0,
    ) -> int:
        """Add an action and return its position. Of several predecessors on one stream, only the last is recorded.

        The first piece on a second computation stream comes after its rank's `begin` at least: if it were ready together
        with the first piece, the hardware could run it before that piece, whose rows would then be sent late. (In a graph
        `begin` has often ended by then; there the transport orders the launches.)
        """
        after = list(after)
        if kind in COMPUTATION_KINDS and stream not in {FIRST_COMPUTE, *self._streams[rank]} and not after:
            after = [self._begins[rank]]
        self._streams[rank].add(stream)
        latest: dict[tuple[int, str], int] = {}
        for position in after:
            earlier = self.actions[position]
            if (earlier.rank, earlier.stream) != (rank, stream):
                key = (earlier.rank, earlier.stream)
                latest[key] = max(position, latest.get(key, position))
        self.actions.append(
            Action(
                kind=kind,
                rank=rank,
                stream=stream,
                reads=tuple(reads),
                writes=tuple(writes),
                after=tuple(sorted(latest.values())),
                expert_rows=expert_rows,
                layer=layer,
            )
        )
        return len(self.actions) - 1

    def compute_stream(self, rank: int) -> str:
        """Return the stream of this rank's next matmul piece; the streams alternate."""
        self._num_pieces[rank] += 1
        return f"compute {(self._num_pieces[rank] - 1) % self.description.num_compute_streams}"

    def begin(self) -> list[int]:
        """Add every rank's `begin`."""
        self._begins = [self.add("begin", "copy 0", rank) for rank in range(self.num_ranks)]
        return self._begins

    def end(self) -> None:
        """Add every rank's `end`, after all actions that the rank issued.

        A rank is also signalled in every call by ranks that send it nothing, when they begin. Otherwise a fast rank
        could end this call before a slow one has begun it, and signal a second time before the slow one has received the
        first signal.
        """
        positions: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for position, action in enumerate(self.actions):
            positions[action.rank].append(position)
        for rank, own in enumerate(positions):
            heard = {self.actions[before].rank for position in own for before in self.actions[position].after}
            silent = [begin for peer, begin in enumerate(self._begins) if peer not in heard and peer != rank]
            self.add("end", FIRST_COMPUTE, rank, after=[*own, *silent])


class Builder(ActionList):
    """Collects the actions of all ranks, and their buffers, for an operator with equal blocks."""

    def __init__(self, problem: Problem, description: ScheduleDescription) -> None:
        super().__init__(problem.num_ranks, description)
        self.problem = problem
        self.blocks = split(problem.num_rows, problem.num_ranks)
        self.buffers: list[Buffer] = []

    def buffer(self, name: str, home: Home, num_rows: int, num_columns: int) -> None:
        """Declare a buffer that every rank has."""
        self.buffers.append(Buffer(name=name, home=home, num_rows=num_rows, num_columns=num_columns))

    def chunks(self, num_rows: int) -> tuple[tuple[int, Rows], ...]:
        """Return the chunks of a block with their numbers, without empty ones."""
        parts = graded(num_rows, self.description.chunks, self.description.chunk_growth)
        return tuple((number, rows) for number, rows in enumerate(parts) if rows[0] < rows[1])

    def units(self) -> Iterator[tuple[int, int]]:
        """Yield (turn, chunk) in the order of the pattern: turn t is the exchange with the t-th neighbor."""
        turns, chunks = range(1, self.num_ranks), range(self.description.chunks)
        if self.description.pattern == "all_peers":
            yield from ((turn, chunk) for chunk in chunks for turn in turns)
        else:
            yield from ((turn, chunk) for turn in turns for chunk in chunks)

    def copy_stream(self, turn: int, chunk: int) -> str:
        """Return the stream of a copy: with several streams, they alternate over peers or chunks, whichever changes
        fastest.
        """
        number = turn - 1 if self.description.pattern == "all_peers" else chunk
        return f"copy {number % self.description.num_copy_streams}"

    def finish(self, operation_pass: Pass, num_rows: int) -> CopySchedule:
        """Add every rank's `end`, and return the schedule for `num_rows` of the undivided matrix."""
        self.end()
        return CopySchedule(
            operation=self.problem.operation,
            direction=operation_pass,
            description=self.description,
            num_ranks=self.num_ranks,
            num_rows=num_rows,
            buffers=tuple(self.buffers),
            actions=tuple(self.actions),
        )


class Arrivals:
    """Records which copy brought which rows of a rank's buffer. No row arrives twice."""

    def __init__(self) -> None:
        self._entries: defaultdict[tuple[int, str], list[tuple[int, int, int]]] = defaultdict(list)  # by rank and buffer

    def note(self, region: Region, position: int) -> None:
        """Record that the copy at `position` writes `region`."""
        insort(self._entries[region.rank, region.buffer], (region.start, region.stop, position))

    def of(self, regions: Iterable[Region]) -> list[int]:
        """Return the positions of the copies that write any of these rows."""
        found: list[int] = []
        for wanted in regions:
            entries = self._entries[wanted.rank, wanted.buffer]
            first = bisect_right(entries, wanted.start, key=lambda entry: entry[1])
            last = bisect_left(entries, wanted.stop, key=lambda entry: entry[0])
            found += [position for _, _, position in entries[first:last]]
        return found


def region(rank: int, buffer: str, start: int, rows: Rows) -> Region:
    """Return `rows` of a block that begins at row `start`."""
    return Region(rank=rank, buffer=buffer, start=start + rows[0], stop=start + rows[1])


def group_units(builder: Builder, units: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Return the units that one matmul piece consumes, in order of the last arrival of each group."""
    granularity = builder.description.matmul
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    last: dict[tuple[int, int], int] = {}
    for number, (turn, chunk) in enumerate(units):
        key = {"chunk": (turn, chunk), "peer": (turn, 0), "fused": (0, chunk), "rest": (0, 0)}[granularity]
        groups.setdefault(key, []).append((turn, chunk))
        last[key] = number
    return [groups[key] for key in sorted(groups, key=lambda each: last[each])]


def require_granularity(builder: Builder, *allowed: str) -> None:
    """Raise `ScheduleError` for a matmul granularity that a pattern does not support."""
    description = builder.description
    require(
        description.matmul in allowed,
        ScheduleError,
        f"{builder.problem.operation} with the pattern '{description.pattern}' takes matmul granularity "
        f"{format_choice(allowed)}; found '{description.matmul}'. Choose one of these.",
    )


def require_pattern(builder: Builder, *allowed: str) -> None:
    """Raise `ScheduleError` for a pattern that an operation does not support."""
    pattern = builder.description.pattern
    require(
        pattern in allowed,
        ScheduleError,
        f"{builder.problem.operation} takes the pattern {format_choice(allowed)}; found '{pattern}'. Choose one of these.",
    )


def merged(regions: Iterable[Region]) -> tuple[Region, ...]:
    """Return regions of one rank's buffer in the order of rows, joined where they touch, without empty ones."""
    joined: list[Region] = []
    for each in sorted((each for each in regions if each.num_rows), key=lambda each: each.start):
        if joined and joined[-1].stop == each.start:
            joined[-1] = Region(rank=each.rank, buffer=each.buffer, start=joined[-1].start, stop=each.stop)
        else:
            joined.append(each)
    return tuple(joined)
