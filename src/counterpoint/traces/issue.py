"""Finds when the host issued each operation, if that can matter, and how long the GPU waited for the host.

A host that runs far ahead of the GPU never delays it. Otherwise, the issue time of an operation is its launch call plus the
launch latency, which is measured on operations that started on an idle stream. If the host had waited for the GPU before,
it would issue the operation earlier on a faster GPU: such issue times count from the end of the operation that the host
waited for. If the whole GPU is idle although the next operation was launched long before, it waits for something that the
trace does not hold: a kernel that the profiler lost, or another process. Such an operation is issued as long after the end
of the last one as in the trace. This module does not know what an operation does.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import median

from counterpoint.traces.activity import ActivityTrace, GpuOperation
from counterpoint.value import Value

LATE_LATENCY_US = 30.0
"""If an operation starts within this of its launch, the GPU waited for it: 5 to 20 us are usual in the shipped traces."""
NEAR_SHARE = 0.05
"""The host counts as near if it leads by less than this share of the step: a plan that saves as much would meet it."""
BACK_TO_BACK_US = 20.0
UNSEEN_US = 100.0
"""If the whole GPU is idle for longer before an operation that was launched long before, the trace lacks something."""
FEW_SHARE = 0.1
"""A stream tells the usual gap only if it has this share of the operations that the stream with the most of them has."""
LAUNCH_BOUND_SHARE = 0.10


class IssueTimes(Value, frozen=True, kw_only=True):
    """Issue times from the step's first GPU start, the usual gap between operations, and the share the host was late.

    An issue time is None if it cannot delay the operation. If `issued_after` names an operation, it counts from that one's
    end. `unseen_us` is the idle time of the GPU before `num_unseen` operations that were launched long before.
    """

    issued_us: tuple[float | None, ...]
    issued_after: tuple[int | None, ...]
    launch_gap_us: float | None
    late_share: float
    unseen_us: float = 0.0
    num_unseen: int = 0


def find_issue_times(operations: list[GpuOperation], trace: ActivityTrace, begin_us: float) -> IssueTimes:
    """Return issue times of a step's operations, given in issue order. `begin_us` is when the step began on the GPU."""
    makespan_us = max(operation.end_us for operation in operations) - begin_us
    idle_starts = _idle_starts(operations)
    usual_us = median(_lead(operation) for operation in idle_starts) if idle_starts else 0.0
    unseen = _unseen(operations, trace.operations)
    issued: list[float | None] = []
    after: list[int | None] = []
    for index, operation in enumerate(operations):
        if index in unseen:
            earlier, _ = unseen[index]
            after.append(earlier)
            issued.append(operation.start_us - operations[earlier].end_us)
            continue
        after.append(None)
        lead_us = _lead(operation)
        if operation.launched_us is None or lead_us > NEAR_SHARE * makespan_us:
            issued.append(None)
            continue
        time_us = operation.launched_us + min(lead_us, usual_us if lead_us > LATE_LATENCY_US else lead_us) - begin_us
        waited_for = _waited_for(operations, index, trace.host_waits)
        if waited_for is not None:
            after[index] = waited_for
            issued.append(max(0.0, time_us + begin_us - operations[waited_for].end_us))
            continue
        issued.append(time_us if time_us > 0 else None)
    return IssueTimes(
        issued_us=tuple(issued),
        issued_after=tuple(after),
        launch_gap_us=_launch_gap(operations),
        late_share=_late_us(operations) / makespan_us if makespan_us > 0 else 0.0,
        unseen_us=sum(idle_us for _, idle_us in unseen.values()),
        num_unseen=len(unseen),
    )


