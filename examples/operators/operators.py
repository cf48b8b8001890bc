"""Operators on several ranks, beside torch's own collectives and matmuls.

    torchrun --nproc-per-node 2 examples/operators/operators.py

Each rank takes a GPU where there are GPUs, and else the CPU, at a small size that gains nothing. Every product is made
twice: by the schedule that is picked for its sizes, and by one that cuts each rank's block in two.
"""

import os
import sys

import torch
import torch.distributed as dist

from counterpoint import ops
from counterpoint.schedule import ScheduleDescription


def main() -> None:
    """All-gather + matmul, then matmul + reduce-scatter of its product."""
    if "RANK" not in os.environ:
        sys.exit("Start this with torchrun: torchrun --nproc-per-node 2 examples/operators/operators.py")
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_rows, num_inner, num_columns = (8192, 4096, 3072) if on_gpu else (64, 32, 16)
    options = {"device": "cuda", "dtype": torch.bfloat16} if on_gpu else {"device": "cpu", "dtype": torch.float32}

    torch.manual_seed(rank)
    shard = torch.randn(num_rows // num_ranks, num_inner, **options)
    weight = torch.randn(num_inner, num_columns, **options) / num_inner**0.5
    back = torch.randn(num_columns, num_inner, **options) / num_columns**0.5

    gathered = [torch.empty_like(shard) for _ in range(num_ranks)]
    dist.all_gather(gathered, shard)
    wide = torch.cat(gathered) @ weight
    summed = wide @ back
    dist.all_reduce(summed)
    narrow = summed.chunk(num_ranks)[rank]

    for schedule in (None, ScheduleDescription(pattern="all_peers", chunks=2)):
        gather = ops.all_gather_matmul(shard, weight, schedule=schedule)
        scatter = ops.matmul_reduce_scatter(wide, back, schedule=schedule)
        for name, found, expected in (("all_gather_matmul", gather, wide), ("matmul_reduce_scatter", scatter, narrow)):
            is_equal = torch.allclose(found, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())
            if rank == 0:
                print(f"{name}, {'as asked' if schedule else 'as picked'}: equal to torch's within rounding: {is_equal}")

    if rank == 0:
        for entry in ops.explain():
            print(f"{entry.name}: {entry.schedule.label()}, because {entry.reason}")
    ops.release()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
