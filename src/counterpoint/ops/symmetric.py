"""Memory that every rank of a group allocates a part of, and that copy engines of all of them reach."""

from typing import final

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from counterpoint.errors import cause_of
from counterpoint.ops.agreement import Agreement, CallNotice
from counterpoint.units import format_bytes


@final
class SymmetricMemory:
    """This rank's part, `num_bytes` as on every rank, and the addresses of all parts.

    Raises `OperatorError` on every rank where one of them has no room.
    """

    def __init__(self, num_bytes: int, device: torch.device, group: dist.ProcessGroup, agreement: Agreement) -> None:
        problem = ""
        try:
            self.local = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            problem = (
                f"{format_bytes(num_bytes)} of symmetric memory cannot be had ({cause_of(error, 160)}). "
                "Free GPU memory, or call counterpoint.ops.release() on every rank."
            )
        # all ranks find out together, before any of them waits for the others' memory
        agreement.compare(CallNotice(request=f"{num_bytes} bytes of symmetric memory", problem=problem))
        self._handle = symmetric_memory.rendezvous(self.local, group.group_name)
        self.addresses = [int(address) for address in self._handle.buffer_ptrs]
