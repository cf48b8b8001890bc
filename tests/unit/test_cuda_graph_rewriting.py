"""A plan applied to a copy of a graph: what is edited, what is refused and why, and what silently did nothing."""

import pytest
from msgspec.structs import replace

from counterpoint import load_machine
from counterpoint.controls import (
    Carveout,
    CommunicationCtas,
    Control,
    HeadStart,
    LightKernel,
    Priority,
    ResidencyCap,
    Transport,
)
from counterpoint.cuda.graph import GraphNode
from counterpoint.cuda.graph_reading import CollectiveCall, GraphTimes, ReadGraph, read_graph
from counterpoint.cuda.graph_rewriting import rewrite
from counterpoint.engagement import Engagement, require_engaged
from counterpoint.errors import DeviceError, EngagementError, PlanError
from counterpoint.occupancy import cap_shared_bytes
from counterpoint.plan import LEAVE_IT, Directive, Match, Plan
from counterpoint.step import Footprint
from helpers.graph_double import Edit, ExecutableDouble, Faults, GraphDouble, contents
from helpers.toy_steps import NCCL
from helpers.trace_builder import ELEMENTWISE, MATMUL
from helpers.trace_builder import NCCL as ALL_REDUCE

GPU = load_machine("h200").gpu
WIDE = Footprint(num_ctas=16896, threads_per_cta=128, registers_per_thread=32)
TILED = Footprint(num_ctas=4096, threads_per_cta=128, registers_per_thread=128, dynamic_shared_bytes=24_576)
NODES = (
    GraphNode(kind="kernel", name=ELEMENTWISE, footprint=WIDE),
    GraphNode(kind="other", name="event_record", waits_for=(0,)),
    GraphNode(kind="kernel", name=ALL_REDUCE, footprint=NCCL, waits_for=(1,)),
    GraphNode(kind="kernel", name=MATMUL, footprint=TILED, waits_for=(0,)),
    GraphNode(kind="copy", name="Memcpy", num_bytes=4096, waits_for=(3,)),
    GraphNode(kind="kernel", name=MATMUL, footprint=TILED, waits_for=(4,)),
)
REDUCTION, FIRST_MATMUL, COPY, SECOND_MATMUL = 2, 3, 4, 5  # node numbers
CAP = ResidencyCap(ctas_per_sm=2, dynamic_shared_bytes=cap_shared_bytes(GPU, replace(TILED, carveout_percent=100), 2))
HOLD = HeadStart(hold_us=5.0)
GREATEST = Priority(priority=-5)


def read(nodes: tuple[GraphNode, ...] = NODES) -> ReadGraph:
    times = GraphTimes(device_name="NVIDIA H200", lone_us=(10.0,) * len(nodes))
    held = sum(node.name == ALL_REDUCE for node in nodes)
    calls = [CollectiveCall(collective="all_reduce", num_bytes=1 << 28, group_size=2)] * held
    return read_graph("made up", nodes, calls, times, 2)


def plan(*controls: Control, **match: object) -> Plan:
    found = Match(**match)  # type: ignore[arg-type]
    return Plan(directives=(Directive(match=found, controls=controls, reason="test"),))


def outcome(wanted: Plan, *, faults: Faults | None = None) -> tuple[GraphDouble, tuple[Engagement, ...]]:
    """The edited copy and the engagements."""
    rewritten = rewrite(GraphDouble(NODES, GPU, faults), read(), wanted)
    assert isinstance(rewritten.graph, GraphDouble)
    return rewritten.graph, rewritten.engagements


def states(engagements: tuple[Engagement, ...]) -> list[str]:
    return [engagement.state for engagement in engagements]


