"""The 24 shapes of the operators' benchmark: layers of Llama models, and the FiCCO paper's GEMMs scaled down.

A shape is (tokens, hidden, wide): all-gather + matmul is (tokens, hidden) @ (hidden, wide / W), as a column-parallel
layer, and matmul + reduce-scatter (tokens, wide / W) @ (wide / W, hidden), as a row-parallel one; communicated is
(tokens, hidden) in both.
"""

from typing import NamedTuple


class Shape(NamedTuple):
    name: str
    tokens: int
    hidden: int
    wide: int


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


def shapes_named(names: str) -> tuple[Shape, ...]:
    """`all`, or some names separated by commas."""
    if names == "all":
        return SHAPES
    wanted = names.split(",")
    unknown = set(wanted) - {shape.name for shape in SHAPES}
    if unknown:
        raise SystemExit(
            f"Unknown shapes: {', '.join(sorted(unknown))}. Known: {', '.join(shape.name for shape in SHAPES)}."
        )
    return tuple(shape for shape in SHAPES if shape.name in wanted)
