"""Simulates passes under Counterpoint's controls, each with the single-node simulator.

priority: the driver's greatest for all collectives. shaping: the best of fewer CTAs, a head start and a residency cap, as
the planner proposes them. copy_engines: collectives inside a node that the integrations would move by copies. operators:
tensor- and expert-parallel collectives together with their matmuls. A control that makes a pass slower is left out of it, as
the planner would.
"""

from collections.abc import Iterator, Sequence

from counterpoint.cluster.pass_builder import TENSOR
from counterpoint.cluster.training import ControlName
from counterpoint.controls import CommunicationCtas, HeadStart, Priority
from counterpoint.machine import Machine
from counterpoint.plan import LEAVE_IT, Directive, Match, Plan
from counterpoint.planner.candidates import CTA_COUNTS, HOLDS_US, propose_on_sms
from counterpoint.planner.contention import find_contention
from counterpoint.planner.movements import propose_overlaps, propose_transports
from counterpoint.planner.proposal import Candidate, one
from counterpoint.sim import Simulator
from counterpoint.sim.calibration import Calibration
from counterpoint.spans import length, union
from counterpoint.step import Collective, Kernel, Step
from counterpoint.timeline import Timeline
from counterpoint.units import ps_to_us, us_to_ps
from counterpoint.value import Value

SHAPING_FAMILIES = ("head_start", "residency_cap", "communication_ctas")


class PassTimes(Value, frozen=True, kw_only=True):
    """One pass, in microseconds: until its last computation ends, until everything ends, and how long anything computes.

    `weights_us` is what the gradients of weights take.
    """

    computed_us: float
    makespan_us: float
    busy_us: float
    weights_us: float = 0.0

    def more(self, other: "PassTimes", number: float) -> "PassTimes":
        """Return these times plus `number` times the difference to `other`."""
        figures = {
            name: getattr(self, name) + number * (getattr(other, name) - getattr(self, name))
            for name in self.__struct_fields__
        }
        return PassTimes(**figures)


def simulate_pass(
    step: Step, machine: Machine, calibration: Calibration, controls: Sequence[ControlName]
) -> tuple[PassTimes, tuple[str, ...]]:
    """Return the pass under the controls that pay, and their labels.

    A job that runs tensor-parallel reductions beside gradients of weights issues them first, which is a head start
    (CUDA_DEVICE_MAX_CONNECTIONS=1 in Megatron-LM).
    """
    simulator = Simulator(calibration)
    kept = _issued_first(step) if machine.gpu.has_head_starts else ()
    best = simulator.run(step, machine, Plan(directives=kept) if kept else LEAVE_IT)
    if not controls or not any(isinstance(operation, Collective) for operation in step.operations):
        return _times(step, best), ()
    labels: list[str] = []
    for control in ("operators", "copy_engines", "priority", "shaping"):
        if control not in controls:
            continue
        found: Candidate | None = None
        for candidate in _candidates(control, step, machine, best, kept):
            timeline = simulator.run(step, machine, Plan(directives=(*kept, *candidate.directives)))
            if _end_us(timeline) < _end_us(best):
                best, found = timeline, candidate
        if found is not None:
            kept = (*kept, *found.directives)
            labels.append(f"{control}: {found.label}")
    return _times(step, best), tuple(labels)


def _candidates(
    control: str, step: Step, machine: Machine, timeline: Timeline, kept: tuple[Directive, ...]
) -> Iterator[Candidate]:
    plan = Plan(directives=kept)
    everything = Match(kind="communication")
    if control == "operators":
        yield from propose_overlaps(step, machine, plan).candidates
    elif control == "copy_engines":
        yield from propose_transports(step, machine, plan).candidates
    elif control == "priority" and machine.gpu.greatest_priority < 0 and machine.gpu.priority_is_effective:
        controls = (Priority(priority=machine.gpu.greatest_priority),)
        yield one("priority", "priority", everything, controls, "collectives are placed first")
    elif control == "shaping":
        contention = find_contention(step, timeline, plan)
        for candidate in propose_on_sms(step, machine, contention, plan).candidates:
            if candidate.family in SHAPING_FAMILIES:
                yield candidate
        if not any(isinstance(each, CommunicationCtas) for directive in kept for each in directive.controls):
            for number in CTA_COUNTS:
                reason = "fewer CTAs leave more of the GPU to the computation"
                yield one("communication_ctas", f"{number} CTAs", everything, (CommunicationCtas(max_ctas=number),), reason)


def _issued_first(step: Step) -> tuple[Directive, ...]:
    """Return a head start for collectives beside which gradients of weights run."""
    racing = {
        operation.name
        for before, operation in zip(step.operations, step.operations[1:], strict=False)
        if isinstance(before, Collective) and before.stream == TENSOR and operation.name.endswith(".weight")
    }
    return tuple(
        Directive(
            match=Match(kind="computation", name=name),
            controls=(HeadStart(hold_us=HOLDS_US[0]),),
            reason="the job issues the collective first",
        )
        for name in sorted(racing)
    )


def _end_us(timeline: Timeline) -> float:
    return max(interval.end_us for interval in timeline.intervals)


def _times(step: Step, timeline: Timeline) -> PassTimes:
    own = {
        number for number, operation in enumerate(step.operations) if isinstance(operation, Kernel) and not operation.stream
    }
    computing = [each for each in timeline.intervals if each.operation in own]
    weights = [each.duration_us for each in computing if each.name.endswith(".weight")]
    spans = union((us_to_ps(each.start_us), us_to_ps(each.end_us)) for each in computing)
    return PassTimes(
        computed_us=max((each.end_us for each in computing), default=0.0),
        makespan_us=_end_us(timeline),
        busy_us=ps_to_us(length(spans)),
        weights_us=sum(weights),
    )
