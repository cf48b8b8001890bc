"""The choice by measurement, on a graph in memory with clocks that the tests set: what wins, what is left out."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from counterpoint.cuda.graph import GraphNode
from counterpoint.errors import DeviceError, PlanError
from counterpoint.measurement.tournament import WARM_UP_ROUNDS
from counterpoint.plan import Plan
from counterpoint.planner.measured import AS_IT_IS, tune_measured
from counterpoint.planner.search import tune
from counterpoint.sim import Simulator
from helpers.graph_double import Faults, GraphDouble, Ranks, ReplayDouble, contents, controls_of, simulated_us
from helpers.measured_step import (
    BASELINE_US,
    H200,
    LONE_US,
    NCCL_NODES,
    NODES,
    captured,
    labels,
    on_two_ranks,
    only,
    read,
    refused,
    taking,
    tuned,
    work,
)
from helpers.toy_steps import NCCL
from helpers.trace_builder import NCCL as ALL_REDUCE

COMBINATIONS = [
    {"priority"},
    {"priority", "residency_cap"},
    {"head_start"},
    {"priority", "head_start"},
    {"residency_cap"},
    {"head_start", "residency_cap"},
]


pytestmark = pytest.mark.usefixtures("same_orders")


@pytest.mark.parametrize("best", COMBINATIONS, ids=lambda best: " + ".join(sorted(best)))
def test_the_truly_best_combination_is_picked_whatever_the_simulator_thinks(best: set[str]) -> None:
    tuning = tuned(taking({only(): BASELINE_US, frozenset(best): 800.0}, otherwise=900.0))
    assert controls_of(tuning.plan) == best
    assert tuning.plan.verdict == "GAIN"
    assert (tuning.plan.expectation.baseline_us, tuning.plan.expectation.planned_us) == (BASELINE_US, 800.0)
    assert tuning.plan.expectation.origin == "measured"
    assert "20.0 % less" in tuning.plan.summary


@pytest.mark.parametrize("obstacle", ["", "too far"], ids=["copies prepared", "no copies"])
def test_with_the_simulator_for_a_clock_the_choice_is_its_best_applicable_trial(obstacle: str) -> None:
    found = read(NCCL_NODES, num_bytes=1 << 27)  # so few in the kernel's time that copies and a sum are best
    graph = GraphDouble(NCCL_NODES, H200.gpu, obstacles={3: obstacle})
    tuning = tune_measured(ReplayDouble(graph, found, simulated_us(found, H200)), H200, num_rounds=7)
    trials = tune(found.step, H200, Simulator(), applier="graph").trials
    able = [trial for trial in trials if "light_kernel" not in trial.families]
    able = [trial for trial in able if not obstacle or "transport" not in trial.families]
    best = min(able, key=lambda trial: trial.makespan_us)
    assert ("transport" in best.families) == (not obstacle)
    # measured tuning also tries a cap of one CTA less, which no simulation proposes, and this clock may find it faster
    added = [each for each in tuning.plan.directives if each not in best.directives]
    assert set(best.directives) <= set(tuning.plan.directives)
    assert all("some kernels are faster so" in each.reason for each in added)
    assert tuning.plan.expectation.planned_us <= best.makespan_us * (1 + 1e-6)
    assert bool(added) == (tuning.plan.expectation.planned_us < best.makespan_us * (1 - 1e-6))
    assert tuning.plan.expectation.planned_us < tuning.plan.expectation.baseline_us


def test_a_gain_within_the_noise_is_no_gain() -> None:
    def unsteady(replay: int) -> float:
        return random.Random(replay).uniform(0.9, 1.1)

    tuning = tuned(taking({only("priority"): 990.0}), num_rounds=15, noise=unsteady)
    assert (tuning.plan.verdict, tuning.plan.directives, tuning.engagements) == ("NO_GAIN", (), ())
    assert "leave it as it is" in tuning.plan.summary
    assert tuning.plan.expectation.planned_us == tuning.plan.expectation.baseline_us


def test_the_same_gain_without_noise_is_one() -> None:
    assert controls_of(tuned(taking({only("priority"): 990.0})).plan) == {"priority"}


def test_candidates_that_are_all_slower_leave_the_step_as_it_is() -> None:
    tuning = tuned(taking({only(): BASELINE_US}, otherwise=1100.0))
    assert (tuning.plan.verdict, tuning.plan.directives) == ("NO_GAIN", ())
    assert tuning.plan.summary == "no candidate was faster; leave it as it is"
    assert all(measurement.is_slower() for measurement in tuning.comparison.measurements[1:])


def test_a_steady_gain_is_not_hidden_by_a_candidate_that_is_only_sometimes_faster() -> None:
    swings = random.Random(4)
    clock = taking({only("head_start"): 800.0})
    tuning = tuned(
        lambda plan: swings.choice([850.0, 1250.0]) if controls_of(plan) == {"priority"} else clock(plan), num_rounds=15
    )
    assert controls_of(tuning.plan) == {"head_start"}


@settings(max_examples=40)
@given(times=st.lists(st.floats(850.0, 1150.0), min_size=6, max_size=6), seed=st.integers(0, 1000))
def test_what_is_planned_is_measured_faster_and_what_is_clearly_faster_is_not_missed(times: list[float], seed: int) -> None:
    clock, noise = taking({only(*each): time for each, time in zip(COMBINATIONS, times, strict=True)}), random.Random(seed)
    tuning = tuned(clock, num_rounds=15, noise=lambda replay: noise.uniform(0.99, 1.01))
    expectation = tuning.plan.expectation
    if tuning.plan.verdict == "NO_GAIN":
        assert min(times) > 0.97 * BASELINE_US
        assert not tuning.plan.directives
    else:
        assert expectation.planned_us < expectation.baseline_us
        assert clock(tuning.plan) in times


def test_candidates_are_interleaved_with_the_step_as_it_is() -> None:
    double = captured(taking({}))
    tuning = tune_measured(double, H200, num_rounds=4)
    size = len(tuning.comparison.measurements)
    heat = double.replays[: size * (WARM_UP_ROUNDS + 2)]
    rounds = [heat[start : start + size] for start in range(0, len(heat), size)]
    assert all(len({controls_of(plan) for plan in order}) == size for order in rounds)
    assert len({[controls_of(plan) for plan in order].index(only()) for order in rounds}) > 1


@pytest.mark.parametrize("best", [{"residency_cap"}, {"priority", "residency_cap"}], ids=["alone", "with priority"])
def test_a_cap_that_no_collective_needs_is_measured_and_may_win(best: set[str]) -> None:
    tuning = tuned(taking({only(): BASELINE_US, frozenset(best): 800.0}, otherwise=900.0), nodes=NCCL_NODES)
    assert not any("residency_cap" in trial.families for trial in tuning.simulated.trials)
    assert controls_of(tuning.plan) == best
    assert tuning.plan.verdict == "GAIN"


def test_pairs_with_a_cap_take_no_place_of_other_candidates() -> None:
    measured = labels(tuned(taking({}), nodes=NCCL_NODES))
    has_cap = ["a CTA less per SM" in label for label in measured]
    pairs_with_cap = [cap and " + " in label for cap, label in zip(has_cap, measured, strict=True)]
    assert sum(has_cap) > sum(pairs_with_cap) > 0
    assert pairs_with_cap == sorted(pairs_with_cap)


def test_a_candidate_that_was_fast_in_the_heat_alone_is_not_chosen() -> None:
    favored = only("residency_cap")
    double = captured(taking({}))

    def clock(plan: Plan) -> float:
        # fast at first sight, the slowest from then on
        return 1.0 if controls_of(plan) == favored and len(double.replays) < 50 else BASELINE_US

    double = captured(clock)
    assert tune_measured(double, H200, num_rounds=7).plan.verdict == "NO_GAIN"


@pytest.mark.parametrize("num_candidates", [0, 1, 3])
def test_no_more_candidates_are_measured_than_asked_for(num_candidates: int) -> None:
    tuning = tune_measured(captured(taking({})), H200, num_candidates=num_candidates, num_rounds=4)
    assert len(tuning.comparison.measurements) == 1 + num_candidates
    assert labels(tuning)[0] == AS_IT_IS


def test_the_plan_fits_its_step_and_every_control_of_it_is_verified() -> None:
    double = captured(taking({only("priority", "residency_cap"): 800.0}))
    before = contents(double.graph)
    tuning = tune_measured(double, H200, num_rounds=4)
    tuning.plan.check_step(double.read.step)
    assert tuning.plan.machine == "h200"
    assert {engagement.control for engagement in tuning.engagements} == {"priority", "residency_cap"}
    assert {engagement.state for engagement in tuning.engagements} == {"verified"}
    assert contents(double.graph) == before


def test_a_step_without_communication_is_left_as_it_is() -> None:
    tuning = tuned(taking({}), nodes=(work("producer"), work("long", 0), work("longer", 1), work("side", 0), work("end", 3)))
    assert labels(tuning) == [AS_IT_IS]
    assert tuning.plan.verdict == "NO_GAIN"


def test_what_a_captured_step_does_not_take_is_refused_with_the_reason_though_the_simulator_chose_it() -> None:
    tuning = tuned(taking({only("priority"): 800.0}), nodes=NCCL_NODES)
    assert "transport" in controls_of(tuning.simulated.plan)
    assert "communication_ctas" in {family for trial in tuning.simulated.trials for family in trial.families}
    assert not any("communication CTAs" in label or "copies" in label for label in labels(tuning))
    assert refused(tuning, "transport") == ["no copies were prepared"]
    (reason,) = refused(tuning, "communication_ctas")
    assert "options.config.max_ctas" in reason


@pytest.mark.parametrize("best", COMBINATIONS, ids=lambda best: " + ".join(sorted(best)))
def test_no_control_is_both_in_the_plan_and_refused(best: set[str]) -> None:
    tuning = tuned(taking({frozenset(best): 800.0}))
    assert not best & {refusal.control for refusal in tuning.plan.refusals}
    assert all(refusal.reason for refusal in tuning.plan.refusals)


def test_caps_on_kernels_with_a_grid_barrier_are_left_out_with_the_reason() -> None:
    nodes = tuple(replace(node, is_cooperative=node.name != ALL_REDUCE) for node in NODES)
    tuning = tuned(taking({only("residency_cap"): 100.0, only("priority"): 900.0}), nodes=nodes)
    assert not any("caps" in label for label in labels(tuning))
    assert controls_of(tuning.plan) == {"priority"}
    assert refused(tuning, "residency_cap") == ["the kernel has a grid barrier and needs all its CTAs resident at once"]


@pytest.mark.parametrize(
    ("faults", "control"),
    [
        (Faults(ignores_priority=True), "priority"),
        (Faults(ignores_shared_memory=True), "residency_cap"),
        (Faults(ignores_holds=True), "head_start"),
    ],
    ids=["priority", "residency", "head start"],
)
def test_a_control_that_this_driver_ignores_is_never_measured_nor_planned(faults: Faults, control: str) -> None:
    double = captured(taking({only(): BASELINE_US}, otherwise=800.0), faults=faults)
    tuning = tune_measured(double, H200, num_rounds=4)
    assert all(control not in controls_of(plan) for plan in double.replays)
    assert tuning.plan.verdict == "GAIN"
    assert refused(tuning, control) == ["the driver holds another value"]


def test_a_candidate_without_memory_is_dropped_with_the_reason_and_the_others_are_measured() -> None:
    lacking = Faults(lacks_memory_for=lambda graph: any(edit.method == "hold" for edit in graph.edits))
    double = captured(taking({only("residency_cap"): 800.0, only("head_start"): 100.0}), faults=lacking)
    tuning = tune_measured(double, H200, num_rounds=4)
    assert controls_of(tuning.plan) == {"residency_cap"}
    assert len(tuning.comparison.measurements) > 2
    assert not any("head start" in label for label in labels(tuning))
    dropped = [refusal for refusal in tuning.plan.refusals if "OUT_OF_MEMORY" in refusal.reason]
    assert len(dropped) > 1
    assert all("head start" in refusal.control for refusal in dropped)
    assert double.graph.log.num_open() == 0


def test_without_memory_for_the_step_as_it_is_there_is_one_clear_error() -> None:
    double = captured(taking({}), faults=Faults(lacks_memory_for=lambda graph: not graph.edits))
    with pytest.raises(DeviceError, match=r"captured step cannot be replayed unchanged.*OUT_OF_MEMORY") as caught:
        tune_measured(double, H200)
    assert "\n" not in str(caught.value)
    assert double.replays == []


def test_everything_made_ready_is_freed_once() -> None:
    double = captured(taking({}))
    tuning = tune_measured(double, H200, num_rounds=4)
    assert len(double.graph.log.executables) == len(tuning.comparison.measurements)
    assert len(double.graph.log.copies) > len(tuning.comparison.measurements)  # one for each simulated candidate, too
    assert double.graph.log.num_open() == 0


@pytest.mark.parametrize("replay", [0, 3, 17])
def test_everything_made_ready_is_freed_when_a_replay_fails(replay: int) -> None:
    def failing(number: int) -> float:
        if number == replay:
            raise DeviceError("Launching the graph failed with CUDA_ERROR_LAUNCH_FAILED: see the driver's documentation.")
        return 1.0

    double = captured(taking({}), noise=failing)
    with pytest.raises(DeviceError, match="LAUNCH_FAILED"):
        tune_measured(double, H200)
    assert len(double.graph.log.executables) > 1
    assert double.graph.log.num_open() == 0


def test_the_slowest_rank_decides_and_both_ranks_choose_alike() -> None:
    clocks = (
        taking({only("priority"): 700.0, only("head_start"): 900.0}),
        taking({only("priority"): 1200.0, only("head_start"): 900.0}),
    )
    first, second = (
        each.result() for each in on_two_ranks(lambda ranks, rank: captured(clocks[rank], ranks=ranks, rank=rank))
    )
    assert controls_of(first.plan) == {"head_start"}
    assert (first.plan, first.comparison) == (second.plan, second.comparison)
    assert next(each for each in first.comparison.measurements if each.label == "priority").median_us == 1200.0


def test_all_ranks_measure_what_rank_0_proposes() -> None:
    lone_us = (LONE_US, (50.0, 20.0, 20.0, 5.0, 50.0))  # alone, rank 1 would find nothing worth a trial

    def make(ranks: Ranks, rank: int) -> ReplayDouble:
        return ReplayDouble(
            GraphDouble(NODES, H200.gpu),
            read(lone_us=lone_us[rank]),
            taking({only("priority"): 800.0}),
            ranks=ranks,
            rank=rank,
        )

    first, second = (each.result() for each in on_two_ranks(make))
    assert first.simulated.plan.directives != second.simulated.plan.directives
    assert labels(first) == labels(second)
    assert first.plan.directives == second.plan.directives != ()


def test_ranks_that_captured_different_steps_are_told_so_on_both() -> None:
    def make(ranks: Ranks, rank: int) -> ReplayDouble:
        found = read(num_bytes=(1 << 28) + rank)
        return ReplayDouble(GraphDouble(NODES, H200.gpu), found, taking({}), ranks=ranks, rank=rank)

    for outcome in on_two_ranks(make):
        with pytest.raises(PlanError, match="different steps"):
            outcome.result()


def test_a_candidate_that_one_rank_has_no_memory_for_is_dropped_on_both() -> None:
    lacking = Faults(lacks_memory_for=lambda graph: {edit.method for edit in graph.edits} == {"priority"})
    doubles = []

    def make(ranks: Ranks, rank: int) -> ReplayDouble:
        clock = taking({only("priority"): 100.0, only("head_start"): 900.0})
        doubles.append(captured(clock, faults=lacking if rank else None, ranks=ranks, rank=rank))
        return doubles[-1]

    first, second = (each.result() for each in on_two_ranks(make))
    assert labels(first) == labels(second)
    assert "priority" not in labels(first)
    assert controls_of(first.plan) == controls_of(second.plan) == {"head_start"}
    assert refused(first, "priority")[-1] == "another rank cannot prepare it; see that rank's output"
    assert "OUT_OF_MEMORY" in refused(second, "priority")[-1]
    assert [double.graph.log.num_open() for double in doubles] == [0, 0]


def test_two_controls_that_help_alone_are_measured_together_even_where_the_simulator_sees_no_use() -> None:
    both = frozenset({"priority", "head_start"})
    double = captured(taking({both: 700.0, only("priority"): 800.0, only("head_start"): 850.0}))
    tuning = tune_measured(double, H200, num_rounds=4)
    assert controls_of(tuning.plan) == both


# The all-reduce continues the stream of the producer and the kernel waits for an event.
RACE = (
    work("producer"),
    GraphNode(kind="kernel", name=ALL_REDUCE, footprint=NCCL, waits_for=(0,)),
    GraphNode(kind="other", name="event", waits_for=(0,)),
    work("long", 2),
    work("last", 1, 3),
)


def test_controls_of_a_race_are_measured() -> None:
    found = tune_measured(
        ReplayDouble(
            GraphDouble(RACE, H200.gpu),
            read(RACE, (50.0, 900.0, 0.0, 600.0, 50.0)),
            taking({only("priority", "head_start"): 800.0}),
        ),
        H200,
        num_rounds=7,
    )
    assert {"priority", "head start 5 us"} < {row.label for row in found.comparison.measurements}
    assert {type(control).__name__ for entry in found.plan.directives for control in entry.controls} == {
        "Priority",
        "HeadStart",
    }
    assert found.plan.verdict == "GAIN"


def test_a_step_without_a_race_gets_no_untold_controls() -> None:
    nodes = (work("producer"), GraphNode(kind="kernel", name=ALL_REDUCE, footprint=NCCL, waits_for=(0,)), work("last", 1))
    replays = ReplayDouble(GraphDouble(nodes, H200.gpu), read(nodes, (50.0, 900.0, 50.0)), lambda _: BASELINE_US)
    found = tune_measured(replays, H200, num_rounds=5)
    assert [row.label for row in found.comparison.measurements] == [AS_IT_IS]
