"""Resolves a plan's controls for each operation of a step: its launch, and what moves its data.

Refuses impossible controls: a control for another kind of operation, a priority that the driver does not have, a cap that
does not fit, an operator where there is no matmul. The only times used here are estimates of operators.
"""

from collections.abc import Sequence

import msgspec

from counterpoint.controls import (
    MOST_LIGHT_RANKS,
    Carveout,
    CommunicationCtas,
    Control,
    HeadStart,
    LightKernel,
    OverlapMatmul,
    OwnStream,
    Priority,
    ResidencyCap,
    Transport,
)
from counterpoint.errors import MachineError, PlanError, shown
from counterpoint.footprints import LIGHT_LIBRARY, communication_footprint
from counterpoint.machine import Gpu, Machine
from counterpoint.plan import Plan
from counterpoint.sim.calibration import Calibration
from counterpoint.sim.costs import SUMMED_COLLECTIVES, CostModel
from counterpoint.sim.expert_layers import ExpertExchange, ExpertLayers, ExpertModel, issued_sooner_us
from counterpoint.sim.flat_buffers import FlatBuffers
from counterpoint.sim.matmul_pairs import MatmulPair, MatmulPairs
from counterpoint.sim.nodes import obstacle_to_copies
from counterpoint.sim.overlapped import OverlapModel
from counterpoint.step import Collective, Copy, Footprint, Kernel, Operation, Step

# collectives that copy engines alone can do
COPY_ENGINE_COLLECTIVES = ("all_gather", "all_to_all", "broadcast", "send_recv")
NCCL_EXTRA_THREADS = 32  # ring kernels have one warp above NCCL_NTHREADS: 544 threads at its usual 512 (NCCL 2.28.9)


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """A collective that runs as one operator with its matmuls, and the time that stays exposed: before the matmuls, or
    after them if they feed the collective.
    """

    pair: MatmulPair
    exposed_us: float
    is_fed: bool


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """The combined effect of a plan's controls on one operation. `overlap` takes precedence over `uses_copy_engine`.

    `is_saved`: an operator or copies of the plan make this operation unnecessary. `issued_sooner_us`: how much sooner the
    host issues it, because operators of the plan need fewer launches. `is_in_place`: copies move parameters or gradients
    without a flat buffer, and send `sent_share` of a reduced buffer's bytes.
    """

    footprint: Footprint | None
    priority: int = 0
    hold_us: float = 0.0
    uses_copy_engine: bool = False
    uses_light_kernel: bool = False
    has_own_stream: bool = False
    overlap: Overlap | None = None
    is_saved: bool = False
    issued_sooner_us: float = 0.0
    is_in_place: bool = False
    sent_share: float = 1.0


