"""The interface of a lane, which moves the blocks of one bare collective at a time, with its own buffers and signals.

Two moves make all collectives that training needs. `exchange`: every rank's p-th block goes to rank p, which sums the
blocks (the first half of an all-reduce, or a reduce-scatter) or keeps them all (an all-to-all, or an all-gather on one
host). `fetch`: every rank's shared part goes to all (the second half of an all-reduce, or an all-gather). A block may be
in several pieces of memory. Each is flat, or rows at equal distances, as the parts for one rank are among those of
several hosts. Several lanes are several collectives in flight: while one waits for an SM to sum on, another copies.

All ranks use a lane for the same collectives in the same order. Implementations: copy engines (`copy_lane.py`) and
messages between CPUs (`message_lane.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from counterpoint.cuda.block_sums import Arrived, Pieces
from counterpoint.ops.graph_cache import Key

ALIGNMENT = 512  # alignment in bytes of every part of symmetric memory


class AbstractLane(ABC):
    """Moves blocks between the ranks of one group; everything is issued on the current stream."""

    rank: int
    num_ranks: int

    @abstractmethod
    def issuing(self) -> AbstractContextManager[None]:
        """Make the lane's own stream current; it follows the work issued so far on the former stream."""

    @property
    @abstractmethod
    def block_bytes(self) -> int:
        """The largest block for which there is memory now."""

    @abstractmethod
    def reserve(self, num_bytes: int, *, is_shared_only: bool = False) -> None:
        """Reserve symmetric memory for blocks of this many bytes, all ranks together; or for a shared part alone, on a lane
        that is asked for nothing else.

        If a rank has no room, every rank raises `RefusedTogetherError`, and the lane has no memory until it is reserved.
        """

    @abstractmethod
    def discard(self) -> None:
        """Leave the lane without memory until the next `reserve`."""

    @abstractmethod
    def exchange(self, blocks: Sequence[Pieces]) -> Arrived:
        """Send block p to rank p; return what the ranks sent to this one, in the order of ranks, beside its own block.

        The pieces of block p have the same shapes on every rank. What arrives is flat, and is the lane's memory: `release`
        returns it.
        """

    @abstractmethod
    def release(self) -> None:
        """Declare that the work issued so far has read the rows of `exchange`; others may send again."""

    @abstractmethod
    def shared(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's part that the others will fetch, to be filled in; they have read its former content."""

    @abstractmethod
    def fetch(self, targets: Sequence[Pieces]) -> None:
        """Fill target p with the shared part of rank p, for every other rank; this rank's own target is not written."""

    @abstractmethod
    def gather(self, parts: Sequence[torch.Tensor]) -> None:
        """Fill part p from the same place of rank p's memory, for every other rank; parts are views of what `shared`
        returned for the whole result, in which each rank has filled in its own part.
        """

    @abstractmethod
    def repeat(self, key: Key, issue: Callable[[], int]) -> int:
        """Do what `issue` does and return its result. `key` determines that to the last address, so where a lane can record
        work, it may replay a recording of an earlier call.
        """

    @abstractmethod
    def num_recordings(self) -> int:
        """Number of recordings held."""

    @abstractmethod
    def num_symmetric_bytes(self) -> int:
        """Return the bytes of symmetric memory held on this rank."""

    @abstractmethod
    def close(self) -> None:
        """Free all memory."""


def aligned(num_bytes: int) -> int:
    """Round up to where the next part may start."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def arrived_in(rows: torch.Tensor, own: Pieces, rank: int) -> Arrived:
    """Return what arrived in rows of memory, each at least as large as the own block."""
    return Arrived(rows[:, : sum(piece.nbytes for piece in own)].view(own[0].dtype), own, rank)
