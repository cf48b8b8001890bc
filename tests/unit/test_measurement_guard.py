"""The guard: it keeps a plan that pays for life, finds one that does not within few looks, and tries it again."""

import math
import random

import pytest

from counterpoint.measurement.guard import LOOK_ROUNDS, MOST_LOOK_ROUNDS, Guard, are_other_launches, is_longer_step
from counterpoint.measurement.values import Order


def look(guard: Guard, ratio: float, noise: random.Random) -> tuple[str, int]:
    """One whole look at a plan whose steps take `ratio` of the job's: the outcome, and its rounds."""
    order, outcome, num_rounds = guard.look(), "go on", 0
    while outcome == "go on":
        assert isinstance(order, Order)
        for number in range(order.first_round, order.first_round + order.num_rounds):
            turns = [[1000.0 * factor * math.exp(noise.gauss(0, 0.03)) for _ in range(2)] for factor in (1.0, ratio)]
            guard.add(number, turns)
        num_rounds += order.num_rounds
        outcome = guard.settle()
        order = guard.go_on() if outcome == "go on" else order
    return outcome, num_rounds


def life(ratio: float, seed: int, num_looks: int) -> int:
    """The look that removed the plan, or 0."""
    guard, noise = Guard(seed), random.Random(seed)
    return next((number for number in range(1, num_looks + 1) if look(guard, ratio, noise)[0] == "remove"), 0)


def test_a_plan_that_pays_stays_in_force_for_life() -> None:
    assert sum(life(0.995, seed, 60) > 0 for seed in range(40)) == 0


def test_a_plan_that_is_slower_is_removed_within_six_looks() -> None:
    assert sum(life(1.02, seed, 6) > 0 for seed in range(60)) >= 56


def test_a_look_goes_on_while_evidence_gathers_and_not_for_ever() -> None:
    guard, noise = Guard(2), random.Random(2)
    rounds = [look(guard, 1.006, noise)[1] for _ in range(20)]
    assert min(rounds) == LOOK_ROUNDS < max(rounds) <= MOST_LOOK_ROUNDS


def test_a_plan_that_was_removed_is_tried_again_later_and_comes_back_if_it_is_proven_faster() -> None:
    guard, noise = Guard(3), random.Random(3)
    while look(guard, 1.1, noise)[0] != "remove":
        pass
    waiting = guard.looks_until_next
    assert waiting > 1
    assert look(guard, 1.1, noise)[0] == "keep"
    assert not guard.is_in_force
    assert guard.looks_until_next > waiting, "each time it is tried again later"
    assert look(guard, 0.9, noise)[0] == "put back"
    assert guard.is_in_force
    assert guard.looks_until_next == 1


def test_rounds_without_times_are_no_evidence() -> None:
    guard = Guard(1)
    order = guard.look()
    for number in range(order.num_rounds):
        guard.add(number, [None, [1.0]])
    assert guard.settle() == "keep"
    assert guard.measurements("ab") == ()


@pytest.mark.parametrize(("now_us", "is_longer"), [(1000.0, False), (1100.0, False), (1100.1, True)])
def test_a_step_is_another_once_it_takes_a_tenth_longer(now_us: float, is_longer: bool) -> None:
    assert is_longer_step(now_us, 1000.0) is is_longer


def test_a_tenth_of_other_launches_is_another_job() -> None:
    assert not are_other_launches(10, 100)
    assert are_other_launches(11, 100)
    assert not are_other_launches(0, 0)
