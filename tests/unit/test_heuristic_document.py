"""The table of docs/heuristic.md says what the stored evaluation of the heuristic says, and that what the sources pick."""

import itertools
import json
import statistics
from pathlib import Path

import msgspec
import pytest
from benchmarks.heuristic_accuracy import Choice, evaluation, figures
from benchmarks.heuristic_cases import SEEDED, STORED, stored_cases, stored_entries
from benchmarks.heuristic_fit import PIECES_STARTS, PiecesFit, SchedulesFit, search
from benchmarks.ops_shapes import GEMMS

from counterpoint.machine import load_machine
from counterpoint.schedule import Problem, ScheduleDescription, make_schedule
from counterpoint.schedule.costs import DEFAULT_COSTS
from counterpoint.schedule.estimate import estimate, estimate_sequential
from counterpoint.schedule.heuristic import candidate_descriptions, pick_schedule, rank_candidates
from helpers.document_tables import rows_by_first_cell

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "heuristic.md").read_text()
HISTORY = ROOT / "docs" / "heuristic_measured.md"
H200 = load_machine("h200")
STORED_EVALUATION = ROOT / "benchmarks" / "results" / "heuristic_accuracy.json"


@pytest.fixture(scope="module")
def stored() -> dict[str, dict]:
    return json.loads(STORED_EVALUATION.read_text())["result"]


def cells(found: dict[str, float]) -> list[str]:
    """A row of the table: the cases, three counts with the share of the second, the regrets, and two against PyTorch's."""
    num_cases, near = found["cases"], found["within_one_percent"]
    return [
        f"{num_cases}",
        f"{found['within_half_percent']}",
        f"{near} ({100 * near / num_cases:.0f} %)",
        f"{found['within_spread']}",
        f"{100 * found['mean_regret']:.1f} %",
        f"{100 * found['worst_regret']:.1f} %",
        f"{found['peer_over_picked']:.3f}",
        f"{found['slower_than_peer']}",
    ]


def test_the_stored_evaluation_is_that_of_the_sources(stored: dict[str, dict]) -> None:
    found = evaluation()
    assert {name: stored[name] for name in found} == found


def test_the_table_of_the_document_is_the_stored_evaluation(stored: dict[str, dict]) -> None:
    expected = {name: cells(found) for name, found in stored["figures"].items()}
    expected |= {f"{name}, when measured": cells(found) for name, found in stored["when_measured"].items()}
    expected |= {f"leave one out, {name}": cells(found) for name, found in stored["leave_one_out"]["figures"].items()}
    assert rows_by_first_cell(DOCUMENT, "cases") == expected


def test_the_constants_in_the_document_are_those_of_the_model() -> None:
    named = {name: f"{getattr(DEFAULT_COSTS, name):g}" for name in DEFAULT_COSTS.__struct_fields__}
    assert {name: values[0] for name, values in rows_by_first_cell(DOCUMENT, "constant").items()} == named


@pytest.mark.parametrize("num_gpus", STORED)
def test_every_candidate_was_measured(num_gpus: int) -> None:
    for case in stored_cases(num_gpus):
        candidates = candidate_descriptions(case.problem, case.machine)
        assert {description.label() for description in candidates} <= set(case.times_us)


