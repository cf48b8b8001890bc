"""Cut a trace into steps and choose the steady one.

An operation belongs to the step in which the host launched it, not to the one in which the GPU ran it: the host is often
many milliseconds ahead. Steps come from the profiler's `ProfilerStep#` annotations; without them from the repetition of
kernel names; else the whole trace is one step. The steady step is the one with the median makespan among those with the
most common sequence of operations. The module does not know what an operation does.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate, pairwise

from counterpoint.errors import TraceError, shown
from counterpoint.traces.activity import ActivityTrace, GpuOperation
from counterpoint.traces.classify import is_communication
from counterpoint.value import Value, require

LEAST_COVERAGE = 0.6
"""The repetitions found must cover this share of the operations, or the trace counts as one step."""
MAX_PERIODS_TRIED = 64
OVERLAP_TOLERANCE_US = 1.0
"""The profiler's clock resolution is some tens of nanoseconds; less than this is not an overlap."""


class TracedSteps(Value, frozen=True, kw_only=True):
    """The steps of a trace as numbers of operations in issue order; `steady` is the position of the steady one."""

    steps: tuple[tuple[int, ...], ...]
    steady: int
    makespans_us: tuple[float, ...]
    notes: tuple[str, ...]

    @property
    def steady_operations(self) -> tuple[int, ...]:
        """Numbers of the steady step's operations."""
        return self.steps[self.steady]


