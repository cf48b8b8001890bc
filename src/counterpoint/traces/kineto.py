"""Read a torch.profiler trace (Kineto's Chrome JSON): GPU operations, host launches, event records and waits.

The file is decoded in one pass by msgspec into five fields per event; the arguments stay undecoded bytes except for the
few kinds of event that matter here: a trace of 200 MB has some 700,000 events, of which one in ten matters. The module does
not know what a step is, nor what a kernel does. On AMD the launches are called `hip...`; the categories are the same.
"""

from pathlib import Path

import msgspec

from counterpoint.errors import TraceError, shown
from counterpoint.files import UTF8_MARK
from counterpoint.mismatch import describe_mismatch
from counterpoint.traces.activity import (
    ActivityTrace,
    Category,
    GpuOperation,
    HostCall,
    HostKind,
    LaunchArguments,
    SyncArguments,
)
from counterpoint.value import require

GPU_CATEGORIES: dict[str, Category] = {
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "gpu_memset": "memset",
    "Kernel": "kernel",
    "Memcpy": "memcpy",
    "Memset": "memset",
}
HOST_CATEGORIES = ("cuda_runtime", "cuda_driver", "Runtime", "Driver", "hip_runtime", "hip_driver")
LEFT_OPERAND = {"aten::mm": 0, "aten::addmm": 1}  # which input of a host operation is the left matrix; the right one follows
MAX_US = 1e17  # above this a double no longer resolves a microsecond


class _Event(msgspec.Struct, gc=False):
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str = 0
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Device(msgspec.Struct):
    id: int = 0
    name: str | None = None
    computeMajor: int = 0  # noqa: N815 (the profiler's own spelling)
    numSms: int | None = None  # noqa: N815


class _Distributed(msgspec.Struct):
    rank: int | None = None
    world_size: int | None = None
    nccl_version: str | None = None


class _File(msgspec.Struct):
    traceEvents: list[_Event]  # noqa: N815
    deviceProperties: list[_Device] = []  # noqa: N815
    distributedInfo: _Distributed | None = None  # noqa: N815


class _MatmulArguments(msgspec.Struct, gc=False):
    """What the profiler writes beside a host operation where it recorded shapes."""

    external_id: int = msgspec.field(default=-1, name="External id")
    dims: list[list[int]] = msgspec.field(default_factory=list, name="Input Dims")


class _Correlation(msgspec.Struct, gc=False):
    correlation: int = 0


def knows(head: bytes) -> bool:
    """Whether a file that begins with these bytes is JSON, as this format is."""
    return head.removeprefix(UTF8_MARK).lstrip()[:1] in (b"{", b"[")


def decode(path: Path, raw: bytearray) -> ActivityTrace:
    """The activity in the bytes of a trace. Raises `TraceError`, with `path`, for what is none, or holds no GPU activity."""
    file = _decode(path, raw)
    found, num_devices = _gpu_operations(path, file.traceEvents)
    number = found[0].arguments.device
    calls = _host_calls(path, file.traceEvents, number)
    operations = _attach_launches(path, _attach_sizes(found, file.traceEvents), calls)
    device = next((item for item in file.deviceProperties if item.id == number), _Device())
    distributed = file.distributedInfo or _Distributed()
    windows = sorted(
        (event.ts, event.ts + event.dur)
        for event in file.traceEvents
        if event.cat == "user_annotation" and event.name.startswith("ProfilerStep#")
    )
    return ActivityTrace(
        path=str(path),
        operations=operations,
        host_calls=_relevant_calls(operations, calls),
        step_windows=tuple(windows),
        num_devices=num_devices,
        device_name=device.name,
        num_sms=device.numSms if device.numSms and device.numSms > 0 else None,
        compute_major=device.computeMajor,
        rank=distributed.rank,
        world_size=distributed.world_size,
        nccl_version=distributed.nccl_version,
        host_waits=_host_waits(file.traceEvents),
    )


def _decode(path: Path, raw: bytearray) -> _File:
    try:
        return msgspec.json.decode(raw, type=_File)
    except msgspec.ValidationError as problem:
        said, _ = describe_mismatch(problem, _File)  # names no value: a large trace is not decoded twice for that
        raise TraceError(f"{path} is not a profiler trace: {said}; give the file torch.profiler exported.") from problem
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        said = str(problem).removeprefix("JSON is malformed: ")
        raise TraceError(f"{path} is not whole JSON: {said}; copy or record it again.") from problem
    except MemoryError as problem:
        said = f"{len(raw):,} bytes of it, decoded, do not fit the memory of this machine"
        raise TraceError(f"{path}: {said}; profile fewer steps.") from problem
    except RecursionError as problem:
        said = "it is nested too deeply"
        raise TraceError(f"{path} is not a profiler trace: {said}; give the file torch.profiler exported.") from problem


def _gpu_operations(path: Path, events: list[_Event]) -> tuple[list[GpuOperation], int]:
    """GPU operations of the device with most of them, and how many devices there are."""
    decoder = msgspec.json.Decoder(LaunchArguments)
    by_device: dict[int, list[GpuOperation]] = {}
    for event in events:
        category = GPU_CATEGORIES.get(event.cat)
        if category is None:
            continue
        _check_times(path, event)
        try:
            arguments = decoder.decode(event.args)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
            raise _bad_arguments(path, f"GPU operation '{shown(event.name)}'", event, problem, LaunchArguments) from problem
        operation = GpuOperation(
            name=event.name, category=category, start_us=event.ts, end_us=event.ts + event.dur, arguments=arguments
        )
        by_device.setdefault(arguments.device, []).append(operation)
    require(
        bool(by_device),
        TraceError,
        f"{path} holds no GPU activity; profile with activities=[CPU, CUDA] and leave no other profiler attached.",
    )
    return max(by_device.values(), key=len), len(by_device)


