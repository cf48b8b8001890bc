"""Idle time of each stream in the steady steps, by what the next operation on the stream waited for.

The time from the end of one operation to the start of the next has up to three parts: "host" until the host launched the
next one, "event" until what it waits for on other streams had ended, and "launch gap" for the rest, in which it may also
have waited for SMs. After the last operation of a stream in a window, idle time is "nothing".
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from counterpoint.analysis.timed import TimedTrace, ns_to_us
from counterpoint.analysis.values import IdleRow
from counterpoint.spans import Span

IdleCause = Literal["host", "event", "launch gap", "nothing"]


def find_idle(timed: TimedTrace, windows: Sequence[Span]) -> tuple[IdleRow, ...]:
    """Return mean idle time per window by stream and cause; a stream's idle and busy times add up to the windows."""
    rows = []
    for stream, line in sorted(timed.streams.items()):
        starts = [timed.starts[index] for index in line]
        totals: Counter[IdleCause] = Counter()
        for window in windows:
            for cause, time in _of_window(timed, line, starts, window):
                totals[cause] += time
        rows += [
            IdleRow(rank=timed.trace.rank or 0, stream=stream, cause=cause, time_us=ns_to_us(time) / len(windows))
            for cause, time in sorted(totals.items())
            if time
        ]
    return tuple(rows)


def _of_window(timed: TimedTrace, line: tuple[int, ...], starts: list[int], window: Span) -> Iterator[tuple[IdleCause, int]]:
    """Yield the idle parts of one stream in one window."""
    place = bisect_left(starts, window[0])
    reached = window[0]
    if place:
        reached = min(max(reached, timed.ends[line[place - 1]]), window[1])
    while place < len(line) and starts[place] < window[1]:
        index = line[place]
        yield from _of_gap(timed, index, reached, starts[place])
        reached = max(reached, timed.ends[index])
        place += 1
    if reached < window[1]:
        yield "nothing", window[1] - reached


def _of_gap(timed: TimedTrace, index: int, start: int, end: int) -> Iterator[tuple[IdleCause, int]]:
    """Yield the idle time before one operation, by cause."""
    if start >= end:
        return
    launch = timed.launches[index]
    launched = start if launch is None else min(max(launch, start), end)
    events = max((timed.ends[other] for other in timed.producers.get(index, ())), default=launched)
    ready = min(max(events, launched), end)
    yield "host", launched - start
    yield "event", ready - launched
    yield "launch gap", end - ready
