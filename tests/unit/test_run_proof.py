"""What the counters of filters prove, how ranks are put together, and the environment that a plan asks for."""

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.console import Console

from counterpoint.controls import CommunicationCtas, Control, ScheduleChoice
from counterpoint.engagement import Engagement
from counterpoint.errors import LaunchFilterError, PlanError
from counterpoint.integrations.paths import PathCounts
from counterpoint.launch_filter.control_block import FilterState, RuleCounters
from counterpoint.launch_filter.rules import FilterRule
from counterpoint.plan import Directive, Match, Plan
from counterpoint.report.run import print_measured, print_outcome
from counterpoint.schedule import SEQUENTIAL
from counterpoint.supervised.applicable import plan_variables, variable_remarks
from counterpoint.supervised.environment import IN_JOB, QUEUES_VARIABLE, job_environment
from counterpoint.supervised.process import Ended
from counterpoint.supervised.proof import ControlProof, ProcessProof, count_setting, prove_paths, prove_process, prove_rule
from counterpoint.supervised.run import RunOutcome, prove_setting
from counterpoint.supervised.settings import LiveRecord, Setting, Stage, Totals, add_counters
from helpers.live_job_double import NCCL, nccl, seen

CAP = FilterRule(pattern="long*", dynamic_shared_bytes=115_840, ctas_per_sm=1, carveout_percent=100)
PRIORITY = FilterRule(pattern="nccl*", kind="communication", priority=-5)
HOLD = FilterRule(pattern="long*", hold_us=5.0)
COUNTERS = st.builds(
    RuleCounters,
    num_matched=st.integers(0, 9),
    num_capped=st.integers(0, 9),
    num_prioritized=st.integers(0, 9),
    num_held=st.integers(0, 9),
    residency_found=st.none() | st.integers(0, 9),
    refusal=st.sampled_from(["", "no"]),
)


def state(rules: tuple[FilterRule, ...] = (), counters: tuple[RuleCounters, ...] = (), **changes: object) -> FilterState:
    return FilterState(
        **{
            "pid": 7,
            "rank": 0,
            "generation": 1,
            "num_launches": 10,
            "num_launches_ex": 0,
            "driver": "cuda",
            "rules": rules,
            "counters": counters,
            "functions": (),
            "problem": "",
        }
        | changes
    )


def plan_of(*controls: Control, match: Match = Match(kind="communication")) -> Plan:  # noqa: B008  a frozen value
    return Plan(directives=(Directive(match=match, controls=controls, reason="test"),))


@pytest.mark.parametrize(
    ("rule", "counters", "found"),
    [
        (CAP, RuleCounters(num_matched=4, num_capped=4, residency_found=1), ("verified", "1 CTA per SM", "")),
        (CAP, RuleCounters(num_matched=4, num_capped=4, residency_found=3), ("failed", "3 CTAs per SM", "allows more CTAs")),
        (CAP, RuleCounters(num_matched=4, num_refused=4, refusal="too big"), ("refused", "", "too big")),
        (CAP, RuleCounters(), ("failed", "", "no launch matched")),
        (PRIORITY, RuleCounters(num_matched=4, num_prioritized=3), ("verified", "priority -5", "")),
        (PRIORITY, RuleCounters(num_matched=4, refusal="old driver"), ("refused", "", "old driver")),
        (HOLD, RuleCounters(num_matched=4, num_held=1), ("verified", "head start 5 us", "")),
        (HOLD, RuleCounters(num_matched=4), ("failed", "", "no collective was launched just before it")),
    ],
)
def test_a_rules_counters_become_one_engagement(
    rule: FilterRule, counters: RuleCounters, found: tuple[str, str, str]
) -> None:
    (applied,) = prove_rule(rule, counters)
    entry = applied.engagement
    assert (entry.state, entry.found) == found[:2]
    assert found[2] in entry.reason
    assert bool(entry.reason) == (entry.state != "verified")


