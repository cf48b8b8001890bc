"""Plans of copy schedules between processes of this machine's CPU: in force, compared, and chosen by a scripted clock.

What each section holds is in `helpers/jobs/operator_plans.py`. Nothing is timed here: CPUs have no overlap to gain.
"""

import ast
import json
from pathlib import Path

import pytest

from counterpoint.plan import load_plan
from helpers.gloo_ranks import lines_of, run_ranks, said

pytest.importorskip("torch")

pytestmark = pytest.mark.xdist_group("ranks")  # one worker, whose ranks have imported torch


def assert_says(found: dict[str, str], wanted: dict[str, str]) -> None:
    assert set(found) == set(wanted)
    assert {name: words for name, words in wanted.items() if words not in found[name]} == {}
    assert all(line.endswith(".") for name, line in found.items() if line != "ok")


# each start of the ranks takes seconds, so several sections share one
def test_a_plan_in_force_names_the_schedules_of_the_calls_that_name_none(tmp_path: Path) -> None:
    sections = ("named", "of_several_the_last", "taken_back", "refused")
    for found in lines_of(run_ranks("operator_plans", 2, *sections, folder=tmp_path)):
        assert found == [f"{name.replace('_', ' ')}: ok" for name in sections]


def test_plans_that_differ_or_do_not_fit_are_one_line_on_every_rank_and_the_next_plan_works(tmp_path: Path) -> None:
    wanted = {
        "other schedules": "The ranks use different plans in all_gather_matmul of (24, 7) @ (7, 5) float64: rank 0 uses",
        "one without": "rank 0 uses none, rank 1 uses",
        "named": "takes the pattern one_peer or all_peers; found 'ring'",
        "unfit": "Directive 1 of the plan is not for all_gather_matmul backward of (24, 7) @ (7, 5) float64: ",
        "after all that": "ok",
        "other machine": "the current plan was measured on 'b200', but this GPU belongs to 'h200'",
    }
    for lines in lines_of(run_ranks("operator_plans", 2, "different", "other_machine", folder=tmp_path)):
        found = said(lines)
        assert_says(found, wanted)
        assert "Directive" not in found["named"], "it is the call that names it"


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_fastest_schedule_of_every_call_comes_into_one_plan_that_all_ranks_share(num_ranks: int, tmp_path: Path) -> None:
    ranks = [said(lines) for lines in lines_of(run_ranks("operator_plans", num_ranks, "tuned", folder=tmp_path))]
    assert all(each["tuned"] == "ok" for each in ranks)
    plans = {ast.literal_eval(each["plan"]) for each in ranks}
    assert len(plans) == 1
    assert 'verdict = "GAIN"' in plans.pop()


def test_what_is_measured_looks_like_a_call_with_the_weight_of_a_linear(tmp_path: Path) -> None:
    assert lines_of(run_ranks("operator_plans", 3, "operands", folder=tmp_path)) == [["operands: ok"]] * 3


def test_the_slowest_rank_counts_and_where_nothing_is_faster_sequential_is_kept(tmp_path: Path) -> None:
    for lines in lines_of(run_ranks("operator_plans", 3, "slowest", folder=tmp_path)):
        first, second = lines
        assert first.startswith("steady: measured: ")
        assert " takes 900 us against 1 ms sequential" in first
        assert second.startswith("sequential: measured: sequential takes 702 us; the fastest schedule")


def test_other_results_than_those_of_sequential_are_one_line_on_every_rank(tmp_path: Path) -> None:
    differs = (
        "gives wrong results for all_gather_matmul of (24, 7) @ (7, 5) float64 on 2 ranks: they differ from sequential by "
    )
    wanted = {"wrong": differs, "after it": "ok", "idle": f"{differs}inf of", "late": f"{differs}inf of"}
    for lines in lines_of(run_ranks("operator_plans", 2, "wrong", "idle", "late", folder=tmp_path)):
        assert_says(said(lines), wanted)


def test_the_command_measures_both_passes_prints_them_on_one_rank_and_writes_the_plan(tmp_path: Path) -> None:
    first, second = lines_of(run_ranks("operator_plans", 2, "command", folder=tmp_path))
    refusal = "fp8: Operators multiply by torch.mm, which does not support fp8. Measure one of bf16, fp16, fp32, fp64."
    assert second == [refusal]
    place = first.index(refusal)
    shown, written = "\n".join(first[:place]), "\n".join(first[place + 1 :])
    assert "all_gather_matmul backward of (24, 7) @ (7, 5) float32 on 2 ranks" in shown
    assert "\nGAIN  2 of 2 calls by copy schedules: 2 ms sequential to 1.6 ms in total" in shown
    assert shown.count("Plan saved to ") == 2
    plan = load_plan(tmp_path / "all_gather_matmul 0.toml")
    assert [each.match.name.partition(" of ")[0] for each in plan.directives] == [
        "all_gather_matmul",
        "all_gather_matmul backward",
    ]
    assert len(load_plan(tmp_path / "matmul_all_reduce 0.toml").directives) == 1, "its backward pass copies nothing"
    assert len(json.loads(written)["operators"]) == 2


def test_what_cannot_be_tuned_is_one_line_on_every_rank(tmp_path: Path) -> None:
    wanted = {
        "nothing ran": "the group has run no call whose schedule the plan decides. Run a step first",
        "on CPUs": "The group runs on CPUs, where nothing overlaps",
        "other requests": "disagree: rank 0 calls tuning of all_gather_matmul of (8, 7) @ (7, 5) float64 on 2 ranks",
        "more requests": "The ranks disagree",
        "named schedule": 'names no schedule; found all_gather_matmul of (8, 7) @ (7, 5) float64 with {"chunks":2}',
        "whole numbers": "floating-point types only; found torch.int64",
        "nothing copied": "matmul_all_reduce copies nothing in its backward pass",
        "no rows": "num_rows must be from 1 to",
        "too large": "cannot be allocated",
        "after all that": "ok",
    }
    for lines in lines_of(run_ranks("operator_plans", 2, "cannot", folder=tmp_path)):
        assert_says(said(lines), wanted)
