"""One planner over all controls. It may answer that none pays."""

from counterpoint.planner.front import tune
from counterpoint.planner.search import MIN_GAIN, Trial, Tuning

__all__ = ["MIN_GAIN", "Trial", "Tuning", "tune"]
