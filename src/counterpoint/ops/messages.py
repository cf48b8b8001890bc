"""Runs schedules on CPUs: the same chunks in the same order as messages, so that tests run the logic on real tensors
without GPUs.

Every rank goes through the schedule in its single order and does its part of each copy: the sender `send`, the receiver
`recv`. Both ranks of the earliest unfinished copy have reached it, so no rank waits forever. Nothing overlaps here.
"""

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist

from counterpoint.ops.agreement import Agreement
from counterpoint.ops.computation import Compute, bind_computation, rows_of
from counterpoint.ops.message_watchdog import MessageWatchdog
from counterpoint.ops.symmetric import host_memory
from counterpoint.ops.transport import (
    AbstractCompiledSchedule,
    AbstractTransport,
    Layout,
    Tensors,
    Weights,
    view_of,
    with_slices,
)
from counterpoint.schedule.actions import CopySchedule
from counterpoint.schedule.program import Instruction, make_program


@final
class Messages(AbstractTransport):
    """Point-to-point messages of one group; the symmetric memory is ordinary."""

    def __init__(self, group: dist.ProcessGroup, agreement: Agreement, watchdog: MessageWatchdog) -> None:
        self.group, self.agreement, self.watchdog = group, agreement, watchdog
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._prepared: list[CompiledMessages] = []

    def prepare(self, schedule: CopySchedule, dtype: torch.dtype) -> AbstractCompiledSchedule:
        """See `AbstractTransport.prepare`."""
        layout = Layout(schedule, dtype.itemsize)
        if self.memory.numel() < layout.num_bytes:
            self.memory = host_memory(layout.num_bytes, "a copy schedule", self.agreement)
        prepared = CompiledMessages(self, schedule, layout, dtype)
        self._prepared.append(prepared)
        return prepared

    def forget(self, prepared: Sequence[AbstractCompiledSchedule], *, keeps_memory: bool = False) -> None:
        """See `AbstractTransport.forget`."""
        self._prepared = [each for each in self._prepared if each not in prepared]
        needed = max((each.num_bytes for each in self._prepared), default=0)
        if self.memory.numel() > needed and not keeps_memory:
            self.memory = torch.empty(needed, dtype=torch.uint8, device="cpu")

    def num_symmetric_bytes(self) -> int:
        """See `AbstractTransport.num_symmetric_bytes`."""
        return int(self.memory.numel())

    def num_recordings(self) -> int:
        """Return 0: there are no graphs on CPUs."""
        return 0

    def close(self) -> None:
        """See `AbstractTransport.close`."""
        self._prepared.clear()
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")


@final
class CompiledMessages(AbstractCompiledSchedule):
    """One schedule for one shape and type."""

    def __init__(self, transport: Messages, schedule: CopySchedule, layout: Layout, dtype: torch.dtype) -> None:
        self._transport, self._schedule, self._layout, self._dtype = transport, schedule, layout, dtype
        self.num_bytes = layout.num_bytes  # of symmetric memory
        steps = make_program(schedule, transport.group.rank()).steps
        self.num_sent_bytes = layout.sent_bytes(steps)
        self._steps: list[tuple[Instruction, Compute | None]] = [
            (step, None if step.action.kind == "copy" else bind_computation(step.action))
            for step in steps
            if step.action.kind not in ("begin", "end")
        ]

    def run(self, tensors: Tensors, weights: Weights) -> bool:
        """See `AbstractCompiledSchedule.run`."""
        own = {buffer.name: self._own(buffer.name) for buffer in self._schedule.buffers if buffer.home != "given"}
        everything = {**own, **with_slices(tensors, self._schedule.buffers)}
        for step, compute in self._steps:
            if compute is not None:
                compute(everything, weights)
            elif step.is_incoming:
                self._receive(step, everything)
            else:
                self._send(step, everything)
        return False

    def _own(self, name: str) -> torch.Tensor:
        """Return a new local buffer, or a symmetric one in the memory that all schedules share."""
        buffer = self._schedule.buffer(name)
        if buffer.home == "symmetric":
            return view_of(self._transport.memory, self._layout.places[name], buffer, self._dtype)
        return torch.empty(
            buffer.num_rows if buffer.home == "local" else 0, buffer.num_columns, dtype=self._dtype, device="cpu"
        )

    def _send(self, step: Instruction, tensors: Tensors) -> None:
        source, target = step.action.reads[0], step.action.writes[0]
        self._message(dist.send, rows_of(tensors, source), target.rank, step.position)

    def _receive(self, step: Instruction, tensors: Tensors) -> None:
        self._message(dist.recv, rows_of(tensors, step.action.writes[0]), step.action.rank, step.position)

    def _message(self, act: object, rows: torch.Tensor, peer: int, tag: int) -> None:
        group = self._transport.group
        # a flat view first: torch calls rows of one column contiguous whatever their last stride, and refuses their bytes
        as_bytes = (rows.contiguous() if act is dist.send else rows).view(-1).view(torch.uint8)
        try:
            with self._transport.watchdog.waiting():
                act(as_bytes, dist.get_global_rank(group, peer), group, tag)  # type: ignore[operator]
        except RuntimeError as problem:
            what = f"rank {peer} of the group did not exchange its rows in time, or ended"
            raise self._transport.agreement.give_up(what, "its") from problem
