"""Schedules of the operators for experts: tokens go to their experts and back in uneven blocks, beside grouped matmuls.

A rank's experts are in groups. The first group's rows are sent first. A grouped matmul processes a group when all ranks'
rows for it have arrived, while the next group's rows arrive. A group's results are sent when it is done, while the next
group is computed. Each rank places its own rows among the others'. `expert_layout.py` determines which rows these are;
nothing here depends on a machine.

A backward pass does the same with gradients. Tokens that the gradients of weights need are sent again behind them, beside
the groups' matmuls. The gradients of weights are computed last, while the last group's results travel.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from counterpoint.errors import ScheduleError
from counterpoint.schedule.actions import MAX_SIZE, Buffer, CopySchedule, ExpertOperation, Home, Pass, Region
from counterpoint.schedule.builder import ActionList
from counterpoint.schedule.description import ScheduleDescription
from counterpoint.schedule.expert_layout import Block, ExpertLayout, ExpertRange, counts_of
from counterpoint.schedule.routing import Routing
from counterpoint.value import Value, require

PLACES = "place 0"
T = TypeVar("T")
Part = tuple[int, int, int]  # source, destination, number of the destination's group


class Stages(NamedTuple):
    """What one pass of an operator does.

    `sent`: the given rows that go to the experts; none if they are there. `layers`: the matmuls, in order, with the
    activation between two. `gradients`: the operands and the result of those of weights.
    """

    sent: str
    layers: tuple[int, ...]
    is_combined: bool
    gradients: tuple[tuple[str, str, str], ...] = ()

    @property
    def is_dispatched(self) -> bool:
        """Whether rows go to the experts first."""
        return bool(self.sent)

    @property
    def is_sent_again(self) -> bool:
        """Whether tokens go to the experts a second time."""
        return any("again" in each for each in self.gradients)

    @property
    def num_exchanges(self) -> int:
        """How often rows travel."""
        return self.is_dispatched + self.is_combined + self.is_sent_again


OF_FIRST, OF_SECOND = ("inputs", "again", "first_gradient"), ("landed", "active", "second_gradient")
STAGES: dict[tuple[ExpertOperation, Pass], Stages] = {
    ("dispatch_grouped_matmul", "forward"): Stages("tokens", (0,), is_combined=False),
    ("grouped_matmul_combine", "forward"): Stages("", (1,), is_combined=True),
    ("expert_ffn", "forward"): Stages("tokens", (0, 1), is_combined=True),
    ("dispatch_grouped_matmul", "backward"): Stages("", (0,), is_combined=True, gradients=(OF_FIRST,)),
    ("grouped_matmul_combine", "backward"): Stages(
        "gradient", (1,), is_combined=False, gradients=(("landed", "kept", "second_gradient"),)
    ),
    ("expert_ffn", "backward"): Stages("gradient", (1, 0), is_combined=True, gradients=(OF_SECOND, OF_FIRST)),
}


class ExpertProblem(Value, frozen=True, kw_only=True):
    """The sizes of one pass of an operator call for experts: rows of `num_inner` columns, experts of `num_hidden` hidden
    columns.

    `is_gated`: the first matmul has two weights, and the activation multiplies their products. Each half operator has the
    columns that it has in the whole layer.
    """

    operation: ExpertOperation
    routing: Routing
    num_inner: int
    num_hidden: int
    is_gated: bool = True
    element_bytes: int = 2
    direction: Pass = "forward"

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
        """Number of columns of the first matmul's result, forward."""
        return self.num_hidden * (2 if self.is_gated else 1)

    @property
    def stages(self) -> Stages:
        """What the pass does."""
        return STAGES[self.operation, self.direction]

    @property
    def num_made_columns(self) -> int:
        """Number of columns that the first matmul of the pass writes behind a dispatch."""
        return self.num_first_columns if self.direction == "forward" else self.num_hidden

    @property
    def num_taken_columns(self) -> int:
        """Number of columns that the last matmul of the pass reads before a combine."""
        return self.num_hidden if self.direction == "forward" else self.num_first_columns


def make_expert_schedule(problem: ExpertProblem, description: ScheduleDescription) -> CopySchedule:
    """Return the schedule of `description` for these rows. Raises `ScheduleError` for choices that have no use here."""
    _require_description(description)
    made, stages = _Layer(problem, description), problem.stages
    if stages.is_dispatched:
        made.send(stages.sent, "landed")
    if stages.is_sent_again:
        made.send("tokens", "again")
    made.compute()
    made.actions.end()
    routing = problem.routing
    return CopySchedule(
        operation=problem.operation,
        direction=problem.direction,
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
        "Groups of experts do not grow from one to the next and run on one computation stream; found "
        f"chunk_growth {description.chunk_growth:g} and {description.num_compute_streams} streams. Choose 1 and "
        "1.",
    )


