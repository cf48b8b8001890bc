"""Times one operator call on this rank: by events on GPUs, as the benchmarks do; in tests by a script.

A spinning kernel gives the host time to issue everything after it, and the GPUs meet in a tiny all-reduce; the time
between the events is then the GPUs' work, not the host's.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

import torch
import torch.distributed as dist

from counterpoint.errors import DeviceError
from counterpoint.ops.runtime import Runtime

SPIN_CYCLES = 1_500_000  # some 0.8 ms on an H200, where issuing a call takes up to 0.8 ms
WARM_UP_ROUNDS = 12  # a call is recorded when it is made for the third time at its addresses, and a few addresses alternate


class AbstractCallTimer(ABC):
    """Times single calls. All ranks of a group time the same calls in the same order."""

    @property
    @abstractmethod
    def num_warm_up_rounds(self) -> int:
        """How often a call must run before it reaches its steady state."""

    @abstractmethod
    def time_us(self, label: str, call: Callable[[], None]) -> float:
        """Make a call once, started together with the other ranks; return the microseconds that it took this rank.

        `label` describes the call.
        """


@final
class GpuCallTimer(AbstractCallTimer):
    """Events around a call on the current stream of one GPU."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._token = torch.ones(1, device=device)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    @property
    def num_warm_up_rounds(self) -> int:
        """See `AbstractCallTimer.num_warm_up_rounds`."""
        return WARM_UP_ROUNDS

    def time_us(self, label: str, call: Callable[[], None]) -> float:
        """See `AbstractCallTimer.time_us`."""
        torch.cuda._sleep(SPIN_CYCLES)
        dist.all_reduce(self._token, dist.ReduceOp.MAX, group=self._group)
        self._start.record()
        call()
        self._end.record()
        self._end.synchronize()
        return 1000.0 * float(self._start.elapsed_time(self._end))


def open_call_timer(runtime: Runtime) -> AbstractCallTimer:
    """Return a timer for the calls of a group. Raises `DeviceError` if a copy schedule cannot gain anything there."""
    instead = "Take the estimate: counterpoint schedule show, or no plan at all."
    if runtime.device.type != "cuda":
        raise DeviceError(f"The group runs on CPUs, where nothing overlaps, so schedules cannot be measured. {instead}")
    if runtime.transport is None:
        raise DeviceError(f"Copy schedules cannot run in this group: {runtime.obstacle}. There is nothing to choose.")
    if runtime.group.size() == 1:
        raise DeviceError(f"A single rank exchanges no rows, so there is nothing to measure. {instead}")
    return GpuCallTimer(runtime.group, runtime.device)
