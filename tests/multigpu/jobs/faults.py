"""Two ranks that go wrong in the way named by the argument; each prints the one line a user would see and leaves with 2."""

import os
import sys

import torch
import torch.distributed as dist

from counterpoint.cuda.capture import capture
from counterpoint.cuda.ranks import join_ranks, leave
from counterpoint.errors import CounterpointError
from counterpoint.planner.on_gpu import tune_captured


def main(fault: str) -> None:
    rank = join_ranks()
    size = 1024 if fault == "different steps" and rank == 1 else 2048
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    buffer = torch.ones(1 << 20, device="cuda")
    repeats = 2 if fault == "different steps" and rank == 1 else 1

    def step() -> None:
        for _ in range(repeats):
            a @ a
        dist.all_reduce(buffer)

    captured = capture(step, limit_s=15)
    if fault == "a rank dies" and rank == 1:
        os._exit(9)
    tune_captured(captured, None)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except CounterpointError as problem:
        print(f"counterpoint: {problem}\n", end="", flush=True)  # in one write: ranks share it
        leave(2)
    leave(0)
