"""One rank's part of an order of turns: the table of each step, and the times of the steps.

A turn is a few steps under one table. Its first step is not timed, because launches of two tables may meet in it. Every
step's end is marked in the GPU's own order of work, so a step's time is its execution time: the marks are read when the GPU
has passed them. A rank that reads of an order late joins in the middle, and the rounds that it missed count on no rank.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, final

from counterpoint.measurement.values import Order
from counterpoint.supervised.running_job import AbstractStepClock

TURN_STEPS = 3  # steps of a turn; the first is not timed
# Before anything is timed, each path runs for this many turns: the job compiles for it, torch's allocator settles on
# addresses, and operators record their calls at these (2 H200s, torchtitan: 129, 151, 123, then 109 and 106 ms)
PATH_WARM_UP_TURNS = 3
TurnTimes = tuple[float, ...] | None  # times of the timed steps, in microseconds; None for a turn that this rank missed


@final
class Turns:
    """The turns of one order, which begins when `start_step` steps have ended."""

    def __init__(self, order: Order, start_step: int, clock: AbstractStepClock) -> None:
        self._order, self._start, self._clock = order, start_step, clock
        self._rounds = order.rounds()
        self._marks: dict[tuple[int, int], list[Any]] = {}  # by round and place in it
        self._next_round = 0  # the first one that was not read yet

    @property
    def end_step(self) -> int:
        """The number of steps that have ended when the last turn is over."""
        return self._start + self._order.num_rounds * len(self._order.entrants) * TURN_STEPS

    def entrant_at(self, step: int) -> int | None:
        """Return whose step begins when `step` steps have ended: an index into the order's entrants; None if nobody's."""
        if not self._start <= step < self.end_step:
            return None
        number, place, _ = self._place_of(step)
        return self._rounds.order(self._order.first_round + number)[place]

    def is_first_of_turn(self, step: int) -> bool:
        """Return whether the step that begins when `step` have ended, which is somebody's, is the first of a turn."""
        _, _, within = self._place_of(step)
        return within == 0

    def step_ended(self, step: int) -> bool:
        """Mark the end of a step, the `step`-th. Return whether it was the last one of a turn."""
        if not self._start < step <= self.end_step:
            return False
        number, place, within = self._place_of(step - 1)
        if within == 0:
            self._marks[number, place] = []
        marks = self._marks.get((number, place))
        if marks is not None:
            marks.append(self._clock.mark())
        return within == TURN_STEPS - 1

    def read(self, step: int) -> list[tuple[int, tuple[TurnTimes, ...]]]:
        """Return the rounds that the GPU has finished since the last call, with the turns of each by entrant. Never
        waits.
        """
        found = []
        while self._next_round < self._order.num_rounds and step >= self._end_of_round(self._next_round):
            turns = self._read_round(self._next_round)
            if turns is None:
                break
            found.append((self._order.first_round + self._next_round, turns))
            self._next_round += 1
        return found

    def is_read(self) -> bool:
        """Return whether all rounds were read."""
        return self._next_round == self._order.num_rounds

    def _place_of(self, step: int) -> tuple[int, int, int]:
        """Return round, position in it and step of the turn, for the step that begins when `step` have ended."""
        turn, within = divmod(step - self._start, TURN_STEPS)
        number, place = divmod(turn, len(self._order.entrants))
        return number, place, within

    def _end_of_round(self, number: int) -> int:
        return self._start + (number + 1) * len(self._order.entrants) * TURN_STEPS

    def _read_round(self, number: int) -> tuple[TurnTimes, ...] | None:
        """Return the turns of a round by entrant; None while the GPU has not finished them."""
        turns: list[TurnTimes] = [None] * len(self._order.entrants)
        for place, entrant in enumerate(self._rounds.order(self._order.first_round + number)):
            marks = self._marks.get((number, place), [])
            if len(marks) < TURN_STEPS:
                continue  # this rank was late
            times = self._times(marks)
            if times is None:
                return None
            turns[entrant] = times
        for place in range(len(turns)):
            self._marks.pop((number, place), None)
        return tuple(turns)

    def _times(self, marks: Sequence[Any]) -> tuple[float, ...] | None:
        times = [self._clock.elapsed_us(start, end) for start, end in pairwise(marks)]
        return None if None in times else tuple(time for time in times if time is not None)


def slowest_rank(by_rank: Sequence[Sequence[TurnTimes]]) -> list[TurnTimes]:
    """Return the slowest rank's time of every step of the turns of one round; None for a turn that some rank missed."""
    slowest: list[TurnTimes] = []
    for turns in zip(*by_rank, strict=True):
        timed = [turn for turn in turns if turn is not None]
        slowest.append(tuple(map(max, zip(*timed, strict=True))) if len(timed) == len(turns) else None)
    return slowest
