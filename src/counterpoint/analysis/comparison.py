"""What changed between two runs, and where the time went."""

import re
from collections.abc import Callable, Sequence
from typing import get_args

from msgspec.structs import replace

from counterpoint.analysis.attribution import LEAST_IMBALANCE
from counterpoint.analysis.logged import is_logged
from counterpoint.analysis.values import (
    Analysis,
    Cause,
    Change,
    CollectiveSize,
    OperatorRow,
    StepFigures,
    label_of,
    spread_of,
    steady_steps,
)

HASH = re.compile(r"0x[0-9a-f]+")
FIGURES: tuple[tuple[str, Callable[[StepFigures], float]], ...] = (
    ("step time", lambda step: step.makespan_us),
    ("computation", lambda step: step.computation_us),
    ("communication", lambda step: step.communication_us),
    ("exposed communication", lambda step: step.exposed_us),
    ("idle time", lambda step: step.idle_us),
    ("launch-bound time", lambda step: step.launch_bound_us),
)


def compare(before: Analysis, after: Analysis) -> tuple[Change, ...]:
    """Return the changes of times per step, by cause, by collective and by operator, the largest first.

    Times of the step, the overlap ratio and the causes are always included. Collectives are included if they changed by more
    than their spread, operators if by more than the spread of a step's computation. A share counts with the time it is of.
    """
    changes = [
        *_step_changes(before, after),
        *_cause_changes(before, after),
        *_size_changes(before, after),
        *_operator_changes(before, after),
    ]
    scale = {"us": 1.0, "share": max(before.communication_us, after.communication_us), "count": 0.0}
    return tuple(sorted(changes, key=lambda c: (-abs(c.after - c.before) * scale[c.unit], c.what)))


def comparison_problems(before: Analysis, after: Analysis) -> tuple[str, ...]:
    """Return the reasons why two analyses may not be of the same job, one sentence each."""
    problems: list[str] = []
    if is_logged((*before.ranks, *after.ranks)):
        problems.append("Logs of NCCL Inspector hold no steps, so only collectives are compared.")
    problems += [f"{rank.path} cannot be compared. {rank.untrusted}" for rank in before.ranks if rank.untrusted]
    problems += [f"The traces of --compare cannot be compared. {before.untrusted}"] if before.untrusted else []
    devices = [", ".join(sorted({rank.device_name or "unknown" for rank in a.ranks})) for a in (before, after)]
    if devices[0] != devices[1]:
        problems.append(f"The runs were on different GPUs: {devices[0]} before, {devices[1]} after.")
    present = [[rank.rank for rank in analysis.ranks] for analysis in (before, after)]
    if present[0] != present[1]:
        problems.append(
            f"Different ranks are compared: {present[0]} before, {present[1]} after. Means are over those present."
        )
    return tuple(problems)


def _step_changes(before: Analysis, after: Analysis) -> list[Change]:
    steps = steady_steps(before.ranks), steady_steps(after.ranks)
    changes: list[Change] = []
    if is_logged((*before.ranks, *after.ranks)):
        return changes
    for what, figure in FIGURES:
        figures = [figure(step) for step in steps[0]], [figure(step) for step in steps[1]]
        changes.append(_change(what, *figures))
    if before.overlap_ratio is not None and after.overlap_ratio is not None:
        spread = max(spread_of([s.overlap_ratio for s in each if s.overlap_ratio is not None]) for each in steps)
        changes.append(
            Change(what="overlap", before=before.overlap_ratio, after=after.overlap_ratio, spread=spread, unit="share")
        )
    return changes


def _change(what: str, before: Sequence[float], after: Sequence[float]) -> Change:
    """Return the change of a mean over steps, with the wider spread."""
    means = [sum(figures) / len(figures) if figures else 0.0 for figures in (before, after)]
    return Change(what=what, before=means[0], after=means[1], spread=max(spread_of(before), spread_of(after)), unit="us")


def _cause_changes(before: Analysis, after: Analysis) -> list[Change]:
    found = {total.cause for analysis in (before, after) for total in analysis.causes}
    sums = _sums_by_cause(before), _sums_by_cause(after)
    return [
        _change(f"exposed: {cause}", [s.get(cause, 0.0) for s in sums[0]], [s.get(cause, 0.0) for s in sums[1]])
        for cause in get_args(Cause)
        if cause in found
    ]


