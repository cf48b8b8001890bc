"""The first paper's grid as it was measured on H200s, beside what the simulator makes of the captured steps.

Captured steps are stored beside the result. Of two workloads on 4 GPUs, measured on 2026-11-21, only the lone times are
known, and the rest of a step follows from its workload. Nothing here is fitted.
"""

import json
from collections.abc import Mapping

import msgspec
from benchmarks.conditions import RESULTS

from counterpoint.machine import load_machine
from counterpoint.paper.cases import paper_description, with_stages
from counterpoint.paper.grid import simulate_paper
from counterpoint.paper.values import CHOICE, COPY_ENGINES, PLAIN, PaperResult
from counterpoint.step import Collective, Dependency, Kernel, Operation, Step
from counterpoint.workloads import load_workload

BASELINE = PLAIN
# A matmul alone and a collective alone, in microseconds, of the steps on 4 H200s that were not kept: the result's sequential
# time is four times their sum, and its ideal four times the longer of the two and the other once.
CAPTURED_4X_US = {"mb_ar_opt2": (23663.0, 4196.2), "mb_a2a_opt2": (23731.8, 2304.6)}
TIMED = {"is_timed_in_bursts": True}  # as captures say of their steps now


def measured_rows(num_ranks: int) -> dict[str, dict[str, float]]:
    """Measured times in microseconds of every workload's rows, by label, without the planner's choice and without sums that
    nothing simulates any more.
    """
    found = {}
    for entry in _stored(num_ranks)["result"]:
        result = msgspec.convert(entry, PaperResult)
        others = {CHOICE, COPY_ENGINES} if "_ar_" in result.workload and result.sum_by == "torch" else {CHOICE}
        found[result.workload] = {
            row.label: row.measured_us for row in result.rows if row.measured_us is not None and row.label not in others
        }
    return found


def captured_steps(num_ranks: int) -> dict[str, Step]:
    """The captured step of every workload that was measured on that many GPUs."""
    stored = {name: msgspec.convert(step | TIMED, Step) for name, step in _stored(num_ranks)["steps"].items()}
    captured = {name: with_stages(step, paper_description(name)) for name, step in stored.items()}
    rebuilt = {name: _rebuilt(name, *times) for name, times in CAPTURED_4X_US.items()} if num_ranks == 4 else {}
    return rebuilt | captured


def simulated_rows(step: Step) -> dict[str, float]:
    """Simulated times in microseconds of the same rows."""
    return {row.label: row.simulated_us for row in simulate_paper(step, load_machine("h200")).rows if row.simulated_us}


def changes(rows: Mapping[str, float]) -> dict[str, float]:
    """By how many percent priority and head starts, alone and together, change the time of plain overlap."""
    labels = [label for label in rows if ("priority" in label or "head start" in label) and "cap" not in label]
    return {label: 100 * (rows[label] / rows[BASELINE] - 1) for label in labels}


def _stored(num_ranks: int) -> dict[str, object]:
    stored = json.loads((RESULTS / f"paper_{num_ranks}x_h200.json").read_text())
    assert isinstance(stored, dict)
    return stored


def _rebuilt(name: str, matmul_us: float, collective_us: float) -> Step:
    """The workload as its capture on 4 GPUs gave it: collectives follow each other, and so do matmuls."""
    operations: list[Operation] = []
    for index, operation in enumerate(load_workload(name).operations):
        before = {index - 1, index - 2} if isinstance(operation, Collective) else {index - 2}
        waits_for = tuple(Dependency(operation=number) for number in sorted(before) if number >= 0)
        if isinstance(operation, Collective):
            operations.append(msgspec.structs.replace(operation, stream=1, lone_us=collective_us, waits_for=waits_for))
        elif isinstance(operation, Kernel):
            operations.append(
                Kernel(
                    name="matmul_kernel",
                    stream=0,
                    footprint=operation.footprint,
                    character="matmul",
                    lone_us=matmul_us,
                    waits_for=waits_for,
                )
            )
    step = Step(name=name, num_ranks=4, operations=tuple(operations), device_name="NVIDIA H200", **TIMED)
    return with_stages(step, paper_description(name))
