"""Two ranks that the script itself starts, as notebooks and `mp.spawn` do, after its process has made an optimizer.

started_ranks.py METHOD FOLDER: fork or spawn. The ranks meet in a file in FOLDER, and all-reduce their gradients themselves.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing, nn

NUM_STEPS, ELEMENTS = 8, 1 << 21  # 8 MiB: from each rank the 4 MiB that copies take


def train(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    weight = nn.Parameter(torch.zeros(ELEMENTS))
    optimizer = torch.optim.SGD([weight], 1.0)
    for _ in range(NUM_STEPS):
        weight.grad = torch.full_like(weight, float(rank + 1))
        dist.all_reduce(weight.grad)
        optimizer.step()
    assert torch.equal(weight, torch.full_like(weight, -3.0 * NUM_STEPS))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.optim.SGD(nn.Linear(4, 4).parameters(), 0.1)
    store = Path(sys.argv[2]) / "store"
    multiprocessing.start_processes(train, args=(str(store),), nprocs=2, start_method=sys.argv[1])
