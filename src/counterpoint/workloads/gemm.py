"""The work of a tiled matrix multiplication: tiles, floating-point operations, HBM traffic, shared memory.

This module does not know the machine. C[M, N] = A[M, K] B[K, N] is cut into tiles of `tm x tn`, each computed by one CTA
that steps through K by `tk`. The traffic follows the grouped order of Triton's matrix multiplication tutorial: groups of
`GROUP_TILE_ROWS` rows of tiles, each group sweeping all columns. The rows of A that a group needs stay in L2, so A is read
once in total. B is read once per group, or once in total if it is small enough to stay in any L2. C is written once.
"""

from math import ceil

from counterpoint.errors import WorkloadError
from counterpoint.machine import ELEMENT_BYTES, ElementType

Tile = tuple[int, int, int]

# GROUP_SIZE_M of the tutorial "03-matrix-multiplication" of Triton 3.x; stated, not measured.
GROUP_TILE_ROWS = 8
# Below the smallest L2 of the GPUs in use here (6 MB, NVIDIA A40); an assumption.
ALWAYS_IN_L2_BYTES = 4 << 20

# Products of narrow types have a wider type: bf16 of fp8, int32 of int8 (torch._scaled_mm, torch._int_mm).
_OUTPUT_BYTES = {**ELEMENT_BYTES, "fp8": 2, "int8": 4}


def parse_tile(text: str, where: str) -> Tile:
    """Read `"64x64x32"` as (64, 64, 32). `where` opens the message of the `WorkloadError` for anything else."""
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() and 1 <= int(part[:6]) <= 4096 for part in parts):
        raise WorkloadError(
            f'{where}: tile must be three sizes from 1 to 4096, as in "64x64x32" (M x N x K); found {text[:40]!r}.'
        )
    m, n, k = (int(part) for part in parts)
    return m, n, k


def tile_count(m: int, n: int, tile: Tile) -> int:
    """Return the number of tiles of C, including the partial ones at the edges."""
    return ceil(m / tile[0]) * ceil(n / tile[1])


def matmul_flops(m: int, n: int, k: int) -> float:
    """Return the floating-point operations: one multiplication and one addition for each of M N K."""
    return 2.0 * m * n * k


def matmul_hbm_bytes(m: int, n: int, k: int, dtype: ElementType, tile: Tile) -> float:
    """Return the bytes read from and written to HBM under the reuse model; fp8 gives elements of 2 bytes, int8 of 4."""
    b_bytes = k * n * ELEMENT_BYTES[dtype]
    num_groups = ceil(m / (GROUP_TILE_ROWS * tile[0]))
    reads_of_b = 1 if b_bytes <= ALWAYS_IN_L2_BYTES else num_groups
    return float(m * k * ELEMENT_BYTES[dtype] + reads_of_b * b_bytes + m * n * _OUTPUT_BYTES[dtype])


def matmul_bytes(m: int, n: int, k: int, dtype: ElementType) -> int:
    """Return the bytes that A, B and C occupy in memory."""
    return (m * k + k * n) * ELEMENT_BYTES[dtype] + m * n * _OUTPUT_BYTES[dtype]


def matmul_l2_bytes(m: int, n: int, k: int, dtype: ElementType, tile: Tile) -> float:
    """Return the bytes that the CTAs read from L2: each tile loads its own rows of A and columns of B, without sharing."""
    return float(tile_count(m, n, tile) * (tile[0] + tile[1]) * k * ELEMENT_BYTES[dtype])


def stage_bytes(dtype: ElementType, tile: Tile) -> int:
    """Return the shared memory of one pipeline stage: a `tm x tk` piece of A and a `tk x tn` piece of B."""
    return (tile[0] * tile[2] + tile[2] * tile[1]) * ELEMENT_BYTES[dtype]