def _attach_sizes(operations: list[GpuOperation], events: list[_Event]) -> list[GpuOperation]:
    """Add to each kernel the sizes of the matrix multiplication that launched it, where the profiler recorded shapes."""
    decoder = msgspec.json.Decoder(_MatmulArguments)
    sizes: dict[int, tuple[int, int, int]] = {}
    for event in events:
        left = LEFT_OPERAND.get(event.name) if event.cat == "cpu_op" else None
        if left is None:
            continue
        try:
            arguments = decoder.decode(event.args)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue  # shapes are an extra: without them sizes are inferred from times
        match arguments.dims[left : left + 2]:
            case [[rows, inner], [other, columns]] if inner == other and min(rows, inner, columns) > 0:
                sizes[arguments.external_id] = (rows, inner, columns)
    if not sizes:
        return operations
    found = ((operation, sizes.get(operation.arguments.external_id or -1)) for operation in operations)
    return [msgspec.structs.replace(operation, matmul_sizes=known) if known else operation for operation, known in found]


def _bad_arguments(path: Path, name: str, event: _Event, problem: Exception, kind: type[msgspec.Struct]) -> TraceError:
    said = str(problem)
    if isinstance(problem, msgspec.ValidationError):
        said, _ = describe_mismatch(problem, kind, whole="args")
    return TraceError(f"{path}: {name} at {event.ts:.15g} us: {said}; record the trace again with torch.profiler.")


def _check_times(path: Path, event: _Event) -> None:
    require(
        0 <= event.ts < MAX_US and 0 <= event.dur < MAX_US,
        TraceError,
        f"{path}: times must be from 0 to 1e17 us; '{shown(event.name)}' has {event.ts} for {event.dur}.",
    )


def _host_calls(path: Path, events: list[_Event], device: int) -> dict[int, HostCall]:
    """Runtime and driver calls by correlation; a wait carries what the profiler knows of its event."""
    decoder = msgspec.json.Decoder(_Correlation)
    sync_decoder = msgspec.json.Decoder(SyncArguments)
    calls: dict[int, HostCall] = {}
    waits: list[SyncArguments] = []
    for event in events:
        try:
            if event.cat in HOST_CATEGORIES:
                _check_times(path, event)
                _add_call(path, calls, event, decoder.decode(event.args).correlation)
            elif event.cat == "cuda_sync" and event.name == "Stream Wait Event":
                waits.append(sync_decoder.decode(event.args))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
            kind = _Correlation if event.cat in HOST_CATEGORIES else SyncArguments
            raise _bad_arguments(path, f"'{shown(event.name)}'", event, problem, kind) from problem
    for wait in waits:
        call = calls.get(wait.correlation)
        if call is not None and wait.stream >= 0 and wait.device in (None, device):
            calls[wait.correlation] = msgspec.structs.replace(call, kind="wait", sync=wait)
    return calls


def _host_waits(events: list[_Event]) -> tuple[tuple[float, float], ...]:
    """Calls in which the host waited for the GPU."""
    return tuple(
        sorted(
            (event.ts, event.ts + event.dur)
            for event in events
            if event.cat in HOST_CATEGORIES and event.name.endswith("Synchronize")
        )
    )


def _add_call(path: Path, calls: dict[int, HostCall], event: _Event, correlation: int) -> None:
    if correlation == 0:
        return
    require(
        correlation not in calls,
        TraceError,
        f"{path}: correlation {correlation} names two host calls, the second '{shown(event.name)}'; trace one process.",
    )
    kind: HostKind = "record" if "EventRecord" in event.name else "launch"
    calls[correlation] = HostCall(
        kind=kind, name=event.name, time_us=event.ts, thread=str(event.tid), correlation=correlation
    )


def _attach_launches(path: Path, operations: list[GpuOperation], calls: dict[int, HostCall]) -> tuple[GpuOperation, ...]:
    """Add to each operation when and how the host launched it, and sort; only a graph launch may start several."""
    seen: set[int] = set()
    launched = []
    for operation in operations:
        correlation = operation.arguments.correlation
        call = calls.get(correlation)
        if call is None:
            launched.append(operation)
            continue
        require(
            correlation not in seen or "GraphLaunch" in call.name,
            TraceError,
            f"{path}: correlation {correlation} names two GPU operations, the second '{shown(operation.name)}'; "
            f"record again.",
        )
        seen.add(correlation)
        launched.append(msgspec.structs.replace(operation, launched_us=call.time_us, launch_call=call.name))
    return tuple(sorted(launched, key=lambda operation: operation.issue_key))


def _relevant_calls(operations: tuple[GpuOperation, ...], calls: dict[int, HostCall]) -> tuple[HostCall, ...]:
    """Launches of the kept operations, records and waits, in time order."""
    kept = [call for call in calls.values() if call.kind in ("wait", "record")]
    for index, operation in enumerate(operations):
        call = calls.get(operation.arguments.correlation)
        if call is not None:
            kept.append(msgspec.structs.replace(call, kind="launch", operation=index))
    return tuple(sorted(kept, key=lambda call: (call.time_us, call.operation)))
