"""Symmetric memory: every rank of a group allocates a part, and copy engines of all ranks can access it."""

from typing import final

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from counterpoint.errors import cause_of
from counterpoint.ops.agreement import Agreement, CallNotice
from counterpoint.ops.graph_cache import refuse_in_capture
from counterpoint.units import format_bytes


@final
class SymmetricMemory:
    """This rank's part, `num_bytes` on every rank, and the addresses of all parts.

    Raises `RefusedTogetherError` on every rank if one of them has no room.
    """

    def __init__(self, num_bytes: int, device: torch.device, group: dist.ProcessGroup, agreement: Agreement) -> None:
        problem = ""
        try:
            with torch.inference_mode(mode=False):  # later calls write to it in any mode
                self.local = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            problem = (
                f"{format_bytes(num_bytes)} of symmetric memory cannot be allocated ({cause_of(error, 160)}). "
                "Free GPU memory, or call counterpoint.ops.release() on every rank."
            )
        # all ranks find out together, before any of them waits for the others' memory
        agreement.compare(CallNotice(request=f"{num_bytes} bytes of symmetric memory", problem=problem))
        self._handle = symmetric_memory.rendezvous(self.local, group.group_name)
        self.addresses = [int(address) for address in self._handle.buffer_ptrs]


@final
class SymmetricPool:
    """The symmetric memory of one transport or lane. Larger memory replaces smaller, which stays allocated if graphs
    that a user captured write to it.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup, agreement: Agreement) -> None:
        self._device, self._group, self._agreement = device, group, agreement
        self.memory: SymmetricMemory | None = None
        self._retired: list[SymmetricMemory] = []

    def replace(self, num_bytes: int, what: str, *, has_captured: bool) -> SymmetricMemory:
        """Replace the memory by one of another size, all ranks together; `what` needs it. If this raises `OperatorError`,
        there is no memory left.
        """
        refuse_in_capture(what, self._device)
        torch.cuda.synchronize(self._device)
        if has_captured and self.memory is not None:
            self._retired.append(self.memory)
        self.memory = None
        self.memory = SymmetricMemory(num_bytes, self._device, self._group, self._agreement)
        return self.memory

    def num_bytes(self) -> int:
        """Return the bytes held, including memory that only graphs use."""
        held = [*self._retired, *([self.memory] if self.memory else [])]
        return sum(int(memory.local.numel()) for memory in held)

    def close(self) -> None:
        """Free all memory."""
        self.memory = None
        self._retired.clear()
