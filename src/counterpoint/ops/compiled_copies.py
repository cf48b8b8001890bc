"""One schedule for one shape and type on GPUs: the list of driver calls and matmuls of a call, built once and issued
each time.

A call that repeats at the same addresses is recorded and replayed (`graph_cache.py`), unless its caller captures it.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple, final

import torch
from cuda.bindings import driver as cu
from torch._C import _CUDAGraph as Graph

from counterpoint.cuda.driver import SUCCESS, Handle, check
from counterpoint.ops.added_matmul import reserve_workspaces
from counterpoint.ops.call_order import NO_TIMING, CallOrder
from counterpoint.ops.computation import half_precision_settings
from counterpoint.ops.driver_calls import (
    Call,
    Issue,
    await_flags,
    compute,
    copy_slice_to_peer,
    copy_to_peer,
    exchange_flags,
    raise_flags,
    record_event,
    reset_flags,
    use_stream,
    wait_event,
)
from counterpoint.ops.graph_cache import Key, Recordings, capture_or_disable
from counterpoint.ops.launch_order import launch_behind
from counterpoint.ops.signals import Flags
from counterpoint.ops.streams import StreamNumbers, numbers_of, recording_stream_of, stream_of
from counterpoint.ops.symmetric import SymmetricMemory
from counterpoint.ops.transport import AbstractCompiledSchedule, Layout, Tensors, Weights, view_of, with_slices
from counterpoint.schedule.actions import COMPUTATION_KINDS, FIRST_COMPUTE, Buffer, CopySchedule
from counterpoint.schedule.program import FREE, Flag, Instruction, Program

RECORDED_TYPES = (torch.bfloat16, torch.float16)  # other types' matmuls depend on more of torch's settings
DTYPE = attrgetter("dtype")
USE_FIRST_STREAM = use_stream(FIRST_COMPUTE)
CAPTURING = cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE


class Shared(NamedTuple):
    """What all schedules of one group on one GPU share. `memory` returns the present memory; reading it may create it
    anew.
    """

    device: torch.device
    group_name: str
    flags: Flags
    order: CallOrder
    recordings: Recordings[Graph]
    memory: Callable[[], SymmetricMemory]

    def stream(self, name: str) -> torch.cuda.Stream:
        """Return the group's stream of that name."""
        return stream_of(self.group_name, self.device, name)

    def recording_stream(self, name: str) -> torch.cuda.Stream:
        """Return the group's stream of that name on which calls are only recorded."""
        return recording_stream_of(self.group_name, self.device, name)


class Branches:
    """The streams of a call that fork from the current one, by name, for torch and for the driver."""

    def __init__(self, streams: dict[str, torch.cuda.Stream]) -> None:
        self.streams = {name: numbers_of(stream) for name, stream in streams.items()}
        self.handles = {name: cu.CUstream(stream.cuda_stream) for name, stream in streams.items()}


