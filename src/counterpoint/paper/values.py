"""The results of the first paper's grid and sweeps: rows of variants, whole grids, and points of a sweep."""

from collections.abc import Iterable
from typing import Literal, Self

from msgspec.structs import replace

from counterpoint.paper.cases import Axis
from counterpoint.plan import Plan
from counterpoint.value import Value

PLAIN, SEQUENTIAL, CHOICE, COPY_ENGINES = "plain overlap", "sequential", "planner's choice", "copy engines"
PRIORITY = "priority"
SumBy = Literal["torch", "one kernel"]  # what adds the blocks; torch did until 2026-11-26, and nothing simulates that now


class Energy(Value, frozen=True, kw_only=True):
    """The GPUs' own energy counters for one variant: `joules_per_step` of all GPUs, `watts` as the mean of one GPU."""

    joules_per_step: float
    watts: float


class PaperRow(Value, frozen=True, kw_only=True):
    """One variant. `measured_us` and the fields that belong to it are None if nothing ran on a GPU.

    `ratio` is the measured time over that of plain overlap in the same rounds, `spread` its spread. `time_ratio` is the time
    over the sequential time, and `overlap_ratio` the hidden part of communication (docs/metrics.md), both measured if the
    row was; `overlap_ratio` is None if no timeline shows it. `is_engaged` states whether every control was verified,
    `is_identical` whether the outputs were bit-identical to plain overlap's.
    """

    label: str
    simulated_us: float | None
    measured_us: float | None = None
    ratio: float | None = None
    spread: float | None = None
    time_ratio: float | None = None
    overlap_ratio: float | None = None
    energy: Energy | None = None
    is_engaged: bool | None = None
    is_identical: bool | None = None

    @property
    def time_us(self) -> float | None:
        """The measured time, or else the simulated one."""
        return self.simulated_us if self.measured_us is None else self.measured_us


def with_time_ratios(rows: Iterable[PaperRow]) -> tuple[PaperRow, ...]:
    """Return the rows, each with its time over the sequential row's; both are measured, or both are simulated."""
    found = tuple(rows)
    sequential_us = next((row.time_us for row in found if row.label == SEQUENTIAL), None)
    if not sequential_us:
        return found
    return tuple(row if row.time_us is None else replace(row, time_ratio=row.time_us / sequential_us) for row in found)


class PaperResult(Value, frozen=True, kw_only=True):
    """One workload on one machine. `choice` is the planner's plan, `ideal_us` as in `planner/ideal.py`.

    `sum_by`: what added the blocks of reductions by copies when it was measured.
    """

    workload: str
    machine: str
    num_ranks: int
    ideal_us: float
    rows: tuple[PaperRow, ...]
    choice: Plan
    iterations: int | None = None
    sum_by: SumBy = "torch"


class SweepPoint(Value, frozen=True, kw_only=True):
    """One value of a sweep's axis: `setting` is the requested value, with a row for each variant.

    `why_left_out` states why there are no rows, for example because a CTA does not fit an SM of the machine, or no row of
    copy engines.
    """

    setting: str
    num_ranks: int
    iterations: int
    rows: tuple[PaperRow, ...] = ()
    ideal_us: float | None = None
    why_left_out: str = ""

    def with_rows(self, rows: tuple[PaperRow, ...], ideal_us: float | None, why_left_out: str = "") -> Self:
        """Return the same point with these results."""
        return replace(self, rows=rows, ideal_us=ideal_us, why_left_out=why_left_out)

    def row(self, label: str) -> PaperRow | None:
        """Return the row of a variant, or None."""
        return next((row for row in self.rows if row.label == label), None)


class Sweep(Value, frozen=True, kw_only=True):
    """One workload on one machine along one axis."""

    workload: str
    machine: str
    axis: Axis
    points: tuple[SweepPoint, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """Return all variants in the order of their first occurrence."""
        return tuple(dict.fromkeys(row.label for point in self.points for row in point.rows))