def _sums_by_cause(analysis: Analysis) -> list[dict[Cause, float]]:
    """Return the exposed time by cause of each steady step of each rank."""
    sums: dict[tuple[int, int], dict[Cause, float]] = {(s.rank, s.step): {} for s in steady_steps(analysis.ranks)}
    for interval in analysis.exposed:
        by_cause = sums.get((interval.rank, interval.step))
        if by_cause is not None:
            by_cause[interval.cause] = by_cause.get(interval.cause, 0.0) + interval.duration_us
    return list(sums.values())


def _size_changes(before: Analysis, after: Analysis) -> list[Change]:
    """Return changes in mean times of collectives that both runs hold, and counts of those that only one run holds."""
    rows = _sizes_by_name(before), _sizes_by_name(after)
    changes: list[Change] = []
    for name in sorted(rows[0].keys() & rows[1].keys()):
        old, new = rows[0][name], rows[1][name]
        spread = max(old.spread_us, new.spread_us)
        if abs(new.mean_us - old.mean_us) > spread:
            changes.append(Change(what=name, before=old.mean_us, after=new.mean_us, spread=spread, unit="us"))
    for name in sorted(rows[0].keys() ^ rows[1].keys()):
        counts = [side[name].count if name in side else 0 for side in rows]
        changes.append(Change(what=f"count: {name}", before=counts[0], after=counts[1], spread=0.0, unit="count"))
    return changes


def _sizes_by_name(analysis: Analysis) -> dict[str, CollectiveSize]:
    """Return rows by kind, size, transport and group. Uneven all-to-alls share a row: their sizes vary by step."""
    rows: dict[str, CollectiveSize] = {}
    for size in analysis.sizes:
        is_uneven = size.collective == "all_to_all" and size.imbalance > LEAST_IMBALANCE
        sized = "uneven all_to_all" if is_uneven else f"{label_of(size)} ({size.num_bytes} B)"
        name = f"{sized}, {size.transport}, {_group_name(size)} of {size.group_size}"
        rows[name] = _joined(rows[name], size) if name in rows else size
    return rows


def _group_name(size: CollectiveSize) -> str:
    """Return the process group's name; a hash from a log is replaced, because it differs in each run."""
    name = size.process_group or ""
    return "unnamed group" if not name or HASH.fullmatch(name) else name


def _joined(first: CollectiveSize, second: CollectiveSize) -> CollectiveSize:
    """Merge two rows: take the mean of both and the wider spread."""
    count = first.count + second.count
    mean_us = (first.count * first.mean_us + second.count * second.mean_us) / count
    return replace(first, count=count, mean_us=mean_us, spread_us=max(first.spread_us, second.spread_us))


def _operator_changes(before: Analysis, after: Analysis) -> list[Change]:
    """Return operators whose time per step changed by more than the spread of a step's computation."""
    computation = [[step.computation_us for step in steady_steps(a.ranks)] for a in (before, after)]
    spread = max(spread_of(computation[0]), spread_of(computation[1]))
    times = _operators(before), _operators(after)
    changes = [
        Change(
            what=f"operator: {name}", before=times[0].get(name, 0.0), after=times[1].get(name, 0.0), spread=spread, unit="us"
        )
        for name in sorted(times[0].keys() | times[1].keys())
    ]
    return [change for change in changes if abs(change.after - change.before) > spread]


def _operators(analysis: Analysis) -> dict[str, float]:
    """Return the time per step of each operator, as the mean over ranks."""
    times: dict[str, float] = {}
    for rank in analysis.ranks:
        for row in rank.operators:
            name = _operator_name(row)
            times[name] = times.get(name, 0.0) + row.total_us / len(analysis.ranks)
    return times


def _operator_name(row: OperatorRow) -> str:
    """Return the operator and its shapes, whichever kernels it chose; without an operator, the kernel."""
    return f"{row.name or row.kernel} {row.shapes}".rstrip()
