"""The shapes of the operators' benchmark: layers of Llama models, the FiCCO paper's GEMMs, and shapes drawn by a seed.

A layer is (tokens, hidden, wide): all-gather + matmul is (tokens, hidden) @ (hidden, wide / W), as a column-parallel
layer, and matmul + reduce-scatter (tokens, wide / W) @ (wide / W, hidden), as a row-parallel one; communicated is
(tokens, hidden) in both. A GEMM of the paper is M, N, K: all-gather + matmul is (M, K) @ (K, N / W), matmul +
reduce-scatter (M, K / W) @ (K / W, N).
"""

import random
from typing import NamedTuple, TypeAlias

Sizes = tuple[int, int, int]  # rows, columns and inner size of one rank's matmul


class Shape(NamedTuple):
    """A layer."""

    name: str
    tokens: int
    hidden: int
    wide: int

    def sizes(self, op: str, num_ranks: int) -> Sizes:
        """One rank's matmul; rows of the undivided matrix."""
        local = self.wide // num_ranks
        return (self.tokens, local, self.hidden) if op == "ag_mm" else (self.tokens, self.hidden, local)


class Gemm(NamedTuple):
    """A GEMM of arXiv 2512.10236. Its rows are divided by `ag_divisor` or `rs_divisor` where operands, results and the
    buffers of all candidates would take more than the 141 GB of an H200."""

    name: str
    rows: int
    columns: int
    inner: int
    ag_divisor: int = 1
    rs_divisor: int = 1

    def sizes(self, op: str, num_ranks: int) -> Sizes:
        """One rank's matmul; rows of the undivided matrix."""
        if op == "ag_mm":
            return self.rows // self.ag_divisor, self.columns // num_ranks, self.inner
        return self.rows // self.rs_divisor, self.columns, self.inner // num_ranks


AnyShape: TypeAlias = Shape | Gemm


SHAPES = (
    # Llama 3 8B: qkv 6144, gate or up 14336, both 28672
    Shape("8b-qkv-8k", 8192, 4096, 6144),
    Shape("8b-up-8k", 8192, 4096, 14336),
    Shape("8b-gateup-16k", 16384, 4096, 28672),
    Shape("8b-qkv-32k", 32768, 4096, 6144),
    Shape("8b-up-32k", 32768, 4096, 14336),
    Shape("8b-gateup-32k", 32768, 4096, 28672),
    # Llama 3 70B: qkv 10240, gate or up 28672, both 57344
    Shape("70b-half-qkv-8k", 8192, 8192, 5120),
    Shape("70b-qkv-8k", 8192, 8192, 10240),
    Shape("70b-up-8k", 8192, 8192, 28672),
    Shape("70b-qkv-16k", 16384, 8192, 10240),
    Shape("70b-up-16k", 16384, 8192, 28672),
    Shape("70b-gateup-16k", 16384, 8192, 57344),
    Shape("70b-qkv-32k", 32768, 8192, 10240),
    # Llama 3 405B: qkv 18432, gate or up 53248
    Shape("405b-qkv-4k", 4096, 16384, 18432),
    Shape("405b-qkv-8k", 8192, 16384, 18432),
    Shape("405b-up-8k", 8192, 16384, 53248),
    Shape("405b-qkv-16k", 16384, 16384, 18432),
    # arXiv 2512.10236, scaled: M, N or K divided until they fit, the proportions kept roughly
    Shape("g1-scaled", 16384, 16384, 16384),
    Shape("g2-scaled", 32768, 8192, 16384),
    Shape("g6-scaled", 65536, 8192, 8192),
    Shape("g8-scaled", 65536, 8192, 28672),
    Shape("g9-scaled", 24576, 16384, 18432),
    Shape("g11-scaled", 65536, 8192, 10240),
    Shape("g14-scaled", 36864, 4096, 28672),
)
# kept from whoever tunes the heuristic
HELD_OUT = frozenset({"8b-up-8k", "8b-gateup-32k", "70b-qkv-8k", "70b-gateup-16k", "405b-qkv-16k", "g6-scaled", "g9-scaled"})


# All 16 GEMMs; those that take longest last
GEMMS = (
    Gemm("g4", 16384, 53248, 16384),
    Gemm("g14", 147456, 28672, 4096),
    Gemm("g5", 8192, 8192, 262144),
    Gemm("g6", 262144, 8192, 8192),
    Gemm("g16", 229376, 28672, 4096),
    Gemm("g1", 16384, 16384, 131072),
    Gemm("g2", 131072, 16384, 16384),
    Gemm("g15", 327680, 28672, 4096),
    Gemm("g9", 196608, 18432, 16384),
    Gemm("g7", 28672, 8192, 262144),
    Gemm("g8", 262144, 28672, 8192),
    Gemm("g11", 1048576, 10240, 8192, rs_divisor=2),
    Gemm("g3", 53248, 16384, 131072),
    Gemm("g10", 196608, 106496, 16384, rs_divisor=4),
    Gemm("g13", 1607680, 57344, 8192, ag_divisor=4, rs_divisor=16),
    Gemm("g12", 1048576, 57344, 8192, ag_divisor=2, rs_divisor=8),
)
SEEDED_PREFIX = "seed"
LEAST_FLOPS, MOST_FLOPS = 2e11, 2e13  # of a seeded layer's matmul over all ranks: from a third of a millisecond up


def seeded_shapes(seed: int, num_shapes: int) -> tuple[Shape, ...]:
    """Layers that nobody chose: tokens, hidden and wide drawn alike on a logarithmic scale, in multiples of 1024 and 512."""
    drawn, shapes = random.Random(seed), []
    while len(shapes) < num_shapes:
        tokens = 1024 * round(2 ** drawn.uniform(2, 6))
        hidden, wide = (512 * round(2 ** drawn.uniform(low, high)) for low, high in ((2, 5), (3, 7)))
        if LEAST_FLOPS <= 2 * tokens * hidden * wide <= MOST_FLOPS:
            shapes.append(Shape(f"{SEEDED_PREFIX}{seed}-{len(shapes)}", tokens, hidden, wide))
    return tuple(shapes)


def shapes_named(names: str) -> tuple[AnyShape, ...]:
    """`all` layers, `gemms`, `seed:SEED:COUNT` for layers drawn by a seed, or some names separated by commas."""
    if names in ("all", "gemms"):
        return SHAPES if names == "all" else GEMMS
    if names.startswith(f"{SEEDED_PREFIX}:"):
        _, seed, count = names.split(":")
        return seeded_shapes(int(seed), int(count))
    known: dict[str, AnyShape] = {shape.name: shape for shape in (*SHAPES, *GEMMS)}
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        raise SystemExit(f"Unknown shapes: {', '.join(unknown)}. Known: all, gemms, seed:SEED:COUNT, {', '.join(known)}.")
    return tuple(known[name] for name in names.split(","))
