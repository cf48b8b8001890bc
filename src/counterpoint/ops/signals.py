"""Signals between the GPUs of a group without SMs: flags in symmetric memory, set and awaited by stream memory
operations.

`Signals`: a peer sets a flag (1) and the stream that waited for it resets it (0), so the same operations work in every
call and in a captured graph. `NumberedSignals`: flags hold numbers of calls, and are never reset. torch's own barrier is a
kernel, and starves behind a matmul that fills the registers (measured: 14 ms in one training step).
"""

from collections.abc import Callable, Sequence
from typing import final

import torch
import torch.distributed as dist
from cuda.bindings import driver as cu

from counterpoint.cuda.driver import Handle, check
from counterpoint.ops.agreement import Agreement
from counterpoint.ops.driver_calls import (
    WAIT,
    WAIT_AT_LEAST,
    WRITE,
    WRITE_64,
    awaiting,
    can_flush_remote_writes,
    memory_operation,
    raising,
    taking,
)
from counterpoint.ops.gpu_progress import GpuProgress
from counterpoint.ops.symmetric import SymmetricMemory
from counterpoint.ops.watchdog import Watchdog

FLAG_BYTES = 4
EXCHANGE = "exchange"  # the kind of a batch that sets flags and waits for others
WORD = 2**32
FAR = 2**20  # more calls than streams hold; the numbers of waits that the watchdog ends are nearer
BatchKey = tuple[Handle, int, tuple[int, ...], tuple[int, ...]]  # the kind, the flag, the peers, and addresses of words
Batch = tuple[list[Handle], list[Handle], list[Handle]]  # operations, and their fields for the call's number and for a value


@final
class Flags:
    """Flags, 32-bit words in symmetric memory: for each number, one that every rank sets on every other.

    `resting` holds the value of each number between calls, and `freeing` returns a value that ends all waits.
    `is_flushing`: waits for them flush remote writes. `watch` ends waits for a rank that is gone.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        agreement: Agreement,
        resting: Sequence[int],
        freeing: Callable[[], int] = lambda: 1,
    ) -> None:
        self._rank, self._num_ranks = int(group.rank()), int(group.size())
        num_flags = len(resting) * self._num_ranks
        self._memory = SymmetricMemory(num_flags * FLAG_BYTES, device, group, agreement)
        words = self._memory.local.view(torch.int32).view(len(resting), self._num_ranks)
        words.copy_(torch.tensor(resting, dtype=torch.int32, device=device)[:, None].expand_as(words))
        self.is_flushing = can_flush_remote_writes(device.index)
        torch.cuda.synchronize(device)
        agreement.exchange(b"flags at rest")  # no rank sets a flag before they are there
        progress = GpuProgress((self._memory.addresses[self._rank], num_flags), freeing)
        self.watch = Watchdog(progress, agreement.limit_s, overheard=agreement.overheard)

    def own(self, number: int, peer: int) -> int:
        """Return the address of the flag that `peer` sets on this rank."""
        return self._memory.addresses[self._rank] + FLAG_BYTES * (number * self._num_ranks + peer)

    def of_peer(self, number: int, peer: int) -> int:
        """Return the address of the flag that this rank sets on `peer`."""
        return self._memory.addresses[peer] + FLAG_BYTES * (number * self._num_ranks + self._rank)

    def block(self, numbers: range) -> tuple[int, int]:
        """Return the address of the first of the flags with these numbers that others set on this rank, and how many
        they are; one lies behind the other.
        """
        return self.own(numbers.start, 0), len(numbers) * self._num_ranks

    def num_bytes(self) -> int:
        """Return the bytes of symmetric memory that the signals take."""
        return int(self._memory.local.numel())


@final
class Signals:
    """Flags set and awaited by number, for several peers at once."""

    def __init__(self, flags: Flags) -> None:
        self._flags = flags
        self._batches: dict[tuple[Handle, int, tuple[int, ...]], list[Handle]] = {}  # built once, issued often

    def raise_to(self, number: int, peers: tuple[int, ...], stream: Handle) -> None:
        """Set this rank's flag on these peers, after the stream's work."""
        key = (WRITE, number, peers)
        if key not in self._batches:
            self._batches[key] = raising([self._flags.of_peer(number, peer) for peer in peers])
        _issue(self._batches[key], stream)

    def take(self, number: int, peers: tuple[int, ...], stream: Handle) -> None:
        """Let the stream wait for the flags of these peers, and reset them."""
        key = (WAIT, number, peers)
        if key not in self._batches:
            own = [self._flags.own(number, peer) for peer in peers]
            self._batches[key] = taking(own, is_flushing=self._flags.is_flushing)
        _issue(self._batches[key], stream)


@final
class NumberedSignals:
    """Flags that hold the number of the call that set them last, set and awaited for several peers at once.

    Ranks count their calls alike. A wait passes at the number of this call or a later one. So no flag is reset, and none
    has to be at rest before a call; a captured graph cannot wait so, because its numbers would be those of its capture.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, agreement: Agreement, num_flags: int) -> None:
        self._number = 0
        self.flags = Flags(group, device, agreement, [0] * num_flags, lambda: (self._number + FAR) % WORD)
        self._batches: dict[BatchKey, Batch] = {}  # built once, issued often

    def begin_call(self) -> None:
        """Count a call."""
        self._number = (self._number + 1) % WORD

    def raise_to(self, flag: int, peers: tuple[int, ...], stream: Handle) -> None:
        """Set this rank's flag on these peers, after the stream's work."""
        self._issue((WRITE, flag, peers, ()), stream)

    def wait(self, flag: int, peers: tuple[int, ...], stream: Handle) -> None:
        """Let the stream wait for the flags of these peers."""
        self._issue((WAIT, flag, peers, ()), stream)

    def exchange(self, flag: int, peers: tuple[int, ...], stream: Handle, words: tuple[int, ...], value: int) -> None:
        """Write `value` to the 64-bit words at these addresses, set this rank's flag on these peers, and wait for theirs:
        one request to the driver.
        """
        self._issue((EXCHANGE, flag, peers, words), stream, value)

    def _issue(self, key: BatchKey, stream: Handle, value: int = 0) -> None:
        batch = self._batches.get(key)
        if batch is None:
            batch = self._batches[key] = self._batch(*key)
        operations, numbers, values = batch
        for each in numbers:
            each.value = self._number
        for each in values:
            each.value64 = value
        _issue(operations, stream)

    def _batch(self, kind: Handle, flag: int, peers: tuple[int, ...], words: tuple[int, ...]) -> Batch:
        flags = self.flags
        values = [memory_operation(WRITE_64, address, 0) for address in words]
        writes = [] if kind == WAIT else raising([flags.of_peer(flag, peer) for peer in peers])
        own = [] if kind == WRITE else [flags.own(flag, peer) for peer in peers]
        waits = awaiting(own, is_flushing=flags.is_flushing, condition=WAIT_AT_LEAST)
        numbers = [each.writeValue for each in writes] + [each.waitValue for each in waits]
        return values + writes + waits, numbers, [each.writeValue for each in values]


def _issue(operations: list[Handle], stream: Handle) -> None:
    if operations:
        check("Signalling between GPUs", cu.cuStreamBatchMemOp(stream, len(operations), operations, 0))
