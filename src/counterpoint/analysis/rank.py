"""Analyzes one rank's trace: steps, collectives, exposed intervals with causes, operators, idle time, critical path.

The order of work is: times and dependencies, roles, windows of the steps, collectives, exposed pieces and their causes, then
the tables over the steady steps. `problems` state what is unknown; no figure is made up for it.
"""

from collections import Counter

from msgspec.structs import replace

from counterpoint.analysis.arrivals import describe_arrivals
from counterpoint.analysis.causes import CauseFinder
from counterpoint.analysis.collectives import RankCollectives, find_collectives
from counterpoint.analysis.critical_path import find_critical_path
from counterpoint.analysis.exposure import exposed_by_collective, find_pieces, join_intervals
from counterpoint.analysis.idle import find_idle
from counterpoint.analysis.lanes import draw_lanes
from counterpoint.analysis.operators import find_operators
from counterpoint.analysis.roles import find_roles
from counterpoint.analysis.slowdowns import find_slowdowns
from counterpoint.analysis.timed import TimedTrace, time_trace
from counterpoint.analysis.values import ExposedInterval, RankAnalysis, Role, TracedCollective
from counterpoint.analysis.windows import RankWindows, find_busy, find_figures, find_windows, representative
from counterpoint.errors import CounterpointError
from counterpoint.spans import Span
from counterpoint.traces.activity import ActivityTrace
from counterpoint.traces.operations import notes_on_collectives
from counterpoint.traces.steady import are_rare, note_on_rare, overlaps_on_streams
from counterpoint.traces.traced_step import TracedStep, traced_step_of
from counterpoint.units import format_count
from counterpoint.value import cyclic_gc_paused

DETAILED_STEPS = 24
"""Tables of operators and the like use at most this many steps: with more steps, their means no longer change."""


def analyze_rank(trace: ActivityTrace) -> RankAnalysis:
    """Reduce one rank's trace to an analysis of its communication.

    The cost grows with the number of GPU operations. Raises nothing for a trace that `read_activity` accepts.
    """
    with cyclic_gc_paused():
        timed = time_trace(trace)
        return _analyze(timed, find_windows(timed))


def analyze_rank_and_step(trace: ActivityTrace) -> tuple[RankAnalysis, TracedStep | None]:
    """Return a rank's analysis, and the step to plan for if there is one; look for steps only once."""
    with cyclic_gc_paused():
        timed = time_trace(trace)
        windows = find_windows(timed)
        analysis = _analyze(timed, windows)
        try:
            return analysis, traced_step_of(trace, steps=windows.steps, dependencies=timed.dependencies)
        except CounterpointError:
            return analysis, None  # a trace that cannot be planned for can still be analyzed


def _analyze(timed: TimedTrace, found_windows: RankWindows) -> RankAnalysis:
    trace = timed.trace
    roles = find_roles(timed)
    windows = found_windows.windows
    busy = find_busy(timed, roles)
    steps = find_figures(timed, busy, found_windows)
    found = find_collectives(timed, roles, windows)
    main = computation_stream(timed, roles)
    exposed = join_intervals(
        CauseFinder(timed, roles, found, windows, main).intervals(find_pieces(timed, found, busy, windows))
    )
    steady = tuple(windows[step.step] for step in steps if step.is_steady)
    detailed = _evenly_spaced(steady)
    shown = representative(steps, found_windows)
    lanes, names = draw_lanes(timed, roles, windows[shown.step])
    untrusted, contradictions = _trust(timed)
    return RankAnalysis(
        path=trace.path,
        rank=trace.rank or 0,
        world_size=trace.world_size,
        device_name=trace.device_name,
        origin_us=timed.origin_us,
        num_operations=len(trace.operations),
        steps=steps,
        collectives=_described(timed, roles, found, exposed),
        exposed=exposed,
        operators=find_operators(timed, roles, detailed),
        idle=find_idle(timed, detailed),
        critical_path=find_critical_path(timed, roles, detailed),
        slowdowns=find_slowdowns(timed, roles, found, detailed),
        shown_step=shown.step,
        lanes=lanes,
        names=names,
        notes=(
            *trace.notes,
            *contradictions,
            *found_windows.notes,
            *_notes(timed, roles),
            *_note_on_sample(steady, detailed),
        ),
        problems=(*found_windows.problems, *_problems(timed), *filter(None, [untrusted])),
        untrusted=untrusted,
    )


