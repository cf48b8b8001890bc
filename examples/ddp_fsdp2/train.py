"""Plain DDP or FSDP2; `--copies` puts copy engines under it by one call.

torchrun --nproc-per-node 2 examples/ddp_fsdp2/train.py fsdp2
torchrun --nproc-per-node 2 examples/ddp_fsdp2/train.py fsdp2 --copies
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train on one batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("ddp", "fsdp2"))
    parser.add_argument("--copies", action="store_true", help="let copy engines do the collectives")
    parser.add_argument("--width", type=int, default=4096, help="features; a rank's part of a layer needs 4 MiB")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit("Start this with torchrun: torchrun --nproc-per-node 2 examples/ddp_fsdp2/train.py ddp")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(options.width, options.width), nn.GELU()) for _ in range(4))
    model: nn.Module = nn.Sequential(*blocks).to(device)

    in_use = None
    if options.kind == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if options.copies:
            from counterpoint.integrations import ddp  # noqa: PLC0415  the bare job does not know it

            in_use = ddp.register(model)
    else:
        for block in model:
            fully_shard(block)
        model = fully_shard(model)
        if options.copies:
            from counterpoint.integrations import fsdp2  # noqa: PLC0415

            in_use = fsdp2.use_copy_engines(model)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(64, options.width, device=device)
    for _ in range(options.steps):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}", *([] if in_use is None else [in_use]), sep="\n")
    # if DDP's reducer is the last to hold the group, its end may wait for a thread of gloo that waits for Python's lock
    del model, optimizer, in_use
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
