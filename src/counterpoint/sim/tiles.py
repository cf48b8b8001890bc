"""Tiles of matmuls: how many each CTA of a persistent one takes in turn, and which tile each CTA of another one has.

A persistent kernel has one CTA for each SM, and each CTA takes the next tile when it has finished one. So it takes whole
rounds of tiles: 512 tiles are 4 rounds on 132 SMs and 5 on the 108 that a collective of 24 CTAs leaves. Measured on an H100
beside CTAs that only hold SMs: 256 tiles take 1.5 times as long on 124 SMs and on 100, 512 tiles 1.3 and 1.25 times
(docs/simulator.md).

cuBLAS states the size of a tile in the kernel's name. If the sizes of the matrices are unknown, the number of rounds follows
from the kernel's time and that of a usual tile. The tile of other matmuls follows from their launch.
"""

import math
import re
from functools import lru_cache

from counterpoint.step import Footprint, Kernel
from counterpoint.value import Value

# names of cuBLAS 12 and 13: columns and rows of a tile, as it counts them, then depth and number of stages
TILE_IN_NAME = re.compile(r"^nvjet_\w*?_(\d+)x(\d+)_(\d+)x(\d+)_")
LEAST_TILE_BYTES = 4096  # a kernel with less keeps no tiles in shared memory; an assumption
LEAST_DEPTH_BYTES = 64  # of a stage: 32 elements of bf16, as in the shallowest tiles in common use; an assumption
DEPTHS_BYTES = (LEAST_DEPTH_BYTES, 128, 256)  # of stages, those in common use
USUAL_STAGES = 3  # Triton's default; a captured step and a trace do not say it
NUMBERS_OF_STAGES = (USUAL_STAGES, 4, 2, 5, 6)  # in the order in which they are tried
MOST_SPARE_BYTES = 1024  # barriers and alignment beside the stages
LEAST_EDGE = 16  # of a tile, as tensor cores multiply
USUAL_FILL = (
    0.97  # share filled of all rounds: 256 of 264, 512 of 528 and 1,664 of 1,716 tiles in kernels of 2, 4 and 13 rounds
)


def num_tiles(kernel: Kernel, num_resident: int, num_sms: int, lone_us: float, usual_tile_us: float) -> int:
    """Return the tiles of a persistent matmul with `num_resident` CTAs resident at once on `num_sms` SMs.

    Returns 0 for other kernels, and if some SMs hold more of its CTAs than others.
    """
    is_even = num_resident <= num_sms or num_resident % num_sms == 0
    if not kernel.is_work_sharing or kernel.character != "matmul" or not is_even:
        return 0
    known = _tiles_by_name(kernel, num_sms)
    if known is not None:
        return known
    num_rounds = max(1, round(lone_us / usual_tile_us))
    return max(num_resident, round(num_rounds * num_resident * USUAL_FILL))


def share_filled(kernel: Kernel, num_resident: int, num_sms: int) -> float:
    """Return the share of its rounds that a persistent matmul's tiles fill, relative to a usual one; 1 if it is unknown."""
    if not kernel.is_work_sharing or kernel.character != "matmul":
        return 1.0
    tiles = _tiles_by_name(kernel, num_sms)
    return 1.0 if tiles is None else tiles / (math.ceil(tiles / num_resident) * num_resident) / USUAL_FILL


def _tiles_by_name(kernel: Kernel, num_sms: int) -> int | None:
    """Return the tiles from cuBLAS's name of the kernel and the sizes of the matrices, or None unless both are known.

    cuBLAS launches no more CTAs than tiles: if it leaves more SMs empty than a cluster has, each CTA has one tile.
    """
    tile = TILE_IN_NAME.match(kernel.name)
    if tile is None:
        return None
    if kernel.matmul_sizes is None:
        footprint = kernel.footprint
        is_one_each = footprint.num_ctas <= num_sms - footprint.ctas_per_cluster - 1
        return footprint.num_ctas if is_one_each else None
    rows, _, columns = kernel.matmul_sizes
    return math.ceil(columns / int(tile[1])) * math.ceil(rows / int(tile[2]))


