"""Ranks that switch paths together, on doubles: in every step all of them have the same paths in force, whatever happens.

A collective that one rank hands to copy engines and another to the library never ends, so `apart()` has to stay empty.
"""

import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from counterpoint.controls import OverlapMatmul, Priority
from counterpoint.integrations import job_paths
from counterpoint.integrations.paths import COPIES, LIBRARY, PathOffer, Paths, path_problems
from counterpoint.plan import Directive, Match, Plan
from counterpoint.step import CollectiveKind
from counterpoint.supervised.messages import PathSurvey
from counterpoint.supervised.path_agreement import agree_on_paths
from counterpoint.supervised.settings import LiveSettings, setting_of
from helpers.live_job_double import nccl, seen
from helpers.paths_double import CALLS, DDP, EXPERTS, FSDP2, LINEARS, PathsJob, PathTime

LONG = seen("_Z4longPf")
GATHERS = Directive(match=Match(kind="communication", collective="all_gather"), controls=(COPIES,), reason="test")
RULES = Directive(match=Match(kind="communication"), controls=(Priority(priority=-5),), reason="test")


def guarding(*directives: Directive) -> LiveSettings:
    plan = Plan(verdict="GAIN", directives=directives)
    return LiveSettings(is_tuning=False, plan=plan, given=setting_of(plan), guard_every_steps=100)


TUNING = LiveSettings(is_tuning=True, budget_steps=200, guard_every_steps=120)
UNGUARDED = LiveSettings(is_tuning=True, budget_steps=200, guard_every_steps=0)
BITWISE = LiveSettings(is_tuning=True, budget_steps=200, guard_every_steps=0, keeps_bits=True)
GUARDED = guarding(GATHERS)
OVERLAPPING = guarding(Directive(match=Match(kind="communication"), controls=(OverlapMatmul(),), reason="test"))
GATHERED = Paths(copies=("all_gather",))


def by_paths(gain: float, us: float = 1000.0) -> PathTime:
    """Steps that paths make shorter by a share."""
    return lambda rank, step, paths: us * (1 - gain * (paths != LIBRARY))


def noisy(path_time: PathTime, jitter: float, seed: int) -> PathTime:
    noise = random.Random(seed)
    return lambda rank, step, paths: path_time(rank, step, paths) * (1 + jitter * (2 * noise.random() - 1))


def found_plan(job: PathsJob) -> Plan:
    plan = job.ranks[0].records[-1].plan
    assert plan is not None
    return plan


def why_not(job: PathsJob) -> list[str]:
    return [refusal.reason for refusal in found_plan(job).refusals]


def was_in_force(job: PathsJob) -> set[Paths]:
    return {paths for each in job.paths for paths in each.history}


RANKS_APART = st.fixed_dictionaries(
    {
        "num_ranks": st.integers(1, 4),
        "lag": st.integers(0, 8),
        "most_ahead": st.integers(0, 30),
        "seed": st.integers(0, 10_000),
    }
)
PHASES = st.lists(
    st.tuples(st.integers(20, 350), st.sampled_from([0.2, 0.05, 0.0, -0.2]), st.sampled_from([1000.0, 1400.0])),
    min_size=2,
    max_size=5,
)


@given(phases=PHASES, settings=st.sampled_from([TUNING, GUARDED]), apart=RANKS_APART)
@settings(max_examples=30)
def test_in_every_step_all_ranks_have_the_same_paths_in_force(
    phases: Sequence[tuple[int, float, float]], settings: LiveSettings, apart: dict[str, int]
) -> None:
    """Through tuning, decision, the guard's looks, removal, putting back and tuning again."""
    job = PathsJob(settings, lambda rank: (FSDP2, LINEARS), functions=[LONG, nccl()], **apart)
    for num_steps, gain, us in phases:
        job.run(num_steps, noisy(by_paths(gain, us), 0.01, apart["seed"]))
        assert not job.apart()
    assert not any("stopped" in line for rank in job.ranks for line in rank.said)


@pytest.mark.parametrize(
    ("phases", "words"),
    [
        (((300, 0.2, 1000.0), (300, -0.2, 1000.0), (1600, 0.2, 1000.0)), ("GAIN after", "taken out after", "applied again")),
        (((300, 0.2, 1000.0), (800, 0.2, 1400.0)), ("GAIN after", "tuning again", "GAIN after")),
    ],
)
def test_removal_putting_back_and_tuning_again_part_no_ranks(
    phases: Sequence[tuple[int, float, float]], words: Sequence[str]
) -> None:
    job = PathsJob(TUNING, num_ranks=3, most_ahead=30)
    for num_steps, gain, us in phases:
        job.run(num_steps, by_paths(gain, us))
    told = [line for line in job.ranks[0].said if "live steps" not in line]
    assert [word in line for word, line in zip(words, told, strict=True)] == [True] * len(words)
    assert not job.apart()


