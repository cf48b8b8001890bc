"""Reductions of gradients, plain or compressed, with the kernels that compression costs.

The kernels are counted by the bytes that they move; none of them was measured. PowerSGD (Vogels et al., arXiv 1905.13727)
as PyTorch's hook does it: two products with a thin matrix, two all-reduces, an orthogonalization, error feedback. Top-k (Aji
and Heafield, arXiv 1704.05021): a selection of 4 passes (radix select; assumed), values and indices gathered from all ranks.
fp8 with a scale that all ranks share, so that sums do not overflow (FP8-LM, Peng et al., arXiv 2310.18313): one pass finds
the scale, one rounds.
"""

from counterpoint.cluster.description import Configuration
from counterpoint.cluster.kernels import memory_pass
from counterpoint.cluster.pass_builder import EXPERT_DATA_GROUP, REDUCE, REPLICA_GROUP, SHARD_GROUP, PassBuilder
from counterpoint.cluster.training import Compression

FULL_BYTES = 4  # of a gradient where it is compressed
NARROW_BYTES = {"bf16": (2, 1), "fp8": (1, 2)}  # of an element on the wire, and how often it is read to narrow it
SELECTION_PASSES = 4
INDEX_BYTES = 4


def reduce_gradients(configuration: Configuration, builder: PassBuilder, num_elements: float, group: str) -> int | None:
    """Add the reduction of `num_elements` gradients over `group` after the computation so far.

    Returns its last operation; None where the group is one rank.
    """
    if builder.groups[group].size < 2:
        return None
    method = configuration.compression.method
    if method == "powersgd":
        return _power_sgd(configuration, builder, num_elements, group)
    if method == "topk":
        return _top_k(configuration.compression, builder, num_elements, group)
    if method in NARROW_BYTES:
        width, reads = NARROW_BYTES[method]
        builder.compute(memory_pass("gradient.narrow", (reads * FULL_BYTES + width) * num_elements))
        last = _plain(configuration, builder, width * num_elements, group)
        widened = memory_pass("gradient.widen", (FULL_BYTES + width) * _kept(configuration, num_elements, group))
        return builder.compute_after(widened, last)
    return _plain(configuration, builder, configuration.training.gradient_bytes * num_elements, group)


def _kept(configuration: Configuration, num_elements: float, group: str) -> float:
    """Return the gradients that a rank keeps after the reduction."""
    is_of_experts = group == EXPERT_DATA_GROUP
    return num_elements / (configuration.expert_optimizer_ranks if is_of_experts else configuration.optimizer_ranks)


def _plain(configuration: Configuration, builder: PassBuilder, num_bytes: float, group: str) -> int | None:
    sharding = configuration.parallelism.sharding
    if sharding == "none":
        return builder.communicate("all_reduce", num_bytes, group, stream=REDUCE)
    if sharding == "hybrid" and group != EXPERT_DATA_GROUP:
        first = builder.communicate("reduce_scatter", num_bytes, SHARD_GROUP, stream=REDUCE)
        size = builder.groups[SHARD_GROUP].size
        second = builder.communicate("all_reduce", num_bytes / size, REPLICA_GROUP, after=first, stream=REDUCE)
        return first if second is None else second
    return builder.communicate("reduce_scatter", num_bytes, group, stream=REDUCE)


def _power_sgd(configuration: Configuration, builder: PassBuilder, num_elements: float, group: str) -> int | None:
    rank, rows = configuration.compression.rank, configuration.model.hidden
    columns = max(1.0, num_elements / rows)
    product_flops = 2.0 * num_elements * rank
    builder.compute(memory_pass("gradient.feedback", 3 * FULL_BYTES * num_elements))
    builder.compute(memory_pass("powersgd.left", FULL_BYTES * num_elements, product_flops))
    left = builder.communicate("all_reduce", FULL_BYTES * rows * rank, group, stream=REDUCE)
    orthogonal = memory_pass("powersgd.orthogonalize", 2 * FULL_BYTES * rows * rank * rank, 2.0 * rows * rank * rank)
    done = builder.compute_after(orthogonal, left)
    second = builder.compute_after(memory_pass("powersgd.right", FULL_BYTES * num_elements, product_flops), done)
    right = builder.communicate("all_reduce", FULL_BYTES * columns * rank, group, after=second, stream=REDUCE)
    return builder.compute_after(memory_pass("powersgd.rebuild", 3 * FULL_BYTES * num_elements, product_flops), right)


def _top_k(compression: Compression, builder: PassBuilder, num_elements: float, group: str) -> int | None:
    size = builder.groups[group].size
    kept = compression.ratio * num_elements
    builder.compute(memory_pass("gradient.feedback", 3 * FULL_BYTES * num_elements))
    builder.compute(memory_pass("topk.select", SELECTION_PASSES * FULL_BYTES * num_elements))
    number = builder.communicate("all_gather", size * kept * (FULL_BYTES + INDEX_BYTES), group, stream=REDUCE)
    return builder.compute_after(
        memory_pass("topk.scatter", FULL_BYTES * num_elements + 3 * size * kept * (FULL_BYTES + INDEX_BYTES)), number
    )