def tile_stages(kernel: Kernel) -> tuple[float, float]:
    """Return the number of stages in which a CTA keeps its tiles, and the bytes of one; cuBLAS's names say the number.

    If nothing says it, it follows from the tile, or is Triton's default if no tile fits the footprint, or fewer if the
    shared memory holds fewer of the shallowest stages.
    """
    footprint = kernel.footprint
    tile = TILE_IN_NAME.match(kernel.name)
    if tile is not None:
        number = float(tile[4])
    elif kernel.stage_bytes is not None:
        number = footprint.shared_bytes / kernel.stage_bytes
    elif (found := tile_of(kernel)) is not None:
        number = float(found.num_stages)
    else:
        least_bytes = 2 * math.sqrt(_tile_area(footprint)) * LEAST_DEPTH_BYTES
        number = min(USUAL_STAGES, footprint.shared_bytes / least_bytes)
    number = max(1.0, number)
    return number, footprint.shared_bytes / number


class MatmulTile(Value, frozen=True, kw_only=True):
    """The edges of a matmul's tile, the longer one first, and the number of stages in which a CTA keeps its operands."""

    long: int
    short: int
    num_stages: int

    @property
    def reuse(self) -> float:
        """Multiplications and additions for each element that the CTA reads."""
        return 2 * self.long * self.short / (self.long + self.short)


def tile_of(kernel: Kernel) -> MatmulTile | None:
    """Return the tile of a matmul whose CTAs have one each, from its footprint; None if no tile in common use fits.

    Registers say how many results a CTA holds, and shared memory how many elements of both operands. Edges and depths of
    tiles are powers of two, so few tiles fit: of 61,440 bytes and 16,384 results only 256x64 with three stages of 32.
    """
    footprint = kernel.footprint
    if kernel.character != "matmul" or kernel.is_work_sharing or footprint.shared_bytes < LEAST_TILE_BYTES:
        return None
    known = kernel.stage_bytes and round(footprint.shared_bytes / kernel.stage_bytes)
    return _tile_that_fits(footprint.shared_bytes, _tile_area(footprint), (known,) if known else NUMBERS_OF_STAGES)


@lru_cache(maxsize=1024)  # a simulation asks several times for each matmul, and steps repeat theirs
def _tile_that_fits(shared_bytes: int, area: int, numbers_of_stages: tuple[int, ...]) -> MatmulTile | None:
    for number in numbers_of_stages:
        for depth_bytes in DEPTHS_BYTES:
            found = _edges(shared_bytes / number / depth_bytes, area, number, depth_bytes)
            if found is not None:
                return MatmulTile(long=found[0], short=found[1], num_stages=number)
    return None


def _edges(both: float, area: int, number: int, depth_bytes: int) -> tuple[int, int] | None:
    """Return the edges of a tile of this area whose sum is at most `both`, less what lies beside the stages."""
    for exponent in range(LEAST_EDGE.bit_length() - 1, area.bit_length() // 2 + 1):
        short = 1 << exponent
        long, left = divmod(area, short)
        if not left and long >= short and 0 <= (both - long - short) * number * depth_bytes <= MOST_SPARE_BYTES:
            return long, short
    return None


def _tile_area(footprint: Footprint) -> int:
    """Return the results that a CTA holds: a thread's are the largest power of two below its registers."""
    return footprint.threads_per_cta << ((max(2, footprint.registers_per_thread) - 1).bit_length() - 1)


def stages(kernel: Kernel) -> tuple[int, int] | None:
    """Return how many stages cuBLAS's kernel keeps, and how many steps of that depth a tile has; None if unknown.

    A stage is refilled once the next multiplication has started, so all stages but one are in flight.
    """
    tile = TILE_IN_NAME.match(kernel.name)
    if tile is None or kernel.matmul_sizes is None:
        return None
    return int(tile[4]), math.ceil(kernel.matmul_sizes[1] / int(tile[3]))
