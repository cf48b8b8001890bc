"""The executor that needs no GPU: a step, a machine and a plan in, a simulated timeline of one rank out.

Ranks are taken to be alike and in step. What a control does here is what it does on a GPU: a residency cap raises dynamic
shared memory and carveout, a priority reorders dispatch, a head start delays one kernel, a transport moves a collective to
the copy engines.
"""

from collections.abc import Sequence

import msgspec

from counterpoint.controls import CommunicationCtas, Control, HeadStart, Priority, ResidencyCap, Transport
from counterpoint.errors import PlanError, StepError, require_kind, shown
from counterpoint.machine import Machine
from counterpoint.occupancy import residency
from counterpoint.plan import LEAVE_IT, Plan
from counterpoint.sim.calibration import Calibration, load_calibration
from counterpoint.sim.costs import CostModel
from counterpoint.sim.engine import Engine, Launch
from counterpoint.sim.rates import RateModel
from counterpoint.sim.task import CopyTask, SmTask
from counterpoint.step import Collective, Copy, Footprint, Kernel, Operation, Step
from counterpoint.timeline import AbstractExecutor, Interval, Timeline
from counterpoint.units import PS_PER_US, ps_to_us, us_to_ps

COPY_ENGINE_COLLECTIVES = ("all_gather", "all_to_all", "broadcast", "send_recv")
NCCL_EXTRA_THREADS = 32  # ring kernels have one warp above NCCL_NTHREADS: 544 threads at its usual 512 (NCCL 2.28.9)


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan's controls amount to for one operation."""

    footprint: Footprint | None
    priority: int = 0
    hold_us: float = 0.0
    uses_copy_engine: bool = False


class Simulator(AbstractExecutor):
    """Simulates steps with one set of calibration constants."""

    def __init__(self, calibration: Calibration | None = None) -> None:
        self._calibration = calibration or load_calibration()

    def run(self, step: Step, machine: Machine, plan: Plan) -> Timeline:
        """Simulate one iteration; see `AbstractExecutor.run`.

        Raises `StepError` where a launch does not fit the machine, `PlanError` where a control cannot apply.
        """
        require_kind(step, Step, "run takes a Step", "Pass what load_workload returns, or read_trace(...).step.")
        require_kind(machine, Machine, "run takes a Machine", "Pass what load_machine returns.")
        require_kind(plan, Plan, "run takes a Plan", "Pass what load_plan returns, or LEAVE_IT.")
        plan.check_step(step)
        if plan.machine and plan.machine != machine.name:
            raise PlanError(
                f"The plan was made for machine '{shown(plan.machine)}', not for '{machine.name}'. Run "
                f"`counterpoint tune` for "
                f"'{machine.name}'."
            )
        costs = CostModel(machine, self._calibration)
        effects = _effects(step, plan, costs, machine)
        tasks = [
            _task(index, operation, effect, machine, costs)
            for index, (operation, effect) in enumerate(zip(step.operations, effects, strict=True))
        ]
        rates = RateModel(costs.hbm_bytes_per_s, self._calibration.latency_per_load.value)
        spans = Engine(machine, rates, tasks, self._launches(step, effects)).run()
        intervals = [
            Interval(
                rank=0,
                stream=operation.stream,
                operation=index,
                name=operation.name,
                kind=operation.kind,
                start_us=ps_to_us(start),
                end_us=ps_to_us(end),
            )
            for index, (operation, (start, end)) in enumerate(zip(step.operations, spans, strict=True))
        ]
        intervals.sort(key=lambda interval: (interval.start_us, interval.operation))
        return Timeline(step_name=step.name, origin="simulated", intervals=tuple(intervals))

    def lone_times_us(self, step: Step, machine: Machine, plan: Plan = LEAVE_IT) -> list[float]:
        """Each operation's time alone on `machine`, in microseconds, in the order of the step.

        Of a plan's controls, only the transport counts: a collective that copy engines move takes their time.
        """
        costs = CostModel(machine, self._calibration)
        times = []
        for operation, effect in zip(step.operations, _effects(step, plan, costs, machine), strict=True):
            if isinstance(operation, Collective) and effect.uses_copy_engine:
                times.append(costs.copy_work(operation).lone_ps / PS_PER_US)
            else:
                times.append(costs.lone_us(operation))
        return times

    def _launches(self, step: Step, effects: list[Effect]) -> list[Launch]:
        gap_us = step.launch_gap_us if step.launch_gap_us is not None else self._calibration.launch_gap_us.value
        gap_ps = us_to_ps(gap_us)
        latency_ps = us_to_ps(self._calibration.dependency_latency_us.value)
        last_of_stream: dict[int, int] = {}
        launches = []
        for index, (operation, effect) in enumerate(zip(step.operations, effects, strict=True)):
            waits = {dependency.operation: latency_ps for dependency in operation.waits_for}
            if operation.stream in last_of_stream:
                waits[last_of_stream[operation.stream]] = gap_ps
            last_of_stream[operation.stream] = index
            launches.append(
                Launch(
                    waits_for=tuple(sorted(waits.items())),
                    earliest_ps=us_to_ps(max(0.0, operation.issued_us or 0.0)),
                    hold_ps=us_to_ps(effect.hold_us),
                )
            )
        return launches


