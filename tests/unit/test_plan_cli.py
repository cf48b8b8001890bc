"""`counterpoint plan`: a plan in words, two compared, and what it says of files that are no plans."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from counterpoint.controls import HeadStart, Priority, Transport
from counterpoint.plan import Directive, Expectation, Match, Plan, Refusal, save_plan
from counterpoint.report.plan import PlanDiff, compare_plans
from helpers.command import counterpoint, refusal

GATHERS = Match(kind="communication", collective="all_gather", process_group="mesh_dp", num_bytes=64 << 20)
SOME = Match(name="gemm", kind="computation", ordinals=(0, 1, 2, 7))
COPIES = Directive(match=GATHERS, controls=(Transport(transport="copy_engine"),), reason="they only move data")
HOLD = Directive(match=SOME, controls=(HeadStart(hold_us=5.0),), reason="it wins a race")
FIRST = Plan(
    step_name="trace",
    step_fingerprint="0123456789abcdef",
    machine="h200",
    verdict="GAIN",
    summary="both: 10 ms to 9 ms",
    expectation=Expectation(origin="simulated", baseline_us=10_000.0, planned_us=9_000.0),
    directives=(COPIES, HOLD),
    refusals=(Refusal(control="priority", target="18 collectives", reason="no effect when used alone"),),
)
SECOND = replace(
    FIRST,
    verdict="NO_GAIN",
    machine="",
    directives=(
        replace(COPIES, controls=(Transport(transport="sm"),)),
        Directive(match=Match(kind="communication"), controls=(Priority(priority=-5),), reason="they wait"),
    ),
)


def files(folder: Path, *plans: Plan) -> None:
    for number, each in enumerate(plans):
        save_plan(each, folder / f"{number}.toml")


def test_a_plan_is_told_in_words_with_all_its_numbers_reasons_and_refusals(tmp_path: Path) -> None:
    files(tmp_path, FIRST)
    done = counterpoint("plan", "show", "0.toml", cwd=tmp_path)
    said = " ".join(done.stdout.split())
    assert (done.returncode, done.stderr) == (0, "")
    for words in (
        "GAIN both: 10 ms to 9 ms",
        "step: 'trace' (0123456789abcdef)",
        "machine: h200",
        "expected: 10 ms without the plan, 9 ms with it, 10.0 % less (simulated)",
        "transport copy_engine on all_gather of 64 MiB in process group mesh_dp: they only move data",
        "head start 5 us on gemm, numbers 0-2, 7: it wins a race",
        "Numbers count from 0",
        "priority on 18 collectives: no effect when used alone",
        "counterpoint run --plan 0.toml --step TRACE -- torchrun train.py",
        "fsdp2.use_copy_engines(model)",
    ):
        assert words in said, words


def test_a_plan_without_directives_says_that_it_leaves_everything_as_it_is(tmp_path: Path) -> None:
    files(tmp_path, Plan(verdict="NO_GAIN", summary="nothing pays"))
    said = counterpoint("plan", "show", "0.toml", cwd=tmp_path).stdout
    assert "NO_GAIN  nothing pays" in said
    assert "no directives: this plan changes nothing" in said
    assert "to apply" not in said


def test_what_differs_is_told_and_what_only_one_of_them_has(tmp_path: Path) -> None:
    files(tmp_path, FIRST, SECOND)
    done = counterpoint("plan", "diff", "0.toml", "1.toml", cwd=tmp_path, COLUMNS="200")
    assert done.returncode == 0
    assert [" ".join(line.split()) for line in done.stdout.splitlines()] == [
        "verdict: GAIN -> NO_GAIN",
        "machine: h200 -> nothing",
        "all_gather of 64 MiB in process group mesh_dp: transport copy_engine -> transport sm",
        "only in 0.toml",
        "- head start 5 us on gemm, numbers 0-2, 7",
        "only in 1.toml",
        "- priority -5 on communication kernels",
    ]


def test_sizes_that_round_to_the_same_are_told_apart(tmp_path: Path) -> None:
    both = [
        replace(SECOND, directives=(replace(COPIES, match=Match(collective="all_reduce", num_bytes=size)),))
        for size in (134_217_728, 134_234_112)
    ]
    files(tmp_path, *both)
    said = counterpoint("plan", "diff", "0.toml", "1.toml", cwd=tmp_path, COLUMNS="200").stdout
    assert "transport copy_engine on all_reduce of 128 MiB\n" in said
    assert "transport copy_engine on all_reduce of 128 MiB (134,234,112 B)\n" in said


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (FIRST, "the plans are the same\n"),
        (replace(FIRST, refusals=()), "the plans hold the same controls; "),
        (replace(FIRST, directives=(HOLD, COPIES)), "the plans hold the same controls; only the order of directives"),
    ],
)
def test_plans_of_the_same_controls(tmp_path: Path, other: Plan, says: str) -> None:
    files(tmp_path, FIRST, other)
    done = counterpoint("plan", "diff", "0.toml", "1.toml", cwd=tmp_path, COLUMNS="200")
    assert done.returncode == 0
    assert done.stdout.startswith(says)


def test_a_plan_by_hand_without_a_verdict_is_not_called_no_gain(tmp_path: Path) -> None:
    files(tmp_path, Plan(directives=(COPIES,)))
    shown = counterpoint("plan", "show", "0.toml", cwd=tmp_path).stdout
    assert shown.startswith("NO_VERDICT  the plan gives none")
    assert "NO_GAIN" not in shown + (tmp_path / "0.toml").read_text()


def test_json_holds_the_same(tmp_path: Path) -> None:
    files(tmp_path, FIRST, SECOND)
    shown = json.loads(counterpoint("plan", "show", "0.toml", "--json", cwd=tmp_path).stdout)
    assert shown["plan"]["verdict"] == "GAIN"
    assert shown["plan"]["directives"][1]["match"]["ordinals"] == [0, 1, 2, 7]
    assert shown["to_apply"][0]["lines"] == ["counterpoint run --plan 0.toml --step TRACE -- torchrun train.py"]
    differ = json.loads(counterpoint("plan", "diff", "0.toml", "1.toml", "--json", cwd=tmp_path).stdout)
    assert differ["is_same"] is False
    assert differ["only_second"] == ["priority -5 on communication kernels"]


def test_a_comparison_the_other_way_round_is_the_mirror_image() -> None:
    there, back = compare_plans(FIRST, SECOND), compare_plans(SECOND, FIRST)
    assert (there.only_first, there.only_second) == (back.only_second, back.only_first)
    assert [(each.what, each.first, each.second) for each in there.differences] == [
        (each.what, each.second, each.first) for each in back.differences
    ]
    assert compare_plans(FIRST, FIRST) == PlanDiff(is_same=True)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "Cannot read"),
        ("", "the file is empty"),
        ("{}", "the file is JSON"),
        ('verdict = "PERHAPS"\n', "verdict must be"),
        ('[[directives]]\nreason = "r"\ncontrols = []\nmatch = { ordinals = [-1] }\n', "ordinals count from 0; found -1"),
        ('[[directives]]\nreason = "r"\ncontrols = []\nmatch = { group = "tp" }\n', "group"),
        ('[[directives]]\nreason = "r"\ncontrols = []\nmatch = { num_bytes = "64 MiB" }\n', "num_bytes"),
    ],
)
def test_what_is_no_plan_is_one_line(tmp_path: Path, content: str | None, says: str) -> None:
    files(tmp_path, FIRST)
    if content is not None:
        (tmp_path / "bad.toml").write_text(content)
    assert says in refusal("plan", "show", "bad.toml", cwd=tmp_path)
    assert says in refusal("plan", "diff", "0.toml", "bad.toml", cwd=tmp_path)
