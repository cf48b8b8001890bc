"""Estimates a rank's GPU memory: parameters, gradients, optimizer states, activations; without slack.

Activations by the formulas of Korthikanti et al. (arXiv 2205.05198), section 4: 34 bytes for each token and hidden element
of a layer at 2 bytes an element, 5 for each score where scores are written; recomputation keeps what its kind keeps.
The first stage of a pipeline holds the activations of most micro-batches. The last one holds the logits of one, and with
zero_bubble what the gradients of weights need of those that wait for them.
"""

from counterpoint.cluster.description import Configuration
from counterpoint.cluster.passes import stage_parameters
from counterpoint.cluster.pipeline import most_held

OPTIMIZER_BYTES = 12  # of one parameter: fp32 master weight and two moments of Adam
LAYER_BYTES_PER_ELEMENT = 34
SCORE_BYTES = 5
LOGIT_BYTES = 6  # 2 as computed, 4 for the copy in fp32 that the loss needs
WAITING_BYTES = 32  # that gradients of weights need: the inputs of matmuls (14), and the gradients of their outputs (18)
SHARDED_BYTES = 24  # of the 34 or 32, those that tensor parallelism divides; sequence parallelism divides the rest, too


def memory_bytes(configuration: Configuration) -> float:
    """Return the bytes that the fullest rank needs, one of the first or of the last stage."""
    model, sizes, training = configuration.model, configuration.parallelism, configuration.training
    layers = configuration.layers_per_stage
    parameters = stage_parameters(configuration)
    kept = parameters.per_rank(configuration.shard_ranks, configuration.expert_shard_ranks)
    states = kept * (model.element_bytes + training.gradient_bytes)
    updated = parameters.per_rank(configuration.optimizer_ranks, configuration.expert_optimizer_ranks)
    states += updated * OPTIMIZER_BYTES
    if configuration.shard_ranks > 1:  # two layers are gathered at a time
        states += 2 * (parameters.per_rank(1, 1) / layers) * model.element_bytes
    first, last = (
        most_held(stage, sizes.pipeline, sizes.num_chunks, configuration.num_micro_batches)
        for stage in (0, sizes.pipeline - 1)
    )
    each = layers * _layer_bytes(configuration)
    return states + max(first * each, last * each + _last_stage_bytes(configuration))


def _last_stage_bytes(configuration: Configuration) -> float:
    """Return the bytes that only the last stage holds.

    They are the logits of one micro-batch, whose backward pass follows at once, and with zero_bubble what is kept of the
    micro-batches whose gradients of weights come later, as many as there are other stages.
    """
    model, sizes = configuration.model, configuration.parallelism
    logits = _num_tokens(configuration) * model.vocabulary / sizes.tensor
    if sizes.schedule != "zero_bubble":
        return logits * LOGIT_BYTES
    waiting = configuration.layers_per_stage * _divided_bytes(configuration, WAITING_BYTES) + logits * model.element_bytes
    return logits * LOGIT_BYTES + (min(sizes.pipeline, configuration.num_micro_batches) - 1) * waiting


def _layer_bytes(configuration: Configuration) -> float:
    """Return the bytes of one micro-batch's activations that one layer keeps."""
    model, sizes, training = configuration.model, configuration.parallelism, configuration.training
    if training.recompute == "full":
        whole = sizes.tensor if sizes.is_sequence_parallel else 1
        return _num_tokens(configuration) * model.hidden * model.element_bytes / whole
    scores = 0.0
    if model.attention == "materialized" and training.recompute == "none":
        scores = SCORE_BYTES * _num_tokens(configuration) * model.sequence * model.num_heads / sizes.tensor
    return _divided_bytes(configuration, LAYER_BYTES_PER_ELEMENT) + scores


def _divided_bytes(configuration: Configuration, bytes_per_element: int) -> float:
    """Return a tensor rank's part of so many bytes for each token and hidden element of one micro-batch, at 2 an element."""
    model, sizes = configuration.model, configuration.parallelism
    elements = _num_tokens(configuration) * model.hidden * model.element_bytes / 2
    whole = sizes.tensor if sizes.is_sequence_parallel else 1
    return elements * ((bytes_per_element - SHARDED_BYTES) / whole + SHARDED_BYTES / sizes.tensor)


def _num_tokens(configuration: Configuration) -> float:
    """Return the tokens of one micro-batch on one context rank."""
    return configuration.training.micro_batch * configuration.model.sequence / configuration.parallelism.context
