"""One planner over all controls. It may answer that none pays."""

from counterpoint.planner.search import MIN_GAIN, Trial, Tuning, tune

__all__ = ["MIN_GAIN", "Trial", "Tuning", "tune"]
