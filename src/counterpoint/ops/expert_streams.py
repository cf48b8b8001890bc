"""What both directions of an expert exchange on GPUs share: the numbers of flags, and streams beside the current one."""

from collections.abc import Iterable
from typing import final

import torch
from cuda.bindings import driver as cu

from counterpoint.cuda.driver import Handle, check
from counterpoint.ops.call_order import NO_TIMING
from counterpoint.ops.expert_exchange import ExpertRegion
from counterpoint.ops.streams import stream_of
from counterpoint.schedule.description import MAX_CHUNKS

COUNTS_ARRIVED, BEGUN, FIRST_ARRIVED = range(3)
NUM_FLAGS = FIRST_ARRIVED + len(ExpertRegion) * MAX_CHUNKS
HIGH_PRIORITY = -1  # as torch counts
KERNEL = "by kernel"  # the stream of the kernel that sends rows ahead of the host
# Each direction has one copy stream, which takes the peers in turn, each rank another first. Copies to three peers at once
# took up to 1.8 times as long: a GPU that several send to at a time holds up all of them.
SENDING, FETCHING = "sending", "fetching"


def arrived_flag(region: ExpertRegion, number: int) -> int:
    """Return the number of the flag that announces a piece."""
    return FIRST_ARRIVED + int(region) * MAX_CHUNKS + number


def new_event() -> Handle:
    """Return an event of the driver, without a time."""
    return check("Making an event", cu.cuEventCreate(NO_TIMING))


@final
class ExpertStreams:
    """Streams of one group on one GPU, made on first use, each with an event that marks its end."""

    def __init__(self, group_name: str, device: torch.device) -> None:
        self._group_name, self._device = group_name, device
        self._streams: dict[str, Handle] = {}
        self.ends: dict[str, Handle] = {}

    def current(self) -> Handle:
        """Return the current stream."""
        return cu.CUstream(torch._C._cuda_getCurrentRawStream(self._device.index))

    def named(self, name: str) -> Handle:
        """Return the stream of that name."""
        if name not in self._streams:
            self._streams[name] = cu.CUstream(self.as_torch(name).cuda_stream)
            self.ends[name] = new_event()
        return self._streams[name]

    def as_torch(self, name: str) -> torch.cuda.Stream:
        """Return that stream as torch's; the kernel's CTAs go before those of what is computed beside it."""
        return stream_of(self._group_name, self._device, f"experts {name}", HIGH_PRIORITY if name == KERNEL else 0)

    def follow(self, name: str, event: Handle) -> None:
        """Let the stream of that name wait for an event."""
        check("Waiting for an event", cu.cuStreamWaitEvent(self.named(name), event, 0))

    def join(self, names: Iterable[str]) -> None:
        """Let the current stream wait for these streams."""
        current = self.current()
        for name in names:
            check("Ending copies", cu.cuEventRecord(self.ends[name], self._streams[name]))
            check("Joining copies", cu.cuStreamWaitEvent(current, self.ends[name], 0))

    def close(self) -> None:
        """Free all events."""
        for event in self.ends.values():
            check("Destroying an event", cu.cuEventDestroy(event))
        self.ends.clear()
        self._streams.clear()
