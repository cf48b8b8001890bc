"""Copy schedules in a plan: which is kept of measured ones, how the plan is written, and who refuses it."""

import pickle
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.controls import Priority, ScheduleChoice
from counterpoint.errors import PlanError, ScheduleError
from counterpoint.launch_filter.rules import translate
from counterpoint.machine import load_machine
from counterpoint.measurement.values import Comparison, Measurement, Verdict
from counterpoint.plan import Directive, Match, Plan, load_plan, save_plan
from counterpoint.planner.operators import TunedOperator, descriptions_to_measure, plan_of
from counterpoint.report.gpu import print_tuned_operator
from counterpoint.report.text import new_console
from counterpoint.schedule import SEQUENTIAL, Problem, ScheduleDescription, make_schedule
from counterpoint.schedule.actions import Pass
from counterpoint.schedule.heuristic import pick_schedule
from counterpoint.schedule.operations import OPERATORS as DEFINITIONS
from counterpoint.sim import Simulator
from counterpoint.workloads import load_workload
from helpers.command import refusal
from helpers.schedules import OPERATIONS

H200 = load_machine("h200")
D = ScheduleDescription
NAME = "all_gather_matmul of (8192, 4096) @ (4096, 3584) bfloat16 on 4 ranks"
OF_OPERATORS = Plan(
    directives=(Directive(match=Match(name=NAME), controls=(ScheduleChoice(schedule=D(chunks=2)),), reason="measured"),)
)


def test_a_plan_that_came_from_another_process_has_the_same_fingerprint() -> None:
    """As when rank 0 broadcasts it; JSON would omit other defaults of the copy."""
    plan_in_force = pytest.importorskip("counterpoint.ops.plan_in_force")
    copy = pickle.loads(pickle.dumps(OF_OPERATORS))
    assert plan_in_force.PlanInForce(OF_OPERATORS).fingerprint == plan_in_force.PlanInForce(copy).fingerprint != ""
    assert msgspec.json.encode(copy) != msgspec.json.encode(OF_OPERATORS)


def measured(label: str, ratio: float, spread: float) -> Measurement:
    return Measurement(label=label, median_us=1000 * ratio, least_us=990 * ratio, ratio=ratio, spread=spread, num_rounds=15)


def tuned(measurements: list[Measurement], name: str = NAME, estimated: int = 0, chosen: int = 0) -> TunedOperator:
    best = min(range(len(measurements)), key=lambda number: measurements[number].ratio)
    verdict = Verdict(
        chosen=chosen,
        best=chosen or best,
        reason="proven" if chosen else "not proven" if best else "no faster",
        gain=1 - measurements[chosen or best].ratio,
        needed_gain=0.02,
    )
    return TunedOperator(
        name=name,
        descriptions=(SEQUENTIAL, *(D(chunks=number) for number in range(1, len(measurements)))),
        comparison=Comparison(measurements=tuple(measurements), verdict=verdict),
        estimated=estimated,
        ideal_us=700.0,
    )


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[Measurement], int]:
    """Sequential, then up to 6 schedules, and which of them is kept."""
    found = [measured("sequential", 1.0, draw(st.floats(0, 0.05)))]
    for number in range(draw(st.integers(0, 6))):
        found.append(measured(f"schedule {number}", draw(st.floats(0.5, 1.5)), draw(st.floats(0, 0.2))))
    faster = [number for number, row in enumerate(found) if row.ratio < 0.99]
    return found, draw(st.sampled_from([0, *faster]))


@given(calls=st.lists(rows(), min_size=1, max_size=5))
def test_a_plan_says_gain_where_a_call_gains_and_expects_the_sums_of_what_was_measured(
    calls: list[tuple[list[Measurement], int]],
) -> None:
    operators = [tuned(row, f"{NAME} {number}", chosen=chosen) for number, (row, chosen) in enumerate(calls)]
    plan = plan_of(operators, "h200").plan
    assert (plan.verdict == "GAIN") == any(each.chosen for each in operators)
    assert plan.expectation is not None
    assert plan.expectation.origin == "measured"
    assert plan.expectation.baseline_us == pytest.approx(1000.0 * len(calls))
    assert plan.expectation.planned_us == pytest.approx(sum(1000 * row[chosen].ratio for row, chosen in calls))
    for operator, directive in zip(operators, plan.directives, strict=True):
        assert [each.name for each in operators if directive.match.accepts_name(each.name)] == [operator.name]
        assert directive.controls == (ScheduleChoice(schedule=operator.descriptions[operator.chosen]),)