@pytest.mark.parametrize(
    ("control", "match", "edits"),
    [
        (GREATEST, {"kind": "communication"}, [Edit("priority", REDUCTION, (-5,))]),
        (HOLD, {"operations": (2,)}, [Edit("hold", FIRST_MATMUL, (5.0,))]),
        (HOLD, {"operations": (3,)}, [Edit("hold", COPY, (5.0,))]),
        (
            CAP,
            {"name": "nvjet*", "kind": "computation"},
            [Edit("shared_memory", node, (CAP.dynamic_shared_bytes, 100)) for node in (FIRST_MATMUL, SECOND_MATMUL)],
        ),
    ],
    ids=["priority", "head start of a kernel", "head start of a copy", "cap"],
)
def test_edits_hit_the_matched_nodes_and_no_others(control: Control, match: dict[str, object], edits: list[Edit]) -> None:
    graph, engagements = outcome(plan(control, **match))
    assert graph.edits == edits
    assert states(engagements) == ["verified"] * len(edits)
    touched = {edit.node for edit in edits}
    assert all(graph.nodes()[number] == node for number, node in enumerate(NODES) if number not in touched)


def test_the_captured_graph_is_never_touched() -> None:
    captured = GraphDouble(NODES, GPU)
    before = contents(captured)
    rewritten = rewrite(captured, read(), plan(GREATEST, HOLD, CAP, name="nvjet*"))
    assert isinstance(rewritten.graph, GraphDouble)
    assert contents(captured) == before
    assert contents(rewritten.graph) != before


def test_each_rewriting_starts_from_the_graph_as_it_was_captured() -> None:
    captured = GraphDouble(NODES, GPU)
    rewrite(captured, read(), plan(CAP, name="nvjet*"))
    again = rewrite(captured, read(), LEAVE_IT)
    assert again.graph.nodes() == NODES
    assert again.engagements == ()


def test_what_is_made_ready_holds_the_edits() -> None:
    graph, _ = outcome(plan(GREATEST, kind="communication"))
    executable = graph.instantiate()
    assert isinstance(executable, ExecutableDouble)
    assert [node.priority for node in executable.nodes] == [0, 0, -5, 0, 0, 0]


def test_a_verified_cap_says_what_the_driver_answers() -> None:
    _, engagements = outcome(plan(CAP, operations=(2,)))
    (engagement,) = engagements
    assert (engagement.control, engagement.target) == ("residency_cap", MATMUL)
    assert engagement.asked == "cap of 2 CTAs per SM (76,801 B of shared memory, carveout 100 %)"
    assert engagement.found == "2 CTAs per SM, carveout 100 %"
    assert engagement.reason == ""


def test_one_byte_less_than_the_cap_needs_is_found_out() -> None:
    short = replace(CAP, dynamic_shared_bytes=CAP.dynamic_shared_bytes - 1)
    _, engagements = outcome(plan(short, operations=(2,)))
    assert (engagements[0].state, engagements[0].found) == ("failed", "3 CTAs per SM, carveout 100 %")


def test_a_cap_under_which_no_cta_could_run_is_a_failure() -> None:
    impossible = replace(CAP, dynamic_shared_bytes=GPU.max_shared_bytes_per_cta + 1)
    _, engagements = outcome(plan(impossible, operations=(2,)))
    assert (engagements[0].state, engagements[0].found) == ("failed", "0 CTAs per SM, carveout 100 %")


def test_a_cap_never_takes_shared_memory_away_that_the_kernel_uses() -> None:
    less = ResidencyCap(ctas_per_sm=4, dynamic_shared_bytes=TILED.dynamic_shared_bytes - 1)
    graph, engagements = outcome(plan(less, operations=(2,)))
    assert graph.edits == []
    assert engagements[0].state == "refused"
    assert engagements[0].reason == "the kernel uses 24,576 bytes of dynamic shared memory, so 24,575 are too few"


def test_a_carveout_alone_keeps_the_shared_memory_as_it_is() -> None:
    same = ResidencyCap(ctas_per_sm=4, dynamic_shared_bytes=TILED.dynamic_shared_bytes)
    for control, percent in ((same, 100), (Carveout(percent=57), 57)):
        graph, engagements = outcome(plan(control, operations=(2,)))
        assert states(engagements) == ["verified"]
        assert graph.nodes()[FIRST_MATMUL].footprint == replace(TILED, carveout_percent=percent)