def test_each_control_of_a_rule_is_proven_by_itself() -> None:
    rule = FilterRule(pattern="x", dynamic_shared_bytes=1, ctas_per_sm=1, priority=-1, hold_us=1.0)
    counters = RuleCounters(num_matched=2, num_capped=2, residency_found=1)
    assert [applied.engagement.state for applied in prove_rule(rule, counters)] == ["verified", "failed", "failed"]


@pytest.mark.parametrize(("ctas_per_sm", "tag"), [(1, "residency_cap"), (None, "carveout")])
def test_a_cap_that_adds_no_shared_memory_is_not_taken_for_a_carveout(ctas_per_sm: int | None, tag: str) -> None:
    rule = FilterRule(pattern="x", dynamic_shared_bytes=0, ctas_per_sm=ctas_per_sm, carveout_percent=20)
    (found,) = prove_rule(rule, RuleCounters(num_matched=2, num_refused=2, refusal="too small"))
    assert found.engagement.control == tag


def test_one_rule_without_a_launch_is_told_the_nearest_kernel_and_several_are_not() -> None:
    functions = (seen("void scan<float*>"), seen("short_kernel"))
    misspelt = FilterRule(pattern="void scn<float\\*>", priority=-1)
    marked = FilterRule(pattern="nccl*", is_collective=True)

    def reasons(*rules: FilterRule) -> list[str]:
        counters = tuple(RuleCounters() for _ in rules)
        totals = Totals(setting=Setting(rules=rules), counters=counters)
        found = prove_process(state(rules, counters, functions=functions), Plan(), totals)
        return [each.engagement.reason for each in found.applied]

    assert reasons(misspelt, marked) == ["no launch matched; the nearest kernel is 'void scan<float*>'"]
    assert set(reasons(misspelt, HOLD)) == {"no launch matched; the plan may belong to another step"}


def test_a_rule_that_only_marks_collectives_asks_nothing() -> None:
    assert prove_rule(FilterRule(pattern="nccl*", is_collective=True), RuleCounters()) == []


@given(first=COUNTERS, second=COUNTERS)
def test_counters_add_up_whichever_comes_first(first: RuleCounters, second: RuleCounters) -> None:
    both = add_counters(first, second)
    other = add_counters(second, first)
    assert both == other
    assert both.num_matched == first.num_matched + second.num_matched
    residencies = [each.residency_found for each in (first, second) if each.residency_found is not None]
    assert both.residency_found == (max(residencies) if residencies else None)


def test_a_table_counts_what_was_kept_and_what_is_in_force_but_no_other_table() -> None:
    counted = (RuleCounters(num_matched=1, num_prioritized=1),)
    prioritized = Setting(rules=(PRIORITY,))
    kept = Totals(setting=prioritized, counters=counted)
    both = count_setting(prioritized, state((PRIORITY,), counted), kept)
    assert both.counters == (RuleCounters(num_matched=2, num_prioritized=2),)
    assert count_setting(prioritized, state((), ()), kept).counters == counted
    assert count_setting(prioritized, state((CAP,), counted), Totals()).counters == (RuleCounters(),)
    assert count_setting(Setting(), state((CAP,), counted), kept) == Totals()


def test_a_trial_of_the_same_table_does_not_prove_a_plan_that_was_decided_in_an_earlier_process() -> None:
    """Whether the last step of a job falls into such a trial is chance, and `--strict` must not depend on it."""
    counted = (RuleCounters(num_matched=3, num_prioritized=3),)
    trial, idle, setting = state((PRIORITY,), counted), state((), ()), Setting(rules=(PRIORITY,))
    for last in (trial, idle):
        (applied,) = prove_setting(last, Plan(), setting, Totals(), is_tuned=True).applied
        assert applied.engagement.state == "failed"
        assert "it was not applied in this process" in applied.engagement.reason
        assert (applied.num_matched, applied.num_applied) == (0, 0)
    decided_here = prove_setting(trial, Plan(), setting, Totals(setting=setting), is_tuned=True)
    given = prove_setting(trial, Plan(), setting, Totals(), is_tuned=False)
    for proof in (decided_here, given):
        assert [applied.engagement.state for applied in proof.applied] == ["verified"]


