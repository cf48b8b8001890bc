"""Which graph a guarded replay launches: both take turns in a look, as often as each other, and the rest is the plan's."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.cuda.guarded_replays import LEAST_EVERY, TURN_REPLAYS, GuardedReplays
from counterpoint.errors import ArgumentError
from counterpoint.measurement.guard import LOOK_ROUNDS


def replay(guarded: GuardedReplays, ratio: float, num_replays: int, noise: random.Random) -> int:
    """Replay a plan whose steps take `ratio` of the job's; how many of the replays were of the plan."""
    times: list[float] = []
    num_planned = 0
    for _ in range(num_replays):
        turn = guarded.next()
        num_planned += turn.is_planned
        if turn.is_timed:
            times.append(1000.0 * (ratio if turn.is_planned else 1.0) * math.exp(noise.gauss(0, 0.02)))
        if guarded.is_due():
            guarded.judge(times, lambda own: own)
            times = []
    return num_planned


@given(every=st.integers(LEAST_EVERY, 3 * LEAST_EVERY), seed=st.integers(0, 1000))
def test_a_look_times_both_graphs_equally_often_and_the_second_replay_of_each_turn(every: int, seed: int) -> None:
    guarded = GuardedReplays(every, seed)
    assert all(turn.is_planned and not turn.is_timed for turn in (guarded.next() for _ in range(every)))
    turns = []
    while not guarded.is_due():
        turns.append(guarded.next())
    assert len(turns) == 2 * TURN_REPLAYS * LOOK_ROUNDS
    assert sum(turn.is_planned for turn in turns) == len(turns) // 2
    assert [turn.is_timed for turn in turns] == [False, True] * (len(turns) // 2)
    assert all(first.is_planned is second.is_planned for first, second in zip(turns[::2], turns[1::2], strict=True))


def test_a_plan_that_pays_stays_in_force_and_one_that_is_slower_is_taken_out() -> None:
    paying, slower, noise = GuardedReplays(LEAST_EVERY, 1), GuardedReplays(LEAST_EVERY, 1), random.Random(1)
    assert replay(paying, 0.9, 100 * LEAST_EVERY, noise) >= 60 * LEAST_EVERY
    assert paying.is_in_force
    replay(slower, 1.05, 12 * LEAST_EVERY, noise)
    assert not slower.is_in_force
    assert not slower.next().is_planned


def test_a_plan_that_was_taken_out_comes_back_if_it_is_proven_faster() -> None:
    guarded, noise = GuardedReplays(LEAST_EVERY, 2), random.Random(2)
    while guarded.is_in_force:
        replay(guarded, 1.1, LEAST_EVERY, noise)
    replay(guarded, 0.9, 40 * LEAST_EVERY, noise)
    assert guarded.is_in_force


def test_the_slowest_ranks_times_decide() -> None:
    """This rank's times say that the plan pays; the slowest rank's say that it does not."""
    guarded, slowest = GuardedReplays(LEAST_EVERY, 3), random.Random(3)
    seen: list[bool] = []
    for _ in range(40 * LEAST_EVERY):
        turn = guarded.next()
        if turn.is_timed:
            seen.append(turn.is_planned)
        if guarded.is_due():
            theirs = [1000.0 * (1.1 if planned else 1.0) * math.exp(slowest.gauss(0, 0.02)) for planned in seen]
            guarded.judge([900.0 if planned else 1000.0 for planned in seen], lambda _, theirs=theirs: theirs)
            seen = []
        if not guarded.is_in_force:
            return
    pytest.fail("the slowest rank's times did not count")


def test_without_a_guard_every_replay_is_the_plans() -> None:
    guarded = GuardedReplays(0, 1)
    turns = [guarded.next() for _ in range(100)]
    assert all(turn.is_planned and not turn.is_timed for turn in turns)
    assert not guarded.is_due()


@pytest.mark.parametrize("every", [-1, 1, LEAST_EVERY - 1])
def test_a_guard_that_would_look_more_than_half_of_the_time_is_refused(every: int) -> None:
    with pytest.raises(ArgumentError, match=rf"0 or at least {LEAST_EVERY} replays; found {every}"):
        GuardedReplays(every, 1)
