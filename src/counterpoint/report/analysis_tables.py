"""Tables of an `Analysis`, the most important first. The most important rows come first; a table without rows is left
out.

Times are means per steady step unless a table's caption says otherwise.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby

from counterpoint.analysis.breakdowns import ASPECTS, UNKNOWN
from counterpoint.analysis.logged import is_logged
from counterpoint.analysis.values import Analysis, Aspect, Breakdown, Change, CollectiveSize, CollectiveSkew
from counterpoint.report.analysis_rank_tables import (
    critical_path_table,
    idle_table,
    operators_table,
    outliers_table,
    ranks_table,
    slowdowns_table,
    steps_table,
)
from counterpoint.report.analysis_words import CAUSES, ratio
from counterpoint.report.figure_tables import Cell, FigureTable, Kind, figure_columns, format_cell, new_figures, text_column
from counterpoint.units import format_bytes


def tables_of(analysis: Analysis) -> tuple[FigureTable, ...]:
    """Return all tables that have rows, the most important first."""
    tables = (
        _causes(analysis),
        _recoverable(analysis),
        _changes(analysis),
        ranks_table(analysis),
        outliers_table(analysis),
        steps_table(analysis),
        *(_breakdown(aspect, rows) for aspect, rows in _by_aspect(analysis.breakdowns)),
        _logged_groups(analysis),
        _waits(analysis),
        _skews(analysis),
        _sizes(analysis),
        critical_path_table(analysis),
        idle_table(analysis),
        slowdowns_table(analysis),
        operators_table(analysis),
        _exposed(analysis),
    )
    return tuple(table for table in tables if table.rows)


def _causes(analysis: Analysis) -> FigureTable:
    return new_figures(
        "causes",
        "Causes of exposed communication",
        "Each exposed interval has one cause. Times are means per steady step and rank, intervals are sums.",
        [
            text_column("cause"),
            *figure_columns("us", "exposed"),
            *figure_columns("share", "share"),
            *figure_columns("number", "intervals", is_detail=True),
            text_column("meaning", is_detail=True),
            text_column("example", is_detail=True),
        ],
        (
            (CAUSES[each.cause][0], each.exposed_us, each.share, each.num_intervals, CAUSES[each.cause][1], each.example)
            for each in sorted(analysis.causes, key=lambda each: -each.exposed_us)
        ),
    )


def _recoverable(analysis: Analysis) -> FigureTable:
    return new_figures(
        "recoverable",
        "Recoverable time",
        "Simulated time per step. Each value is for that change alone, so the values do not add up.",
        [
            text_column("change"),
            *figure_columns("us", "recovers"),
            *figure_columns("share", "of the step"),
            *figure_columns("us", "step with it", is_detail=True),
            text_column("causes", is_detail=True),
            text_column("certainty", is_detail=True),
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
    """Return the changes between two runs. Units differ by row, so figures are text here."""
    return new_figures(
        "changes",
        "What changed",
        "The spread is half the interquartile range over steady steps, of the run with the wider one.",
        [
            text_column("figure"),
            *(text_column(name) for name in ("before", "after", "difference")),
            text_column("spread", is_detail=True),
            text_column("beyond the spread"),
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
        sign + _in_points(kind, difference),
        _in_points(kind, change.spread),
        "yes" if abs(difference) > change.spread else "no",
    )


def _in_points(kind: Kind, difference: float) -> str:
    """Format a difference of two figures; that of two shares is in percentage points."""
    return f"{100 * difference:z.1f} points" if kind == "share" else format_cell(kind, difference)


def _by_aspect(rows: Iterable[Breakdown]) -> Iterator[tuple[Aspect, list[Breakdown]]]:
    order = {aspect: place for place, aspect in enumerate(ASPECTS)}
    ordered = sorted(rows, key=lambda row: (order[row.aspect], -row.exposed_us, -row.communication_us))
    for aspect, group in groupby(ordered, key=lambda row: row.aspect):
        found = list(group)
        if [row.name for row in found] != [UNKNOWN]:
            yield aspect, found


def _breakdown(aspect: Aspect, rows: Iterable[Breakdown]) -> FigureTable:
    name = aspect.replace("_", " ")
    return new_figures(
        f"by-{aspect.replace('_', '-')}",
        f"Communication by {name}",
        "Means per steady step and rank. Communication is the time in which pieces of collectives run.",
        [
            text_column(name),
            *figure_columns("us", "communication", "exposed"),
            *figure_columns("share", "exposed share"),
            *figure_columns("number", "collectives", is_detail=True),
            *figure_columns("bytes", "size", is_detail=True),
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


def _logged_groups(analysis: Analysis) -> FigureTable:
    """Return the process groups of logs, which have no steps to average; a group that several ranks ran counts once."""
    groups: dict[tuple[str | None, int], list[CollectiveSize]] = {}
    for size in analysis.sizes if is_logged(analysis.ranks) else ():
        groups.setdefault((size.process_group, size.group_size), []).append(size)
    times = {group: sum(each.count * each.mean_us for each in sizes) for group, sizes in groups.items()}
    return new_figures(
        "logged-groups",
        "Logged communication by process group",
        "Sums over the whole log. If several ranks are given, times are those of the last rank to arrive.",
        [text_column("process group"), *figure_columns("number", "ranks", "collectives"), *figure_columns("us", "time")],
        (
            (*group, sum(each.count for each in groups[group]), time_us)
            for group, time_us in sorted(times.items(), key=lambda entry: -entry[1])
        ),
    )


def _waits(analysis: Analysis) -> FigureTable:
    return new_figures(
        "waits",
        "Waits of ranks",
        "All steps, in collectives that every rank of the group ran and recorded. The rank that waits least is "
        "the one the others wait for.",
        [
            *figure_columns("number", "rank"),
            *figure_columns("us", "waited"),
            *figure_columns("us", "mean wait", is_detail=True),
            *figure_columns("number", "came last"),
            *figure_columns("number", "came first", "collectives", is_detail=True),
        ],
        (
            (each.rank, each.waited_us, each.mean_us, each.times_last, each.times_first, each.num_collectives)
            for each in sorted(analysis.waits, key=lambda each: each.waited_us)
        ),
    )


def _skews(analysis: Analysis) -> FigureTable:
    return new_figures(
        "skews",
        "Skew of collectives",
        "Skew is the time from the first rank's arrival to the last rank's. Latency counts from the last arrival.",
        [
            text_column("collective"),
            *figure_columns("us", "skew", "latency"),
            *figure_columns("number", "last rank"),
            *figure_columns("number", "first rank", "step", is_detail=True),
            text_column("process group", is_detail=True),
            text_column("what the last rank did", is_detail=True),
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
        skew.step if skew.step >= 0 else None,  # logs hold no steps
        skew.process_group,
        skew.last_did,
    )


def _sizes(analysis: Analysis) -> FigureTable:
    rows = sorted(analysis.sizes, key=lambda each: -each.mean_us * each.count)
    alike = Counter(_as_shown(each) for each in rows)
    # sizes that differ by less than is shown are told apart by their bytes
    exact = figure_columns("number", "bytes") if any(number > 1 for number in alike.values()) else ()
    return new_figures(
        "sizes",
        "Collectives by size",
        "All steps. Bus bandwidth is computed as in nccl-tests. Imbalance is the largest part of an all-to-all "
        "over the mean part.",
        [
            text_column("collective"),
            *figure_columns("bytes", "size"),
            *exact,
            *figure_columns("number", "ranks", "count", is_detail=True),
            *figure_columns("us", "mean"),
            *figure_columns("us", "least", "most", is_detail=True),
            *figure_columns("rate", "bus bandwidth"),
            *figure_columns("number", "imbalance", is_detail=True),
            text_column("transport", is_detail=True),
            text_column("process group", is_detail=True),
        ],
        (
            (
                each.collective.replace("_", "-"),
                each.num_bytes or None,  # of an unknown size
                *([each.num_bytes if alike[_as_shown(each)] > 1 else None] if exact else []),
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
            for each in rows
        ),
    )


def _as_shown(row: CollectiveSize) -> tuple[object, ...]:
    return row.collective, format_bytes(row.num_bytes), row.group_size, row.transport, row.process_group


def _exposed(analysis: Analysis) -> FigureTable:
    names = {(each.rank, each.number): each.name for rank in analysis.ranks for each in rank.collectives}
    return new_figures(
        "exposed",
        "Exposed intervals",
        "All steps, the longest first. Starts are on the clock of the first rank.",
        [
            text_column("cause"),
            *figure_columns("us", "exposed"),
            *figure_columns("number", "rank"),
            *figure_columns("number", "step", is_detail=True),
            *figure_columns("us", "start", is_detail=True),
            text_column("collective", is_detail=True),
            text_column("evidence", is_detail=True),
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