class EffectReader:
    """Reads the effects of one plan on one step and machine."""

    def __init__(self, step: Step, machine: Machine, plan: Plan, calibration: Calibration) -> None:
        self._step, self._machine, self._plan, self._calibration = step, machine, plan, calibration
        self._costs = CostModel(machine, calibration)
        self._pairs: MatmulPairs | None = None
        self._model: OverlapModel | None = None
        self._experts: ExpertModel | None = None

    def effects(self) -> list[Effect]:
        """Return one effect for each operation, in the order of the step. Raises `PlanError` for a control that cannot
        apply.
        """
        each = zip(self._step.operations, self._plan.controls_of(self._step), strict=True)
        effects = [self._effect(index, operation, controls) for index, (operation, controls) in enumerate(each)]
        if self._experts is not None:
            self._run_experts(self._experts.layers, effects)
        self._move_in_place(effects)
        return effects

    def _run_experts(self, layers: ExpertLayers, effects: list[Effect]) -> None:
        """Let operators do without what they replace, and with one launch for the matmuls of all experts. Their copies are
        assumed to take the host as long as the kernels and collectives that they replace.
        """
        taken = [each for each in layers.found if effects[each.dispatch].overlap and effects[each.combine].overlap]
        for number in (number for layer in taken for number in layer.unneeded):
            effects[number] = msgspec.structs.replace(effects[number], is_saved=True)
        multiplied = {number for layer in taken for number in layer.matmuls}
        runs = [run for run in layers.runs() if run[0] in multiplied]
        if self._step.is_timed_in_bursts or not runs:  # a graph's launches cost the host nothing
            return
        for number, sooner_us in enumerate(issued_sooner_us(self._step, runs)):
            effects[number] = msgspec.structs.replace(effects[number], issued_sooner_us=sooner_us)

    def _move_in_place(self, effects: list[Effect]) -> None:
        """Let what the plan moves by copies do without flat buffers, if the step has some. A captured graph keeps them."""
        if self._step.is_timed_in_bursts:
            return
        moved = [
            number
            for number, (operation, effect) in enumerate(zip(self._step.operations, effects, strict=True))
            if isinstance(operation, Collective)
            and operation.transport != "copy_engine"
            and effect.uses_copy_engine
            and effect.overlap is None
        ]
        if not moved:
            return
        buffers = FlatBuffers(self._step)
        for number in moved:
            if number in buffers.copies_of:
                for copy in buffers.copies_of[number]:
                    effects[copy] = msgspec.structs.replace(effects[copy], is_saved=True)
                share = 0.5 if number in buffers.widened else 1.0
                effects[number] = msgspec.structs.replace(effects[number], is_in_place=True, sent_share=share)

    def _effect(self, index: int, operation: Operation, controls: Sequence[Control]) -> Effect:
        """Combine the plan's controls for one operation into its launch."""
        footprint = None if isinstance(operation, Copy) else self._costs.footprint(operation)
        is_moved = isinstance(operation, Collective) and operation.transport == "copy_engine"
        asked = 0 if isinstance(operation, Copy) else operation.priority  # the driver takes it for the nearest that it has
        priority = min(0, max(asked, self._machine.gpu.greatest_priority))
        effect = Effect(footprint=footprint, uses_copy_engine=is_moved, priority=priority)
        for control in controls:
            where = f"operation {_label(index, operation)}"
            match control:
                case Priority() if footprint is not None:
                    _check_priority(control, self._machine)
                    effect = msgspec.structs.replace(effect, priority=control.priority)
                case ResidencyCap() if isinstance(operation, Kernel):
                    _check_cap(control, operation, where, self._machine)
                    footprint = capped(operation.footprint, control)
                    effect = msgspec.structs.replace(effect, footprint=footprint)
                case Carveout() if isinstance(operation, Kernel) and footprint is not None:
                    footprint = msgspec.structs.replace(footprint, carveout_percent=control.percent)
                    effect = msgspec.structs.replace(effect, footprint=footprint)
                case HeadStart() if isinstance(operation, Kernel):
                    _check_head_start(self._machine)
                    effect = msgspec.structs.replace(effect, hold_us=control.hold_us)
                case CommunicationCtas() if isinstance(operation, Collective) and footprint is not None:
                    effect = msgspec.structs.replace(effect, footprint=with_ctas(footprint, control))
                case Transport() if isinstance(operation, Collective):
                    _check_transport(control, operation, where)
                    self._check_reach(control.transport == "copy_engine", operation, where)
                    effect = msgspec.structs.replace(effect, uses_copy_engine=control.transport == "copy_engine")
                case LightKernel() if isinstance(operation, Collective):
                    self._check_reach(True, operation, where)
                    _check_light(obstacle_to_light(operation, self._machine.gpu, self._calibration), where)
                    effect = msgspec.structs.replace(
                        effect, footprint=light_footprint(self._machine.gpu, control), uses_light_kernel=True
                    )
                case OverlapMatmul() if isinstance(operation, Collective):
                    self._check_reach(True, operation, where)
                    effect = msgspec.structs.replace(effect, overlap=self._overlap(index, control, where))
                case OwnStream() if isinstance(operation, Collective):
                    effect = msgspec.structs.replace(effect, has_own_stream=True)
                case _:
                    raise PlanError(
                        f"A {control.tag} control cannot apply to {where}, which is {operation.kind}. Give the "
                        "directive's match the kind that the control is for."
                    )
        return effect

    def _check_reach(self, is_copied: bool, collective: Collective, where: str) -> None:
        obstacle = obstacle_to_copies(collective, self._step.num_ranks, self._machine) if is_copied else None
        if obstacle is not None:
            raise PlanError(
                f"Copies cannot replace {where}: {obstacle}. Leave that collective out of the directive's match."
            )

    def _overlap(self, index: int, control: OverlapMatmul, where: str) -> Overlap | None:
        """Return the collective as part of an operator; None for an all-to-all of sizes, because the experts' operators
        exchange the sizes, too, and for one that only goes with the rows.
        """
        if self._pairs is None or self._model is None or self._experts is None:
            self._pairs = MatmulPairs(self._step)
            self._model = OverlapModel(self._step, self._machine, self._calibration)
            self._experts = ExpertModel(self._step, self._costs, self._calibration)
        if index in self._experts.layers.others:
            return None
        exchange = self._experts.estimate(index) if index in self._experts.layers.layer_of else None
        if isinstance(exchange, ExpertExchange):
            return Overlap(pair=exchange.pair, exposed_us=exchange.exposed_us, is_fed=exchange.is_combine)
        pair = self._pairs.found.get(index)
        found = exchange or (self._pairs.obstacles[index] if pair is None else self._model.estimate(pair, control.schedule))
        if pair is None or isinstance(found, str):
            raise PlanError(
                f"An {control.tag} control cannot apply to {where}: {found}. Leave that collective out of the "
                "directive's match."
            )
        return Overlap(pair=pair, exposed_us=found, is_fed=pair.matmuls[0] < index)


