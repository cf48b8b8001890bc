"""Read a torch.profiler trace (Kineto's Chrome JSON): GPU operations, host launches, event records and waits, operators.

The file is read in blocks. Five fields of each event are decoded. Arguments stay undecoded bytes except for the few kinds of
event that matter here: a trace of 200 MB has some 700,000 events, and one in ten is kept. The module does not know what a
step is, nor what a kernel does. On AMD the launches are called `hip...`; the categories are the same.
"""

import re
from array import array
from collections.abc import Iterator
from functools import cache
from math import copysign
from pathlib import Path
from sys import intern
from typing import TypeVar

import msgspec
from msgspec.structs import force_setattr

from counterpoint.errors import TraceError, shown
from counterpoint.files import REMEDY
from counterpoint.machine import machine_of_limits
from counterpoint.mismatch import describe_mismatch
from counterpoint.step import MAX_RANKS
from counterpoint.traces.activity import ActivityTrace, Category, GpuOperation, HostCall, LaunchArguments, SyncArguments
from counterpoint.traces.assembly import assemble, busiest, launches_here
from counterpoint.traces.collective_ranges import CollectiveRange, by_torch, describe_collectives
from counterpoint.traces.event_stream import NOT_STATED, Device, Distributed, Event, EventStream, Surroundings
from counterpoint.traces.host_operators import LAUNCHES_NOTHING, MODULE, NO_MODULE, HostOperators, decode_arguments
from counterpoint.value import cyclic_gc_paused, require

GPU_CATEGORIES: dict[str, Category] = {
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "gpu_memset": "memset",
    "Kernel": "kernel",
    "Memcpy": "memcpy",
    "Memset": "memset",
}
HOST_CATEGORIES = frozenset(("cuda_runtime", "cuda_driver", "Runtime", "Driver", "hip_runtime", "hip_driver"))
OLD_OPERATOR = "Operator"
"""In 2021 Kineto gave operators and annotations this category (`handleCpuActivity`); names tell torch's own annotations."""
K = TypeVar("K", bound=msgspec.Struct)
MOST_AT_ZERO = 1
"""More events that begin at 0 and take no time have lost both (pytorch#188481); one may be the first of a shifted trace."""
MAX_US = 1e17  # above this a double no longer resolves a microsecond
_LAUNCHES_NOTHING = re.compile(
    "Get|Query|Capturing|Occupancy|SetDevice|SetAttribute|Exchange|Malloc|Free|EventCreate|EventDestroy|HostAlloc|PeekAt"
)


class _Correlation(msgspec.Struct, gc=False):
    correlation: int = 0


def knows(head: bytes) -> bool:
    """Return whether a file that begins with these bytes is JSON, as this format is."""
    return head.lstrip()[:1] in (b"{", b"[")


def read(path: Path, pieces: Iterator[bytes]) -> ActivityTrace:
    """Return the activity in a trace given in pieces. Raises `TraceError` if it is no trace, or holds no GPU activity.

    A file that ends early is read up to its last whole step, with a note; a file without a whole step is refused.
    """
    stream, found = EventStream(path, pieces), _Collected(path)
    try:
        with cyclic_gc_paused():
            for events in stream:
                found.add(events)
            return found.trace(stream.surroundings, stream.damage)
    except MemoryError as problem:
        raise TraceError(f"{path}: its contents do not fit the memory of this machine; profile fewer steps.") from problem


