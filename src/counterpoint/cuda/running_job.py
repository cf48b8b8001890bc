"""What tuning needs of a job that runs: a clock of its steps and a place where its ranks exchange texts.

The contracts, and what does without torch: host time, and a process alone. Neither ever waits: a time that is not known
yet, or a text that is not there yet, is None, and one asks again a step later. So the job is never held up.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
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


class AbstractExchange(ABC):
    """Texts between the ranks of a job, under topics that are used once. Nothing here waits for another rank."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This process's rank; rank 0 decides."""

    @abstractmethod
    def offer(self, topic: str, text: str) -> None:
        """Give rank 0 a text of this rank."""

    @abstractmethod
    def gathered(self, topic: str) -> Sequence[str] | None:
        """On rank 0: every rank's text by rank, or None while one is missing."""

    @abstractmethod
    def announce(self, topic: str, text: str) -> None:
        """On rank 0: tell everyone."""

    @abstractmethod
    def heard(self, topic: str) -> str | None:
        """What rank 0 announced, or None so far."""


@final
class LoneExchange(AbstractExchange):
    """A process alone: what it offers is all there is."""

    def __init__(self) -> None:
        self._offered: dict[str, str] = {}
        self._announced: dict[str, str] = {}

    @property
    def rank(self) -> int:
        """The only one."""
        return 0

    def offer(self, topic: str, text: str) -> None:
        """Keep it."""
        self._offered[topic] = text

    def gathered(self, topic: str) -> Sequence[str] | None:
        """Its own text."""
        return [self._offered[topic]] if topic in self._offered else None

    def announce(self, topic: str, text: str) -> None:
        """Keep it."""
        self._announced[topic] = text

    def heard(self, topic: str) -> str | None:
        """What it announced itself."""
        return self._announced.get(topic)
