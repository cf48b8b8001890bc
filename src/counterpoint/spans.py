"""Unions of spans in whole units, such as nanoseconds or rows: sums are exact and independent of order."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

Span = tuple[int, int]


def union(spans: Iterable[Span]) -> list[Span]:
    """Return disjoint spans, ascending, that cover exactly the given ones; spans that touch are joined, empty ones left
    out.
    """
    joined: list[Span] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if joined and start <= joined[-1][1]:
            if end > joined[-1][1]:
                joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def length(spans: Iterable[Span]) -> int:
    """Return the total length of disjoint spans."""
    return sum(end - start for start, end in spans)


def without(spans: Sequence[Span], taken: Sequence[Span]) -> list[Span]:
    """Return the part of `spans` that no span of `taken` covers; both are disjoint and ascending."""
    left: list[Span] = []
    place = 0
    for start, end in spans:
        while place < len(taken) and taken[place][1] <= start:
            place += 1
        at, reached = place, start
        while reached < end and at < len(taken) and taken[at][0] < end:
            if taken[at][0] > reached:
                left.append((reached, taken[at][0]))
            reached = max(reached, taken[at][1])
            at += 1
        if reached < end:
            left.append((reached, end))
    return left


def within(spans: Sequence[Span], window: Span) -> list[Span]:
    """Return the parts of disjoint, ascending spans inside a window."""
    if window[0] >= window[1]:
        return []
    first = bisect_right(spans, window[0], key=lambda span: span[1])
    last = bisect_left(spans, window[1], lo=first, key=lambda span: span[0])
    found = [*spans[first:last]]
    if found:  # only the first and the last can cross the window's borders
        found[0] = (max(found[0][0], window[0]), found[0][1])
        found[-1] = (found[-1][0], min(found[-1][1], window[1]))
    return found