def test_a_kernel_with_a_grid_barrier_is_never_capped_but_may_have_the_other_controls() -> None:
    nodes = tuple(replace(node, is_cooperative=node.kind == "kernel") for node in NODES)
    captured = GraphDouble(nodes, GPU)
    rewritten = rewrite(captured, read(nodes), plan(CAP, GREATEST, HOLD, name="nvjet*"))
    assert isinstance(rewritten.graph, GraphDouble)
    assert {edit.method for edit in rewritten.graph.edits} == {"priority", "hold"}
    refused = [engagement for engagement in rewritten.engagements if engagement.state == "refused"]
    assert {engagement.control for engagement in refused} == {"residency_cap"}
    assert {engagement.reason for engagement in refused} == {
        "the kernel has a grid barrier and needs all its CTAs resident at once"
    }


def test_a_limit_on_ctas_is_refused_with_the_line_that_the_user_must_add() -> None:
    graph, engagements = outcome(plan(CommunicationCtas(max_ctas=8), kind="communication"))
    assert graph.edits == []
    (engagement,) = engagements
    assert (engagement.state, engagement.asked) == ("refused", "at most 8 CTAs")
    for words in ("options.config.max_ctas", "dist.ProcessGroupNCCL.Options()", "pg_options"):
        assert words in engagement.reason


LIGHT = LightKernel(num_ctas=64)
BY_COPIES = Transport(transport="copy_engine")


def moved(wanted: Plan, *, faults: Faults | None = None) -> tuple[GraphDouble, tuple[Engagement, ...]]:
    """As `outcome`, on a graph in which copies or a light kernel may take the reduction's place."""
    rewritten = rewrite(GraphDouble(NODES, GPU, faults, obstacles={REDUCTION: ""}, light={REDUCTION}), read(), wanted)
    assert isinstance(rewritten.graph, GraphDouble)
    return rewritten.graph, rewritten.engagements


def test_a_collective_without_copies_in_store_keeps_its_transport_and_the_graph_says_why() -> None:
    graph, engagements = outcome(plan(BY_COPIES, kind="communication"))
    assert graph.edits == []
    assert (engagements[0].state, engagements[0].asked) == ("refused", "transport copy_engine")
    assert engagements[0].reason == "no copies were prepared"


def test_a_collective_is_moved_once_however_often_the_plan_says_so_and_its_bytes_are_the_proof() -> None:
    directive = Directive(match=Match(kind="communication"), controls=(BY_COPIES,), reason="test")
    graph, (engagement,) = moved(Plan(directives=(directive, directive)))
    assert graph.edits == [Edit("copies", REDUCTION, ())]
    assert (engagement.state, engagement.target) == ("verified", ALL_REDUCE)
    assert engagement.found == "copies of 1 MiB to other GPUs"


def test_copies_that_the_driver_does_not_hold_are_a_failure() -> None:
    _, (engagement,) = moved(plan(BY_COPIES, kind="communication"), faults=Faults(ignores_copies=True))
    assert engagement.state == "failed"


def test_a_moved_collective_takes_no_control_of_kernels_and_others_keep_theirs() -> None:
    graph, engagements = moved(plan(BY_COPIES, GREATEST, kind="communication"))
    assert [edit.method for edit in graph.edits] == ["copies"]
    assert {each.control: each.state for each in engagements} == {"transport": "verified", "priority": "refused"}
    assert "copy engines move it" in next(each.reason for each in engagements if each.control == "priority")


