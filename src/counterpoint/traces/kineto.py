"""Read a torch.profiler trace (Kineto's Chrome JSON): GPU operations, host launches, event records and waits, operators.

The file is read in blocks. Of each event five fields are decoded; arguments stay undecoded bytes except for the few kinds
of event that matter here: a trace of 200 MB has some 700,000 events, of which one in ten is kept. The module does not know
what a step is, nor what a kernel does. On AMD the launches are called `hip...`; the categories are the same.
"""

import gc
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from sys import intern

import msgspec

from counterpoint.errors import TraceError, shown
from counterpoint.files import UTF8_MARK
from counterpoint.mismatch import describe_mismatch
from counterpoint.traces.activity import ActivityTrace, Category, GpuOperation, HostCall, LaunchArguments, SyncArguments
from counterpoint.traces.assembly import assemble
from counterpoint.traces.event_stream import Device, Distributed, Event, EventStream, Surroundings
from counterpoint.traces.host_operators import LAUNCHES_NOTHING, MODULE, HostOperators, decode_arguments
from counterpoint.value import require

GPU_CATEGORIES: dict[str, Category] = {
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "gpu_memset": "memset",
    "Kernel": "kernel",
    "Memcpy": "memcpy",
    "Memset": "memset",
}
HOST_CATEGORIES = frozenset(("cuda_runtime", "cuda_driver", "Runtime", "Driver", "hip_runtime", "hip_driver"))
_READ_ELSEWHERE = HOST_CATEGORIES | {"cpu_op", "ac2g", "fwdbwd", "", "gpu_user_annotation"}  # or not at all
MAX_US = 1e17  # above this a double no longer resolves a microsecond
_LAUNCHES_NOTHING = re.compile(
    "Get|Query|Capturing|Occupancy|SetDevice|SetAttribute|Exchange|Malloc|Free|EventCreate|EventDestroy|HostAlloc|PeekAt"
)


class _Correlation(msgspec.Struct, gc=False):
    correlation: int = 0


def knows(head: bytes) -> bool:
    """Whether a file that begins with these bytes is JSON, as this format is."""
    return head.removeprefix(UTF8_MARK).lstrip()[:1] in (b"{", b"[")


def decode(path: Path, raw: bytearray) -> ActivityTrace:
    """The activity in the bytes of a trace. Raises `TraceError`, with `path`, for what is none, or holds no GPU activity."""
    return read(path, iter([bytes(raw)]))


def read(path: Path, pieces: Iterator[bytes]) -> ActivityTrace:
    """The activity in a trace that comes in pieces. Raises `TraceError` for what is none, or holds no GPU activity.

    A file that ends early is read up to its last whole step, with a note; without one it is refused.
    """
    stream, found = EventStream(path, pieces), _Collected(path)
    was_enabled = gc.isenabled()
    gc.disable()  # a million values that refer to nothing in a circle: looking for circles costs as much as decoding
    try:
        for events in stream:
            found.add(events)
        return found.trace(stream.surroundings, stream.damage)
    except MemoryError as problem:
        raise TraceError(f"{path}: what it holds does not fit the memory of this machine; profile fewer steps.") from problem
    finally:
        if was_enabled:
            gc.enable()