def test_the_reason_gives_the_times_of_the_schedule_of_sequential_and_of_the_estimates_pick() -> None:
    found = [measured("sequential", 1.0, 0.01), measured("one", 0.8, 0.008), measured("other", 0.9, 0.01)]
    assert tuned(found, estimated=2, chosen=1).reason() == (
        "measured: one takes 800 us against 1 ms sequential and 900 us as estimated (other) (spread 0.8 %)"
    )
    assert tuned(found, estimated=1, chosen=1).reason() == (
        "measured: one takes 800 us against 1 ms sequential, also the estimate's pick (spread 0.8 %)"
    )
    assert "sequential, the estimate's pick (spread" in tuned(found, estimated=0, chosen=1).reason()


def test_where_sequential_stays_the_reason_says_how_near_the_others_came() -> None:
    slower = [measured("sequential", 1.0, 0.01), measured("one", 1.1, 0.008)]
    assert tuned(slower).reason() == "measured: sequential takes 1 ms; the fastest schedule (one) takes 1.1 ms"
    noisy = [measured("sequential", 1.0, 0.01), measured("one", 0.98, 0.03)]
    assert tuned(noisy).reason().endswith("(one) takes 980 us, 2.0 % less; at least 2.0 % must be proven")
    assert tuned([measured("sequential", 1.0, 0.01)]).reason().endswith("no other schedule was measured")
    plan = plan_of([tuned(slower), tuned(noisy)], "h200").plan
    assert (plan.verdict, plan.summary) == (
        "NO_GAIN",
        "no schedule is proven faster than sequential; leave the calls to the library",
    )
    assert {control for each in plan.directives for control in each.controls} == {ScheduleChoice(schedule=SEQUENTIAL)}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("num_rows", [64, 16384])
def test_what_is_measured_holds_sequential_first_and_the_pick_and_fits_the_call(
    operation: str, direction: Pass, num_rows: int
) -> None:
    if direction not in DEFINITIONS[operation].passes():
        return  # it copies nothing
    problem = Problem(operation=operation, num_ranks=4, num_rows=num_rows, num_inner=8192, num_columns=2560)
    found = descriptions_to_measure(problem, H200, direction)
    assert found[0] == SEQUENTIAL
    assert len(found) == len(set(found)) >= 4
    assert pick_schedule(problem, H200, direction).description in found
    for description in found[1:]:
        assert make_schedule(problem, description, direction).description == description


def test_a_plan_of_schedules_comes_back_from_its_file_and_a_person_may_write_a_pattern(tmp_path: Path) -> None:
    save_plan(OF_OPERATORS, tmp_path / "saved.toml")
    assert load_plan(tmp_path / "saved.toml") == OF_OPERATORS
    written = tmp_path / "written.toml"
    written.write_text(
        '[[directives]]\nreason = "by hand"\nmatch = { name = "all_gather_matmul of *" }\n'
        'controls = [{ control = "copy_schedule", schedule = { pattern = "all_peers", chunks = 2 } }]\n'
    )
    (directive,) = load_plan(written).directives
    assert directive.match.accepts_name(NAME)
    assert not directive.match.accepts_name(NAME.replace(" of", " backward of"))
    assert directive.controls[0].describe() == "copy schedule all_peers/2 chunk 1+2"


