"""What turns prove about two variants, whatever disturbs the step times: robust times, a randomization test, and a test
that may be repeated for ever.

Times are compared as logarithms, so that a difference is a ratio. Within a turn, long steps are trimmed to what the
spread of ordinary steps allows. Between the two turns of a round the difference counts, and large differences are
trimmed equally in both directions. The test asks whether differences of that size would point one way by chance. It
compares with the orders that could have been drawn instead: if the variants do not matter, each order was equally likely
(a randomization test: Fisher 1935; Edgington and Onghena, "Randomization Tests"). That holds for drifts, periods,
outliers and correlated noise, because only the order was random.

A guard checks again and again, so its test has to stay valid. Each round is a bet on the sign of its difference at the
odds of its order. While the plan is not slower, the product of the winnings is a martingale, and it exceeds 1 / alpha in
at most alpha of all jobs (Ville 1939; Ramdas, Gruenwald, Vovk and Shafer, "Game-theoretic statistics and safe
anytime-valid inference", 2023).
"""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import final

import numpy as np

from counterpoint.measurement.orders import Rounds

NORMAL_DIFFERENCE = 0.954  # the median of |x - y| of two standard normal numbers
NORMAL_DEVIATION = 0.6745  # the median of |x| of one
LONGEST_STEP = 3.3  # deviations above the shortest step of its turn: 2 % of ordinary pairs are farther apart
LARGEST_DIFFERENCE = 2.5  # deviations, of the difference between two turns
NUM_DRAWS = 9_999  # orders drawn for a test
NO_SCALE = 1e-12

Turn = Sequence[float]  # times of the steps of one turn, in microseconds


def is_timed(turn: Turn | None) -> bool:
    """Return whether a turn holds times that can be compared: a clock may jump, and a step may take no time."""
    return bool(turn) and all(math.isfinite(step) and step > 0 for step in turn or ())


def step_deviation(turns: Sequence[Turn]) -> float:
    """Return the deviation of ordinary steps from each other as a share of a step, from neighbors within turns; 0 if
    unknown.
    """
    apart = [abs(math.log(one / other)) for turn in turns for one, other in pairwise(turn)]
    return statistics.median(apart) / NORMAL_DIFFERENCE if apart else 0.0


def log_time(turn: Turn, deviation: float) -> float:
    """Return the logarithm of a turn's typical step: the mean, with long steps trimmed to `LONGEST_STEP` above the
    shortest.
    """
    shortest = math.log(min(turn))
    longest = shortest + LONGEST_STEP * deviation if deviation else math.inf
    return statistics.fmean(min(math.log(step), longest) for step in turn)


def trimmed(differences: Sequence[float]) -> list[float]:
    """Return differences, trimmed to `LARGEST_DIFFERENCE` deviations in either direction."""
    most = LARGEST_DIFFERENCE * deviation_of(differences)
    return [max(-most, min(most, difference)) for difference in differences]


def deviation_of(differences: Sequence[float]) -> float:
    """Return the deviation of differences from zero, by the median of their sizes."""
    return statistics.median(map(abs, differences)) / NORMAL_DEVIATION if differences else 0.0


def mean_and_error(differences: Sequence[float]) -> tuple[float, float]:
    """Return the mean of differences after trimming around their median, and its standard error."""
    middle = statistics.median(differences)
    around = [middle + each for each in trimmed([difference - middle for difference in differences])]
    error = statistics.stdev(around) / math.sqrt(len(around)) if len(around) > 1 else math.inf
    return statistics.fmean(around), error


def chance(differences: Sequence[float], numbers: Sequence[int], rounds: Rounds, seed: int) -> float:
    """Return how likely differences this large are if the two variants are alike: the p-value of a randomization test.

    `differences` are in favor of the claim, by round; `numbers` are those of the rounds. Missing rounds must be missing
    independently of their order.
    """
    sizes = np.array(trimmed(differences))
    drawn_ways = np.array([1.0 if rounds.order(number)[0] == 0 else -1.0 for number in numbers])
    by_place = sizes * drawn_ways  # first turn against second: the same whatever order had been drawn
    sums = _draw_ways(numbers, rounds.block_rounds, np.random.default_rng(seed)) @ by_place
    found = float(np.sum(sizes))
    at_least = int(np.count_nonzero(sums >= found - NO_SCALE))
    return (1 + at_least) / (1 + NUM_DRAWS)  # the drawn order is one of them, so it is never 0 (Phipson and Smyth 2010)


def _draw_ways(
    numbers: Sequence[int], block_rounds: int, drawn: np.random.Generator
) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
    """Return orders of the rounds as they could have been: one row for each draw, 1 or -1 for each round."""
    block = np.array([1.0, -1.0] * (block_rounds // 2))
    columns = []
    for first in dict.fromkeys(number // block_rounds for number in numbers):
        places = [number % block_rounds for number in numbers if number // block_rounds == first]
        columns.append(drawn.permuted(np.tile(block, (NUM_DRAWS, 1)), axis=1)[:, places])
    return np.concatenate(columns, axis=1)


@final
class Wealth:
    """A bet that differences are above 0, round by round: the value of a stake of 1, at fair odds if they are not.

    Several bets run side by side, from careful to bold, and each starts anew at every check with a part of the stake, so
    that a change after a long good time is noticed as well. Starts that have lost nearly all are dropped.
    """

    BOLDNESS = (0.4, 0.8, 1.6, 3.2)
    LARGEST = 2.0  # deviations; what is larger counts as this
    RECENT = 64  # differences whose size sets the scale
    LOST = 1e-9

    def __init__(self) -> None:
        self._starts: list[list[float]] = []  # the winnings of each bet, for each start
        self._stakes: list[float] = []
        self._num_starts = 0
        self._sizes: list[float] = []

    def start(self) -> None:
        """Start anew beside the bets that run, with 1 / (k (k + 1)) of the stake at the k-th start; all parts sum to 1."""
        self._num_starts += 1
        kept = [number for number, bets in enumerate(self._starts) if max(bets) * self._stakes[number] > self.LOST]
        self._starts = [self._starts[number] for number in kept] + [[1.0] * len(self.BOLDNESS)]
        self._stakes = [self._stakes[number] for number in kept] + [1 / (self._num_starts * (self._num_starts + 1))]

    def add(self, difference: float, odds: float) -> None:
        """Take the result of a round: its difference, and how likely its order was to be drawn."""
        self._sizes = [*self._sizes[1 - self.RECENT :], abs(difference)]
        scale = statistics.median(self._sizes) / NORMAL_DEVIATION or NO_SCALE
        size = max(-self.LARGEST, min(self.LARGEST, difference / scale))
        for bets in self._starts:
            for number, boldness in enumerate(self.BOLDNESS):
                expected = 1 / (1 + math.exp(-2 * boldness * size))
                bets[number] *= expected / (odds * expected + (1 - odds) * (1 - expected))

    def total(self) -> float:
        """Return what the stake of 1 is worth now."""
        return sum(stake * statistics.fmean(bets) for stake, bets in zip(self._stakes, self._starts, strict=True))

    def best_start(self) -> float:
        """Return what a stake of 1 placed at the luckiest start is worth now. If it grows, evidence gathers."""
        return max((statistics.fmean(bets) for bets in self._starts), default=1.0)
