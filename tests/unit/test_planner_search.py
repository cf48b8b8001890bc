"""The search, with an executor that returns made-up timelines: what it keeps, what it drops, and what it tells."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint import load_machine, load_workload
from counterpoint.measurement.values import LEAST_ADDED_GAIN, LEAST_SIMULATED_GAIN
from counterpoint.plan import Plan
from counterpoint.planner import Trial, Tuning, search, tune
from helpers.scripted_executor import ScriptedExecutor, contended_step, words_of

H200 = load_machine("h200")
BASELINE_US = 200.0
BOTH_CAPS = {"cap long 15", "cap longer 15"}


def tuned(makespans: dict[frozenset[str], float], otherwise: float = BASELINE_US) -> tuple[Tuning, ScriptedExecutor]:
    """Tune where the plans in `makespans` take what it says and all others take `otherwise`."""
    executor = ScriptedExecutor(lambda words: makespans.get(words, otherwise))
    return tune(contended_step(), H200, executor), executor


def plan(*words: str) -> frozenset[str]:
    return frozenset(words)


def chosen(tuning: Tuning) -> frozenset[str]:
    return words_of(tuning.plan)


@pytest.mark.parametrize("word", ["priority", "hold 5", "hold 20", "copy engines", "4 CTAs", "8 CTAs"])
def test_the_shortest_candidate_is_picked(word: str) -> None:
    tuning, _ = tuned({plan(): BASELINE_US, plan(word): 150.0}, otherwise=190.0)
    assert chosen(tuning) == plan(word)
    assert tuning.plan.verdict == "GAIN"
    assert (tuning.plan.expectation.baseline_us, tuning.plan.expectation.planned_us) == (BASELINE_US, 150.0)
    assert tuning.planned.intervals[-1].end_us == 150.0
    assert tuning.baseline.intervals[-1].end_us == BASELINE_US


def test_two_caps_belong_together_and_are_one_candidate() -> None:
    caps = next(trial for trial in tuned({})[0].trials if trial.label == "caps")
    assert [directive.match.name for directive in caps.directives] == ["long", "longer"]


def test_a_second_control_that_adds_next_to_nothing_is_left_out() -> None:
    almost = 180.0 * (1 - 0.9 * LEAST_ADDED_GAIN)
    tuning, _ = tuned({plan("priority"): 180.0, plan("priority", "hold 5"): almost})
    assert chosen(tuning) == plan("priority")


def test_a_second_control_that_adds_enough_is_kept() -> None:
    better = 180.0 * (1 - 1.1 * LEAST_ADDED_GAIN)
    tuning, _ = tuned({plan("priority"): 180.0, plan("priority", "hold 5"): better})
    assert chosen(tuning) == plan("priority", "hold 5")


def test_a_plan_never_holds_two_controls_of_one_family() -> None:
    tuning, executor = tuned({plan(): BASELINE_US}, otherwise=150.0)
    assert {"hold 5", "hold 20"} <= {word for trial in executor.plans for word in words_of(trial)}
    assert not any({"hold 5", "hold 20"} <= words_of(tried) for tried in executor.plans)
    for trial in tuning.trials:
        assert len(set(trial.families)) == len(trial.families)


@pytest.mark.parametrize(
    ("planned_us", "verdict"),
    [
        (BASELINE_US * (1 - LEAST_SIMULATED_GAIN), "GAIN"),
        (BASELINE_US * (1 - LEAST_SIMULATED_GAIN) + 0.001, "NO_GAIN"),
        (BASELINE_US, "NO_GAIN"),
    ],
)
def test_a_plan_must_gain_one_percent(planned_us: float, verdict: str) -> None:
    tuning, _ = tuned({plan("priority"): planned_us})
    assert tuning.plan.verdict == verdict
    assert bool(tuning.plan.directives) == (verdict == "GAIN")


def test_no_gain_means_an_empty_plan_the_baseline_twice_and_the_figure_that_was_too_small() -> None:
    tuning, _ = tuned({plan("priority"): 199.0})
    assert tuning.plan.directives == ()
    assert tuning.planned == tuning.baseline
    assert tuning.plan.expectation.planned_us == tuning.plan.expectation.baseline_us == BASELINE_US
    assert "(priority) saves 0.50 %, below the 1.0 %" in tuning.plan.summary
    assert "leave it as it is" in tuning.plan.summary


def test_a_gain_just_under_the_threshold_is_not_printed_as_the_threshold() -> None:
    tuning, _ = tuned({plan("priority"): BASELINE_US * (1 - 0.0096)})
    assert "saves 0.96 %, below the 1.0 %" in tuning.plan.summary


def test_candidates_that_only_slow_the_step_down_leave_it_as_it_is() -> None:
    tuning, _ = tuned({plan(): BASELINE_US}, otherwise=250.0)
    assert tuning.plan.summary == "no control shortens this step; leave it as it is"
    (priority,) = [refusal for refusal in tuning.plan.refusals if refusal.control == "priority"]
    assert (priority.target, priority.reason) == ("1 collective", "25.0 % slower when used alone")


def test_directives_that_do_not_matter_are_dropped() -> None:
    tuning, _ = tuned({plan(*BOTH_CAPS): 150.0, plan("cap long 15"): 150.0})
    assert chosen(tuning) == plan("cap long 15")


def test_directives_that_matter_stay() -> None:
    tuning, _ = tuned({plan(*BOTH_CAPS): 150.0, plan("cap long 15"): 151.0, plan("cap longer 15"): 152.0})
    assert chosen(tuning) == BOTH_CAPS


def test_a_control_that_later_ones_make_needless_is_dropped() -> None:
    three = plan("priority", "8 CTAs", "hold 5")
    makespans = {plan("priority"): 170.0, plan("priority", "8 CTAs"): 160.0, three: 140.0, plan("8 CTAs", "hold 5"): 140.0}
    tuning, _ = tuned(makespans)
    assert chosen(tuning) == plan("8 CTAs", "hold 5")


def test_worker_processes_find_the_same_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    step, told = load_workload("cb_ar_opt2"), ([], [])
    alone = tune(step, H200, on_trial=told[0].append)
    monkeypatch.setattr(search, "LEAST_SHARED_S", 0.0)
    assert tune(step, H200, on_trial=told[1].append, num_workers=2) == alone
    assert told[0] == told[1]


def test_what_was_tried_and_left_out_is_refused_with_its_best_figure() -> None:
    tuning, _ = tuned({plan("copy engines"): 150.0, plan("8 CTAs"): 196.0, plan("4 CTAs"): 198.0})
    refusals = {refusal.control: refusal for refusal in tuning.plan.refusals}
    assert set(refusals) == {
        "priority",
        "head_start",
        "residency_cap",
        "carveout",
        "communication_ctas",
        "overlap_matmul",
        "own_stream",
    }
    assert refusals["communication_ctas"].reason == (
        "2.0 % faster when used alone (8 communication CTAs), but adds less than 0.5 % to the plan"
    )
    assert refusals["priority"].reason == "no effect when used alone"


def test_every_distinct_candidate_is_told_once_the_baseline_first() -> None:
    told: list[Trial] = []
    executor = ScriptedExecutor(lambda words: BASELINE_US - 10 * len(words))
    tuning = tune(contended_step(), H200, executor, told.append)
    assert [(trial.label, trial.makespan_us) for trial in told] == [
        (trial.label, trial.makespan_us) for trial in tuning.trials
    ]
    assert (told[0].label, told[0].directives, told[0].makespan_us) == ("as it is", (), BASELINE_US)
    assert len({trial.directives for trial in told}) == len(told)
    assert {tried.directives for tried in executor.plans} <= {trial.directives for trial in told}


def test_plan_and_trials_name_no_operation_by_number_and_mean_those_that_were_tried() -> None:
    told: list[Trial] = []
    tuning = tune(contended_step(), H200, ScriptedExecutor(lambda words: BASELINE_US - 10 * len(words)), told.append)
    assert any(directive.match.operations for trial in told for directive in trial.directives)
    for tried, kept in zip(told, tuning.trials, strict=True):
        assert all(directive.match.operations is None for directive in kept.directives)
        before, after = (Plan(directives=trial.directives).controls_of(contended_step()) for trial in (tried, kept))
        assert before == after
    assert tuning.plan.directives in [trial.directives for trial in tuning.trials]


def test_what_was_measured_is_not_called_simulated() -> None:
    executor = ScriptedExecutor(lambda words: 150.0 if "priority" in words else BASELINE_US, origin="measured")
    tuning = tune(contended_step(), H200, executor)
    assert tuning.plan.expectation.origin == "measured"


def test_the_plan_names_its_step_and_machine() -> None:
    tuning, _ = tuned({})
    assert (tuning.plan.step_name, tuning.plan.machine) == ("contended", "h200")
    tuning.plan.check_step(contended_step())


@settings(max_examples=60)
@given(seed=st.randoms(use_true_random=False))
def test_whatever_the_executor_answers_the_plan_keeps_its_promises(seed: object) -> None:
    answers: dict[frozenset[str], float] = {}

    def answer(words: frozenset[str]) -> float:
        return answers.setdefault(words, float(seed.randint(160, 240)))  # type: ignore[attr-defined]

    first = tune(contended_step(), H200, ScriptedExecutor(answer))
    assert tune(contended_step(), H200, ScriptedExecutor(answer)) == first
    expected = first.plan.expectation
    assert expected.baseline_us == answers[plan()]
    assert expected.planned_us == answers[chosen(first)]
    assert bool(first.plan.directives) == (first.plan.verdict == "GAIN")
    if first.plan.verdict == "GAIN":
        assert expected.planned_us <= (1 - LEAST_SIMULATED_GAIN) * expected.baseline_us
    singles = [trial.makespan_us for trial in first.trials if len(trial.families) == 1 and trial.label != "as it is"]
    if min(singles) <= (1 - LEAST_SIMULATED_GAIN) * expected.baseline_us:
        assert expected.planned_us <= min(singles) * 1.002
    assert all(refusal.reason and refusal.target for refusal in first.plan.refusals)
    assert all(directive.reason for directive in first.plan.directives)
    assert "\n" not in first.plan.summary
