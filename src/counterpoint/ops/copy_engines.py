"""Runs schedules on GPUs: copy engines copy into symmetric memory, stream memory operations signal. Neither uses an SM.

A copy is `cuMemcpyAsync` into a peer's mapped memory. A flag is a 32-bit word: the sender writes 1 after its rows, and the
receiver's stream waits for 1. Each call begins in the same way: a rank resets the flags that it will wait for, writes 1 to
a flag of every other rank ("you may write"), and copies only when all others have done so. So the same operations work
eagerly and in a captured graph, whose values are frozen, in any mixture. A flag is never set before it was reset, and
no rows are sent before the previous call has read those that were there.

Flags are reset at the beginning, all at once, because a write by a stream memory operation waits until earlier writes
can be seen everywhere: 2.3 us, and 7.3 while copies are under way (2 H200s, 2026-11-27). Behind each wait, or at the end
of a call, that would delay matmuls and what follows the call.

Calls of a group follow each other, whatever streams they are issued on. Waits are issued after the work they wait for,
in one order that all ranks share, so streams that share a hardware queue cannot deadlock.
"""

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist
from torch._C import _CUDAGraph as Graph

from counterpoint.errors import OperatorError
from counterpoint.ops.agreement import Agreement
from counterpoint.ops.call_order import WATCH_PRIORITY, CallOrder
from counterpoint.ops.compiled_copies import CompiledCopies, Shared
from counterpoint.ops.graph_cache import Recordings, is_possible, refuse_in_capture
from counterpoint.ops.signals import Flags
from counterpoint.ops.streams import stream_of
from counterpoint.ops.symmetric import SymmetricMemory, SymmetricPool
from counterpoint.ops.transport import AbstractCompiledSchedule, AbstractTransport, Layout
from counterpoint.schedule.actions import CopySchedule
from counterpoint.schedule.program import make_program
from counterpoint.units import format_bytes
from counterpoint.value import require

MAX_FLAGS = 1024


@final
class CopyEngines(AbstractTransport):
    """Symmetric memory and schedules of one group on one GPU."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, agreement: Agreement) -> None:
        self._group, self._device = group, device
        self._rank = int(group.rank())
        self._pool = SymmetricPool(device, group, agreement)
        self._prepared: list[CompiledCopies] = []
        self._flags = Flags(group, device, agreement, [0] * MAX_FLAGS)
        self._order = CallOrder(self._flags.watch, stream_of(group.group_name, device, "watch", WATCH_PRIORITY))
        self._recordings: Recordings[Graph] = Recordings(is_enabled=is_possible())

    def prepare(self, schedule: CopySchedule, dtype: torch.dtype) -> AbstractCompiledSchedule:
        """See `AbstractTransport.prepare`."""
        layout = Layout(schedule, dtype.itemsize)
        program = make_program(schedule, self._rank)
        require(
            program.num_flags <= MAX_FLAGS,
            OperatorError,
            f"A schedule may use {MAX_FLAGS} flags per peer; this one needs {program.num_flags}. Ask for fewer chunks.",
        )
        self._require_memory(layout.num_bytes)
        prepared = CompiledCopies(self._shared(), (schedule, program), (layout, dtype))
        self._prepared.append(prepared)
        return prepared

    def _shared(self) -> Shared:
        return Shared(
            device=self._device,
            group_name=self._group.group_name,
            flags=self._flags,
            order=self._order,
            recordings=self._recordings,
            memory=self._require_memory,
        )

    def _require_memory(self, num_bytes: int = 0) -> SymmetricMemory:
        """Reserve this much memory, and enough for all schedules so far, which have none after a failed attempt to get
        more.
        """
        memory = self._pool.memory
        if memory is None or memory.local.numel() < num_bytes:
            memory = self._replaced(max([num_bytes, *(prepared.num_bytes for prepared in self._prepared)]))
        return memory

    def _replaced(self, num_bytes: int) -> SymmetricMemory:
        """Replace the present memory by memory of another size."""
        what = f"An operator with {format_bytes(num_bytes)} of symmetric memory"
        refuse_in_capture(what, self._device)
        torch.cuda.synchronize(self._device)
        self._unbind()
        has_captured, self._order.has_captured = self._order.has_captured, False
        return self._pool.replace(num_bytes, what, has_captured=has_captured)

    def _unbind(self) -> None:
        self._recordings.clear()
        for prepared in self._prepared:
            prepared.unbind()

    def forget(self, prepared: Sequence[AbstractCompiledSchedule], *, keeps_memory: bool = False) -> None:
        """See `AbstractTransport.forget`."""
        refuse_in_capture("Giving back schedules", self._device)
        torch.cuda.synchronize(self._device)
        gone = [each for each in self._prepared if each in prepared]
        self._recordings.forget(gone)  # they hold events and addresses of the schedules to forget
        self._prepared = [each for each in self._prepared if each not in gone]
        for each in gone:
            each.unbind()
            each.close()
        needed = max((each.num_bytes for each in self._prepared), default=0)
        memory = self._pool.memory
        if keeps_memory or memory is None or memory.local.numel() <= needed:
            return
        if needed:
            self._replaced(needed)
        else:
            self._unbind()
            self._pool.memory = None

    def num_symmetric_bytes(self) -> int:
        """See `AbstractTransport.num_symmetric_bytes`."""
        return self._flags.num_bytes() + self._pool.num_bytes()

    def num_recordings(self) -> int:
        """See `AbstractTransport.num_recordings`."""
        return len(self._recordings)

    def close(self) -> None:
        """See `AbstractTransport.close`."""
        torch.cuda.synchronize(self._device)
        self._flags.watch.close()
        self._unbind()
        for prepared in self._prepared:
            prepared.close()
        self._prepared.clear()
        self._pool.close()
        self._order.close()
