"""Which steps of which ranks means are over, and how far single steps lie from each other."""

from collections.abc import Sequence

from counterpoint.analysis.values import RankAnalysis, StepFigures
from counterpoint.measurement.values import half_width

StepOfRank = tuple[int, int]  # rank and step


def steady_steps(ranks: Sequence[RankAnalysis]) -> tuple[StepFigures, ...]:
    """The steady steps of all ranks; of a rank without any, all of its steps."""
    return tuple(step for analysis in ranks for step in (tuple(s for s in analysis.steps if s.is_steady) or analysis.steps))


def keys_of(steps: Sequence[StepFigures]) -> frozenset[StepOfRank]:
    """Rank and number of each step."""
    return frozenset((step.rank, step.step) for step in steps)


def spread_of(figures: Sequence[float]) -> float:
    """The half-width of the middle half, as the judge of measurements has it; 0 of nothing."""
    return half_width(figures) if figures else 0.0
