"""What a schedule delivers: it is executed on rows that remember where they are from, and compared with the definition.

Contents are kept in runs of rows, so sizes do not matter. A row of a result is a sum of terms; a term is a row of a
given buffer of some rank, multiplied with the weights of some ranks. Of how schedules are generated nothing is used here.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from counterpoint.schedule.actions import Action, CopySchedule, Region, split
from counterpoint.schedule.generate import scheduled_pass
from counterpoint.schedule.operations import Content
from counterpoint.schedule.slices import sliced_parts


class Weight(NamedTuple):
    """A rank's weight, or its slice of that number."""

    rank: int
    number: int = -1


class Term(NamedTuple):
    """Row x of the content is row x + `shift` of a given buffer, times these weights, one after the other."""

    owner: int
    buffer: str
    shift: int
    weights: tuple[Weight, ...] = ()


Terms = Counter[Term]


class Run(NamedTuple):
    """Rows with contents of one kind; `terms` is None where nothing was written."""

    start: int
    stop: int
    terms: Terms | None


class Contents:
    """All buffers of all ranks."""

    def __init__(self, schedule: CopySchedule) -> None:
        self._given = {buffer.name for buffer in schedule.buffers if buffer.home == "given"}
        self._runs: dict[tuple[int, str], list[Run]] = {}

    def read(self, region: Region) -> list[Run]:
        """The rows of a region as runs numbered from 0."""
        if region.buffer in self._given:
            return [Run(0, region.num_rows, Counter({Term(region.rank, region.buffer, region.start): 1}))]
        found: list[Run] = []
        position = region.start
        for run in self._runs.get((region.rank, region.buffer), []):
            start, stop = max(run.start, region.start), min(run.stop, region.stop)
            if start >= stop:
                continue
            if position < start:
                found.append(Run(position - region.start, start - region.start, None))
            found.append(Run(start - region.start, stop - region.start, _shifted(run.terms, region.start)))
            position = stop
        if position < region.stop:
            found.append(Run(position - region.start, region.num_rows, None))
        return found

    def write(self, region: Region, runs: Iterable[Run]) -> None:
        """Put runs, numbered from 0, where the region is."""
        kept: list[Run] = []
        for run in self._runs.get((region.rank, region.buffer), []):
            kept += [
                Run(start, stop, run.terms)
                for start, stop in (
                    (run.start, min(run.stop, region.start)),
                    (max(run.start, region.stop), run.stop),
                )
                if start < stop
            ]
        kept += [
            Run(run.start + region.start, run.stop + region.start, _shifted(run.terms, -region.start))
            for run in runs
            if run.start < run.stop
        ]
        self._runs[region.rank, region.buffer] = sorted(kept, key=lambda run: run.start)


def delivery_faults(schedule: CopySchedule) -> Iterator[str]:
    """Results that are not what the operator defines, and rows that cross a link twice."""
    contents, definition = Contents(schedule), scheduled_pass(schedule.operation, schedule.direction)
    arrived: dict[tuple[int, str], list[Region]] = {}
    for position, action in enumerate(schedule.actions):
        if action.kind == "copy":
            target = action.writes[0]
            seen = arrived.setdefault((target.rank, target.buffer), [])
            if any(target.overlaps(region) for region in seen):
                yield f"action {position} copies rows of '{target.buffer}' to rank {target.rank} that it has already"
            seen.append(target)
        yield from _apply(contents, action, position, schedule)
    if any(buffer.name == "weight_gradient" for buffer in schedule.buffers):
        counts = Counter(action.rank for action in schedule.actions if action.kind == "weight_gradient")
        for rank in range(schedule.num_ranks):
            if counts[rank] != 1:
                yield f"rank {rank} computes its weight gradient {counts[rank]} times"
    for rank in range(schedule.num_ranks):
        expected = _merged(_runs_of(definition.product, schedule, rank))
        product = Region(rank=rank, buffer="product", start=0, stop=expected[-1].stop if expected else 0)
        if _merged(contents.read(product)) != expected:
            yield f"the product of rank {rank} is not what {schedule.operation} defines"


def _apply(contents: Contents, action: Action, position: int, schedule: CopySchedule) -> Iterator[str]:
    """Do one action; faults are pieces whose operands and results have different lengths."""
    if action.kind in ("begin", "end") or not action.writes:
        return
    read = [contents.read(region) for region in action.reads]
    if action.kind == "weight_gradient":
        yield from _weight_gradient_faults(schedule, action, read)
        return
    if not _lengths_fit(action):
        yield f"action {position} ({action.kind}) reads and writes different numbers of rows"
        return
    if action.kind in ("copy", "place"):
        contents.write(action.writes[0], read[0])
    elif action.kind == "sum":
        contents.write(action.writes[0], _added(read))
    elif action.kind == "add_matmul":
        contents.write(action.writes[0], _added([_times(read[0], _weight_of(action)), read[1]]))
    else:
        for region, runs in zip(action.writes, read, strict=True):
            contents.write(region, _times(runs, _weight_of(action)))


def _weight_of(action: Action) -> Weight:
    """What a matmul multiplies with."""
    part = action.weight_rows or action.weight_columns
    return Weight(action.rank, part[0] // (part[1] - part[0]) if part else -1)


def _lengths_fit(action: Action) -> bool:
    """Whether every region written is as long as what it is made of: each of one, or one of all in a sum."""
    written = [region.num_rows for region in action.writes]
    read = [region.num_rows for region in action.reads]
    return set(read) == set(written) if action.kind in ("sum", "add_matmul") else written == read


def _weight_gradient_faults(schedule: CopySchedule, action: Action, read: Sequence[list[Run]]) -> Iterator[str]:
    """Both operands must be complete; the gathered one must be the rows of all ranks in order."""
    definition = scheduled_pass(schedule.operation, schedule.direction)
    assert definition.gathered is not None, "a pass with a weight's gradient"
    wanted = _merged(_runs_of(definition.gathered, schedule, action.rank))
    for region, runs in zip(action.reads, read, strict=True):
        if region.buffer == "gathered" and _merged(runs) != wanted:
            yield f"the weight gradient of rank {action.rank} reads rows of '{region.buffer}' that are not the gathered ones"


def _runs_of(content: Content, schedule: CopySchedule, rank: int) -> list[Run]:
    """What a rank's matrix holds by definition, as runs."""
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


def _added(parts: Sequence[list[Run]]) -> list[Run]:
    """The sum of several contents of one length; unwritten where one of them is."""
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
    """Runs joined where the same terms go on; empty ones are dropped."""
    merged: list[Run] = []
    for run in runs:
        if run.start == run.stop:
            continue
        if merged and merged[-1].terms == run.terms and merged[-1].stop == run.start:
            merged[-1] = Run(merged[-1].start, run.stop, run.terms)
        else:
            merged.append(run)
    return merged