class _Collected:
    """What was kept of the events so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.operations: dict[int, list[GpuOperation]] = {}
        self.calls: dict[int, HostCall] = {}
        self.waits: list[SyncArguments] = []
        self.host_waits: list[tuple[float, float]] = []
        self.windows: list[tuple[float, float]] = []
        self.operators = HostOperators()
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._launch_decoder = msgspec.json.Decoder(LaunchArguments)
        self._call_decoder = msgspec.json.Decoder(_Correlation)
        self._call_list_decoder = msgspec.json.Decoder(list[_Correlation])
        self._sync_decoder = msgspec.json.Decoder(SyncArguments)

    def add(self, events: list[Event]) -> None:
        """Keep what matters of these events."""
        self.operators.add_operators(
            [event for event in events if event.cat == "cpu_op" and event.name not in LAUNCHES_NOTHING]
        )
        self._add_calls([event for event in events if event.cat in HOST_CATEGORIES and not launches_nothing(event.name)])
        for event in events:
            category = event.cat
            if category in _READ_ELSEWHERE:
                continue
            if category in GPU_CATEGORIES:
                self._add_operation(event, GPU_CATEGORIES[category])
            elif category == "user_annotation":
                if event.name.startswith("ProfilerStep#"):
                    self.windows.append((event.ts, event.ts + event.dur))
                self.operators.add_annotation(event)
            elif category == "cuda_sync":
                if event.name == "Stream Wait Event":
                    self._add_wait(event)
            elif category == "python_function" and event.name.startswith(MODULE):
                self.operators.add_annotation(event)

    def _add_operation(self, event: Event, category: Category) -> None:
        _check_times(self.path, event)
        try:
            arguments = self._launch_decoder.decode(event.args)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
            name = f"GPU operation '{shown(event.name)}'"
            raise _bad_arguments(self.path, name, event, problem, LaunchArguments) from problem
        for field, shape in (("grid", arguments.grid), ("block", arguments.block)):
            if shape:
                msgspec.structs.force_setattr(arguments, field, self._shapes.setdefault(shape, shape))
        operation = GpuOperation(
            name=intern(event.name), category=category, start_us=event.ts, end_us=event.ts + event.dur, arguments=arguments
        )
        self.operations.setdefault(arguments.device, []).append(operation)

    def _add_calls(self, events: list[Event]) -> None:
        _, arguments = decode_arguments(events, self._call_decoder, self._call_list_decoder)
        if len(arguments) != len(events):
            self._refuse_call(events)
        for event, found in zip(events, arguments, strict=True):
            _check_times(self.path, event)
            name, correlation = event.name, found.correlation
            if name.endswith("Synchronize"):
                self.host_waits.append((event.ts, event.ts + event.dur))
            if correlation == 0:
                continue
            if correlation in self.calls:
                raise TraceError(
                    f"{self.path}: correlation {correlation} names two host calls, the second '{shown(name)}'; trace one "
                    "process."
                )
            self.calls[correlation] = HostCall(
                kind="record" if "EventRecord" in name else "launch",
                name=intern(name),
                time_us=event.ts,
                thread=intern(str(event.tid)),
                correlation=correlation,
            )

    def _refuse_call(self, events: list[Event]) -> None:
        """Say which of these events has arguments that cannot be read."""
        for event in events:
            try:
                self._call_decoder.decode(event.args)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
                raise _bad_arguments(self.path, f"'{shown(event.name)}'", event, problem, _Correlation) from problem

    def _add_wait(self, event: Event) -> None:
        try:
            self.waits.append(self._sync_decoder.decode(event.args))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
            raise _bad_arguments(self.path, f"'{shown(event.name)}'", event, problem, SyncArguments) from problem

    def trace(self, surroundings: Surroundings, damage: str | None) -> ActivityTrace:
        """All of it together, of the device with most operations."""
        require(
            bool(self.operations),
            TraceError,
            f"{damage}; copy or record it again."
            if damage
            else f"{self.path} holds no GPU activity; profile with activities=[CPU, CUDA] and leave no other profiler "
            "attached.",
        )
        operations = max(self.operations.values(), key=len)
        number = operations[0].arguments.device
        for wait in self.waits:  # a wait carries what the profiler knows of its event
            call = self.calls.get(wait.correlation)
            if call is not None and wait.stream >= 0 and wait.device in (None, number):
                self.calls[wait.correlation] = msgspec.structs.replace(call, kind="wait", sync=wait)
        device = next((item for item in surroundings.deviceProperties if item.id == number), Device())
        distributed = surroundings.distributedInfo or Distributed()
        trace = ActivityTrace(
            path=str(self.path),
            operations=(),
            host_calls=(),
            step_windows=tuple(sorted(self.windows)),
            num_devices=len(self.operations),
            device_name=device.name,
            num_sms=device.numSms if device.numSms and device.numSms > 0 else None,
            compute_major=device.computeMajor,
            rank=distributed.rank,
            world_size=distributed.world_size,
            nccl_version=distributed.nccl_version,
            host_waits=tuple(sorted(self.host_waits)),
        )
        return assemble(trace, operations, self.calls, self.operators, damage)


@cache
def launches_nothing(call: str) -> bool:
    """Whether a call of the runtime or the driver launches, records and waits for nothing, by its name."""
    return _LAUNCHES_NOTHING.search(call) is not None


def _bad_arguments(path: Path, name: str, event: Event, problem: Exception, kind: type[msgspec.Struct]) -> TraceError:
    said = str(problem)
    if isinstance(problem, msgspec.ValidationError):
        said, _ = describe_mismatch(problem, kind, whole="args")
    return TraceError(f"{path}: {name} at {event.ts:.15g} us: {said}; record the trace again with torch.profiler.")


def _check_times(path: Path, event: Event) -> None:
    if not (0 <= event.ts < MAX_US and 0 <= event.dur < MAX_US):
        raise TraceError(f"{path}: times must be from 0 to 1e17 us; '{shown(event.name)}' has {event.ts} for {event.dur}.")
