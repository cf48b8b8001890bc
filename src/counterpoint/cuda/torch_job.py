"""The running job as torch knows it: GPU events at step boundaries, the job's own store between its ranks, its GPU.

Times come from CUDA events on the stream that is current at the boundary; they are only ever queried, so the host never
waits for the GPU. Texts go through a connection of our own to the key-value store that the process group was made with,
and only keys that are there are read, so no rank waits for another.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist

from counterpoint.cuda.running_job import AbstractExchange, AbstractStepClock, HostClock, JobGpu, LoneExchange
from counterpoint.errors import DeviceError

STORE_LIMIT = timedelta(seconds=20)  # for one request to a store that answers at once or is gone


@final
class EventClock(AbstractStepClock):
    """Marks on the current CUDA stream."""

    def mark(self) -> torch.cuda.Event:
        """Record an event."""
        if torch.cuda.is_current_stream_capturing():
            raise DeviceError("The step is being captured in a CUDA graph, and a graph cannot be tuned while it runs.")
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_us(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        """Milliseconds from the driver, once the GPU has passed `end`."""
        return float(start.elapsed_time(end)) * 1000 if end.query() else None


@final
class StoreExchange(AbstractExchange):
    """Texts in the store of the job's process group."""

    def __init__(self, store: "dist.Store", rank: int, num_ranks: int) -> None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        # a clone is a connection of its own: its limit is not the job's, and other threads may use the job's
        own = store.clone()
        own.set_timeout(STORE_LIMIT)
        self._store = dist.PrefixStore(f"counterpoint/{attempt}", own)
        self._rank = rank
        self._num_ranks = num_ranks

    @property
    def rank(self) -> int:
        """The rank in the default process group."""
        return self._rank

    def offer(self, topic: str, text: str) -> None:
        """Under the topic and this rank."""
        self._store.set(f"{topic}/{self._rank}", text)

    def gathered(self, topic: str) -> Sequence[str] | None:
        """Reads only when all keys are there."""
        keys = [f"{topic}/{rank}" for rank in range(self._num_ranks)]
        return [self._store.get(key).decode() for key in keys] if self._store.check(keys) else None

    def announce(self, topic: str, text: str) -> None:
        """Under the topic alone."""
        self._store.set(topic, text)

    def heard(self, topic: str) -> str | None:
        """Reads only when the key is there."""
        return self._store.get(topic).decode() if self._store.check([topic]) else None


def is_rank_of_job() -> bool:
    """Whether this process belongs to a process group, or a launcher gave it a rank."""
    return "RANK" in os.environ or (dist.is_available() and dist.is_initialized())


def job_exchange() -> AbstractExchange:
    """The exchange of this job's ranks; alone where there is no process group or it has one rank.

    Raises `DeviceError` where there are several ranks and no process group that could connect them.
    """
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() == 1:
            return LoneExchange()
        store = dist.distributed_c10d._get_default_store()  # torch has no public name for it
        return StoreExchange(store, dist.get_rank(), dist.get_world_size())
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise DeviceError(
            "There are several ranks, but torch.distributed is not initialized, so they cannot agree on a plan."
        )
    return LoneExchange()


def job_clock() -> AbstractStepClock:
    """GPU time where the process uses a GPU, else host time."""
    return EventClock() if torch.cuda.is_available() and torch.cuda.is_initialized() else HostClock()


def job_gpu() -> JobGpu | None:
    """The current GPU, or None on a CPU."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    _, greatest = torch.cuda.Stream.priority_range()
    return JobGpu(name=properties.name, num_sms=properties.multi_processor_count, greatest_priority=int(greatest))
