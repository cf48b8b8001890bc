"""Joins profiled steps into one where communication runs only in some of them, as with gradient accumulation.

A job that calls `profiler.step()` after each micro-batch has steps that repeat with a period: only the last micro-batch of a
period reduces gradients. None of these steps alone tells how much of the job's time is exposed communication, but a whole
period does. This module compares the names of communication alone, because computation may vary from step to step.
"""

from collections import Counter
from collections.abc import Sequence
from statistics import median

from counterpoint.traces.activity import ActivityTrace, GpuOperation
from counterpoint.traces.classify import is_communication
from counterpoint.units import format_count

LEAST_UNEVEN_SHARE = 0.05
"""If steps of a period differ by less than this share of their communication, each stays a step: a loss that is reduced in
every tenth step does not make one step of ten."""

Joined = tuple[list[list[int]], list[str]]
Kind = frozenset[tuple[str, int]]  # the names of a step's communication, and how often each occurs


def join_micro_batches(trace: ActivityTrace, steps: Sequence[Sequence[int]]) -> Joined:
    """Return the steps, those of each period joined into one if communication differs within a period, and a note on that.

    If at least half of the steps do not communicate, and the others follow no period, all are joined into one step.
    """
    found = [_communication(trace, step) for step in steps]
    kinds = [frozenset(Counter([operation.name for operation in line]).items()) for line in found]
    num_silent = kinds.count(frozenset())
    are_mostly_silent = num_silent < len(steps) <= 2 * num_silent
    period = _period(kinds, least_seen=1 if are_mostly_silent else 2)
    if period and (are_mostly_silent or _uneven_share(kinds[:period], found) > LEAST_UNEVEN_SHARE):
        return _by_period(steps, period, kinds)
    if not are_mostly_silent:
        return [list(step) for step in steps], []
    last = max(number for number, kind in enumerate(kinds) if kind)
    num_joined = last + 1 if 2 * (last + 1) >= len(steps) else len(steps)  # a step that communicates ends a period
    note = (
        f"Only {len(steps) - num_silent} of {len(steps)} profiled steps communicate, so the first {num_joined} together "
        "count as one step. With gradient accumulation, profile at least two whole periods."
    )
    return [_joined(steps[:num_joined])], [note]


def _communication(trace: ActivityTrace, step: Sequence[int]) -> list[GpuOperation]:
    operations = map(trace.operations.__getitem__, step)
    return [operation for operation in operations if is_communication(operation.category, operation.name)]


def _period(kinds: Sequence[Kind], least_seen: int) -> int:
    """Return the shortest period of the steps, 0 if there is none. `least_seen` whole periods must be present, and something
    besides the most common kind of step must be seen again a period later.
    """
    common = Counter(kinds).most_common(1)[0][0]
    for period in range(2, len(kinds) // least_seen + 1):
        again = range(len(kinds) - period)
        if any(kinds[i] != common for i in again) and all(kinds[i] == kinds[i + period] for i in again):
            return period
    return 0


def _uneven_share(kinds: Sequence[Kind], found: Sequence[list[GpuOperation]]) -> float:
    """Return by how much communication of steps in a period differs from that of the most common kind, as a share of all.

    The least time of each place in the period counts, since longer ones waited for other ranks.
    """
    times_us = [sum(operation.duration_us for operation in each) for each in found]
    least_us = [min(times_us[place :: len(kinds)]) for place in range(len(kinds))]
    common = Counter(kinds).most_common(1)[0][0]
    usual_us = median(time_us for time_us, kind in zip(least_us, kinds, strict=True) if kind == common)
    differences = (abs(time_us - usual_us) for time_us, kind in zip(least_us, kinds, strict=True) if kind != common)
    return sum(differences) / (sum(least_us) or 1.0)


def _by_period(steps: Sequence[Sequence[int]], period: int, kinds: Sequence[Kind]) -> Joined:
    """Return the steps of each whole period as one: as many periods as possible, which end with the most communication.

    The choice depends on no times, so all ranks of a job make the same one.
    """
    sizes = [sum(count for _, count in kind) for kind in kinds]
    first = max(range(period), key=lambda place: ((len(steps) - place) // period, sizes[(place - 1) % period], -place))
    num_periods = (len(steps) - first) // period
    starts = range(first, first + num_periods * period, period)
    note = (
        f"Communication repeats every {period} profiled steps, as with gradient accumulation: {period} together count as "
        "one step."
    )
    left_out = len(steps) - num_periods * period
    said = f" {format_count(left_out, 'step')} outside whole periods {'was' if left_out == 1 else 'were'} left out."
    return [_joined(steps[start : start + period]) for start in starts], [note + (said if left_out else "")]


def _joined(steps: Sequence[Sequence[int]]) -> list[int]:
    return [index for step in steps for index in step]