@pytest.mark.parametrize(
    ("control", "expected"),
    [
        (CommunicationCtas(max_ctas=24), "verified"),
        (CommunicationCtas(max_ctas=8), "failed"),
        (CommunicationCtas(max_ctas=24, num_threads=512), "verified"),
        (CommunicationCtas(max_ctas=24, num_threads=256), "failed"),
        (ScheduleChoice(schedule=SEQUENTIAL), "refused"),
    ],
)
def test_settings_are_proven_by_the_collectives_that_were_launched(control: Control, expected: str) -> None:
    found = prove_process(state(functions=(nccl(), seen("other"))), plan_of(control), Totals())
    assert [applied.engagement.state for applied in found.applied] == [expected]


def test_a_setting_without_any_collective_is_not_verified() -> None:
    found = prove_process(state(functions=(seen("other"),)), plan_of(CommunicationCtas(max_ctas=64)), Totals())
    assert found.applied[0].engagement.state == "failed"
    assert NCCL not in str(found)


def test_the_environment_has_the_filter_and_the_agent_in_front_and_keeps_the_rest(tmp_path: Path) -> None:
    inherited = {"LD_PRELOAD": "/a.so:/b.so", "PYTHONPATH": "/p", "HOME": "/h"}
    library = Path("/cache/filter.so")
    found = job_environment(inherited, tmp_path, library, Plan(), keeps_recordings=False)
    assert found["LD_PRELOAD"] == "/cache/filter.so:/a.so:/b.so"
    assert found["PYTHONPATH"] == f"{IN_JOB}:/p"
    assert found["HOME"] == "/h"
    assert inherited["PYTHONPATH"] == "/p"
    bare = job_environment({}, tmp_path, library, Plan(), keeps_recordings=False)
    assert bare["LD_PRELOAD"] == str(library), "no empty part, which would stand for the current folder"
    assert bare["PYTHONPATH"] == str(IN_JOB)


def test_operators_record_calls_only_where_paths_are_switched_for_the_filter_sees_a_graph_once(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    recordings = pytest.importorskip("counterpoint.ops.graph_cache")
    arguments = ({recordings.SWITCH: "1"}, tmp_path, Path("/cache/filter.so"), Plan())
    assert job_environment(*arguments, keeps_recordings=False)[recordings.SWITCH] == "0"
    assert job_environment(*arguments, keeps_recordings=True)[recordings.SWITCH] == "1"


def test_hardware_queues_are_asked_for_by_a_variable_of_our_own(tmp_path: Path) -> None:
    arguments = ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, tmp_path, Path("/cache/filter.so"), Plan())
    found = job_environment(*arguments, keeps_recordings=True, num_queues=8)
    assert found[QUEUES_VARIABLE] == "8"
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"] == "1", "which the job reads"
    assert QUEUES_VARIABLE not in job_environment(*arguments, keeps_recordings=True)


@pytest.mark.parametrize("folder", ["/with space", "/with:colon"])
def test_a_path_that_cannot_be_preloaded_is_refused(folder: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchFilterError, match="COUNTERPOINT_CACHE_DIR"):
        job_environment({}, tmp_path, Path(folder) / "filter.so", Plan(), keeps_recordings=False)


def test_a_limit_on_communication_is_what_nccl_calls_it() -> None:
    assert plan_variables(plan_of(CommunicationCtas(max_ctas=8))) == {"NCCL_MAX_CTAS": "8"}
    assert plan_variables(plan_of(CommunicationCtas(max_ctas=8, num_threads=256)))["NCCL_NTHREADS"] == "256"


