"""Reductions of gradients, plain or compressed, with the kernels that compression costs.

The kernels are counted by the bytes that they move; none of them was measured. PowerSGD (Vogels et al., arXiv 1905.13727)
as PyTorch's hook does it: two products with a thin matrix, two all-reduces, an orthogonalization, error feedback. Top-k (Aji
and Heafield, arXiv 1704.05021): a selection of 4 passes (radix select; assumed), values and indices gathered from all ranks.
fp8 with a scale that all ranks share, so that sums do not overflow (FP8-LM, Peng et al., arXiv 2310.18313): one pass finds
the scale, one rounds.
"""

from counterpoint.cluster.description import Configuration
from counterpoint.cluster.kernels import memory_pass
from counterpoint.cluster.pass_builder import DATA_GROUP, PARTS_OF, REDUCE, PassBuilder, groups_of
from counterpoint.cluster.training import Compression
from counterpoint.step import CollectiveKind

FULL_BYTES = 4  # of a gradient where it is compressed
NARROW_BYTES = {"bf16": (2, 1), "fp8": (1, 2)}  # of an element on the wire, and how often it is read to narrow it
SELECTION_PASSES = 4
INDEX_BYTES = 4


def reduction(configuration: Configuration, num_bytes: float, group: str) -> list[tuple[CollectiveKind, float, str]]:
    """Return the collectives that reduce so many bytes of gradients over `group`, in turn: kind, bytes and group of each.

    Ranks that share the optimizer's state keep a shard each, which their replicas reduce.
    """
    num_shards = _num_shards(configuration, group)
    if num_shards == 1:
        return [("all_reduce", num_bytes, group)]
    if num_shards == groups_of(configuration)[group].size:
        return [("reduce_scatter", num_bytes, group)]
    shards, replicas = PARTS_OF[group]
    return [("reduce_scatter", num_bytes, shards), ("all_reduce", num_bytes / num_shards, replicas)]


def _num_shards(configuration: Configuration, group: str) -> int:
    """Return over how many ranks of `group` reduced gradients are sharded."""
    return configuration.optimizer_ranks if group == DATA_GROUP else configuration.expert_optimizer_ranks


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
        kept = num_elements / _num_shards(configuration, group)
        return builder.compute_after(memory_pass("gradient.widen", (FULL_BYTES + width) * kept), last)
    return _plain(configuration, builder, configuration.training.gradient_bytes * num_elements, group)


def _plain(configuration: Configuration, builder: PassBuilder, num_bytes: float, group: str) -> int | None:
    last: int | None = None
    for kind, part_bytes, members in reduction(configuration, num_bytes, group):
        last = builder.communicate(kind, part_bytes, members, after=last, stream=REDUCE)
    return last


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
