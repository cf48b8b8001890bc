"""The steps of one rank as the GPU ran them: their windows, their figures, and which of them are steady.

Each figure is the length of a union of spans of everything that ran in a window, whichever step it belongs to, in whole
nanoseconds.
"""

from bisect import bisect_left
from collections.abc import Sequence
from statistics import fmean

from counterpoint.analysis.timed import TimedTrace, ns_to_us
from counterpoint.analysis.values import Role, StepFigures
from counterpoint.errors import TraceError
from counterpoint.spans import Span, length, union, within, without
from counterpoint.traces.issue import LATE_LATENCY_US
from counterpoint.traces.steady import TracedSteps, divide_into_steps, steady_steps
from counterpoint.units import NS_PER_US, format_us
from counterpoint.value import Value

LEAST_LENGTHENED = 0.1
"""If outliers make the mean step longer by more than this share, a note says so."""


class RankWindows(Value, frozen=True, kw_only=True):
    """Windows of the steps in nanoseconds, the numbers of those `alike` in their operations and of those of them that are
    `whole` (`TracedSteps`), the steps themselves if they can be told, and what is and is not known.
    """

    windows: tuple[Span, ...]
    alike: tuple[int, ...] = (0,)
    whole: tuple[int, ...] = (0,)
    steps: TracedSteps | None = None
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


class BusyTimes(Value, frozen=True, kw_only=True):
    """Unions of spans over the whole trace; communication includes waiting; computation covers none of exposed."""

    computation: tuple[Span, ...]
    communication: tuple[Span, ...]
    waiting: tuple[Span, ...]
    copies: tuple[Span, ...]
    anything: tuple[Span, ...]
    exposed: tuple[Span, ...]


def find_windows(timed: TimedTrace) -> RankWindows:
    """Return the window of each step; if no step can be told, the whole trace as one window, and a problem."""
    everything = (0, timed.sorted_ends[-1])
    try:
        steps = divide_into_steps(timed.trace)
    except TraceError as problem:
        return RankWindows(windows=(everything,), problems=(f"The whole trace counts as one step. {problem}",))
    spans = [(timed.to_ns(start), timed.to_ns(end)) for start, end in steps.windows]
    numbers = [number for number, span in enumerate(spans) if span[0] < span[1]]
    windows = tuple(spans[number] for number in numbers)
    alike, whole = (
        tuple(place for place, number in enumerate(numbers) if number in chosen) for chosen in (steps.alike, steps.whole)
    )
    problems = () if len(windows) == len(spans) else (f"{len(spans) - len(windows)} steps have no GPU time of their own.",)
    if not windows:
        return RankWindows(
            windows=(everything,), problems=("The whole trace counts as one step, because no step has GPU time.",)
        )
    notes = (*steps.notes, *_notes_on_neighbors(alike, whole), *_notes_on_outliers(windows, alike, whole))
    return RankWindows(windows=windows, alike=alike, whole=whole, steps=steps, notes=notes, problems=problems)


def _notes_on_neighbors(alike: Sequence[int], whole: Sequence[int]) -> list[str]:
    """Return a note if a stream runs so far ahead that some windows hold other steps' communication instead of their own."""
    if len(whole) == len(alike):
        return []
    found = f"{len(alike) - len(whole)} of {len(alike)} steps have other steps' communication in their time on the GPU"
    so = "they were left out" if _are_enough(whole, alike) else "so figures are means over all steps, the first one included"
    return [f"Communication runs ahead of the computation: {found}; {so}."]


def _notes_on_outliers(windows: Sequence[Span], alike: Sequence[int], whole: Sequence[int]) -> list[str]:
    """Return a note if the steps that are left out as outliers make the mean step much longer, as where data comes late."""
    makespans = [end - start for start, end in windows]
    steady = _steady(makespans, alike, whole)
    warm = [step for step in whole if step or len(makespans) <= 2] if _are_enough(whole, alike) else []
    usual_us, mean_us = (fmean(makespans[step] for step in steps) / NS_PER_US for steps in (steady, warm or steady))
    if mean_us <= (1 + LEAST_LENGTHENED) * usual_us:
        return []
    found = f"{len(warm) - len(steady)} of {len(warm)} steps are far from the median and were left out"
    return [f"{found}. The steady ones take {format_us(usual_us)} on average, all of them {format_us(mean_us)}."]


