"""Collectives by copy engines, with and without a sum, against what was measured on 2 H200s (docs/log.md, 2026-11-22).

The two workloads of benchmarks/results/paper_2x_h200.json, as they were captured: the lone times are those of the capture,
which that file holds in the sequential time and in the ideal.
"""

import json
from pathlib import Path

import pytest

from counterpoint.controls import Transport
from counterpoint.metrics import measure
from counterpoint.paper.grid import simulate_paper
from counterpoint.paper.values import COPY_ENGINES
from counterpoint.planner.search import tune
from counterpoint.sim import Simulator
from counterpoint.step import Collective, CollectiveKind, Dependency, Kernel, Operation, Step
from counterpoint.workloads import load_workload
from helpers.toy_steps import H200, plan_of, step_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "paper_2x_h200.json"
CAPTURED_US = {"cb_a2a_opt1": (3093.3, 1433.8), "cb_ar_opt2": (3274.9, 2900.0)}  # the matmul alone, the collective alone
MIB = 1 << 20


def captured(name: str) -> Step:
    """The workload as the capture on 2 GPUs gave it: collectives follow each other and continue the first matmul's chain."""
    matmul_us, collective_us = CAPTURED_US[name]
    operations: list[Operation] = []
    for index, operation in enumerate(load_workload(name).operations):
        before = {index - 1, index - 2} if isinstance(operation, Collective) else {index - 2}
        waits_for = tuple(Dependency(operation=number) for number in sorted(before) if number >= 0)
        if isinstance(operation, Collective):
            operations.append(
                Collective(
                    name="collective",
                    stream=0,
                    collective=operation.collective,
                    num_bytes=operation.num_bytes,
                    group_size=2,
                    lone_us=collective_us,
                    waits_for=waits_for,
                )
            )
        elif isinstance(operation, Kernel):
            operations.append(
                Kernel(
                    name="matmul_kernel",
                    stream=min(index, 1),
                    footprint=operation.footprint,
                    character="matmul",
                    lone_us=matmul_us,
                    waits_for=waits_for,
                )
            )
    return Step(name=name, num_ranks=2, operations=tuple(operations), device_name="NVIDIA H200")


def measured_us(name: str) -> dict[str, float]:
    """The measured time of each row of a workload."""
    (result,) = [each for each in json.loads(RESULTS.read_text())["result"] if each["workload"] == name]
    return {row["label"]: row["measured_us"] for row in result["rows"]}


def simulated_us(name: str) -> dict[str, float]:
    return {row.label: row.simulated_us for row in simulate_paper(captured(name), H200).rows if row.simulated_us}


@pytest.mark.parametrize(
    ("kind", "found_us", "limit"),
    [("all_gather", 126.0, 0.22), ("all_to_all", 127.0, 0.22), ("reduce_scatter", 189.0, 0.10), ("all_reduce", 333.0, 0.03)],
)
def test_64_mib_alone_by_copies_take_their_measured_times(kind: CollectiveKind, found_us: float, limit: float) -> None:
    """The times are of whole replays; what a graph adds before its first copy, the simulator leaves out."""
    step = step_of(Collective(name="alone", stream=0, collective=kind, num_bytes=64 * MIB, group_size=2))
    timeline = Simulator().run(step, H200, plan_of({0: Transport(transport="copy_engine")}))
    assert measure(timeline).makespan_us == pytest.approx(found_us, rel=limit)


@pytest.mark.parametrize("name", CAPTURED_US)
def test_the_workloads_by_copies_take_their_measured_times_within_6_percent(name: str) -> None:
    assert simulated_us(name)[COPY_ENGINES] == pytest.approx(measured_us(name)[COPY_ENGINES], rel=0.06)


@pytest.mark.parametrize(("name", "limit"), [("cb_a2a_opt1", 0.11), ("cb_ar_opt2", 0.05)])
def test_all_rows_together_are_as_near_as_documented(name: str, limit: float) -> None:
    simulated = simulated_us(name)
    errors = [
        abs(simulated[label] / found_us - 1)
        for label, found_us in measured_us(name).items()
        if label in simulated and label != "planner's choice"
    ]
    assert len(errors) >= 17
    assert sum(errors) / len(errors) < limit


@pytest.mark.parametrize("name", CAPTURED_US)
def test_the_choice_is_within_2_percent_of_the_best_measured_row(name: str) -> None:
    measured = measured_us(name)
    plan = tune(captured(name), H200, Simulator(), applier="graph").plan
    label = plan.summary.split(":", maxsplit=1)[0].removesuffix(" in every race")
    assert measured[label] <= 1.02 * min(measured.values())
