"""Divides a trace into steps and chooses the steady one.

An operation belongs to the step in which the host launched it, not to the one in which the GPU ran it, because the host
is often many milliseconds ahead. Steps come from the profiler's `ProfilerStep#` annotations; without them, or without any
launch, from the repetition of kernel names; otherwise the whole trace is one step. Annotated micro-batches of one step are
joined (`micro_batches`).

A step's time on the GPU is its window, and everything that runs in the window counts, whatever step it belongs to. The
steady step is chosen among the steps with the most common set of operations (on any streams) whose windows hold what the
steps themselves launched. It has their median makespan.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from counterpoint.errors import TraceError, shown
from counterpoint.traces.activity import ActivityTrace, GpuOperation
from counterpoint.traces.classify import is_communication
from counterpoint.traces.micro_batches import join_micro_batches
from counterpoint.units import format_count, format_us
from counterpoint.value import Value, require

LEAST_COVERAGE = 0.6
"""If the repetitions found cover less than this share of the operations, the trace counts as one step."""
STRANGE_SHARE = 0.01
"""Operations of other steps in a window, as a share of the step's own, that do not yet show that a stream runs ahead."""
STRANGE_COMMUNICATION = 0.10
"""The same share of communication: up to this, a window's figures are those of its step."""
LEAST_AFTER = 0.03
"""If other computation after the repetitions takes more than this share of one of them, they are layers of one step."""
MAX_PERIODS_TRIED = 64
OVERLAP_TOLERANCE_US = 1.0
"""A shorter overlap is none: the resolution of the profiler's clock is some tens of nanoseconds."""
RARE_SHARE = 0.001
"""If no more than this share of the operations overlap impossibly, the rest of the trace can be trusted."""


class TracedSteps(Value, frozen=True, kw_only=True):
    """The steps of a trace as numbers of operations in issue order; `steady` is the index of the steady one.

    `windows`: start and end of each step in GPU time, in microseconds on the trace's clock. A window begins with the step's
    first operation on any stream after the computation's stream has finished the step before. It ends where the next window
    begins, so there are no gaps or overlaps between windows. The end of the last one is unknown: it counts as idle for as
    long as the GPU at least is after another step. Operations in a window may belong to a neighboring step: a stream that
    waits for nothing can be a step ahead.

    `makespans_us` cover everything that ran in the windows, without idle time at the end. `steady_ran` are the numbers of
    the operations that ran in the steady step's window, at least in part. `alike` are the steps that run the same
    operations, or all steps if fewer than half of them do. `whole` are those whose windows hold their own communication.
    """

    steps: tuple[tuple[int, ...], ...]
    steady: int
    windows: tuple[tuple[float, float], ...]
    makespans_us: tuple[float, ...]
    steady_ran: tuple[int, ...]
    alike: tuple[int, ...]
    whole: tuple[int, ...]
    notes: tuple[str, ...]

    @property
    def steady_operations(self) -> tuple[int, ...]:
        """The numbers of the steady step's operations."""
        return self.steps[self.steady]


def divide_into_steps(trace: ActivityTrace) -> TracedSteps:
    """Divide a trace into steps and choose the steady one. Raises `TraceError` if no step holds an operation."""
    is_annotated = bool(trace.step_windows) and any(operation.launched_us is not None for operation in trace.operations)
    steps, notes = _steps_by_annotation(trace) if is_annotated else _steps_by_repetition(trace)
    steps = [step for step in steps if step]
    require(
        bool(steps),
        TraceError,
        f"{trace.path}: no GPU operation was launched inside a profiled step; call profiler.step() once per iteration.",
    )
    steps, joined = join_micro_batches(trace, steps) if is_annotated else (steps, [])
    windows = _windows(trace, steps)
    ran = _ran_within(trace, windows)
    makespans = [_span_us(trace, inside, window) for inside, window in zip(ran, windows, strict=True)]
    alike, note = _alike(trace, steps)
    strange = _strange(trace, steps, windows)
    steady = _median_of(_least_strange(steps, strange, alike), makespans)
    comparable = alike if _are_most(len(alike), len(steps)) else range(len(steps))
    return TracedSteps(
        steps=tuple(tuple(step) for step in steps),
        steady=steady,
        windows=_with_last_gap(trace, windows, ran, alike),
        makespans_us=tuple(makespans),
        steady_ran=tuple(ran[steady]),
        alike=tuple(comparable),
        whole=tuple(_whole(trace, steps, strange, comparable)),
        notes=(*notes, *joined, *note),
    )


