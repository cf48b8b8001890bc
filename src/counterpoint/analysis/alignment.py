"""Aligns the clocks of ranks by the ends of shared collectives: a collective ends on all ranks at nearly the same time.

How near depends on its duration: on H200s, ends of 12 us all-reduces lay within 1 us of each other, and those of 700 us ones
up to 70 us apart, depending on which rank came last. So each difference of ends is weighted by the inverse square of the
shorter duration, and the offset is the weighted median. If the differences of the first and the last third of the trace
disagree, the clock drifts, and a line is fitted. Ranks that share no group are aligned through others.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import permutations

from counterpoint.analysis.coincidence import ERROR_PER_DURATION
from counterpoint.analysis.matching import SharedCollective, ending_together
from counterpoint.analysis.values import RankAnalysis
from counterpoint.units import US_PER_S, format_us
from counterpoint.value import Value

LEAST_ERROR_US = 1.0  # a microsecond between the ends of the shortest collectives
LEAST_FOR_DRIFT = 9  # shared collectives: at least three in a third

Difference = tuple[float, float, float]  # a time on the rank's clock, what to add to it, and the possible error of that


class RankClock(Value, frozen=True, kw_only=True):
    """Converts times of a rank's trace to times of the first rank: an offset at `center_us`, and a drift per microsecond."""

    offset_us: float = 0.0
    drift: float = 0.0
    center_us: float = 0.0
    error_us: float = 0.0

    def shared_us(self, time_us: float) -> float:
        """Return a time of the rank's own trace on the shared clock."""
        return time_us + self.offset_us + self.drift * (time_us - self.center_us)


def align_clocks(
    ranks: Sequence[RankAnalysis], shared: Sequence[SharedCollective]
) -> tuple[dict[int, RankClock], tuple[str, ...]]:
    """Return the clocks of all ranks that collectives join, directly or through others, and notes on the ranks left out.

    The ranks are those joined with the first rank, unless more ranks are joined with each other without it.
    """
    if not ranks:
        return {}, ()
    usual = ending_together(shared)
    counts = _num_shared(usual)
    reference = max((analysis.rank for analysis in ranks), key=lambda rank: (len(_joined(counts, rank)), -rank))
    clocks = {reference: RankClock()}
    while reachable := [(count, pair) for pair, count in counts.items() if pair[0] in clocks and pair[1] not in clocks]:
        _, (known, rank) = max(reachable, key=lambda entry: (entry[0], -entry[1][0], -entry[1][1]))
        clocks[rank] = _clock(_ends(usual, known, rank), clocks[known])
    lonely = [analysis.rank for analysis in ranks if analysis.rank not in clocks]
    problems = [
        (f"Rank {rank} shares no collective with rank {reference}, so its clock is not aligned and its waits are unknown.")
        for rank in lonely
    ]
    return clocks, tuple(problems)


def describe_drifts(clocks: Mapping[int, RankClock]) -> tuple[str, ...]:
    """Return one sentence for each clock that drifts."""
    return tuple(
        f"The clock of rank {rank} drifts by {format_us(abs(clock.drift) * US_PER_S)} per second against other ranks'."
        for rank, clock in sorted(clocks.items())
        if clock.drift
    )


def _num_shared(shared: Sequence[SharedCollective]) -> dict[tuple[int, int], int]:
    """Return how many collectives each ordered pair of ranks shares."""
    counts: Counter[tuple[int, int]] = Counter()
    for ranks, count in Counter(tuple(member.rank for member in c.members) for c in shared).items():
        for pair in permutations(ranks, 2):
            counts[pair] += count
    return counts


def _joined(counts: Mapping[tuple[int, int], int], rank: int) -> set[int]:
    """Return a rank and all ranks that it shares collectives with, directly or through others."""
    joined, new = {rank}, [rank]
    while new:
        known = new.pop()
        found = {other for one, other in counts if one == known} - joined
        joined |= found
        new += found
    return joined


def _ends(shared: Sequence[SharedCollective], known: int, rank: int) -> list[tuple[float, float, float]]:
    """Return, for each collective that two ranks share, its end on both ranks and the shorter duration."""
    ends: list[tuple[float, float, float]] = []
    for collective in shared:
        both = [member for number in (known, rank) for member in collective.members if member.rank == number]
        if len(both) == 2:
            one, other = both
            ends.append((one.end_us, other.end_us, min(one.end_us - one.start_us, other.end_us - other.start_us)))
    return ends


def _clock(ends: Sequence[tuple[float, float, float]], known: RankClock) -> RankClock:
    """Return the clock of a rank, from collectives that it shared with a rank whose clock is known."""
    differences = sorted(
        (own, known.shared_us(there) - own, LEAST_ERROR_US + ERROR_PER_DURATION * shorter) for there, own, shorter in ends
    )
    offset_us, error_us = _middle(differences)
    error_us += known.error_us
    third = len(differences) // 3
    if len(differences) >= LEAST_FOR_DRIFT:
        early, late = differences[:third], differences[-third:]
        (before, error_before), (after, error_after) = _middle(early), _middle(late)
        if abs(after - before) > 3 * (error_before + error_after):
            return _drifting(early, late, error_us)
    return RankClock(offset_us=offset_us, error_us=error_us)


def _drifting(early: Sequence[Difference], late: Sequence[Difference], error_us: float) -> RankClock:
    """Return a clock that is a line through the middles of the first and the last third."""
    centers = [sum(d[0] for d in part) / len(part) for part in (early, late)]
    (before, error_before), (after, error_after) = _middle(early), _middle(late)
    return RankClock(
        offset_us=(before + after) / 2,
        drift=(after - before) / (centers[1] - centers[0]),
        center_us=(centers[0] + centers[1]) / 2,
        error_us=min(error_us, error_before + error_after),
    )


def _middle(differences: Sequence[Difference]) -> tuple[float, float]:
    """Return the median of differences, weighted by the inverse squares of their errors, and the error of that median.

    The error is the weighted median distance from it, but at least a third of the weighted median of the errors.
    """
    weighted = [(value, error**-2) for _, value, error in differences]
    middle = _weighted_median(weighted)
    distance = _weighted_median([(abs(value - middle), weight) for value, weight in weighted])
    usual = _weighted_median([(error, error**-2) for _, _, error in differences])
    return middle, max(distance, usual / 3)


def _weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """Return the value at the middle of the weights, or the mean of two values if the middle lies between them."""
    ordered = sorted(values)
    half = sum(weight for _, weight in ordered) / 2
    passed = 0.0
    for place, (value, weight) in enumerate(ordered):
        passed += weight
        if passed > half * (1 + 1e-12):
            return value
        if passed >= half * (1 - 1e-12) and place + 1 < len(ordered):
            return (value + ordered[place + 1][0]) / 2
    return ordered[-1][0]
