"""The tables of an `Analysis` as values: the same for a terminal, for Markdown and for the page.

A table holds figures, not text, so that each reader can sort and shorten it. No table of no rows is made. Rows are sorted by
what matters most. Times are means per steady step unless a table's caption says otherwise.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from statistics import fmean, median
from typing import Literal

from counterpoint.analysis.values import (
    Analysis,
    Aspect,
    Breakdown,
    Change,
    CollectiveSkew,
    OperatorRow,
    RankAnalysis,
    StepFigures,
)
from counterpoint.errors import printable
from counterpoint.report.analysis_words import ASPECTS, CAUSES, ratio
from counterpoint.units import format_bytes, format_percent, format_rate, format_us
from counterpoint.value import Value

UNKNOWN = "unknown"  # a module or phase that the trace does not tell; a table of nothing else is left out
Cell = str | float | int | None
Kind = Literal["text", "us", "share", "bytes", "rate", "number"]


class FigureColumn(Value, frozen=True, kw_only=True):
    """One column. A column that `is_detail` is left out where there is little room."""

    name: str
    kind: Kind = "text"
    is_detail: bool = False


class FigureTable(Value, frozen=True, kw_only=True):
    """Rows under columns; `key` is the table's name for links, `caption` one line that says what its figures are."""

    key: str
    title: str
    caption: str
    columns: tuple[FigureColumn, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @property
    def is_breakdown(self) -> bool:
        """Whether the rows are parts of all communication."""
        return self.key.startswith("by-")


def format_cell(kind: Kind, cell: Cell) -> str:
    """A figure as people read it; nothing for None."""
    if cell is None:
        return ""
    if isinstance(cell, str):
        return printable(cell)
    formats: dict[Kind, Callable[[float], str]] = {
        "us": format_us,
        "share": format_percent,
        "bytes": format_bytes,
        "rate": format_rate,
    }
    return formats.get(kind, "{:,.4g}".format if isinstance(cell, float) else "{:,}".format)(cell)


def tables_of(analysis: Analysis) -> tuple[FigureTable, ...]:
    """All tables that have rows, the most important first."""
    tables = (
        _causes(analysis),
        _recoverable(analysis),
        _changes(analysis),
        _ranks(analysis),
        _outliers(analysis),
        _steps(analysis),
        *(_breakdown(aspect, rows) for aspect, rows in _by_aspect(analysis.breakdowns)),
        _waits(analysis),
        _skews(analysis),
        _sizes(analysis),
        _critical_path(analysis),
        _idle(analysis),
        _slowdowns(analysis),
        _operators(analysis),
        _exposed(analysis),
    )
    return tuple(table for table in tables if table.rows)


def _text(name: str, *, is_detail: bool = False) -> FigureColumn:
    return FigureColumn(name=name, is_detail=is_detail)


def _figure(kind: Kind, *names: str, is_detail: bool = False) -> tuple[FigureColumn, ...]:
    return tuple(FigureColumn(name=name, kind=kind, is_detail=is_detail) for name in names)


def _table(
    key: str, title: str, caption: str, columns: Sequence[FigureColumn], rows: Iterable[tuple[Cell, ...]]
) -> FigureTable:
    return FigureTable(key=key, title=title, caption=caption, columns=tuple(columns), rows=tuple(rows))


def _causes(analysis: Analysis) -> FigureTable:
    return _table(
        "causes",
        "Causes of exposed communication",
        "Each exposed interval has one cause. Mean per steady step and rank.",
        [
            _text("cause"),
            *_figure("us", "exposed"),
            *_figure("share", "share"),
            *_figure("number", "intervals", is_detail=True),
            _text("meaning", is_detail=True),
            _text("example", is_detail=True),
        ],
        (
            (CAUSES[each.cause][0], each.exposed_us, each.share, each.num_intervals, CAUSES[each.cause][1], each.example)
            for each in sorted(analysis.causes, key=lambda each: -each.exposed_us)
        ),
    )


def _recoverable(analysis: Analysis) -> FigureTable:
    return _table(
        "recoverable",
        "Recoverable time",
        "Simulated, per step. Each value is for that change alone; values do not add up.",
        [
            _text("change"),
            *_figure("us", "recovers"),
            *_figure("share", "of the step"),
            *_figure("us", "step with it", is_detail=True),
            _text("causes", is_detail=True),
            _text("certainty", is_detail=True),
        ],
        (
            (
                each.what,
                each.recovers_us,
                ratio(each.recovers_us, analysis.step_us),
                analysis.step_us - each.recovers_us,
                ", ".join(CAUSES[cause][0] for cause in each.causes),
                "within the replay error" if each.is_within_replay_error else "beyond the replay error",
            )
            for each in sorted(analysis.recoverable, key=lambda each: -each.recovers_us)
        ),
    )


def _changes(analysis: Analysis) -> FigureTable:
    """Units differ by row, so figures are text here."""
    return _table(
        "changes",
        "What changed",
        "The spread is half of the middle half over steady steps, of the run where it is wider.",
        [
            _text("figure"),
            *(_text(name) for name in ("before", "after", "difference")),
            _text("spread", is_detail=True),
            _text("beyond the spread"),
        ],
        (_change(each) for each in analysis.changes),
    )


def _change(change: Change) -> tuple[Cell, ...]:
    kind: Kind = "number" if change.unit == "count" else change.unit
    difference = change.after - change.before
    sign = "+" if difference > 0 else ""
    return (
        change.what,
        format_cell(kind, change.before),
        format_cell(kind, change.after),
        sign + format_cell(kind, difference),
        format_cell(kind, change.spread),
        "yes" if abs(difference) > change.spread else "no",
    )


_TIMES = (
    *_figure("us", "makespan"),
    *_figure("us", "computation", is_detail=True),
    *_figure("us", "communication", "exposed"),
    *_figure("us", "idle", "launch-bound", "waiting", "copies", is_detail=True),
)
_OVERLAP = _figure("share", "overlap")


def _step_times(step: StepFigures) -> tuple[float, ...]:
    """As in `_TIMES`."""
    return (
        step.makespan_us,
        step.computation_us,
        step.communication_us,
        step.exposed_us,
        step.idle_us,
        step.launch_bound_us,
        step.waiting_us,
        step.copy_us,
    )


def _ranks(analysis: Analysis) -> FigureTable:
    return _table(
        "ranks",
        "Ranks",
        "Mean per steady step of each rank. Overlap is the share of communication beside computation.",
        [
            *_figure("number", "rank"),
            *_TIMES[:4],
            *_OVERLAP,
            *_TIMES[4:],
            *_figure("number", "steady steps", "steps", is_detail=True),
        ],
        (row for rank in analysis.ranks if (row := _rank_row(rank)) is not None),
    )


def _rank_row(rank: RankAnalysis) -> tuple[Cell, ...] | None:
    steady = [step for step in rank.steps if step.is_steady]
    if not steady:
        return None
    times = [fmean(column) for column in zip(*map(_step_times, steady), strict=True)]
    overlapped = fmean(step.overlapped_us for step in steady)
    return (rank.rank, *times[:4], ratio(overlapped, times[2]), *times[4:], len(steady), len(rank.steps))


def _outliers(analysis: Analysis) -> FigureTable:
    return _table(
        "outliers",
        "Steps that are not steady",
        "No mean holds these steps. The last column compares the makespan with the median steady step of the rank.",
        [*_figure("number", "rank", "step"), *_TIMES, *_figure("share", "of median")],
        (row for rank in analysis.ranks for row in _outlier_rows(rank)),
    )


def _outlier_rows(rank: RankAnalysis) -> Iterator[tuple[Cell, ...]]:
    steady = [step.makespan_us for step in rank.steps if step.is_steady]
    for step in rank.steps:
        if not step.is_steady:
            yield (rank.rank, step.step, *_step_times(step), ratio(step.makespan_us, median(steady)) if steady else None)


def _steps(analysis: Analysis) -> FigureTable:
    """Nothing for one step per rank, which the ranks' table shows."""
    steps = [step for rank in analysis.ranks if len(rank.steps) > 1 for step in rank.steps if step.is_steady]
    return _table(
        "steps",
        "Steady steps",
        "Each steady step of each rank.",
        [*_figure("number", "rank", "step"), *_TIMES[:4], *_OVERLAP, *_TIMES[4:]],
        ((step.rank, step.step, *_step_times(step)[:4], step.overlap_ratio, *_step_times(step)[4:]) for step in steps),
    )


def _by_aspect(rows: Iterable[Breakdown]) -> Iterator[tuple[Aspect, list[Breakdown]]]:
    order = {aspect: place for place, aspect in enumerate(ASPECTS)}
    ordered = sorted(rows, key=lambda row: (order[row.aspect], -row.exposed_us, -row.communication_us))
    for aspect, group in groupby(ordered, key=lambda row: row.aspect):
        found = list(group)
        if [row.name for row in found] != [UNKNOWN]:
            yield aspect, found


def _breakdown(aspect: Aspect, rows: Iterable[Breakdown]) -> FigureTable:
    return _table(
        f"by-{aspect.replace('_', '-')}",
        f"Communication by {ASPECTS[aspect]}",
        "Mean times per steady step and rank; collectives and sizes are sums over steady steps and ranks.",
        [
            _text(ASPECTS[aspect]),
            *_figure("us", "communication", "exposed"),
            *_figure("share", "exposed share"),
            *_figure("number", "collectives", is_detail=True),
            *_figure("bytes", "size", is_detail=True),
        ],
        (
            (
                row.name,
                row.communication_us,
                row.exposed_us,
                ratio(row.exposed_us, row.communication_us),
                row.num_collectives,
                row.num_bytes or None,
            )
            for row in rows
        ),
    )


def _waits(analysis: Analysis) -> FigureTable:
    return _table(
        "waits",
        "Waits of ranks",
        "In collectives that all present ranks of a group ran, all steps. The rank that waits least is the one waited for.",
        [
            *_figure("number", "rank"),
            *_figure("us", "waited"),
            *_figure("us", "mean wait", is_detail=True),
            *_figure("number", "came last"),
            *_figure("number", "came first", "collectives", is_detail=True),
        ],
        (
            (each.rank, each.waited_us, each.mean_us, each.times_last, each.times_first, each.num_collectives)
            for each in sorted(analysis.waits, key=lambda each: each.waited_us)
        ),
    )


def _skews(analysis: Analysis) -> FigureTable:
    return _table(
        "skews",
        "Skew of collectives",
        "From the first rank's arrival to the last one's; the latency counts from the last arrival.",
        [
            _text("collective"),
            *_figure("us", "skew", "latency"),
            *_figure("number", "last rank"),
            *_figure("number", "first rank", "step", is_detail=True),
            _text("process group", is_detail=True),
            _text("what the last rank did", is_detail=True),
        ],
        map(_skew_row, sorted(analysis.skews, key=lambda each: -each.skew_us)),
    )


def _skew_row(skew: CollectiveSkew) -> tuple[Cell, ...]:
    return (
        f"{skew.name} #{skew.group_number}",
        skew.skew_us,
        skew.latency_us,
        skew.last_rank,
        skew.first_rank,
        skew.step,
        skew.process_group,
        skew.last_did,
    )


def _sizes(analysis: Analysis) -> FigureTable:
    return _table(
        "sizes",
        "Collectives by size",
        "All steps. Bus bandwidth as nccl-tests counts it. Imbalance: the largest part of an all-to-all over the mean.",
        [
            _text("collective"),
            *_figure("bytes", "size"),
            *_figure("number", "ranks", "count", is_detail=True),
            *_figure("us", "mean"),
            *_figure("us", "least", "most", is_detail=True),
            *_figure("rate", "bus bandwidth"),
            *_figure("number", "imbalance", is_detail=True),
            _text("transport", is_detail=True),
            _text("process group", is_detail=True),
        ],
        (
            (
                each.collective.replace("_", "-"),
                each.num_bytes,
                each.group_size,
                each.count,
                each.mean_us,
                each.least_us,
                each.most_us,
                each.bus_bytes_per_s,
                each.imbalance or None,
                each.transport,
                each.process_group,
            )
            for each in sorted(analysis.sizes, key=lambda each: -each.mean_us * each.count)
        ),
    )


def _critical_path(analysis: Analysis) -> FigureTable:
    return _table(
        "critical-path",
        "Critical path",
        "The chain of operations that decides the length of the step, by what it goes through. Mean per steady step.",
        [*_figure("number", "rank"), _text("through"), *_figure("us", "time"), *_figure("share", "share")],
        (
            (row.rank, row.cause, row.time_us, ratio(row.time_us, sum(each.time_us for each in rank.critical_path)))
            for rank in analysis.ranks
            for row in sorted(rank.critical_path, key=lambda row: -row.time_us)
        ),
    )


def _idle(analysis: Analysis) -> FigureTable:
    return _table(
        "idle",
        "Idle time of streams",
        "Mean per steady step, by what the stream waited for.",
        [*_figure("number", "rank", "stream"), _text("waited for"), *_figure("us", "time")],
        (
            (row.rank, row.stream, row.cause, row.time_us)
            for rank in analysis.ranks
            for row in sorted(rank.idle, key=lambda row: -row.time_us)
        ),
    )


def _slowdowns(analysis: Analysis) -> FigureTable:
    rows = [row for rank in analysis.ranks for row in rank.slowdowns]
    return _table(
        "slowdowns",
        "Computation slowed by communication beside it",
        "Times of one kernel, alone and beside communication; what is lost is per step.",
        [
            _text("kernel"),
            *_figure("us", "lost"),
            _text("shared"),
            *_figure("number", "rank", "count", is_detail=True),
            *_figure("us", "alone", "beside", is_detail=True),
            _text("communication", is_detail=True),
        ],
        (
            (row.kernel, row.lost_us, row.by, row.rank, row.count, row.alone_us, row.beside_us, row.beside)
            for row in sorted(rows, key=lambda row: -row.lost_us)
        ),
    )


def _operators(analysis: Analysis) -> FigureTable:
    rows: dict[tuple[str, str, str], list[OperatorRow]] = {}
    for rank in analysis.ranks:
        for row in rank.operators:
            rows.setdefault((row.name, row.kernel, row.shapes), []).append(row)
    merged = (_operator_row(group, len(analysis.ranks)) for group in rows.values())
    return _table(
        "operators",
        "Operators",
        "Mean per steady step and rank.",
        [
            _text("operator"),
            *_figure("us", "time"),
            *_figure("number", "count"),
            *_figure("us", "mean", is_detail=True),
            *_figure("number", "TFLOP/s", is_detail=True),
            _text("shapes", is_detail=True),
            _text("kernel", is_detail=True),
        ],
        (cells for _, cells in sorted(merged, key=lambda row: -row[0])),
    )


def _operator_row(rows: Sequence[OperatorRow], num_ranks: int) -> tuple[float, tuple[Cell, ...]]:
    """The mean over all ranks; a rank without the operator counts as zero. TFLOP/s are of those that say so."""
    total_us, count = (sum(values) / num_ranks for values in zip(*((row.total_us, row.count) for row in rows), strict=True))
    known = [row.tflops for row in rows if row.tflops is not None]
    first = rows[0]
    mean_us = ratio(total_us, count)
    return total_us, (first.name, total_us, count, mean_us, fmean(known) if known else None, first.shapes, first.kernel)


def _exposed(analysis: Analysis) -> FigureTable:
    names = {(each.rank, each.number): each.name for rank in analysis.ranks for each in rank.collectives}
    return _table(
        "exposed",
        "Exposed intervals",
        "All steps, the longest first. Starts are on the clock of the first rank.",
        [
            _text("cause"),
            *_figure("us", "exposed"),
            *_figure("number", "rank"),
            *_figure("number", "step", is_detail=True),
            *_figure("us", "start", is_detail=True),
            _text("collective", is_detail=True),
            _text("evidence", is_detail=True),
        ],
        (
            (
                CAUSES[each.cause][0],
                each.duration_us,
                each.rank,
                each.step,
                each.start_us,
                names.get((each.rank, each.collective)),
                each.evidence,
            )
            for each in sorted(analysis.exposed, key=lambda each: (-each.duration_us, each.rank, each.start_us))
        ),
    )