def _unseen(operations: list[GpuOperation], everything: Sequence[GpuOperation]) -> dict[int, tuple[int, float]]:
    """Return the operations before which the GPU was idle although they had been launched long before: each with the one
    that ended last of those that were issued before it, and the idle time.
    """
    places = {id(operation): index for index, operation in enumerate(operations)}
    latest = list(accumulate(range(len(operations)), lambda *pair: max(pair, key=lambda each: operations[each].end_us)))
    found: dict[int, tuple[int, float]] = {}
    busy_until_us = math.inf  # before the first operation nothing is missing
    for operation in sorted(everything, key=lambda each: each.start_us):
        index = places.get(id(operation), 0)
        idle_us = operation.start_us - busy_until_us
        if index and idle_us > UNSEEN_US and _lead(operation) > idle_us + LATE_LATENCY_US:
            last = latest[index - 1]
            if operations[last].end_us <= operation.start_us:
                found[index] = last, idle_us
        busy_until_us = operation.end_us if busy_until_us == math.inf else max(busy_until_us, operation.end_us)
    return found


def _waited_for(operations: list[GpuOperation], index: int, host_waits: Sequence[tuple[float, float]]) -> int | None:
    """Return the operation whose end unblocked the host, if the host was blocked by one since the step began."""
    launched_us = operations[index].launched_us
    place = 0 if launched_us is None else bisect_right(host_waits, launched_us, key=lambda wait: wait[1])
    for begun_us, ended_us in reversed(host_waits[:place]):
        if ended_us < operations[0].start_us:
            return None
        if ended_us - begun_us > LATE_LATENCY_US:
            ended = [
                (each.end_us, number) for number, each in enumerate(operations[:index]) if begun_us < each.end_us <= ended_us
            ]
            return max(ended)[1] if ended else None
    return None


def _lead(operation: GpuOperation) -> float:
    """Return the time from launch call to GPU start; it is 0 if the clocks put the start first."""
    return 0.0 if operation.launched_us is None else max(0.0, operation.start_us - operation.launched_us)


def _idle_starts(operations: list[GpuOperation]) -> list[GpuOperation]:
    """Return the operations whose stream was idle when they were launched, and that started soon after."""
    ends_us: dict[int, float] = {}
    found = []
    for operation in operations:
        idle_since_us = ends_us.get(operation.stream, 0.0)
        was_idle = operation.launched_us is not None and operation.launched_us >= idle_since_us
        if was_idle and _lead(operation) <= LATE_LATENCY_US:
            found.append(operation)
        ends_us[operation.stream] = max(idle_since_us, operation.end_us)
    return found


def _late_us(operations: list[GpuOperation]) -> float:
    """Return the time in which the whole GPU was idle until an operation that the host had just launched."""
    late_us = 0.0
    by_start = sorted(operations, key=lambda operation: operation.start_us)
    busy_until_us = by_start[0].end_us
    for operation in by_start[1:]:
        gap_us = operation.start_us - busy_until_us
        if gap_us > 0 and operation.launched_us is not None and _lead(operation) <= LATE_LATENCY_US:
            late_us += gap_us
        busy_until_us = max(busy_until_us, operation.end_us)
    return late_us


def _launch_gap(operations: list[GpuOperation]) -> float | None:
    """Return the usual gap between operations of the busiest stream that were launched before their predecessor ended.

    A stream with few operations does not count, however long they take: gaps between a handful of long collectives are not
    those between kernels. The gap is the median if the stream is alone. Beside other streams it is the lower quartile: a gap
    is longer where an operation of another stream takes the free SMs first.
    """
    by_stream: dict[int, list[GpuOperation]] = {}
    for operation in operations:
        by_stream.setdefault(operation.stream, []).append(operation)
    longest = max(len(line) for line in by_stream.values())
    lines = [line for line in by_stream.values() if len(line) >= FEW_SHARE * longest]
    busiest = max(lines, key=lambda line: sum(operation.duration_us for operation in line))
    busiest.sort(key=lambda operation: operation.start_us)
    gaps = [
        operation.start_us - previous.end_us
        for previous, operation in pairwise(busiest)
        if operation.launched_us is None or operation.launched_us < previous.end_us
    ]
    near = sorted(gap for gap in gaps if 0 <= gap <= BACK_TO_BACK_US)
    if not near:
        return None
    return median(near) if len(by_stream) == 1 else near[(len(near) - 1) // 4]
