"""What a directive matches: fields, ordinals, and matches that planners write, which hold for the next run of a job."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from counterpoint import read_trace
from counterpoint.controls import Control, HeadStart, Priority, Transport
from counterpoint.errors import PlanError
from counterpoint.plan import LEAVE_IT, Directive, Expectation, Match, Plan, load_plan, save_plan
from counterpoint.planner.durable import DurableMatches
from counterpoint.step import Collective, Copy, Kernel, Operation, Step
from helpers.toy_steps import GREATEST, kernel, step_of

TRACES = Path(__file__).parents[2] / "examples" / "traces"
HOLD = HeadStart(hold_us=5.0)
COPIES = Transport(transport="copy_engine")


def gather(num_bytes: int = 1 << 20, group: str | None = "tp", collective: str = "all_gather") -> Collective:
    return Collective(
        name=f"nccl {collective}",
        stream=2,
        collective=collective,  # type: ignore[arg-type]
        num_bytes=num_bytes,
        group_size=2,
        lone_us=1.0,
        process_group=group,
    )


def named(name: str) -> Kernel:
    return replace(kernel(1, 1.0), name=name)


STEP = step_of(named("a"), gather(), named("b"), gather(2 << 20), named("a"), gather(group="dp"), named("a"))
OPERATIONS: list[Operation] = [
    named("a"),
    named("a*"),
    named("[b]"),
    gather(),
    gather(2 << 20),
    gather(group=None),
    gather(group="dp"),
    gather(collective="all_reduce"),
    Copy(name="Memcpy PtoP", stream=3, direction="peer_to_peer", num_bytes=8, lone_us=1.0),
    Copy(name="Memcpy DtoD", stream=3, direction="device_to_device", num_bytes=8, lone_us=1.0),
]


@pytest.mark.parametrize(
    ("match", "numbers"),
    [
        (Match(), (0, 1, 2, 3, 4, 5, 6)),
        (Match(collective="all_gather"), (1, 3, 5)),
        (Match(process_group="tp"), (1, 3)),
        (Match(process_group="tp", num_bytes=2 << 20), (3,)),
        (Match(num_bytes=1 << 20), (1, 5)),
        (Match(name="a", ordinals=(0, 2)), (0, 6)),
        (Match(collective="all_gather", ordinals=(2, 1)), (3, 5)),
        (Match(name="a", operations=(1, 4, 6), ordinals=(1,)), (6,)),
        (Match(name="a", ordinals=(3,)), ()),
        (Match(process_group="pp"), ()),
    ],
)
def test_all_that_a_match_says_must_hold_and_ordinals_count_what_is_left(match: Match, numbers: tuple[int, ...]) -> None:
    assert match.accepted(STEP) == numbers


@given(chosen=st.data(), operations=st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=14))
def test_durable_matches_mean_the_chosen_operations_each_once_and_no_other(
    chosen: st.DataObject, operations: list[Operation]
) -> None:
    step = step_of(*operations)
    wanted = chosen.draw(st.sets(st.integers(0, len(operations) - 1)))
    controls = chosen.draw(st.sampled_from([(), (COPIES,)]))
    matches = DurableMatches(step).matches(wanted, controls)
    accepted = [number for match in matches for number in match.accepted(step)]
    assert sorted(accepted) == sorted(wanted)
    assert all(match.operations is None for match in matches)
    if controls and all(isinstance(operations[number], Collective) for number in wanted):
        assert all(match.collective for match in matches)


@pytest.mark.parametrize(
    ("numbers", "controls", "matches"),
    [
        ({1, 3, 5}, (GREATEST,), [Match(kind="communication")]),
        ({1, 3, 5}, (COPIES,), [Match(kind="communication", collective="all_gather")]),
        ({1, 3}, (GREATEST,), [Match(kind="communication", collective="all_gather", process_group="tp")]),
        (
            {3},
            (GREATEST,),
            [Match(kind="communication", collective="all_gather", process_group="tp", num_bytes=2 << 20)],
        ),
        ({0, 4, 6}, (HOLD,), [Match(name="a", kind="computation")]),
        ({2, 6}, (HOLD,), [Match(name="b", kind="computation"), Match(name="a", kind="computation", ordinals=(2,))]),
    ],
)
def test_the_widest_match_that_means_no_other_operation_is_taken(
    numbers: set[int], controls: tuple[Control, ...], matches: list[Match]
) -> None:
    assert list(DurableMatches(STEP).matches(numbers, controls)) == matches


def plan_for(step: Step, *numbers: int, control: Control = HOLD) -> Plan:
    """A plan as planners give it, for these operations."""
    directive = Directive(match=Match(operations=numbers), controls=(control,), reason="test")
    directives = DurableMatches(step).directives([directive])
    return Plan(step_name="first run", step_fingerprint=step.fingerprint(), verdict="GAIN", directives=directives)


def test_a_misspelt_name_is_told_the_nearest_and_a_name_that_is_there_is_not() -> None:
    step = step_of(named("attention_forward"), named("layer_norm"))

    def refused(match: Match) -> str:
        with pytest.raises(PlanError) as caught:
            Plan(directives=(Directive(match=match, controls=(HOLD,), reason="test"),)).check_step(step)
        return str(caught.value)

    assert "; the nearest name there is 'attention_forward'. Correct its match" in refused(Match(name="atention_forward"))
    assert "; the nearest name there is 'layer_norm'. Correct its match" in refused(Match(name="*nrom*"))
    assert "nearest" not in refused(Match(name="softmax"))
    assert "nearest" not in refused(Match(name="layer_norm", kind="communication"))


def test_a_plan_survives_a_restart_in_which_other_operations_came_between() -> None:
    later = step_of(named("new"), *STEP.operations[:4], named("new"), *STEP.operations[4:])
    plan = plan_for(STEP, 1, 3, 6)
    plan.check_step(later)
    controlled = [number for number, controls in enumerate(plan.controls_of(later)) if controls]
    assert [later.operations[number] for number in controlled] == [STEP.operations[number] for number in (1, 3, 6)]
    assert plan.remarks_on(STEP) == ()
    (remark,) = plan.remarks_on(later)
    assert "was made for step 'first run'" in remark
    assert later.fingerprint() in remark


def test_a_plan_that_a_step_fits_in_part_says_which_numbers_are_nothing_here() -> None:
    shorter = step_of(*STEP.operations[:6])
    plan = plan_for(STEP, 4, 6)
    plan.check_step(shorter)
    assert "Directive 0: this step has 2 of 'a', so numbers 2 match nothing here." in plan.remarks_on(shorter)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (plan_for(STEP, 3), "Directive 0 of the plan matches none of the 1 operations of step 'toy'"),
        (plan_for(STEP, 4, 6), "Directive 0 of the plan names number 1 of 'a', and step 'toy' has 1 of them"),
        (replace(plan_for(STEP, 0), directives=()), "was made for step 'first run'"),
        (
            Plan(
                step_fingerprint="0",
                directives=(Directive(match=Match(operations=(0,)), controls=(HOLD,), reason="test"),),
            ),
            "and names operations by number. Run `counterpoint tune`",
        ),
    ],
)
def test_a_plan_of_another_step_is_refused_where_a_directive_would_do_nothing_or_goes_by_number(
    plan: Plan, says: str
) -> None:
    with pytest.raises(PlanError) as caught:
        plan.check_step(step_of(named("a")))
    assert says in str(caught.value)


def test_in_a_plan_by_hand_an_ordinal_that_the_step_lacks_is_refused_with_those_that_it_has() -> None:
    directive = Directive(match=Match(name="a", ordinals=(0, 3)), controls=(HOLD,), reason="test")
    with pytest.raises(PlanError, match="names number 3 of 'a', and step 'toy' has 3 of them, numbers 0 to 2"):
        Plan(directives=(directive,)).check_step(STEP)


@pytest.mark.parametrize(("fields", "says"), [({"ordinals": (2, -1)}, "found -1"), ({"num_bytes": -5}, "found -5")])
def test_a_match_that_nothing_could_fit_is_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Match(**fields)  # type: ignore[arg-type]


def test_the_process_group_is_no_part_of_a_steps_fingerprint() -> None:
    assert step_of(gather(group="tp")).fingerprint() == step_of(gather(group=None)).fingerprint()


def test_controls_of_several_directives_are_given_in_the_plans_order() -> None:
    directives = tuple(
        Directive(match=match, controls=(control,), reason="test")
        for match, control in ((Match(name="a"), HOLD), (Match(), GREATEST), (Match(name="a", ordinals=(0,)), COPIES))
    )
    controls = Plan(directives=directives).controls_of(STEP)
    assert controls[0] == (HOLD, GREATEST, COPIES)
    assert controls[1] == (GREATEST,)
    assert controls[4] == (HOLD, GREATEST)
    assert set(LEAVE_IT.controls_of(STEP)) == {()}


def test_a_plan_of_an_earlier_version_by_number_is_still_read_and_applied(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(
        'machine = "h200"\n[[directives]]\nreason = "old"\nmatch = { kind = "communication", operations = [1, 5] }\n'
        'controls = [{ control = "priority", priority = -5 }]\n'
    )
    plan = load_plan(path)
    plan.check_step(STEP)
    assert [number for number, controls in enumerate(plan.controls_of(STEP)) if controls] == [1, 5]
    save_plan(plan, path)
    assert load_plan(path) == plan
    assert plan.controls_of(STEP)[1] == (Priority(priority=-5),)


def test_a_trace_tells_the_process_group_of_each_collective() -> None:
    step = read_trace(TRACES / "fsdp2.rank0.json.gz").step
    collectives = [operation for operation in step.operations if isinstance(operation, Collective)]
    assert len(collectives) == 18
    assert {each.process_group for each in collectives} == {"default_pg"}


@pytest.mark.parametrize("time_us", [-1.0, float("nan"), float("inf")])
def test_an_expected_time_that_cannot_be_is_refused(time_us: float) -> None:
    with pytest.raises(PlanError, match="planned_us must be a time of 0 or more"):
        Expectation(origin="measured", baseline_us=1, planned_us=time_us)


def test_a_number_of_an_operation_counts_from_0() -> None:
    with pytest.raises(PlanError, match="operations count from 0; found -1"):
        Match(operations=(-1,))
