"""Chooses the graph of each replay: the planned one, except during the guard's checks, which alternate between both graphs.

A check costs no extra step: it times ordinary replays, the second of each turn, because the first brings the GPU to the
clocks and the temperature of its graph. Needs neither torch nor CUDA. `measurement.guard` decides which graph is faster,
and when that is certain.
"""

from collections.abc import Callable, Sequence
from typing import final

import msgspec

from counterpoint.errors import ArgumentError
from counterpoint.measurement.guard import LOOK_ROUNDS, Guard
from counterpoint.measurement.values import Order

TURN_REPLAYS = 2  # only the last of a turn is timed
LEAST_EVERY = 4 * TURN_REPLAYS * LOOK_ROUNDS  # so that the plan is in force for at least half of the time


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """Which graph the next replay launches, and whether the replay is timed."""

    is_planned: bool
    is_timed: bool = False


@final
class GuardedReplays:
    """Counts replays, and starts a check after each `every` of them; 0 for none. All ranks need the same seed."""

    def __init__(self, every: int, seed: int) -> None:
        if every and every < LEAST_EVERY:
            raise ArgumentError(f"guard_every must be 0 or at least {LEAST_EVERY} replays; found {every}.")
        self._every = every
        self._guard = Guard(seed)
        self._left = every  # replays until the next check
        self._turns: list[int] = []  # turns left of the check, first to last: 0 the original, 1 the plan
        self._order: Order | None = None
        self._place = 0  # position within the current turn

    @property
    def is_in_force(self) -> bool:
        """Whether replays outside of checks launch the planned graph."""
        return self._guard.is_in_force

    def next(self) -> Replay:
        """Return which graph the next replay launches, and whether it is timed."""
        if not self._every:
            return Replay(is_planned=True)
        if self._order is None and self._left == 0:
            self._begin(self._guard.look())
        if self._order is None:
            self._left -= 1
            return Replay(is_planned=self.is_in_force)
        self._place = (self._place + 1) % TURN_REPLAYS
        variant = self._turns[0] if self._place else self._turns.pop(0)
        return Replay(is_planned=bool(variant), is_timed=self._place == 0)

    def is_due(self) -> bool:
        """Return whether the latest replay ended a check's rounds, so that `judge` has to be called."""
        return self._order is not None and not self._turns

    def judge(self, times_us: Sequence[float], slowest_of: Callable[[Sequence[float]], Sequence[float]]) -> None:
        """Judge the timed replays of a check, in their order; `slowest_of` returns the slowest rank's times."""
        order = self._order
        assert order is not None, "only a look is judged"
        slowest, rounds = slowest_of(times_us), order.rounds()
        for number in range(order.num_rounds):
            row = [0.0, 0.0]
            for place, variant in enumerate(rounds.order(order.first_round + number)):
                row[variant] = slowest[2 * number + place]
            self._guard.add(order.first_round + number, [[time] for time in row])
        if self._guard.settle() == "go on":
            self._begin(self._guard.go_on())
        else:
            self._order, self._left = None, self._every * self._guard.looks_until_next

    def _begin(self, order: Order) -> None:
        rounds = order.rounds()
        self._order, self._place = order, 0
        self._turns = [variant for number in range(order.num_rounds) for variant in rounds.order(order.first_round + number)]
