"""Apply a plan to a copy of a captured graph, and prove from the driver what took effect.

Edits go to the nodes that the plan's directives match and to no others; the captured graph is never touched, so leaving
the plan is launching the original. A control that cannot apply is refused with the reason, never skipped in silence.
"""

import msgspec

from counterpoint.cuda.graph import AbstractGraph, GraphNode
from counterpoint.cuda.reading import ReadGraph
from counterpoint.engagement import Engagement
from counterpoint.plan import CommunicationCtas, Control, HeadStart, Plan, Priority, ResidencyCap, Transport

REFUSED_IN_GRAPHS = {
    CommunicationCtas: "a process group takes it when it is made: "
    "set options.config.max_ctas in dist.ProcessGroupNCCL.Options() and pass it as pg_options",
    Transport: "a captured collective keeps its transport; capture it on copy engines instead",
}


class Rewritten(msgspec.Struct, frozen=True, kw_only=True):
    """The edited copy, and what became of each control."""

    graph: AbstractGraph
    engagements: tuple[Engagement, ...]


def rewrite(graph: AbstractGraph, read: ReadGraph, plan: Plan) -> Rewritten:
    """Copy `graph` and apply `plan` to it. Raises `PlanError` for a plan of another step, `DeviceError` from the driver."""
    plan.check_step(read.step)
    edited = graph.copy()
    before = graph.nodes()
    wanted: list[tuple[int, Control]] = []
    engagements: list[Engagement] = []
    for index, (number, operation) in enumerate(zip(read.nodes, read.step.operations, strict=True)):
        for control in plan.controls_for(index, operation):
            reason = _why_not(before[number], control)
            if reason:
                engagements.append(_engagement(before[number], control, "refused", reason=reason))
            else:
                _apply(edited, number, control)
                wanted.append((number, control))
    after = edited.nodes() if wanted else before
    engagements.extend(_verify(edited, number, after[number], control) for number, control in wanted)
    return Rewritten(graph=edited, engagements=tuple(engagements))


def _why_not(node: GraphNode, control: Control) -> str:
    """Why a control must not be applied to a node; empty if it may."""
    if type(control) in REFUSED_IN_GRAPHS:
        return REFUSED_IN_GRAPHS[type(control)]
    if node.kind != "kernel" and not isinstance(control, HeadStart):
        return "only kernels have it, and this is a " + node.kind
    if isinstance(control, ResidencyCap) and node.is_cooperative:
        return "the kernel has a grid barrier and needs all its CTAs resident at once"
    if isinstance(control, ResidencyCap) and node.footprint is not None:
        used = node.footprint.dynamic_shared_bytes
        if used > control.dynamic_shared_bytes:
            return (
                f"the kernel uses {used:,} bytes of dynamic shared memory, and {control.dynamic_shared_bytes:,} are too few"
            )
    return ""


def _apply(graph: AbstractGraph, number: int, control: Control) -> None:
    match control:
        case Priority():
            graph.set_priority(number, control.priority)
        case ResidencyCap():
            graph.set_shared_memory(number, control.dynamic_shared_bytes, control.carveout_percent)
        case HeadStart():
            graph.hold_before(number, control.hold_us)
        case _:
            raise AssertionError(f"{control} is refused before it is applied")


def _verify(graph: AbstractGraph, number: int, node: GraphNode, control: Control) -> Engagement:
    """Ask the driver what is there now and compare it with what was asked."""
    match control:
        case Priority():
            return _engagement(node, control, found=f"priority {node.priority}", is_met=node.priority == control.priority)
        case ResidencyCap():
            residency = graph.residency(number)
            assert node.footprint is not None, "a capped node is a kernel"
            percent = node.footprint.carveout_percent
            is_met = residency <= control.ctas_per_sm and percent == control.carveout_percent and residency > 0
            return _engagement(node, control, found=f"{residency} CTAs per SM, carveout {percent} %", is_met=is_met)
        case _:
            held_us = graph.held_us(number)
            assert isinstance(control, HeadStart), "every other control is refused or verified above"
            return _engagement(node, control, found=f"held {held_us:g} us", is_met=held_us == control.hold_us)


def _engagement(
    node: GraphNode, control: Control, state: str = "", *, found: str = "", is_met: bool = False, reason: str = ""
) -> Engagement:
    name = str(control.__struct_config__.tag)
    match control:
        case Priority():
            asked = f"priority {control.priority}"
        case ResidencyCap():
            asked = f"at most {control.ctas_per_sm} CTAs per SM, carveout {control.carveout_percent} %"
        case HeadStart():
            asked = f"held {control.hold_us:g} us"
        case CommunicationCtas():
            asked = f"at most {control.max_ctas} CTAs"
        case Transport():
            asked = control.transport
    if state == "refused":
        return Engagement(control=name, target=node.name, state="refused", asked=asked, reason=reason)
    why = "" if is_met else "the driver holds another value"
    return Engagement(
        control=name, target=node.name, state="verified" if is_met else "failed", asked=asked, found=found, reason=why
    )