def test_a_setting_of_the_user_is_not_overwritten(tmp_path: Path) -> None:
    plan, library = plan_of(CommunicationCtas(max_ctas=8)), Path("/filter.so")
    with pytest.raises(PlanError, match="NCCL_MAX_CTAS=8, but it is set to 16"):
        job_environment({"NCCL_MAX_CTAS": "16"}, tmp_path, library, plan, keeps_recordings=False)
    found = job_environment({"NCCL_MAX_CTAS": "8"}, tmp_path, library, plan, keeps_recordings=False)
    assert found["NCCL_MAX_CTAS"] == "8"


def test_two_limits_in_one_plan_are_refused_and_one_for_some_collectives_is_remarked() -> None:
    with pytest.raises(PlanError, match="takes one value for the whole process"):
        plan_variables(plan_of(CommunicationCtas(max_ctas=8), CommunicationCtas(max_ctas=16)))
    some = plan_of(CommunicationCtas(max_ctas=8), match=Match(kind="communication", operations=(3,)))
    assert "NCCL_MAX_CTAS" in variable_remarks(some)[0]
    assert variable_remarks(plan_of(CommunicationCtas(max_ctas=8))) == []


def outcome_of(*processes: ProcessProof, record: LiveRecord | None = None, is_tuned: bool = False) -> RunOutcome:
    return RunOutcome(ended=Ended(exit_status=0), is_filtered=True, is_tuned=is_tuned, processes=processes, record=record)


def printed(*processes: ProcessProof, width: int = 200) -> str:
    output = io.StringIO()
    print_outcome(Console(file=output, width=width), outcome_of(*processes))
    return output.getvalue()


@pytest.mark.parametrize("stage", ["warming up", "trying candidates", "decided", "stopped"])
@pytest.mark.parametrize("num_steps", [1, 20])
def test_nothing_was_changed_only_where_no_path_was_tuned_either(num_steps: int, stage: Stage) -> None:
    record = LiveRecord(stage=stage, num_steps=num_steps, notes=("why",))
    output = io.StringIO()
    print_outcome(Console(file=output, width=200), outcome_of(record=record))
    assert ("nothing was changed: no process" in output.getvalue()) == (num_steps == 1)


@pytest.mark.parametrize(("status", "why"), [(0, "Either the job used no GPU"), (1, "The command ended with status 1")])
def test_a_command_that_failed_first_is_not_told_of_ld_preload(status: int, why: str) -> None:
    output = io.StringIO()
    ended = Ended(exit_status=status)
    print_outcome(Console(file=output, width=200), RunOutcome(ended=ended, is_filtered=True, is_tuned=False, processes=()))
    assert f"could see. {why}" in output.getvalue()


def told(record: LiveRecord | None, rank: int = 0, is_tuned: bool = True) -> str:
    """What the end of a job says of its tuning."""
    output = io.StringIO()
    print_measured(Console(file=output, width=200), outcome_of(proof(rank, 10), record=record, is_tuned=is_tuned))
    return output.getvalue()


def proof(rank: int, num_applied: int, pid: int = 1) -> ProcessProof:
    entry = Engagement(control="priority", target="nccl", state="verified", asked="priority -5", found="priority -5")
    applied = ControlProof(engagement=entry, num_matched=10, num_applied=num_applied)
    return ProcessProof(pid=pid, rank=rank, num_launches=10, applied=(applied,))


def test_equal_lines_of_ranks_are_one_with_ranges() -> None:
    text = printed(*(proof(rank, 10) for rank in (0, 1, 2, 3, 6)), proof(-1, 10, pid=99))
    assert "0-3, 6, process 99" in text
    assert text.count("verified") == 1
    assert "10 of 10" in text
    assert "8 to 10 of 10" in printed(proof(0, 8), proof(1, 10))


def test_a_job_that_loaded_no_filter_is_said_in_one_line() -> None:
    assert printed().count("\n") == 1


