"""Prepares the operations of one step for drawing, some ten thousand at most: close neighbors of one kind are merged."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from counterpoint.analysis.timed import TimedTrace, ns_to_us
from counterpoint.analysis.values import LaneInterval, Role
from counterpoint.kernel_names import short_name
from counterpoint.spans import Span

MOST_INTERVALS = 12_000

Run = list[int]  # operations of one stream and role that are drawn as one


def draw_lanes(timed: TimedTrace, roles: tuple[Role, ...], window: Span) -> tuple[tuple[LaneInterval, ...], tuple[str, ...]]:
    """Return everything that ran in the window, cut to it, by stream and start, and the names that it refers to."""
    runs = [run for _, line in sorted(timed.streams.items()) for run in _runs(timed, line, window)]
    runs = _merged(timed, roles, runs)
    numbers: dict[str, int] = {}
    lanes = []
    for run in runs:
        first = timed.trace.operations[run[0]]
        name = short_name(first.name) if len(run) == 1 else f"{len(run)} operations"
        lanes.append(
            LaneInterval(
                stream=first.stream,
                start_us=ns_to_us(max(window[0], timed.starts[run[0]])),
                end_us=ns_to_us(min(window[1], max(timed.ends[index] for index in run))),
                name=numbers.setdefault(name, len(numbers)),
                role=roles[run[0]],
            )
        )
    return tuple(lanes), tuple(numbers)


def _runs(timed: TimedTrace, line: Sequence[int], window: Span) -> list[Run]:
    """Return the operations of a stream that run in the window, each in a run of its own."""
    place = bisect_left(line, window[0], key=timed.starts.__getitem__)
    first = place - 1 if place and timed.ends[line[place - 1]] > window[0] else place
    last = bisect_left(line, window[1], key=timed.starts.__getitem__)
    return [[index] for index in line[first:last]]


def _merged(timed: TimedTrace, roles: tuple[Role, ...], runs: list[Run]) -> list[Run]:
    """Join neighbors of one stream and role until at most `MOST_INTERVALS` are left; the shortest joint spans go first."""
    while len(runs) > MOST_INTERVALS:
        spans = [_joint_span(timed, roles, before, after) for before, after in pairwise(runs)]
        possible = sorted(span for span in spans if span is not None)
        if not possible:
            break
        limit = possible[min(len(runs) - MOST_INTERVALS, len(possible)) - 1]
        joined = [runs[0]]
        for run, span in zip(runs[1:], spans, strict=True):
            if span is not None and span <= limit and len(runs) > MOST_INTERVALS:
                joined[-1] = joined[-1] + run
            else:
                joined.append(run)
        runs = joined
    return runs


def _joint_span(timed: TimedTrace, roles: tuple[Role, ...], before: Run, after: Run) -> int | None:
    """Return the joint duration of two runs; None if they may not be joined."""
    if timed.stream_of(before[0]) != timed.stream_of(after[0]) or roles[before[0]] != roles[after[0]]:
        return None
    return timed.ends[after[-1]] - timed.starts[before[0]]