def _alike(trace: ActivityTrace, steps: Sequence[Sequence[int]]) -> tuple[list[int], list[str]]:
    """Return the steps with the most common operations in any order: host threads race, and buckets rotate over streams."""
    names = [frozenset(Counter([trace.operations[index].name for index in step]).items()) for step in steps]
    common, occurrences = Counter(names).most_common(1)[0]
    if occurrences == len(steps):
        return list(range(len(steps))), []
    if occurrences == 1:
        return list(range(len(steps))), [f"All {len(steps)} steps run different operations; the median one was read."]
    note = (
        f"{len(steps) - occurrences} of {len(steps)} steps run other operations than the rest and were left out."
        if _are_most(occurrences, len(steps))
        else f"Only {occurrences} of {len(steps)} steps run the same operations; the median one of these was read."
    )
    return [number for number, found in enumerate(names) if found == common], [note]


def _are_most(num_alike: int, num_steps: int) -> bool:
    """Return whether the steps with the same operations are at least half of all, so that the others are exceptions."""
    return 2 * num_alike >= num_steps


def _strange(
    trace: ActivityTrace, steps: Sequence[Sequence[int]], windows: Sequence[tuple[float, float]]
) -> list[Counter[str]]:
    """Return, for each step, the names of its operations missing in its window, and of other steps' operations in it.

    If a stream runs a step ahead, it does the work of two steps in the first window, and none in the last.
    """
    started: list[list[str]] = [[] for _ in windows]
    starts = [start for start, _ in windows]
    for operation in trace.operations:
        start_us = operation.start_us
        place = bisect_right(starts, start_us) - 1
        if place >= 0 and start_us <= windows[place][1]:
            started[place].append(operation.name)
    found = []
    for step, names in zip(steps, started, strict=True):
        own, ran = Counter([trace.operations[index].name for index in step]), Counter(names)
        found.append((own - ran) + (ran - own))
    return found


def _least_strange(steps: Sequence[Sequence[int]], strange: Sequence[Counter[str]], alike: list[int]) -> list[int]:
    """Return those of the steps `alike` whose windows have the fewest missing operations and operations of other steps."""
    counts = {number: strange[number].total() for number in alike}
    least = max(min(counts.values()), STRANGE_SHARE * len(steps[alike[0]]))
    return [number for number in alike if counts[number] <= least]


def _whole(
    trace: ActivityTrace, steps: Sequence[Sequence[int]], strange: Sequence[Counter[str]], alike: Iterable[int]
) -> list[int]:
    """Return those of the steps `alike` whose windows hold their own communication, or nearly so."""
    communicates = [is_communication(operation.category, operation.name) for operation in trace.operations]
    names = {operation.name for operation, does in zip(trace.operations, communicates, strict=True) if does}
    return [
        number
        for number in alike
        if sum(count for name, count in strange[number].items() if name in names)
        <= STRANGE_COMMUNICATION * sum(communicates[index] for index in steps[number])
    ]


