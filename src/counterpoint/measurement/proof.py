"""Tests one candidate against the baseline alone: is it faster, and would more rounds tell?

The randomization test of `evidence.py` is made at a few numbers of rounds that are fixed before the first, and at the last.
They share the error rate equally (Bonferroni), so looking early costs little, and a large gain is found early.
"""

import math
from collections.abc import Iterator
from statistics import NormalDist
from typing import Literal, final

from counterpoint.measurement.evidence import Turn, chance, log_time, mean_and_error, step_deviation
from counterpoint.measurement.values import LEAST_GAIN, Order

LEAST_PROOF_ROUNDS = 11  # fewer rounds have too few possible orders to prove anything
FIRST_LOOK = 14  # rounds before the first test
LOOK_GROWTH = 1.4  # from the rounds before a test to those before the next
LAST_BUT_ONE = 0.85  # share of all rounds after which the last test but one comes
SURE = 2.5  # standard errors

State = Literal["open", "proven", "given up"]


@final
class Proof:
    """The rounds of one order, and what they prove within an error rate. `gain` and `needed_gain` are logarithms."""

    def __init__(self, candidate: int, order: Order, error_rate: float) -> None:
        self.candidate = candidate
        self.pairs: list[tuple[Turn, Turn]] = []  # the baseline's turn and the candidate's
        self.is_proven, self.gain, self.needed_gain = False, 0.0, 0.0
        self._order, self._rounds, self._numbers = order, order.rounds(), list[int]()
        self._looks = list(_looks(order.num_rounds))
        self._error_rate = error_rate / (len(self._looks) + 1)  # one more at the end

    def add(self, number: int, baseline: Turn, candidate: Turn) -> None:
        """Add the turns of round `number`."""
        self.pairs.append((baseline, candidate))
        self._numbers.append(number)

    def judge(self, *, is_over: bool) -> State:
        """Return the present verdict: tested if a test is due or all rounds are over."""
        is_due = bool(self._looks) and len(self.pairs) >= self._looks[0]
        if not (is_due or is_over):
            return "open"
        self._looks = [look for look in self._looks if look > len(self.pairs)]
        if len(self.pairs) < LEAST_PROOF_ROUNDS:
            return "given up"
        deviation = step_deviation([turn for pair in self.pairs for turn in pair])
        differences = [log_time(first, deviation) - log_time(second, deviation) for first, second in self.pairs]
        self.gain, error = mean_and_error(differences)
        likely = NormalDist().inv_cdf(1 - self._error_rate)
        self.needed_gain = likely * error
        if self.gain >= -math.log1p(-LEAST_GAIN):
            seed = self._order.seed + len(self.pairs)
            self.is_proven = chance(differences, self._numbers, self._rounds, seed) <= self._error_rate
        if self.is_proven:
            return "proven"
        return "given up" if is_over or self._is_hopeless(error, likely) else "open"

    def _is_hopeless(self, error: float, likely: float) -> bool:
        """Return whether the gain is surely too small, or would not be proven by the end even if it were a little
        larger.
        """
        at_the_end = error * math.sqrt(len(self.pairs) / self._order.num_rounds)
        return self.gain + SURE * error < LEAST_GAIN or self.gain + error < likely * at_the_end


def _looks(num_rounds: int) -> Iterator[int]:
    """Yield the numbers of rounds at which to test before all are over."""
    look = FIRST_LOOK
    while look < LAST_BUT_ONE * num_rounds:
        yield look
        look = math.ceil(LOOK_GROWTH * look)
