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
from statistics import median, median_low

from counterpoint.errors import TraceError, shown
from counterpoint.traces.activity import ActivityTrace, GpuOperation
from counterpoint.traces.classify import is_communication
from counterpoint.traces.micro_batches import join_micro_batches
from counterpoint.units import format_count, format_percent, format_us
from counterpoint.value import Value, require

LEAST_COVERAGE = 0.6
"""If the repetitions found cover less than this share of the operations, the trace counts as one step."""
STRANGE_SHARE = 0.01
"""Operations of other steps in a window, as a share of the step's own, that do not yet show that a stream runs ahead."""
STRANGE_COMMUNICATION = 0.10
"""The same share of communication: up to this, a window's figures are those of its step."""
LEAST_AFTER = 0.03
"""If other computation after the repetitions takes more than this share of one of them, they are layers of one step."""
LEAST_BEFORE = 0.1
"""If another sequence repeats as often before the repetitions, and computes more than this share of their time, the two are
the layers of a forward and a backward pass: a forward pass takes about half as long as its backward pass."""
LEAST_NOTED = 1.0
"""Other computation before the repetitions is noted if it takes longer than this many of them."""
MAX_PERIODS_TRIED = 64
SPREADS_OF_OUTLIERS = 5.0
"""A step farther from the median than this many median deviations is an outlier..."""
LEAST_OUTLIER = 0.05
"""...if it is also farther than this share of the median: steps of a quiet job differ by less..."""
MOST_STEADY = 0.5
"""...and in any case if it is farther than this share: however much steps differ, a mean of such steps describes none."""
LEAST_STEADY = 3
"""Of fewer steady steps, the median says less than that of all steps."""
MAD_TO_SPREAD = 1.4826  # ratio of a normal distribution's standard deviation to its median absolute deviation
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
    """Return the step with the median makespan. For an even number, skip the first profiled step: it finds the GPU idle.

    If that step is not steady, return the median one of those that are, if these are enough to have one in the middle.
    """
    kept = numbers[1:] if numbers[0] == 0 and len(numbers) % 2 == 0 else numbers
    steady = steady_steps(makespans, numbers)
    found = _middle(kept, makespans)
    return found if found in steady or len(steady) < LEAST_STEADY else _middle(steady, makespans)


def _middle(numbers: Iterable[int], makespans: Sequence[float]) -> int:
    """Return the step with the median makespan, of an even number the shorter of the two in the middle."""
    order = sorted(numbers, key=lambda number: (makespans[number], number))
    return order[(len(order) - 1) // 2]


def steady_steps(makespans: Sequence[float], alike: Iterable[int]) -> set[int]:
    """Return the steps `alike` but outliers and, of three or more steps, the first, which runs with a cold profiler.

    Of an even number, the shorter of the two steps in the middle is the median: stalls make steps longer, nothing shorter.
    """
    warm = range(1, len(makespans)) if len(makespans) > 2 else range(len(makespans))
    common = set(alike)
    kept = [step for step in warm if step in common] or sorted(common) or list(warm)
    middle = median_low(makespans[step] for step in kept)
    spread = MAD_TO_SPREAD * median(abs(makespans[step] - middle) for step in kept)
    limit = min(max(SPREADS_OF_OUTLIERS * spread, LEAST_OUTLIER * middle), MOST_STEADY * middle)
    return {step for step in kept if abs(makespans[step] - middle) <= limit}


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
    doubt = _why_layers(trace.operations, first, period, repeats)
    remedy = "Record launches (activities=[CPU, CUDA])." if trace.step_windows else "Call profiler.step() in each iteration."
    if doubt:
        note = (
            f"The trace has no {lacks}. A sequence of {period} operations repeats {repeats} times, but {doubt}, so it may "
            "be a layer, and all of the trace counts as one step."
        )
        return [list(range(len(names)))], [f"{note} {remedy}"]
    steps = [list(range(first + i * period, first + (i + 1) * period)) for i in range(repeats)]
    notes = [f"The trace has no {lacks}. Its steps are the {repeats} repetitions of a sequence of {period} operations."]
    if left_out := len(names) - period * repeats:
        notes.append(f"{left_out} operations outside the repetitions were left out.")
    before_us = _other_us(trace.operations, range(first), first, period)
    if before_us > LEAST_NOTED * sum(operation.duration_us for operation in trace.operations[first : first + period]):
        share = format_percent(before_us / _computing_us(trace.operations))
        notes.append(
            f"Other computation before the repetitions takes {format_us(before_us)}, {share} of all. It may be a warm-up. "
            f"If it belongs to a step, the repetitions are its layers, and figures are those of a layer. {remedy}"
        )
    return steps, notes


def _why_layers(operations: Sequence[GpuOperation], first: int, period: int, repeats: int) -> str:
    """Return why the repetitions may be layers of one step, or "" if nothing says so.

    Other computation after them is a model's head, a loss or an optimizer; a last step that differs runs kernels of the same
    names. Before them it may be a warm-up, unless it repeats as often: then it is the forward pass of the same layers.
    """
    end = first + repeats * period
    once_us = sum(operation.duration_us for operation in operations[first : first + period])
    if _other_us(operations, range(end, len(operations)), first, period) > LEAST_AFTER * once_us:
        return "other computation follows"
    _, length, times = find_repetition([operation.name for operation in operations[:first]])
    if times == repeats and _other_us(operations, range(first), first, period) > LEAST_BEFORE * repeats * once_us:
        return f"another one of {length} repeats as often before it"
    return ""


def _other_us(operations: Sequence[GpuOperation], numbers: range, first: int, period: int) -> float:
    """Return how long those of the operations compute that the repetitions do not run, by their names."""
    usual = {operation.name for operation in operations[first : first + period]}
    return _computing_us(operations[number] for number in numbers if operations[number].name not in usual)


def _computing_us(operations: Iterable[GpuOperation]) -> float:
    """Return the sum of the times of kernels but those that communicate."""
    kernels = (operation for operation in operations if operation.category == "kernel")
    return sum(each.duration_us for each in kernels if not is_communication(each.category, each.name))


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
