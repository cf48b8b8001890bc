"""Builds an `ActivityTrace` from what a format's reader found.

It chooses the GPU that is read, attaches launches and operators to its operations, and sorts them. Problems that are evident
from the file become notes: a file that ends early, launches without operations, operations that start before their launch.
It knows no format.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import TypeVar

from msgspec.structs import force_setattr, replace

from counterpoint.errors import TraceError, shown
from counterpoint.files import REMEDY
from counterpoint.traces.activity import GRAPH_LAUNCH, ActivityTrace, Category, GpuOperation, HostCall, HostOperator
from counterpoint.traces.classify import is_communication
from counterpoint.traces.host_operators import HostOperators, Launch
from counterpoint.value import require

LEAST_LOST = 10
"""Fewer launches without an operation are normal: kernels were still running when the recording ended."""
CLOCK_TOLERANCE_US = 2.0
"""If an operation starts this much before its launch, the clocks of host and GPU disagree."""
Place = TypeVar("Place")


def busiest(found: Mapping[Place, list[GpuOperation]]) -> Place:
    """Return the place, such as a device, whose kernels compute longest; of equal ones the one with the most operations."""

    def work(place: Place) -> tuple[float, int]:
        computing = (
            operation.duration_us
            for operation in found[place]
            if operation.category == "kernel" and not is_communication(operation.category, operation.name)
        )
        return sum(computing), len(found[place])

    return max(found, key=work)


def launches_here(
    calls: dict[int, HostCall], operations: list[GpuOperation], elsewhere: Iterable[list[GpuOperation]]
) -> dict[int, HostCall]:
    """Return the calls of the host but those that launched operations elsewhere, such as on another device."""
    own = {operation.arguments.correlation for operation in operations}
    others = {operation.arguments.correlation for line in elsewhere for operation in line} - own
    return {correlation: call for correlation, call in calls.items() if correlation not in others} if others else calls


def assemble(
    trace: ActivityTrace,
    operations: list[GpuOperation],
    calls: dict[int, HostCall],
    operators: HostOperators,
    damage: str | None,
) -> ActivityTrace:
    """Return `trace` with these operations in issue order, their launches and operators, and the host's calls.

    `damage` says why the file is incomplete; then only whole steps are kept. Raises `TraceError` if there is none, or if
    a kernel shares its launch with another operation and it is not a graph's.
    """
    _attach_launches(trace.path, operations, calls)
    windows, notes = trace.step_windows, []
    if damage is not None:
        windows, operations = _whole_steps(trace, operations, calls, operators.threads, damage)
        notes.append(
            f"{damage}. Of its steps, the first {len(windows)} can be known to be whole; they were read, without stream "
            "waits. Copy or record it again for the rest."
        )
    notes += [*_lost(operations, calls), *_early(operations)]
    _sort_by_issue(operations)
    found = _attach_operators(operations, calls, operators)
    return replace(
        trace,
        operations=tuple(operations),
        host_calls=_relevant_calls(operations, calls),
        step_windows=windows,
        operators=found,
        notes=(*trace.notes, *notes),
    )


# The functions below change operations in place: the reader made them for this trace, and nothing else refers to them yet.


def _sort_by_issue(operations: list[GpuOperation]) -> None:
    """Sort operations by their launches. One without a launch comes directly after the one before it on its stream, since a
    stream runs in the order of issue; without such a one, after the latest launched of those that started before it.

    The result does not depend on the order in which operations are given.
    """
    operations.sort(key=_start_key)
    launched: dict[int, float] = {}
    latest_us: float | None = None
    issued_us = []
    for operation in operations:
        stream, launched_us = operation.arguments.stream, operation.launched_us
        if launched_us is not None:
            launched[stream] = launched_us
            latest_us = max(launched_us, launched_us if latest_us is None else latest_us)
        issued_us.append(launched.get(stream, operation.start_us if latest_us is None else latest_us))
    order = sorted(range(len(operations)), key=issued_us.__getitem__)
    operations[:] = [operations[index] for index in order]


def _start_key(operation: GpuOperation) -> tuple[float, int, int]:
    return operation.start_us, operation.arguments.stream, operation.arguments.correlation


def _attach_launches(path: str, operations: list[GpuOperation], calls: dict[int, HostCall]) -> None:
    """Add to each operation when and how the host launched it. One call may start several operations only if it launches a
    graph or copies: `cudaMemcpyBatchAsync` takes several copies, and HIP divides large ones.
    """
    seen: dict[int, Category] = {}
    for operation in operations:
        correlation = operation.arguments.correlation
        call = calls.get(correlation)
        if call is None:
            continue
        if GRAPH_LAUNCH not in call.name and "kernel" in (seen.get(correlation), operation.category) and correlation in seen:
            raise TraceError(
                f"{path}: correlation {correlation} names two GPU operations, the second '{shown(operation.name)}'; "
                f"record again."
            )
        seen[correlation] = operation.category
        force_setattr(operation, "launched_us", call.time_us)
        force_setattr(operation, "launch_call", call.name)


def _attach_operators(
    operations: list[GpuOperation], calls: dict[int, HostCall], operators: HostOperators
) -> tuple[HostOperator, ...]:
    """Add to each operation the operator that launched it, and the sizes of its matrix multiplication if it is one."""
    launches = [_launch(operation, calls) for operation in operations]
    found, numbers = operators.operators_of(launches)
    sizes = operators.sizes_of({launch[0] for launch in launches if launch is not None})
    for operation, number in zip(operations, numbers, strict=True):
        force_setattr(operation, "operator", number)
        known = sizes.get(operation.arguments.external_id or -1)
        if known is not None:
            force_setattr(operation, "matmul_sizes", known)
    return found


def _launch(operation: GpuOperation, calls: dict[int, HostCall]) -> Launch | None:
    external_id = operation.arguments.external_id
    call = calls.get(operation.arguments.correlation)
    if not external_id:
        return None
    return (external_id, operation.start_us, "") if call is None else (external_id, call.time_us, call.thread)


def _whole_steps(
    trace: ActivityTrace,
    operations: list[GpuOperation],
    calls: dict[int, HostCall],
    threads: set[str],
    damage: str,
) -> tuple[tuple[tuple[float, float], ...], list[GpuOperation]]:
    """Return the whole steps of a file that ends early, and the operations launched up to their end.

    The profiler writes all operators first, then GPU operations thread by thread, each in order. So a step is whole if every
    thread that runs operators launched something later, and that later operation was read.
    """
    starts = [start for start, _ in trace.step_windows]
    reached = dict.fromkeys(threads, -1)
    for operation in operations:
        call = calls.get(operation.arguments.correlation)
        if call is not None and call.thread in reached:
            reached[call.thread] = max(reached[call.thread], bisect_right(starts, call.time_us) - 1)
    num_whole = min(reached.values(), default=-1)
    require(num_whole >= 1, TraceError, f"{damage}, and none of its steps is known to be whole; {REMEDY}.")
    end_us = trace.step_windows[num_whole - 1][1]
    kept = [operation for operation in operations if operation.launched_us is not None and operation.launched_us <= end_us]
    return trace.step_windows[:num_whole], kept


def _lost(operations: list[GpuOperation], calls: dict[int, HostCall]) -> list[str]:
    """Return a note on launches whose operations are missing, between the first and last launch with a known one."""
    times = [operation.launched_us for operation in operations if operation.launched_us is not None]
    if not times:
        return ["The trace holds the launch of no operation, so the host's part is unknown."] if operations else []
    known = {operation.arguments.correlation for operation in operations}
    first, last = min(times), max(times)
    inside = [call for call in calls.values() if "LaunchKernel" in call.name and first <= call.time_us <= last]
    num_lost = sum(call.correlation not in known for call in inside)
    if num_lost < LEAST_LOST:
        return []
    return [
        (
            f"{num_lost} of {len(inside)} kernel launches have no kernel in the trace. The profiler lost them, or "
            "they were captured into a graph. Times of computation may be too short."
        )
    ]


def _early(operations: list[GpuOperation]) -> list[str]:
    """Return a note on operations that start before the host launched them."""
    early = [
        operation.launched_us - operation.start_us
        for operation in operations
        if operation.launched_us is not None and operation.start_us < operation.launched_us - CLOCK_TOLERANCE_US
    ]
    if not early:
        return []
    return [
        (
            f"{len(early)} operations start before their launch, by up to {max(early):,.1f} us. The clocks of host "
            "and GPU differ by at least that much, and so may the times of late launches."
        )
    ]


def _relevant_calls(operations: list[GpuOperation], calls: dict[int, HostCall]) -> tuple[HostCall, ...]:
    """Return the launches of the kept operations, and all records and waits, in time order."""
    kept = [call for call in calls.values() if call.kind != "launch"]
    seen: set[int] = set()
    for index, operation in enumerate(operations):
        correlation = operation.arguments.correlation
        call = calls.get(correlation)
        if call is None:
            continue
        if correlation in seen or call.kind != "launch":  # of a graph or several copies: one call for each operation
            call = replace(call, kind="launch", operation=index)
        else:
            seen.add(correlation)
            force_setattr(call, "operation", index)
        kept.append(call)
    return tuple(sorted(kept, key=lambda call: (call.time_us, call.operation)))