def _effects(step: Step, plan: Plan, costs: CostModel, machine: Machine) -> list[Effect]:
    """What a plan amounts to for each operation of a step."""
    each = zip(step.operations, plan.controls_of(step), strict=True)
    return [_effect(index, operation, controls, costs, machine) for index, (operation, controls) in enumerate(each)]


def _effect(index: int, operation: Operation, controls: Sequence[Control], costs: CostModel, machine: Machine) -> Effect:
    """Fold the plan's controls for one operation into what it will be launched with."""
    footprint = None if isinstance(operation, Copy) else costs.footprint(operation)
    is_moved = isinstance(operation, Collective) and operation.transport == "copy_engine"
    effect = Effect(footprint=footprint, uses_copy_engine=is_moved)
    for control in controls:
        where = f"operation {_label(index, operation)}"
        match control:
            case Priority() if footprint is not None:
                _check_priority(control, machine)
                effect = msgspec.structs.replace(effect, priority=control.priority)
            case ResidencyCap() if isinstance(operation, Kernel):
                _check_cap(control, operation, where, machine)
                effect = msgspec.structs.replace(effect, footprint=capped(operation.footprint, control))
            case HeadStart() if isinstance(operation, Kernel):
                effect = msgspec.structs.replace(effect, hold_us=control.hold_us)
            case CommunicationCtas() if isinstance(operation, Collective) and footprint is not None:
                effect = msgspec.structs.replace(effect, footprint=with_ctas(footprint, control))
            case Transport() if isinstance(operation, Collective):
                if control.transport == "copy_engine" and operation.collective not in COPY_ENGINE_COLLECTIVES:
                    raise PlanError(
                        f"Copy engines cannot reduce, as {where} does; they run {', '.join(COPY_ENGINE_COLLECTIVES)}. "
                        "Narrow the directive's match to those."
                    )
                effect = msgspec.structs.replace(effect, uses_copy_engine=control.transport == "copy_engine")
            case _:
                raise PlanError(
                    f"A {control.tag} control cannot apply to {where}, which is {operation.kind}. "
                    "Give the directive's match the kind that it is for."
                )
    return effect


def _label(index: int, operation: Operation) -> str:
    return f"{index} ('{shown(operation.name)}')"


