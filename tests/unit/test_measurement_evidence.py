"""What turns prove: a test that counts the orders that could have been drawn, however times are disturbed."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.measurement.evidence import Wealth, chance, is_timed, log_time, step_deviation, trimmed
from counterpoint.measurement.orders import Rounds


@pytest.mark.parametrize("turn", [None, (), (0.0, 1.0), (-1.0,), (math.nan,), (1.0, math.inf)])
def test_turns_that_a_clock_cannot_have_measured_are_none(turn: tuple[float, ...] | None) -> None:
    assert not is_timed(turn)
    assert is_timed((1.0, 2.0))


def test_long_steps_are_trimmed_to_what_ordinary_steps_differ_by() -> None:
    noise = random.Random(1)
    turns = [[math.exp(noise.gauss(0, 0.01)) for _ in range(2)] for _ in range(200)]
    deviation = step_deviation(turns)
    assert deviation == pytest.approx(0.01, rel=0.2)
    assert log_time((1.0, 3.0), deviation) < 0.02  # a mean of logarithms would say 0.55
    assert log_time((1.0, 1.01), deviation) == pytest.approx(math.log(1.01) / 2)


def test_without_neighbours_nothing_is_trimmed() -> None:
    assert step_deviation([(1.0,), (5.0,)]) == 0.0
    assert log_time((5.0,), 0.0) == pytest.approx(math.log(5.0))


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=20))
def test_trimming_treats_both_directions_alike(differences: list[float]) -> None:
    assert trimmed([-each for each in differences]) == [-each for each in trimmed(differences)]


@pytest.mark.parametrize("seed", range(5))
def test_the_chance_is_the_share_of_orders_that_would_show_as_much(seed: int) -> None:
    """Against the definition: all orders of a block of 8 rounds, counted."""
    rounds, noise = Rounds(seed, 2), random.Random(seed)
    differences = [noise.gauss(0.4, 1.0) for _ in range(8)]
    slots = [each * (1 if rounds.order(number)[0] == 0 else -1) for number, each in enumerate(trimmed(differences))]
    sums = [
        sum(slot * (1 if number in firsts else -1) for number, slot in enumerate(slots))
        for firsts in itertools.combinations(range(8), 4)
    ]
    expected = sum(each >= sum(trimmed(differences)) - 1e-9 for each in sums) / len(sums)
    assert chance(differences, range(8), rounds, seed) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("period", [2, 3, 5, 8, 12, 24])
def test_a_disturbance_with_a_period_is_no_evidence(period: int) -> None:
    """Turn by turn, every so manieth takes half as long again; the two variants are alike."""
    found = 0
    for seed in range(300):
        rounds, drawn = Rounds(seed, 2), random.Random(seed)
        phase, differences = drawn.randrange(period), []
        for number in range(16):
            logs = [0.0, 0.0]
            for place, variant in enumerate(rounds.order(number)):
                logs[variant] = drawn.gauss(0, 0.01) + 0.4 * ((2 * number + place) % period == phase)
            differences.append(logs[0] - logs[1])
        found += chance(differences, range(16), rounds, seed) <= 0.05
    assert found <= 0.09 * 300


def bet(difference: float, seed: int, num_rounds: int, num_looks: int = 1) -> float:
    """The most that a stake of 1 ever became over rounds whose noise is 1."""
    rounds, noise, wealth, most = Rounds(seed, 2), random.Random(seed), Wealth(), 0.0
    for number in range(num_rounds):
        if number % (num_rounds // num_looks) == 0:
            wealth.start()
        sign = 1 if rounds.order(number)[0] == 0 else -1
        wealth.add(difference + sign * noise.gauss(0, 1), rounds.odds(number))
        most = max(most, wealth.total())
    return most


def test_a_bet_on_nothing_seldom_wins_in_all_its_life() -> None:
    assert sum(bet(0.0, seed, 400, 20) >= 20 for seed in range(200)) <= 0.05 * 200
    assert sum(bet(-0.3, seed, 400, 20) >= 20 for seed in range(200)) <= 1


def test_a_bet_on_something_wins_soon_and_after_a_long_good_time_too() -> None:
    assert sum(bet(0.8, seed, 60) >= 200 for seed in range(50)) >= 45
    wealth, rounds = Wealth(), Rounds(3, 2)
    for number in range(2000):
        if number % 10 == 0:
            wealth.start()
        wealth.add(random.Random(number).gauss(-1.0 if number < 1900 else 1.5, 1), rounds.odds(number))
    assert wealth.total() >= 200
