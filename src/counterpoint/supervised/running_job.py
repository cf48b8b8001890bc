"""The running job as tuning sees it: a clock of its steps, its GPU, the filter's table, its ranks and their paths.

Holds the interfaces, and implementations without torch or launches. A clock never waits: a time that is not known yet is
None, and the caller asks again. So the job is never delayed, except while paths are switched: then its ranks wait for each
other (`lockstep.py`), and for the GPU before each turn (`follower.py`).
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, final

import msgspec

from counterpoint.integrations.paths import AbstractJobPaths, NoPaths
from counterpoint.launch_filter.control_block import FilterState, RuleCounters
from counterpoint.launch_filter.rules import FilterRule
from counterpoint.measurement.orders import draw_seed
from counterpoint.ranks import Exchange
from counterpoint.supervised.settings import LiveRecord, Totals
from counterpoint.units import US_PER_S
from counterpoint.value import Value

HOLD_S = 0.0005  # between two checks of a rank that is held
NOTHING_LAUNCHED = "this process has launched no GPU kernel, so there is nothing to tune or to guard"


class JobGpu(Value, frozen=True, kw_only=True):
    """The GPU that this process computes on."""

    name: str
    num_sms: int
    greatest_priority: int


class AbstractStepClock(ABC):
    """Marks in the order of the job's work, and the times between them."""

    @abstractmethod
    def mark(self) -> Any:
        """Mark this point in the job's work."""

    @abstractmethod
    def elapsed_us(self, start: Any, end: Any) -> float | None:
        """Return microseconds between two marks, or None while the work up to `end` is not done."""


@final
class HostClock(AbstractStepClock):
    """Time as the host sees it: for jobs whose work is on the CPU."""

    def mark(self) -> float:
        """Return the present time."""
        return time.perf_counter()

    def elapsed_us(self, start: float, end: float) -> float:
        """Return the time, which is always known."""
        return (end - start) * US_PER_S


class SwappableTable(Protocol):
    """The filter's table in this process: `ControlBlock`, or a double."""

    def swap(self, rules: Sequence[FilterRule]) -> int:
        """Replace the table."""

    def state(self) -> FilterState:
        """Return counters of the current table, and the kernels seen."""

    def rule_counters(self) -> tuple[tuple[FilterRule, RuleCounters], ...]:
        """Return the rules of the current table with their counters."""


@final
class NoTable:
    """The table of a process without launches: replacing it changes nothing."""

    def __init__(self, pid: int) -> None:
        self._state = FilterState(
            pid=pid,
            rank=-1,
            generation=0,
            num_launches=0,
            num_launches_ex=0,
            driver="",
            rules=(),
            counters=(),
            functions=(),
            problem="",
        )

    def swap(self, rules: Sequence[FilterRule]) -> int:
        """See `SwappableTable.swap`."""
        return 0

    def state(self) -> FilterState:
        """See `SwappableTable.state`."""
        return self._state

    def rule_counters(self) -> tuple[tuple[FilterRule, RuleCounters], ...]:
        """See `SwappableTable.rule_counters`."""
        return ()


class LiveJob(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the running job that a tuner gets."""

    clock: AbstractStepClock
    exchange: Exchange
    table: SwappableTable
    gpu: JobGpu | None
    say: Callable[[str], None]
    record: Callable[[LiveRecord], None]
    keep: Callable[[Totals], None]
    paths: AbstractJobPaths = NoPaths()
    hold: Callable[[], None] = partial(time.sleep, HOLD_S)
    hold_limit_s: float = 120.0
    draw_seed: Callable[[], int] = draw_seed


@final
class Patience:
    """How long this rank's job has been held before a step, and whether that exceeds the limit."""

    def __init__(self, job: LiveJob, limit_s: float) -> None:
        self._job, self._limit_s = job, limit_s
        self._since_s: float | None = None

    def wait(self) -> bool:
        """Wait briefly; return False once the limit is reached."""
        now_s = time.monotonic()
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s - self._since_s > self._limit_s:
            return False
        self._job.hold()
        return True
