"""Ranks that use the operators wrongly in the way named by the argument; each prints the one line a user would see."""

import os
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from counterpoint import ops
from counterpoint.errors import CounterpointError
from counterpoint.schedule import ScheduleDescription

LIMIT = timedelta(seconds=10)
CHUNKED = ScheduleDescription(chunks=2)


def call(rows: int, dtype: torch.dtype = torch.bfloat16) -> None:
    shard = torch.ones(rows, 512, device="cuda", dtype=dtype)
    weight = torch.ones(512, 256, device="cuda", dtype=torch.bfloat16)
    ops.all_gather_matmul(shard, weight, schedule=CHUNKED)


def main(fault: str) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank), timeout=LIMIT)
    if fault == "shapes differ":
        call(64 + rank)
    if fault == "types differ":
        call(64, torch.float32 if rank == 1 else torch.bfloat16)
    if fault == "captured unseen":
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            call(64)
    if fault == "no memory":
        left = torch.cuda.mem_get_info()[0] - (256 << 20)
        ballast = torch.empty(left, dtype=torch.uint8, device="cuda") if rank == 1 else None
        call(1 << 20)
        del ballast
    if fault == "a rank stays away":
        store = distributed_c10d._get_default_store()
        call(64)
        torch.cuda.synchronize()
        if rank == 1:
            store.wait(["done"], timedelta(seconds=60))
            return
        for _ in range(3):
            call(64)
        torch.cuda.synchronize()
        try:
            call(64)
        finally:
            store.set("done", "")


if __name__ == "__main__":
    try:
        main(sys.argv[1])
        print("nothing was refused", flush=True)
    except CounterpointError as problem:
        print(f"counterpoint: {problem}", flush=True)
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
    os._exit(2)
