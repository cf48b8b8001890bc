"""What of a plan does nothing is said: in one refusal where that is all of it, in notes where it is a part."""

from pathlib import Path

import msgspec
import pytest

from counterpoint.controls import CommunicationCtas, Control, Priority, ResidencyCap, Transport
from counterpoint.errors import PlanError, StepError
from counterpoint.machine import load_machine
from counterpoint.plan import Directive, Match, Plan
from counterpoint.planner.idle_controls import review_plan
from counterpoint.workloads import load_workload
from helpers.command import counterpoint, refusal
from helpers.toy_steps import H200, all_reduce, step_of

STEP = load_workload("cb_ar_opt2")
ACTIVE = Priority(priority=-5)


def plan_by_hand(*directives: tuple[str, tuple[Control, ...]]) -> Plan:
    return Plan(
        directives=tuple(
            Directive(match=Match(kind=kind), controls=controls, reason="by hand") for kind, controls in directives
        )  # type: ignore[arg-type]
    )


def usual_cap() -> ResidencyCap:
    footprint = STEP.operations[0].footprint  # type: ignore[union-attr]
    assert footprint is not None
    return ResidencyCap(
        ctas_per_sm=8, dynamic_shared_bytes=footprint.dynamic_shared_bytes, carveout_percent=footprint.carveout_percent
    )


@pytest.mark.parametrize(
    ("kind", "controls", "says"),
    [
        ("communication", (), "Directive 0 holds no control."),
        ("communication", (Priority(priority=0),), "Directive 0: priority 0 has no effect on all"),
        ("communication", (Transport(transport="sm"),), "Directive 0: transport sm has no effect on all"),
        ("communication", (CommunicationCtas(max_ctas=64),), "Directive 0: at most 64 CTAs has no effect on all"),
        ("computation", (usual_cap(),), "Directive 0: cap of 8 CTAs per SM"),
    ],
)
def test_a_plan_of_nothing_but_idle_controls_is_refused(kind: str, controls: tuple[Control, ...], says: str) -> None:
    with pytest.raises(PlanError, match=r"The plan has no effect on step .* Correct the plan, or leave it out\.") as caught:
        review_plan(STEP, H200, plan_by_hand((kind, controls)))
    assert says in str(caught.value)


def test_beside_a_control_that_takes_effect_an_idle_one_is_a_note() -> None:
    plan = plan_by_hand(("communication", (ACTIVE,)), ("communication", (CommunicationCtas(max_ctas=64),)))
    (note,) = review_plan(STEP, H200, plan)
    assert note.startswith("Directive 1: at most 64 CTAs has no effect on all")
    assert review_plan(STEP, H200, plan_by_hand(("communication", (ACTIVE,)))) == ()
    assert review_plan(STEP, H200, Plan()) == ()


def test_of_two_directives_that_differ_the_last_counts_and_the_note_says_so() -> None:
    plan = plan_by_hand(("communication", (ACTIVE,)), ("communication", (Priority(priority=-3),)))
    (note,) = review_plan(STEP, H200, plan)
    assert note.startswith("Directive 0: priority -5 has no effect on")
    assert note.endswith("operations: directive 1 replaces it with priority -3, because the last one counts.")
    (again,) = review_plan(STEP, H200, plan_by_hand(*[("communication", (ACTIVE,))] * 2))
    assert again.startswith("Directive 0: priority -5 is repeated by directive 1")


def test_simulate_says_what_is_idle_and_refuses_a_plan_that_is_all_idle(tmp_path: Path) -> None:
    head = '[[directives]]\nreason = "x"\nmatch = { kind = "%s" }\ncontrols = [%s]\n'
    (tmp_path / "idle.toml").write_text(head % ("communication", '{ control = "communication_ctas", max_ctas = 64 }'))
    assert "The plan has no effect" in refusal("simulate", "cb_ar_opt2", "--plan", "idle.toml", cwd=tmp_path)
    (tmp_path / "same.toml").write_text(head % ("computation", '{ control = "priority", priority = -5 }'))
    done = counterpoint("simulate", "cb_ar_opt2", "--plan", "same.toml", cwd=tmp_path, COLUMNS="200")
    assert done.returncode == 0
    assert "With the plan, no operation starts or ends at another time than without it." in done.stdout


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "reduce"])
def test_a_step_may_not_ask_copy_engines_to_reduce(kind: str, tmp_path: Path) -> None:
    with pytest.raises(StepError, match="copy engines cannot reduce"):
        step_of(msgspec.structs.replace(all_reduce(10.0), collective=kind, transport="copy_engine"))
    (tmp_path / "w.toml").write_text(
        f'name = "w"\nnum_ranks = 4\n[[collectives]]\nname = "sum"\nstream = 1\ncollective = "{kind}"\nbytes = "64 MiB"\n'
        'transport = "copy_engine"\n'
    )
    assert "w.toml: Operation 0 ('sum'): copy engines cannot reduce" in refusal("simulate", "w.toml", cwd=tmp_path)


def test_a_machine_that_was_never_measured_says_so_in_text_and_in_json() -> None:
    says = (
        "NVIDIA L40S: never compared with hardware; the simulator's constants are assumed: they are scaled from NVIDIA H200,"
    )
    assert load_machine("l40s").device_names == ("NVIDIA L40S",)
    for more in ((), ("--json",)):
        other = counterpoint("simulate", "mb_ar_opt1", "--machine", "l40s", *more, COLUMNS="200")
        assert says in other.stdout, other.stderr
        measured = counterpoint("simulate", "mb_ar_opt1", *more, COLUMNS="200")
        assert measured.returncode == 0
        assert "never compared" not in measured.stdout


def test_a_step_without_communication_says_so(tmp_path: Path) -> None:
    (tmp_path / "w.toml").write_text(
        'name = "w"\nnum_ranks = 1\n[[kernels]]\nname = "k"\nstream = 1\nnum_ctas = 132\nthreads_per_cta = 128\n'
        "registers_per_thread = 32\nlone_us = 10.0\n"
    )
    done = counterpoint("tune", "w.toml", cwd=tmp_path, COLUMNS="200")
    assert "This step holds no communication, so there is nothing to hide" in done.stdout, done.stderr
