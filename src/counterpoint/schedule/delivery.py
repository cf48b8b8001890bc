"""Checks what a schedule delivers: executes it on rows that record their origin, and compares the result with the
definition.

Contents are kept as runs of rows, so sizes do not matter. A row of a result is a sum of terms; a term is a row of a
"""

import itertools
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from counterpoint.schedule.actions import Action, CopySchedule, Pass, Region, split
from counterpoint.schedule.operations import OPERATORS, Content, PassDefinition, scheduled_pass
from counterpoint.schedule.routing import Routing
from counterpoint.schedule.slices import sliced_parts


class Weight(NamedTuple):
    """A rank's weight, or its slice `number`; or the weight of its expert `number` in the first or second matmul."""

    rank: int
    number: int = -1
    layer: int = 0


ACTIVATION = Weight(rank=-1)  # stands for the elementwise function, or its derivative, among the weights
PLACED = ("inputs", "kept")  # given rows that lie where the experts are
Chain = tuple[str, tuple[int, ...]]


class Term(NamedTuple):
    """Row x of the content is row x + `shift` of a given buffer, times these weights, one after the other."""

    owner: int
    buffer: str
    shift: int
    weights: tuple[Weight, ...] = ()


Terms = Counter[Term]


class Run(NamedTuple):
    """Rows with contents of one kind; `terms` is None if nothing was written."""

    start: int
    stop: int
    terms: Terms | None


class Contents:
    """All buffers of all ranks."""

    def __init__(self, schedule: CopySchedule) -> None:
        self._given = {buffer.name for buffer in schedule.buffers if buffer.home == "given"}
        self._runs: dict[tuple[int, str], list[Run]] = {}

    def read(self, region: Region) -> list[Run]:
        """Return the rows of a region as runs numbered from 0."""
        if region.buffer in self._given:
            return [Run(0, region.num_rows, Counter({Term(region.rank, region.buffer, region.start): 1}))]
        found: list[Run] = []
        position = region.start
        runs = self._runs.get((region.rank, region.buffer), [])
        for run in runs[_inside(runs, region.start, region.stop)]:
            start, stop = max(run.start, region.start), min(run.stop, region.stop)
            if position < start:
                found.append(Run(position - region.start, start - region.start, None))
            found.append(Run(start - region.start, stop - region.start, _shifted(run.terms, region.start)))
            position = stop
        if position < region.stop:
            found.append(Run(position - region.start, region.num_rows, None))
        return found

    def write(self, region: Region, runs: Iterable[Run]) -> None:
        """Write runs, numbered from 0 and in order, into the region; rows beyond its end are dropped."""
        held = self._runs.setdefault((region.rank, region.buffer), [])
        place = _inside(held, region.start, region.stop)
        kept_before = [Run(run.start, min(run.stop, region.start), run.terms) for run in held[place]]
        kept_behind = [Run(max(run.start, region.stop), run.stop, run.terms) for run in held[place]]
        written = [
            Run(run.start + region.start, min(run.stop + region.start, region.stop), _shifted(run.terms, -region.start))
            for run in runs
        ]
        held[place] = [run for run in (*kept_before, *written, *kept_behind) if run.start < run.stop]


def _inside(runs: Sequence[Run], start: int, stop: int) -> slice:
    """Return which of these runs, which are in order and apart, have rows from `start` to `stop`."""
    first = bisect_right(runs, start, key=lambda run: run.stop)
    return slice(first, max(first, bisect_left(runs, stop, key=lambda run: run.start)))


class _Arrivals:
    """Rows of one buffer that came from other ranks, as runs that are apart."""

    def __init__(self) -> None:
        self._runs: list[Run] = []

    def add(self, start: int, stop: int) -> bool:
        """Add rows; return whether one of them was there already."""
        place = _inside(self._runs, start, stop)
        met = self._runs[place]
        edges = [start, stop, *(edge for run in met for edge in (run.start, run.stop))]
        self._runs[place] = [Run(min(edges), max(edges), None)] if start < stop else met
        return bool(met)


def delivery_faults(schedule: CopySchedule) -> Iterator[str]:
    """Yield results that differ from the operator's definition, and rows that cross a link twice."""
    contents = Contents(schedule)
    arrived: defaultdict[tuple[int, str], _Arrivals] = defaultdict(_Arrivals)
    for position, action in enumerate(schedule.actions):
        if action.kind == "copy":
            for target in action.writes:
                if arrived[target.rank, target.buffer].add(target.start, target.stop):
                    yield f"action {position} copies rows of '{target.buffer}' to rank {target.rank} that it has already"
        yield from _apply(contents, action, position, schedule)
    if any(buffer.name == "weight_gradient" for buffer in schedule.buffers):
        counts = Counter(action.rank for action in schedule.actions if action.kind == "weight_gradient")
        for rank in range(schedule.num_ranks):
            if counts[rank] != 1:
                yield f"rank {rank} computes its weight gradient {counts[rank]} times"
    if schedule.routing is not None:
        yield from _expert_gradient_faults(schedule, contents)
    for rank in range(schedule.num_ranks):
        expected = _merged(_defined(schedule, rank))
        product = Region(rank=rank, buffer="product", start=0, stop=expected[-1].stop if expected else 0)
        if _merged(contents.read(product)) != expected:
            yield f"the product of rank {rank} is not what {schedule.operation} defines"


