"""Aligns the clocks of ranks by the ends of shared collectives: a collective ends on all ranks at nearly the same time.

How nearly hangs on its duration: on H200s, ends of 12 us all-reduces lay within 1 us of each other, those of 700 us ones up
to 70 us apart, depending on who came last. So each difference of ends counts with the inverse square of the shorter
duration; the offset is the median under these weights. Where the differences of the last third of the trace lie elsewhere
than those of the first, the clock drifts, and a line is taken. Ranks that share no group are aligned through others.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import permutations

from counterpoint.analysis.matching import SharedCollective
from counterpoint.analysis.values import RankAnalysis
from counterpoint.units import US_PER_S, format_us
from counterpoint.value import Value

LEAST_ERROR_US = 1.0  # a microsecond between ends of the shortest collectives
ERROR_PER_DURATION = 0.1  # how far apart ends were seen, of the shorter duration
LEAST_FOR_DRIFT = 9  # shared collectives: three in a third
SELDOM_ENDING_TOGETHER = ("broadcast", "reduce", "send_recv")  # a root or a sender may be done before others

Difference = tuple[float, float, float]  # where on the rank's clock, what to add to it, and how far that may be off


class RankClock(Value, frozen=True, kw_only=True):
    """What turns times of a rank's trace into times of the first rank: an offset at `center_us`, and a drift per us."""

    offset_us: float = 0.0
    drift: float = 0.0
    center_us: float = 0.0
    error_us: float = 0.0

    def shared_us(self, time_us: float) -> float:
        """A time of the rank's own trace on the shared clock."""
        return time_us + self.offset_us + self.drift * (time_us - self.center_us)


def align_clocks(
    ranks: Sequence[RankAnalysis], shared: Sequence[SharedCollective]
) -> tuple[dict[int, RankClock], tuple[str, ...]]:
    """Clocks of all ranks that collectives join, directly or through others, and who is not among them.

    They are joined with the first rank, unless more ranks are joined with each other without it.
    """
    if not ranks:
        return {}, ()
    usual = [c for c in shared if c.members[0].collective not in SELDOM_ENDING_TOGETHER] or shared
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
    """One sentence for each clock that drifts."""
    return tuple(
        f"The clock of rank {rank} drifts by {format_us(abs(clock.drift) * US_PER_S)} per second against other ranks'."
        for rank, clock in sorted(clocks.items())
        if clock.drift
    )


def _num_shared(shared: Sequence[SharedCollective]) -> dict[tuple[int, int], int]:
    """How many collectives each ordered pair of ranks shares."""
    counts: Counter[tuple[int, int]] = Counter()
    for ranks, count in Counter(tuple(member.rank for member in c.members) for c in shared).items():
        for pair in permutations(ranks, 2):
            counts[pair] += count
    return counts


def _joined(counts: Mapping[tuple[int, int], int], rank: int) -> set[int]:
    """The ranks that one shares collectives with, directly or through others, and itself."""
    joined, new = {rank}, [rank]
    while new:
        known = new.pop()
        found = {other for one, other in counts if one == known} - joined
        joined |= found
        new += found
    return joined


def _ends(shared: Sequence[SharedCollective], known: int, rank: int) -> list[tuple[float, float, float]]:
    """Of each collective that two ranks share: its end on the one, on the other, the shorter duration."""
    ends: list[tuple[float, float, float]] = []
    for collective in shared:
        both = [member for number in (known, rank) for member in collective.members if member.rank == number]
        if len(both) == 2:
            one, other = both
            ends.append((one.end_us, other.end_us, min(one.end_us - one.start_us, other.end_us - other.start_us)))
    return ends


def _clock(ends: Sequence[tuple[float, float, float]], known: RankClock) -> RankClock:
    """The clock of a rank from collectives that it shared with one whose clock is known."""
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
    """A line through the middles of the first and the last third."""
    centers = [sum(d[0] for d in part) / len(part) for part in (early, late)]
    (before, error_before), (after, error_after) = _middle(early), _middle(late)
    return RankClock(
        offset_us=(before + after) / 2,
        drift=(after - before) / (centers[1] - centers[0]),
        center_us=(centers[0] + centers[1]) / 2,
        error_us=min(error_us, error_before + error_after),
    )


def _middle(differences: Sequence[Difference]) -> tuple[float, float]:
    """The median of differences, weighted by the inverse squares of their errors, and how far it may be off.

    The error is the weighted median distance from it, and no less than a tenth of the weighted median of the errors.
    """
    weighted = [(value, error**-2) for _, value, error in differences]
    middle = _weighted_median(weighted)
    distance = _weighted_median([(abs(value - middle), weight) for value, weight in weighted])
    usual = _weighted_median([(error, error**-2) for _, _, error in differences])
    return middle, max(distance, usual / 3)


def _weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """The value in the middle of the weights; the mean of two where the middle lies between them."""
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
