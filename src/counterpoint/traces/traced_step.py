"""Reads a profiler trace into a step. This is the entry point of the package.

It reads the trace, divides it into steps and chooses the steady one, finds dependencies, lone times and issue times, and
builds the operations. The notes, one line each, tell the user how the trace was read.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from counterpoint.display import html_list
from counterpoint.errors import CounterpointError, TraceError, require_kind
from counterpoint.step import Dependency, OperationKind, Step, contents_of
from counterpoint.timeline import NO_OPERATION, Interval, Timeline
from counterpoint.traces.activity import ActivityTrace, GpuOperation
from counterpoint.traces.beside import find_pairs_beside
from counterpoint.traces.classify import is_communication
from counterpoint.traces.dependencies import Dependencies, find_dependencies
from counterpoint.traces.formats import SUFFIXES, read_activity
from counterpoint.traces.issue import LAUNCH_BOUND_SHARE, IssueTimes, find_issue_times
from counterpoint.traces.lone_times import LoneTimes, find_lone_times
from counterpoint.traces.operations import FEWEST_RANKS, Timing, build_operations
from counterpoint.traces.steady import (
    TracedSteps,
    check_streams,
    divide_into_steps,
)
from counterpoint.units import format_count, format_percent, format_us
from counterpoint.value import Value, require

LEAST_IDLE_SHARE = 0.01
"""From this share of a step on, idle time between steps is noted."""
LONGEST_FIRST = sorted(SUFFIXES, key=len, reverse=True)


class TracedStep(Value, frozen=True, kw_only=True):
    """The steady step of a trace: as a step to plan, and as the measured timeline.

    `timeline` holds everything that ran on the GPU during the step, including operations of neighboring steps, cut to the
    step's window; it starts when the step does (`traces.steady.TracedSteps`). `step_makespans_us` are those of all profiled
    steps, in order, each up to the step's last operation.
    """

    step: Step
    timeline: Timeline
    num_steps: int
    step_makespans_us: tuple[float, ...]
    notes: tuple[str, ...] = ()
    nccl_version: str | None = None

    def _in_short(self) -> str:
        return f"{self.step!r}, {format_count(self.num_steps, 'profiled step')}, {format_count(len(self.notes), 'note')}"

    def _repr_html_(self) -> str:
        """Return what notebooks show of the traced step: its length, what it holds, and the notes on how it was read."""
        length = format_us(max(self.step_makespans_us))
        steps = f"{format_count(self.num_steps, 'profiled step')}, the longest {length}"
        lines = (steps, ", ".join(contents_of(self.step)), *self.notes)
        return html_list(f"Traced step {self.step.name}", lines)


def read_trace(
    path: Path | str, *, rank: int | None = None, on_progress: Callable[[int, int], None] | None = None
) -> TracedStep:
    """Read a profiler trace, `.json`, `.json.gz` or `.sqlite`, into its steady step.

    `rank` labels the timeline; the default is the trace's own rank, or 0. `on_progress` is called with the bytes read so far
    and the size of the file, which is 0 for a pipe. Raises `TraceError`, in one line, for any problem with the file.
    """
    require_kind(path, (str, Path), "read_trace takes a path", "Pass the path of a trace (.json, .json.gz, .sqlite).")
    file = Path(path)
    with in_one_line(file):
        trace = read_activity(file, on_progress)
    return traced_step_of(trace, rank=rank)


def traced_step_of(
    trace: ActivityTrace,
    *,
    rank: int | None = None,
    steps: TracedSteps | None = None,
    dependencies: Dependencies | None = None,
) -> TracedStep:
    """Do the same as `read_trace` for a trace that was read already; its steps and dependencies are found if they are
    not given.
    """
    with in_one_line(Path(trace.path)):
        early = check_streams(trace.path, trace.operations)
        steps = divide_into_steps(trace) if steps is None else steps
        dependencies = find_dependencies(trace) if dependencies is None else dependencies
        return _steady_step(trace, rank, early, steps, dependencies)


@contextmanager
def in_one_line(file: Path) -> Iterator[None]:
    """Turn any error into a `TraceError` of one line that names the trace's file."""
    try:
        yield
    except CounterpointError as problem:
        one_line = " ".join(str(problem).split())  # the name of a kernel may hold any character
        raise TraceError(one_line if isinstance(problem, TraceError) else f"{file}: {one_line}") from problem


