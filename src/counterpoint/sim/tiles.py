"""How many tiles the CTAs of a persistent matmul take in turn.

Such a kernel has a CTA for each SM, and each takes the next tile when it has done one. So it takes whole rounds of tiles:
512 tiles are 4 rounds on 132 SMs and 5 on the 108 that a collective of 24 CTAs leaves. Measured on an H200 beside CTAs that
only hold SMs: 256 tiles take 1.5 times as long on 124 SMs and on 100, 512 tiles 1.3 and 1.25 times (docs/simulator.md).

cuBLAS says the size of a tile in the kernel's name. Where the sizes of the matrices are not known, the number of rounds
follows from the kernel's time and that of a usual tile.
"""

import math
import re

from counterpoint.step import Kernel

TILE_IN_NAME = re.compile(
    r"^nvjet_\w*?_(\d+)x(\d+)_"
)  # of cuBLAS 12 and 13: columns of the product first, as it counts them
USUAL_FILL = (
    0.97  # of the last round and all before: 256 of 264, 512 of 528 and 1,664 of 1,716 tiles in kernels of 2, 4 and 13
)


def num_tiles(kernel: Kernel, num_resident: int, lone_us: float, usual_tile_us: float) -> int:
    """Tiles of a persistent matmul of which `num_resident` CTAs live at once; 0 for a kernel without tiles."""
    if not kernel.is_work_sharing or kernel.character != "matmul":
        return 0
    named = TILE_IN_NAME.match(kernel.name)
    if named and kernel.matmul_sizes is not None:
        rows, _, columns = kernel.matmul_sizes
        return math.ceil(columns / int(named[1])) * math.ceil(rows / int(named[2]))
    num_rounds = max(1, round(lone_us / usual_tile_us))
    return max(num_resident, round(num_rounds * num_resident * USUAL_FILL))