def _buffers(problem: ExpertProblem) -> Iterator[Buffer]:
    routing, stages = problem.routing, problem.stages
    ranks = range(routing.num_ranks)
    sent, grouped = [routing.num_sent(rank) for rank in ranks], [routing.num_grouped(rank) for rank in ranks]
    inner, made, taken = problem.num_inner, problem.num_made_columns, problem.num_taken_columns

    def buffer(name: str, home: Home, rows: Sequence[int], num_columns: int) -> Buffer:
        return Buffer(name=name, home=home, num_rows=max(rows), num_columns=num_columns, rank_rows=tuple(rows))

    if stages.is_dispatched:
        yield buffer(stages.sent, "given", sent, inner)
        yield buffer("landed", "symmetric", grouped, inner)
    if stages.is_sent_again:
        yield buffer("tokens", "given", sent, inner)
        yield buffer("again", "symmetric", grouped, inner)
    if len(stages.layers) > 1:
        yield buffer("hidden", "local", grouped, made)
    if stages.is_combined:
        yield buffer("inputs", "local" if stages.is_dispatched else "given", grouped, taken)
        yield buffer("partial", "symmetric", grouped, inner)
        yield buffer("product", "result", sent, inner)
    else:
        yield buffer("product", "result", grouped, made)
    yield from _of_weights(problem, grouped, buffer)


def _of_weights(
    problem: ExpertProblem, grouped: Sequence[int], buffer: Callable[[str, Home, Sequence[int], int], Buffer]
) -> Iterator[Buffer]:
    """Yield what the gradients of weights need of the forward pass, and these gradients."""
    stages, num_experts = problem.stages, problem.routing.num_local_experts
    each = [num_experts] * problem.routing.num_ranks
    named = {name for gradient in stages.gradients for name in gradient}
    if "second_gradient" in named:
        is_recomputed = "active" in named
        yield buffer("kept", "given", grouped, problem.num_first_columns if is_recomputed else problem.num_hidden)
        if is_recomputed:
            yield buffer("active", "local", grouped, problem.num_hidden)
        yield buffer("second_gradient", "result", [number * problem.num_inner for number in each], problem.num_hidden)
    if "first_gradient" in named:
        yield buffer("first_gradient", "result", [number * problem.num_first_columns for number in each], problem.num_inner)


