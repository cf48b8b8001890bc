"""Signals between the GPUs of a group that take no SM: flags in symmetric memory, raised and awaited by stream memory
operations.

A flag is raised by a peer (1) and lowered by the stream that waited for it (0), so the same operations work in every call
and in a captured graph. torch's own barrier is a kernel, and starves behind a matmul that fills the registers (measured:
14 ms in one training step).
"""

from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from cuda.bindings import driver as cu

from counterpoint.cuda.driver import check
from counterpoint.ops.agreement import Agreement
from counterpoint.ops.copy_engines import FLAG_BYTES, SymmetricMemory
from counterpoint.ops.issuing import WAIT, WRITE, memory_operation
from counterpoint.ops.watch import Watch

Handle = Any  # cuda-bindings has no types


@final
class Signals:
    """Flags by number between every two ranks of a group. `resting` holds the value of each number between calls."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, agreement: Agreement, resting: Sequence[int]) -> None:
        self._rank, self._num_ranks = int(group.rank()), int(group.size())
        num_flags = len(resting) * self._num_ranks
        self._memory = SymmetricMemory(num_flags * FLAG_BYTES, device, group, agreement)
        words = self._memory.local.view(torch.int32).view(len(resting), self._num_ranks)
        words.copy_(torch.tensor(resting, dtype=torch.int32, device=device)[:, None].expand_as(words))
        torch.cuda.synchronize(device)
        self.watch = Watch((self._memory.addresses[self._rank], num_flags), agreement.limit_s)
        agreement.exchange(b"flags at rest")  # nobody raises one before they are
        self._batches: dict[tuple[Handle, int, tuple[int, ...]], list[Handle]] = {}  # made once, issued often

    def raise_to(self, number: int, peers: tuple[int, ...], stream: Handle) -> None:
        """Raise this rank's flag on these peers, behind what is on the stream."""
        key = (WRITE, number, peers)
        if key not in self._batches:
            offset = FLAG_BYTES * (number * self._num_ranks + self._rank)
            self._batches[key] = [memory_operation(WRITE, self._memory.addresses[peer] + offset, 1) for peer in peers]
        _issue(self._batches[key], stream)

    def take(self, number: int, peers: tuple[int, ...], stream: Handle) -> None:
        """Let the stream wait for the flags of these peers, and lower them."""
        key = (WAIT, number, peers)
        if key not in self._batches:
            own = self._memory.addresses[self._rank] + FLAG_BYTES * number * self._num_ranks
            waits = [memory_operation(WAIT, own + FLAG_BYTES * peer, 1) for peer in peers]
            self._batches[key] = waits + [memory_operation(WRITE, own + FLAG_BYTES * peer, 0) for peer in peers]
        _issue(self._batches[key], stream)

    def num_bytes(self) -> int:
        """Bytes of symmetric memory."""
        return int(self._memory.local.numel())


def _issue(operations: list[Handle], stream: Handle) -> None:
    if operations:
        check("Signalling between GPUs", cu.cuStreamBatchMemOp(stream, len(operations), operations, 0))
