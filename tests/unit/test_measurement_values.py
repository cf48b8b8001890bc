"""What rounds of times say: figures that agree with those of numpy, and the sentence on a verdict."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.measurement.tournament import WARM_UP_ROUNDS, measure_rounds
from counterpoint.measurement.values import LEAST_GAIN, Measurement, Verdict, describe, summarize_rounds

Rounds = list[list[float]]


def measured(rounds: Rounds) -> tuple[Measurement, ...]:
    return summarize_rounds([f"variant {number}" for number in range(len(rounds[0]))], rounds)


def tables(min_rounds: int, max_rounds: int = 9) -> st.SearchStrategy[Rounds]:
    time_us = st.floats(1.0, 1e5)
    return st.tuples(st.integers(1, 5), st.integers(min_rounds, max_rounds)).flatmap(
        lambda size: st.lists(st.lists(time_us, min_size=size[0], max_size=size[0]), min_size=size[1], max_size=size[1])
    )


@given(tables(min_rounds=4))
def test_figures_agree_with_numpy(rounds: Rounds) -> None:
    table = np.array(rounds)
    for variant, measurement in enumerate(measured(rounds)):
        times = table[:, variant]
        ratios = times / (table[:, 0] if variant else np.median(times))
        first, third = np.quantile(ratios, [0.25, 0.75], method="weibull")
        assert measurement.label == f"variant {variant}"
        assert measurement.median_us == pytest.approx(np.median(times))
        assert measurement.least_us == times.min()
        assert measurement.ratio == pytest.approx(np.median(ratios))
        assert measurement.spread == pytest.approx((third - first) / 2, rel=1e-9, abs=1e-12)


@given(tables(min_rounds=2, max_rounds=3))
def test_with_fewer_than_four_rounds_the_spread_is_the_whole_range(rounds: Rounds) -> None:
    for variant, measurement in enumerate(measured(rounds)[1:], start=1):
        ratios = [times[variant] / times[0] for times in rounds]
        assert measurement.spread == max(ratios) - min(ratios)


@given(st.lists(st.floats(0.5, 2.0), min_size=4, max_size=12))
def test_clocks_that_drift_between_rounds_do_not_touch_the_ratio(drift: list[float]) -> None:
    _, other = measured([[100.0 * factor, 90.0 * factor] for factor in drift])
    assert other.ratio == pytest.approx(0.9)
    assert other.spread == pytest.approx(0.0, abs=1e-9)
    assert other.is_faster()


def test_a_variant_is_compared_with_the_baseline_of_its_own_rounds() -> None:
    first, second, third = summarize_rounds("abc", [[100.0, 90.0, None], [200.0, None, 160.0], [300.0, 270.0, None]])
    assert (first.num_rounds, second.num_rounds, third.num_rounds) == (3, 2, 1)
    assert (second.ratio, third.ratio) == (pytest.approx(0.9), 0.8)


@pytest.mark.parametrize(
    ("ratio", "spread", "is_faster", "is_slower"),
    [(0.95, 0.04, True, False), (0.95, 0.0625, False, False), (0.75, 0.25, False, False), (1.05, 0.04, False, True)],
)
def test_only_a_difference_beyond_the_spread_is_shown_as_one(
    ratio: float, spread: float, is_faster: bool, is_slower: bool
) -> None:
    found = Measurement(label="any", median_us=1.0, least_us=1.0, ratio=ratio, spread=spread, num_rounds=15)
    assert (found.is_faster(), found.is_slower()) == (is_faster, is_slower)


def test_all_variants_run_in_every_round_and_warm_up_does_not_count() -> None:
    runs: list[int] = []

    def run(variant: int) -> float:
        runs.append(variant)
        return 100.0 - variant if len(runs) > 3 * WARM_UP_ROUNDS else 1e4

    found = measure_rounds("abc", run, num_rounds=6, seed=1)
    assert [row.median_us for row in found] == [100.0, 99.0, 98.0]
    assert {row.num_rounds for row in found} == {6}
    assert all(sorted(runs[start : start + 3]) == [0, 1, 2] for start in range(0, len(runs), 3))


def test_one_round_warms_up_what_takes_long() -> None:
    runs: list[int] = []
    measure_rounds("ab", lambda variant: runs.append(variant) or 6e5, num_rounds=5, seed=1)
    assert len(runs) == 2 * (1 + 5)


def test_an_error_of_a_run_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        measure_rounds("ab", lambda variant: 1.0 / (1 - variant), num_rounds=3, seed=1)


@pytest.mark.parametrize(
    ("verdict", "says"),
    [
        (Verdict(chosen=1, best=1, reason="proven", gain=0.2), "b: 100 us to 80 us, 20.0 % less, spread 0.0 %"),
        (Verdict(chosen=0, best=0, reason="no faster"), "no candidate was faster; leave it as it is"),
        (Verdict(chosen=0, best=0, reason="too few rounds"), "too few rounds could be timed on all ranks"),
        (Verdict(chosen=0, best=0, reason="no candidate"), "there was no candidate to try"),
        (
            Verdict(chosen=0, best=1, reason="not proven", gain=0.012, needed_gain=0.031),
            "the best candidate (b) was 1.2 % faster, but with this many rounds, 3.1 % is needed to tell a gain from noise",
        ),
        (
            Verdict(chosen=0, best=1, reason="not proven", gain=0.003, needed_gain=LEAST_GAIN),
            "the best candidate (b) was 0.3 % faster, but a plan must gain at least 0.5 %",
        ),
        (
            Verdict(chosen=0, best=1, reason="not proven", gain=0.2, needed_gain=LEAST_GAIN),
            "the best candidate (b) was 20.0 % faster, but too few rounds were left to prove it",
        ),
    ],
)
def test_a_verdict_is_one_sentence(verdict: Verdict, says: str) -> None:
    assert describe(verdict, summarize_rounds("ab", [[100.0, 80.0]] * 5)).startswith(says)
