"""Tuning while a job runs, on doubles: ranks agree, gains are kept only beyond the spread, and nobody waits."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.controls import Priority
from counterpoint.launch_filter.rules import translate
from counterpoint.plan import Directive, Match, Plan
from counterpoint.supervised.follower import PATIENCE_STEPS
from counterpoint.supervised.messages import Decision
from counterpoint.supervised.settings import LiveSettings, setting_of
from counterpoint.supervised.tuning import MOST_REOPENED
from helpers.live_job_double import NCCL, FakeJob, Rules, StepTime, nccl, seen

LONG = seen("_Z4longPf")
SMALL = seen("_Z5smallPf", num_ctas=8)
UNGUARDED = LiveSettings(is_tuning=True, budget_steps=200, guard_every_steps=0)
TUNING = LiveSettings(is_tuning=True, budget_steps=200, guard_every_steps=120)
PRIORITY = Plan(directives=(Directive(match=Match(kind="communication"), controls=(Priority(priority=-5),), reason="test"),))
GUARDED = LiveSettings(is_tuning=False, plan=PRIORITY, given=setting_of(PRIORITY), guard_every_steps=100)


def has_priority(rules: Rules) -> bool:
    return any(rule.priority is not None for rule in rules)


def has_hold(rules: Rules) -> bool:
    return any(rule.hold_us is not None for rule in rules)


def faster_by_priority(rank: int, step: int, rules: Rules) -> float:
    return 800.0 if has_priority(rules) else 1000.0


def jittered(step_time: StepTime, jitter: float, seed: int) -> StepTime:
    """The same with noise that has no favorite."""
    noise = random.Random(seed)
    return lambda rank, step, rules: step_time(rank, step, rules) * (1 + jitter * (2 * noise.random() - 1))


def decided(job: FakeJob) -> int:
    """The number of steps after which rank 0 decided."""
    return next(record.num_steps for record in job.ranks[0].records if record.stage == "decided")


def stages(job: FakeJob) -> list[str]:
    """The stages that rank 0 recorded, one after the other."""
    return [stage for stage, _ in itertools.groupby(record.stage for record in job.ranks[0].records)]


def test_a_candidate_that_makes_steps_shorter_is_kept_on_every_rank_and_recorded() -> None:
    job = FakeJob(TUNING, [LONG, nccl()])
    job.run(230, faster_by_priority)
    assert all(has_priority(rank.mostly()) for rank in job.ranks)
    record = job.ranks[0].records[-1]
    assert record.stage == "decided"
    assert record.plan is not None
    assert record.plan.verdict == "GAIN"
    assert record.plan.expectation is not None
    assert record.plan.expectation.origin == "measured"
    assert record.plan.expectation.baseline_us == pytest.approx(1000)
    assert record.plan.expectation.planned_us == pytest.approx(800)
    assert translate(record.plan).rules == job.ranks[0].table.rules
    assert not job.ranks[1].records
    assert not job.ranks[1].said


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("settings", ["tuning", "guarded"])
def test_steps_that_take_no_time_prove_nothing_and_break_nothing(settings: str, share: float) -> None:
    """As the first events of a GPU may say, or a clock that is too coarse for the steps."""
    drawn = random.Random(7)
    job = FakeJob(TUNING if settings == "tuning" else GUARDED, [LONG, nccl()])
    job.run(700, lambda rank, step, rules: 0.0 if drawn.random() < share else 1000.0)
    assert not any("stopped" in line or "Error" in line for line in job.ranks[0].said)
    assert all("GAIN" not in line or "NO_GAIN" in line for line in job.ranks[0].said)


@given(
    num_ranks=st.integers(1, 4),
    lag=st.integers(0, 6),
    most_ahead=st.integers(0, 5),
    seed=st.integers(0, 1000),
    gain=st.sampled_from([0.0, 0.2]),
)
@settings(max_examples=40)
def test_all_ranks_have_the_same_table_in_force_after_the_decision(
    num_ranks: int, lag: int, most_ahead: int, seed: int, gain: float
) -> None:
    job = FakeJob(UNGUARDED, [LONG, SMALL, nccl()], num_ranks=num_ranks, lag=lag, most_ahead=most_ahead, seed=seed)
    step_time: StepTime = lambda rank, step, rules: 1000.0 * (1 - gain * has_priority(rules))  # noqa: E731
    job.run(260, jittered(step_time, 0.01, seed))
    tables = {rank.table.rules for rank in job.ranks}
    assert len(tables) == 1
    assert has_priority(tables.pop()) == bool(gain)


@given(seed=st.integers(0, 10_000), jitter=st.floats(0.0, 0.3))
@settings(max_examples=40)
def test_the_budget_is_kept_whatever_the_times(seed: int, jitter: float) -> None:
    job = FakeJob(TUNING, [LONG, nccl()], lag=4, seed=seed)
    job.run(240, jittered(faster_by_priority, jitter, seed))
    assert decided(job) <= TUNING.budget_steps


@given(budget=st.integers(100, 600), num_kernels=st.integers(1, 30))
@settings(max_examples=25)
def test_every_budget_comes_to_a_decision_in_time(budget: int, num_kernels: int) -> None:
    job = FakeJob(
        LiveSettings(is_tuning=True, budget_steps=budget), [seen(f"_Z4longPf{n}") for n in range(num_kernels)] + [nccl()]
    )
    job.run(budget + 20, faster_by_priority)
    assert decided(job) <= budget
    assert has_priority(job.ranks[0].table.rules)


def test_noise_alone_leaves_the_job_as_it_is() -> None:
    gains = 0
    for seed in range(20):
        job = FakeJob(TUNING, [LONG, nccl()], seed=seed)
        job.run(230, jittered(lambda rank, step, rules: 1000.0, 0.1, seed))
        gains += bool(job.ranks[0].table.rules)
    assert gains <= 2, "noise may win now and then, and the guard is for what slips through"


@pytest.mark.parametrize("num_steps", [1, 7, 25, 60])
def test_a_job_that_ends_before_a_decision_has_recorded_its_steps_and_those_it_needs(num_steps: int) -> None:
    job = FakeJob(TUNING, [LONG, nccl()], num_ranks=1)
    job.run(num_steps, faster_by_priority)
    record = job.ranks[0].records[-1]
    assert (record.num_steps, record.num_steps_needed, record.plan) == (num_steps, TUNING.budget_steps, None)
    assert not any("GAIN" in line for line in job.ranks[0].said)


def test_what_was_decided_before_the_job_was_started_again_stays_on_record_until_there_is_another() -> None:
    earlier = Decision(plan=PRIORITY, setting=setting_of(PRIORITY))
    job = FakeJob(TUNING, [LONG, nccl()], num_ranks=1, earlier=earlier)
    job.run(50, faster_by_priority)
    assert job.ranks[0].records[-1].stage == "trying candidates"
    assert job.ranks[0].records[-1].plan == PRIORITY
    job.run(200, faster_by_priority)
    assert job.ranks[0].records[-1].stage == "decided"
    assert job.ranks[0].records[-1].plan != PRIORITY


def test_the_slowest_rank_decides() -> None:
    job = FakeJob(TUNING, [LONG, nccl()])

    def slower_on_one(rank: int, step: int, rules: Rules) -> float:
        return 1000.0 if not rules else 1200.0 if rank == 1 else 700.0

    job.run(230, slower_on_one)
    plan = job.ranks[0].records[-1].plan
    assert plan is not None
    assert plan.verdict == "NO_GAIN"
    assert all(rank.table.rules == () for rank in job.ranks)


def test_the_better_of_two_finalists_wins() -> None:
    job = FakeJob(TUNING, [LONG, nccl()])
    job.run(230, lambda rank, step, rules: 1000.0 - 100 * has_priority(rules) - 150 * has_hold(rules))
    rules = job.ranks[1].table.rules
    assert has_priority(rules)
    assert has_hold(rules)


def test_controls_that_had_no_effect_anywhere_are_left_out_with_the_reason() -> None:
    job = FakeJob(TUNING, [LONG, nccl()])
    for rank in job.ranks:
        rank.table.idle = frozenset({"num_held", "num_capped"})
    job.run(230, faster_by_priority)
    plan = job.ranks[0].records[-1].plan
    assert plan is not None
    tags = {control.__struct_config__.tag for each in plan.directives for control in each.controls}
    assert tags == {"priority"}
    if has_hold(job.ranks[0].in_force[-60]):
        assert any("just before it" in refusal.reason for refusal in plan.refusals)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_whose_agent_is_gone_stops_the_tuning_and_leaves_every_rank_as_it_was(lost: int) -> None:
    job = FakeJob(TUNING, [LONG, nccl()])
    job.run(40, faster_by_priority)
    job.ranks[lost].table.swap(())  # as an agent does that retires
    job.run(40 + 3 * PATIENCE_STEPS, faster_by_priority, silent=frozenset({lost}))
    assert all(rank.table.rules == () for rank in job.ranks)
    assert not any(rank.is_running for rank in job.ranks)
    if lost:
        assert any("Rank 1 did not reach the same step within 100 steps" in line for line in job.ranks[0].said)


def test_while_the_gpu_is_behind_without_end_the_job_runs_as_it_was() -> None:
    job = FakeJob(TUNING, [LONG, nccl()], lag=10_000)
    job.run(600, faster_by_priority)
    assert all(rank.table.rules == () for rank in job.ranks)
    assert not any(record.stage in ("decided", "stopped") for record in job.ranks[0].records)


@pytest.mark.parametrize(("lag", "most_ahead"), [(60, 0), (0, 30), (60, 30), (150, 5)])
def test_a_gpu_behind_the_host_and_ranks_apart_cost_steps_and_no_gain(lag: int, most_ahead: int) -> None:
    job = FakeJob(UNGUARDED, [LONG, nccl()], num_ranks=3, lag=lag, most_ahead=most_ahead)
    job.run(1200, jittered(faster_by_priority, 0.03, 1))
    assert all(has_priority(rank.mostly()) for rank in job.ranks)


def test_a_job_without_collectives_or_without_long_kernels_has_nothing_to_try() -> None:
    job = FakeJob(TUNING, [LONG, SMALL])
    job.run(60, faster_by_priority)
    record = job.ranks[0].records[-1]
    assert record.plan is not None
    assert record.plan.verdict == "NO_GAIN"
    assert "no communication kernel" in record.plan.summary
    assert all(rules == () for rank in job.ranks for rules in rank.in_force)


def test_the_first_step_after_a_swap_is_not_timed() -> None:
    job = FakeJob(TUNING, [LONG, nccl()])

    def slow_after_a_swap(rank: int, step: int, rules: Rules) -> float:
        history = job.ranks[rank].in_force
        is_new = len(history) > 1 and history[-1] != history[-2]
        return 9000.0 if is_new else faster_by_priority(rank, step, rules)

    job.run(230, slow_after_a_swap)
    assert has_priority(job.ranks[0].table.rules)
    expectation = job.ranks[0].records[-1].plan
    assert expectation is not None
    assert expectation.expectation is not None
    assert expectation.expectation.planned_us == pytest.approx(800)


def slower_by_priority(rank: int, step: int, rules: Rules) -> float:
    return 1100.0 if has_priority(rules) else 1000.0


def test_the_guard_takes_out_a_plan_that_has_become_slower_and_says_so() -> None:
    job = FakeJob(TUNING, [LONG, nccl()])
    job.run(230, faster_by_priority)
    job.run(400, slower_by_priority)
    assert all(rank.table.rules == () for rank in job.ranks)
    assert job.ranks[0].records[-1].stage == "reverted"
    assert "the plan has become slower than the unmodified job" in job.ranks[0].said[-1]
    assert "tried again much later" in job.ranks[0].said[-1]


def test_a_plan_that_was_taken_out_comes_back_much_later_if_it_pays_again() -> None:
    job = FakeJob(TUNING, [LONG, nccl()])
    job.run(230, faster_by_priority)
    job.run(400, slower_by_priority)
    job.run(600, faster_by_priority)
    assert all(rank.mostly() == () for rank in job.ranks), "not before ten times the time from look to look"
    job.run(800, faster_by_priority)
    assert all(has_priority(rank.mostly()) for rank in job.ranks)
    assert "applied again" in job.ranks[0].said[-1]
    assert job.ranks[0].records[-1].plan == next(each.plan for each in job.ranks[0].records if each.stage == "decided")


def test_the_guard_keeps_a_plan_that_still_pays() -> None:
    job = FakeJob(TUNING, [LONG, nccl()])
    job.run(660, jittered(faster_by_priority, 0.02, 5))  # between two looks of the guard
    assert all(has_priority(rank.mostly()) for rank in job.ranks)
    assert stages(job) == ["warming up", "trying candidates", "decided"]


def test_a_plan_that_was_given_is_guarded_from_the_start() -> None:
    job = FakeJob(GUARDED, [LONG, nccl()])
    job.run(20, faster_by_priority)
    assert has_priority(job.ranks[0].in_force[0])
    job.run(300, slower_by_priority)
    assert all(rank.table.rules == () for rank in job.ranks)


def test_a_guard_leaves_few_keys_in_the_jobs_store() -> None:
    job = FakeJob(GUARDED, [LONG, nccl()], num_ranks=4)
    job.run(2000, jittered(faster_by_priority, 0.02, 3))
    assert len(job.store._values) <= 4 * 4


def test_counters_of_the_plan_survive_the_swaps_of_the_guard() -> None:
    job = FakeJob(GUARDED, [LONG, nccl()])
    job.run(60, faster_by_priority)
    rank = job.ranks[1]
    kept = rank.totals[-1]
    assert kept.setting.rules == GUARDED.given.rules
    index = next(number for number, rule in enumerate(kept.setting.rules) if rule.priority is not None)
    here = sum(has_priority(rules) for rules in rank.in_force)
    assert kept.counters[index].num_prioritized + rank.table.state().counters[index].num_prioritized == here


def test_turns_and_looks_at_a_given_plan_never_read_the_kernels_seen_which_takes_milliseconds() -> None:
    job = FakeJob(GUARDED, [LONG, nccl()])
    job.run(700, faster_by_priority)
    assert job.ranks[0].table.num_swaps > 20
    assert all(rank.table.num_states == 0 for rank in job.ranks)


def test_a_job_with_nothing_to_try_is_tuned_again_once_its_steps_take_longer() -> None:
    job = FakeJob(TUNING, [LONG])
    job.run(600, lambda rank, step, rules: 1000.0 if step < 350 else 2000.0)
    assert any("a step takes" in line and "tuning again" in line for line in job.ranks[0].said)


@pytest.mark.parametrize("change", ["kernels", "slower"])
def test_a_change_of_the_job_reopens_the_question_a_limited_number_of_times(change: str) -> None:
    job = FakeJob(TUNING, [LONG, nccl()])
    job.run(230, faster_by_priority)
    for phase in range(1, 6):
        if change == "kernels":
            for rank in job.ranks:
                rank.table.functions = [seen(f"_Z5otherPf{phase}"), nccl()]
        scale = 1.0 if change == "kernels" else 1.3**phase
        job.run(450, lambda rank, step, rules, scale=scale: scale * faster_by_priority(rank, step, rules))
    assert stages(job).count("decided") == 1 + MOST_REOPENED
    assert all(has_priority(rank.mostly()) for rank in job.ranks)


def test_a_plan_that_was_given_is_the_first_candidate() -> None:
    both = LiveSettings(is_tuning=True, plan=PRIORITY, given=GUARDED.given)
    job = FakeJob(both, [SMALL, nccl()])
    job.run(230, faster_by_priority)
    plan = job.ranks[0].records[-1].plan
    assert plan is not None
    assert plan.verdict == "GAIN"
    assert has_priority(job.ranks[0].table.rules)


def test_the_collective_of_the_double_is_one_to_the_rules() -> None:
    assert any(rule.is_collective for rule in GUARDED.given.rules), NCCL