def _label(index: int, operation: Operation) -> str:
    return f"{index} ('{shown(operation.name)}')"


def _check_transport(control: Transport, collective: Collective, where: str) -> None:
    able = (*COPY_ENGINE_COLLECTIVES, *SUMMED_COLLECTIVES)
    if control.transport == "copy_engine" and collective.collective not in able:
        raise PlanError(
            f"Copy engines cannot do {where}, a {collective.collective}; they can do {', '.join(able)}, the "
            "last two with a sum. Narrow the directive's match to those."
        )


def obstacle_to_light(collective: Collective, gpu: Gpu, calibration: Calibration) -> str:
    """Return why no light kernel can do a collective on that GPU; empty if one can."""
    if collective.collective not in calibration.light_collectives:
        return f"light kernels were measured for {', '.join(calibration.light_collectives) or 'no collective'} only"
    if collective.group_size > MOST_LIGHT_RANKS:
        return f"it has {collective.group_size} ranks; light kernels support at most {MOST_LIGHT_RANKS}"
    if not collective.num_bytes:
        return "its size is unknown, and so is the time that a light kernel would take"
    try:
        communication_footprint(gpu, LIGHT_LIBRARY)
    except MachineError as problem:
        return str(problem).split(". ")[0]
    return ""


def _check_light(obstacle: str, where: str) -> None:
    if obstacle:
        raise PlanError(f"A light kernel cannot replace {where}: {obstacle}. Leave it out of the directive's match.")


def light_footprint(gpu: Gpu, control: LightKernel) -> Footprint:
    """Return a light kernel's footprint. Raises `MachineError` for a GPU for which it was never compiled."""
    return msgspec.structs.replace(communication_footprint(gpu, LIGHT_LIBRARY), num_ctas=control.num_ctas)


def _check_priority(control: Priority, machine: Machine) -> None:
    """Refuse a priority that the driver ignores or does not have, because it would have no effect."""
    gpu = machine.gpu
    if control.priority and not gpu.priority_is_effective:
        raise PlanError(
            f"The driver of {machine.name} ignores stream priorities, so priority {control.priority} has no "
            "effect. Leave it out of the plan, or set DEBUG_HIP_IGNORE_STREAM_PRIORITY=0, with which the "
            "driver applies it."
        )
    if control.priority < gpu.greatest_priority:
        raise PlanError(
            f"Priorities of {machine.name} must be from {gpu.greatest_priority} (highest) to 0 (lowest); found "
            f"{control.priority}. Ask for {gpu.greatest_priority} or more."
        )


def _check_head_start(machine: Machine) -> None:
    if not machine.gpu.has_head_starts:
        raise PlanError(
            f"Head starts need CUDA, and {machine.name} has AMD GPUs, so a head start has no effect. Leave it "
            "out of the plan."
        )


def _check_cap(cap: ResidencyCap, kernel: Kernel, where: str, machine: Machine) -> None:
    most = machine.gpu.max_shared_bytes_per_cta - kernel.footprint.static_shared_bytes
    if cap.dynamic_shared_bytes > most:
        raise PlanError(
            f"A residency cap of {cap.dynamic_shared_bytes:,} bytes does not fit {where}: there, a CTA of "
            f"{machine.name} can have {most:,} bytes of dynamic shared memory. Ask for fewer bytes, or let "
            "`counterpoint tune` choose them."
        )


def capped(footprint: Footprint, cap: ResidencyCap) -> Footprint:
    """Return the footprint under a residency cap: more dynamic shared memory, and the carveout to match."""
    return msgspec.structs.replace(
        footprint,
        dynamic_shared_bytes=max(cap.dynamic_shared_bytes, footprint.dynamic_shared_bytes),
        carveout_percent=cap.carveout_percent,
    )


def with_ctas(footprint: Footprint, control: CommunicationCtas) -> Footprint:
    """Return the footprint of a collective limited to `max_ctas`, in clusters no larger than that."""
    num_ctas = min(footprint.num_ctas, control.max_ctas)
    cluster = max(size for size in (1, 2, 4, 8, 16) if size <= footprint.ctas_per_cluster and num_ctas % size == 0)
    threads = footprint.threads_per_cta if control.num_threads is None else control.num_threads + NCCL_EXTRA_THREADS
    return msgspec.structs.replace(
        footprint,
        num_ctas=num_ctas,
        ctas_per_cluster=cluster,
        threads_per_cta=min(threads, footprint.threads_per_cta),
    )