def divide_into_steps(trace: ActivityTrace) -> TracedSteps:
    """Divide a trace into steps and choose the steady one. Raises `TraceError` if no step holds an operation."""
    steps, notes = _steps_by_annotation(trace) if trace.step_windows else _steps_by_repetition(trace)
    steps = [step for step in steps if step]
    require(
        bool(steps),
        TraceError,
        f"{trace.path}: no GPU operation was launched inside a profiled step; call profiler.step() once per iteration.",
    )
    sequences = [tuple((trace.operations[i].name, trace.operations[i].stream) for i in step) for step in steps]
    makespans = [makespan_us([trace.operations[i] for i in step]) for step in steps]
    common, occurrences = Counter(sequences).most_common(1)[0]
    alike = sorted((makespans[i], i) for i, sequence in enumerate(sequences) if sequence == common)
    if occurrences < len(steps):
        notes.append(
            f"{len(steps) - occurrences} of {len(steps)} steps run other operations than the rest; they were left out."
        )
    return TracedSteps(
        steps=tuple(tuple(step) for step in steps),
        steady=alike[(len(alike) - 1) // 2][1],
        makespans_us=tuple(makespans),
        notes=tuple(notes),
    )


def gpu_windows(trace: ActivityTrace, steps: TracedSteps) -> tuple[tuple[float, float], ...]:
    """The window of each step in GPU time: start and end in microseconds, on the trace's clock.

    A window begins with the step's first operation on the computation's stream and ends where the next one begins, so that
    windows follow each other without gap or overlap. The first begins with the first operation of its step on any stream,
    the last ends with the last one. What runs in a window may belong to a neighbouring step: a stream that waits for
    nothing can be a step ahead.
    """
    main = _computation_stream(trace, (index for step in steps.steps for index in step))
    starts = [_first_start_us(trace, step, main) for step in steps.steps]
    starts[0] = min(trace.operations[index].start_us for index in steps.steps[0])
    starts = list(accumulate(starts, max))
    end_us = max(trace.operations[index].end_us for index in steps.steps[-1])
    return tuple(pairwise((*starts, max(end_us, starts[-1]))))


def _computation_stream(trace: ActivityTrace, indices: Iterable[int]) -> int:
    """The stream with most computation; without any, the busiest."""
    busy_us: dict[int, list[float]] = {}
    for index in indices:
        operation = trace.operations[index]
        computes = operation.category == "kernel" and not is_communication(operation.category, operation.name)
        times = busy_us.setdefault(operation.stream, [0.0, 0.0])
        times[0] += operation.duration_us if computes else 0.0
        times[1] += operation.duration_us
    return max(busy_us, key=lambda stream: busy_us[stream])


def _first_start_us(trace: ActivityTrace, step: tuple[int, ...], main: int) -> float:
    """When the step's first operation on the computation's stream starts; without one there, the first on its busiest."""
    streams = {trace.operations[index].stream for index in step}
    stream = main if main in streams else _computation_stream(trace, step)
    return min(trace.operations[index].start_us for index in step if trace.operations[index].stream == stream)


def makespan_us(operations: list[GpuOperation]) -> float:
    """First start to last end."""
    return max(operation.end_us for operation in operations) - min(operation.start_us for operation in operations)


def check_streams(path: str, operations: tuple[GpuOperation, ...]) -> tuple[str, ...]:
    """Notes on operations of one stream that run at the same time; raises `TraceError` where that cannot be.

    Only the nodes of a graph and kernels launched with extended attributes (programmatic dependent launch) may start
    before their predecessor has ended.
    """
    by_stream: dict[int, list[GpuOperation]] = {}
    for operation in operations:
        by_stream.setdefault(operation.stream, []).append(operation)
    impossible, early = [], 0
    for line in by_stream.values():
        line.sort(key=lambda operation: (operation.start_us, operation.end_us))
        for previous, operation in pairwise(line):
            if operation.start_us >= previous.end_us - OVERLAP_TOLERANCE_US:
                continue
            if "Graph" in operation.launch_call or "Ex" in operation.launch_call:
                early += 1
            else:
                impossible.append((previous, operation))
    if impossible:
        previous, operation = impossible[0]
        raise TraceError(
            f"{path}: {len(impossible)} operations overlap their predecessor on a stream, first "
            f"'{shown(operation.name)}' on "
            f"stream {operation.stream}, {previous.end_us - operation.start_us:.3f} us before "
            f"'{shown(previous.name)}' ends. "
            "Record the trace again, of one process."
        )
    return (f"{early} kernels start before their predecessor on the stream has ended (dependent launch).",) if early else ()


def _steps_by_annotation(trace: ActivityTrace) -> tuple[list[list[int]], list[str]]:
    """Operations by the annotation in which the host launched them."""
    starts = [start for start, _ in trace.step_windows]
    steps: list[list[int]] = [[] for _ in starts]
    num_outside = num_unknown = 0
    for index, operation in enumerate(trace.operations):
        time_us = operation.launched_us
        if time_us is None:
            num_unknown += 1
            time_us = operation.start_us
        window = bisect_right(starts, time_us) - 1
        if window >= 0 and time_us <= trace.step_windows[window][1]:
            steps[window].append(index)
        else:
            num_outside += 1
    notes = []
    if num_unknown:
        notes.append(f"{num_unknown} operations have no launch in the trace; they were placed by their GPU time.")
    if num_outside:
        notes.append(f"{num_outside} operations were launched outside the profiled steps and left out.")
    return steps, notes


def _steps_by_repetition(trace: ActivityTrace) -> tuple[list[list[int]], list[str]]:
    """Operations by the repeating sequence of their names, or all of them as one step."""
    names = [operation.name for operation in trace.operations]
    first, period, repeats = find_repetition(names)
    if repeats < 2:
        return [list(range(len(names)))], ["No step annotations and no repetition: the whole trace is taken as one step."]
    steps = [list(range(first + i * period, first + (i + 1) * period)) for i in range(repeats)]
    note = f"No step annotations: steps are the {repeats} repetitions of a sequence of {period} operations."
    left_out = len(names) - period * repeats
    return steps, [note] + ([f"{left_out} operations outside the repetitions were left out."] if left_out else [])


def find_repetition(names: list[str]) -> tuple[int, int, int]:
    """Where the longest repetition begins, its period and how often it repeats; repeats is 1 if there is none.

    Periods tried are the distances between occurrences of the rarest repeated names: a name that occurs once per step
    occurs at the step's period, whereas the layers of a model repeat faster.
    """
    positions: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        positions.setdefault(name, []).append(position)
    rarest = sorted((line for line in positions.values() if len(line) > 1), key=len)
    tried: list[int] = []
    for line in rarest[:MAX_PERIODS_TRIED]:
        period = Counter(after - before for before, after in pairwise(line)).most_common(1)[0][0]
        if period in tried:
            continue
        tried.append(period)
        first, length = _longest_run(names, period)
        if length >= 2 * period and length >= LEAST_COVERAGE * len(names):
            return first, period, length // period
    return 0, len(names), 1


def _longest_run(names: list[str], period: int) -> tuple[int, int]:
    """The longest stretch in which every name recurs one period later: its start and its length with the last period."""
    best_first = best_length = first = 0
    for position in range(len(names) - period):
        if names[position] != names[position + period]:
            first = position + 1
        elif position + 1 - first > best_length:
            best_first, best_length = first, position + 1 - first
    return best_first, best_length + period if best_length else 0