def _steady_step(
    trace: ActivityTrace, rank: int | None, early: Sequence[str], steps: TracedSteps, dependencies: Dependencies
) -> TracedStep:
    path = Path(trace.path)
    operations = [trace.operations[index] for index in steps.steady_operations]
    inside = _dependencies_inside(dependencies, steps.steady_operations)
    lone = find_lone_times(trace, steps)
    issue = find_issue_times(operations, trace, steps.windows[steps.steady][0])
    timings = [
        Timing(lone_us=lone_us, waits_for=waits_for, issued_us=issued_us, issued_after=issued_after, peer_wait_us=wait_us)
        for lone_us, waits_for, issued_us, issued_after, wait_us in zip(
            lone.lone_us, inside, issue.issued_us, issue.issued_after, lone.peer_wait_us, strict=True
        )
    ]
    built = build_operations(trace, steps.steady_operations, timings)
    name = next((path.name[: -len(each)] for each in LONGEST_FIRST if path.name.lower().endswith(each)), path.name)
    step = Step(
        name=name,
        num_ranks=_num_ranks(trace, operations),
        operations=built.operations,
        device_name=trace.device_name,
        launch_gap_us=issue.launch_gap_us,
        fits_beside=_fits_beside(trace, steps.steady_operations),
    )
    timeline = _timeline(name, trace, steps, trace.rank or 0 if rank is None else rank)
    require(
        any(interval.end_us > 0 for interval in timeline.intervals),
        TraceError,
        f"{path}: the steady step takes no time on the GPU; record the trace again, with a step that computes.",
    )
    notes = (
        *trace.notes,
        *_notes_on_file(trace, operations),
        *steps.notes,
        *_notes_on_neighbors(steps),
        *_notes_on_idle_time(steps),
        *early,
        *_notes_on_dependencies(dependencies, inside),
        *_notes_on_times(trace, lone, issue),
        *built.notes,
    )
    return TracedStep(
        step=step,
        timeline=timeline,
        num_steps=len(steps.steps),
        step_makespans_us=steps.makespans_us,
        notes=notes,
        nccl_version=trace.nccl_version,
    )


def _num_ranks(trace: ActivityTrace, operations: list[GpuOperation]) -> int:
    """Return the number of ranks of the job: as the trace states, else the size of the largest group of a collective, else
    the fewest.
    """
    if trace.world_size is not None:
        return trace.world_size
    fewest = FEWEST_RANKS if any(is_communication(each.category, each.name) for each in operations) else 1
    return max((each.arguments.group_size or fewest for each in operations), default=1)


def _dependencies_inside(dependencies: Dependencies, indices: tuple[int, ...]) -> list[tuple[Dependency, ...]]:
    """Return the operations inside the step that each operation waits for, by number in the step."""
    places = {index: place for place, index in enumerate(indices)}
    found: list[list[Dependency]] = [[] for _ in indices]
    for edge in dependencies.edges:
        if edge.consumer in places and edge.producer in places:
            found[places[edge.consumer]].append(Dependency(operation=places[edge.producer], origin=edge.origin))
    return [tuple(sorted(line, key=lambda dependency: dependency.operation)) for line in found]


