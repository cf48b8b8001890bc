"""Tests whether pairs of two ranks' collectives end at the same times, although the ranks' clocks are not aligned.

If both ranks ran the same collectives, the ends of each pair differ by the offset of the clocks, which hardly changes from
one collective to the next; drift changes it by less. If they did not, the difference changes as much as arrivals do.
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median, median_low

from counterpoint.analysis.values import TracedCollective

LEAST_RUN = 8  # a shift is judged by at least this many collectives
SAMPLE = 32  # this many collectives show that a shift is far off
# Ends of one collective on two ranks of H200s were within 1 us for short ones, and a tenth of the duration for others.
# Relative to that error, the difference of ends changed by 0.03 to 0.47 (median) and 0.2 to 0.7 (90th percentile) in jobs
# with data parallelism and with experts. With the steps of a very regular job shifted by one, it was 0.4 and 1.4.
LEAST_ERROR_US = 5.0
ERROR_PER_DURATION = 0.1
USUALLY_APART = 0.5
MOST_APART = 0.85
# Ends of the uneven all-to-alls of experts on 2 H200s were 0.6 (median) and 1.4 errors (90th percentile) from where they
# would be by the offset of other collectives. An all-to-all of another layer is more than 10 errors away.
USUALLY_FROM_OFFSET = 1.0
MOST_FROM_OFFSET = 2.0
SELDOM_ENDING_TOGETHER = ("broadcast", "reduce", "send_recv")  # the root or a sender may end before others do

Pairs = list[tuple[int, int]]


def ends_together(collective: TracedCollective) -> bool:
    """Return whether such a collective ends on all ranks at nearly the same time."""
    return collective.collective not in SELDOM_ENDING_TOGETHER


def telling(first: Sequence[TracedCollective], run: Pairs) -> Pairs:
    """Return the pairs of collectives that end on all ranks together; all pairs if there are none."""
    return [pair for pair in run if ends_together(first[pair[0]])] or run


def distances(first: Sequence[TracedCollective], second: Sequence[TracedCollective], run: Pairs) -> list[float]:
    """Return the end on the first rank less the end on the second, each on its own clock, per pair, in microseconds."""
    return [first[i].end_us - second[j].end_us for i, j in run]


def _errors(first: Sequence[TracedCollective], second: Sequence[TracedCollective], run: Pairs) -> list[float]:
    """Return how far apart the ends of each shared collective may be."""
    shorter = (min(first[i].end_us - first[i].start_us, second[j].end_us - second[j].start_us) for i, j in run)
    return [LEAST_ERROR_US + ERROR_PER_DURATION * duration_us for duration_us in shorter]


def steps_apart(first: Sequence[TracedCollective], second: Sequence[TracedCollective], run: Pairs) -> list[float]:
    """Return how much the difference of ends changes between adjacent collectives, over its error; drift hardly counts."""
    changes = pairwise(zip(distances(first, second, run), _errors(first, second, run), strict=True))
    return [abs(before - after) / (error + other) for (before, error), (after, other) in changes]


def do_coincide(
    first: Sequence[TracedCollective], second: Sequence[TracedCollective], run: Pairs, distance_us: float | None = None
) -> bool:
    """Return whether ends lie as close as those of shared collectives, and as far apart as the neighboring clocks do."""
    run = telling(first, run)
    if distance_us is not None:
        apart_us, errors = distances(first, second, run), _errors(first, second, run)
        if abs(median(apart_us) - distance_us) > 2 * max(errors):
            return False
        off = [abs(each - distance_us) / error for each, error in zip(apart_us, errors, strict=True)]
        if usually_apart(off) <= USUALLY_FROM_OFFSET and _mostly_apart(off) <= MOST_FROM_OFFSET:
            return True
    if len(run) > SAMPLE and usually_apart(steps_apart(first, second, run[:SAMPLE])) > 2 * USUALLY_APART:
        return False  # most shifts are far off, so a sample is enough
    apart = steps_apart(first, second, run)
    return _mostly_apart(apart) <= MOST_APART and (usually_apart(apart) <= USUALLY_APART or len(run) < LEAST_RUN)


def usually_apart(apart: Sequence[float]) -> float:
    """Return the median of the values; 0 if there are none."""
    return median_low(apart) if apart else 0.0


def _mostly_apart(apart: Sequence[float]) -> float:
    """Return the 90th percentile of the values; 0 if there are none."""
    return sorted(apart)[9 * (len(apart) - 1) // 10] if apart else 0.0


def trimmed(first: Sequence[TracedCollective], second: Sequence[TracedCollective], run: Pairs) -> Pairs:
    """Return the run without accidental matches at its ends, where the difference of ends is not that of the next pair."""
    told = telling(first, run)
    apart = steps_apart(first, second, told)
    low, high = 0, len(told)
    while high - low > 1 and apart[low] > 2 * MOST_APART:
        low += 1
    while high - low > 1 and apart[high - 2] > 2 * MOST_APART:
        high -= 1
    begin = run.index(told[low]) if low else 0
    end = run.index(told[high - 1]) + 1 if high < len(told) else len(run)
    return run[begin:end]
