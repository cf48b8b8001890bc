"""The kernels beside copies: one adds the blocks that ranks sent, one copies a rank's own part of a gather."""

import math
from typing import final

import msgspec

from counterpoint.step import Collective, Footprint, Kernel
from counterpoint.units import US_PER_S

# The kernel that adds blocks (`cuda/sum_kernel.py`), as Triton 3.6 compiles it for four blocks on an H100
SUM_FOOTPRINT = Footprint(num_ctas=1, threads_per_cta=256, registers_per_thread=40, dynamic_shared_bytes=0)
SUM_BYTES = 8192  # of each block that a CTA adds at once, in half precision
SUM_CTAS_PER_SM = 2


@final
class BlockKernels:
    """Such kernels on one GPU. A CTA takes its turns one after the other, each with a part of every block.

    If all CTAs together would move more than the memory delivers, the memory determines their time.
    """

    def __init__(self, num_sms: int, block_us: float, hbm_bytes_per_s: float) -> None:
        self._num_sms, self._block_us, self._hbm_bytes_per_s = num_sms, block_us, hbm_bytes_per_s

    def total(self, collective: Collective, *, in_job: bool) -> Kernel:
        """Return the kernel that sums the ranks' blocks: it reads every block and writes the sum. In a job it writes that of
        an all-reduce to two places, one of which the others fetch.
        """
        num_blocks = collective.group_size + (2 if in_job and collective.collective == "all_reduce" else 1)
        return self._kernel(f"sum of {collective.name}", collective, num_blocks)

    def own_copy(self, collective: Collective) -> Kernel:
        """Return the kernel that copies a rank's own part of an all-gather to its place."""
        return self._kernel(f"own part of {collective.name}", collective, 2)  # it is read and written

    def _kernel(self, name: str, collective: Collective, num_blocks: int) -> Kernel:
        """Return a kernel that reads or writes so many blocks."""
        block_bytes = collective.num_bytes / collective.group_size
        num_turns = max(1, math.ceil(block_bytes / SUM_BYTES))
        num_ctas = min(num_turns, SUM_CTAS_PER_SM * self._num_sms)
        memory_us = US_PER_S * num_ctas * SUM_BYTES / self._hbm_bytes_per_s
        turn_us = num_blocks * max(self._block_us, memory_us)
        return Kernel(
            name=name,
            stream=collective.stream,
            footprint=msgspec.structs.replace(SUM_FOOTPRINT, num_ctas=num_ctas),
            character="other",
            cta_us=turn_us * num_turns / num_ctas,
            hbm_bytes=num_blocks * block_bytes,
        )