@final
class CompiledCopies(AbstractCompiledSchedule):
    """One schedule for one shape and type, as a list of driver calls and matmuls."""

    def __init__(self, shared: Shared, planned: tuple[CopySchedule, Program], layout: tuple[Layout, torch.dtype]) -> None:
        self._shared = shared
        self._schedule, self._program = planned
        self._layout, self._dtype = layout
        self._may_be_recorded = self._dtype in RECORDED_TYPES
        self.num_bytes = self._layout.num_bytes  # of symmetric memory
        self.num_sent_bytes = self._layout.sent_bytes(self._program.steps)
        self._local = [buffer for buffer in self._schedule.buffers if buffer.home == "local"]
        self._sliced = [buffer for buffer in self._schedule.buffers if buffer.num_slices > 1]
        forked = [name for name in self._program.streams if name != FIRST_COMPUTE]
        self._branches = Branches({name: shared.stream(name) for name in forked})
        self._recorded_branches = Branches({name: shared.recording_stream(name) for name in forked})
        self._recording_stream = shared.recording_stream(FIRST_COMPUTE)
        self._events = {
            step.position: check("Making an event", cu.cuEventCreate(NO_TIMING))
            for step in self._program.steps
            if step.is_awaited
        }
        self._tails: dict[str, Handle] = {}  # events at the end of each stream's part of a captured call
        self._memory: SymmetricMemory | None = None
        self._symmetric: dict[str, torch.Tensor] = {}
        self._issues: list[Issue] = []
        reserve_workspaces(shared.device)

    def run(self, tensors: Tensors, weights: Weights) -> bool:
        """See `AbstractCompiledSchedule.run`."""
        shared = self._shared
        memory, order, recordings = shared.memory(), shared.order, shared.recordings
        if self._memory is not memory:
            self._bind(memory)
        operands = with_slices(tensors, self._sliced) if self._sliced else tensors
        if self._local:
            operands = {**operands, **{buffer.name: self._allocate(buffer) for buffer in self._local}}
        handle = order.follow(torch._C._cuda_getCurrentRawStream(shared.device.index))
        graph = None
        if self._may_be_recorded and recordings.is_enabled and not order.is_in_capture:
            key = self._key(operands, weights)
            graph = recordings.find(key) or self._recorded(key, operands, weights)
        if graph is not None:
            graph.replay()
        else:
            current = torch._C._cuda_getCurrentStream(shared.device.index), handle
            self._issue(self._call((operands, weights), current, self._branches, is_captured=order.is_in_capture))
        order.finish(handle)
        return graph is not None

    def _recorded(self, key: Key, operands: Tensors, weights: Weights) -> Graph | None:
        """Record this call and return the recording, if the call was made often enough."""
        recordings = self._shared.recordings
        graph = self._record(operands, weights) if recordings.is_due(key) else None
        if graph is not None:
            recordings.keep(key, graph, map(torch.Tensor.data_ptr, operands.values()))
        return graph

    def _record(self, operands: Tensors, weights: Weights) -> Graph | None:
        """Record this call; if that fails, return None and record no other: the call can be issued without a recording."""
        stream = self._recording_stream
        current = numbers_of(stream), cu.CUstream(stream.cuda_stream)
        call = self._call((operands, weights), current, self._recorded_branches, is_captured=True)
        return capture_or_disable(self._shared.recordings, stream, lambda: self._issue(call), "Operators")

    def _key(self, operands: Tensors, weights: Weights) -> Key:
        """Return everything that determines what a call issues: addresses, strides, and torch's settings for
        half-precision matmuls. The schedule stands for shapes and type; names and types tell what becomes of a total of
        weight gradients.
        """
        tensors = (*weights, *operands.values())
        return (
            self,  # not its id, which another schedule could get later
            *map(torch.Tensor.data_ptr, tensors),
            *map(torch.Tensor.stride, tensors),
            *operands,
            *map(DTYPE, operands.values()),
            *(weight.shape for weight in weights[1:]),  # how columns are divided among several
            half_precision_settings(),
            torch._C._cuda_tunableop_is_enabled(),  # builds for CPUs lack it
        )

    def _call(
        self,
        operands: tuple[Tensors, Weights],
        current: tuple[StreamNumbers, Handle],
        branches: Branches,
        *,
        is_captured: bool,
    ) -> Call:
        tensors, weights = operands
        streams = {**branches.streams, FIRST_COMPUTE: current[0]}
        handles = {**branches.handles, FIRST_COMPUTE: current[1]}
        return Call(({**tensors, **self._symmetric}, weights), handles, streams, is_captured=is_captured)

    def _issue(self, call: Call) -> None:
        """Issue everything after the current stream's work. A capture must end with every stream joined again, also
        after an error.
        """
        current = call.handles[FIRST_COMPUTE]
        (result,) = cu.cuEventRecord(self._shared.order.start_event, current)
        if result != SUCCESS:
            check("Starting a call", (result,))
        try:
            for issue in self._issues:
                issue(call)
        finally:
            USE_FIRST_STREAM(call)
            if call.is_captured:
                for name in self._branches.handles:
                    self._join(name, call.handles[name], current)

    def _join(self, name: str, handle: Handle, current: Handle) -> None:
        """Let the current stream wait for another, if that is part of the capture; after an error it may not be yet."""
        if check("Asking for the capture", cu.cuStreamIsCapturing(handle)) != CAPTURING:
            return
        if name not in self._tails:
            self._tails[name] = check("Making an event", cu.cuEventCreate(NO_TIMING))
        event = self._tails[name]
        check("Ending a stream's part", cu.cuEventRecord(event, handle))
        check("Joining a stream", cu.cuStreamWaitEvent(current, event, 0))

    def close(self) -> None:
        """Free what CUDA holds for this schedule, which is not run any more."""
        for event in (*self._events.values(), *self._tails.values()):
            check("Destroying an event", cu.cuEventDestroy(event))

    def unbind(self) -> None:
        """Release the group's memory, which is about to be replaced or freed."""
        self._memory = None
        self._symmetric.clear()
        self._issues.clear()

    def _allocate(self, buffer: Buffer) -> torch.Tensor:
        shape = (buffer.num_rows, buffer.num_columns)
        return torch.empty(shape, dtype=self._dtype, device=self._shared.device)

    def _bind(self, memory: SymmetricMemory) -> None:
        """Take the addresses of the group's present memory."""
        self._memory = memory
        self._symmetric = {
            name: view_of(memory.local, place, self._schedule.buffer(name), self._dtype)
            for name, place in self._layout.places.items()
        }
        self._issues = self._listed(memory.addresses)

    def _listed(self, addresses: Sequence[int]) -> list[Issue]:
        """List all driver calls of a call in order, without those that have no effect."""
        issues: list[Issue] = []
        forked = {FIRST_COMPUTE}
        position_of_stream = FIRST_COMPUTE
        for step in self._program.steps:
            if step.is_incoming:
                continue
            name = step.action.stream
            is_first = name not in forked
            if is_first:
                forked.add(name)
                issues.append(wait_event(name, self._shared.order.start_event))
            issues += [wait_event(name, self._events[earlier]) for earlier in step.waits]
            issues += self._begins(step) if step.action.kind == "begin" else self._takes(name, step.takes)
            if step.action.kind == "copy":
                issues.append(self._copy(step, addresses[step.action.writes[0].rank]))
            elif step.action.kind not in ("begin", "end"):
                if name != position_of_stream:
                    issues.append(use_stream(name))
                    position_of_stream = name
                # an operation that waits for another rank's rows needs no further ordering
                is_early = is_first and step.action.kind in COMPUTATION_KINDS and not step.takes
                computes = compute(step, self._symmetric)
                issues.append(launch_behind(FIRST_COMPUTE, name, computes) if is_early else computes)
            if step.is_awaited:
                issues.append(record_event(name, self._events[step.position]))
            issues += self._raises(name, step.raises)
        return issues

    def _copy(self, step: Instruction, peer: int) -> Issue:
        source, target = step.action.reads[0], step.action.writes[0]
        if any(buffer.name == source.buffer for buffer in self._sliced):
            return copy_slice_to_peer(step.action.stream, peer + self._layout.offset(target), source)
        num_bytes = source.num_rows * self._layout.row_bytes(source.buffer)
        offset = source.start * self._layout.row_bytes(source.buffer)
        to = peer + self._layout.offset(target)
        return copy_to_peer(step.action.stream, to, (source.buffer, offset, num_bytes))

    def _begins(self, step: Instruction) -> list[Issue]:
        """Reset the flags of this call's later steps, then let every rank know and wait until all have done the same."""
        flags, name = self._shared.flags, step.action.stream
        later = range(FREE + 1, self._program.num_flags)
        resets = [reset_flags(name, flags.block(later))] if later else []
        of_peers, own = self._of_peers(step.announces), self._own(step.takes)
        return resets + exchange_flags(name, of_peers, own, is_flushing=flags.is_flushing)

    def _takes(self, name: str, flags: Sequence[Flag]) -> list[Issue]:
        return await_flags(name, self._own(flags), is_flushing=self._shared.flags.is_flushing)

    def _raises(self, name: str, flags: Sequence[Flag]) -> list[Issue]:
        return raise_flags(name, self._of_peers(flags))

    def _own(self, flags: Sequence[Flag]) -> list[int]:
        return [self._shared.flags.own(flag.number, flag.peer) for flag in flags]

    def _of_peers(self, flags: Sequence[Flag]) -> list[int]:
        return [self._shared.flags.of_peer(flag.number, flag.peer) for flag in flags]
