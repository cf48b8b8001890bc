"""Ranks of which one dies within a training step; the others print the one line a user would see and leave with 2.

The first argument names the integration; a second one says on which pretended host each rank is. With GPUs over NCCL and
copy engines, without over gloo.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from counterpoint.integrations import collectives, ddp, fsdp2
from counterpoint.ops import peer_access

LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
DEVICE = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")
LIMIT = timedelta(seconds=10)


def stay_away(_gradient: torch.Tensor) -> None:
    """A CPU rank dies; a GPU one only stays away until the others are done, for torchrun ends all ranks when one dies."""
    if DEVICE.type == "cuda":
        distributed_c10d._get_default_store().wait(["done"], timedelta(seconds=60))
    os._exit(9)


class Layers(nn.Module):
    """Rank 1 does not come back from its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, given: torch.Tensor, *, is_last: bool) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            given = torch.tanh(layer(given))
            if is_last and number == 1 and dist.get_rank() == 1:
                given.register_hook(stay_away)
        return given


def build(name: str, across_hosts: str) -> nn.Module:
    model = Layers().to(DEVICE)
    if name == "ddp":
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.001)
        ddp.register(wrapped, least_part_bytes=0, least_piece_bytes=0, across_hosts=across_hosts)
        return wrapped
    if name == "collectives":  # gradients averaged by the job itself
        collectives.replace(least_part_bytes=0, across_hosts=across_hosts)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda found: dist.all_reduce(found.grad, op=dist.ReduceOp.AVG))
        return model
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    fsdp2.use_copy_engines(model, least_part_bytes=0, across_hosts=across_hosts)
    return model


def main(name: str, layout: str = "") -> None:
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
        dist.init_process_group("nccl", device_id=DEVICE, timeout=LIMIT)
    else:
        meeting, rank = f"file://{os.environ['MEETING_FILE']}", int(os.environ["RANK"])
        dist.init_process_group("gloo", meeting, rank=rank, world_size=int(os.environ["WORLD_SIZE"]), timeout=LIMIT)
    if layout:
        peer_access.BOOT_ID = Path(f"{os.environ['MEETING_FILE']} of host {layout[dist.get_rank()]}")
        peer_access.BOOT_ID.write_text(layout[dist.get_rank()])
    model = build(name, "always" if layout else "auto")
    given = torch.ones(2, 64, device=DEVICE)
    for number in range(4):
        model(given, is_last=number == 2).sum().backward()
        model.zero_grad()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception as problem:
        print(f"{type(problem).__name__}: {problem}", flush=True)
        distributed_c10d._get_default_store().set("done", "")
        os._exit(2)
    os._exit(0)