def test_a_light_kernel_takes_the_collectives_place_before_it_is_given_a_priority() -> None:
    graph, engagements = moved(plan(GREATEST, LIGHT, kind="communication"))
    assert [edit.method for edit in graph.edits] == ["light_kernel", "priority"]
    node = graph.nodes()[REDUCTION]
    assert (node.priority, node.footprint and node.footprint.shared_bytes) == (-5, 0)
    assert {each.control: each.state for each in engagements} == {"light_kernel": "verified", "priority": "verified"}
    assert next(each.found for each in engagements if each.control == "light_kernel") == "64 CTAs of counterpoint_light_push"


@pytest.mark.parametrize(
    ("controls", "states_wanted"),
    [((LIGHT,), ["failed"]), ((BY_COPIES, LIGHT), ["refused", "failed"]), ((LIGHT, BY_COPIES), ["refused", "failed"])],
    ids=["not there", "after copies", "before copies"],
)
def test_a_light_kernel_that_is_not_there_or_comes_beside_copies_is_found_out(
    controls: tuple[Control, ...], states_wanted: list[str]
) -> None:
    _, engagements = moved(plan(*controls, kind="communication"), faults=Faults(ignores_copies=True))
    assert states(engagements) == states_wanted


def test_only_collectives_can_be_moved() -> None:
    _, engagements = moved(plan(BY_COPIES, kind="computation"))
    assert {each.state for each in engagements} == {"refused"}
    assert "only collectives" in engagements[0].reason


def test_kernels_are_the_transport_that_a_collective_is_captured_with() -> None:
    _, (engagement,) = moved(plan(Transport(transport="sm"), kind="communication"))
    assert (engagement.state, engagement.reason) == ("refused", "so it is captured")


@pytest.mark.parametrize("control", [GREATEST, CAP])
def test_copies_are_refused_what_only_kernels_have(control: Control) -> None:
    graph, engagements = outcome(plan(control, kind="copy"))
    assert graph.edits == []
    assert (engagements[0].state, engagements[0].reason) == ("refused", "only kernels have it, and this is a copy")


def test_a_refusal_does_not_keep_the_other_controls_from_being_applied() -> None:
    graph, engagements = outcome(plan(CommunicationCtas(max_ctas=8), GREATEST, kind="communication"))
    assert graph.edits == [Edit("priority", REDUCTION, (-5,))]
    assert sorted(states(engagements)) == ["refused", "verified"]


@pytest.mark.parametrize(
    ("faults", "control", "found"),
    [
        (Faults(ignores_priority=True), GREATEST, "priority 0"),
        (Faults(ignores_carveout=True), CAP, "2 CTAs per SM, carveout -1 %"),
        (Faults(ignores_shared_memory=True), CAP, "4 CTAs per SM, carveout 100 %"),
        (Faults(ignores_holds=True), HOLD, "head start 0 us"),
    ],
    ids=["priority", "carveout", "residency", "head start"],
)
def test_a_control_that_silently_did_nothing_is_found_out(faults: Faults, control: Control, found: str) -> None:
    wanted = plan(control, operations=(2,))
    assert states(outcome(wanted)[1]) == ["verified"]
    _, engagements = outcome(wanted, faults=faults)
    assert (engagements[0].state, engagements[0].found) == ("failed", found)
    assert engagements[0].reason
    with pytest.raises(EngagementError, match=found):
        require_engaged(engagements)


def test_a_head_start_is_verified_by_the_delay_that_stands_in_the_graph() -> None:
    graph, engagements = outcome(plan(HeadStart(hold_us=7.5), operations=(2,)))
    assert graph.held_us(FIRST_MATMUL) == 7.5
    (engagement,) = engagements
    assert (engagement.state, engagement.asked, engagement.found) == ("verified", "head start 7.5 us", "head start 7.5 us")
    assert graph.nodes() == NODES  # a hold is no node of the step


def test_of_two_priorities_for_one_kernel_the_one_that_lost_is_reported() -> None:
    _, engagements = outcome(plan(GREATEST, Priority(priority=-2), kind="communication"))
    assert [(engagement.asked, engagement.state) for engagement in engagements] == [
        ("priority -5", "failed"),
        ("priority -2", "verified"),
    ]


