"""Which steps of which ranks means are over, and how far single steps lie from each other."""

from collections.abc import Sequence
from statistics import quantiles

from counterpoint.analysis.values import RankAnalysis, StepFigures

StepOfRank = tuple[int, int]  # rank and step


def steady_steps(ranks: Sequence[RankAnalysis]) -> tuple[StepFigures, ...]:
    """The steady steps of all ranks; of a rank without any, all of its steps."""
    return tuple(step for analysis in ranks for step in (tuple(s for s in analysis.steps if s.is_steady) or analysis.steps))


def keys_of(steps: Sequence[StepFigures]) -> frozenset[StepOfRank]:
    """Rank and number of each step."""
    return frozenset((step.rank, step.step) for step in steps)


def spread_of(figures: Sequence[float]) -> float:
    """Half of the distance between the quartiles; 0 for fewer than two figures."""
    if len(figures) < 2:
        return 0.0
    lower, _, upper = quantiles(figures, n=4, method="inclusive")
    return (upper - lower) / 2