def test_a_gain_by_paths_is_found_kept_proven_and_guarded() -> None:
    job = PathsJob(TUNING)
    job.run(600, by_paths(0.2))
    assert not job.apart()
    plan = found_plan(job)
    assert plan.verdict == "GAIN"
    assert plan.expectation is not None
    assert plan.expectation.planned_us == pytest.approx(800)
    found = setting_of(plan).paths
    assert "all_gather" in found.copies
    for rank, paths in zip(job.ranks, job.paths, strict=True):
        assert (paths.taken, paths.dropped) == (["fsdp2"], [])
        assert paths.history[-100:].count(found) > 50, "but for a look of the guard"
        rank.tuner.job_ends()
        kept = rank.totals[-1]
        assert kept.setting.paths == found
        assert [counts.num_by_copies for counts in kept.paths] == [paths.history.count(found)] * len(found.targets)


@pytest.mark.parametrize(("issue_us", "verdict"), [(1180.0, "NO_GAIN"), (780.0, "GAIN")])
def test_a_lead_of_the_host_from_other_turns_does_not_hide_that_a_path_waits_for_the_host(
    issue_us: float, verdict: str
) -> None:
    """A step by copies takes the GPU 800 instead of 1000 us; the host, which issues the library's in 200, is the limit."""
    job = PathsJob(UNGUARDED)
    job.run(400, by_paths(0.2), issue_us=lambda paths: 200.0 if paths == LIBRARY else issue_us)
    assert found_plan(job).verdict == verdict
    assert not job.apart()


def test_the_guard_takes_out_a_path_whose_steps_wait_for_the_host_by_now() -> None:
    job = PathsJob(TUNING)
    for path_us in (780.0, 1180.0):
        job.run(400, by_paths(0.2), issue_us=lambda paths, path_us=path_us: 200.0 if paths == LIBRARY else path_us)
    assert any("taken out after" in line for line in job.ranks[0].said)
    assert not job.apart()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_first_steps_on_a_path_which_compile_and_record_are_not_held_against_it(num_ranks: int) -> None:
    """Among many candidates each has two turns, and such steps would be most of a path's."""
    job = PathsJob(UNGUARDED, lambda rank: (LINEARS,), functions=[LONG, nccl()], num_ranks=num_ranks, most_ahead=4)

    def step_us(rank: int, step: int, paths: Paths) -> float:
        num_before = job.paths[rank].history[:-1].count(paths)
        slower = (9.0, 1.3, 1.3, 1.2, 1.2, 1.1)[num_before : num_before + 1] if paths != LIBRARY else ()
        return 1000.0 * (slower[0] if slower else 0.92 if paths != LIBRARY else 1.0)

    job.run(260, step_us)
    assert not job.apart()
    assert found_plan(job).verdict == "GAIN"
    assert setting_of(found_plan(job)).paths == Paths(overlaps_matmuls=True)


def test_copies_that_cost_time_are_tried_and_left() -> None:
    job = PathsJob(UNGUARDED)
    job.run(260, by_paths(-0.1))
    assert not job.apart()
    assert len(was_in_force(job)) > 1
    assert all(paths.in_force == LIBRARY for paths in job.paths)
    assert found_plan(job).verdict == "NO_GAIN"


def test_experts_are_overlapped_where_that_pays_and_a_plan_has_them() -> None:
    job = PathsJob(UNGUARDED, lambda rank: (FSDP2, EXPERTS))
    job.run(260, lambda rank, step, paths: 900.0 if paths.overlaps_experts else 1010.0 if paths.copies else 1000.0)
    assert not job.apart()
    assert found_plan(job).verdict == "GAIN"
    (directive,) = [each for each in found_plan(job).directives if each.match.collective == "all_to_all"]
    assert directive.controls == (OverlapMatmul(),)
    assert setting_of(found_plan(job)).paths.overlaps_experts
    assert "5 layers of routed experts" in directive.reason


