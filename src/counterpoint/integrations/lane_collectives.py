"""Bare collectives on lanes, several in flight, and when not to use them.

An all-reduce is a reduce-scatter (blocks go to their ranks, which average them) and an all-gather of the averages.
Each one takes the next lane, so that one can wait for an SM while another copies. A lane holds a block for every rank and
one more; DDP cuts what is larger than `MAX_BUFFER_BYTES` into parts, so its memory is bounded.

Where a rank's part is small the library's collective is faster (measured: with 6 MiB from each of 4 ranks copies still are;
below 4 MiB an assumption), and where there is no peer access it is all there is; `Fallbacks` says so once.
"""

import logging
from typing import final

import torch
import torch.distributed as dist

from counterpoint.errors import IntegrationError
from counterpoint.integrations.compression import AbstractWire
from counterpoint.ops.lane import AbstractLane
from counterpoint.ops.runtime import runtime_of
from counterpoint.units import MIB, format_bytes
from counterpoint.value import require

MAX_BUFFER_BYTES = 256 * MIB

logger = logging.getLogger("counterpoint")


@final
class Lanes:
    """The lanes of one group for one purpose, taken in turn. All ranks ask for them in the same order."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, purpose: str, num_lanes: int) -> None:
        self.group, self.device = group, device
        self._names = [f"{purpose} {number}" for number in range(num_lanes)]
        self._next = 0
        self.obstacle = self._find_obstacle()

    def _find_obstacle(self) -> str:
        """Why there are none, or nothing; they are made here, by all ranks together."""
        lanes = [self._lane(name) for name in self._names]
        return "" if all(lanes) else runtime_of(self.group.group_name, self.device).obstacle

    def _lane(self, name: str) -> AbstractLane | None:
        return runtime_of(self.group.group_name, self.device).lane(name)

    def next(self) -> AbstractLane:
        """The lane whose turn it is."""
        lane = self._lane(self._names[self._next])
        self._next = (self._next + 1) % len(self._names)
        assert lane is not None, "obstacle is asked for first"
        return lane


@final
class Fallbacks:
    """Says, once for each reason, that the library's collective runs in place of copies."""

    def __init__(self, what: str, least_part_bytes: int) -> None:
        self._what, self._least_part_bytes = what, least_part_bytes
        self._said: set[str] = set()
        self.num_times = 0

    def is_due(self, part_bytes: int, obstacle: str) -> bool:
        """Whether a collective with so many bytes from each rank is the library's to do."""
        if obstacle:
            self._say(obstacle, f"{obstacle}.")
        elif part_bytes < self._least_part_bytes:
            found, least = format_bytes(part_bytes), format_bytes(self._least_part_bytes)
            self._say("small", f"{found} from each rank, and below {least} it is the faster one.")
        else:
            return False
        self.num_times += 1
        return True

    def _say(self, reason: str, words: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("counterpoint: %s is done by the library's collective: %s", self._what, words)


def require_least_part(least_part_bytes: object) -> None:
    """Raise `IntegrationError` unless this is a number of bytes."""
    require(
        isinstance(least_part_bytes, int) and least_part_bytes >= 0,
        IntegrationError,
        f"least_part_bytes must be a whole number, 0 or more; found {least_part_bytes!r}. 0 leaves nothing to the library.",
    )


def all_reduce_mean(lane: AbstractLane, bucket: torch.Tensor, wire: AbstractWire) -> None:
    """Replace the flat bucket by the mean of all ranks' buckets."""
    blocks = wire.encode(bucket, lane.num_ranks)
    lane.reserve(max(block.nbytes for block in blocks))
    rows = lane.exchange(blocks)
    own = blocks[lane.rank]
    shared = lane.shared(own.numel(), own.dtype)
    wire.average(rows, shared)
    lane.release()
    lane.fetch(blocks)
    own.copy_(shared)
    wire.decode(blocks, bucket)


def reduce_scatter(lane: AbstractLane, output: torch.Tensor, given: torch.Tensor, *, is_mean: bool) -> None:
    """Sum or mean over ranks of this rank's block of every rank's `given`; both flat."""
    lane.reserve(output.nbytes)
    rows = lane.exchange(given.chunk(lane.num_ranks))
    if is_mean:
        torch.mean(rows, 0, out=output)
    else:
        torch.sum(rows, 0, dtype=output.dtype, out=output)
    lane.release()
