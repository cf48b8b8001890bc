"""The simulator's errors over the measured variants of one of the paper's workloads."""

import numpy as np
from numpy.typing import NDArray

from counterpoint.paper.values import CHOICE, PaperResult
from counterpoint.value import Value


class SimulationAccuracy(Value, frozen=True, kw_only=True):
    """Simulated against measured times over the variants of one workload: errors as fractions, Spearman's correlation."""

    num_rows: int
    mean_absolute_error: float
    worst_error: float
    worst_label: str
    rank_correlation: float


def simulation_accuracy(result: PaperResult) -> SimulationAccuracy | None:
    """Return the simulator's errors over a workload's measured variants; None if fewer than three were measured."""
    rows = [row for row in result.rows if row.measured_us and row.simulated_us and row.label != CHOICE]
    if len(rows) < 3:
        return None
    measured, simulated = (np.array([getattr(row, name) for row in rows]) for name in ("measured_us", "simulated_us"))
    errors = simulated / measured - 1
    worst = int(np.argmax(np.abs(errors)))
    return SimulationAccuracy(
        num_rows=len(rows),
        mean_absolute_error=float(np.mean(np.abs(errors))),
        worst_error=float(errors[worst]),
        worst_label=rows[worst].label,
        rank_correlation=rank_correlation(measured, simulated),
    )


def rank_correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Return Spearman's correlation; NaN if all values of one side are equal."""
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return float("nan")
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the ranks from smallest to greatest; equal values get the mean of their ranks."""
    below = (values[:, None] > values).sum(axis=1)
    equal = (values[:, None] == values).sum(axis=1)
    return np.asarray(below + (equal - 1) / 2, np.float64)
