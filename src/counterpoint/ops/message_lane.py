"""A lane on CPUs: the same blocks as messages, so that tests run the code above lanes on real tensors without GPUs.

All messages of a move are posted together, so their order cannot block any rank. Nothing overlaps here.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
import torch.distributed as dist

from counterpoint.cuda.block_sums import Arrived, Pieces
from counterpoint.ops.agreement import Agreement
from counterpoint.ops.graph_cache import Key
from counterpoint.ops.lane import AbstractLane, aligned, arrived_in
from counterpoint.ops.symmetric import host_memory
from counterpoint.units import format_bytes


@final
class MessageLane(AbstractLane):
    """Messages of one group; the symmetric memory is ordinary, and counted as a GPU's would be."""

    def __init__(self, group: dist.ProcessGroup, agreement: Agreement) -> None:
        self.rank, self.num_ranks = group.rank(), group.size()
        self._group, self._agreement = group, agreement
        self._row_bytes = 0
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def issuing(self) -> AbstractContextManager[None]:
        """See `AbstractLane.issuing`."""
        return nullcontext()

    @property
    def block_bytes(self) -> int:
        """See `AbstractLane.block_bytes`."""
        return self._row_bytes

    def reserve(self, num_bytes: int, *, is_shared_only: bool = False) -> None:
        """See `AbstractLane.reserve`."""
        wanted, num_rows = aligned(num_bytes), 1 if is_shared_only else self.num_ranks + 1
        if wanted <= self._row_bytes:
            return
        self.close()
        memory = host_memory(num_rows * wanted, f"blocks of {format_bytes(num_bytes)}", self._agreement)
        self._row_bytes, self._memory = wanted, memory

    def discard(self) -> None:
        """See `AbstractLane.discard`."""
        self._row_bytes = 0

    def exchange(self, blocks: Sequence[Pieces]) -> Arrived:
        """See `AbstractLane.exchange`."""
        staged = self._memory[self._row_bytes :].view(self.num_ranks, self._row_bytes)
        arrived = arrived_in(staged, blocks[self.rank], self.rank)
        self._move([_in_one_piece(block) for block in blocks], list(arrived.rows))
        return arrived

    def release(self) -> None:
        """See `AbstractLane.release`."""

    def shared(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """See `AbstractLane.shared`."""
        return self._memory[: num_elements * dtype.itemsize].view(dtype)

    def fetch(self, targets: Sequence[Pieces]) -> None:
        """See `AbstractLane.fetch`."""
        sizes, dtype = [sum(piece.numel() for piece in target) for target in targets], targets[0][0].dtype
        arrived = [
            target[0] if len(target) == 1 else torch.empty(size, dtype=dtype, device="cpu")
            for target, size in zip(targets, sizes, strict=True)
        ]
        self._move([self.shared(sizes[self.rank], dtype)] * self.num_ranks, arrived)
        for peer, pieces in enumerate(targets):
            if len(pieces) > 1 and peer != self.rank:
                for piece, part in zip(pieces, arrived[peer].split([piece.numel() for piece in pieces]), strict=True):
                    piece.copy_(part.view(piece.shape))

    def gather(self, parts: Sequence[torch.Tensor]) -> None:
        """See `AbstractLane.gather`."""
        self._move([parts[self.rank]] * self.num_ranks, parts)

    def repeat(self, key: Key, issue: Callable[[], int]) -> int:
        """See `AbstractLane.repeat`."""
        return issue()

    def num_recordings(self) -> int:
        """See `AbstractLane.num_recordings`."""
        return 0

    def _move(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        """Send `outgoing[p]` to every other rank p and receive `incoming[p]` from it."""
        messages = []
        apart = [
            part if part.is_contiguous() else torch.empty_like(part, memory_format=torch.contiguous_format)
            for part in incoming
        ]
        for peer in range(self.num_ranks):
            if peer == self.rank:
                continue
            name = dist.get_global_rank(self._group, peer)
            for act, part in ((dist.isend, outgoing[peer].contiguous()), (dist.irecv, apart[peer])):
                if part.numel():
                    messages.append(dist.P2POp(act, part.view(torch.uint8), name, self._group))
        try:
            for work in dist.batch_isend_irecv(messages) if messages else []:
                work.wait()
        except RuntimeError as problem:
            what = "a rank of the group did not exchange its blocks in time, or ended"
            raise self._agreement.give_up(what) from problem
        for peer, (part, arrived) in enumerate(zip(incoming, apart, strict=True)):
            if peer != self.rank and arrived is not part:
                part.copy_(arrived)

    def num_symmetric_bytes(self) -> int:
        """See `AbstractLane.num_symmetric_bytes`."""
        return int(self._memory.numel())

    def close(self) -> None:
        """See `AbstractLane.close`."""
        self._row_bytes = 0
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")


def _in_one_piece(pieces: Pieces) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat([piece.flatten() for piece in pieces])