def computation_stream(timed: TimedTrace, roles: tuple[Role, ...]) -> int | None:
    """Return the stream with the most computation; None if nothing computes."""
    busy: Counter[int] = Counter()
    for stream, line in timed.streams.items():
        time = sum(timed.ends[index] - timed.starts[index] for index in line if roles[index] == "computation")
        if time:
            busy[stream] = time
    return busy.most_common(1)[0][0] if busy else None


def _evenly_spaced(windows: tuple[Span, ...]) -> tuple[Span, ...]:
    """Return all windows if they are few, else some evenly spaced ones."""
    if len(windows) <= DETAILED_STEPS:
        return windows
    return tuple(windows[place * len(windows) // DETAILED_STEPS] for place in range(DETAILED_STEPS))


def _note_on_sample(steady: tuple[Span, ...], detailed: tuple[Span, ...]) -> list[str]:
    if len(detailed) == len(steady):
        return []
    what = "Operators, idle time of streams, the critical path and slowdowns"
    return [f"{what} are means over {len(detailed)} of the {len(steady)} steady steps, evenly spaced."]


def _described(
    timed: TimedTrace, roles: tuple[Role, ...], found: RankCollectives, exposed: tuple[ExposedInterval, ...]
) -> tuple[TracedCollective, ...]:
    """Return collectives with their exposed time and what came before them."""
    times = exposed_by_collective(exposed, found.values)
    words = describe_arrivals(timed, roles, found)
    return tuple(
        replace(value, exposed_us=time, before=said) for value, time, said in zip(found.values, times, words, strict=True)
    )


def _notes(timed: TimedTrace, roles: tuple[Role, ...]) -> list[str]:
    notes = []
    if not any(role in ("communication", "waiting") for role in roles):
        notes.append("The trace holds no communication.")
    if len(timed.streams) == 1:
        notes.append("Everything runs on one stream, so nothing can overlap.")
    if timed.trace.num_devices > 1:
        notes.append(f"The trace holds {timed.trace.num_devices} devices; only the busiest was read.")
    return notes


def _trust(timed: TimedTrace) -> tuple[str, list[str]]:
    """Return why no figure of the trace can be trusted, or nothing; and a note on contradictions too rare for that."""
    impossible, _ = overlaps_on_streams(timed.trace.operations)
    if not impossible:
        return "", []
    if are_rare(impossible, timed.trace.operations):
        return "", [note_on_rare(impossible)]
    what = format_count(len(impossible), "operation overlaps its", "operations overlap their")
    return (
        f"{what} predecessor on a stream, which is impossible: times and causes are wrong. Record the trace again, of one "
        "process."
    ), []


def _problems(timed: TimedTrace) -> list[str]:
    """Return what the trace lacks, and what follows from that."""
    problems = []
    unknown = sum(launch is None for launch in timed.launches)
    sizeless = sum(operation.category == "kernel" and not operation.arguments.grid for operation in timed.trace.operations)
    early = sum(launch is not None and launch > start for launch, start in zip(timed.launches, timed.starts, strict=True))
    if unknown:
        what = format_count(unknown, "operation has", "operations have")
        problems.append(f"{what} no launch in the trace, so it is unknown whether the host issued them late.")
    if sizeless:
        what = format_count(sizeless, "kernel has", "kernels have")
        problems.append(f"{what} no grid in the trace, so it is unknown whether collectives waited there for SMs.")
    if early:
        what = format_count(early, "operation starts", "operations start")
        problems.append(f"{what} before the launch (kineto#1380), so host and GPU times do not agree there.")
    if not timed.trace.device_name:
        problems.append(
            "The trace does not name its GPU, so whether kernels fit beside each other is judged by their number "
            "of CTAs only."
        )
    if not any(call.sync is not None for call in timed.trace.host_calls) and len(timed.streams) > 1:
        how = "times" if timed.dependencies.are_from_times else "the order of the host's calls"
        problems.append(
            "The trace does not say which streams wait for which (enable_cuda_sync_events=True records it), so dependencies "
            f"are inferred from {how}."
        )
    return [*problems, *notes_on_collectives(timed.trace, range(len(timed.trace.operations)))]
