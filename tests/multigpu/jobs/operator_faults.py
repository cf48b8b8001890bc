"""Ranks that use the operators wrongly in the way named by the argument; each prints the one line a user would see."""

import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from counterpoint import ops
from counterpoint.errors import CounterpointError
from counterpoint.ops.runtime import runtime_of_group
from counterpoint.schedule import ScheduleDescription

LIMIT = timedelta(seconds=10)
MOST_S = 60  # a fault that hangs shows where, and ends
TO_PRINT_S = 2  # torchrun ends the other ranks as soon as one has ended
CHUNKED = ScheduleDescription(chunks=2)
# calls that rank 0 makes alone: few, or more than the driver's queues hold, so that the host blocks while it issues one; and
# whether there is GPU memory left
FEW, MANY = 3, 5000
STAYS_AWAY = {
    "a rank stays away": (FEW, True),
    "a rank stays away from a host that goes on": (MANY, True),
    "a rank stays away from a host without memory": (MANY, False),
}


def call(rows: int, dtype: torch.dtype = torch.bfloat16) -> None:
    ops.all_gather_matmul(*operands(rows, dtype), schedule=CHUNKED)


def operands(rows: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's shard and weight."""
    return (
        torch.ones(rows, 512, device="cuda", dtype=dtype),
        torch.ones(512, 256, device="cuda", dtype=torch.bfloat16),
    )


def main(fault: str) -> None:
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank), timeout=LIMIT)
    if fault == "shapes differ":
        call(64 + rank)
    if fault == "types differ":
        call(64, torch.float32 if rank == 1 else torch.bfloat16)
    if fault == "captured first":
        capture(lambda: call(64))
    if fault == "captured unseen":
        call(64)
        capture(lambda: call(96))
    if fault == "captured lane":
        call(64)
        capture(lambda: runtime_of_group(None).lane("a test"))
    if fault in STAYS_AWAY:
        stay_away(rank, *STAYS_AWAY[fault])


def all_but(num_bytes: int) -> torch.Tensor:
    """Takes the GPU's memory up to so much."""
    return torch.empty(torch.cuda.mem_get_info()[0] - num_bytes, dtype=torch.uint8, device="cuda")


def capture(what: Callable[[], object]) -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        what()


def stay_away(rank: int, num_calls: int, has_memory: bool) -> None:
    """Rank 1 comes to the first call only; rank 0 goes on, runs what it never ran, waits for the GPU and calls once more."""
    store = distributed_c10d._get_default_store()
    call(64)
    torch.cuda.synchronize()
    if rank == 1:
        store.wait(["done"], timedelta(seconds=100))
        return
    ballast = None if has_memory else all_but(128 << 20)
    try:
        for _ in range(num_calls):
            call(64)
        torch.special.i0(torch.ones(64, device="cuda"))  # a kernel that is loaded now
        torch.cuda.synchronize()
        call(64)
        del ballast
    finally:
        store.set("done", "")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(MOST_S, exit=True)
    try:
        main(sys.argv[1])
        print("nothing was refused", flush=True)
    except CounterpointError as problem:
        print(f"counterpoint: {problem}\n", end="", flush=True)  # in one write: ranks share it
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
    time.sleep(TO_PRINT_S)
    os._exit(2)