def _defined(schedule: CopySchedule, rank: int) -> Iterable[Run]:
    """Return a rank's product by definition."""
    if schedule.routing is not None:
        defined = _expert_pass(schedule)
        return expert_contents(schedule.routing, rank, defined.product, is_returned=defined.is_returned)
    return _runs_of(_pass_of(schedule).product, schedule, rank)


def _pass_of(schedule: CopySchedule) -> PassDefinition:
    """Return the definition of the pass of an operator with equal blocks."""
    return next(scheduled_pass(name, schedule.direction) for name in OPERATORS if name == schedule.operation)


def _expert_pass(schedule: CopySchedule) -> "ExpertPass":
    return EXPERT_PASSES[schedule.operation, schedule.direction]


class ExpertPass(NamedTuple):
    """What a pass for experts computes, as (given buffer, layers of the weights that its rows are multiplied with; -1 is
    the activation): the product, and the operands of the gradients of weights.
    """

    product: Chain
    is_returned: bool
    gradients: tuple[tuple[Chain, Chain], ...] = ()


EXPERT_PASSES: dict[tuple[str, Pass], ExpertPass] = {
    ("dispatch_grouped_matmul", "forward"): ExpertPass(("tokens", (0,)), is_returned=False),
    ("grouped_matmul_combine", "forward"): ExpertPass(("inputs", (1,)), is_returned=True),
    ("expert_ffn", "forward"): ExpertPass(("tokens", (0, -1, 1)), is_returned=True),
    ("dispatch_grouped_matmul", "backward"): ExpertPass(
        ("inputs", (0,)), is_returned=True, gradients=((("inputs", ()), ("tokens", ())),)
    ),
    ("grouped_matmul_combine", "backward"): ExpertPass(
        ("gradient", (1,)), is_returned=False, gradients=((("gradient", ()), ("kept", ())),)
    ),
    ("expert_ffn", "backward"): ExpertPass(
        ("gradient", (1, -1, 0)),
        is_returned=True,
        gradients=((("gradient", ()), ("kept", (-1,))), (("gradient", (1, -1)), ("tokens", ()))),
    ),
}


def expert_contents(routing: Routing, rank: int, chain: Chain, *, is_returned: bool) -> Iterator[Run]:
    """Yield, expert by expert, what a rank must hold of given rows that were multiplied: of the rows that its experts
    compute, or of those that return to it.

    At the rank that computes, rows are in the order of experts, then of sources; at their source, in the order of experts.
    """
    number, ranks = routing.num_local_experts, range(routing.num_ranks)
    given, layers = chain
    blocks = itertools.product(ranks, range(number)) if is_returned else itertools.product(range(number), ranks)
    start = 0
    for one, other in blocks:
        source, destination, expert = (rank, one, other) if is_returned else (other, rank, one)
        column = destination * number + expert  # among the experts of all ranks
        rows = routing.counts[source][column]
        if given in PLACED:
            owner, first = destination, routing.placed_before[source][column]
        else:
            owner, first = source, routing.sent_before[source][column]
        weights = tuple(ACTIVATION if layer < 0 else Weight(destination, expert, layer) for layer in layers)
        yield Run(start, start + rows, Counter({Term(owner, given, first - start, weights): 1}))
        start += rows


def _expert_gradient_faults(schedule: CopySchedule, contents: Contents) -> Iterator[str]:
    """Yield a fault of each rank that does not compute each gradient of weights once, from all rows of its experts."""
    routing = schedule.routing
    assert routing is not None, "a schedule for experts"
    defined = _expert_pass(schedule)
    for rank in range(schedule.num_ranks):
        wanted = [
            [_merged(expert_contents(routing, rank, chain, is_returned=False)) for chain in each]
            for each in defined.gradients
        ]
        actions = [each for each in schedule.actions if each.kind == "weight_gradient" and each.rank == rank]
        found = [[_merged(contents.read(region)) for region in action.reads] for action in actions]
        if found != wanted * any(routing.expert_rows(rank)):
            yield f"the gradients of weights of rank {rank} are not what {schedule.operation} defines"


def _apply(contents: Contents, action: Action, position: int, schedule: CopySchedule) -> Iterator[str]:
    """Execute one action, and yield a fault if the operands and results of a piece have different lengths."""
    if action.kind in ("begin", "end") or not action.writes:
        return
    read = [contents.read(region) for region in action.reads]
    if action.kind == "weight_gradient":
        if schedule.routing is None:
            yield from _weight_gradient_faults(schedule, action, read)
        return
    if not _lengths_fit(action):
        yield f"action {position} ({action.kind}) reads and writes different numbers of rows"
        return
    if action.expert_rows and (sum(action.expert_rows) != action.reads[0].num_rows or len(action.reads) != 1):
        yield f"action {position} multiplies {action.expert_rows} rows of experts, but reads {action.reads[0].num_rows}"
        return
    _write(contents, action, read)


