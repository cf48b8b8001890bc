"""The first paper's grid as it was measured on H200s, beside what the simulator makes of the captured steps.

Captured steps are stored beside the result. Nothing here is fitted.
"""

import json
from collections.abc import Mapping

import msgspec
from benchmarks.conditions import RESULTS

from counterpoint.machine import load_machine
from counterpoint.paper.cases import paper_description, with_stages
from counterpoint.paper.grid import simulate_paper
from counterpoint.paper.values import CHOICE, COPY_ENGINES, PLAIN, PaperResult
from counterpoint.step import Step
from counterpoint.validation.outcome import as_read_today

BASELINE = PLAIN
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
    steps = _stored(num_ranks)["steps"].items()
    stored = {name: as_read_today(msgspec.convert(step | TIMED, Step)) for name, step in steps}
    return {name: with_stages(step, paper_description(name)) for name, step in stored.items()}


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
