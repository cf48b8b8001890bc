"""The guard of a plan: it removes a plan that is proven slower than the unmodified job, and restores it once it is
proven faster.

From time to time a *check* lets the plan and the unmodified job take turns. Each round is a bet that the plan is slower,
at the odds of its order. If the plan is not slower, the winnings of all checks of the job's life exceed 1 /
`GUARD_ERROR_RATE` in at most that share of all jobs (`evidence.Wealth`). While the winnings grow, a check goes on, so
that a slower plan is found within few checks. A removed plan is tried again much later, with the proof that a tuning
requires. Each removal and each retrial halves the error rate of the next one, so that the rates of all of them together
hold for life.
"""

from collections.abc import Sequence
from typing import Literal, final

from counterpoint.measurement.evidence import Turn, Wealth, is_timed, log_time, step_deviation
from counterpoint.measurement.proof import Proof
from counterpoint.measurement.values import (
    CHANGED_SHARE,
    ERROR_RATE,
    GUARD_ERROR_RATE,
    LONGER_STEP,
    Measurement,
    Order,
    summarize_turns,
)

LOOK_ROUNDS = 6
MOST_LOOK_ROUNDS = 96  # rounds of a check that goes on
SUSPICION = 1.5  # winnings from which a check goes on
RETRIAL_ROUNDS = 40
LOOKS_BEFORE_RETRIAL = 10  # twice as many each further time

Outcome = Literal["keep", "go on", "remove", "put back"]


@final
class Guard:
    """The evidence for and against one plan, over its life. Variant 0 is the unmodified job, variant 1 the plan."""

    def __init__(self, seed: int) -> None:
        self.is_in_force = True
        self._order = Order(number=-1, entrants=(0, 1), seed=seed, num_rounds=0)
        self._rounds = self._order.rounds()
        self._wealth = Wealth()
        self._look: list[tuple[Turn, Turn]] = []  # turns of the present check
        self._proof: Proof | None = None
        self._num_removals = self._num_retrials = 0

    def look(self) -> Order:
        """Return the first rounds of a new check, or of a retrial, if the plan was removed."""
        self._look = []
        if self.is_in_force:
            self._wealth.start()
            return self.go_on()
        order = self._give(RETRIAL_ROUNDS)
        self._num_retrials += 1
        self._proof = Proof(1, order, ERROR_RATE / 2**self._num_retrials)
        return order

    def go_on(self) -> Order:
        """Return more rounds for a check that goes on."""
        return self._give(LOOK_ROUNDS)

    def add(self, number: int, turns: Sequence[Turn | None]) -> None:
        """Add the turns of round `number`; a round that lacks one (None) is left out."""
        first, second = turns
        if first is None or second is None or not (is_timed(first) and is_timed(second)):
            return
        self._look.append((first, second))
        if self._proof is not None:
            self._proof.add(number, first, second)
            return
        deviation = step_deviation([turn for pair in self._look for turn in pair])
        self._wealth.add(log_time(second, deviation) - log_time(first, deviation), self._rounds.odds(number))

    def settle(self) -> Outcome:
        """Return the result of the check, once the requested rounds are in."""
        if self._proof is not None:
            self.is_in_force = self._proof.judge(is_over=True) == "proven"
            self._proof = None
            return "put back" if self.is_in_force else "keep"
        if self._wealth.total() >= 2**self._num_removals / GUARD_ERROR_RATE:
            self.is_in_force = False
            self._num_removals += 1
            self._wealth = Wealth()
            return "remove"
        is_suspicious = self._wealth.best_start() >= SUSPICION and len(self._look) >= LOOK_ROUNDS // 2
        return "go on" if is_suspicious and len(self._look) + LOOK_ROUNDS <= MOST_LOOK_ROUNDS else "keep"

    @property
    def looks_until_next(self) -> int:
        """Return the delay to the next check as a multiple of the usual interval: longer for a removed plan."""
        return 1 if self.is_in_force else LOOKS_BEFORE_RETRIAL * 2**self._num_retrials

    def measurements(self, labels: Sequence[str]) -> tuple[Measurement, ...]:
        """Return the times of the present check; none before its first round."""
        return summarize_turns(labels, [dict(enumerate(pair)) for pair in self._look])

    def _give(self, num_rounds: int) -> Order:
        last = self._order
        self._order = Order(
            number=last.number + 1,
            entrants=(0, 1),
            seed=last.seed,
            num_rounds=num_rounds,
            first_round=last.first_round + last.num_rounds,
        )
        return self._order


def is_longer_step(now_us: float, then_us: float) -> bool:
    """Return whether an unmodified step takes so much longer than when the job was tuned that it is another step."""
    return now_us > (1 + LONGER_STEP) * then_us


def are_other_launches(num_changed: int, num_launches: int) -> bool:
    """Return whether so many launches have other kernels or grids that the step is not the one that was tuned."""
    return num_changed > CHANGED_SHARE * num_launches
