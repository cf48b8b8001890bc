"""Schedules of the operators for experts: tokens go to their experts and back in uneven blocks, beside grouped matmuls.

A rank's experts are in groups. The first group's rows are sent first. A grouped matmul processes a group when all ranks'
rows for it have arrived, while the next group's rows arrive. A group's results are sent when it is done, while the next
group is computed. Each rank places its own rows among the others'. `expert_layout.py` determines which rows these are;
nothing here depends on a machine.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from counterpoint.errors import ScheduleError
from counterpoint.schedule.actions import MAX_SIZE, Buffer, CopySchedule, ExpertOperation, Home, Region
from counterpoint.schedule.builder import ActionList
from counterpoint.schedule.description import ScheduleDescription
from counterpoint.schedule.expert_layout import Block, ExpertLayout, ExpertRange, counts_of
from counterpoint.schedule.routing import Routing
from counterpoint.value import Value, require

PLACES = "place 0"
T = TypeVar("T")
Part = tuple[int, int, int]  # source, destination, number of the destination's group


class ExpertProblem(Value, frozen=True, kw_only=True):
    """The sizes of one operator call for experts: rows of `num_inner` columns, experts of `num_hidden` hidden columns.

    `is_gated`: the first matmul has two weights, and the activation multiplies their products. Each half operator has the
    columns that it has in the whole layer.
    """

    operation: ExpertOperation
    routing: Routing
    num_inner: int
    num_hidden: int
    is_gated: bool = True
    element_bytes: int = 2

    def __post_init__(self) -> None:
        for name in ("num_inner", "num_hidden", "element_bytes"):
            number = getattr(self, name)
            require(
                0 < number <= MAX_SIZE,
                ScheduleError,
                f"{name} must be from 1 to {MAX_SIZE:,}; found {number:,}. Give the sizes of one expert's matrices.",
            )

    @property
    def num_first_columns(self) -> int:
        """Number of columns of the first matmul's result."""
        return self.num_hidden * (2 if self.is_gated else 1)


class _Stages(NamedTuple):
    """Which stages an operator has for a piece."""

    is_dispatched: bool
    is_combined: bool


STAGES: dict[ExpertOperation, _Stages] = {
    "dispatch_grouped_matmul": _Stages(is_dispatched=True, is_combined=False),
    "grouped_matmul_combine": _Stages(is_dispatched=False, is_combined=True),
    "expert_ffn": _Stages(is_dispatched=True, is_combined=True),
}


def make_expert_schedule(problem: ExpertProblem, description: ScheduleDescription) -> CopySchedule:
    """Return the schedule of `description` for these rows. Raises `ScheduleError` for choices that have no use here."""
    _require_description(description)
    made = _Layer(problem, description)
    if STAGES[problem.operation].is_dispatched:
        made.send()
        made.place_own()
    made.compute()
    made.actions.end()
    routing = problem.routing
    return CopySchedule(
        operation=problem.operation,
        description=description,
        num_ranks=routing.num_ranks,
        num_rows=sum(routing.num_sent(rank) for rank in range(routing.num_ranks)),
        buffers=tuple(_buffers(problem)),
        actions=tuple(made.actions.actions),
        routing=routing,
    )


def _require_description(description: ScheduleDescription) -> None:
    found = description.pattern, description.along, description.matmul
    require(
        found == ("all_peers", "experts", "fused"),
        ScheduleError,
        f"Experts need the pattern all_peers, cuts along experts, and the fused matmul; found {found[0]}, "
        f"{found[1]} and {found[2]}. Choose these.",
    )
    require(
        description.chunk_growth == 1 and description.num_compute_streams == 1,
        ScheduleError,
        "Groups of experts have about equal numbers of rows and run on one computation stream; found "
        f"chunk_growth {description.chunk_growth:g} and {description.num_compute_streams} streams. Choose 1 and "
        "1.",
    )


