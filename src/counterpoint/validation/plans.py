"""The controls that every case runs under, as plans for its captured step."""

from counterpoint.controls import CommunicationCtas, Control, HeadStart, Priority, ResidencyCap, Transport
from counterpoint.errors import OccupancyError, StepError
from counterpoint.footprints import communication_footprint
from counterpoint.machine import Gpu, Machine
from counterpoint.occupancy import cap_shared_bytes, largest_residency_beside, residency
from counterpoint.paper.values import COPY_ENGINES, PLAIN
from counterpoint.plan import Directive, Match, Plan
from counterpoint.planner.contention import find_rivals
from counterpoint.planner.durable import DurableMatches
from counterpoint.step import Kernel, Step
from counterpoint.validation.cases import CTA_LIMITS, Case, HostCopy
from counterpoint.validation.described import places_of

HOLD_US = 5.0
Parts = list[tuple[tuple[int, ...], Control]]  # numbers of operations, and the control that each of them gets


def plans_of(case: Case, step: Step, machine: Machine) -> dict[str, Plan]:
    """Return the plans that a rewriting of the captured step can put in force, plain overlap first."""
    guests = _guests(case, step)
    priority: Parts = [(guests, Priority(priority=machine.gpu.greatest_priority))] if guests else []
    ahead: Parts = [(rivals, HeadStart(hold_us=HOLD_US))] if (rivals := find_rivals(step)) else []
    parts: dict[str, Parts] = {PLAIN: []}
    if machine.gpu.priority_is_effective:
        parts |= {"priority": priority, "priority + head start": priority + ahead if priority and ahead else []}
    parts["head start"] = ahead
    for label, cap in _caps(step, machine.gpu).items():
        parts[label] = cap
        parts[f"priority + {label}"] = priority + cap if priority and cap else []
    collectives = tuple(step.collectives())
    parts[COPY_ENGINES] = [(collectives, Transport(transport="copy_engine"))] if collectives else []
    return {label: _plan(step, found) for label, found in parts.items() if found or label == PLAIN}


def plans_of_limits(step: Step, machine: Machine) -> dict[str, tuple[Plan, int, int]]:
    """Return plans with fewer CTAs for collectives, which no rewriting makes: plan, limit and launch priority."""
    collectives = tuple(step.collectives())
    if not collectives:
        return {}
    greatest = machine.gpu.greatest_priority
    found: dict[str, tuple[Plan, int, int]] = {}
    for limit in CTA_LIMITS:
        parts: Parts = [(collectives, CommunicationCtas(max_ctas=limit))]
        found[f"{limit} CTAs"] = _plan(step, parts), limit, 0
    parts = [(collectives, Priority(priority=greatest)), (collectives, CommunicationCtas(max_ctas=CTA_LIMITS[0]))]
    found[f"priority + {CTA_LIMITS[0]} CTAs"] = _plan(step, parts), CTA_LIMITS[0], greatest
    return found


def _guests(case: Case, step: Step) -> tuple[int, ...]:
    """Return the operations that run kernels on streams other than the first: a priority is for these."""
    return tuple(
        place
        for entry, place in zip(case.entries, places_of(case, step), strict=True)
        if entry.stream and not isinstance(entry.work, HostCopy)
    )


def _caps(step: Step, gpu: Gpu) -> dict[str, Parts]:
    """Cap every kernel with two or more CTAs on an SM: so that a collective's CTA fits beside, and at half of them."""
    caps: dict[str, Parts] = {"cap to fit": [], "cap to half": []}
    beside = communication_footprint(gpu, "nccl")
    for name in dict.fromkeys(each.name for each in step.operations if isinstance(each, Kernel)):
        numbers = tuple(index for index, each in enumerate(step.operations) if each.name == name)
        kernel = step.kernel(numbers[0])
        usual = residency(gpu, kernel.footprint).ctas_per_sm
        try:
            fitting = largest_residency_beside(gpu, kernel.footprint, beside).ctas_per_sm
        except (OccupancyError, StepError):
            fitting = usual * 3 // 4
        for label, ctas_per_sm in (("cap to fit", fitting), ("cap to half", usual // 2)):
            if 1 <= ctas_per_sm < usual:
                dynamic = cap_shared_bytes(gpu, kernel.footprint, ctas_per_sm)
                cap = ResidencyCap(ctas_per_sm=ctas_per_sm, dynamic_shared_bytes=dynamic)
                caps[label].append((numbers, cap))
    if caps["cap to fit"] == caps["cap to half"]:
        del caps["cap to fit"]
    return caps


def _plan(step: Step, parts: Parts) -> Plan:
    """Return the plan; it matches operations by name, and by their number among those of the name."""
    directives = [
        Directive(match=Match(operations=numbers), controls=(control,), reason="validation") for numbers, control in parts
    ]
    return Plan(directives=DurableMatches(step).directives(directives))
