"""The running job in torch: GPU events at step boundaries, the store that connects its ranks, its GPU.

Times come from CUDA events on the stream that is current at the boundary. They are only queried.
"""

import os
from typing import final

import torch
import torch.distributed as dist

from counterpoint.cuda.rendezvous import open_exchange
from counterpoint.errors import DeviceError
from counterpoint.integrations.paths import AbstractJobPaths, NoPaths, Paths
from counterpoint.ranks import Exchange, launched_rank, launched_size
from counterpoint.supervised.running_job import AbstractStepClock, HostClock, JobGpu

STORE_LIMIT_S = 20.0  # for one request to a store, which answers at once or is gone


@final
class EventClock(AbstractStepClock):
    """Marks on the current CUDA stream."""

    def mark(self) -> torch.cuda.Event:
        """Record an event."""
        if torch.cuda.is_current_stream_capturing():
            raise DeviceError("The step is being captured in a CUDA graph, which cannot be tuned while it runs.")
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_us(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        """Return the driver's time between two marks, once the GPU has passed `end`."""
        return float(start.elapsed_time(end)) * 1000 if end.query() else None


def is_rank_of_job() -> bool:
    """Return whether this process belongs to a process group, or a launcher gave it a rank."""
    return launched_rank(os.environ) is not None or is_joined()


def is_joined() -> bool:
    """Return whether this process has its process group."""
    return bool(dist.is_available() and dist.is_initialized())


def is_one_of_several() -> bool:
    """Return whether this process has joined a process group of several ranks."""
    return is_joined() and dist.get_world_size() > 1


def job_exchange(purpose: str = "run") -> Exchange:
    """Return the exchange of this job's ranks, or of this process alone without a process group. Each purpose has its
    own.

    Raises `DeviceError` if there are several ranks but no process group that connects them.
    """
    if not is_joined() and launched_size(os.environ) > 1:
        raise DeviceError(
            "There are several ranks, but torch.distributed is not initialized, so they cannot agree on a plan."
        )
    return open_exchange(purpose, STORE_LIMIT_S)


def job_paths(given: Paths) -> AbstractJobPaths:
    """Return the models and collectives of this process; none if it has no torch.distributed."""
    if not dist.is_available():
        return NoPaths()
    from counterpoint.integrations.job_paths import TorchJobPaths  # noqa: PLC0415  it loads all integrations

    return TorchJobPaths(given)


def job_clock() -> AbstractStepClock:
    """Return a clock of GPU time if the process uses a GPU, otherwise of host time."""
    return EventClock() if torch.cuda.is_available() and torch.cuda.is_initialized() else HostClock()


def job_gpu() -> JobGpu | None:
    """Return the current GPU, or None on a CPU."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    _, greatest = torch.cuda.Stream.priority_range()
    return JobGpu(name=properties.name, num_sms=properties.multi_processor_count, greatest_priority=int(greatest))
