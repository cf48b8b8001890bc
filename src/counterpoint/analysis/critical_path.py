"""The critical path of the steady steps: what the end of a window waited for, followed back to the window's start.

From an operation, the path goes back to whatever came last of the host's launch, the predecessor on the stream and a
producer on another stream. If the operation started long after all of them, it waited for the GPU itself, and the path goes
to the operation that was running then. The parts add up to the window.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from counterpoint.analysis.timed import TimedTrace, ns_to_us
from counterpoint.analysis.values import PathRow, Role
from counterpoint.spans import Span

PathCause = Literal["computation", "communication", "waiting", "copy", "host", "launch gap"]
LONG_GAP_NS = 20_000
LOOKED_AT = 16


def find_critical_path(timed: TimedTrace, roles: tuple[Role, ...], windows: Sequence[Span]) -> tuple[PathRow, ...]:
    """Return the mean time per window of each kind of part on the critical path, longest first."""
    totals: Counter[PathCause] = Counter()
    for window in windows:
        totals.update(_of_window(timed, roles, window))
    return tuple(
        PathRow(rank=timed.trace.rank or 0, cause=cause, time_us=ns_to_us(time) / len(windows))
        for cause, time in totals.most_common()
        if time
    )


def _of_window(timed: TimedTrace, roles: tuple[Role, ...], window: Span) -> Counter[PathCause]:
    parts: Counter[PathCause] = Counter()
    start, reached = window
    index = timed.last_ended(reached)
    seen: set[int] = set()
    while index is not None and reached > start and index not in seen:
        seen.add(index)
        end = max(min(timed.ends[index], reached), start)
        parts["launch gap"] += reached - end
        begun = max(min(timed.starts[index], end), start)
        parts[roles[index]] += end - begun
        reached = begun
        if reached <= start:
            break
        index, reached = _holder(timed, index, begun, start, parts)
    parts["launch gap"] += max(0, reached - start)
    return parts


def _holder(timed: TimedTrace, index: int, begun: int, start: int, parts: Counter[PathCause]) -> tuple[int | None, int]:
    """Return what held an operation that began at a time, and where the path continues; add the idle time to the parts."""
    held = [other for other in timed.held_by(index) if timed.starts[other] < begun]
    holder = max(held, key=lambda other: (min(timed.ends[other], begun), other), default=None)
    ended = start if holder is None else max(start, min(timed.ends[holder], begun))
    launch = timed.launches[index]
    launched = ended if launch is None else max(start, min(launch, begun))
    if begun - max(ended, launched) > LONG_GAP_NS:
        other = _running_before(timed, begun)
        if other is not None and timed.ends[other] > max(ended, launched):
            return other, begun
    if launched > ended:
        parts["launch gap"] += begun - launched
        parts["host"] += launched - ended
        return holder, ended
    return holder, begun


def _running_before(timed: TimedTrace, time: int) -> int | None:
    """Return the operation that ended last of those that started shortly before a time."""
    place = bisect_left(timed.sorted_starts, time)
    return max(timed.by_start[max(0, place - LOOKED_AT) : place], key=lambda index: (timed.ends[index], index), default=None)
