"""The judge of candidates: noise seldom wins whatever its kind, gains are found, and turns go where they are needed."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from counterpoint.measurement.proof import LEAST_PROOF_ROUNDS
from counterpoint.measurement.tournament import Tournament, compare, least_turns, num_admitted
from counterpoint.measurement.values import ERROR_RATE, LEAST_GAIN, Comparison, Order, Verdict

Noise = Callable[[random.Random], Callable[[int], float]]  # of a turn, by its number


def quiet(_drawn: random.Random) -> Callable[[int], float]:
    return lambda turn: 1.0


def lognormal(sigma: float) -> Noise:
    return lambda drawn: lambda turn: math.exp(drawn.gauss(0, sigma))


def periodic(period: int) -> Noise:
    def make(drawn: random.Random) -> Callable[[int], float]:
        phase = drawn.randrange(period)
        return lambda turn: math.exp(drawn.gauss(0, 0.01)) * (1 + 0.2 * (turn % period == phase))

    return make


def wandering(drawn: random.Random) -> Callable[[int], float]:
    level = [0.0]

    def noise(turn: int) -> float:
        level[0] = 0.95 * level[0] + drawn.gauss(0, 0.01)
        return math.exp(level[0])

    return noise


def compared(times_us: list[float], noise: Noise, seed: int, num_rounds: int = 15) -> Comparison:
    disturb, turns = noise(random.Random(seed)), iter(range(1 << 30))
    labels = [f"variant {number}" for number in range(len(times_us))]
    return compare(labels, lambda variant: times_us[variant] * disturb(next(turns)), num_rounds, seed)


@pytest.mark.parametrize("noise", [lognormal(0.03), periodic(6), periodic(12), wandering])
@pytest.mark.parametrize("num_candidates", [1, 6])
def test_noise_alone_seldom_wins(noise: Noise, num_candidates: int) -> None:
    gains = sum(compared([1000.0] * (num_candidates + 1), noise, seed).chosen > 0 for seed in range(100))
    assert gains <= 3, f"more than {ERROR_RATE:.1%} by far"


@pytest.mark.parametrize("num_candidates", [1, 6])
def test_a_gain_is_found_among_others(num_candidates: int) -> None:
    times_us = [1000.0] * (num_candidates + 1)
    times_us[num_candidates] = 950.0
    found = [compared(times_us, lognormal(0.02), seed, num_rounds=25).chosen for seed in range(40)]
    assert found.count(num_candidates) >= 37


@settings(max_examples=60, deadline=None)
@example(times=[541.0, 913.0, 535.0, 535.0, 862.0, 913.0, 913.0], seed=0)
@given(times=st.lists(st.floats(500.0, 1500.0), min_size=1, max_size=7), seed=st.integers(0, 1000))
def test_without_noise_the_fastest_or_one_as_good_is_chosen_if_it_gains_enough(times: list[float], seed: int) -> None:
    found = compared([1000.0, *times], quiet, seed)
    fastest = min(times)
    if fastest < 1000.0 * (1 - LEAST_GAIN) - 1e-6:
        assert found.measurements[found.chosen].median_us <= 1.02 * fastest  # the heat estimates gains to about 1 %
        assert found.verdict.reason == "proven"
    elif fastest > 1000.0 * (1 - LEAST_GAIN) + 1e-6:
        assert found.chosen == 0
    assert [row.label for row in found.measurements] == [f"variant {number}" for number in range(len(times) + 1)]


def test_a_large_gain_is_found_before_the_turns_are_used_up() -> None:
    turns: list[int] = []
    noise = lognormal(0.01)(random.Random(1))

    def run(variant: int) -> float:
        turns.append(variant)
        return (700.0 if variant == 3 else 1000.0) * noise(0)

    assert compare("abcdef", run, num_rounds=60, seed=5).chosen == 3
    assert len(turns) < 0.4 * 60 * 6


def test_turns_go_to_candidates_that_are_still_in_question() -> None:
    turns: list[int] = []

    def run(variant: int) -> float:
        turns.append(variant)
        return {1: 1300.0, 2: 980.0, 3: 985.0}.get(variant, 1000.0) * math.exp(random.Random(len(turns)).gauss(0, 0.02))

    compare("abcd", run, num_rounds=40, seed=2)
    assert turns.count(1) < 0.5 * max(turns.count(2), turns.count(3))


def test_candidates_that_are_all_slower_end_it_after_the_heat() -> None:
    found = compared([1000.0, 1100.0, 1200.0], lognormal(0.005), 1)
    assert (found.chosen, found.verdict.reason) == (0, "no faster")
    assert found.describe() == "no candidate was faster; leave it as it is"


@given(num_candidates=st.integers(0, 12), num_turns=st.integers(0, 400), answer_turns=st.integers(0, 10))
def test_as_many_candidates_are_admitted_as_leave_a_proof_its_rounds(
    num_candidates: int, num_turns: int, answer_turns: int
) -> None:
    admitted = num_admitted(num_candidates, num_turns, answer_turns)
    assert admitted <= num_candidates
    assert not admitted or least_turns(admitted, answer_turns) <= num_turns
    assert admitted == num_candidates or least_turns(admitted + 1, answer_turns) > num_turns


@settings(max_examples=40, deadline=None)
@given(num_candidates=st.integers(1, 8), spare=st.integers(0, 200), seed=st.integers(0, 1000))
def test_no_more_turns_are_given_than_there_are(num_candidates: int, spare: int, seed: int) -> None:
    num_turns, used, noise = least_turns(num_candidates) + spare, 0, random.Random(seed)
    tournament = Tournament(num_candidates + 1, seed)
    given_order = tournament.begin(num_turns)
    while isinstance(given_order, Order):
        order, number, answer = given_order, 0, None
        while answer is None:
            used += len(order.entrants)
            tournament.add(order.number, number, [[noise.gauss(1000, 30), 1000.0] for _ in order.entrants])
            number += 1
            answer = tournament.next(num_turns - used, is_over=number == order.num_rounds)
        given_order = answer
    assert used <= num_turns
    assert isinstance(given_order, Verdict)


def test_too_few_turns_prove_nothing_and_say_so() -> None:
    assert Tournament(3, 1).begin(least_turns(2) - 1) == Verdict(chosen=0, best=0, reason="too few rounds")
    assert Tournament(1, 1).begin(1000) == Verdict(chosen=0, best=0, reason="no candidate")


def test_rounds_that_miss_a_turn_are_left_out_and_a_proof_without_enough_of_them_is_given_up() -> None:
    tournament = Tournament(2, 1)
    order = tournament.begin(2 * LEAST_PROOF_ROUNDS)
    assert isinstance(order, Order)
    for number in range(order.num_rounds):
        tournament.add(order.number, number, [[1000.0], None if number == 3 else [500.0]])
    verdict = tournament.next(0, is_over=True)
    assert isinstance(verdict, Verdict)
    assert verdict.chosen == 0
    assert tournament.measurements("ab")[1].num_rounds == order.num_rounds - 1


def test_rounds_of_an_order_before_are_not_counted() -> None:
    tournament = Tournament(2, 1)
    order = tournament.begin(40)
    assert isinstance(order, Order)
    tournament.add(order.number - 1, 0, [[1.0], [1.0]])
    assert tournament.measurements("ab") == ()


def test_times_that_no_clock_measures_are_left_out() -> None:
    tournament = Tournament(2, 1)
    order = tournament.begin(60)
    assert isinstance(order, Order)
    for number, bad in enumerate([0.0, -1.0, math.nan, math.inf]):
        tournament.add(order.number, number, [[1000.0], [bad]])
    assert tournament.measurements("ab") == ()


def test_a_candidate_that_nobody_had_time_to_prove_is_not_called_slow() -> None:
    """The first of two that look alike in the heat turns out to be no faster, and no turns are left for the second."""
    tournament = Tournament(3, seed=1)
    order = tournament.begin(least_turns(2))
    assert isinstance(order, Order)
    for number in range(order.num_rounds):
        tournament.add(order.number, number, [[1000.0 + 40 * number], [900.0], [890.0 + 60 * number]])
    order = tournament.next(2 * LEAST_PROOF_ROUNDS, is_over=True)
    assert isinstance(order, Order)
    (first,) = order.entrants[1:]
    for number in range(order.num_rounds):
        tournament.add(order.number, number, [[1000.0], [1001.0]])
    verdict = tournament.next(0, is_over=True)
    assert isinstance(verdict, Verdict)
    assert (verdict.chosen, verdict.best, verdict.reason) == (0, 3 - first, "not proven")