def test_long_reasons_stand_below_the_table_in_whole_words_and_once_for_all_kernels() -> None:
    reason = "no launch matched; the plan may belong to another step"
    entries = [
        Engagement(control="residency_cap", target=f"kernel{number}", state="failed", asked="cap of 1", reason=reason)
        for number in range(3)
    ]
    applied = tuple(ControlProof(engagement=entry, num_matched=0, num_applied=0) for entry in entries)
    text = printed(ProcessProof(pid=1, rank=0, num_launches=10, applied=applied), width=80)
    assert " ".join(text.split()).count(f"residency_cap on 3 kernels (kernel0, kernel1, ...) failed: {reason}") == 1
    assert max(map(len, text.splitlines())) <= 80


FOUND = Plan(verdict="GAIN", summary="priority: 1 ms to 800 us")


def test_a_job_that_ended_too_early_is_told_the_steps_it_had_and_those_it_needed() -> None:
    record = LiveRecord(stage="trying candidates", num_steps=57, num_steps_needed=200, notes=("tuning on live steps",))
    text = told(record)
    assert "ended after 57 steps, while live tuning was trying candidates" in text
    assert "until step 200 (--budget); no plan was decided" in text
    assert text.count("\n") == 1, "what was said while the job ran is not said again"
    again = told(LiveRecord(stage="warming up", num_steps=700, num_steps_needed=800, plan=FOUND))
    assert "the plan decided before is kept" in again
    assert FOUND.summary in again


def test_the_decision_is_the_plan_at_the_end_and_not_the_line_of_the_run_again() -> None:
    text = told(LiveRecord(stage="decided", num_steps=190, plan=FOUND, notes=("GAIN after 190 of 200 steps",)))
    assert text.count(FOUND.summary) == 1
    assert "190" not in text


@pytest.mark.parametrize("stage", ["reverted", "stopped"])
def test_a_plan_that_is_no_longer_in_force_is_said_to_be_none(stage: str) -> None:
    assert "the job runs as it was" in told(LiveRecord(stage=stage, notes=("the job runs as it was",)), is_tuned=False)  # type: ignore[arg-type]


def test_a_job_without_steps_is_told_what_a_step_is_where_rank_0_ran() -> None:
    assert "counterpoint.step()" in told(None)
    assert "counterpoint.step()" in told(None, rank=-1)
    assert told(None, rank=8) == ""
    assert told(None, is_tuned=False) == ""


def test_strict_is_not_content_where_the_agent_had_to_stop() -> None:
    record = LiveRecord(stage="stopped", notes=("rank 0 does not tune or guard (why)",))
    assert "(why)" in outcome_of(proof(0, 10), record=record).why_stopped
    assert not outcome_of(proof(0, 10), record=LiveRecord(stage="reverted", notes=("slower",))).why_stopped


def test_the_proof_of_a_path_says_how_many_calls_needed_no_buffer_and_how_many_were_replayed() -> None:
    counts = PathCounts(control="overlap_matmul", target="linears", num_by_copies=1200, num_replayed=1100, num_bytes=1 << 20)
    (proof,) = prove_paths(Totals(paths=(counts,)))
    assert (proof.num_applied, proof.engagement.found) == (1200, "1 MiB sent, 0 B held, 1,100 replayed")
    (other,) = prove_paths(Totals(paths=(replace(counts, num_replayed=0, num_in_place=7),)))
    assert other.engagement.found == "1 MiB sent, 0 B held, 7 in place"


def test_an_operator_that_runs_the_librarys_collective_is_in_effect_and_an_original_module_is_not() -> None:
    counts = PathCounts(control="overlap_matmul", target="linears", num_by_library=12, num_in_operators=10, reason="small")
    (proof,) = prove_paths(Totals(paths=(counts,)))
    assert (proof.num_applied, proof.num_matched, proof.engagement.state) == (10, 12, "verified")
    assert proof.engagement.found == "0 B sent, 0 B held, 10 by the library within operators"
    (original,) = prove_paths(Totals(paths=(replace(counts, num_in_operators=0),)))
    assert (original.num_applied, original.engagement.state) == (0, "failed")
    assert original.engagement.reason == "all 12 calls stayed with the library: small"