def _fits_beside(trace: ActivityTrace, indices: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return pairs of the step's operations that ran together on SMs, by their numbers in the step."""
    places = {index: place for place, index in enumerate(indices)}
    return tuple((places[holder], places[beside]) for holder, beside in find_pairs_beside(trace, indices))


def _timeline(name: str, trace: ActivityTrace, steps: TracedSteps, rank: int) -> Timeline:
    """Return the operations that ran in the steady step's window, cut to it, as a timeline."""
    begin_us, end_us = steps.windows[steps.steady]
    places = _places(trace, steps)
    intervals = []
    for index in steps.steady_ran:
        operation = trace.operations[index]
        intervals.append(
            Interval(
                rank=rank,
                stream=operation.stream,
                operation=places.get(index, NO_OPERATION),
                name=operation.name,
                kind=_kind(operation),
                start_us=max(operation.start_us, begin_us) - begin_us,
                end_us=min(operation.end_us, end_us) - begin_us,
            )
        )
    intervals.sort(key=lambda interval: (interval.start_us, interval.operation))
    return Timeline(step_name=name, origin="measured", intervals=tuple(intervals))


def _places(trace: ActivityTrace, steps: TracedSteps) -> dict[int, int]:
    """Return, for each operation of the trace, the like operation of the steady step, if its step has the same sequence."""
    sequences = [[trace.operations[index].name for index in step] for step in steps.steps]
    return {
        index: place
        for step, sequence in zip(steps.steps, sequences, strict=True)
        if sequence == sequences[steps.steady]
        for place, index in enumerate(step)
    }


def _kind(operation: GpuOperation) -> OperationKind:
    if is_communication(operation.category, operation.name):
        return "communication"
    return "computation" if operation.category == "kernel" else "copy"


def _notes_on_file(trace: ActivityTrace, operations: list[GpuOperation]) -> list[str]:
    notes = []
    if trace.num_devices > 1:
        device = operations[0].arguments.device
        notes.append(f"The trace holds {trace.num_devices} devices; only the busiest, device {device}, was read.")
    if len({operation.stream for operation in operations}) == 1:
        notes.append("Everything runs on one stream, so nothing overlaps at present.")
    if trace.device_name is None:
        notes.append("The trace does not name its GPU; name the machine with --machine.")
    return notes


def _notes_on_neighbors(steps: TracedSteps) -> list[str]:
    """Return a note if streams run a step ahead, so that operations of other steps run in this step's time."""
    inside = set(steps.steady_ran)
    own = set(steps.steady_operations)
    if inside == own:
        return []
    return [
        (
            f"Streams run ahead of each other: {len(own - inside)} of the step's {len(own)} operations ran outside "
            f"its time on the GPU, and {format_count(len(inside - own), 'operation')} of other steps ran inside it "
            "and count there."
        )
    ]


def _notes_on_idle_time(steps: TracedSteps) -> list[str]:
    """Return a note if the GPU is idle between steps: makespans, traced and simulated, end with the last operation."""
    begin_us, end_us = steps.windows[steps.steady]
    step_us, makespan_us = end_us - begin_us, steps.makespans_us[steps.steady]
    if step_us - makespan_us < LEAST_IDLE_SHARE * step_us:
        return []
    return [
        (
            f"A step takes {format_us(step_us)}. Makespans leave out the last {format_us(step_us - makespan_us)} of it, in "
            "which the GPU is idle until the next step begins."
        )
    ]


def _notes_on_dependencies(dependencies: Dependencies, inside: list[tuple[Dependency, ...]]) -> list[str]:
    origins = [dependency.origin for line in inside for dependency in line]
    if not origins:
        return []
    how = "from times alone, because the trace holds no stream waits" if dependencies.are_from_times else "from host order"
    note = f"Dependencies between streams: {origins.count('exact')} exact, {origins.count('inferred')} inferred {how}."
    if dependencies.num_corrected or dependencies.num_dropped:
        note += (
            f" GPU times corrected {dependencies.num_corrected} of all inferences in the trace and contradicted "
            f"{dependencies.num_dropped}."
        )
    return [note]


def _notes_on_times(trace: ActivityTrace, lone: LoneTimes, issue: IssueTimes) -> list[str]:
    notes = []
    if issue.late_share > LAUNCH_BOUND_SHARE:
        notes.append(
            f"The GPU waits for launches by the CPU during {format_percent(issue.late_share)} of the step (launch-bound). "
            "Without the profiler it may wait less, because the profiler makes launches slower."
        )
    if issue.num_unseen:
        notes.append(
            f"The GPU is idle for {format_us(issue.unseen_us)} before "
            f"{format_count(issue.num_unseen, 'operation that was', 'operations that were')} launched long before: the "
            "trace seems to lack operations. This idle time is kept as it is."
        )
    if lone.num_estimated:
        how = (
            "estimates based on the SMs that communication held"
            if trace.num_sms
            else "the traced times, because the GPU's number of SMs is unknown"
        )
        notes.append(
            f"{lone.num_estimated} of the {lone.num_contended} kernels that run during communication never ran "
            f"alone in this trace; their stand-alone times are {how}."
        )
    return notes
