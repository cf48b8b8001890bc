"""Passes through the layers of a pipeline stage as steps: forward or backward, with or without data-parallel collectives.

Equal layers are folded: passes of 2 and of 3 layers are simulated, and what the third adds counts for every further one. So
the first gather and the last reduction of a pass, which nothing hides, count once in it. Without `overlap_data` the
computation waits for each gather and for each reduction where it stands.
"""

from typing import Literal

from counterpoint.cluster.compression import reduce_gradients
from counterpoint.cluster.description import Configuration
from counterpoint.cluster.kernels import matmul, memory_pass
from counterpoint.cluster.layers import LayerWriter
from counterpoint.cluster.pass_builder import (
    DATA_GROUP,
    EXPERT_DATA_GROUP,
    GATHER,
    PARTS_OF,
    REDUCE,
    TENSOR_GROUP,
    PassBuilder,
)
from counterpoint.sim.collective_times import CollectiveTimes
from counterpoint.step import Step
from counterpoint.value import Value

Direction = Literal["forward", "backward"]
# of fp32 logits through memory, forward and backward, in an unfused cross entropy: cast, maximum, subtraction, exponential,
# sum, division, gradient, cast back, each of which reads, and most of which write
LOSS_PASSES = 12
LOGIT_BYTES = 4
# of one parameter: gradient, master weight, two moments read; three written (fp32); the weight written twice
ADAM_BYTES = 28


class PassKind(Value, frozen=True, kw_only=True):
    """One kind of pass: whether parameters are gathered for it, and gradients reduced in it."""

    direction: Direction
    is_gathering: bool = False
    is_reducing: bool = False

    def describe(self) -> str:
        """Return a name such as "backward, gathering, reducing"."""
        extras = [word for word, holds in (("gathering", self.is_gathering), ("reducing", self.is_reducing)) if holds]
        return ", ".join([self.direction, *extras])


class StageParameters(Value, frozen=True, kw_only=True):
    """Parameters of a stage on one tensor rank: those that all data ranks hold, and those of this rank's experts."""

    dense: float
    experts: float

    def per_rank(self, num_ranks: int, num_expert_ranks: int) -> float:
        """Return a rank's part if so many ranks share the dense ones, and so many those of experts."""
        return self.dense / num_ranks + self.experts / num_expert_ranks


def layer_elements(configuration: Configuration) -> tuple[float, float]:
    """Return the parameters of one layer on one tensor rank, not sharded: of dense parts, and of experts."""
    model, sizes = configuration.model, configuration.parallelism
    dense, experts = float(model.attention_parameters), float(model.feed_forward_parameters)
    if not model.num_experts:
        return (dense + experts) / sizes.tensor, 0.0
    return dense / sizes.tensor, experts / sizes.tensor / sizes.expert


def pass_step(configuration: Configuration, times: CollectiveTimes, kind: PassKind, num_layers: int) -> Step:
    """Return the step of one pass of one micro-batch through `num_layers` layers."""
    builder = PassBuilder(configuration, times)
    writer = LayerWriter(configuration, builder)
    gathered: list[int | None] = []
    num_ahead = 1 if configuration.training.overlap_data else 0  # layers whose parameters come while one computes
    for number in range(num_layers):
        if kind.is_gathering:
            while len(gathered) < min(num_layers, number + 1 + num_ahead):
                gathered.append(_gather(configuration, builder, len(gathered)))
            builder.wait_for(gathered[number])
        if kind.direction == "forward":
            writer.forward()
        else:
            writer.backward()
            if kind.is_reducing:
                _reduce(configuration, builder)
    return builder.step(f"{kind.describe()}, {num_layers} layers")


def _reduce(configuration: Configuration, builder: PassBuilder) -> None:
    """Reduce the gradients of a layer. The computation waits for it unless reductions run beside it."""
    dense, experts = layer_elements(configuration)
    for elements, group in ((dense, DATA_GROUP), (experts, EXPERT_DATA_GROUP)):
        last = reduce_gradients(configuration, builder, elements, group) if elements else None
        if not configuration.training.overlap_data:
            builder.wait_for(last)


def _gather(configuration: Configuration, builder: PassBuilder, number: int) -> int | None:
    """Gather the parameters of a layer into one of two buffers, which the layer before the last must have left.

    Without overlap the gather starts when everything before it is done.
    """
    dense, experts = layer_elements(configuration)
    group, expert_group = DATA_GROUP, EXPERT_DATA_GROUP
    if configuration.shard_ranks > 1:
        group, expert_group = PARTS_OF[group][0], PARTS_OF[expert_group][0]
    after, stream = None, REDUCE  # behind the reductions
    if configuration.training.overlap_data:
        after, stream = builder.layer_ends[number - 2] if number >= 2 else -1, GATHER
    num_bytes = configuration.model.element_bytes
    first = builder.communicate("all_gather", num_bytes * dense, group, after=after, stream=stream)
    if not experts:
        return first
    second = builder.communicate("all_gather", num_bytes * experts, expert_group, after=after, stream=stream)
    return first if second is None else second


def head_step(configuration: Configuration, times: CollectiveTimes, direction: Direction) -> Step:
    """Return the step of the last norm, the logits and the loss of one micro-batch, or of their gradients."""
    model, sizes = configuration.model, configuration.parallelism
    builder = PassBuilder(configuration, times)
    gpu, element_type = configuration.fabric.machine.gpu, model.element_type
    tokens = configuration.training.micro_batch * model.sequence // sizes.context
    columns = model.vocabulary // sizes.tensor
    loss = memory_pass("loss", LOSS_PASSES / 2 * LOGIT_BYTES * tokens * columns)
    if direction == "forward":
        builder.compute(memory_pass("norm", 2 * model.element_bytes * tokens * model.hidden))
        builder.compute(matmul(gpu, "logits", (tokens, model.hidden, columns), element_type))
        builder.compute(loss)
        builder.communicate("all_reduce", 3 * LOGIT_BYTES * tokens, TENSOR_GROUP, is_waited_for=True)
    else:
        builder.compute(loss)
        builder.compute(matmul(gpu, "logits.input", (tokens, columns, model.hidden), element_type))
        builder.compute(matmul(gpu, "logits.weight", (model.hidden, tokens, columns), element_type))
        builder.communicate("all_reduce", model.element_bytes * tokens * model.hidden, TENSOR_GROUP)
    return builder.step(f"head, {direction}")


def optimizer_step(configuration: Configuration, times: CollectiveTimes, parameters: StageParameters) -> Step:
    """Return the step of Adam over the parameters that a rank updates."""
    builder = PassBuilder(configuration, times)
    updated = parameters.per_rank(configuration.optimizer_ranks, configuration.expert_optimizer_ranks)
    builder.compute(memory_pass("adam", ADAM_BYTES * updated))
    return builder.step("optimizer")


def embedding_elements(configuration: Configuration) -> float:
    """Return the parameters of one embedding on one tensor rank, not sharded."""
    return configuration.model.vocabulary * configuration.model.hidden / configuration.parallelism.tensor


def stage_parameters(configuration: Configuration) -> StageParameters:
    """Return the parameters of the largest stage on one tensor rank, not sharded; a lone stage has two embeddings."""
    num_embeddings = 2 if configuration.parallelism.pipeline == 1 else 1
    dense, experts = layer_elements(configuration)
    embeddings, num_layers = num_embeddings * embedding_elements(configuration), configuration.layers_per_stage
    return StageParameters(dense=num_layers * dense + embeddings, experts=num_layers * experts)
