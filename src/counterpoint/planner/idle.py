"""What of a plan does nothing to a step: controls that ask for what is so already, or that a later directive replaces.

A plan by hand may say anything; whoever applies one says what of it is idle, so that no control fails in silence. The rule
is that of those who apply plans: of several controls of one kind for one operation, the last one counts. It knows nothing of
time; a control that takes effect may still change no time.
"""

from collections.abc import Collection, Iterator

from counterpoint.controls import CommunicationCtas, Control, Priority, ResidencyCap, Transport
from counterpoint.errors import PlanError, shown
from counterpoint.footprints import communication_footprint
from counterpoint.machine import Gpu, Machine
from counterpoint.occupancy import residency
from counterpoint.plan import Plan
from counterpoint.sim.effects import capped, with_ctas
from counterpoint.step import Collective, Kernel, Operation, Step
from counterpoint.units import format_count

Place = tuple[int, int]  # a directive's number, and the control's within it


def review_plan(step: Step, machine: Machine, plan: Plan) -> tuple[str, ...]:
    """One line for each control of `plan` that does nothing to `step` or to part of what it is for, in the plan's order.

    A plan without directives says nothing and is none of these. Raises `PlanError` where all of a plan's controls are idle.
    """
    winners: dict[tuple[int, str], Place] = {}
    accepted = [directive.match.accepted(step) for directive in plan.directives]
    for place, control in _controls(plan):
        for index in accepted[place[0]]:
            winners[index, control.tag] = place
    notes = [f"Directive {number} holds no control." for number, each in enumerate(plan.directives) if not each.controls]
    num_active = 0
    for place, control in _controls(plan):
        targets = accepted[place[0]]
        replaced = [index for index in targets if winners[index, control.tag] != place]
        overlapped = {index for index, tag in winners if tag == "overlap_matmul"}
        idle = [
            i
            for i in targets
            if i not in set(replaced)
            and (_is_overruled(i, control, overlapped) or not _changes(step.operations[i], control, machine.gpu))
        ]
        num_active += len(targets) - len(replaced) - len(idle)
        what = f"Directive {place[0]}: {control.describe()}"
        if replaced:
            later = winners[replaced[0], control.tag]
            notes.append(_replaced(what, control, plan.directives[later[0]].controls[later[1]], later[0], len(replaced)))
        if idle:
            part = "all" if len(idle) == len(targets) else f"{len(idle)} of"
            notes.append(
                f"{what} does nothing to {part} {format_count(len(targets), 'operation')} that it is for: so it is."
            )
    if plan.directives and not num_active:
        raise PlanError(f"The plan does nothing to step '{shown(step.name)}'. {notes[0]} Correct the plan, or leave it out.")
    return (*plan.remarks_on(step), *notes)


def _controls(plan: Plan) -> Iterator[tuple[Place, Control]]:
    for number, directive in enumerate(plan.directives):
        for position, control in enumerate(directive.controls):
            yield (number, position), control


def _replaced(what: str, control: Control, later: Control, number: int, count: int) -> str:
    targets = format_count(count, "operation")
    if control == later:
        return f"{what} is said again by directive {number} for {targets}."
    return f"{what} does not count for {targets}: directive {number} says {later.describe()}, and the last one counts."


def _is_overruled(index: int, control: Control, overlapped: Collection[int]) -> bool:
    """Whether the collective runs together with its matmul, where neither transport nor CTAs matter."""
    return index in overlapped and isinstance(control, Transport | CommunicationCtas)


def _changes(operation: Operation, control: Control, gpu: Gpu) -> bool:
    """Whether the operation is launched in another way with the control; what cannot apply is the executor's to refuse."""
    match control:
        case Priority():
            return control.priority != 0
        case Transport() if isinstance(operation, Collective):
            return control.transport != operation.transport
        case CommunicationCtas() if isinstance(operation, Collective):
            if operation.transport == "copy_engine":
                return False
            footprint = operation.footprint or communication_footprint(gpu, operation.library)
            return with_ctas(footprint, control) != footprint
        case ResidencyCap() if isinstance(operation, Kernel):
            usual, under_cap = (residency(gpu, each) for each in (operation.footprint, capped(operation.footprint, control)))
            return (usual.ctas_per_sm, usual.carveout_bytes) != (under_cap.ctas_per_sm, under_cap.carveout_bytes)
    return True
