"""Estimates one training step on a cluster: passes of a stage by the single-node simulator, stages by a pipeline
schedule.

What is folded: data, tensor, context and expert ranks are alike, so one rank of each stage is simulated; equal layers and
equal micro-batches count once. What is left out: the embedding's lookup, the host between steps, input, checkpoints.
"""

from functools import cached_property
from statistics import NormalDist

import msgspec

from counterpoint.cluster.compression import NARROW_BYTES, reduction
from counterpoint.cluster.description import Configuration
from counterpoint.cluster.memory import memory_bytes
from counterpoint.cluster.pass_builder import (
    DATA_GROUP,
    EXPERT_DATA_GROUP,
    SHARD_GROUP,
    TENSOR_GROUP,
    groups_of,
)
from counterpoint.cluster.passes import (
    PassKind,
    StageParameters,
    embedding_elements,
    head_step,
    optimizer_step,
    pass_step,
    stage_parameters,
)
from counterpoint.cluster.pipeline import Bubbles, StageTimes, run_pipeline
from counterpoint.cluster.planned import PassTimes, simulate_pass
from counterpoint.sim.calibration import Calibration, load_calibration
from counterpoint.sim.collective_times import CollectiveTimes
from counterpoint.step import CollectiveKind, Step
from counterpoint.units import US_PER_S
from counterpoint.value import Value

FOLDED_LAYERS = (2, 3)  # numbers of layers in the simulated passes


class ClusterEstimate(Value, frozen=True, kw_only=True):
    """One step. Times are those of a rank of the busiest stage, in microseconds, and add up to `step_us`.

    Exposed time is what its computation waits for. `bubble_us` is the pipeline wait; `tensor_exposed_us` is the wait for
    collectives inside passes; `data_exposed_us` is that for gathers and reductions before, beside and after them.
    """

    step_us: float
    compute_us: float
    tensor_exposed_us: float
    bubble_us: float
    data_exposed_us: float
    optimizer_us: float
    skew_us: float
    tokens_per_s_per_gpu: float
    model_flops_utilization: float
    memory_bytes: float
    fits_memory: bool
    num_gpus: int
    data_size: int
    num_micro_batches: int
    controls_in_force: tuple[str, ...] = ()


class PassMemory:
    """A cache of simulated passes, so that a sweep simulates each only once."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[PassTimes, tuple[str, ...]]] = {}

    def times(self, configuration: Configuration, calibration: Calibration, step: Step) -> tuple[PassTimes, tuple[str, ...]]:
        """Return the times of a step under the configuration's controls, and the labels of those in force."""
        machine, software = configuration.fabric.machine, configuration.software
        key = (machine, software, configuration.training.controls, step)
        if key not in self._known:
            self._known[key] = simulate_pass(step, machine, calibration, configuration.training.controls)
        return self._known[key]


def estimate_step(
    configuration: Configuration, memory: PassMemory | None = None, calibration: Calibration | None = None
) -> ClusterEstimate:
    """Estimate one training step; `calibration` None means that of the machine's GPU. One `memory` serves one calibration.

    Raises `MachineError`, `StepError` or `PlanError` for what cannot be simulated.
    """
    return _StepEstimator(configuration, memory or PassMemory(), calibration_of(configuration, calibration)).estimate()


def calibration_of(configuration: Configuration, calibration: Calibration | None = None) -> Calibration:
    """Return the GPU's constants, scaled by the speeds that the description states for the job's software."""
    calibration = calibration or load_calibration(configuration.fabric.machine)
    software = configuration.software
    if software.matmul_speed == 1.0 and software.memory_speed == 1.0:
        return calibration

    def scaled(constant: object, factor: float) -> object:
        return msgspec.structs.replace(constant, value=constant.value * factor)  # type: ignore[type-var, attr-defined]

    return msgspec.structs.replace(
        calibration,
        matmul_peak_fraction=scaled(calibration.matmul_peak_fraction, software.matmul_speed),
        matmul_peak_fractions={
            kind: scaled(each, software.matmul_speed) for kind, each in calibration.matmul_peak_fractions.items()
        },
        hbm_efficiency=scaled(calibration.hbm_efficiency, software.memory_speed),
    )


