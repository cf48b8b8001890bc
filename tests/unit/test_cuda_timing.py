"""The measurement protocol: warm-up, a fresh order in each round, and figures that agree with those of numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.cuda.timing import NUM_FINALISTS, WARM_UP_ROUNDS, Measurement, measure_in_heats, measure_interleaved

Rounds = list[list[float]]


def measured(rounds: Rounds, warm_up: float = 1e4) -> tuple[Measurement, ...]:
    """Measure where candidate c takes rounds[r][c] in round r, after warm-up rounds that take `warm_up`."""
    num_candidates = len(rounds[0])
    seen = [0] * num_candidates

    def run(candidate: int) -> float:
        number = seen[candidate] - WARM_UP_ROUNDS
        seen[candidate] += 1
        return rounds[number][candidate] if number >= 0 else warm_up

    labels = [f"candidate {number}" for number in range(num_candidates)]
    return measure_interleaved(labels, run, len(rounds))


def order_of_runs(num_candidates: int, num_rounds: int) -> list[list[int]]:
    """Which candidate ran when, by round, warm-up included."""
    runs: list[int] = []

    def run(candidate: int) -> float:
        runs.append(candidate)
        return 1.0

    measure_interleaved(["any"] * num_candidates, run, num_rounds)
    return [runs[start : start + num_candidates] for start in range(0, len(runs), num_candidates)]


def tables(min_rounds: int, max_rounds: int = 9) -> st.SearchStrategy[Rounds]:
    time_us = st.floats(1.0, 1e5)
    return st.tuples(st.integers(1, 5), st.integers(min_rounds, max_rounds)).flatmap(
        lambda size: st.lists(st.lists(time_us, min_size=size[0], max_size=size[0]), min_size=size[1], max_size=size[1])
    )


@pytest.mark.parametrize("num_candidates", [1, 2, 3, 5])
def test_every_candidate_runs_once_in_every_round(num_candidates: int) -> None:
    rounds = order_of_runs(num_candidates, 10)
    assert len(rounds) == WARM_UP_ROUNDS + 10
    assert all(sorted(order) == list(range(num_candidates)) for order in rounds)


def test_one_round_warms_up_what_takes_long() -> None:
    runs: list[int] = []
    measure_interleaved(["any"] * 2, lambda candidate: runs.append(candidate) or 6e5, 5)
    assert len(runs) == 2 * (1 + 5)


@pytest.mark.parametrize("num_candidates", [2, 3, 5])
def test_no_candidate_has_the_same_place_or_the_same_predecessor_in_most_rounds(num_candidates: int) -> None:
    rounds = order_of_runs(num_candidates, 200)
    for candidate in range(num_candidates):
        places = [order.index(candidate) for order in rounds]
        before = [rounds[0][0], *(candidate for order in rounds for candidate in order)]
        predecessors = [before[number] for number, ran in enumerate(before[1:]) if ran == candidate]
        assert max(places.count(place) for place in range(num_candidates)) < 1.4 * len(rounds) / num_candidates
        assert max(predecessors.count(other) for other in range(num_candidates)) < 1.7 * len(rounds) / num_candidates


def test_the_order_is_the_same_on_every_rank_and_every_time() -> None:
    assert order_of_runs(5, 20) == order_of_runs(5, 20)


def test_warm_up_rounds_do_not_count() -> None:
    baseline, other = measured([[100.0, 50.0]] * 5, warm_up=1e5)
    assert (baseline.median_us, other.median_us, other.least_us, other.ratio) == (100.0, 50.0, 50.0, 0.5)
    assert {baseline.num_rounds, other.num_rounds} == {5}


@given(tables(min_rounds=4))
def test_figures_agree_with_numpy(rounds: Rounds) -> None:
    table = np.array(rounds)
    found = measured(rounds)
    for candidate, measurement in enumerate(found):
        times = table[:, candidate]
        ratios = times / (table[:, 0] if candidate else np.median(times))
        first, third = np.quantile(ratios, [0.25, 0.75], method="weibull")
        assert measurement.label == f"candidate {candidate}"
        assert measurement.median_us == pytest.approx(np.median(times))
        assert measurement.least_us == times.min()
        assert measurement.ratio == pytest.approx(np.median(ratios))
        assert measurement.spread == pytest.approx((third - first) / 2, rel=1e-9, abs=1e-12)


@given(tables(min_rounds=2, max_rounds=3))
def test_with_fewer_than_four_rounds_the_spread_is_the_whole_range(rounds: Rounds) -> None:
    for candidate, measurement in enumerate(measured(rounds)[1:], start=1):
        ratios = [times[candidate] / times[0] for times in rounds]
        assert measurement.spread == max(ratios) - min(ratios)


@given(tables(min_rounds=4))
def test_the_baseline_is_neither_faster_nor_slower_than_itself(rounds: Rounds) -> None:
    baseline = measured(rounds)[0]
    assert baseline.ratio == pytest.approx(1.0)
    assert not baseline.is_faster()
    assert not baseline.is_slower()


@given(st.lists(st.floats(0.5, 2.0), min_size=4, max_size=12))
def test_clocks_that_drift_between_rounds_do_not_touch_the_ratio(drift: list[float]) -> None:
    _, other = measured([[100.0 * factor, 90.0 * factor] for factor in drift])
    assert other.ratio == pytest.approx(0.9)
    assert other.spread == pytest.approx(0.0, abs=1e-9)
    assert other.is_faster()


def test_one_disturbed_round_in_fifteen_changes_neither_ratio_nor_spread() -> None:
    _, other = measured([[100.0, 80.0]] * 7 + [[100.0, 5000.0]] + [[100.0, 80.0]] * 7)
    assert (other.ratio, other.spread, other.least_us) == (0.8, 0.0, 80.0)


@pytest.mark.parametrize(
    ("ratio", "spread", "is_faster", "is_slower"),
    [
        (0.95, 0.04, True, False),
        (0.95, 0.0625, False, False),
        (0.75, 0.25, False, False),
        (1.0, 0.0, False, False),
        (1.25, 0.25, False, False),
        (1.05, 0.04, False, True),
        (1.0, 0.5, False, False),
    ],
)
def test_only_a_difference_beyond_the_spread_counts(ratio: float, spread: float, is_faster: bool, is_slower: bool) -> None:
    found = Measurement(label="any", median_us=1.0, least_us=1.0, ratio=ratio, spread=spread, num_rounds=15)
    assert (found.is_faster(), found.is_slower()) == (is_faster, is_slower)


def test_an_error_of_a_run_is_not_swallowed() -> None:
    def run(candidate: int) -> float:
        return 1.0 / (1 - candidate)

    with pytest.raises(ZeroDivisionError):
        measure_interleaved(["good", "bad"], run)


def test_only_the_fastest_of_the_heat_and_the_baseline_go_to_the_final() -> None:
    times = [100.0, 140.0, 90.0, 120.0, 80.0, 130.0]
    found = measure_in_heats([str(time) for time in times], lambda candidate: times[candidate], 9)
    assert [row.median_us for row in found] == times
    assert [row.num_rounds for row in found] == [9, 5, 9, 9, 9, 5]


@given(st.integers(1, 8), st.integers(1, 9))
def test_a_final_holds_no_more_than_the_baseline_and_its_finalists(num_candidates: int, num_rounds: int) -> None:
    found = measure_in_heats(["any"] * num_candidates, lambda candidate: 100.0 + candidate, num_rounds)
    assert len(found) == num_candidates
    heat = -(-num_rounds // 2)
    expected = [num_rounds if number <= NUM_FINALISTS else heat for number in range(num_candidates)]
    assert [row.num_rounds for row in found] == expected
