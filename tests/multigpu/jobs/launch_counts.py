"""Ranks that train a stock job under the launch filter while torch.profiler counts kernels as well.

The argument is the job: ddp, fsdp2 or tp. Every rank prints `rank R: filter N, profiler N, collectives N`.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from counterpoint.cuda.ranks import join_ranks, leave
from counterpoint.launch_filter.control_block import ControlBlock, FilterState
from counterpoint.supervised.settings import DIRECTORY_VARIABLE

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # a job is run as a script: the root is not on the path
from benchmarks.jobs import stock_jobs

WIDTH, HEAD, TOKENS, LAYERS = 1024, 128, 512, 2
STEPS_BEFORE, STEPS_COUNTED = 3, 5


def state_of_filter() -> FilterState:
    block = ControlBlock(Path(os.environ[DIRECTORY_VARIABLE]) / f"{os.getpid()}.block")
    try:
        return block.state()
    finally:
        block.close()


def main(job: str) -> None:
    join_ranks()
    torch.manual_seed(0)
    blocks = nn.Sequential(*(stock_jobs.Block(WIDTH, HEAD) for _ in range(LAYERS))).to("cuda", torch.bfloat16)
    model = stock_jobs.parallelize(job, blocks, init_device_mesh("cuda", (dist.get_world_size(),)))
    optimizer = stock_jobs.make_optimizer(job, model)
    batch = torch.randn(1, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        model(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(STEPS_BEFORE):
        step()
    torch.cuda.synchronize()
    before = state_of_filter()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS_COUNTED):
            step()
        torch.cuda.synchronize()
    seen = state_of_filter().num_launches - before.num_launches
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    kernels = [event["name"] for event in events if event.get("cat") == "kernel"]
    collectives = sum(name.startswith("nccl") for name in kernels)
    line = f"rank {dist.get_rank()}: filter {seen}, profiler {len(kernels)}, collectives {collectives}\n"
    os.write(1, line.encode())


if __name__ == "__main__":
    main(sys.argv[1])
    leave(0)