class _Layer:
    """The actions of all ranks for one call, stage by stage."""

    def __init__(self, problem: ExpertProblem, description: ScheduleDescription) -> None:
        ranks = range(problem.routing.num_ranks)
        counts = counts_of(problem.routing)
        self.actions = ActionList(len(ranks), description)
        self._problem, self._stages = problem, problem.stages
        self._num_streams = description.num_copy_streams
        self._layouts = [ExpertLayout(counts, rank, description.chunks) for rank in ranks]
        self._begins = self.actions.begin()
        self._there: dict[str, dict[Part, int]] = {}  # by buffer, the action that copies these rows to their experts
        self._computed: dict[int, int] = {}  # by rank, its last matmul

    def send(self, given: str, target: str) -> None:
        """Send all rows, those for the first groups first, on all ranks in parallel; each rank places its own rows."""
        there = self._there[target] = {}
        for layout, (peer, number) in self._in_turns([list(layout.outgoing()) for layout in self._layouts]):
            blocks = list(layout.blocks(layout.rank, peer, number))
            there[layout.rank, peer, number] = self.actions.add(
                "copy",
                self._copy_stream(layout.rank, peer),
                layout.rank,
                reads=[_sent(layout.rank, given, block) for block in blocks],
                writes=[_placed(peer, target, block) for block in blocks],
                after=[self._begins[layout.rank]],
            )
        for layout, group in self._in_turns([layout.groups for layout in self._layouts]):
            rank = layout.rank
            if blocks := list(layout.blocks(rank, rank, group.number)):
                there[rank, rank, group.number] = self.actions.add(
                    "place",
                    PLACES,
                    rank,
                    reads=[_sent(rank, given, block) for block in blocks],
                    writes=[_placed(rank, target, block) for block in blocks],
                    after=[self._begins[rank]],  # the previous call's readers have ended
                )

    def compute(self) -> None:
        """Compute group by group; if results are returned, send each group's at once. The gradients of weights are last."""
        for layout, group in self._in_turns([layout.groups for layout in self._layouts]):
            if not layout.num_rows:
                continue
            if self._stages.is_dispatched:
                self._multiply_first(layout, group)
            if self._stages.is_combined:
                self._multiply_last(layout, group)
                self._return(layout, group)
        for layout in self._layouts:
            if layout.num_rows:
                self._differentiate(layout)
        if self._stages.is_combined:
            self._place_results()

    def _differentiate(self, layout: ExpertLayout) -> None:
        """Compute the gradients of a rank's weights, of all groups at once."""
        rank = layout.rank
        totals = tuple(layout.counts[:, rank].sum(0).tolist())
        for left, right, target in self._stages.gradients:
            num_columns = self._problem.num_first_columns if target == "first_gradient" else self._problem.num_inner
            self._computed[rank] = self.actions.add(
                "weight_gradient",
                self.actions.compute_stream(rank),
                rank,
                reads=[_region(rank, left, 0, layout.num_rows), _region(rank, right, 0, layout.num_rows)],
                writes=[_region(rank, target, 0, layout.num_experts * num_columns)],
                after=[action for (_, to, _), action in self._there.get(right, {}).items() if to == rank],
                expert_rows=totals,
            )

    def _return(self, layout: ExpertLayout, group: ExpertRange) -> None:
        """Bring results to their sources. Copy engines of the sources fetch them; a schedule has copies of the rank that
        made the results, which take as long.
        """
        rank, number = layout.rank, group.number
        for source in layout.sources(number):
            blocks = list(layout.blocks(source, rank, number))
            self.actions.add(
                "copy",
                self._copy_stream(rank, source),
                rank,
                reads=[_placed(rank, "partial", block) for block in blocks],
                writes=[_sent(source, "product", block) for block in blocks],
                after=[self._computed[rank], self._begins[rank]],
            )

    def _place_results(self) -> None:
        """Copy each rank's own results. Such copies run on SMs, which the matmuls keep until they end."""
        for layout, group in self._in_turns([layout.groups for layout in self._layouts]):
            rank = layout.rank
            if own := list(layout.blocks(rank, rank, group.number)):
                reads = [_placed(rank, "partial", block) for block in own]
                writes = [_sent(rank, "product", block) for block in own]
                self.actions.add("place", PLACES, rank, reads=reads, writes=writes, after=[self._computed[rank]])

    def _multiply_first(self, layout: ExpertLayout, group: ExpertRange) -> None:
        rank, landed = layout.rank, self._there["landed"]
        there = [
            landed[part]
            for source in (rank, *layout.sources(group.number))
            if (part := (source, rank, group.number)) in landed
        ]
        target = _group_rows(rank, "hidden" if self._stages.is_combined else "product", group)
        self._multiply(layout, group, (_group_rows(rank, "landed", group), target), self._stages.layers[0], there)
        if self._stages.is_combined:
            is_backward = self._problem.direction == "backward"
            reads = [target, *[_group_rows(rank, "kept", group)] * is_backward]
            writes = [_group_rows(rank, "inputs", group), *[_group_rows(rank, "active", group)] * is_backward]
            self.actions.add("activate", self.actions.compute_stream(rank), rank, reads=reads, writes=writes)

    def _multiply_last(self, layout: ExpertLayout, group: ExpertRange) -> None:
        regions = _group_rows(layout.rank, "inputs", group), _group_rows(layout.rank, "partial", group)
        self._multiply(layout, group, regions, self._stages.layers[-1])

    def _multiply(
        self, layout: ExpertLayout, group: ExpertRange, regions: tuple[Region, Region], layer: int, after: Sequence[int] = ()
    ) -> None:
        """Multiply the first region's rows into the second."""
        self._computed[layout.rank] = self.actions.add(
            "matmul",
            self.actions.compute_stream(layout.rank),
            layout.rank,
            reads=regions[:1],
            writes=regions[1:],
            after=list(after),
            expert_rows=_expert_rows(layout, group),
            layer=layer,
        )

    def _copy_stream(self, sender: int, receiver: int) -> str:
        """Return the copy stream for a peer."""
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
    found, ends = [0] * layout.num_experts, layout.group_ends[group.number]
    found[group.experts] = [end - start for start, end in itertools.pairwise([0, *ends])]
    return tuple(found)
