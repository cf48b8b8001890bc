"""Schedules of the operators for experts: tokens go to their experts and back in uneven blocks, beside grouped matmuls.

A rank's experts are in groups. Rows of the first group leave first; a grouped matmul takes a group when all ranks' rows for
it are there, while the next group's rows come; results leave when their group is done, while the next is computed. Own rows
are placed among the others' by the rank itself. Which rows these are is in `expert_layout.py`; nothing here is particular to
a machine.
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

    `is_gated`: the first matmul has two weights, and the activation multiplies what they make. Each half operator takes the
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
        """Columns that the first matmul makes."""
        return self.num_hidden * (2 if self.is_gated else 1)


class _Stages(NamedTuple):
    """What an operator does with a piece."""

    is_dispatched: bool
    is_combined: bool


STAGES: dict[ExpertOperation, _Stages] = {
    "dispatch_grouped_matmul": _Stages(is_dispatched=True, is_combined=False),
    "grouped_matmul_combine": _Stages(is_dispatched=False, is_combined=True),
    "expert_ffn": _Stages(is_dispatched=True, is_combined=True),
}


def make_expert_schedule(problem: ExpertProblem, description: ScheduleDescription) -> CopySchedule:
    """The schedule that `description` means for these rows. Raises `ScheduleError` for choices without a use here."""
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
    """The actions of one call, stage by stage, of all ranks."""

    def __init__(self, problem: ExpertProblem, description: ScheduleDescription) -> None:
        ranks = range(problem.routing.num_ranks)
        counts = counts_of(problem.routing)
        self.actions = ActionList(len(ranks), description)
        self._stages = STAGES[problem.operation]
        self._num_streams = description.num_copy_streams
        self._layouts = [ExpertLayout(counts, rank, description.chunks) for rank in ranks]
        self._begins = self.actions.begin()
        self._there: dict[Part, int] = {}  # the action that brings these rows to their experts

    def send(self) -> None:
        """All rows for other ranks leave, those for their first groups first, of all ranks side by side."""
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
        """Each rank's own rows go among the others'."""
        for layout, group in self._in_turns([layout.groups for layout in self._layouts]):
            rank = layout.rank
            if blocks := list(layout.blocks(rank, rank, group.number)):
                self._there[rank, rank, group.number] = self.actions.add(
                    "place",
                    PLACES,
                    rank,
                    reads=[_sent(rank, "tokens", block) for block in blocks],
                    writes=[_placed(rank, "landed", block) for block in blocks],
                    after=[self._begins[rank]],  # the last call's readers are done
                )

    def compute(self) -> None:
        """ExpertRange by group; where results go back, they leave at once."""
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
        """Results leave for their sources, own ones for the product: (part, copy, first row where it lands)."""
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
        """A peer's own as far as there are streams, so that a large block holds up nobody else's."""
        return f"copy {((sender - receiver) % len(self._layouts) - 1) % self._num_streams}"

    def _in_turns(self, lines: Sequence[Sequence[T]]) -> Iterator[tuple[ExpertLayout, T]]:
        """The first of every rank, then the second: an order in which all ranks can issue."""
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
    """The rows of every expert of the rank in this group: none of those in other groups."""
    totals = layout.counts[:, layout.rank].sum(0)
    inside = range(group.experts.start, group.experts.stop)
    return tuple(int(totals[expert]) if expert in inside else 0 for expert in range(layout.num_experts))
