"""The stored times that the heuristic's picks are judged by: one case for each operator, shape and number of GPUs."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.conditions import RESULTS
from benchmarks.ops_shapes import SEEDED_PREFIX
from counterpoint.machine import Machine, load_machine
from counterpoint.schedule import Problem

MACHINES = {name: load_machine(name) for name in ("h200", "h100")}
MACHINE = MACHINES["h200"]
OPERATIONS = {"ag_mm": "all_gather_matmul", "mm_rs": "matmul_reduce_scatter"}
# Calls were replayed as CUDA graphs, as repeated calls are. The runs with all that the heuristic picks from
STORED = {2: "ops_grid_2x_h200.json", 4: "ops_grid_again_4x_h200.json"}
LONE = (STORED[2], "ops_grid_first_4x_h200.json")  # whose lone matmuls the constants are fitted to
# On 2 GPUs; no part of any fit. Rings of H100s add to what arrived, and those of H200s placed it first
UNSEEN = {"GEMMs": "ops_gemms_2x_h200.json", "H100": "ops_grid_2x_h100.json"}
# The layers again on other machines, on 2026-11-26 and 27
AGAIN = {
    "H200, again": {2: "ops_grid_again_2x_h200.json", 4: "ops_grid_4x_h200.json"},
    "H100, again": {2: "ops_grid_again_2x_h100.json", 4: "ops_grid_4x_h100.json"},
}
# Calls that reset their flags where they begin, as they do now; all others reset each flag behind its wait
PRESENT = {
    "H200, present calls": {2: "ops_flags_2x_h200.json", 4: "ops_flags_4x_h200.json"},
    "H200, present calls, seed 20261201": {4: "ops_flags_seeded_4x_h200.json"},
    "H200, in blocks, seed 20261203": {2: "ops_blocks_2x_h200.json"},  # calls above 3 ms, in blocks of 25 ms
}
# Shapes that seeds drew, by the number of H200s
SEEDED = {2: "ops_seeded_2x_h200.json", 4: "ops_seeded_4x_h200.json"}
SEEDED_ON_H100 = "ops_seeded_2x_h100.json"


class Case(NamedTuple):
    """One operator on one shape and number of GPUs, and the measured times of its schedules, sequential included."""

    machine: Machine
    num_gpus: int
    op: str
    shape: str
    problem: Problem
    times_us: dict[str, float]
    spreads: dict[str, float]
    peer_us: float
    num_rounds: int


def stored_entries(name: str) -> list[dict[str, Any]]:
    """The entries of a stored result."""
    return json.loads((RESULTS / name).read_text())["result"]


def stored_cases(num_gpus: int, name: str = "") -> list[Case]:
    """The cases of a stored result, of the layers unless it is named."""
    name = name or STORED[num_gpus]
    machine = next(machine for gpu, machine in MACHINES.items() if f"_{gpu}." in name)
    return [_case(machine, num_gpus, entry) for entry in stored_entries(name)]


def _case(machine: Machine, num_gpus: int, entry: dict[str, Any]) -> Case:
    num_rows, num_columns, num_inner = entry["sizes_m_n_k"]
    sizes = {"num_rows": num_rows, "num_columns": num_columns, "num_inner": num_inner}
    timed = {label: each for label, each in entry["candidates"].items() if "/" in label or label == "sequential"}
    return Case(
        machine=machine,
        num_gpus=num_gpus,
        op=entry["op"],
        shape=entry["shape"]["name"],
        problem=Problem(operation=OPERATIONS[entry["op"]], num_ranks=num_gpus, **sizes),
        times_us={label: each["median_us"] for label, each in timed.items()},
        spreads={label: each["spread"] for label, each in timed.items()},
        peer_us=entry["candidates"]["peer"]["median_us"],
        num_rounds=entry.get("rounds", 20 if num_gpus == 2 else 5),
    )


def all_cases(stored: Mapping[int, str] = STORED) -> list[Case]:
    """The cases of the layers, or of other files by the number of GPUs."""
    return [case for num_gpus, name in stored.items() for case in stored_cases(num_gpus, name)]


def seed_of(case: Case) -> str:
    """The seed that drew a case's shape, in words: `seed 20261123`."""
    return f"{SEEDED_PREFIX} {case.shape.removeprefix(SEEDED_PREFIX).split('-')[0]}"


def by_seed(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """Cases of shapes that seeds drew, by seed."""
    return {seed: [case for case in cases if seed_of(case) == seed] for seed in dict.fromkeys(map(seed_of, cases))}