def _buffers(problem: ExpertProblem) -> Iterator[Buffer]:
    routing, stages = problem.routing, STAGES[problem.operation]
    ranks = range(routing.num_ranks)
    sent, grouped = [routing.num_sent(rank) for rank in ranks], [routing.num_grouped(rank) for rank in ranks]
    returning = [routing.num_returning(rank) for rank in ranks]

    def buffer(name: str, home: Home, rows: Sequence[int], num_columns: int) -> Buffer:
        return Buffer(name=name, home=home, num_rows=max(rows), num_columns=num_columns, rank_rows=tuple(rows))

    inner = problem.num_inner
    if stages.is_dispatched:
        yield buffer("tokens", "given", sent, inner)
        yield buffer("landed", "symmetric", grouped, inner)
    if stages.is_dispatched and stages.is_combined:
        yield buffer("hidden", "local", grouped, problem.num_first_columns)
        yield buffer("inputs", "local", grouped, problem.num_hidden)
    if stages.is_combined:
        if not stages.is_dispatched:
            yield buffer("inputs", "given", grouped, problem.num_hidden)
        yield buffer("partial", "local", grouped, inner)
        yield buffer("returned", "symmetric", returning, inner)
        yield buffer("product", "result", sent, inner)
    else:
        yield buffer("product", "result", grouped, problem.num_first_columns)


