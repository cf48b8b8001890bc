"""What tuning needs of a job that runs beside the exchange of its ranks: its GPU, and a clock of its steps.

The contract, and what does without torch: host time. A clock never waits: a time that is not known yet is None, and one asks
again a step later. So the job is never held up.
"""

import time
from abc import ABC, abstractmethod
from typing import Any, final

from counterpoint.units import US_PER_S
from counterpoint.value import Value


class JobGpu(Value, frozen=True, kw_only=True):
    """The GPU that this process computes on."""

    name: str
    num_sms: int
    greatest_priority: int


class AbstractStepClock(ABC):
    """Marks in the order of the job's work, and the time between two of them."""

    @abstractmethod
    def mark(self) -> Any:
        """Mark this place in the job's work."""

    @abstractmethod
    def elapsed_us(self, start: Any, end: Any) -> float | None:
        """Microseconds between two marks, or None while the work up to `end` is not done."""


@final
class HostClock(AbstractStepClock):
    """Time as the host sees it: for jobs whose work is on the CPU."""

    def mark(self) -> float:
        """The present time."""
        return time.perf_counter()

    def elapsed_us(self, start: float, end: float) -> float:
        """Always known."""
        return (end - start) * US_PER_S
