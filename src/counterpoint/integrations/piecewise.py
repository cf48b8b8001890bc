"""One collective by copies: cut into pieces that fit the buffers, each on the next lane."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist

from counterpoint.errors import RefusedTogetherError
from counterpoint.integrations.lane_collectives import Tally, future_of, streams_of
from counterpoint.integrations.lanes import Lanes
from counterpoint.ops.host_levels import HostLevels
from counterpoint.ops.lane import AbstractLane

Piece = Callable[[AbstractLane, HostLevels], int]  # issues a part of a collective on a lane, and returns the bytes sent


@final
class PiecewiseCopies:
    """The lanes that one collective uses, and its tally."""

    def __init__(self, lanes: Lanes, tally: Tally) -> None:
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
        with torch.no_grad():
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
        return torch._C._distributed_c10d._create_work_from_future(future)
