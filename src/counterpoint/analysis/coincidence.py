"""Whether pairs of two ranks' collectives end at the same times, up to clocks that nobody knows.

The distance of the ends of one collective on two ranks is that of the clocks, and changes little from one collective to the
next; a drift changes it by less. Between collectives that are not the same it changes as arrivals do.
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median, median_low

from counterpoint.analysis.values import TracedCollective

LEAST_RUN = 8  # collectives whose ends say something about a shift
SAMPLE = 32  # collectives that tell that a shift is far off
# Ends of one collective on two ranks of H200s were within 1 us for short ones, within a tenth of the duration for others.
# Over that, changes of the distance were 0.03 to 0.47 in the middle and 0.2 to 0.7 for nine in ten (data-parallel; experts);
# with the steps of a very regular job shifted by one they were 0.4 and 1.4.
LEAST_ERROR_US = 5.0
ERROR_PER_DURATION = 0.1
USUALLY_APART = 0.5
MOST_APART = 0.85

Pairs = list[tuple[int, int]]


def distances(first: Sequence[TracedCollective], second: Sequence[TracedCollective], run: Pairs) -> list[float]:
    """End on the first rank less end on the second, of each pair, each on its own clock, in microseconds."""
    return [first[i].end_us - second[j].end_us for i, j in run]


def _errors(first: Sequence[TracedCollective], second: Sequence[TracedCollective], run: Pairs) -> list[float]:
    """How far apart the ends of each shared collective may be."""
    shorter = (min(first[i].end_us - first[i].start_us, second[j].end_us - second[j].start_us) for i, j in run)
    return [LEAST_ERROR_US + ERROR_PER_DURATION * duration_us for duration_us in shorter]


def steps_apart(first: Sequence[TracedCollective], second: Sequence[TracedCollective], run: Pairs) -> list[float]:
    """How much the distance of ends changes from one collective to the next, which a drift does not, over what may be."""
    changes = pairwise(zip(distances(first, second, run), _errors(first, second, run), strict=True))
    return [abs(before - after) / (error + other) for (before, error), (after, other) in changes]


def do_coincide(
    first: Sequence[TracedCollective], second: Sequence[TracedCollective], run: Pairs, distance_us: float | None = None
) -> bool:
    """Whether the ends lie as close as those of shared collectives do, and as far apart as the clocks beside them."""
    if distance_us is not None:
        is_near = abs(median(distances(first, second, run)) - distance_us) <= 2 * max(_errors(first, second, run))
        if not is_near:
            return False
    if len(run) > SAMPLE and usually_apart(steps_apart(first, second, run[:SAMPLE])) > 2 * USUALLY_APART:
        return False  # most shifts are far off, and need not be looked at as a whole
    apart = sorted(steps_apart(first, second, run))
    most = apart[9 * (len(apart) - 1) // 10] if apart else 0.0
    return most <= MOST_APART and (usually_apart(apart) <= USUALLY_APART or len(run) < LEAST_RUN)


def usually_apart(apart: Sequence[float]) -> float:
    """What of them is usual; 0 of none."""
    return median_low(apart) if apart else 0.0


def trimmed(first: Sequence[TracedCollective], second: Sequence[TracedCollective], run: Pairs) -> Pairs:
    """The run without entries at its ends that are alike by chance: their distance is another than that of the next one."""
    apart = steps_apart(first, second, run)
    low, high = 0, len(run)
    while high - low > 1 and apart[low] > 2 * MOST_APART:
        low += 1
    while high - low > 1 and apart[high - 2] > 2 * MOST_APART:
        high -= 1
    return run[low:high]
