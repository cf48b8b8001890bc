"""Finds kernels that ran slower beside communication than like kernels that ran alone.

Like kernels are launches of one name, grid, block and shared memory (and matrix sizes, if recorded). One launch
configuration may serve several sizes. So a kernel is compared with the longest time of a like one that ran alone and was not
longer, nor shorter than 1/1.7 of it, as for lone times (`traces/lone_times.py`): the reported loss is rather too small than
too large.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import prod
from typing import Literal

from counterpoint.analysis.collectives import RankCollectives
from counterpoint.analysis.operators import started_within
from counterpoint.analysis.timed import TimedTrace, ns_to_us
from counterpoint.analysis.values import Role, Slowdown
from counterpoint.kernel_names import short_name
from counterpoint.spans import Span, length, union, within
from counterpoint.traces.classify import classify_kernel
from counterpoint.traces.lone_times import MOST_SLOWDOWN, UNTOUCHED_OVERLAP, signature

LEAST_COVERED = 0.25
"""If less of a kernel than this ran beside communication, its time says little about the cost of that."""
LEAST_LOSS = 0.03
"""Like kernels differ by less than this when nothing runs beside them."""
LEAST_LOST_US = 1.0
MOST_ROWS = 200
MOST_BESIDE = 32  # collectives, the last to start, of which one ran beside a kernel longest

Shared = Literal["SMs", "bandwidth"]


def find_slowdowns(
    timed: TimedTrace, roles: tuple[Role, ...], found: RankCollectives, windows: Sequence[Span]
) -> tuple[Slowdown, ...]:
    """Return kernels of the windows that lost time beside communication, by time lost per window."""
    members = sorted(found.by_operation, key=lambda index: (timed.starts[index], index))
    busy = union((timed.starts[index], timed.ends[index]) for index in members)
    touched: list[int] = []
    alone: dict[object, list[int]] = {}
    for index in started_within(timed, windows):
        if roles[index] != "computation":
            continue
        span = (timed.starts[index], timed.ends[index])
        covered = length(within(busy, span))
        if covered <= UNTOUCHED_OVERLAP * (span[1] - span[0]):
            alone.setdefault(_key(timed, index), []).append(span[1] - span[0])
        elif covered >= LEAST_COVERED * (span[1] - span[0]):
            touched.append(index)
    for line in alone.values():
        line.sort()
    lost: dict[tuple[str, str, Shared], list[int]] = {}
    for index in touched:
        like = _like(alone.get(_key(timed, index), []), timed.ends[index] - timed.starts[index])
        if like is not None:
            _add(timed, found, lost, (index, _beside(timed, members, index), like))
    return _rows(timed, lost, len(windows))


def _key(timed: TimedTrace, index: int) -> object:
    operation = timed.trace.operations[index]
    return (signature(operation), operation.matmul_sizes)


def _like(alone: list[int], time: int) -> int | None:
    """Return the longest time of a like kernel that ran alone and may be this one's; None if no loss can be stated."""
    place = bisect_right(alone, time) - 1
    if place < 0 or alone[place] * MOST_SLOWDOWN < time:
        return None
    return alone[place]


def _beside(timed: TimedTrace, members: Sequence[int], index: int) -> int:
    """Return the collective that ran beside a kernel longest, among the last ones that started before the kernel's end."""
    place = bisect_left(members, timed.ends[index], key=timed.starts.__getitem__)

    def shared(other: int) -> int:
        return min(timed.ends[other], timed.ends[index]) - max(timed.starts[other], timed.starts[index])

    longest = max(members[max(0, place - MOST_BESIDE) : place], key=shared, default=members[0])
    return longest if shared(longest) > 0 else members[max(0, place - 1)]


def _add(
    timed: TimedTrace, found: RankCollectives, lost: dict[tuple[str, str, Shared], list[int]], case: tuple[int, int, int]
) -> None:
    """Add one kernel to the row of its kind: count, time alone, time beside communication."""
    index, member, like = case
    operation, other = timed.trace.operations[index], timed.trace.operations[member]
    beside = found.values[found.by_operation[member]].name
    holds_sms = other.category == "kernel" and prod(other.arguments.grid) > 1
    by: Shared = "SMs" if holds_sms and classify_kernel(operation.name).character != "streaming" else "bandwidth"
    row = lost.setdefault((operation.name, beside, by), [0, 0, 0])
    row[0] += 1
    row[1] += like
    row[2] += timed.ends[index] - timed.starts[index]


def _rows(timed: TimedTrace, lost: dict[tuple[str, str, Shared], list[int]], num_steps: int) -> tuple[Slowdown, ...]:
    rows = [
        Slowdown(
            rank=timed.trace.rank or 0,
            kernel=short_name(kernel),
            beside=beside,
            count=count / num_steps,
            alone_us=ns_to_us(alone) / count,
            beside_us=ns_to_us(time) / count,
            lost_us=ns_to_us(time - alone) / num_steps,
            by=by,
        )
        for (kernel, beside, by), (count, alone, time) in lost.items()
        if time - alone >= LEAST_LOSS * alone and ns_to_us(time - alone) / num_steps >= LEAST_LOST_US
    ]
    return tuple(sorted(rows, key=lambda row: (-row.lost_us, row.kernel, row.beside))[:MOST_ROWS])
