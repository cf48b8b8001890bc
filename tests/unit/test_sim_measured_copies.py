"""Collectives by copy engines, with and without a sum, against what was measured on 2 H200s (docs/log.md, 2026-11-26).

The workloads of benchmarks/results/paper_2x_h200.json as they were captured.
"""

from functools import cache

import msgspec
import pytest

from counterpoint.controls import Transport
from counterpoint.metrics import measure
from counterpoint.paper.values import COPY_ENGINES
from counterpoint.planner.search import tune
from counterpoint.sim import Simulator
from counterpoint.sim.calibration import load_calibration
from counterpoint.sim.costs import CostModel
from counterpoint.step import Collective, CollectiveKind, Dependency
from helpers.paper_runs import captured_steps, measured_rows, simulated_rows
from helpers.toy_steps import H200, plan_of, step_of

MIB = 1 << 20
# By copies, and over all rows together. `opt2` has the tile that is not recognized, with caps that are 10 to 17 % off. The
# sums of `cb_ar_large` take 2.4 times as long beside its matmul, which is not simulated.
LIMITS = {
    "cb_ar_opt1": (0.045, 0.06),
    "cb_ar_opt2": (0.04, 0.04),
    "cb_ar_large": (0.09, 0.06),
    "cb_a2a_opt1": (0.04, 0.07),
    "cb_a2a_opt2": (0.04, 0.03),
    "cb_a2a_large": (0.05, 0.05),
    "mb_ar_opt1": (0.02, 0.02),
    "mb_ar_opt2": (0.03, 0.06),
    "mb_ar_large": (0.035, 0.06),
    "mb_a2a_opt1": (0.02, 0.03),
    "mb_a2a_opt2": (0.04, 0.07),
    "mb_a2a_large": (0.02, 0.05),
}


@cache
def simulated_us(name: str) -> dict[str, float]:
    return simulated_rows(captured_steps(2)[name])


@pytest.mark.parametrize(
    ("kind", "found_us", "limit"),
    [("all_gather", 126.0, 0.15), ("all_to_all", 127.0, 0.15)],
)
def test_64_mib_alone_by_copies_take_their_measured_times(kind: CollectiveKind, found_us: float, limit: float) -> None:
    """The times are of whole replays; what a graph adds before its first copy, the simulator leaves out."""
    alone = step_of(Collective(name="alone", stream=0, collective=kind, num_bytes=64 * MIB, group_size=2))
    step = msgspec.structs.replace(alone, is_timed_in_bursts=True)
    timeline = Simulator().run(step, H200, plan_of({0: Transport(transport="copy_engine")}))
    assert measure(timeline).makespan_us == pytest.approx(found_us, rel=limit)


# four in a row, each behind a kernel of 3 us; benchmarks/results/fresh_cases_2x_h200.json
@pytest.mark.parametrize(
    ("kind", "mib", "found_us"),
    [
        ("all_reduce", 16, 355),
        ("all_reduce", 384, 4991),
        ("all_gather", 16, 186),
        ("all_gather", 384, 2191),
        ("reduce_scatter", 64, 550),
        ("reduce_scatter", 384, 2837),
        ("all_to_all", 384, 2195),
    ],
)
def test_collectives_by_copies_in_a_row_take_their_measured_times(kind: CollectiveKind, mib: int, found_us: float) -> None:
    first = Collective(name=kind, stream=0, collective=kind, num_bytes=mib * MIB, group_size=2)
    others = [msgspec.structs.replace(first, waits_for=(Dependency(operation=number),)) for number in range(3)]
    step = msgspec.structs.replace(step_of(first, *others), is_timed_in_bursts=True)
    timeline = Simulator().run(step, H200, plan_of(dict.fromkeys(range(4), Transport(transport="copy_engine"))))
    assert measure(timeline).makespan_us == pytest.approx(found_us - 3, rel=0.07)


@pytest.mark.parametrize(("num_blocks", "found_us"), [(2, 29.3), (4, 45.5), (8, 77.0)])
def test_a_sum_of_blocks_of_32_mib_takes_its_measured_time(num_blocks: int, found_us: float) -> None:
    """Measured by `calibrate` on an H200, 2026-11-26; the one of two blocks with a spread of 31 %."""
    collective = Collective(
        name="alone", stream=0, collective="reduce_scatter", num_bytes=num_blocks * 32 * MIB, group_size=num_blocks
    )
    assert CostModel(H200, load_calibration(H200)).summed_us(collective) == pytest.approx(found_us, rel=0.08)


@pytest.mark.parametrize("name", LIMITS)
def test_a_workload_by_copies_takes_its_measured_time(name: str) -> None:
    limit, _ = LIMITS[name]
    assert simulated_us(name)[COPY_ENGINES] == pytest.approx(measured_rows(2)[name][COPY_ENGINES], rel=limit)


@pytest.mark.parametrize("name", LIMITS)
def test_all_rows_together_are_as_near_as_documented(name: str) -> None:
    simulated, measured = simulated_us(name), measured_rows(2)[name]
    errors = [abs(simulated[label] / found_us - 1) for label, found_us in measured.items()]
    assert len(errors) >= 9
    assert sum(errors) / len(errors) < LIMITS[name][1]


def test_the_simulated_choice_is_near_the_best_measured_row() -> None:
    """On GPUs the planner measures its candidates, and came within 0.7 % on every workload. In the simulation of
    cb_ar_opt1 priority is 0.5 % ahead of copies; measured, it is 5 % behind.
    """
    found = {name: _behind_the_best(name) for name in LIMITS}
    assert found.pop("cb_ar_opt1") < 1.06
    assert max(found.values()) < 1.03, found
    assert sum(found.values()) / len(found) < 1.01, found


def _behind_the_best(name: str) -> float:
    """The measured time of the candidate that is simulated to be the fastest, by that of the best row."""
    measured = measured_rows(2)[name]
    trials = tune(captured_steps(2)[name], H200, Simulator(), applier="graph").trials
    ordered = sorted(trials, key=lambda each: each.makespan_us)
    labels = [each.label.removesuffix(" in all possible races") for each in ordered]
    rows = [COPY_ENGINES if label == "copies and sums" else label for label in labels]
    chosen = next(row for row in rows if row in measured)
    return measured[chosen] / min(measured.values())
