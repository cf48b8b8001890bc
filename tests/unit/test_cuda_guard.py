"""The guard of a plan in force: which replays it times, and when it calls a plan slower."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.cuda.guard import GUARD_PAIRS, TOLERANCE, Guard, is_slower
from counterpoint.errors import EngagementError


@given(every=st.integers(2 * GUARD_PAIRS, 50), num_periods=st.integers(1, 4))
def test_each_period_times_as_many_originals_as_planned_and_is_due_once_after_them(every: int, num_periods: int) -> None:
    guard = Guard(every)
    for _ in range(num_periods):
        turns, dues = [], []
        for _ in range(every):
            turns.append(guard.next_turn())
            dues.append(guard.is_due())
        assert turns.count("original") == turns.count("planned") == GUARD_PAIRS
        assert dues.count(True) == 1
        assert turns[: dues.index(True) + 1].count("untimed") == 0


def test_without_a_period_nothing_is_timed() -> None:
    guard = Guard(0)
    assert {guard.next_turn() for _ in range(100)} == {"untimed"}
    assert not guard.is_due()


def test_a_period_shorter_than_the_timed_replays_is_refused() -> None:
    with pytest.raises(EngagementError, match=r"0 or at least 10; found 9"):
        Guard(9)


def test_a_plan_within_the_tolerance_is_kept() -> None:
    assert not is_slower([100.0] * 5, [100.0 * (1 + TOLERANCE)] * 5, lambda value: value)
    assert is_slower([100.0] * 5, [100.1 * (1 + TOLERANCE)] * 5, lambda value: value)


def test_one_disturbed_replay_does_not_decide() -> None:
    assert not is_slower([100.0] * 5, [100.0, 100.0, 900.0, 100.0, 100.0], lambda value: value)


def test_the_slowest_rank_decides() -> None:
    others = iter([150.0, 140.0])  # another rank's medians, planned first
    assert is_slower([100.0] * 5, [90.0] * 5, lambda value: max(value, next(others)))
