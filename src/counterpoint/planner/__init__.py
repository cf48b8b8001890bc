"""The planner: it searches over all controls, and it may answer that none pays."""

from counterpoint.planner.search import Trial, Tuning
from counterpoint.planner.tuning import tune

__all__ = ["Trial", "Tuning", "tune"]
