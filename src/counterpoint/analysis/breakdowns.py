"""The communication of the steady steps, broken down by aspects of its collectives, and exposed time by cause."""

from collections.abc import Mapping, Sequence
from typing import get_args

from counterpoint.analysis.values import (
    Aspect,
    Breakdown,
    Cause,
    CauseTotal,
    ExposedInterval,
    RankAnalysis,
    StepOfRank,
    TracedCollective,
)

UNKNOWN = "unknown"  # a module or phase that the trace does not give; tables of nothing else are not printed
ASPECTS: tuple[Aspect, ...] = get_args(Aspect)

Collectives = Mapping[tuple[int, int], TracedCollective]  # by rank and number


def collectives_of(ranks: Sequence[RankAnalysis]) -> dict[tuple[int, int], TracedCollective]:
    """Return all collectives, by rank and number."""
    return {(c.rank, c.number): c for analysis in ranks for c in analysis.collectives}


def breakdowns(
    collectives: Collectives, exposed: Sequence[ExposedInterval], steps: frozenset[StepOfRank]
) -> tuple[Breakdown, ...]:
    """Return means per step and rank by each aspect; an aspect's exposed times add up to the exposed time of the steps."""
    alike: dict[tuple[str, ...], list[float]] = {}  # by the names of all aspects: count, communication, exposed, bytes
    for collective in collectives.values():
        if (collective.rank, collective.step) in steps:
            sums = alike.setdefault(_names(collective), [0, 0.0, 0.0, 0])
            sums[0] += 1
            sums[1] += collective.end_us - collective.start_us - collective.paused_us
            sums[3] += collective.num_bytes
    for interval in exposed:
        if (interval.rank, interval.step) in steps:
            names = _names(collectives.get((interval.rank, interval.collective)))
            alike.setdefault(names, [0, 0.0, 0.0, 0])[2] += interval.duration_us
    return tuple(row for place, aspect in enumerate(ASPECTS) for row in _by_aspect(aspect, place, alike, len(steps)))


def _by_aspect(
    aspect: Aspect, place: int, alike: Mapping[tuple[str, ...], Sequence[float]], num_steps: int
) -> list[Breakdown]:
    totals: dict[str, list[float]] = {}
    for names, sums in alike.items():
        total = totals.setdefault(names[place], [0, 0.0, 0.0, 0])
        total[:] = [one + other for one, other in zip(total, sums, strict=True)]
    rows = [
        Breakdown(
            aspect=aspect,
            name=name,
            num_collectives=count / num_steps,
            communication_us=communication_us / num_steps,
            exposed_us=exposed_us / num_steps,
            num_bytes=num_bytes / num_steps,
        )
        for name, (count, communication_us, exposed_us, num_bytes) in totals.items()
    ]
    return sorted(rows, key=lambda row: (-row.exposed_us, -row.communication_us, row.name))


def _names(collective: TracedCollective | None) -> tuple[str, ...]:
    """Return the names of one collective by each aspect, in the order of `ASPECTS`."""
    if collective is None:
        return (UNKNOWN,) * len(ASPECTS)
    return (
        collective.collective,
        collective.process_group or UNKNOWN,
        f"stream {collective.stream}",
        collective.module or UNKNOWN,
        collective.phase,
        collective.transport or UNKNOWN,
    )


def cause_totals(exposed: Sequence[ExposedInterval], steps: frozenset[StepOfRank]) -> tuple[CauseTotal, ...]:
    """Return exposed time by cause, largest first; the example is the evidence of the longest interval."""
    by_cause: dict[Cause, list[ExposedInterval]] = {}
    for interval in exposed:
        if (interval.rank, interval.step) in steps and interval.duration_us > 0:
            by_cause.setdefault(interval.cause, []).append(interval)
    times = {cause: sum(interval.duration_us for interval in intervals) for cause, intervals in by_cause.items()}
    total_us = sum(times.values())
    return tuple(
        CauseTotal(
            cause=cause,
            exposed_us=times[cause] / len(steps),
            share=times[cause] / total_us,
            num_intervals=len(intervals),
            example=max(intervals, key=lambda interval: interval.duration_us).evidence,
        )
        for cause, intervals in sorted(by_cause.items(), key=lambda entry: (-times[entry[0]], entry[0]))
    )


def sums_problems(ranks: Sequence[RankAnalysis], exposed: Sequence[ExposedInterval]) -> tuple[str, ...]:
    """Return a sentence for steps whose intervals' sum differs from their exposed time by a nanosecond or more."""
    sums: dict[StepOfRank, float] = {}
    for interval in exposed:
        place = (interval.rank, interval.step)
        sums[place] = sums.get(place, 0.0) + interval.duration_us
    return tuple(
        f"The causes of rank {step.rank}'s step {step.step} add up to "
        f"{sums.get((step.rank, step.step), 0.0):.3f} us, but {step.exposed_us:.3f} us are exposed, so they "
        "cannot be trusted."
        for analysis in ranks
        for step in analysis.steps
        if abs(sums.get((step.rank, step.step), 0.0) - step.exposed_us) > 1e-3
    )