class _Collected:
    """Collects the parts of events that are kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.operations: dict[int, list[GpuOperation]] = {}
        self.calls: dict[int, HostCall] = {}
        self.call_times = array("d")  # how long each of the calls takes, in their order
        self.repeated: list[tuple[HostCall, float]] = []  # further calls with a correlation of `calls`, and their times
        self.waits: list[SyncArguments] = []
        self.host_waits: list[tuple[float, float]] = []
        self.windows: list[tuple[float, float]] = []
        self.operators = HostOperators()
        self.collectives: list[CollectiveRange] = []
        self.timeless: list[str] = []  # names of what begins at 0 and takes no time
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._launch_decoders = _decoders(LaunchArguments)
        self._call_decoders = _decoders(_Correlation)
        self._sync_decoders = _decoders(SyncArguments)

    def add(self, events: list[Event]) -> None:
        """Keep the relevant events."""
        kinds: dict[str, list[Event]] = {}
        for event in events:
            try:
                kinds[event.cat].append(event)
            except KeyError:
                kinds[event.cat] = [event]
        for event in kinds.pop(OLD_OPERATOR, ()):
            category = "user_annotation" if event.name.startswith(NO_MODULE) else "cpu_op"
            kinds.setdefault(category, []).append(event)
        for category, found in kinds.items():
            if category == "cpu_op":
                self.operators.add_operators([event for event in found if event.name not in LAUNCHES_NOTHING])
            elif category in HOST_CATEGORIES:
                self._add_calls([event for event in found if not launches_nothing(event.name)])
            elif category in GPU_CATEGORIES:
                self._add_operations(found, GPU_CATEGORIES[category])
            elif category in ("user_annotation", "python_function"):
                self._add_annotations(found, is_python=category == "python_function")
            elif category == "cuda_sync":
                self._add_waits([event for event in found if event.name == "Stream Wait Event"])

    def _add_operations(self, events: list[Event], category: Category) -> None:
        for event in events:
            self._check_times(event)
        shapes = self._shapes
        for event, arguments in zip(events, self._decode(events, *self._launch_decoders, LaunchArguments), strict=True):
            grid, block = arguments.grid, arguments.block
            if grid or block:
                force_setattr(arguments, "grid", shapes.setdefault(grid, grid))
                force_setattr(arguments, "block", shapes.setdefault(block, block))
            if arguments.copying_device is not None:
                force_setattr(arguments, "device", arguments.copying_device)
            start_us = event.ts
            operation = GpuOperation(
                name=intern(event.name),
                category=category,
                start_us=start_us,
                end_us=start_us + event.dur,
                arguments=arguments,
            )
            try:
                self.operations[arguments.device].append(operation)
            except KeyError:
                self.operations[arguments.device] = [operation]

    def _add_annotations(self, events: list[Event], *, is_python: bool) -> None:
        for event in events:
            if is_python:
                if event.name.startswith(MODULE):
                    self.operators.add_annotation(event)
                continue
            if event.name.startswith("ProfilerStep#"):
                self.windows.append((event.ts, event.ts + event.dur))
            elif (found := by_torch(event)) is not None:
                self.collectives.append(found)
            self.operators.add_annotation(event)

    def _add_calls(self, events: list[Event]) -> None:
        for event, found in zip(events, self._decode(events, *self._call_decoders, _Correlation), strict=True):
            self._check_times(event)
            name, correlation = event.name, found.correlation
            if name.endswith("Synchronize"):
                self.host_waits.append((event.ts, event.ts + event.dur))
            if correlation == 0:
                continue
            call = HostCall(
                kind="record" if "EventRecord" in name else "wait" if "StreamWaitEvent" in name else "launch",
                name=intern(name),
                time_us=event.ts,
                thread=intern(str(event.tid)),
                correlation=correlation,
            )
            if correlation in self.calls:
                self.repeated.append((call, event.dur))
            else:
                self.calls[correlation] = call
                self.call_times.append(event.dur)

    def _keep_outer_calls(self) -> None:
        """Keep the outermost of calls with one correlation, which HIP gives a call and what it calls itself.

        Raises `TraceError` if one does not lie within the outermost, in its thread: they are of two processes.
        """
        times = dict(zip(self.calls, self.call_times, strict=True)) if self.repeated else {}
        found: dict[int, list[tuple[HostCall, float]]] = {}
        for call, dur in self.repeated:
            first = self.calls[call.correlation]
            found.setdefault(call.correlation, [(first, times[call.correlation])]).append((call, dur))
        for correlation, alike in found.items():
            alike.sort(key=lambda each: (each[0].time_us, -each[1]))
            outer, outer_dur = alike[0]
            for call, dur in alike[1:]:
                ends_within = call.time_us + dur <= outer.time_us + outer_dur
                is_same = (call.time_us, dur) == (outer.time_us, outer_dur)
                require(
                    call.thread == outer.thread and ends_within and not is_same,
                    TraceError,
                    f"{self.path}: correlation {correlation} names two host calls, the second '{shown(call.name)}'; trace "
                    "one process.",
                )
            self.calls[correlation] = outer

    def _check_times(self, event: Event) -> None:
        if 0 < event.ts < MAX_US and 0 < event.dur < MAX_US:
            return
        name = shown(event.name)
        for field, time_us in (("ts", event.ts), ("dur", event.dur)):
            if time_us == 0 and copysign(1, time_us) == copysign(1, NOT_STATED):
                place = f" at {event.ts:.15g} us" if field == "dur" else ""
                raise TraceError(
                    f"{self.path}: '{name}'{place} has no '{field}'; record the trace again with torch.profiler."
                )
        if not (0 <= event.ts < MAX_US and 0 <= event.dur < MAX_US):
            raise TraceError(
                f"{self.path}: times must be from 0 to 1e17 us; '{name}' begins at {event.ts:.15g} us and takes "
                f"{event.dur:.15g} us; record the trace again with torch.profiler."
            )
        if event.ts == 0 and event.dur == 0:
            self.timeless.append(event.name)

    def _add_waits(self, events: list[Event]) -> None:
        self.waits += self._decode(events, *self._sync_decoders, SyncArguments)

    def _decode(
        self,
        events: list[Event],
        decoder: msgspec.json.Decoder[K],
        list_decoder: msgspec.json.Decoder[list[K]],
        kind: type[K],
    ) -> list[K]:
        """Return the arguments of all these events. Raises `TraceError` for the first event with unexpected arguments."""
        _, found = decode_arguments(events, decoder, list_decoder)
        if len(found) == len(events):
            return found
        for event in events:
            try:
                decoder.decode(event.args)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
                said = str(problem)
                if isinstance(problem, msgspec.ValidationError):
                    said, _ = describe_mismatch(problem, kind, whole="args")
                name = f"{'GPU operation ' if kind is LaunchArguments else ''}'{shown(event.name)}'"
                place = f"{self.path}: {name} at {event.ts:.15g} us"
                raise TraceError(f"{place}: {said.rstrip('.')}; record the trace again with torch.profiler.") from problem
        return found

    def trace(self, surroundings: Surroundings, damage: str | None) -> ActivityTrace:
        """Return the trace of the device that computes longest."""
        require(
            bool(self.operations),
            TraceError,
            f"{damage}; {REMEDY}."
            if damage
            else f"{self.path} holds no GPU activity. Record the job on a GPU, with activities=[CPU, CUDA] and without "
            "another profiler attached.",
        )
        require(
            len(self.timeless) <= MOST_AT_ZERO,
            TraceError,
            f"{self.path}: {len(self.timeless)} GPU operations and host calls begin at 0 and take 0 us, first "
            f"'{shown((self.timeless or [''])[0])}': the profiler lost their times. Record the trace again.",
        )
        self._keep_outer_calls()
        number = busiest(self.operations)
        operations = self.operations.pop(number)
        calls = launches_here(self.calls, operations, self.operations.values())
        if damage is not None:  # a file that ends early lacks some calls, and nothing says which
            calls, self.waits = {number: call for number, call in calls.items() if call.kind != "wait"}, []
        for wait in self.waits:
            call = calls.get(wait.correlation)
            if call is not None and wait.stream >= 0 and wait.device in (None, number):
                calls[wait.correlation] = msgspec.structs.replace(call, kind="wait", sync=wait)
        device = _device(surroundings.deviceProperties, number)
        distributed = surroundings.distributedInfo or Distributed()
        self._check_ranks(distributed.rank, distributed.world_size)
        trace = ActivityTrace(
            path=str(self.path),
            operations=(),
            host_calls=(),
            step_windows=tuple(sorted(self.windows)),
            num_devices=1 + len(self.operations),
            device_name=_name_of(device),
            num_sms=device.numSms if device.numSms and device.numSms > 0 else None,
            compute_major=device.computeMajor,
            rank=distributed.rank,
            world_size=distributed.world_size,
            nccl_version=distributed.nccl_version,
            host_waits=tuple(sorted(self.host_waits)),
        )
        describe_collectives(operations, calls, self.collectives, {}, distributed.world_size)
        return assemble(trace, operations, calls, self.operators, damage)

    def _check_ranks(self, rank: int | None, world_size: int | None) -> None:
        remedy = "correct the file's distributedInfo, or record it again"
        require(
            world_size is None or 1 <= world_size <= MAX_RANKS,
            TraceError,
            f"{self.path} states {world_size} ranks; there must be from 1 to {MAX_RANKS:,}; {remedy}.",
        )
        last = (world_size or MAX_RANKS) - 1
        require(
            rank is None or 0 <= rank <= last,
            TraceError,
            f"{self.path} states that it is of rank {rank}; ranks are from 0 to {last:,}; {remedy}.",
        )


@cache
def launches_nothing(call: str) -> bool:
    """Return whether a call of the runtime or the driver launches, records and waits for nothing, by its name."""
    return _LAUNCHES_NOTHING.search(call) is not None


def _decoders(kind: type[K]) -> tuple[msgspec.json.Decoder[K], msgspec.json.Decoder[list[K]]]:
    return msgspec.json.Decoder(kind), msgspec.json.Decoder(list[kind])  # type: ignore[valid-type]


def _device(devices: list[Device], number: int) -> Device:
    """Return the GPU that the operations call `number`.

    ROCm also counts the host's processors, so its numbers may not be listed. Then any GPU will do if all have one name.
    """
    listed = next((item for item in devices if item.id == number), None)
    if listed is not None:
        return listed
    return devices[0] if len({item.name for item in devices}) == 1 else Device()


def _name_of(device: Device) -> str | None:
    """Return the GPU's name or, if the profiler left it empty, that of the only shipped GPU with the same limits."""
    if device.name or not (device.numSms and device.warpSize and device.totalGlobalMem):
        return device.name or None
    machine = machine_of_limits(device.numSms, device.warpSize, device.totalGlobalMem)
    return machine.device_names[0] if machine is not None and machine.device_names else None
