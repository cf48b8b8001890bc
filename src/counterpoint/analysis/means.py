"""Selects the steps over which means are taken, and computes how far single steps differ."""

from collections.abc import Sequence

from counterpoint.analysis.values import RankAnalysis, StepFigures
from counterpoint.measurement.values import half_width

StepOfRank = tuple[int, int]  # rank and step


def steady_steps(ranks: Sequence[RankAnalysis]) -> tuple[StepFigures, ...]:
    """Return the steady steps of all ranks; for a rank without any, return all of its steps."""
    return tuple(step for analysis in ranks for step in (tuple(s for s in analysis.steps if s.is_steady) or analysis.steps))


def keys_of(steps: Sequence[StepFigures]) -> frozenset[StepOfRank]:
    """Return the rank and number of each step."""
    return frozenset((step.rank, step.step) for step in steps)


def spread_of(figures: Sequence[float]) -> float:
    """Return the half-width of the middle half, as the judge of measurements computes it; 0 if there are no figures."""
    return half_width(figures) if figures else 0.0
