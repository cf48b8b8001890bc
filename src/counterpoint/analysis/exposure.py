"""Cuts the exposed stretches of the steps into pieces of one collective each."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from msgspec.structs import replace

from counterpoint.analysis.collectives import RankCollectives
from counterpoint.analysis.timed import TimedTrace
from counterpoint.analysis.values import ExposedInterval, TracedCollective
from counterpoint.analysis.windows import BusyTimes
from counterpoint.spans import Span, within
from counterpoint.value import Value


class ExposedPiece(Value, frozen=True, kw_only=True):
    """Part of an exposed stretch. `collective` is the first of those that run, and `operation` the one that it runs."""

    step: int
    start: int
    end: int
    stretch_end: int
    collective: int
    operation: int


def find_pieces(timed: TimedTrace, found: RankCollectives, busy: BusyTimes, windows: Sequence[Span]) -> list[ExposedPiece]:
    """Return all exposed pieces in order of time. In each step, their lengths add up to the exposed time."""
    running: list[int] = []
    place = 0
    members = [index for index in timed.by_start if index in found.by_operation]
    pieces: list[ExposedPiece] = []
    for step, window in enumerate(windows):
        for start, end in within(busy.exposed, window):
            while place < len(members) and timed.starts[members[place]] < end:
                running.append(members[place])
                place += 1
            running = [index for index in running if timed.ends[index] > start]
            pieces += _cut(timed, found, running, (start, end), step)
    return pieces


def _cut(timed: TimedTrace, found: RankCollectives, running: list[int], stretch: Span, step: int) -> Iterator[ExposedPiece]:
    """Cut one stretch where the first of the running collectives changes."""
    times = {time for index in running for time in (timed.starts[index], timed.ends[index])}
    cuts = [stretch[0], *sorted(time for time in times if stretch[0] < time < stretch[1]), stretch[1]]
    begun: tuple[int, int, int] | None = None  # collective, operation, start
    for start, end in pairwise(cuts):
        number, index = min(
            (found.by_operation[index], index)
            for index in running
            if timed.starts[index] < end and timed.ends[index] > start
        )
        if begun is not None and begun[:2] != (number, index):
            yield _piece(begun, start, stretch[1], step)
            begun = None
        begun = begun or (number, index, start)
    if begun is not None:
        yield _piece(begun, stretch[1], stretch[1], step)


def _piece(begun: tuple[int, int, int], end: int, stretch_end: int, step: int) -> ExposedPiece:
    return ExposedPiece(step=step, start=begun[2], end=end, stretch_end=stretch_end, collective=begun[0], operation=begun[1])


def join_intervals(intervals: Sequence[ExposedInterval]) -> tuple[ExposedInterval, ...]:
    """Join adjacent intervals of one collective and cause into one, with the evidence of the first."""
    joined: list[ExposedInterval] = []
    for interval in intervals:
        last = joined[-1] if joined else None
        same = last is not None and (last.step, last.collective, last.cause) == (
            interval.step,
            interval.collective,
            interval.cause,
        )
        if last is not None and same and last.end_us == interval.start_us:
            joined[-1] = replace(last, end_us=interval.end_us)
        else:
            joined.append(interval)
    return tuple(joined)


def exposed_by_collective(intervals: Sequence[ExposedInterval], values: Sequence[TracedCollective]) -> list[float]:
    """Return the exposed time of each collective, in microseconds."""
    exposed = [0.0] * len(values)
    for interval in intervals:
        exposed[interval.collective] += interval.duration_us
    return exposed