class _StepEstimator:
    """The parts of one step."""

    def __init__(self, configuration: Configuration, memory: PassMemory, calibration: Calibration) -> None:
        self._configuration, self._memory = configuration, memory
        self._sizes, self._training, self._model = configuration.parallelism, configuration.training, configuration.model
        self._calibration = calibration
        self._labels: list[str] = []

    @cached_property
    def _collectives(self) -> CollectiveTimes:
        return CollectiveTimes(fabric=self._configuration.fabric, calibration=self._calibration)

    @cached_property
    def _is_sharded(self) -> bool:
        """Whether a rank holds a shard of the parameters, so that each micro-batch gathers and reduces."""
        return self._configuration.shard_ranks > 1

    def estimate(self) -> ClusterEstimate:
        """Combine all parts."""
        stages = self._stages()
        bubbles = self._run(stages)
        busiest = max(range(len(stages)), key=lambda stage: bubbles.busy_us[stage])
        ends = [end + self._tail_us for end in bubbles.ends_us]
        start_us = self._start_us
        optimizer_us = self._optimizer_us
        pipeline_us = max(ends)
        busy_us, waiting_us, beside_us = self._stage_shares(busiest)
        skew_us = self._skew_us(pipeline_us, busy_us + optimizer_us)
        step_us = start_us + pipeline_us + skew_us + optimizer_us
        return self._estimate(
            step_us=step_us,
            compute_us=busy_us,
            tensor_exposed_us=waiting_us,
            bubble_us=max(0.0, pipeline_us - self._tail_us - bubbles.busy_us[busiest]),
            data_exposed_us=start_us + self._tail_us + beside_us,
            optimizer_us=optimizer_us,
            skew_us=skew_us,
        )

    def _estimate(self, *, step_us: float, **parts: float) -> ClusterEstimate:
        configuration = self._configuration
        num_gpus = configuration.fabric.num_gpus
        tokens = self._training.global_batch * self._model.sequence
        peak = configuration.fabric.machine.matmul_flops_per_s("bf16")
        flops = 3 * self._model.forward_flops_per_token * tokens
        needed = memory_bytes(configuration)
        return ClusterEstimate(
            step_us=step_us,
            tokens_per_s_per_gpu=tokens / num_gpus / step_us * US_PER_S,
            model_flops_utilization=flops / num_gpus / peak / step_us * US_PER_S,
            memory_bytes=needed,
            fits_memory=needed <= configuration.fabric.machine.gpu.hbm_bytes,
            num_gpus=num_gpus,
            data_size=configuration.data_size,
            num_micro_batches=configuration.num_micro_batches,
            controls_in_force=tuple(dict.fromkeys(self._labels)),
            **parts,
        )

    def _simulated(self, step: Step) -> PassTimes:
        times, labels = self._memory.times(self._configuration, self._calibration, step)
        self._labels.extend(labels)
        return times

    def _pass(self, kind: PassKind) -> PassTimes:
        """Return the times of a pass through all layers of one chunk."""
        layers = self._configuration.layers_per_chunk
        fewer, more = FOLDED_LAYERS
        first = self._simulated(pass_step(self._configuration, self._collectives, kind, min(layers, fewer)))
        if layers <= fewer:
            return first
        second = self._simulated(pass_step(self._configuration, self._collectives, kind, more))
        return first.more(second, layers - fewer)

    @cached_property
    def _forward(self) -> PassTimes:
        return self._pass(PassKind(direction="forward", is_gathering=self._is_sharded))

    @cached_property
    def _backward(self) -> PassTimes:
        return self._pass(PassKind(direction="backward", is_gathering=self._is_sharded, is_reducing=self._is_sharded))

    @cached_property
    def _heads(self) -> tuple[PassTimes, PassTimes]:
        forward = self._simulated(head_step(self._configuration, self._collectives, "forward"))
        return forward, self._simulated(head_step(self._configuration, self._collectives, "backward"))

    def _stages(self) -> list[list[StageTimes]]:
        """Return the times of every chunk of every stage. The first chunk has the embedding's gather and reduction where
        parameters are sharded, the last one has the head.
        """
        forward, backward = self._forward, self._backward
        usual = StageTimes(forward_us=forward.computed_us, backward_us=self._backward_us, weights_us=backward.weights_us)
        stages = [[usual] * self._sizes.num_chunks for _ in range(self._sizes.pipeline)]
        gather_us, reduction_us = self._embedding_waits_us
        stages[0][0] = _longer(stages[0][0], gather_us, reduction_us)
        heads = self._heads
        stages[-1][-1] = _longer(stages[-1][-1], heads[0].makespan_us, heads[1].makespan_us, heads[1].weights_us)
        return stages

    @property
    def _backward_us(self) -> float:
        """A backward pass of a chunk. Where parameters are sharded, each ends with its last reduction, as FSDP's do."""
        return self._backward.makespan_us if self._is_sharded else self._backward.computed_us

    @cached_property
    def _embedding_waits_us(self) -> tuple[float, float]:
        """Where parameters are sharded, the embedding's gather before and its reduction after each micro-batch's layers."""
        if not self._is_sharded:
            return 0.0, 0.0
        return self._embedding_us(is_gathered=True), self._embedding_us(is_gathered=False)

    def _run(self, stages: list[list[StageTimes]]) -> Bubbles:
        return run_pipeline(
            stages,
            self._configuration.num_micro_batches,
            self._send_us,
            is_sending_hidden=self._training.overlap_pipeline,
            kind=self._sizes.schedule,
        )

    @cached_property
    def _send_us(self) -> float:
        """Activations of a micro-batch to the next stage: each tensor rank sends its share, and gathers it if it must."""
        if self._sizes.pipeline == 1:
            return 0.0
        tokens = self._training.micro_batch * self._model.sequence // self._sizes.context
        whole = tokens * self._model.hidden * self._model.element_bytes
        configuration = self._configuration
        stride = self._sizes.tensor * self._sizes.context * configuration.data_size
        neighbor = msgspec.structs.replace(groups_of(configuration)[TENSOR_GROUP], size=2, stride=stride)
        sent_us = self._collectives.time_us("send_recv", whole / self._sizes.tensor, neighbor)
        if self._sizes.is_sequence_parallel:
            return sent_us
        return sent_us + self._collective_us("all_gather", whole, TENSOR_GROUP)

    def _collective_us(self, kind: CollectiveKind, num_bytes: float, group: str) -> float:
        return self._collectives.time_us(kind, num_bytes, groups_of(self._configuration)[group])

    @cached_property
    def _parameters(self) -> StageParameters:
        """Parameters of the largest stage on one tensor rank."""
        return stage_parameters(self._configuration)

    @cached_property
    def _reducing_extra_us(self) -> float:
        """Return by how much the last backward pass is longer because gradients are reduced beside it, and after it."""
        kind = PassKind(direction="backward", is_reducing=True)
        return max(0.0, self._pass(kind).makespan_us - self._backward.computed_us)

    @cached_property
    def _tail_us(self) -> float:
        """Return the time after the last backward pass of a stage: reductions that nothing hides.

        Where parameters are sharded, each micro-batch has its own.
        """
        if self._is_sharded or groups_of(self._configuration)[DATA_GROUP].size < 2:
            return 0.0
        if self._training.overlap_data:
            return self._reducing_extra_us + self._embedding_us(is_gathered=False)
        return sum(self._reduction_us(elements, group) for elements, group in self._elements)

    @property
    def _elements(self) -> list[tuple[float, str]]:
        """The parameters of the largest stage, and those of experts apart, each with the ranks that hold the same ones."""
        return [(self._parameters.dense, DATA_GROUP), (self._parameters.experts, EXPERT_DATA_GROUP)]

    def _reduction_us(self, num_elements: float, group: str) -> float:
        """Return the time to reduce so many gradients in one piece; PowerSGD and top-k compress only those of layers."""
        width, _ = NARROW_BYTES.get(self._configuration.compression.method, (self._training.gradient_bytes, 0))
        collectives = reduction(self._configuration, num_elements * width, group)
        return sum(self._collective_us(kind, num_bytes, members) for kind, num_bytes, members in collectives)

    def _embedding_us(self, *, is_gathered: bool) -> float:
        """Return the time of an embedding's gather or reduction, which nothing hides."""
        elements = embedding_elements(self._configuration)
        if is_gathered:
            group = SHARD_GROUP if self._is_sharded else DATA_GROUP
            return self._collective_us("all_gather", elements * self._model.element_bytes, group)
        return self._reduction_us(elements, DATA_GROUP)

    @cached_property
    def _start_us(self) -> float:
        """Before the first forward pass: parameters that come back from the ranks that updated them."""
        if self._sizes.sharding != "optimizer" or groups_of(self._configuration)[DATA_GROUP].size < 2:
            return 0.0
        if self._training.overlap_data:
            gathering = self._pass(PassKind(direction="forward", is_gathering=True))
            extra_us = max(0.0, gathering.computed_us - self._forward.computed_us)
            return extra_us + self._embedding_us(is_gathered=True)
        width = self._model.element_bytes
        return sum(self._collective_us("all_gather", width * elements, group) for elements, group in self._elements)

    @cached_property
    def _optimizer_us(self) -> float:
        return self._simulated(optimizer_step(self._configuration, self._collectives, self._parameters)).makespan_us

    def _skew_us(self, pipeline_us: float, computing_us: float) -> float:
        """Return how much longer the slowest of all ranks takes than the usual one.

        A slow rank computes longer, and hides no more communication behind that. The whole then takes the expected largest
        of as many normally distributed times as there are ranks.
        """
        skew, ranks = self._configuration.skew, self._configuration.fabric.num_gpus
        largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0
        slow_us = (skew.slow_factor - 1) * computing_us if skew.slow_ranks else 0.0
        return (pipeline_us + slow_us) * (1 + skew.sigma * max(0.0, largest)) - pipeline_us

    def _stage_shares(self, stage: int) -> tuple[float, float, float]:
        """Return how long a stage's passes compute, wait for collectives inside them, and for gathers and reductions."""
        passes = self._configuration.num_micro_batches
        chunks = self._sizes.num_chunks
        plain = [self._pass(PassKind(direction=each)) for each in ("forward", "backward")]
        heads = self._heads if stage == self._sizes.pipeline - 1 else ()
        busy_us = sum(each.busy_us for each in plain) * chunks + sum(each.busy_us for each in heads)
        waiting_us = sum(each.computed_us - each.busy_us for each in plain) * chunks
        waiting_us += sum(each.makespan_us - each.busy_us for each in heads)
        whole = (self._forward.computed_us + self._backward_us) * chunks
        beside_us = whole - sum(each.computed_us for each in plain) * chunks
        if stage == 0:  # it has the embedding
            beside_us += sum(self._embedding_waits_us)
        return passes * busy_us, passes * waiting_us, passes * max(0.0, beside_us)


def _longer(times: StageTimes, forward_us: float, backward_us: float, weights_us: float = 0.0) -> StageTimes:
    """Return the times of a chunk with so much more of each."""
    return StageTimes(
        forward_us=times.forward_us + forward_us,
        backward_us=times.backward_us + backward_us,
        weights_us=times.weights_us + weights_us,
    )
