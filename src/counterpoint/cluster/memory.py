"""Estimates a rank's GPU memory: parameters, gradients, optimizer states, activations; without slack.

Activations by the formulas of Korthikanti et al. (arXiv 2205.05198), section 4: 34 bytes for each token and hidden element
of a layer at 2 bytes an element, 5 for each score where scores are written; recomputation keeps what its kind keeps.
"""

from counterpoint.cluster.description import Configuration
from counterpoint.cluster.passes import stage_parameters

OPTIMIZER_BYTES = 12  # of one parameter: fp32 master weight and two moments of Adam
LAYER_BYTES_PER_ELEMENT = 34
SCORE_BYTES = 5
LOGIT_BYTES = 6  # 2 as computed, 4 for the copy in fp32 that the loss needs
SHARDED_BYTES = 24  # of the 34, those that tensor parallelism divides; sequence parallelism divides the rest, too


def memory_bytes(configuration: Configuration) -> float:
    """Return the bytes that the fullest rank needs."""
    model, sizes, training = configuration.model, configuration.parallelism, configuration.training
    layers = configuration.layers_per_stage
    parameters = stage_parameters(configuration)
    kept = parameters.per_rank(configuration.shard_ranks, configuration.expert_shard_ranks)
    states = kept * (model.element_bytes + training.gradient_bytes)
    updated = parameters.per_rank(configuration.optimizer_ranks, configuration.expert_optimizer_ranks)
    states += updated * OPTIMIZER_BYTES
    if configuration.shard_ranks > 1:  # two layers are gathered at a time
        states += 2 * (parameters.per_rank(1, 1) / layers) * model.element_bytes
    in_flight: float = min(configuration.num_micro_batches, sizes.pipeline) if sizes.pipeline > 1 else 1
    if sizes.schedule == "interleaved":
        in_flight *= 1 + (sizes.pipeline - 1) / (sizes.pipeline * sizes.num_chunks)
    logits = training.micro_batch * model.sequence / sizes.context * model.vocabulary / sizes.tensor * LOGIT_BYTES
    return states + in_flight * layers * _layer_bytes(configuration) + logits / sizes.pipeline


def _layer_bytes(configuration: Configuration) -> float:
    """Return the bytes of one micro-batch's activations that one layer keeps."""
    model, sizes, training = configuration.model, configuration.parallelism, configuration.training
    tokens = training.micro_batch * model.sequence / sizes.context
    elements = tokens * model.hidden * model.element_bytes / 2
    whole = sizes.tensor if sizes.is_sequence_parallel else 1
    if training.recompute == "full":
        return 2 * elements / whole
    scores = 0.0
    if model.attention == "materialized" and training.recompute == "none":
        scores = SCORE_BYTES * tokens * model.sequence * model.num_heads / sizes.tensor
    return elements * ((LAYER_BYTES_PER_ELEMENT - SHARDED_BYTES) / whole + SHARDED_BYTES / sizes.tensor) + scores