def test_what_one_rank_refuses_is_tried_on_none_and_the_plan_says_why() -> None:
    refusing = PathOffer(integration="fsdp2", what=FSDP2.what, kinds=FSDP2.kinds, refusal="the job's torch is too old")
    job = PathsJob(UNGUARDED, lambda rank: (refusing if rank == 2 else FSDP2, LINEARS), num_ranks=3)
    job.run(260, by_paths(0.2))
    assert not job.apart()
    assert was_in_force(job) == {LIBRARY, Paths(overlaps_matmuls=True)}
    assert all(each.taken == ["tensor_parallel"] for each in job.paths)
    assert "rank 2: the job's torch is too old" in why_not(job)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("method", ["survey", "take"])
def test_what_fails_unexpectedly_on_one_rank_is_a_refusal_that_holds_nobody(method: str, failing: int) -> None:
    job = PathsJob(UNGUARDED, lambda rank: (FSDP2, LINEARS), num_ranks=3, hold_limit_s=0.5)
    job.paths[failing].fails_in = method
    job.run(60, by_paths(0.2))
    assert was_in_force(job) == {LIBRARY}
    assert all(rank.held_steps <= {1} for rank in job.ranks)
    assert not any("did not reach" in line for rank in job.ranks for line in rank.said)
    assert any(reason.startswith(f"rank {failing}") and f"KeyError: '{method}'" in reason for reason in why_not(job))


@pytest.mark.parametrize("settings", [OVERLAPPING, GUARDED])
def test_what_another_rank_refuses_is_dropped_where_it_was_prepared(settings: LiveSettings) -> None:
    """A plan that is given puts its paths in force whatever was agreed, so only what is ready may be there to switch."""
    refusing = [replace(offer, refusal="not here") for offer in (LINEARS, FSDP2)]
    job = PathsJob(settings, lambda rank: refusing if rank else (LINEARS, FSDP2))
    job.run(10, by_paths(0.2))
    assert all((each.taken, sorted(each.dropped)) == ([], ["fsdp2", "tensor_parallel"]) for each in job.paths)
    assert "stay unchanged: rank 1: not here" in job.ranks[0].said[0]


@pytest.mark.parametrize("order", [1, -1])
def test_ranks_switch_the_kinds_that_all_of_them_call(order: int) -> None:
    kinds: list[tuple[CollectiveKind, ...]] = [("all_gather", "all_reduce"), ("all_gather",)][::order]
    job = PathsJob(UNGUARDED, lambda rank: (replace(CALLS, kinds=kinds[rank]),))
    job.run(260, by_paths(0.2))
    assert not job.apart()
    assert was_in_force(job) == {LIBRARY, GATHERED}
    assert all((each.taken, each.dropped) == (["collectives"], []) for each in job.paths)
    assert f"rank {kinds.index(('all_gather',))} has called no all-reduces that are large enough" in why_not(job)


def test_calls_that_one_rank_does_not_make_are_no_model_that_it_lacks() -> None:
    exchanges = replace(CALLS, kinds=("all_to_all",))
    (agreed,) = agree_on_paths([PathSurvey(offers=offers) for offers in ((exchanges,), (), ())])
    assert agreed == replace(exchanges, refusal="rank 1 has called no all-to-alls that are large enough")


def test_models_that_differ_are_refused_with_both_ranks() -> None:
    offers = (FSDP2, FSDP2, replace(FSDP2, what="2 FSDP2 models"))
    assert [offer.refusal for offer in agree_on_paths([PathSurvey(offers=(each,)) for each in offers])] == [
        "rank 2 has 2 FSDP2 models, and rank 0 1 FSDP2 model"
    ]


@pytest.mark.parametrize("at", ["an optimizer", "the end of the warm-up"])
def test_a_model_that_comes_after_the_survey_is_told_once_by_rank_0(at: str) -> None:
    job = PathsJob(GUARDED)
    job.run(20 if at == "an optimizer" else 5, by_paths(0.2))
    for rank, paths in zip(job.ranks, job.paths, strict=True):
        paths.late = ["1 DDP model"]
        if at == "an optimizer":
            rank.tuner.optimizer_made()
    job.run(30, by_paths(0.2))
    assert [line for line in job.ranks[0].said if "1 DDP model was created after the first step" in line] == job.ranks[
        0
    ].said
    assert len(job.ranks[0].said) == 1
    assert not job.ranks[1].said