def _write(contents: Contents, action: Action, read: Sequence[list[Run]]) -> None:
    """Write what an action makes of what it read."""
    if action.expert_rows:
        contents.write(action.writes[0], _times_experts(read[0], action))
    elif action.kind == "activate":
        for region, runs in zip(action.writes, read, strict=True):
            contents.write(region, _times(runs, ACTIVATION))
    elif action.kind in ("copy", "place"):
        for region, runs in zip(action.writes, read, strict=True):
            contents.write(region, runs)
    elif action.kind == "sum":
        contents.write(action.writes[0], _added(read))
    elif action.kind == "add_matmul":
        contents.write(action.writes[0], _added([_times(read[0], _weight_of(action)), read[1]]))
    else:
        for region, runs in zip(action.writes, read, strict=True):
            contents.write(region, _times(runs, _weight_of(action)))


def _weight_of(action: Action) -> Weight:
    """Return the weight of a matmul."""
    part = action.weight_rows or action.weight_columns
    return Weight(action.rank, part[0] // (part[1] - part[0]) if part else -1)


def _lengths_fit(action: Action) -> bool:
    """Return whether every region written is as long as its operands: one operand each, or all of them for a sum."""
    written = [region.num_rows for region in action.writes]
    read = [region.num_rows for region in action.reads]
    return set(read) == set(written) if action.kind in ("sum", "add_matmul") else written == read


def _weight_gradient_faults(schedule: CopySchedule, action: Action, read: Sequence[list[Run]]) -> Iterator[str]:
    """Yield faults unless both operands are complete, and the gathered or left one holds its rows in order."""
    definition = _pass_of(schedule)
    assert definition.gathered is not None, "a pass with a weight's gradient"
    wanted = _merged(_runs_of(definition.gathered, schedule, action.rank))
    for region, runs in zip(action.reads, read, strict=True):
        if region.buffer in ("gathered", "left") and _merged(runs) != wanted:
            yield f"the weight gradient of rank {action.rank} reads other rows of '{region.buffer}' than it is made of"


def _runs_of(content: Content, schedule: CopySchedule, rank: int) -> list[Run]:
    """Return what a rank's matrix holds by definition, as runs."""
    runs, start = [], 0
    parts = content(split(schedule.num_rows, schedule.num_ranks), rank)
    whole = [(part, (-1,) * len(part.sources)) for part in parts]
    is_sliced = schedule.description.along != "rows"
    for part, numbers in sliced_parts(parts, rank, schedule.description) if is_sliced else whole:
        terms = Counter(
            Term(each.owner, each.buffer, each.start - start, tuple(Weight(weight, number) for weight in each.weights))
            for each, number in zip(part.sources, numbers, strict=True)
        )
        runs.append(Run(start, start + part.num_rows, terms))
        start += part.num_rows
    return runs


def _times(runs: Iterable[Run], weight: Weight) -> list[Run]:
    return [
        Run(
            run.start,
            run.stop,
            run.terms and Counter({term._replace(weights=(*term.weights, weight)): n for term, n in run.terms.items()}),
        )
        for run in runs
    ]


def _times_experts(runs: Iterable[Run], action: Action) -> list[Run]:
    """Return each expert's rows times its weight."""
    edges = itertools.pairwise(itertools.accumulate(action.expert_rows, initial=0))
    cut = list(runs)
    found: list[Run] = []
    for expert, (start, stop) in enumerate(edges):
        inside = cut[_inside(cut, start, stop)]
        own = [Run(max(run.start, start), min(run.stop, stop), run.terms) for run in inside]
        found += _times(own, Weight(action.rank, expert, action.layer))
    return found


def _added(parts: Sequence[list[Run]]) -> list[Run]:
    """Return the sum of several contents of one length; rows that one of them lacks are unwritten."""
    edges = sorted({edge for runs in parts for run in runs for edge in (run.start, run.stop)})
    added = []
    for start, stop in itertools.pairwise(edges):
        terms = [next((run.terms for run in runs if run.start <= start and stop <= run.stop), None) for runs in parts]
        whole = None if any(each is None for each in terms) else sum((each for each in terms if each is not None), Counter())
        added.append(Run(start, stop, whole))
    return added


def _shifted(terms: Terms | None, shift: int) -> Terms | None:
    return None if terms is None else Counter({term._replace(shift=term.shift + shift): n for term, n in terms.items()})


def _merged(runs: Iterable[Run]) -> list[Run]:
    """Return the runs, joined where the same terms continue, without empty ones."""
    merged: list[Run] = []
    for run in runs:
        if run.start == run.stop:
            continue
        if merged and merged[-1].terms == run.terms and merged[-1].stop == run.start:
            merged[-1] = Run(merged[-1].start, run.stop, run.terms)
        else:
            merged.append(run)
    return merged
