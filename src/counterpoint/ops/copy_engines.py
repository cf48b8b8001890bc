"""Schedules on GPUs: copies by copy engines into symmetric memory, signals by stream memory operations. No SM does
either.

A copy is `cuMemcpyAsync` into a peer's mapped memory. A flag is a 32-bit word: the sender writes 1 behind its rows,
the receiver's stream waits for 1 and lowers it to 0. Flags rest at the same values after every call (arrivals at 0,
"you may write" at 1), so the same operations work eagerly and in a captured graph, whose values are frozen, in any
mixture. A flag is never raised before it was lowered: a rank sends again only after the receiver's "you may write",
which follows everything it took.

Calls of a group follow each other, whatever streams they are issued on. Waits are issued after what they wait for in
one order that all ranks share, so streams that share a hardware queue cannot block each other for ever.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from cuda.bindings import driver as cu

from counterpoint.cuda.driver import check
from counterpoint.errors import OperatorError
from counterpoint.ops.agreement import Agreement
from counterpoint.ops.issuing import (
    Call,
    Issue,
    compute,
    copy_to_peer,
    raise_flags,
    record_event,
    take_flags,
    use_stream,
    wait_event,
)
from counterpoint.ops.signals import Flags
from counterpoint.ops.symmetric import SymmetricMemory
from counterpoint.ops.transport import AbstractPrepared, AbstractTransport, Layout, Tensors, view_of
from counterpoint.schedule.actions import Buffer, CopySchedule
from counterpoint.schedule.program import FREE, Flag, Program, Step, make_program
from counterpoint.value import require

Handle = Any  # cuda-bindings has no types
NO_TIMING = int(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)
MAX_FLAGS = 1024


@final
class CopyEngines(AbstractTransport):
    """Symmetric memory, flags and streams of one group on one GPU."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, agreement: Agreement) -> None:
        self.group, self.device, self._agreement = group, device, agreement
        self.rank, self.num_ranks = int(group.rank()), int(group.size())
        self.memory: SymmetricMemory | None = None
        self._prepared: list[PreparedCopies] = []
        self._is_captured = False
        self._retired: list[SymmetricMemory] = []  # captured graphs still use them
        self.flags = Flags(group, device, agreement, [int(number == FREE) for number in range(MAX_FLAGS)])
        self._streams: dict[str, torch.cuda.Stream] = {}
        self.start_event, *ends = (check("Making an event", cu.cuEventCreate(NO_TIMING)) for _ in range(3))
        self._ends = dict(zip(("eager", "captured"), ends, strict=True))
        self._end_event: Handle = self._ends["eager"]  # of the call being issued
        self._last: dict[str, tuple[int, int]] = {}  # stream and capture of the last call of each kind

    def prepare(self, schedule: CopySchedule, dtype: torch.dtype) -> AbstractPrepared:
        """See `AbstractTransport.prepare`."""
        layout = Layout(schedule, dtype.itemsize)
        program = make_program(schedule, self.rank)
        require(
            program.num_flags <= MAX_FLAGS,
            OperatorError,
            f"A schedule may use {MAX_FLAGS} flags per peer; this one needs {program.num_flags}. Ask for fewer chunks.",
        )
        self.require_memory(layout.num_bytes)
        prepared = PreparedCopies(self, schedule, program, (layout, dtype))
        self._prepared.append(prepared)
        return prepared

    def require_memory(self, num_bytes: int = 0) -> None:
        """Have so much, and enough for all schedules so far: they have none where an attempt to get more has failed."""
        if self.memory is None or self.memory.local.numel() < num_bytes:
            self._grow(max([num_bytes, *(prepared.num_bytes for prepared in self._prepared)]))

    def _grow(self, num_bytes: int) -> None:
        """Take larger memory in place of the present one, which lives on only if a captured graph may write to it."""
        torch.cuda.synchronize(self.device)
        if self._is_captured and self.memory is not None:
            self._retired.append(self.memory)
        self._is_captured = False
        self._let_go()
        self.memory = SymmetricMemory(num_bytes, self.device, self.group, self._agreement)

    def _let_go(self) -> None:
        self.memory = None
        for prepared in self._prepared:
            prepared.unbind()

    def num_symmetric_bytes(self) -> int:
        """See `AbstractTransport.num_symmetric_bytes`."""
        held = [*self._retired, *([self.memory] if self.memory else [])]
        return self.flags.num_bytes() + sum(int(memory.local.numel()) for memory in held)

    def close(self) -> None:
        """See `AbstractTransport.close`."""
        torch.cuda.synchronize(self.device)
        self.flags.watch.close()
        self._let_go()
        self._prepared.clear()
        self._retired.clear()
        self._streams.clear()

    def stream(self, name: str) -> torch.cuda.Stream:
        """This transport's stream of that name; `compute 0` is the caller's current stream and none of these."""
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream(self.device)
        return self._streams[name]

    def follow(self, current: Handle) -> None:
        """Let this call come after the last one, which may have been issued on another stream, and fork from it."""
        self.flags.watch.require_sound()
        stream, capture = int(current), _capture_id(current)
        kind = "captured" if capture else "eager"
        last_stream, last_capture = self._last.get(kind, (stream, capture))
        if last_stream != stream and last_capture == capture:
            check("Ordering calls", cu.cuStreamWaitEvent(current, self._ends[kind], 0))
        check("Starting a call", cu.cuEventRecord(self.start_event, current))
        self._last[kind] = (stream, capture)
        self._is_captured = self._is_captured or bool(capture)
        self._end_event = self._ends[kind]

    @property
    def is_in_capture(self) -> bool:
        """Whether the call being issued is captured in a graph."""
        return self._end_event is self._ends["captured"]

    def finish(self, current: Handle) -> None:
        """Mark the end of a call."""
        check("Ending a call", cu.cuEventRecord(self._end_event, current))
        if not self.is_in_capture:
            self.flags.watch.sample(current)


