"""One planner over all controls. It may answer that none pays."""

from counterpoint.planner.search import Trial, Tuning
from counterpoint.planner.tuning import tune

__all__ = ["Trial", "Tuning", "tune"]