class _Layer:
    """The actions of all ranks for one call, stage by stage."""

    def __init__(self, problem: ExpertProblem, description: ScheduleDescription) -> None:
        ranks = range(problem.routing.num_ranks)
        counts = counts_of(problem.routing)
        self.actions = ActionList(len(ranks), description)
        self._stages = STAGES[problem.operation]
        self._num_streams = description.num_copy_streams
        self._layouts = [ExpertLayout(counts, rank, description.chunks) for rank in ranks]
        self._begins = self.actions.begin()
        self._there: dict[Part, int] = {}  # the action that copies these rows to their experts

    def send(self) -> None:
        """Send all rows for other ranks, those for the first groups first, on all ranks in parallel."""
        for layout, (peer, number) in self._in_turns([list(layout.outgoing()) for layout in self._layouts]):
            blocks = list(layout.blocks(layout.rank, peer, number))
            self._there[layout.rank, peer, number] = self.actions.add(
                "copy",
                self._copy_stream(layout.rank, peer),
                layout.rank,
                reads=[_sent(layout.rank, "tokens", block) for block in blocks],
                writes=[_placed(peer, "landed", block) for block in blocks],
                after=[self._begins[layout.rank]],
            )

    def place_own(self) -> None:
        """Place each rank's own rows among the others'."""
        for layout, group in self._in_turns([layout.groups for layout in self._layouts]):
            rank = layout.rank
            if blocks := list(layout.blocks(rank, rank, group.number)):
                self._there[rank, rank, group.number] = self.actions.add(
                    "place",
                    PLACES,
                    rank,
                    reads=[_sent(rank, "tokens", block) for block in blocks],
                    writes=[_placed(rank, "landed", block) for block in blocks],
                    after=[self._begins[rank]],  # the previous call's readers have ended
                )

    def compute(self) -> None:
        """Compute group by group; if results are returned, send each group's at once."""
        returned: list[tuple[Part, int, int]] = []
        for layout, group in self._in_turns([layout.groups for layout in self._layouts]):
            if not layout.num_rows:
                continue
            if self._stages.is_dispatched:
                self._multiply_first(layout, group)
            if self._stages.is_combined:
                returned += self._return(layout, group, self._multiply_second(layout, group))
        for (source, destination, number), copy, start in returned:
            blocks = list(self._layouts[source].blocks(source, destination, number))
            rows = sum(block.num_rows for block in blocks)
            self.actions.add(
                "place",
                PLACES,
                source,
                reads=[_region(source, "returned", start, rows)],
                writes=[_region(source, "product", blocks[0].sent, rows)],
                after=[copy],
            )

    def _return(self, layout: ExpertLayout, group: ExpertRange, made: int) -> Iterator[tuple[Part, int, int]]:
        """Send results to their sources, own ones to the product; yield (part, copy, first row where it lands)."""
        rank, number = layout.rank, group.number
        for source in layout.sources(number):
            blocks = list(layout.blocks(source, rank, number))
            start = self._layouts[source].returned(source, rank, number)
            copy = self.actions.add(
                "copy",
                self._copy_stream(rank, source),
                rank,
                reads=[_placed(rank, "partial", block) for block in blocks],
                writes=[
                    _region(source, "returned", start + block.sent - blocks[0].sent, block.num_rows) for block in blocks
                ],
                after=[made, self._begins[rank]],
            )
            yield (source, rank, number), copy, start
        if own := list(layout.blocks(rank, rank, number)):
            reads = [_placed(rank, "partial", block) for block in own]
            writes = [_sent(rank, "product", block) for block in own]
            self.actions.add("place", PLACES, rank, reads=reads, writes=writes, after=[made])

    def _multiply_first(self, layout: ExpertLayout, group: ExpertRange) -> None:
        rank = layout.rank
        there = [
            self._there[part]
            for source in (rank, *layout.sources(group.number))
            if (part := (source, rank, group.number)) in self._there
        ]
        rows = _group_rows(rank, "landed", group)
        target = _group_rows(rank, "hidden" if self._stages.is_combined else "product", group)
        stream = self.actions.compute_stream(rank)
        self.actions.add(
            "matmul", stream, rank, reads=[rows], writes=[target], after=there, expert_rows=_expert_rows(layout, group)
        )
        if self._stages.is_combined:
            self.actions.add("activate", stream, rank, reads=[target], writes=[_group_rows(rank, "inputs", group)])

    def _multiply_second(self, layout: ExpertLayout, group: ExpertRange) -> int:
        rank = layout.rank
        return self.actions.add(
            "matmul",
            self.actions.compute_stream(rank),
            rank,
            reads=[_group_rows(rank, "inputs", group)],
            writes=[_group_rows(rank, "partial", group)],
            expert_rows=_expert_rows(layout, group),
            layer=1,
        )

    def _copy_stream(self, sender: int, receiver: int) -> str:
        """Return the copy stream for a peer, its own if possible, so that a large block does not delay other peers'."""
        return f"copy {((sender - receiver) % len(self._layouts) - 1) % self._num_streams}"

    def _in_turns(self, lines: Sequence[Sequence[T]]) -> Iterator[tuple[ExpertLayout, T]]:
        """Yield the first element of every rank, then the second, and so on: all ranks can issue in this order."""
        for turn in range(max(map(len, lines), default=0)):
            for layout, line in zip(self._layouts, lines, strict=True):
                if turn < len(line):
                    yield layout, line[turn]


def _region(rank: int, buffer: str, start: int, num_rows: int) -> Region:
    return Region(rank=rank, buffer=buffer, start=start, stop=start + num_rows)


def _sent(rank: int, buffer: str, block: Block) -> Region:
    return _region(rank, buffer, block.sent, block.num_rows)


def _placed(rank: int, buffer: str, block: Block) -> Region:
    return _region(rank, buffer, block.placed, block.num_rows)


def _group_rows(rank: int, buffer: str, group: ExpertRange) -> Region:
    return Region(rank=rank, buffer=buffer, start=group.rows.start, stop=group.rows.stop)


def _expert_rows(layout: ExpertLayout, group: ExpertRange) -> tuple[int, ...]:
    """Return the rows of every expert of the rank, 0 for experts outside of this group."""
    totals = layout.counts[:, layout.rank].sum(0)
    inside = range(group.experts.start, group.experts.stop)
    return tuple(int(totals[expert]) if expert in inside else 0 for expert in range(layout.num_experts))