@final
class PreparedCopies(AbstractPrepared):
    """One schedule for one shape and type, as a list of driver calls and matmuls."""

    def __init__(
        self,
        transport: CopyEngines,
        schedule: CopySchedule,
        program: Program,
        layout: tuple[Layout, torch.dtype],
    ) -> None:
        self._transport, self._schedule, self._program = transport, schedule, program
        self._layout, self._dtype = layout
        self.num_bytes = self._layout.num_bytes  # of symmetric memory
        self._local = [buffer for buffer in schedule.buffers if buffer.home == "local"]
        self._streams = {name: transport.stream(name) for name in program.streams if name != "compute 0"}
        self._handles = {name: cu.CUstream(stream.cuda_stream) for name, stream in self._streams.items()}
        self._events = {
            step.position: check("Making an event", cu.cuEventCreate(NO_TIMING)) for step in program.steps if step.is_awaited
        }
        self._tails: dict[str, Handle] = {}  # events at the end of each stream's part of a captured call
        self._memory: SymmetricMemory | None = None
        self._symmetric: dict[str, torch.Tensor] = {}
        self._issues: list[Issue] = []

    def run(self, tensors: Tensors, weight: torch.Tensor) -> None:
        """See `AbstractPrepared.run`."""
        transport = self._transport
        transport.require_memory()
        if self._memory is not transport.memory:
            self._bind()
        current = torch.cuda.current_stream(transport.device)
        handle = cu.CUstream(current.cuda_stream)
        local = {buffer.name: self._allocate(buffer) for buffer in self._local}
        call = Call(
            {**tensors, **self._symmetric, **local},
            weight,
            {**self._handles, "compute 0": handle},
            {**self._streams, "compute 0": current},
        )
        transport.follow(handle)
        try:
            for issue in self._issues:
                issue(call)
        finally:
            torch.cuda.set_stream(current)
        if transport.is_in_capture:
            self._join(handle)
        transport.finish(handle)

    def _join(self, current: Handle) -> None:
        """Let the current stream wait for all others: a capture must end with every stream that it forked joined again."""
        for name, handle in self._handles.items():
            if name not in self._tails:
                self._tails[name] = check("Making an event", cu.cuEventCreate(NO_TIMING))
            event = self._tails[name]
            check("Ending a stream's part", cu.cuEventRecord(event, handle))
            check("Joining a stream", cu.cuStreamWaitEvent(current, event, 0))

    def unbind(self) -> None:
        """Let go of the transport's memory, which is about to be replaced or freed."""
        self._memory = None
        self._symmetric.clear()
        self._issues.clear()

    def _allocate(self, buffer: Buffer) -> torch.Tensor:
        shape = (buffer.num_rows, buffer.num_columns)
        return torch.empty(shape, dtype=self._dtype, device=self._transport.device)

    def _bind(self) -> None:
        """Take the addresses of the transport's present memory."""
        assert self._transport.memory is not None
        self._memory = self._transport.memory
        self._symmetric = {
            name: view_of(self._memory.local, place, self._schedule.buffer(name), self._dtype)
            for name, place in self._layout.places.items()
        }
        self._issues = self._listed(self._program, self._memory.addresses)

    def _listed(self, program: Program, addresses: Sequence[int]) -> list[Issue]:
        """All driver calls of a call, in order; those without effect are left out here, once."""
        issues: list[Issue] = []
        forked = {"compute 0"}
        position_of_stream = ""
        for step in program.steps:
            if step.is_incoming:
                continue
            name = step.action.stream
            if name not in forked:
                forked.add(name)
                issues.append(wait_event(name, self._transport.start_event))
            issues += [wait_event(name, self._events[earlier]) for earlier in step.waits]
            issues += self._takes(name, step.takes)
            if step.action.kind == "copy":
                issues.append(self._copy(step, addresses[step.action.writes[0].rank]))
            elif step.action.kind not in ("begin", "end"):
                if name != position_of_stream:
                    issues.append(use_stream(name))
                    position_of_stream = name
                issues.append(compute(step))
            if step.is_awaited:
                issues.append(record_event(name, self._events[step.position]))
            issues += self._raises(name, step.raises)
        return issues

    def _copy(self, step: Step, peer: int) -> Issue:
        source, target = step.action.reads[0], step.action.writes[0]
        num_bytes = source.num_rows * self._layout.row_bytes(source.buffer)
        offset = source.start * self._layout.row_bytes(source.buffer)
        to = peer + self._layout.offset(target)
        return copy_to_peer(step.action.stream, to, (source.buffer, offset, num_bytes))

    def _takes(self, name: str, flags: Sequence[Flag]) -> list[Issue]:
        return take_flags(name, [self._transport.flags.own(flag.number, flag.peer) for flag in flags])

    def _raises(self, name: str, flags: Sequence[Flag]) -> list[Issue]:
        return raise_flags(name, [self._transport.flags.of_peer(flag.number, flag.peer) for flag in flags])


def _capture_id(stream: Handle) -> int:
    """Number of the graph capture that the stream is in; 0 outside of any."""
    if not torch.cuda.is_current_stream_capturing():
        return 0
    return int(check("Asking for the capture", cu.cuStreamGetCaptureInfo(stream))[1])
