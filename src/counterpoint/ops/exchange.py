"""An all-to-all by copy engines, for steps that others capture: blocks are pushed into the peers' memory, and no SM moves
them.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from counterpoint.errors import OperatorError
from counterpoint.ops.runtime import runtime_of


def open_exchange(purpose: str, block_bytes: int) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
    """A function that sends block p to rank p and gives the rows that came; the row of this rank is left alone.

    All ranks of the default group call it together; blocks are flat and have `block_bytes` each. Rows hold until the
    next call. Raises `OperatorError` where there is no peer access, or no symmetric memory.
    """
    group = dist.group.WORLD
    assert group is not None, "the process group was made before"
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    runtime = runtime_of(group.group_name, device)
    lane = runtime.lane(purpose)
    if lane is None:
        raise OperatorError(f"Copy engines cannot exchange blocks here: {runtime.obstacle}.")
    lane.reserve(block_bytes)

    def exchange(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        rows = lane.exchange(blocks, with_own=False)
        lane.release()
        return rows

    return exchange
