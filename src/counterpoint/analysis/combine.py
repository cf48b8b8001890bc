"""Combines all ranks: turns one `RankAnalysis` per trace into the `Analysis` that is printed, compared and gated."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from counterpoint.analysis.alignment import RankClock, align_clocks, describe_drifts
from counterpoint.analysis.attribution import attribute
from counterpoint.analysis.breakdowns import breakdowns, cause_totals, collectives_of, sums_problems
from counterpoint.analysis.headline import headline
from counterpoint.analysis.logged import combine_logs, is_logged
from counterpoint.analysis.matching import find_stranger, match_collectives
from counterpoint.analysis.membership import belonging, describe_missing, missing_ranks
from counterpoint.analysis.sizes import collective_sizes
from counterpoint.analysis.values import (
    Analysis,
    ExposedInterval,
    Headline,
    RankAnalysis,
    StepFigures,
    keys_of,
    steady_steps,
)
from counterpoint.analysis.waits import arrivals, rank_waits, skew_of
from counterpoint.errors import AnalysisError


def combine(ranks: Sequence[RankAnalysis]) -> Analysis:
    """Analyze ranks of one job together, given in any order; one rank is enough.

    Traces that do not belong to the job are left out and named in `problems`; notes of one rank stay with that rank. Raises
    `AnalysisError` without any trace.
    """
    if not ranks:
        raise AnalysisError("There is no trace to analyze. Name at least one file.")
    if is_logged(ranks):
        return combine_logs(ranks)
    kept, strangers = belonging(ranks)
    shared, mismatches = match_collectives(kept)
    clocks, clock_problems = align_clocks(kept, shared)
    met = arrivals(shared, clocks)
    exposed = attribute(kept, met)
    missing = missing_ranks(kept)
    wrong_sums = sums_problems(kept, exposed)
    analysis = replace(
        _means(kept, exposed),
        exposed=_on_shared_clock(exposed, clocks),
        sizes=collective_sizes(kept, met),
        waits=rank_waits(met),
        skews=tuple(skew_of(arrival) for arrival in met),
        clock_offsets_us=tuple((rank, clock.offset_us) for rank, clock in sorted(clocks.items())),
        missing_ranks=missing,
        notes=describe_drifts(clocks),
        untrusted=find_stranger(kept, shared),
        left_out=strangers,
        problems=(*strangers, *mismatches, *clock_problems, *describe_missing(kept, missing), *wrong_sums),
    )
    unknown = wrong_sums[0] if wrong_sums else ""
    return replace(analysis, headline=headline(analysis, collectives_of(kept), exposed, unknown))


def _means(ranks: tuple[RankAnalysis, ...], exposed: Sequence[ExposedInterval]) -> Analysis:
    """Return the means over steady steps and ranks, by cause and by aspect."""
    steps = steady_steps(ranks)
    keys = keys_of(steps)
    communication_us = _mean(steps, "communication_us")
    overlapped_us = _mean(steps, "overlapped_us")
    return Analysis(
        ranks=ranks,
        headline=Headline(verdict="", why=(), next=()),
        step_us=_mean(steps, "makespan_us"),
        communication_us=communication_us,
        exposed_us=_mean(steps, "exposed_us"),
        overlap_ratio=overlapped_us / communication_us if communication_us > 0 else None,
        idle_us=_mean(steps, "idle_us"),
        launch_bound_us=_mean(steps, "launch_bound_us"),
        causes=cause_totals(exposed, keys),
        breakdowns=breakdowns(collectives_of(ranks), exposed, keys),
    )


def _mean(steps: Sequence[StepFigures], figure: str) -> float:
    return sum(getattr(step, figure) for step in steps) / len(steps) if steps else 0.0


def _on_shared_clock(exposed: Sequence[ExposedInterval], clocks: Mapping[int, RankClock]) -> tuple[ExposedInterval, ...]:
    """Return intervals on the clock that ranks share, by time; those of ranks that are not aligned keep their own clock."""
    alone = RankClock()
    shifted = (
        replace(interval, start_us=clock.shared_us(interval.start_us), end_us=clock.shared_us(interval.end_us))
        for interval in exposed
        for clock in (clocks.get(interval.rank, alone),)
    )
    return tuple(sorted(shifted, key=lambda interval: (interval.start_us, interval.rank, interval.end_us)))