def test_what_a_process_refuses_as_a_whole_names_the_kinds_that_a_plan_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a user reads that no such call was found, where torch is too old."""
    monkeypatch.setattr(job_paths, "OLDEST_TORCH", (99, 0))
    monkeypatch.setattr(job_paths, "_offers_of", lambda modules: [FSDP2])
    offers = job_paths.TorchJobPaths().survey()
    assert "integrations need 99.0 or later" in path_problems(GATHERED, offers)["all-gathers"]


def test_calls_that_nobody_saw_are_refused_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an optimizer, or with one from before the process group, calls of the first step are not counted."""
    monkeypatch.setattr(job_paths.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(job_paths.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(job_paths, "_offers_of", lambda modules: [FSDP2])
    functions = job_paths.dist.all_to_all_single
    offers = job_paths.TorchJobPaths().survey()
    assert path_problems(Paths(copies=("all_to_all",)), offers) == {"all-to-alls": job_paths.UNSEEN}
    assert job_paths.dist.all_to_all_single is functions


def test_a_job_without_all_to_alls_for_copies_is_told_which_they_take() -> None:
    problems = path_problems(Paths(copies=("all_to_all", "all_gather")), [FSDP2])
    line = "the job's first step has none that copies take; they take large ones whose calls give no sizes"
    assert problems == {"all-to-alls": line}


@pytest.mark.parametrize("missing", [0, 1])
def test_what_one_rank_has_not_is_tried_on_none(missing: int) -> None:
    job = PathsJob(UNGUARDED, lambda rank: () if rank == missing else (FSDP2,))
    job.run(60, by_paths(0.2))
    assert all(each.taken == [] for each in job.paths)
    assert was_in_force(job) == {LIBRARY}
    assert f"rank {missing} has no such model" in why_not(job)


@pytest.mark.parametrize("failing", [0, 1])
def test_what_one_rank_cannot_make_ready_is_dropped_on_all_with_the_reason(failing: int) -> None:
    job = PathsJob(
        UNGUARDED,
        lambda rank: (FSDP2, DDP),
        failing=lambda rank: {"ddp": "the model has a hook of its own"} if rank == failing else {},
    )
    job.run(260, by_paths(0.2))
    assert not job.apart()
    assert all((each.taken, each.dropped) == (["fsdp2", "ddp"], ["ddp"]) for each in job.paths)
    assert not any("all_reduce" in paths.copies for paths in was_in_force(job))
    assert found_plan(job).verdict == "GAIN"
    assert f"rank {failing}: the model has a hook of its own" in why_not(job)


def test_when_nothing_could_be_made_ready_nobody_is_held_any_more() -> None:
    job = PathsJob(UNGUARDED, failing=lambda rank: {"fsdp2": "no memory"} if rank else {}, functions=[LONG, nccl()])
    job.run(260, by_paths(0.2))
    assert was_in_force(job) == {LIBRARY}
    assert all(rank.held_steps <= {1} for rank in job.ranks)


def test_only_what_keeps_every_bit_is_tried_where_that_is_asked_for() -> None:
    job = PathsJob(BITWISE, lambda rank: (FSDP2, DDP, LINEARS))
    job.run(260, by_paths(0.2))
    assert not job.apart()
    assert was_in_force(job) == {LIBRARY, GATHERED}
    assert found_plan(job).verdict == "GAIN"
    assert sum("sums in another order" in reason for reason in why_not(job)) == 3


@given(
    failing=st.integers(0, 2),
    fails_from=st.integers(1, 700),
    settings=st.sampled_from([TUNING, GUARDED, UNGUARDED]),
    apart=RANKS_APART,
)
@settings(max_examples=30)
def test_a_rank_whose_agent_fails_goes_on_switching_until_all_are_on_the_librarys_path(
    failing: int, fails_from: int, settings: LiveSettings, apart: dict[str, int]
) -> None:
    job = PathsJob(settings, functions=[LONG, nccl()], **(apart | {"num_ranks": 3}))
    job.ranks[failing].clock.fails_from = fails_from
    job.run(1000, noisy(by_paths(0.2), 0.01, apart["seed"]))
    assert not job.apart()
    assert not any(rank.is_running for rank in job.ranks)
    in_force = {paths.in_force for paths in job.paths}
    if settings is UNGUARDED:
        assert len(in_force) == 1, "a decision may have been announced that nothing follows"
        return
    assert job.ranks[failing].is_failed
    assert not job.ranks[failing].table.rules
    assert in_force == {LIBRARY}
    told = [line for line in job.ranks[0].said if "stopped" in line]
    if failing:
        assert len(told) == 1
        assert f"rank {failing}: the clock has stopped; it can no longer measure" in told[0]


@pytest.mark.parametrize("most_ahead", [0, 5, 30])
def test_a_plan_with_paths_is_in_force_from_the_second_step_and_guarded(most_ahead: int) -> None:
    job = PathsJob(GUARDED, num_ranks=3, most_ahead=most_ahead)
    job.run(10, by_paths(0.2))
    assert all(paths.history[:5] == [LIBRARY, *[GATHERED] * 4] for paths in job.paths), "agreed on after the first"
    job.run(300, by_paths(-0.2))
    assert not job.apart()
    assert all(paths.in_force == LIBRARY for paths in job.paths)
    assert "the plan has become slower" in job.ranks[0].said[-1]
    job.run(1500, by_paths(0.2))
    assert not job.apart()
    assert all(paths.history[-100:].count(GATHERED) > 50 for paths in job.paths)
    assert "applied again" in job.ranks[0].said[-1]


def test_a_plan_that_nobody_can_take_is_said_at_once_by_rank_0_alone() -> None:
    job = PathsJob(GUARDED, lambda rank: (DDP,))
    job.run(150, by_paths(0.2))
    assert job.ranks[0].said == [
        "all-gathers stay unchanged: the job has no model that could take it, and in its first step it calls none itself "
        "with 4 MiB or more from each rank; torch's functional collectives are not taken"
    ]
    assert not job.ranks[1].said


@pytest.mark.parametrize("silent", [0, 1])
@pytest.mark.parametrize("settings", [TUNING, GUARDED])
def test_a_rank_that_never_comes_ends_the_wait_within_the_limit_in_one_line(silent: int, settings: LiveSettings) -> None:
    job = PathsJob(settings, hold_limit_s=0.1)
    start = time.monotonic()
    job.run(300, by_paths(0.2), silent=frozenset({silent}))
    assert time.monotonic() - start < 10
    assert was_in_force(job) == {LIBRARY}
    assert not job.ranks[1 - silent].is_running
    assert len(job.ranks[0].said) == silent, "rank 0 speaks for all"
    assert all("did not reach this step within 0.1 s; the job runs unchanged" in line for line in job.ranks[0].said)


@pytest.mark.parametrize("num_steps", [1, 8, 14, 60, 300])
@pytest.mark.parametrize("settings", [TUNING, GUARDED])
def test_ranks_that_go_on_after_rank_0_has_ended_are_not_held(num_steps: int, settings: LiveSettings) -> None:
    job = PathsJob(settings, num_ranks=3, most_ahead=4)
    job.run(num_steps, by_paths(0.2))
    job.ranks[0].tuner.job_ends()
    job.run(200, by_paths(0.2), silent=frozenset({0}))
    assert job.paths[1].history == job.paths[2].history
    assert len(job.paths[1].history) == num_steps + 200
    assert all(paths.in_force == LIBRARY for paths in job.paths[1:])
    assert not any(line for rank in job.ranks[1:] for line in rank.said)


@pytest.mark.parametrize("lag_of_rank_0", [150, 400])
def test_a_gpu_far_behind_on_rank_0_parts_nobody(lag_of_rank_0: int) -> None:
    """Another rank has reported long before rank 0 can, and may not lose patience: rank 0 still goes by the plan."""
    job = PathsJob(GUARDED)
    job.ranks[0].clock.lag = lag_of_rank_0
    job.run(1200, by_paths(0.2))
    assert not job.apart()
    assert all(rank.is_running for rank in job.ranks)


@given(apart=RANKS_APART)
@settings(max_examples=10)
def test_a_job_that_offers_nothing_is_never_held_after_its_first_step(apart: dict[str, int]) -> None:
    job = PathsJob(TUNING, lambda rank: (), functions=[LONG, nccl()], **apart)
    job.run(300, by_paths(0.0))
    assert was_in_force(job) == {LIBRARY}
    assert all(rank.held_steps <= {1} for rank in job.ranks)
    assert any(record.stage == "decided" for record in job.ranks[0].records)


def test_a_job_whose_plan_has_no_paths_is_never_held_nor_looked_through() -> None:
    job = PathsJob(guarding(RULES), functions=[LONG, nccl()], most_ahead=30)
    job.run(300, by_paths(0.0))
    assert not any(rank.held_steps for rank in job.ranks)
    assert not any(paths.num_surveys for paths in job.paths)
