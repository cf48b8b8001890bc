"""Describes what a rank did before each collective, to explain why other ranks waited for it.

The period described begins at the end of the rank's previous collective of the same group, or of the trace if there is none.
"""

from bisect import bisect_left, bisect_right
from collections import Counter

from counterpoint.analysis.collectives import RankCollectives
from counterpoint.analysis.timed import TimedTrace, format_ns
from counterpoint.analysis.values import Role
from counterpoint.kernel_names import short_name
from counterpoint.traces.issue import LATE_LATENCY_US
from counterpoint.units import NS_PER_US

LONGEST_STRETCH_NS = 1_000_000_000
"""The period described is no longer than this, also if no collective of the group came before."""


def describe_arrivals(timed: TimedTrace, roles: tuple[Role, ...], found: RankCollectives) -> list[str]:
    """Return, for each collective, what the rank computed since the group's last one, and whether it was issued late."""
    computation = [index for index in timed.by_start if roles[index] == "computation"]
    starts = [timed.starts[index] for index in computation]
    ended: dict[str | None, int] = {}
    words = []
    for number, members in enumerate(found.members):
        group = found.values[number].process_group
        start = timed.starts[members.operations[0]]
        since = "since its last collective of the group" if group in ended else "since the trace began"
        begin = ended.get(group, 0)
        if begin < start - LONGEST_STRETCH_NS:
            begin, since = start - LONGEST_STRETCH_NS, "before it"
        first, last = bisect_left(starts, begin), bisect_right(starts, start)
        words.append(_words(timed, computation[first:last], (begin, since), members.operations[0]))
        last_end = max(timed.ends[index] for index in members.operations)
        ended[group] = max(ended.get(group, 0), last_end)
    return words


def _words(timed: TimedTrace, computation: list[int], period: tuple[int, str], index: int) -> str:
    """Return one clause: how long the rank computed, and mostly what; and if the host issued the collective late.

    `period` is when what is described begins, and that in words.
    """
    begin, since = period
    start, launch = timed.starts[index], timed.launches[index]
    stretch = start - begin
    if stretch <= 0:
        return "it came directly from another collective of the group"
    busy: Counter[str] = Counter()
    covered, reached = 0, begin
    for other in computation:
        end = min(timed.ends[other], start)
        busy[timed.trace.operations[other].name] += max(0, end - timed.starts[other])
        covered += max(0, end - max(timed.starts[other], reached))
        reached = max(reached, end)
    said = f"computed for {format_ns(covered)} of the {format_ns(stretch)} {since}"
    if busy:
        name, time = busy.most_common(1)[0]
        said += f", mostly {short_name(name)} ({format_ns(time)})"
    if launch is not None and 0 <= start - launch <= LATE_LATENCY_US * NS_PER_US and launch > begin:
        wait = timed.waited_host(begin, launch)
        why = ", after it had waited for the GPU" if wait is not None else ""
        said += f"; the host issued it only {format_ns(start - launch)} before it started{why}"
    return said
