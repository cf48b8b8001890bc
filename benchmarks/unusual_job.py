"""Jobs that are unusual for live tuning, to be run under `counterpoint run` on GPUs; they mark their steps by hand.

    torchrun --nproc-per-node 2 -m benchmarks.unusual_job unsynchronized --steps 600
    torchrun --nproc-per-node 2 -m benchmarks.unusual_job changing --steps 900

`unsynchronized` never reads a result before its end, so the host runs as far ahead of the GPU as the driver lets it:
attention and matmuls beside all-gathers of 64 MiB. `changing` is `jobs/starved.py` with a batch that doubles half-way: other
grids, longer steps. Both print the GPU's time per step: of each quarter of their steps, and the median of the second half.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist

import counterpoint
from benchmarks.jobs import starved

GATHERED_BYTES = 64 << 20
STEPS_PER_TIME = 10
HEADS, TOKENS, WIDTH, LAYERS = 32, 8192, 4096, 4


def unsynchronized() -> Callable[[int], None]:
    """Each layer's all-gather is needed by its matmul, and runs beside the attention before it."""
    options = {"device": "cuda", "dtype": torch.bfloat16}
    query = torch.randn(1, HEADS, TOKENS, WIDTH // HEADS, **options)
    weight = torch.randn(WIDTH, WIDTH, **options)
    rows = torch.randn(TOKENS, WIDTH, **options)
    shard = torch.randn(GATHERED_BYTES // 2 // dist.get_world_size(), **options)
    gathered = torch.empty(GATHERED_BYTES // 2, **options)

    def step(_number: int) -> None:
        for _ in range(LAYERS):
            work = dist.all_gather_into_tensor(gathered, shard, async_op=True)
            torch.nn.functional.scaled_dot_product_attention(query, query, query)
            torch.mm(rows, weight)
            work.wait()
            gathered[:WIDTH].add_(1)
            for _ in range(2):
                torch.mm(rows, weight)

    return step


def changing(num_steps: int) -> Callable[[int], None]:
    """The starved job, with twice the tokens from the middle on."""
    matmul = starved.make_matmul("cuda")
    layers = {}
    for tokens in (2048, 4096):
        options = argparse.Namespace(device="cuda", tokens=tokens, width=8192, buckets=12)
        layers[tokens] = [starved.Layer(options, seed=1000 * dist.get_rank() + number) for number in range(7)]

    def step(number: int) -> None:
        present = layers[2048 if number < num_steps // 2 else 4096]
        starved.train_step(present[:6], present[6:], matmul)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=("unsynchronized", "changing"))
    parser.add_argument("--steps", type=int, default=600, help="a multiple of 40")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    step = unsynchronized() if options.job == "unsynchronized" else changing(options.steps)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(options.steps // STEPS_PER_TIME + 1)]
    began = time.perf_counter()
    events[0].record()
    for number in range(1, options.steps + 1):
        step(number - 1)
        counterpoint.step()
        if number % STEPS_PER_TIME == 0:
            events[number // STEPS_PER_TIME].record()
    issued_s = time.perf_counter() - began
    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        print(f"issued in {issued_s:.1f} s, done in {time.perf_counter() - began:.1f} s")
        times = [first.elapsed_time(second) / STEPS_PER_TIME for first, second in pairwise(events)]
        quarters = [statistics.fmean(times[place * len(times) // 4 : (place + 1) * len(times) // 4]) for place in range(4)]
        print("ms per step by quarter: " + ", ".join(f"{quarter:.3f}" for quarter in quarters))
        starved.print_last_half(times)
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(0)


if __name__ == "__main__":
    main()
