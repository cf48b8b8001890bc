"""Applies a plan to a copy of a captured graph, and verifies with the driver which controls took effect.

Only the nodes that the plan's directives match are edited. The captured graph is never changed, so launching it reverts the
plan. A control that cannot be applied is refused with the reason, never skipped silently.
"""

from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from counterpoint.controls import Carveout, Control, HeadStart, LightKernel, Priority, ResidencyCap, Transport
from counterpoint.cuda.graph import AbstractGraph, GraphNode
from counterpoint.cuda.graph_reading import ReadGraph
from counterpoint.engagement import Engagement
from counterpoint.plan import Plan
from counterpoint.step import Collective, Operation
from counterpoint.units import format_bytes, format_count

MOVED = Transport(transport="copy_engine")
LIGHT_KERNELS = "counterpoint_light_"  # prefix of their names


class Rewritten(msgspec.Struct, frozen=True, kw_only=True):
    """The edited copy, which the caller closes, and the state of each control."""

    graph: AbstractGraph
    engagements: tuple[Engagement, ...]


def rewrite(graph: AbstractGraph, read: ReadGraph, plan: Plan) -> Rewritten:
    """Copy `graph` and apply `plan` to it. Raises `PlanError` for a plan of another step, `DeviceError` from the driver."""
    plan.check_step(read.step)
    with ExitStack() as on_failure:
        edited = graph.copy()
        on_failure.callback(edited.close)
        engagements = _edit(edited, graph.nodes(), read, plan)
        on_failure.pop_all()
    return Rewritten(graph=edited, engagements=engagements)


def _edit(graph: AbstractGraph, before: Sequence[GraphNode], read: ReadGraph, plan: Plan) -> tuple[Engagement, ...]:
    """Apply the controls that are possible to a copy, and read the edited nodes again; refusals come first."""
    wanted: list[tuple[int, Control]] = []
    engagements: list[Engagement] = []
    each = zip(read.nodes, read.step.operations, plan.controls_of(read.step), strict=True)
    for number, operation, controls in each:
        is_moved = MOVED in controls and not graph.obstacle_to_copies(number)
        for control in _replacements_first(controls):
            reason = _why_not(before[number], control)
            if isinstance(control, Transport | LightKernel):
                reason = _why_not_moved(graph, number, operation, control)
            if is_moved and control != MOVED and not reason:
                reason = "copy engines move it, and this control does not apply to them"
            if reason:
                engagements.append(_refused(before[number], control, reason))
            else:
                _apply(graph, number, control)
                wanted.append((number, control))
    edited = dict.fromkeys(number for number, _ in wanted)
    moved = {number for number, control in wanted if control == MOVED}  # these nodes no longer exist
    after = {number: before[number] if number in moved else graph.node(number) for number in edited}
    return (*engagements, *(_verify(graph, number, after[number], control) for number, control in wanted))


def _replacements_first(controls: Sequence[Control]) -> list[Control]:
    """Return each control once, in the order of their last places, because the last one counts. Light kernels come first:
    other controls then apply to the kernel that replaced a collective.
    """
    last = reversed(dict.fromkeys(reversed(controls)))
    return sorted(last, key=lambda control: not isinstance(control, LightKernel))


def _why_not(node: GraphNode, control: Control) -> str:
    """Return why a control cannot be applied to a node; empty if it can."""
    if "graph" in control.refused_by:
        return control.refused_by["graph"]
    if node.kind != "kernel" and not isinstance(control, HeadStart):
        return "only kernels have it, and this is a " + node.kind
    if isinstance(control, ResidencyCap) and node.is_cooperative:
        return "the kernel has a grid barrier and needs all its CTAs resident at once"
    if isinstance(control, ResidencyCap) and node.footprint is not None:
        used = node.footprint.dynamic_shared_bytes
        if used > control.dynamic_shared_bytes:
            return (
                f"the kernel uses {used:,} bytes of dynamic shared memory, so {control.dynamic_shared_bytes:,} are too few"
            )
    return ""


def _why_not_moved(graph: AbstractGraph, number: int, operation: Operation, control: Transport | LightKernel) -> str:
    """Return why a control cannot move a collective; empty if it can."""
    if not isinstance(operation, Collective):
        return f"only collectives have it, and this is a {operation.kind}"
    if isinstance(control, LightKernel):
        return graph.obstacle_to_light_kernel(number)
    return "so it is captured" if control.transport == operation.transport else graph.obstacle_to_copies(number)


def _apply(graph: AbstractGraph, number: int, control: Control) -> None:
    match control:
        case Priority():
            graph.set_priority(number, control.priority)
        case ResidencyCap():
            graph.set_shared_memory(number, control.dynamic_shared_bytes, control.carveout_percent)
        case Carveout():
            footprint = graph.node(number).footprint
            assert footprint is not None, "only kernels get a carveout"
            graph.set_shared_memory(number, footprint.dynamic_shared_bytes, control.percent)
        case HeadStart():
            graph.hold_before(number, control.hold_us)
        case LightKernel():
            graph.move_to_light_kernel(number, control.num_ctas)
        case Transport():
            graph.move_to_copies(number)
        case _:
            raise AssertionError(f"{control} is refused before it is applied")


def _verify(graph: AbstractGraph, number: int, node: GraphNode, control: Control) -> Engagement:
    """Query the driver for a node's current state, and compare it with the requested one."""
    match control:
        case Priority():
            return _verified(node, control, f"priority {node.priority}", node.priority == control.priority)
        case ResidencyCap():
            residency = graph.residency(number)
            assert node.footprint is not None, "a capped node is a kernel"
            percent = node.footprint.carveout_percent
            is_met = residency <= control.ctas_per_sm and percent == control.carveout_percent and residency > 0
            return _verified(node, control, f"{format_count(residency, 'CTA')} per SM, carveout {percent} %", is_met)
        case Carveout():
            percent = -1 if node.footprint is None else node.footprint.carveout_percent
            return _verified(node, control, f"carveout {percent} %", percent == control.percent)
        case LightKernel():
            num_ctas = node.footprint.num_ctas if node.footprint is not None else 0
            is_met = node.name.startswith(LIGHT_KERNELS) and num_ctas == control.num_ctas
            return _verified(node, control, f"{format_count(num_ctas, 'CTA')} of {node.name}", is_met)
        case Transport():
            moved = graph.copied_bytes(number)
            return _verified(node, control, f"copies of {format_bytes(moved)} to other GPUs", moved > 0)
        case _:
            held_us = graph.held_us(number)
            assert isinstance(control, HeadStart), "every other control is refused or verified above"
            return _verified(node, control, f"head start {held_us:g} us", held_us == control.hold_us)


def _refused(node: GraphNode, control: Control, reason: str) -> Engagement:
    asked = control.describe()
    return Engagement(control=control.tag, target=node.name, state="refused", asked=asked, reason=reason)


def _verified(node: GraphNode, control: Control, found: str, is_met: bool) -> Engagement:
    """Return the engagement of an applied control, with what the driver reported: verified if it is met, else failed."""
    return Engagement(
        control=control.tag,
        target=node.name,
        state="verified" if is_met else "failed",
        asked=control.describe(),
        found=found,
        reason="" if is_met else "the driver holds another value",
    )
