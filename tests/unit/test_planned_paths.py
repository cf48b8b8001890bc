"""The paths that a plan asks for in a running job, which knows collectives by kind: what means only some is refused."""

import shlex
from pathlib import Path

import pytest
from msgspec.structs import replace

from counterpoint.controls import OverlapMatmul, Priority, ResidencyCap
from counterpoint.integrations.paths import COPIES, Paths
from counterpoint.integrations.planned_paths import applied_in_job, planned_paths
from counterpoint.plan import Directive, Match, Plan, save_plan
from counterpoint.step import Collective, CollectiveKind, Dependency, Operation, Step, UnevenParts
from counterpoint.units import MIB
from helpers.command import TRACES, counterpoint, refusal
from helpers.toy_steps import kernel, step_of

GATHERS = Match(kind="communication", collective="all_gather")


def collective(kind: CollectiveKind, num_mib: int, group: str) -> Collective:
    return Collective(
        name=f"nccl {kind}",
        stream=2,
        collective=kind,
        num_bytes=num_mib * MIB,
        group_size=2,
        process_group=group,
        lone_us=1.0,
    )


PARTS = UnevenParts(group_rank=0, sent_bytes=(MIB, 63 * MIB), received_bytes=(MIB, 20 * MIB))
STEP: Step = step_of(
    collective("all_gather", 64, "fsdp"),
    collective("all_gather", 64, "fsdp"),
    collective("all_gather", 1, "norms"),
    collective("all_reduce", 64, "tp"),
    collective("all_reduce", 64, "dp"),
    replace(collective("all_to_all", 64, "ep"), parts=PARTS),
)


def match(**fields: object) -> Match:
    return Match(kind="communication", **fields)  # type: ignore[arg-type]


def asked(found: Match, control: OverlapMatmul | None = None) -> Directive:
    return Directive(match=found, controls=(control or COPIES,), reason="test")


@pytest.mark.parametrize(
    ("narrower", "names"),
    [
        ({"process_group": "fsdp"}, "process_group"),
        ({"num_bytes": 64 * MIB}, "num_bytes"),
        ({"process_group": "fsdp", "ordinals": (0, 1)}, "process_group and ordinals"),
    ],
)
@pytest.mark.parametrize("control", [None, OverlapMatmul()])
def test_without_the_step_a_match_by_more_than_kind_is_refused_and_says_by_what(
    narrower: dict[str, object], names: str, control: OverlapMatmul | None
) -> None:
    found = planned_paths(
        [asked(match(collective="all_gather", **narrower), control), asked(match(collective="all_reduce"))]
    )
    assert found.paths == Paths(copies=("all_reduce",))
    assert [refusal.reason.partition(", and ")[0] for refusal in found.refusals] == [f"it goes by {names}"]


@pytest.mark.parametrize(
    ("matches", "copies", "reasons"),
    [
        ([match(collective="all_gather", process_group="fsdp")], ("all_gather",), []),
        ([match(operations=(0,)), match(operations=(1,))], ("all_gather",), []),
        ([match(collective="all_gather", ordinals=(0,))], (), ["the plan matches 1 of 2 all-gathers that are large enough"]),
        ([match(collective="all_reduce", process_group="tp")], (), ["the plan matches 1 of 2 all-reduces"]),
        ([match(collective="all_to_all"), GATHERS], ("all_gather",), ["each call gives the sizes of its parts"]),
        ([match(collective="broadcast"), GATHERS], ("all_gather",), ["no integration moves broadcast by copies"]),
    ],
)
def test_with_the_step_a_match_is_had_where_it_means_all_that_copies_would_take(
    matches: list[Match], copies: tuple[CollectiveKind, ...], reasons: list[str]
) -> None:
    found = planned_paths(map(asked, matches), STEP)
    assert found.paths.copies == copies
    assert [refusal.reason[: len(reason)] for refusal, reason in zip(found.refusals, reasons, strict=True)] == reasons


def test_all_to_alls_without_sizes_go_by_copies_beside_others_with_sizes() -> None:
    step = step_of(*STEP.operations, collective("all_to_all", 64, "sequence"), collective("broadcast", 64, "dp"))
    assert planned_paths([asked(match(collective="all_to_all"))], step).paths == Paths(copies=("all_to_all",))
    assert planned_paths([asked(match(collective="all_to_all"))], step).refusals == ()


@pytest.mark.parametrize(("numbers", "reasons"), [((0,), ["the plan matches 1 of 2 all-to-alls"]), ((0, 1), [])])
def test_experts_are_overlapped_only_if_the_plan_means_all_of_their_all_to_alls(
    numbers: tuple[int, ...], reasons: list[str]
) -> None:
    """Their calls give sizes, which keeps them from copies but not from operators."""
    step = step_of(*[replace(collective("all_to_all", 64, "ep"), parts=PARTS) for _ in range(2)])
    found = planned_paths([asked(match(operations=numbers), OverlapMatmul())], step)
    assert found.paths.overlaps_experts == (not reasons)
    assert [refusal.reason.partition(" that ")[0] for refusal in found.refusals] == reasons


