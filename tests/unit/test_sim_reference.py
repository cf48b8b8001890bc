"""The simulator against what was measured on H200s: every row of the reference runs, and the shipped traces replayed."""

from functools import cache
from pathlib import Path

import pytest
from benchmarks.reference_runs import (
    Comparison,
    coresidency_runs,
    head_start_runs,
    residency_speed_runs,
    shipped_traces,
)

from counterpoint.job import load_job
from counterpoint.metrics import measure
from counterpoint.plan import LEAVE_IT
from counterpoint.sim import Simulator

coresidency = cache(coresidency_runs)
residency_speed = cache(residency_speed_runs)
head_start = cache(head_start_runs)
UNRESOLVED = "two attentions"
# Medians of two runs of the same iteration differ by this much, because the card is power-limited (tests/data, docs/log.md).
SPREAD_BETWEEN_RUNS = 0.03


def within(comparison: Comparison, limit: float) -> None:
    assert comparison.simulated_us == pytest.approx(comparison.measured_us, rel=limit), (
        f"{comparison.run}: {comparison.figure}"
    )


def collective_ends(*, carveout: str, ctas_per_sm: int, priority: str) -> float:
    run = f"carveout {carveout}, {ctas_per_sm} CTAs per SM, {priority} priority"
    return next(found.simulated_us for found in coresidency() if (found.run, found.figure) == (run, "collective ends"))


def test_every_reference_row_is_compared() -> None:
    assert (len(coresidency()), len(residency_speed()), len(head_start())) == (2 * 20, 14, 6)
    assert len(shipped_traces()) == 5


@pytest.mark.parametrize("index", range(40))
def test_co_residency_ends_within_10_percent(index: int) -> None:
    within(coresidency()[index], 0.10)


@pytest.mark.parametrize("index", range(14))
def test_a_capped_kernel_takes_its_measured_time_within_12_percent(index: int) -> None:
    within(residency_speed()[index], 0.12)


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("variant", [0, 1], ids=["default", "head start"])
def test_an_iteration_takes_its_measured_time_within_8_percent(index: int, variant: int) -> None:
    within(head_start()[index][variant], 0.08)


@pytest.mark.parametrize("index", range(6))
def test_a_head_start_gains_where_it_was_measured_to_gain(index: int) -> None:
    default, ahead = head_start()[index]
    assert default.measured_us > ahead.measured_us
    gain = default.simulated_us - ahead.simulated_us
    if default.run == UNRESOLVED:
        # A second measurement (2026-11-21, medians of 5 x 8 iterations, each variant twice) gave 4.430 and 4.749 ms by
        # default and 4.563 and 4.460 ms with the head start: which of the two is faster is not resolved by measurement.
        # What is known is that they are near each other, so that is what may be asked of the prediction.
        assert abs(gain) < SPREAD_BETWEEN_RUNS * default.simulated_us
    else:
        assert gain > 0


def test_predicted_gains_are_of_the_measured_size_within_the_known_miss() -> None:
    resolved = [(default, ahead) for default, ahead in head_start() if default.run != UNRESOLVED]
    for default, ahead in resolved:
        measured, simulated = default.measured_us - ahead.measured_us, default.simulated_us - ahead.simulated_us
        # Matrix multiplications gain half of what is predicted: the card's power limit takes the rest (docs/simulator.md).
        assert 0.8 * measured < simulated < 2.1 * measured, default.run
    assert len(resolved) == 5


def test_priority_and_carveout_each_bring_the_collective_forward_as_measured() -> None:
    equal = collective_ends(carveout="default", ctas_per_sm=1, priority="equal")
    greatest = collective_ends(carveout="default", ctas_per_sm=1, priority="greatest")
    both = collective_ends(carveout="100", ctas_per_sm=1, priority="greatest")
    # Measured: 5.786, 1.463 and 0.375 ms.
    assert equal > 3.5 * greatest > 3.5 * 3.5 * both


@pytest.mark.parametrize("path", shipped_traces(), ids=lambda path: path.name)
def test_a_traced_step_replays_within_5_percent(path: Path) -> None:
    job = load_job(str(path))
    assert job.traced is not None
    replayed = measure(Simulator().run(job.step, job.machine, LEAVE_IT))
    traced = measure(job.traced.timeline)
    assert replayed.makespan_us == pytest.approx(traced.makespan_us, rel=0.05)
    assert replayed.exposed_us == pytest.approx(traced.exposed_us, rel=0.05)