def test_the_ordering_on_direct_links_is_that_of_the_estimate() -> None:
    machine, faster, slower = load_machine("mi300x"), [], []
    for gemm in GEMMS:
        sizes = {"num_rows": gemm.rows, "num_columns": gemm.columns // 8, "num_inner": gemm.inner}
        problem = Problem(operation="all_gather_matmul", num_ranks=8, **sizes)
        sequential_us = estimate_sequential(problem, machine)
        picked, shards = pick_schedule(problem, machine).description, ScheduleDescription()
        faster.append(sequential_us / estimate(make_schedule(problem, picked), problem, machine).makespan_us)
        slower.append(estimate(make_schedule(problem, shards), problem, machine).makespan_us / sequential_us)
    as_picked, by_shards = rows_by_first_cell(DOCUMENT, "schedule").values()
    mean = statistics.geometric_mean(faster)
    assert as_picked[0] == f"{min(faster):.2f}x to {max(faster):.2f}x faster, {mean:.2f}x in the geometric mean"
    assert by_shards[0] == f"{min(slower):.2f}x to {max(slower):.2f}x slower"


def test_the_page_says_how_many_of_the_shapes_of_all_seeds_are_picked_well(stored: dict[str, dict]) -> None:
    text = " ".join(DOCUMENT.split())
    seeds = [found for name, found in stored["figures"].items() if name.startswith("seed") and name.endswith("all")]
    then = stored["when_measured"]["seed 20261124"]
    near, num_cases = (sum(found[name] for found in seeds) for name in ("within_one_percent", "cases"))
    regret = sum(found["mean_regret"] * found["cases"] for found in seeds) / num_cases
    assert f"{near} of the {num_cases} cases ({100 * near / num_cases:.0f} %) are within 1 %" in text
    assert (
        f"mean regret of {100 * regret:.1f} % and {100 * max(each['worst_regret'] for each in seeds):.1f} % at worst" in text
    )
    results, operators = (" ".join((ROOT / "docs" / name).read_text().split()) for name in ("results.md", "ops.md"))
    assert f"in {near} of {num_cases} cases, and takes {100 * regret:.1f} % longer on average" in results
    on_four = [found for name, found in stored["figures"].items() if name.startswith("seed") and "4 GPUs" in name]
    slower, num_on_four = (sum(found[name] for found in on_four) for name in ("slower_than_peer", "cases"))
    assert f"slower in {slower} of these {num_on_four} cases" in results
    assert f"slower in {slower} of {num_on_four} cases" in operators
    near, num_cases, regret = then["within_one_percent"], then["cases"], then["mean_regret"]
    history = " ".join(HISTORY.read_text().split())
    assert f"within 1 % in {near} of {num_cases}, with a mean regret of {100 * regret:.1f} %" in history


def test_every_shape_that_a_seed_drew_was_measured_with_both_operators_and_what_was_picked() -> None:
    for name in SEEDED.values():
        entries = stored_entries(name)
        names = {op: [entry["shape"]["name"] for entry in entries if entry["op"] == op] for op in ("ag_mm", "mm_rs")}
        assert names["ag_mm"] == names["mm_rs"]
        assert all(entry["picked"] in entry["candidates"] for entry in entries)


def test_lone_matmuls_and_pieces_are_explained_worse_by_other_constants() -> None:
    pieces = PiecesFit()
    for name, factor in itertools.product(PIECES_STARTS[0], (1.3, 1 / 1.3)):
        other = msgspec.structs.replace(DEFAULT_COSTS, **{name: factor * getattr(DEFAULT_COSTS, name)})
        assert pieces.loss(other) > pieces.loss(DEFAULT_COSTS)


def test_the_search_finds_a_constant_again_from_times_that_the_model_made() -> None:
    made = msgspec.structs.replace(DEFAULT_COSTS, call_us=2 * DEFAULT_COSTS.call_us)
    cases = []
    for case in stored_cases(2)[:8]:
        times_us = {each.description.label(): each.estimated_us for each in rank_candidates(case.problem, H200, costs=made)}
        cases.append(case._replace(times_us=times_us | {"sequential": estimate_sequential(case.problem, H200, made)}))
    found = search(SchedulesFit(cases).loss, {"call_us": DEFAULT_COSTS.call_us})
    assert found.call_us == pytest.approx(made.call_us, rel=0.05)


def test_the_fastest_schedules_themselves_have_no_regret() -> None:
    cases = stored_cases(2)
    best = figures([Choice(case, min(case.times_us, key=lambda label, case=case: case.times_us[label])) for case in cases])
    worst = figures([Choice(case, max(case.times_us, key=lambda label, case=case: case.times_us[label])) for case in cases])
    assert best["within_half_percent"] == best["within_spread"] == best["cases"] == len(cases)
    assert (best["mean_regret"], best["worst_regret"]) == (0, 0)
    assert worst["within_one_percent"] == 0
    assert worst["mean_regret"] > 0.1
    assert worst["peer_over_picked"] < 1 < best["peer_over_picked"]


def test_the_heuristic_is_never_slower_than_the_fused_operator_on_average(stored: dict[str, dict]) -> None:
    assert all(found["peer_over_picked"] > 1 for found in stored["figures"].values())
    for name, found in stored["figures"].items():
        most = 0.02 if "2 GPUs" in name and not name.startswith("GEMMs") else 0.04  # those are medians of few rounds
        assert found["mean_regret"] <= most, name


def test_the_result_in_the_page_on_schedules_is_the_stored_evaluation(stored: dict[str, dict]) -> None:
    text = (ROOT / "docs" / "schedules.md").read_text().split("## The heuristic\n", maxsplit=1)[1].replace("\n", " ")
    for num_gpus, ending in ((2, "on 2 GPUs"), (4, "on 4")):
        groups = [found for name, found in stored["figures"].items() if name.startswith(f"held out, {num_gpus} GPUs")]
        near, num_cases = (sum(found[name] for found in groups) for name in ("within_one_percent", "cases"))
        assert f"{near} of {num_cases} {ending}" in text
    every = stored["figures"]["held out, all"]
    assert f"{every['within_one_percent']} of {every['cases']} cases" in text
    regrets = (
        f"{100 * every['mean_regret']:.1f} % longer than the fastest on average and {100 * every['worst_regret']:.1f} %"
    )
    assert regrets in text