def _check_priority(control: Priority, machine: Machine) -> None:
    """A priority that the driver ignores, or does not have, would be no control at all."""
    gpu = machine.gpu
    if control.priority and not gpu.priority_is_effective:
        raise PlanError(
            f"The driver of {machine.name} ignores stream priority, so priority {control.priority} would do nothing. Leave "
            "it out of the plan; DEBUG_HIP_IGNORE_STREAM_PRIORITY=0 makes the driver heed it."
        )
    if control.priority < gpu.greatest_priority:
        raise PlanError(
            f"Priorities of {machine.name} are from {gpu.greatest_priority} (greatest) to 0; found {control.priority}. "
            f"Ask for {gpu.greatest_priority} or more."
        )


def _check_cap(cap: ResidencyCap, kernel: Kernel, where: str, machine: Machine) -> None:
    most = machine.gpu.max_shared_bytes_per_cta - kernel.footprint.static_shared_bytes
    if cap.dynamic_shared_bytes > most:
        raise PlanError(
            f"A residency cap of {cap.dynamic_shared_bytes:,} bytes does not fit {where}: a CTA of {machine.name} may have "
            f"{most:,} bytes of dynamic shared memory there. Ask for fewer bytes, or let `counterpoint tune` choose them."
        )


def capped(footprint: Footprint, cap: ResidencyCap) -> Footprint:
    """The footprint under a residency cap: more dynamic shared memory, and the carveout to match."""
    return msgspec.structs.replace(
        footprint,
        dynamic_shared_bytes=max(cap.dynamic_shared_bytes, footprint.dynamic_shared_bytes),
        carveout_percent=cap.carveout_percent,
    )


def with_ctas(footprint: Footprint, control: CommunicationCtas) -> Footprint:
    """The footprint of a collective limited to `max_ctas`, in clusters no larger than that."""
    num_ctas = min(footprint.num_ctas, control.max_ctas)
    cluster = max(size for size in (1, 2, 4, 8, 16) if size <= footprint.ctas_per_cluster and num_ctas % size == 0)
    threads = footprint.threads_per_cta if control.num_threads is None else control.num_threads + NCCL_EXTRA_THREADS
    return msgspec.structs.replace(
        footprint,
        num_ctas=num_ctas,
        ctas_per_cluster=cluster,
        threads_per_cta=min(threads, footprint.threads_per_cta),
    )


def _task(index: int, operation: Operation, effect: Effect, machine: Machine, costs: CostModel) -> SmTask | CopyTask:
    if isinstance(operation, Copy) or effect.uses_copy_engine:
        assert not isinstance(operation, Kernel), "only collectives change their transport"
        return CopyTask(index, costs.copy_work(operation))
    footprint = effect.footprint
    assert footprint is not None, "every kernel and collective has a footprint"
    fit = residency(machine.gpu, footprint)
    if fit.ctas_per_sm < 1 or footprint.ctas_per_cluster > fit.ctas_per_sm * max(machine.gpu.sms_per_gpc):
        raise StepError(
            f"Operation {_label(index, operation)} does not fit {machine.name}: not one CTA of "
            f"{footprint.threads_per_cta} threads x {footprint.registers_per_thread} registers with "
            f"{footprint.shared_bytes} bytes of shared memory fits, limited by {fit.limiter}. Check the footprint, or "
            "name the machine it was made for."
        )
    if footprint.num_ctas % footprint.ctas_per_cluster:
        raise StepError(
            f"Operation {_label(index, operation)} launches {footprint.num_ctas} CTAs in clusters of "
            f"{footprint.ctas_per_cluster}, but a launch consists of whole clusters. Correct num_ctas or ctas_per_cluster."
        )
    if isinstance(operation, Kernel):
        work, shared_work = costs.kernel_work(operation), costs.shared_work(operation)
    else:
        work, shared_work = costs.collective_work(operation, footprint), 0.0
    return SmTask(
        index=index,
        footprint=footprint,
        priority=effect.priority if machine.gpu.priority_is_effective else 0,
        work=work,
        carveout_bytes=fit.carveout_bytes,
        num_unplaced=footprint.num_ctas,
        shared_work=shared_work,
    )