@pytest.mark.parametrize("name", [NAME, "*"])
def test_nothing_but_operators_takes_a_copy_schedule_and_the_line_says_who_does(name: str) -> None:
    plan = Plan(
        directives=(
            Directive(match=Match(), controls=(Priority(priority=-5),), reason="a race"),
            Directive(match=Match(name=name), controls=(ScheduleChoice(schedule=D()),), reason="measured"),
        )
    )
    step = load_workload("cb_ar_opt1")
    with pytest.raises(PlanError, match=r"Directive 1 of the plan holds a copy_schedule .* counterpoint\.ops\.use_plan"):
        Simulator().run(step, H200, plan)
    with pytest.raises(PlanError, match=r"counterpoint\.ops\.use_plan"):
        plan.check_step(step)  # as captured graphs do before they are rewritten
    with pytest.raises(PlanError, match=r"counterpoint\.ops\.use_plan"):
        translate(plan, step)
    with pytest.raises(PlanError, match=r"counterpoint\.ops\.use_plan"):
        translate(plan)  # as `counterpoint run` does without --step


@pytest.mark.parametrize(
    ("before", "after"), [(["simulate", "cb_ar_opt1"], []), (["run"], ["--", "echo", "the job must not start"])]
)
def test_simulating_or_running_a_plan_of_schedules_is_one_line(before: list[str], after: list[str], tmp_path: Path) -> None:
    save_plan(OF_OPERATORS, tmp_path / "plan.toml")
    line = refusal(*before, "--plan", tmp_path / "plan.toml", *after)
    assert "it is for operators: pass the plan to counterpoint.ops.use_plan" in line


@pytest.mark.parametrize("found", [None, "schedules.toml", Path("schedules.toml")])
def test_what_is_no_plan_is_not_put_in_force_and_the_line_says_how_to_read_one(found: object) -> None:
    ops = pytest.importorskip("counterpoint.ops")
    with pytest.raises(PlanError, match=r"use_plan takes a Plan; found a value of type \w+\. Read a file"):
        ops.use_plan(found)


@pytest.mark.usefixtures("group_of_one")
def test_a_call_by_the_label_of_a_schedule_is_one_line() -> None:
    torch, ops = pytest.importorskip("torch"), pytest.importorskip("counterpoint.ops")
    with pytest.raises(ScheduleError, match=r"takes a ScheduleDescription; found a str\. Make one: "):
        ops.all_gather_matmul(torch.ones(4, 2), torch.ones(2, 3), schedule="ring/1 chunk 1+2")


@given(call=rows())
def test_the_table_of_a_call_names_every_schedule_what_was_estimated_and_what_is_kept(
    call: tuple[list[Measurement], int],
) -> None:
    console = new_console()
    console.width = 80
    measurements, chosen = call
    found = tuned(measurements, chosen=chosen)
    with console.capture() as shown:
        print_tuned_operator(console, found)
    lines = shown.get().splitlines()
    assert lines[0] == NAME
    assert max(map(len, lines)) <= 80
    for row in measurements:
        (line,) = [line for line in lines if line.startswith(row.label + " ")]
        assert ("kept" in line) == (row is measurements[found.chosen])
    assert "ideal (estimated)" in shown.get()


SIZES = ("--rows", "8192", "--inner", "4096", "--columns", "3584")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("all_gather_matmul", *SIZES),
            ["this process is alone", "torchrun --nproc-per-node W -m", "schedule show estimates"],
        ),
        (("all_gather_matmul", *SIZES, "-o", "plan.json"), ["A plan file must end in .toml; found 'plan.json'"]),
        (("all_gather_matmul", *SIZES, "-o", "no/such/plan.toml"), ["the folder", "does not exist"]),
        (("all_gather_matmul", *SIZES, "--rows", "0"), ["--rows must be from 1 to", "found 0"]),
        (("all_gather_matmul", *SIZES[:4]), ["Missing option '--columns'"]),
        (("nothing", *SIZES), ["'nothing' is not one of"]),
    ],
)
def test_tuning_that_cannot_be_done_is_one_line(arguments: tuple[str, ...], says: list[str], tmp_path: Path) -> None:
    line = refusal("schedule", "tune", *arguments, cwd=tmp_path)
    assert all(each in line for each in says), line
    assert not list(tmp_path.iterdir())
