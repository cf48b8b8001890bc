"""Finds controls of a plan that have no effect on a step: they ask for what is already so, or a later directive replaces
them.

A plan written by hand may contain such controls. Whoever applies a plan reports them, so that no control fails in
silence. The rule is that of all appliers: of several controls of one kind for one operation, the last one counts. This
module knows nothing of time; a control that takes effect may still change no time.
"""

from collections.abc import Collection, Iterator

from msgspec.structs import replace

from counterpoint.controls import Carveout, CommunicationCtas, Control, Priority, ResidencyCap, Transport
from counterpoint.errors import PlanError, shown
from counterpoint.footprints import communication_footprint
from counterpoint.machine import Gpu, Machine
from counterpoint.occupancy import residency
from counterpoint.plan import Plan
from counterpoint.sim.effects import capped, with_ctas
from counterpoint.sim.task_graph import carveout_bytes
from counterpoint.step import Collective, Copy, Kernel, Operation, Step
from counterpoint.units import format_count

Place = tuple[int, int]  # a directive's number, and the control's within it


def review_plan(step: Step, machine: Machine, plan: Plan) -> tuple[str, ...]:
    """Return one line for each control of `plan` that does nothing to `step`, or to part of its operations, in the
    plan's order.

    A plan without directives has no such control. Raises `PlanError` if no control of the plan has an effect.
    """
    winners: dict[tuple[int, str], Place] = {}
    accepted = [directive.match.accepted(step) for directive in plan.directives]
    for place, control in _controls(plan):
        for index in accepted[place[0]]:
            winners[index, control.tag] = place
    notes = [f"Directive {number} holds no control." for number, each in enumerate(plan.directives) if not each.controls]
    overlapped = {index for index, tag in winners if tag == "overlap_matmul"}
    num_active = 0
    for place, control in _controls(plan):
        targets = accepted[place[0]]
        own = [index for index in targets if winners[index, control.tag] == place]
        replaced = [index for index in targets if winners[index, control.tag] != place]
        idle = [
            i for i in own if _is_overruled(i, control, overlapped) or not _changes(step.operations[i], control, machine.gpu)
        ]
        num_active += len(own) - len(idle)
        what = f"Directive {place[0]}: {control.describe()}"
        if replaced:
            later = winners[replaced[0], control.tag]
            notes.append(_replaced(what, control, plan.directives[later[0]].controls[later[1]], later[0], len(replaced)))
        if idle:
            part = "all" if len(idle) == len(targets) else f"{len(idle)} of"
            notes.append(
                f"{what} has no effect on {part} {format_count(len(targets), 'operation')} that it matches: "
                "they already run that way."
            )
    if plan.directives and not num_active:
        raise PlanError(
            f"The plan has no effect on step '{shown(step.name)}'. {notes[0]} Correct the plan, or leave it out."
        )
    return (*plan.remarks_on(step), *notes)


def _controls(plan: Plan) -> Iterator[tuple[Place, Control]]:
    for number, directive in enumerate(plan.directives):
        for position, control in enumerate(directive.controls):
            yield (number, position), control


def _replaced(what: str, control: Control, later: Control, number: int, count: int) -> str:
    targets = format_count(count, "operation")
    if control == later:
        return f"{what} is repeated by directive {number} for {targets}."
    return (
        f"{what} has no effect on {targets}: directive {number} replaces it with {later.describe()}, because the "
        "last one counts."
    )


def _is_overruled(index: int, control: Control, overlapped: Collection[int]) -> bool:
    """Return whether the collective runs together with its matmul; its transport and CTAs then have no effect."""
    return index in overlapped and isinstance(control, Transport | CommunicationCtas)


def _changes(operation: Operation, control: Control, gpu: Gpu) -> bool:
    """Return whether the control changes how the operation is launched. The executor refuses controls that cannot apply."""
    match control:
        case Priority() if not isinstance(operation, Copy):
            return control.priority != operation.priority
        case Transport() if isinstance(operation, Collective):
            return control.transport != operation.transport
        case CommunicationCtas() if isinstance(operation, Collective):
            if operation.transport == "copy_engine":
                return False
            footprint = operation.footprint or communication_footprint(gpu, operation.library)
            return with_ctas(footprint, control) != footprint
        case Carveout() if isinstance(operation, Kernel):
            footprint = replace(operation.footprint, carveout_percent=control.percent)
            return carveout_bytes(gpu, operation) != residency(gpu, footprint).carveout_bytes
        case ResidencyCap() if isinstance(operation, Kernel):
            usual, under_cap = (residency(gpu, each) for each in (operation.footprint, capped(operation.footprint, control)))
            return (usual.ctas_per_sm, usual.carveout_bytes) != (under_cap.ctas_per_sm, under_cap.carveout_bytes)
    return True
