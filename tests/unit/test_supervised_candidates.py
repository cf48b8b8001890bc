"""What is tried on a running job, and what rank 0 decides: from kernels seen to directives with their reasons."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from counterpoint.controls import HeadStart, Priority
from counterpoint.integrations.paths import Integration, PathOffer
from counterpoint.launch_filter.control_block import SeenFunction
from counterpoint.launch_filter.layout import MAX_RULES
from counterpoint.measurement.tournament import least_turns
from counterpoint.measurement.values import Comparison, Measurement, Verdict
from counterpoint.plan import Directive, Match, Plan, Refusal
from counterpoint.step import CollectiveKind
from counterpoint.supervised.candidates import LiveCandidate, LiveProposal, propose_live, propose_paths
from counterpoint.supervised.decisions import Reference, Room, decide, propose, why_another_job, why_removed
from counterpoint.supervised.messages import KernelReport, RoundReport, Trials
from counterpoint.supervised.running_job import JobGpu
from counterpoint.supervised.settings import LiveSettings, setting_of
from counterpoint.supervised.turns import TURN_STEPS
from helpers.live_job_double import GPU, NCCL, nccl, seen

LONG, SMALL = seen("_Z4longPf"), seen("_Z5smallPf", num_ctas=131)
# As in examples/traces/ddp.rank0.json.gz: a matmul of cuBLAS, an attention of cuDNN
MATMUL = seen("nvjet_sm90", grid=(2, 66, 1), block=(384, 1, 1), registers_per_thread=168, dynamic_shared_bytes=213188)
ATTENTION = seen("cudnn_flash", 132, block=(384, 1, 1), registers_per_thread=168, dynamic_shared_bytes=232448)


def controls(proposal: LiveProposal, label: str) -> list[object]:
    (candidate,) = [each for each in proposal.candidates if each.label == label]
    return [control for directive in candidate.directives for control in directive.controls]


def refused(proposal: LiveProposal, control: str) -> str:
    return " ".join(refusal.reason for refusal in proposal.refusals if refusal.control == control)


def test_collectives_get_the_drivers_greatest_priority() -> None:
    assert controls(propose_live([LONG, nccl()], GPU), "priority") == [Priority(priority=-5)]
    unknown = replace(GPU, name="NVIDIA Unheard Of")
    assert controls(propose_live([LONG, nccl()], unknown), "priority") == [Priority(priority=-3)]


def held(proposal: LiveProposal, label: str) -> dict[str, float]:
    """Head starts in us by the kernel they are for; empty where there is no such candidate."""
    return {
        directive.match.name: control.hold_us
        for candidate in proposal.candidates
        if candidate.label == label
        for directive in candidate.directives
        for control in directive.controls
        if isinstance(control, HeadStart)
    }


def test_only_kernels_with_a_cta_for_every_sm_are_held_back() -> None:
    proposal = propose_live([LONG, SMALL, MATMUL, nccl()], GPU)
    assert held(proposal, "head start 5 us") == {MATMUL.name: 5}
    assert held(proposal, "priority + head start 5 us in all possible races") == {LONG.name: 5, MATMUL.name: 5}
    assert held(proposal, "priority + head start 20 us in all possible races") == {LONG.name: 20, MATMUL.name: 20}
    assert "none blocks a collective" in refused(propose_live([SMALL, nccl()], GPU), "head_start")


def test_what_won_races_is_tried_first_and_is_all_that_the_least_budget_tries() -> None:
    """docs/race.md: priority, and a head start against kernels that hold every SM to their end."""
    functions = [LONG, MATMUL, ATTENTION, nccl()]
    labels = [candidate.label for candidate in propose_live(functions, GPU).candidates]
    assert labels[:2] == ["priority", "priority + head start 5 us"]
    settings = LiveSettings(is_tuning=True, budget_steps=100)
    trials = propose([KernelReport(functions=tuple(functions))], GPU, settings, Room(num_turns=least_turns(2)))
    assert [candidate.label for candidate in trials.candidates] == labels[:2]
    _, second = trials.candidates
    prioritized, *others = second.directives
    assert prioritized.controls == (Priority(priority=-5),)
    assert {directive.match.name: directive.controls for directive in others} == {
        MATMUL.name: (HeadStart(hold_us=5),),
        ATTENTION.name: (HeadStart(hold_us=5),),
    }


def test_a_job_of_many_waves_alone_gets_head_starts_after_priority_alone() -> None:
    labels = [candidate.label for candidate in propose_live([LONG, nccl()], GPU).candidates]
    assert labels[:2] == ["priority", "priority + head start 5 us in all possible races"]
    assert "head start 5 us" not in labels


@pytest.mark.parametrize(
    ("function", "is_holder"),
    [
        (MATMUL, True),
        (ATTENTION, True),
        (replace(MATMUL, grid=(2, 67, 1)), False),  # a second wave: SMs become free before its end
        (seen("elementwise", 16384, registers_per_thread=34), False),
        (seen("unshared", 132), True),  # its SMs are configured to little shared memory while it is there
        (seen("full", 132 * 16), True),  # a single wave that takes all the threads of every SM
        (seen("one", 132, dynamic_shared_bytes=12_000), False),  # 1,024 registers of a sub-partition; NCCL's CTA 15,360
        (seen("two", 264, dynamic_shared_bytes=12_000), True),  # 2,048: it no longer fits the 16,384
    ],
)
def test_a_head_start_is_for_kernels_that_hold_every_sm_to_their_end(function: SeenFunction, is_holder: bool) -> None:
    assert bool(held(propose_live([function, nccl()], GPU), "head start 5 us")) is is_holder


def test_tiled_matmuls_are_tried_with_priority_and_the_carveout_that_their_ctas_need() -> None:
    tiled = seen("triton_tem_fused_mm_0", 4096, dynamic_shared_bytes=65_536)
    needing_all = seen("triton_tem_fused_mm_1", 4096, dynamic_shared_bytes=73_728)
    found = {each.label: each for each in propose_live([tiled, needing_all, nccl()], GPU).candidates}
    percents = {
        label: {rule.pattern: rule.carveout_percent for rule in each.setting.rules if rule.carveout_percent is not None}
        for label, each in found.items()
    }
    assert percents["priority + carveout"] == {tiled.name: 85}
    assert percents["priority + carveout for a CTA less"] == {tiled.name: 85, needing_all.name: 71}


@given(num_ctas=st.integers(1, 5000), warps=st.integers(1, 32), registers=st.integers(1, 64))
def test_a_kernel_without_shared_memory_is_held_back_just_where_it_has_one_wave(
    num_ctas: int, warps: int, registers: int
) -> None:
    function = seen("k", num_ctas, block=(32 * warps, 1, 1), registers_per_thread=registers)
    allocated = -(-registers * 32 // 256) * 256
    most_on_an_sm = min(32, 64 // warps, 4 * (16384 // allocated) // warps)  # H200: CTAs, warps, registers
    is_held = bool(held(propose_live([function, nccl()], GPU), "head start 5 us"))
    assert is_held is (132 <= num_ctas <= 132 * most_on_an_sm)


@pytest.mark.parametrize("functions", [[LONG, SMALL], [LONG, MATMUL], [MATMUL, ATTENTION]])
def test_without_priority_the_same_is_tried_without_it(functions: list[SeenFunction]) -> None:
    without = propose_live([*functions, nccl()], replace(GPU, name="NVIDIA Unheard Of", greatest_priority=0))
    assert [each.label for each in without.candidates] == ["head start 5 us", "head start 20 us in all possible races"]
    assert held(without, "head start 5 us") == {each.name: 5 for each in functions if each is not SMALL}
    assert "no stream priorities" in refused(without, "priority")


@given(st.lists(st.sampled_from([LONG, SMALL, MATMUL, ATTENTION]), unique_by=lambda each: each.name), st.booleans())
def test_no_two_candidates_are_alike(functions: list[SeenFunction], is_known: bool) -> None:
    gpu = GPU if is_known else replace(GPU, name="NVIDIA Unheard Of")
    candidates = propose_live([*functions, nccl()], gpu).candidates
    assert len({candidate.label for candidate in candidates}) == len(candidates)
    assert len({frozenset(candidate.setting.rules) for candidate in candidates}) == len(candidates)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (seen("gemm", 132, block=(384, 1, 1), registers_per_thread=168), "fills the register file"),
        (seen("grid", 4096, is_cooperative=True), "grid barrier"),
        (LONG, "CTAs per SM. Such a cap costs"),
    ],
)
def test_a_kernel_that_no_cap_can_help_is_refused_with_the_reason(function: object, words: str) -> None:
    proposal = propose_live([function, nccl()], GPU)  # type: ignore[list-item]
    assert words in refused(proposal, "residency_cap")
    assert "caps" not in [candidate.label for candidate in proposal.candidates]


def test_on_a_gpu_that_no_machine_describes_caps_are_refused() -> None:
    assert "no shipped machine describes" in refused(propose_live([LONG, nccl()], replace(GPU, name="X")), "residency_cap")


def test_where_the_driver_ignores_priority_it_is_refused() -> None:
    amd = JobGpu(name="AMD Instinct MI300X", num_sms=304, greatest_priority=-1)
    proposal = propose_live([LONG, nccl()], amd)
    assert not any("priority" in candidate.label for candidate in proposal.candidates)
    assert "ignores them" in refused(proposal, "priority")


@pytest.mark.parametrize("functions", [[], [LONG], [SMALL]])
def test_without_a_collective_nothing_is_tried(functions: list[object]) -> None:
    proposal = propose_live(functions, GPU)  # type: ignore[arg-type]
    assert proposal.candidates == ()
    assert proposal.refusals


@example(300)
@settings(max_examples=25)  # of up to 300 kernels each
@given(st.integers(1, 300))
def test_every_candidate_fits_the_filters_table(num_kernels: int) -> None:
    proposal = propose_live([seen(f"_Z4long{number}Pf") for number in range(num_kernels)] + [nccl()], GPU)
    assert proposal.candidates
    for candidate in proposal.candidates:
        assert len(candidate.setting.rules) <= MAX_RULES
        assert candidate.setting == setting_of(Plan(directives=candidate.directives))


def test_a_truncated_name_is_matched_by_its_beginning() -> None:
    proposal = propose_live([seen("_Z4long", pattern="_Z4long*"), nccl()], GPU)
    assert held(proposal, "priority + head start 5 us in all possible races") == {"_Z4long*": 5}


def test_what_the_budget_does_not_let_try_is_refused_with_the_reason() -> None:
    settings = LiveSettings(is_tuning=True, budget_steps=100)
    trials = propose([KernelReport(functions=(LONG, MATMUL, nccl()))], GPU, settings, Room(num_turns=least_turns(1)))
    assert [candidate.label for candidate in trials.candidates] == ["priority"]
    left_out = [refusal for refusal in trials.refusals if refusal.control == "candidate"]
    assert [refusal.target for refusal in left_out] == [
        "priority + head start 5 us, priority + head start 5 us in all possible races and 2 more"
    ]
    found = re.fullmatch(
        r"not tried for want of steps: raise --budget \(now 100; (\d+) is enough for all\)", left_out[0].reason
    )
    assert found is not None
    more = (int(found[1]) - 100) // TURN_STEPS
    for is_enough, num_turns in ((True, more), (False, more - 1)):
        room = Room(num_turns=least_turns(1) + num_turns)
        trials = propose([KernelReport(functions=(LONG, MATMUL, nccl()))], GPU, settings, room)
        assert any(refusal.control == "candidate" for refusal in trials.refusals) != is_enough


def test_a_budget_too_small_to_try_anything_says_which_one_is_enough() -> None:
    settings = LiveSettings(is_tuning=True, budget_steps=100)
    trials = propose([KernelReport(functions=(LONG, nccl()))], GPU, settings, Room(num_turns=15))
    comparison = Comparison(measurements=(), verdict=Verdict(chosen=0, best=0, reason="no candidate"))
    summary = decide(trials, comparison, [], GPU).plan.summary
    assert summary == "nothing was tried: --budget 100 is too small to try any candidate here; the least is 121"
    assert propose([KernelReport(functions=(LONG, nccl()))], GPU, settings, Room(num_turns=15 + 7)).candidates


def test_a_plan_that_was_given_is_tried_first() -> None:
    plan = Plan(directives=(Directive(match=Match(kind="communication"), controls=(Priority(priority=-1),), reason="r"),))
    settings = LiveSettings(is_tuning=True, plan=plan, given=setting_of(plan))
    trials = propose([KernelReport(functions=(LONG, nccl()))], GPU, settings, Room(num_turns=1000))
    assert [candidate.label for candidate in trials.candidates][:2] == ["the plan given", "priority"]


def decided(refusals: list[Refusal], gain: float | None = None, *, engaged: bool = True, reason: str = "proven") -> Plan:
    """What rank 0 makes of a verdict on one candidate, a priority; None where there was none."""
    directive = Directive(match=Match(kind="communication"), controls=(Priority(priority=-5),), reason="test")
    candidate = LiveCandidate(label="priority", directives=(directive,), setting=setting_of(Plan(directives=(directive,))))
    control = ("priority", "communication kernels")
    refused_there = Refusal(control=control[0], target=control[1], reason="not here")
    report = RoundReport(turns=(), engaged=(control,) * engaged, unengaged=(refused_there,) * (not engaged))
    trials = Trials(candidates=(candidate,) * (gain is not None), refusals=tuple(refusals))
    if gain is None:
        verdict = Verdict(chosen=0, best=0, reason="no candidate")
        return decide(trials, Comparison(measurements=(), verdict=verdict), [report], GPU).plan
    verdict = Verdict(chosen=int(reason == "proven"), best=1, reason=reason, gain=gain, needed_gain=0.03)
    return decide(trials, Comparison(measurements=measured(1 - gain), verdict=verdict), [report], GPU).plan


def test_a_summary_is_short_and_leaves_many_refusals_to_the_plan() -> None:
    refusals = [Refusal(control="residency_cap", target=f"k{number}", reason=f"reason {number}") for number in range(9)]
    assert decided(refusals).summary == "nothing to try (9 refusals)"
    assert decided(refusals).refusals == tuple(refusals)
    assert decided(refusals[:1]).summary == "nothing to try: reason 0"
    assert decided(refusals[:1] * 9).summary == "nothing to try: reason 0"


def test_a_plan_lists_a_reason_once_with_the_number_of_kernels() -> None:
    alike = [Refusal(control="residency_cap", target=f"k{number}", reason="no room") for number in range(5)]
    other = Refusal(control="head_start", target="k1", reason="no room")
    merged = Refusal(control="residency_cap", target="k0", reason="no room", num_targets=5)
    assert decided([*alike, other]).refusals == decided([*alike, other], 0.1).refusals == (merged, other)
    assert decided(alike[:3]).refusals == tuple(alike[:3]), "few are listed"


def test_a_gain_without_any_control_in_effect_is_not_called_noise() -> None:
    assert decided([], 0.2).verdict == "GAIN"
    plan = decided([], 0.2, engaged=False)
    assert plan.verdict == "NO_GAIN"
    assert "20.0 % faster, but none of its controls took effect" in plan.summary
    assert plan.expectation is not None
    assert plan.expectation.planned_us == plan.expectation.baseline_us


def test_a_gain_that_is_not_proven_says_what_was_needed() -> None:
    plan = decided([], 0.012, reason="not proven")
    assert plan.verdict == "NO_GAIN"
    assert "1.2 % faster, but with this many rounds, 3.0 % is needed to tell a gain from noise" in plan.summary


def measured(ratio: float, *, median_us: float = 1000.0) -> tuple[Measurement, Measurement]:
    alone = Measurement(label="as it is", median_us=median_us, least_us=1, ratio=1, spread=0.01, num_rounds=5)
    plan = Measurement(label="p", median_us=median_us * ratio, least_us=1, ratio=ratio, spread=0.01, num_rounds=5)
    return alone, plan


GRIDS = {LONG.name: (4096, 1, 1), NCCL: (24, 1, 1)}
LAUNCHES = {LONG.name: 10, NCCL: 10}


@pytest.mark.parametrize(
    ("times", "grids", "is_another"),
    [
        (measured(0.8), GRIDS, False),
        (measured(1.05), GRIDS, False),
        (measured(0.8, median_us=1200), GRIDS, True),
        (measured(1, median_us=1200)[:1], GRIDS, True),
        (measured(0.8), GRIDS | {LONG.name: (9, 1, 1)}, True),
        ((), GRIDS, False),
    ],
)
def test_a_job_is_another_if_its_steps_or_its_launches_have_changed(
    times: tuple[Measurement, ...], grids: dict[str, tuple[int, int, int]], is_another: bool
) -> None:
    assert bool(why_another_job(times, Reference(grids=GRIDS, baseline_us=1000), grids, LAUNCHES)) is is_another


def test_a_rare_kernel_is_no_change_of_the_job() -> None:
    grids, launches = GRIDS | {"checkpoint": (1, 1, 1)}, LAUNCHES | {"checkpoint": 1}
    assert not why_another_job(measured(0.8), Reference(grids=GRIDS, baseline_us=1000), grids, launches)


def test_a_plan_that_is_removed_is_told_with_what_its_last_look_showed() -> None:
    assert "by 5.0 %, spread 1.0 %, in its last check" in why_removed(measured(1.05))


def test_on_amd_no_head_start_is_proposed_and_the_reason_is_said() -> None:
    proposal = propose_live([LONG, MATMUL, nccl()], replace(GPU, name="AMD Instinct MI300X"))
    assert not any("head start" in candidate.label for candidate in proposal.candidates)
    assert "the launch filter cannot hold a stream on AMD GPUs" in refused(proposal, "head_start")


@pytest.mark.parametrize(
    ("offered", "labels"),
    [
        ({"tensor_parallel": ()}, ["matmuls overlapped"]),
        (
            {"tensor_parallel": (), "collectives": ("all_to_all",)},
            ["all-to-alls by copies", "matmuls overlapped", "matmuls overlapped + all-to-alls by copies"],
        ),
        (
            {"ddp": ("all_reduce",), "collectives": ("all_to_all",)},
            ["all-to-alls by copies", "all-to-alls by copies + all-reduces by copies", "all-reduces by copies"],
        ),
        (
            {"fsdp2": ("all_gather", "reduce_scatter")},
            ["all-gathers by copies + reduce-scatters by copies", "all-gathers by copies"],
        ),
    ],
)
def test_each_path_is_tried_alone_and_together_with_others(
    offered: dict[Integration, tuple[CollectiveKind, ...]], labels: list[str]
) -> None:
    offers = [PathOffer(integration=name, what=name, kinds=kinds) for name, kinds in offered.items()]
    assert [each.label for each in propose_paths(offers, keeps_bits=False).candidates] == labels
