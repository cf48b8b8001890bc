"""Tables of an `Analysis` that come from each rank's trace. Means are over steady steps."""

import re
from collections.abc import Iterator, Sequence
from statistics import fmean, median

from counterpoint.analysis.values import Analysis, OperatorRow, RankAnalysis, StepFigures
from counterpoint.kernel_names import short_name
from counterpoint.report.analysis_words import ratio
from counterpoint.report.figure_tables import Cell, FigureTable, figure_columns, new_figures, text_column

_TIMES = (
    *figure_columns("us", "makespan"),
    *figure_columns("us", "computation", is_detail=True),
    *figure_columns("us", "communication", "exposed"),
    *figure_columns("us", "idle", "launch-bound", "waiting", "copies", is_detail=True),
)
_OVERLAP = figure_columns("share", "overlap")


def _step_times(step: StepFigures) -> tuple[float, ...]:
    """Return times in the order of `_TIMES`."""
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


def ranks_table(analysis: Analysis) -> FigureTable:
    """Return the table of the ranks' mean steady steps."""
    return new_figures(
        "ranks",
        "Ranks",
        "Mean per steady step of each rank. Overlap is the share of communication that runs beside computation.",
        [
            *figure_columns("number", "rank"),
            *_TIMES[:4],
            *_OVERLAP,
            *_TIMES[4:],
            *figure_columns("number", "steady steps", "steps", is_detail=True),
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


def outliers_table(analysis: Analysis) -> FigureTable:
    """Return the steps that no mean includes."""
    return new_figures(
        "outliers",
        "Steps that are not steady",
        "No mean includes these steps. The last column compares the makespan with the rank's median steady step.",
        [*figure_columns("number", "rank", "step"), *_TIMES, *figure_columns("share", "of median")],
        (row for rank in analysis.ranks for row in _outlier_rows(rank)),
    )


def _outlier_rows(rank: RankAnalysis) -> Iterator[tuple[Cell, ...]]:
    steady = [step.makespan_us for step in rank.steps if step.is_steady]
    for step in rank.steps:
        if not step.is_steady:
            yield (rank.rank, step.step, *_step_times(step), ratio(step.makespan_us, median(steady)) if steady else None)


def steps_table(analysis: Analysis) -> FigureTable:
    """Return each steady step; a rank with one step is left out, because the table of ranks shows it already."""
    steps = [step for rank in analysis.ranks if len(rank.steps) > 1 for step in rank.steps if step.is_steady]
    return new_figures(
        "steps",
        "Steady steps",
        "Each steady step of each rank.",
        [*figure_columns("number", "rank", "step"), *_TIMES[:4], *_OVERLAP, *_TIMES[4:]],
        ((step.rank, step.step, *_step_times(step)[:4], step.overlap_ratio, *_step_times(step)[4:]) for step in steps),
    )


def critical_path_table(analysis: Analysis) -> FigureTable:
    """Return what determines the length of a step."""
    return new_figures(
        "critical-path",
        "Critical path",
        "The chain of operations that determines the length of the step, by kind of operation. Mean per steady step.",
        [
            *figure_columns("number", "rank"),
            text_column("through"),
            *figure_columns("us", "time"),
            *figure_columns("share", "share"),
        ],
        (
            (row.rank, row.cause, row.time_us, ratio(row.time_us, sum(each.time_us for each in rank.critical_path)))
            for rank in analysis.ranks
            for row in sorted(rank.critical_path, key=lambda row: -row.time_us)
        ),
    )


def idle_table(analysis: Analysis) -> FigureTable:
    """Return the table of what streams wait for."""
    return new_figures(
        "idle",
        "Idle time of streams",
        "Mean per steady step, by what the stream waited for.",
        [*figure_columns("number", "rank", "stream"), text_column("waited for"), *figure_columns("us", "time")],
        (
            (row.rank, row.stream, row.cause, row.time_us)
            for rank in analysis.ranks
            for row in sorted(rank.idle, key=lambda row: -row.time_us)
        ),
    )


def slowdowns_table(analysis: Analysis) -> FigureTable:
    """Return the table of what communication costs the computation beside it."""
    rows = [row for rank in analysis.ranks for row in rank.slowdowns]
    return new_figures(
        "slowdowns",
        "Computation slowed by communication beside it",
        "Times of one kernel, alone and beside communication. Lost time is per step.",
        [
            text_column("kernel"),
            *figure_columns("us", "lost"),
            text_column("shared"),
            *figure_columns("number", "rank", "count", is_detail=True),
            *figure_columns("us", "alone", "beside", is_detail=True),
            text_column("communication", is_detail=True),
        ],
        (
            (row.kernel, row.lost_us, row.by, row.rank, row.count, row.alone_us, row.beside_us, row.beside)
            for row in sorted(rows, key=lambda row: -row.lost_us)
        ),
    )


def operators_table(analysis: Analysis) -> FigureTable:
    """Return the table of operators by time, as a mean over ranks."""
    rows: dict[tuple[str, str, str], list[OperatorRow]] = {}
    for rank in analysis.ranks:
        for row in rank.operators:
            rows.setdefault((row.name, row.kernel, row.shapes), []).append(row)
    merged = (_operator_row(group, len(analysis.ranks)) for group in rows.values())
    return new_figures(
        "operators",
        "Operators",
        "Mean per steady step and rank.",
        [
            text_column("operator"),
            *figure_columns("us", "time"),
            *figure_columns("number", "count", is_detail=True),
            *figure_columns("us", "mean", is_detail=True),
            *figure_columns("number", "TFLOP/s", is_detail=True),
            *(text_column(name) for name in ("shapes", "kernel")),  # rows of one operator differ by these
        ],
        (cells for _, cells in sorted(merged, key=lambda row: -row[0])),
    )


def _operator_row(rows: Sequence[OperatorRow], num_ranks: int) -> tuple[float, tuple[Cell, ...]]:
    """Return the mean over all ranks; a rank without the operator counts as zero. TFLOP/s are a mean over ranks that
    state them.
    """
    total_us, count = (sum(values) / num_ranks for values in zip(*((row.total_us, row.count) for row in rows), strict=True))
    known = [row.tflops for row in rows if row.tflops is not None]
    first = rows[0]
    mean_us = ratio(total_us, count)
    return total_us, (
        first.name,
        total_us,
        count,
        mean_us,
        fmean(known) if known else None,
        _in_short(first.shapes),
        short_name(first.kernel),
    )


def _in_short(shapes: str) -> str:
    """Return the shapes of tensors as in "8192x4096, 4096x7168"; inputs without a shape are left out."""
    found = re.findall(r"\[([\d, ]+)\]", shapes)
    return ", ".join(each.replace(", ", "x") for each in found) or shapes.strip("[], ")