def test_overlapped_matmuls_are_a_matter_of_their_own_group() -> None:
    assert planned_paths([asked(match(collective="all_reduce", process_group="tp"), OverlapMatmul())], STEP).refusals == ()
    both = [asked(match(collective="all_reduce", process_group="tp"), OverlapMatmul()), asked(match(operations=(4,)))]
    assert planned_paths(both, STEP).paths == Paths(copies=("all_reduce",), overlaps_matmuls=True)


@pytest.mark.parametrize(("numbers", "is_had"), [((1, 4), True), ((1,), False), ((1, 4, 6), True)])
def test_a_collective_without_a_matmul_does_not_keep_the_others_from_being_overlapped(
    numbers: tuple[int, ...], is_had: bool
) -> None:
    other = kernel(64, 10.0)
    matmul = replace(other, character="matmul")
    gather = collective("all_gather", 64, "tp")

    def after(number: int, operation: Operation) -> Operation:
        return replace(operation, waits_for=(Dependency(operation=number),))

    pair = after(0, gather), after(1, matmul)
    step = step_of(other, *pair, other, after(3, gather), after(4, matmul), after(5, gather))
    plan = Plan(directives=(asked(match(operations=numbers), OverlapMatmul()),))
    assert planned_paths(plan.directives, step).paths.overlaps_matmuls == is_had
    assert applied_in_job(plan, step) == (OverlapMatmul(),) * is_had
    assert applied_in_job(plan) == (OverlapMatmul(),)


def test_a_cap_on_some_launches_of_a_name_is_not_applied_in_a_job() -> None:
    step = step_of(kernel(64, 10.0), kernel(64, 10.0))
    for numbers, is_had in (((0,), False), ((0, 1), True)):
        cap = ResidencyCap(ctas_per_sm=1, dynamic_shared_bytes=100_000)
        plan = Plan(
            directives=(Directive(match=Match(operations=numbers), controls=(cap, Priority(priority=-5)), reason=""),)
        )
        assert applied_in_job(plan, step) == ((cap,) * is_had + (Priority(priority=-5),))


@pytest.mark.parametrize("name", ["ddp.rank0", "fsdp2.rank0", "moe.rank0", "starved.rank0", "tp.rank0"])
def test_run_applies_the_plan_of_each_trace_for_which_tune_prints_its_command(name: str, tmp_path: Path) -> None:
    trace = TRACES / f"{name}.json.gz"
    said = counterpoint("tune", trace, "-o", "plan.toml", cwd=tmp_path, COLUMNS="400").stdout
    commands = [line.strip() for line in said.splitlines() if line.startswith("     counterpoint run ")]
    assert len(commands) == (name not in ("moe.rank0", "tp.rank0"))
    for command in commands:
        words = shlex.split(command.replace("torchrun train.py", "echo started"))[1:]
        assert counterpoint(*words, cwd=tmp_path).stdout == "started\n"


def test_overlapped_all_to_alls_are_those_of_routed_experts() -> None:
    experts = asked(match(collective="all_to_all"), OverlapMatmul())
    assert planned_paths([experts]).paths == planned_paths([experts], STEP).paths == Paths(overlaps_experts=True)
    assert not Paths(overlaps_experts=True).keeps_bits
    both = [experts, asked(Match(kind="communication"), OverlapMatmul())]
    assert planned_paths(both).paths == Paths(overlaps_matmuls=True, overlaps_experts=True)


@pytest.mark.parametrize("has_more", [True, False])
def test_run_says_before_the_job_starts_what_of_a_plan_it_ignores(has_more: bool, tmp_path: Path) -> None:
    directives = [asked(match(collective="all_gather", process_group="fsdp"))] + [
        asked(match(collective="all_reduce"))
    ] * has_more
    save_plan(Plan(verdict="GAIN", directives=tuple(directives)), tmp_path / "plan.toml")
    ended = counterpoint("run", "--plan", tmp_path / "plan.toml", "--", "echo", "started")
    assert (ended.returncode, ended.stdout) == ((0, "started\n") if has_more else (2, ""))
    assert "'all_gather in process group fsdp': it goes by process_group" in ended.stderr.splitlines()[0]


def test_a_reason_that_holds_for_several_directives_is_told_once(tmp_path: Path) -> None:
    narrow = [asked(match(collective="all_gather", process_group=name)) for name in ("fsdp", "tp", "cp")]
    save_plan(Plan(verdict="GAIN", directives=tuple(narrow)), tmp_path / "plan.toml")
    said = refusal("run", "--plan", tmp_path / "plan.toml", "--", "echo", "started")
    assert "'all_gather in process group fsdp' and 2 more: it goes by process_group" in said
    assert said.count("add --step TRACE") == 1
    assert len(said) < 400
