"""The choice by measurement where copies or a light kernel can take the place of collectives."""

import pytest

from counterpoint.cuda.graph import GraphNode
from counterpoint.cuda.graph_reading import CollectiveCall, GraphTimes, read_graph
from counterpoint.cuda.graph_rewriting import MOVED
from counterpoint.plan import Plan
from counterpoint.planner.measured import MeasuredTuning, tune_measured
from counterpoint.step import CollectiveKind
from helpers.graph_double import GraphDouble, ReplayDouble, controls_of
from helpers.measured_step import (
    BASELINE_US,
    H200,
    LONE_US,
    NCCL_NODES,
    NODES,
    Clock,
    labels,
    only,
    read,
    refused,
    taking,
)
from helpers.toy_steps import NCCL
from helpers.trace_builder import NCCL as ALL_REDUCE

pytestmark = pytest.mark.usefixtures("same_orders")

# a second all-reduce behind the first, that copies cannot replace
TWICE = (*NODES, GraphNode(kind="kernel", name=ALL_REDUCE, footprint=NCCL, waits_for=(4,)))
TWICE_US = (*LONE_US, 900.0)


def movable(
    clock: Clock, obstacles: dict[int, str], collective: CollectiveKind = "all_reduce", num_bytes: int = 1 << 28
) -> MeasuredTuning:
    """Tune the step with two collectives, for which copies are prepared where the obstacle is empty."""
    graph = GraphDouble(TWICE, H200.gpu, obstacles=obstacles)
    return tune_measured(ReplayDouble(graph, read(TWICE, TWICE_US, num_bytes, collective), clock), H200, num_rounds=7)


@pytest.mark.parametrize("collective", ["all_reduce", "all_to_all"])
def test_copies_are_measured_and_planned_for_what_can_be_moved_and_for_nothing_else(collective: CollectiveKind) -> None:
    tuning = movable(taking({only("transport"): 700.0}, otherwise=900.0), {3: "", 5: "on rank 1: too far"}, collective)
    assert controls_of(tuning.plan) == {"transport"}
    (directive,) = tuning.plan.directives
    assert directive.match.operations is None
    assert directive.match.accepted(read(TWICE, TWICE_US, collective=collective).step) == (3,)
    assert [engagement.state for engagement in tuning.engagements] == ["verified"]
    assert tuning.plan.expectation.planned_us == 700.0


@pytest.mark.parametrize("collective", ["all_reduce", "all_to_all"])
def test_copies_that_are_slower_are_measured_and_left_out(collective: CollectiveKind) -> None:
    tuning = movable(taking({only("transport"): 950.0, only("priority"): 800.0}), {3: "", 5: ""}, collective)
    assert controls_of(tuning.plan) == {"priority"}
    assert any(label in ("copy engines", "copies and sums") for label in labels(tuning))


def test_where_nothing_can_be_moved_the_plan_says_why() -> None:
    tuning = movable(taking({}), {3: "on rank 1: too far", 5: "on rank 1: too far"}, "all_to_all")
    assert not any("copy engines" in label for label in labels(tuning))
    assert "on rank 1: too far" in refused(tuning, "transport")


def test_controls_that_still_help_are_measured_on_top_of_copies() -> None:
    both = only("transport", "head_start"), only("transport", "priority")
    tuning = movable(taking(dict.fromkeys(both, 600.0), otherwise=900.0), {3: "", 5: "too far"}, "all_to_all")
    assert any("copy engines +" in label or "+ copy engines" in label for label in labels(tuning)), labels(tuning)


def test_small_reductions_are_not_moved() -> None:
    tuning = movable(taking({}), {3: "", 5: ""}, num_bytes=1 << 20)
    assert not any("cop" in label for label in labels(tuning)), labels(tuning)


KINDS: tuple[CollectiveKind, ...] = ("all_gather", "all_reduce")
CALLS = [CollectiveCall(collective=kind, num_bytes=1 << 28, group_size=4) for kind in KINDS]
GATHER_AND_REDUCE = read_graph("made up", TWICE, CALLS, GraphTimes(device_name="NVIDIA H200", lone_us=TWICE_US), 4)


def gather_and_reduce(moved_us: dict[frozenset[int], float], obstacles: dict[int, str]) -> MeasuredTuning:
    """Tune the step with two collectives, of which the second reduces; the clock goes by which of them copies move."""
    found = GATHER_AND_REDUCE

    def clock(plan: Plan) -> float:
        each = enumerate(plan.controls_of(found.step))
        return moved_us.get(frozenset(number for number, controls in each if MOVED in controls), BASELINE_US)

    return tune_measured(ReplayDouble(GraphDouble(TWICE, H200.gpu, obstacles=obstacles), found, clock), H200, num_rounds=7)


@pytest.mark.parametrize("best", [{3}, {3, 5}], ids=["without", "with"])
def test_copies_with_and_without_reductions_are_both_measured_since_simulated_sums_may_be_too_fast(best: set[int]) -> None:
    tuning = gather_and_reduce({frozenset(best): 700.0}, {3: "", 5: ""})
    assert {"copy engines", "copy engines, reductions too"} < set(labels(tuning))
    moved = {number for number, controls in enumerate(tuning.plan.controls_of(GATHER_AND_REDUCE.step)) if MOVED in controls}
    assert moved == best


def test_a_candidate_is_called_by_what_of_it_can_be_moved() -> None:
    without_sums = gather_and_reduce({frozenset({3}): 700.0}, {3: "", 5: "too far"})
    assert [label for label in labels(without_sums) if "cop" in label and "+" not in label] == ["copy engines"]
    only_sums = gather_and_reduce({frozenset({5}): 700.0}, {3: "too far", 5: ""})
    assert [label for label in labels(only_sums) if "cop" in label and "+" not in label] == ["copies and sums"]


@pytest.mark.parametrize("light", [{3}, set()], ids=["prepared", "not prepared"])
def test_a_light_kernel_that_measures_faster_is_planned_where_it_can_take_the_collectives_place(light: set[int]) -> None:
    graph = GraphDouble(NCCL_NODES, H200.gpu, light=light)
    clock = taking({only("light_kernel"): 700.0, only("priority"): 800.0})
    tuning = tune_measured(ReplayDouble(graph, read(NCCL_NODES), clock), H200, num_rounds=7)
    assert controls_of(tuning.plan) == ({"light_kernel"} if light else {"priority"})
    assert all(engagement.state == "verified" for engagement in tuning.engagements)
    assert refused(tuning, "light_kernel") == ([] if light else ["no light kernels were prepared"])