def _median_of(numbers: list[int], makespans: list[float]) -> int:
    """Return the step with the median makespan. For an even number, skip the first profiled step: it finds the GPU idle."""
    kept = numbers[1:] if numbers[0] == 0 and len(numbers) % 2 == 0 else numbers
    return sorted(kept, key=lambda number: (makespans[number], number))[(len(kept) - 1) // 2]


def _ran_within(trace: ActivityTrace, windows: Sequence[tuple[float, float]]) -> list[list[int]]:
    """Return the numbers of the operations that ran in each window, at least in part; windows must not overlap."""
    starts, ends = [start for start, _ in windows], [end for _, end in windows]
    inside: list[list[int]] = [[] for _ in windows]
    for index, operation in enumerate(trace.operations):
        start_us, end_us = operation.start_us, operation.end_us
        place = max(0, bisect_right(starts, start_us) - 1)
        while place < len(windows) and (starts[place] < end_us or starts[place] == start_us):
            if start_us < ends[place] or end_us == ends[place] == start_us:
                inside[place].append(index)
            place += 1
    return inside


def _span_us(trace: ActivityTrace, inside: list[int], window: tuple[float, float]) -> float:
    """Return the time from the first operation in a window to the last end in it."""
    end_us = min(max((trace.operations[index].end_us for index in inside), default=window[0]), window[1])
    return end_us - max(min((trace.operations[index].start_us for index in inside), default=window[0]), window[0])


def _with_last_gap(
    trace: ActivityTrace, windows: Sequence[tuple[float, float]], ran: Sequence[list[int]], alike: Sequence[int]
) -> tuple[tuple[float, float], ...]:
    """Return the windows, the last one with the idle time that at least lies between two steps, up to the next operation.

    It is the least after one of the steps `alike` that another one follows, without the first if there are others.
    """
    begin_us, end_us = windows[-1]
    followed = [number for number in alike if number + 1 < len(windows)] or range(len(windows) - 1)
    gaps_us: dict[int, float] = {}
    for number in followed:
        _, next_begin_us = windows[number]
        ended_us = (min(trace.operations[index].end_us, next_begin_us) for index in ran[number])
        gaps_us[number] = next_begin_us - max(ended_us, default=next_begin_us)
    gap_us = min((gap_us for number, gap_us in gaps_us.items() if number > 0), default=gaps_us.get(0, 0.0))
    next_us = min((each.start_us for each in trace.operations if each.start_us >= end_us), default=math.inf)
    return (*windows[:-1], (begin_us, max(end_us, min(end_us + gap_us, next_us))))


def _windows(trace: ActivityTrace, steps: Sequence[Sequence[int]]) -> list[tuple[float, float]]:
    """Return the windows as `TracedSteps` describes them."""
    main = computation_stream(trace, (index for step in steps for index in step))
    operations = trace.operations
    begins: list[float] = []
    computed_us = -math.inf
    for step in steps:
        times = [(each.arguments.stream, each.start_us, each.end_us) for each in map(operations.__getitem__, step)]
        stream = main if any(each[0] == main for each in times) else computation_stream(trace, step)
        begin_us = min([start for each, start, _ in times if each == stream or start >= computed_us])
        begins.append(max(begin_us, begins[-1] if begins else begin_us))
        computed_us = max(computed_us, *[end for each, _, end in times if each == stream])
    end_us = max(operations[index].end_us for index in steps[-1])
    return list(pairwise((*begins, max(end_us, begins[-1]))))


def computation_stream(trace: ActivityTrace, indices: Iterable[int]) -> int:
    """Return the stream with the most computation, or the busiest stream if none computes."""
    busy_us: dict[int, list[float]] = {}
    for index in indices:
        operation = trace.operations[index]
        stream, time_us = operation.arguments.stream, operation.end_us - operation.start_us
        times = busy_us.setdefault(stream, [0.0, 0.0])
        if operation.category == "kernel" and not is_communication(operation.category, operation.name):
            times[0] += time_us
        times[1] += time_us
    return max(busy_us, key=lambda stream: busy_us[stream])


def check_streams(path: str, operations: tuple[GpuOperation, ...]) -> tuple[str, ...]:
    """Return notes on operations of one stream that overlap. Raises `TraceError` where overlaps are impossible, unless they
    are rare.
    """
    impossible, early = overlaps_on_streams(operations)
    if impossible and not are_rare(impossible, operations):
        previous, operation = impossible[0]
        raise TraceError(
            f"{path}: {len(impossible)} operations overlap their predecessor on a stream, first "
            f"'{shown(operation.name)}' on "
            f"stream {operation.stream}, {previous.end_us - operation.start_us:.3f} us before "
            f"'{shown(previous.name)}' ends. "
            "Record the trace again, of one process."
        )
    notes = [note_on_rare(impossible)] if impossible else []
    if early:
        unknown = sum(not operation.launch_call for operation in early)
        lacking = f"; the trace lacks the launches of {unknown} of them" if unknown else ""
        notes.append(
            f"{len(early)} kernels start before their predecessor on the stream has ended (dependent launch{lacking})."
        )
    return tuple(notes)


def are_rare(impossible: Sequence[tuple[GpuOperation, GpuOperation]], operations: Sequence[GpuOperation]) -> bool:
    """Return whether so few operations overlap impossibly that all others can be trusted; traces of several processes in
    one file have many.
    """
    return len(impossible) <= RARE_SHARE * len(operations)


def note_on_rare(impossible: Sequence[tuple[GpuOperation, GpuOperation]]) -> str:
    """Return a note on operations that overlap their predecessor impossibly, where they are rare."""
    most_us = max(previous.end_us - operation.start_us for previous, operation in impossible)
    what = format_count(len(impossible), "operation starts", "operations start")
    return (
        f"{what} before the predecessor on the stream has ended, by {format_us(most_us)} at most, which is impossible. So "
        "few do that the others' times are taken for right."
    )


def overlaps_on_streams(
    operations: tuple[GpuOperation, ...],
) -> tuple[list[tuple[GpuOperation, GpuOperation]], list[GpuOperation]]:
    """Return the operations that overlap their predecessor on a stream, after it, where that is impossible; and those that
    may.

    Only nodes of a graph and kernels launched with extended attributes (programmatic dependent launch) may start before
    their predecessor has ended. If the trace lacks a launch, the known launches of the same name decide; without any, the
    operation may.
    """
    by_stream: dict[int, list[GpuOperation]] = {}
    in_order: dict[str, bool] = {}
    for operation in operations:
        by_stream.setdefault(operation.stream, []).append(operation)
        if operation.launch_call:
            in_order[operation.name] = in_order.get(operation.name, True) and not _may_start_early(operation)
    impossible: list[tuple[GpuOperation, GpuOperation]] = []
    early: list[GpuOperation] = []
    for line in by_stream.values():
        line.sort(key=lambda operation: (operation.start_us, operation.end_us))
        for previous, operation in pairwise(line):
            if operation.start_us >= previous.end_us - OVERLAP_TOLERANCE_US:
                continue
            if _may_start_early(operation) or not (operation.launch_call or in_order.get(operation.name)):
                early.append(operation)
            else:
                impossible.append((previous, operation))
    return impossible, early


def _may_start_early(operation: GpuOperation) -> bool:
    """Return whether the host launched the operation in a way that lets it start before its predecessor has ended."""
    return "Graph" in operation.launch_call or "Ex" in operation.launch_call


def _steps_by_annotation(trace: ActivityTrace) -> tuple[list[list[int]], list[str]]:
    """Return the operations by the annotation in which the host launched them."""
    starts = [start for start, _ in trace.step_windows]
    steps: list[list[int]] = [[] for _ in starts]
    num_outside = num_unknown = num_earlier = 0
    first_us = _first_launched_us(trace)
    latest_us: float | None = None
    for index, operation in enumerate(trace.operations):
        time_us = operation.launched_us
        if time_us is None and operation.start_us < first_us.get(operation.stream, -math.inf):
            num_earlier += 1
            continue
        if time_us is None:
            num_unknown += 1
            time_us = operation.start_us if latest_us is None else latest_us
        else:
            latest_us = time_us
        window = bisect_right(starts, time_us) - 1
        if window >= 0 and time_us <= trace.step_windows[window][1]:
            steps[window].append(index)
        else:
            num_outside += 1
    notes = []
    if num_earlier:
        notes.append(f"{num_earlier} operations were issued before recording began and were left out.")
    if num_unknown:
        notes.append(f"{num_unknown} operations have no launch in the trace and were placed by their GPU order.")
    if num_outside:
        notes.append(f"{num_outside} operations were launched outside the profiled steps and were left out.")
    return steps, notes


def _first_launched_us(trace: ActivityTrace) -> dict[int, float]:
    """Return, by stream, when the first operation with a traced launch ran: earlier operations were issued before it."""
    first_us: dict[int, float] = {}
    for operation in trace.operations:
        if operation.launched_us is not None:
            first_us[operation.stream] = min(operation.start_us, first_us.get(operation.stream, math.inf))
    return first_us


def _steps_by_repetition(trace: ActivityTrace) -> tuple[list[list[int]], list[str]]:
    """Return the operations by the repeating sequence of their names, or all of them as one step."""
    lacks = "launches" if trace.step_windows else "step annotations"
    names = [operation.name for operation in trace.operations]
    first, period, repeats = find_repetition(names)
    if repeats < 2:
        return [list(range(len(names)))], [f"The trace has no {lacks} and no repetition, so all of it counts as one step."]
    if _goes_on(trace.operations, first, period, repeats):
        note = (
            f"The trace has no {lacks}. A sequence of {period} operations repeats {repeats} times, but other computation "
            "follows, so it may be a layer, and all of the trace counts as one step."
        )
        remedy = (
            "Record launches (activities=[CPU, CUDA])." if trace.step_windows else "Call profiler.step() in each iteration."
        )
        return [list(range(len(names)))], [f"{note} {remedy}"]
    steps = [list(range(first + i * period, first + (i + 1) * period)) for i in range(repeats)]
    note = f"The trace has no {lacks}. Its steps are the {repeats} repetitions of a sequence of {period} operations."
    left_out = len(names) - period * repeats
    return steps, [note] + ([f"{left_out} operations outside the repetitions were left out."] if left_out else [])


def _goes_on(operations: Sequence[GpuOperation], first: int, period: int, repeats: int) -> bool:
    """Return whether other computation follows the repetitions: a model's head, a loss or an optimizer, after its layers.

    Computation before them may be a warm-up, and a last step that differs runs kernels of the same names.
    """
    once, after = operations[first : first + period], operations[first + repeats * period :]
    usual = {operation.name for operation in once}
    others = (each for each in after if each.name not in usual and each.category == "kernel")
    others_us = sum(each.duration_us for each in others if not is_communication(each.category, each.name))
    return others_us > LEAST_AFTER * sum(operation.duration_us for operation in once)


def find_repetition(names: list[str]) -> tuple[int, int, int]:
    """Return where the longest repetition begins, its period, and the number of repeats, which is 1 if there is none.

    Periods tried are the distances between occurrences of the rarest repeated names: a name that occurs once per step recurs
    with the period of the step, whereas the layers of a model repeat faster.
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
    """Return the longest stretch in which every name recurs one period later: its start, and length with the last period."""
    best_first = best_length = first = 0
    for position in range(len(names) - period):
        if names[position] != names[position + period]:
            first = position + 1
        elif position + 1 - first > best_length:
            best_first, best_length = first, position + 1 - first
    return best_first, best_length + period if best_length else 0
