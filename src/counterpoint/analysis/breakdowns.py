"""Communication of the steady steps by aspects of its collectives, and exposed time by cause."""

from collections.abc import Mapping, Sequence
from typing import get_args

from counterpoint.analysis.means import StepOfRank
from counterpoint.analysis.values import (
    Aspect,
    Breakdown,
    Cause,
    CauseTotal,
    ExposedInterval,
    RankAnalysis,
    TracedCollective,
)

UNKNOWN = "unknown"

Collectives = Mapping[tuple[int, int], TracedCollective]  # by rank and number


def collectives_of(ranks: Sequence[RankAnalysis]) -> dict[tuple[int, int], TracedCollective]:
    """All collectives, by rank and number."""
    return {(c.rank, c.number): c for analysis in ranks for c in analysis.collectives}


def breakdowns(
    collectives: Collectives, exposed: Sequence[ExposedInterval], steps: frozenset[StepOfRank]
) -> tuple[Breakdown, ...]:
    """Times per step and rank by each aspect; the exposed times of one aspect add up to the exposed time of the steps."""
    rows: list[Breakdown] = []
    for aspect in get_args(Aspect):
        rows += _by_aspect(aspect, collectives, exposed, steps)
    return tuple(rows)


def _by_aspect(
    aspect: Aspect, collectives: Collectives, exposed: Sequence[ExposedInterval], steps: frozenset[StepOfRank]
) -> list[Breakdown]:
    exposed_us: dict[str, float] = {}
    for interval in exposed:
        if (interval.rank, interval.step) in steps:
            name = _name(aspect, collectives.get((interval.rank, interval.collective)))
            exposed_us[name] = exposed_us.get(name, 0.0) + interval.duration_us
    held: dict[str, list[TracedCollective]] = {name: [] for name in exposed_us}
    for collective in collectives.values():
        if (collective.rank, collective.step) in steps:
            held.setdefault(_name(aspect, collective), []).append(collective)
    rows = [
        Breakdown(
            aspect=aspect,
            name=name,
            num_collectives=len(members),
            communication_us=sum(c.end_us - c.start_us for c in members) / len(steps),
            exposed_us=exposed_us.get(name, 0.0) / len(steps),
            num_bytes=sum(c.num_bytes for c in members),
        )
        for name, members in held.items()
    ]
    return sorted(rows, key=lambda row: (-row.exposed_us, -row.communication_us, row.name))


def _name(aspect: Aspect, collective: TracedCollective | None) -> str:
    """What the aspect is called for one collective."""
    if collective is None:
        return UNKNOWN
    names: dict[Aspect, str | None] = {
        "collective": collective.collective,
        "process_group": collective.process_group,
        "stream": f"stream {collective.stream}",
        "module": collective.module,
        "phase": collective.phase,
        "transport": collective.transport,
    }
    return names[aspect] or UNKNOWN


def cause_totals(exposed: Sequence[ExposedInterval], steps: frozenset[StepOfRank]) -> tuple[CauseTotal, ...]:
    """Exposed time by cause, largest first; the example is the evidence of the longest interval."""
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
    """Steps whose intervals with causes do not add up to their exposed time, by a nanosecond or more."""
    sums: dict[StepOfRank, float] = {}
    for interval in exposed:
        place = (interval.rank, interval.step)
        sums[place] = sums.get(place, 0.0) + interval.duration_us
    return tuple(
        f"Causes of rank {step.rank}'s step {step.step} add up to {sums.get((step.rank, step.step), 0.0):.3f} us, but "
        f"{step.exposed_us:.3f} us are exposed: its causes are not to be trusted."
        for analysis in ranks
        for step in analysis.steps
        if abs(sums.get((step.rank, step.step), 0.0) - step.exposed_us) > 1e-3
    )