def test_of_a_priority_that_is_asked_for_twice_the_last_place_counts() -> None:
    first, least = plan(GREATEST, kind="communication"), plan(Priority(priority=0), kind="communication")
    asked = Plan(directives=(*first.directives, *least.directives, *first.directives))
    graph, _ = outcome(asked)
    assert graph.nodes()[REDUCTION].priority == GREATEST.priority


def test_of_two_head_starts_for_one_kernel_the_last_stands_and_the_one_that_lost_is_reported() -> None:
    graph, engagements = outcome(plan(HOLD, HeadStart(hold_us=20.0), operations=(2,)))
    assert graph.held_us(FIRST_MATMUL) == 20.0
    assert [(engagement.asked, engagement.state) for engagement in engagements] == [
        ("head start 5 us", "failed"),
        ("head start 20 us", "verified"),
    ]


def test_a_plan_of_another_step_is_refused_before_the_driver_is_asked_anything() -> None:
    captured = GraphDouble(NODES, GPU)
    other = replace(plan(GREATEST, operations=(2,)), step_fingerprint=read(NODES[:4]).step.fingerprint(), step_name="other")
    with pytest.raises(PlanError, match="made for step 'other'"):
        rewrite(captured, read(), other)
    assert captured.log.num_calls == 0


def test_a_plan_of_another_step_is_applied_where_its_directives_say_what_they_mean() -> None:
    other = replace(plan(GREATEST, kind="communication"), step_fingerprint=read(NODES[:4]).step.fingerprint())
    _, engagements = outcome(other)
    assert [engagement.state for engagement in engagements] == ["verified"] * len(engagements)
    assert engagements
    assert "Every directive matches here" in other.remarks_on(read().step)[0]


def test_a_directive_that_matches_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match="matches none of the 5 operations"):
        outcome(plan(GREATEST, name="gemm*"))


def test_a_graph_that_cannot_be_copied_is_one_clear_error() -> None:
    captured = GraphDouble(NODES, GPU, Faults(refuses_copy=True))
    with pytest.raises(DeviceError, match="Copying the graph failed"):
        rewrite(captured, read(), plan(GREATEST, kind="communication"))
    assert captured.edits == []


def test_a_copy_on_which_the_driver_refuses_an_edit_is_freed() -> None:
    captured = GraphDouble(NODES, GPU, Faults(refuses_edits=True))
    with pytest.raises(DeviceError, match="Setting PRIORITY"):
        rewrite(captured, read(), plan(GREATEST, kind="communication"))
    assert len(captured.log.copies) == 1
    assert captured.log.num_open() == 0


def test_only_edited_nodes_are_read_again_and_each_of_them_once() -> None:
    captured = GraphDouble(NODES, GPU)
    rewrite(captured, read(), plan(GREATEST, CAP, HOLD, operations=(2,)))
    copied, first_read, edited, again, residency, held = len(NODES), len(NODES), 3, 1, 1, 1
    assert captured.log.num_calls == copied + first_read + edited + again + residency + held


@pytest.mark.parametrize("controls", [(), (GREATEST,), (GREATEST, CAP, HOLD)], ids=len)
def test_the_driver_is_asked_a_fixed_number_of_times_per_node(controls: tuple[Control, ...]) -> None:
    calls = []
    for num_nodes in (100, 1000):
        nodes = tuple(
            GraphNode(kind="kernel", name=MATMUL, footprint=TILED, waits_for=(number - 1,) if number else ())
            for number in range(num_nodes)
        )
        captured = GraphDouble(nodes, GPU)
        rewritten = rewrite(captured, read(nodes), plan(*controls) if controls else LEAVE_IT)
        assert states(rewritten.engagements) == ["verified"] * num_nodes * len(controls)
        calls.append(captured.log.num_calls)
    assert calls[1] == 10 * calls[0]
    assert calls[1] <= 1000 * (3 + 2 * len(controls))
