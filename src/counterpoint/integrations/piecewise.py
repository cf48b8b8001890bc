"""One collective by copies: cut into pieces that fit the buffers, each on the next lane."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

from counterpoint.errors import RefusedTogetherError
from counterpoint.integrations.lane_collectives import CollectiveCounts, future_of, streams_of
from counterpoint.integrations.lanes import Lanes
from counterpoint.ops.host_levels import HostLevels
from counterpoint.ops.lane import AbstractLane

Piece = Callable[[AbstractLane, HostLevels], int]  # issues a part of a collective on a lane, and returns the bytes sent


NO_LIMIT = timedelta(0)  # of a wait, as torch has it
POLL_S = 0.0005


@final
class CopiesWork(dist.Work):  # type: ignore[misc]  # torch is untyped here
    """The handle of an asynchronous collective by copies; it answers as NCCL's does.

    `ended`: the event behind the collective's last operation, or None where it has ended already.
    """

    def __init__(self, future: torch.futures.Future[Any], ended: Any) -> None:
        super().__init__()
        self._future, self._ended = future, ended

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Let the current stream wait; with a time-out the host waits instead. Raises `DistBackendError` after it."""
        self._future.wait()
        deadline = time.monotonic() + timeout.total_seconds()
        while timeout > NO_LIMIT and not self.is_completed():
            if time.monotonic() > deadline:
                raise dist.DistBackendError(f"A collective by copies has not ended within {timeout}.")
            time.sleep(POLL_S)
        return True

    def synchronize(self) -> None:
        """Let the current stream wait."""
        self._future.wait()

    def block_current_stream(self) -> None:
        """Let the current stream wait."""
        self._future.wait()

    def is_completed(self) -> bool:
        """Return whether the result is there, also for the host."""
        return self._ended is None or bool(self._ended.query())

    def result(self) -> list[torch.Tensor]:
        """Return the result as the library's handles do."""
        found: list[torch.Tensor] = self._future.value()
        return found

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the result."""
        return self._future


@final
class PiecewiseCopies:
    """The lanes that one collective uses, and its tally."""

    def __init__(self, lanes: Lanes, tally: CollectiveCounts) -> None:
        self._lanes, self._tally = lanes, tally
        self.num_ranks = int(lanes.group.size())

    def have_memory(self, block_bytes: int, num_pieces: int) -> bool:
        """Return whether all ranks have memory for blocks with this many bytes of each rank, before anything is issued:
        in-place collectives cannot be started twice.
        """
        try:
            self._lanes.reserve(block_bytes * self._lanes.num_hosts, num_pieces)
        except RefusedTogetherError as refusal:
            self._lanes.give_up(refusal)
            self._tally.count_library(self._lanes.obstacle, group=self._lanes.group)
            return False
        return True

    def issue(self, pieces: Sequence[Piece], tensors: Sequence[torch.Tensor], *, async_op: bool) -> dist.Work | None:
        """Issue every piece on the next lane; the first of `tensors` is the result."""
        streams: list[Any] = []
        num_bytes = 0
        future = None
        # autograd must not see that saved tensors changed: the library's collectives do not tell it either
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
            for number, piece in enumerate(pieces, 1):
                lane = self._lanes.next()
                with lane.issuing():
                    num_bytes += piece(lane, self._lanes.levels)
                    streams += streams_of(tensors[0])
                    if async_op and number == len(pieces):  # the last lane's stream is current
                        # the library's futures return lists of results
                        future = future_of(tensors[0], streams, [tensors[0]])
        self._tally.count_copies(num_bytes, self._lanes.num_hosts)
        if future is None:
            for stream in streams:
                torch.cuda.current_stream(tensors[0].device).wait_stream(stream)
            return None
        for tensor in tensors:
            for stream in streams:
                tensor.record_stream(stream)
        return CopiesWork(future, streams[-1].record_event() if streams else None)