def _steady(makespans: Sequence[int], alike: Sequence[int], whole: Sequence[int]) -> set[int]:
    """Return the steady steps: those that hold their own communication, or all steps `alike` if these are few."""
    return steady_steps(makespans, whole) if _are_enough(whole, alike) else set(alike)


def _are_enough(whole: Sequence[int], alike: Sequence[int]) -> bool:
    """Return whether figures can be means over the windows that hold their own communication.

    If these are few, only all windows together hold what all steps launched.
    """
    return 2 * len(whole) >= len(alike)


def find_busy(timed: TimedTrace, roles: tuple[Role, ...]) -> BusyTimes:
    """Return when the GPU did what, by role."""
    spans: dict[Role, list[Span]] = {"computation": [], "communication": [], "waiting": [], "copy": []}
    for index in timed.by_start:
        spans[roles[index]].append((timed.starts[index], timed.ends[index]))
    computation = union(spans["computation"])
    communication = union(spans["communication"] + spans["waiting"])
    return BusyTimes(
        computation=tuple(computation),
        communication=tuple(communication),
        waiting=tuple(union(spans["waiting"])),
        copies=tuple(union(spans["copy"])),
        anything=tuple(union([*computation, *communication, *spans["copy"]])),
        exposed=tuple(without(communication, computation)),
    )


def find_figures(timed: TimedTrace, busy: BusyTimes, found: RankWindows) -> tuple[StepFigures, ...]:
    """Return the figures of every step, with the steady ones marked."""
    makespans = [end - start for start, end in found.windows]
    steady = _steady(makespans, found.alike, found.whole)
    return tuple(_figures(timed, busy, number, window, number in steady) for number, window in enumerate(found.windows))


def representative(steps: Sequence[StepFigures], found: RankWindows) -> StepFigures:
    """Return the steady step with the median makespan, or the shorter of two, one that is whole if possible."""
    steady = [step for step in steps if step.is_steady]
    chosen = [step for step in steady if step.step in found.whole] or steady
    return sorted(chosen, key=lambda step: (step.makespan_us, step.step))[(len(chosen) - 1) // 2]


def _figures(timed: TimedTrace, busy: BusyTimes, step: int, window: Span, is_steady: bool) -> StepFigures:
    communication = length(within(busy.communication, window))
    exposed = length(within(busy.exposed, window))
    idle = without([window], within(busy.anything, window))
    overlapped = communication - exposed
    return StepFigures(
        rank=timed.trace.rank or 0,
        step=step,
        start_us=ns_to_us(window[0]),
        end_us=ns_to_us(window[1]),
        computation_us=ns_to_us(length(within(busy.computation, window))),
        communication_us=ns_to_us(communication),
        waiting_us=ns_to_us(length(within(busy.waiting, window))),
        copy_us=ns_to_us(length(within(busy.copies, window))),
        exposed_us=ns_to_us(exposed),
        overlapped_us=ns_to_us(overlapped),
        idle_us=ns_to_us(length(idle)),
        launch_bound_us=ns_to_us(sum(end - start for start, end in idle if _ends_with_a_launch(timed, end))),
        overlap_ratio=overlapped / communication if communication else None,
        is_steady=is_steady,
    )


def _ends_with_a_launch(timed: TimedTrace, time: int) -> bool:
    """Return whether an operation that the host had only just launched starts at this time."""
    place = bisect_left(timed.sorted_starts, time)
    while place < len(timed.by_start) and timed.sorted_starts[place] == time:
        launched = timed.launches[timed.by_start[place]]
        if launched is not None and time - launched <= LATE_LATENCY_US * NS_PER_US:
            return True
        place += 1
    return False
