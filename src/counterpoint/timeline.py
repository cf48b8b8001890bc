"""A timeline: what ran when, per rank and stream; and the interface of what produces one.

A timeline may be measured or simulated; readers do not distinguish. `origin` is only for printing, not for branching.
"""

import math
from abc import ABC, abstractmethod
from typing import Literal, get_args

from counterpoint.display import html_list, shortened
from counterpoint.errors import StepError, shown
from counterpoint.machine import Machine
from counterpoint.plan import Plan
from counterpoint.step import OperationKind, Step
from counterpoint.units import format_count, format_us
from counterpoint.value import Value, check_types, require

KINDS = get_args(OperationKind)
NO_OPERATION = -1  # marks an interval that ran during the step and is none of its operations


class Interval(Value, frozen=True, kw_only=True):
    """One operation's time on the GPU. `operation` is its index in the step; times are from the start of the step.

    A measured timeline may show the matching operation of another step under the same index, and anything else as
    `NO_OPERATION`.
    """

    rank: int
    stream: int
    operation: int
    name: str
    kind: OperationKind
    start_us: float
    end_us: float

    def __post_init__(self) -> None:
        if self.kind not in KINDS:  # not all types, because a simulation builds hundreds
            raise StepError(f"The kind of an interval must be one of {', '.join(KINDS)}; found '{shown(str(self.kind))}'.")
        if not 0 <= self.start_us <= self.end_us < math.inf:
            raise StepError(
                f"An interval must start at 0 or later and end no earlier; '{shown(self.name)}' runs from {self.start_us} "
                f"to {self.end_us} us."
            )

    @property
    def duration_us(self) -> float:
        return self.end_us - self.start_us


class Timeline(Value, frozen=True, kw_only=True):
    """Intervals of one step, in order of rank and start."""

    step_name: str
    origin: Literal["measured", "simulated"]
    intervals: tuple[Interval, ...]

    def __post_init__(self) -> None:
        check_types(self, StepError)
        require(bool(self.intervals), StepError, f"The timeline of '{shown(self.step_name)}' is empty.")

    def ranks(self) -> list[int]:
        """Return the ranks that appear, ascending."""
        return sorted({interval.rank for interval in self.intervals})

    def of_rank(self, rank: int) -> tuple[Interval, ...]:
        """Return the intervals of one rank."""
        return tuple(interval for interval in self.intervals if interval.rank == rank)

    def _contents(self) -> tuple[str, ...]:
        end_us = max(interval.end_us for interval in self.intervals)
        ranks = format_count(len(self.ranks()), "rank")
        return self.origin, format_count(len(self.intervals), "interval"), ranks, f"ends at {format_us(end_us)}"

    def _in_short(self) -> str:
        return f"of {shortened(self.step_name)!r}: {', '.join(self._contents())}"

    def _repr_html_(self) -> str:
        """Return what notebooks show of the timeline: its origin and its length."""
        return html_list(f"Timeline of {self.step_name}", self._contents())


class AbstractExecutor(ABC):
    """Turns a step on a machine under a plan into a timeline. Implementations are final: one per file, never subclassed."""

    @abstractmethod
    def run(self, step: Step, machine: Machine, plan: Plan) -> Timeline:
        """Execute `step` under `plan` and return its timeline.

        Raises `PlanError` if the plan was made for another step. An operation that no directive matches runs unchanged.
        """
