"""A feed-forward network, split by PyTorch's tensor parallelism with sequence parallelism; one call overlaps it.

torchrun --nproc-per-node 2 examples/tensor_parallel/train.py
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

from counterpoint.integrations import tensor_parallel


class FeedForward(nn.Module):
    """Two matmuls into the hidden features, one out of them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`tokens`: (batch, sequence, width)."""
        return self.down(nn.functional.silu(self.gate(tokens)) * self.up(tokens))


def main() -> None:
    """Ten steps on one batch; each rank holds a part of the sequence."""
    if "RANK" not in os.environ:
        sys.exit("Start this with torchrun: torchrun --nproc-per-node 2 examples/tensor_parallel/train.py")
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = "cuda" if on_gpu else "cpu"
    width, hidden, tokens = (4096, 14336, 8192) if on_gpu else (64, 128, 32)
    torch.manual_seed(0)
    model = nn.Sequential(FeedForward(width, hidden), FeedForward(width, hidden)).to(device)
    for block in model:
        plan = {
            "": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            **dict.fromkeys(("gate", "up"), ColwiseParallel()),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, init_device_mesh(device, (dist.get_world_size(),)), plan)
    overlapped = tensor_parallel.overlap(model)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    batch = torch.randn(1, tokens // dist.get_world_size(), width, device=device)
    for _ in range(10):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}", overlapped, sep="\n")
    overlapped.undo()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
