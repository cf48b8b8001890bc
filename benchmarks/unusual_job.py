"""Jobs that are unusual for live tuning, to be run under `counterpoint run` on GPUs; they mark their steps by hand.

    torchrun --nproc-per-node 2 -m benchmarks.unusual_job unsynchronized --steps 600
    torchrun --nproc-per-node 2 -m benchmarks.unusual_job changing --steps 900

`unsynchronized` never reads a result before its end, so the host runs as far ahead of the GPU as the driver lets it:
attention and matmuls beside all-gathers of 64 MiB. `changing` is `examples/starved.py` whose batch doubles half-way: other
grids, longer steps. Both print the GPU's time per step, of each quarter of their steps.
"""

import argparse
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import counterpoint
from benchmarks.example_jobs import load_example

GATHERED_BYTES = 64 << 20
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
    starved = load_example("starved")
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
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    step = unsynchronized() if options.job == "unsynchronized" else changing(options.steps)
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(5)]
    began, most_behind = time.perf_counter(), 0.0
    ends[0].record()
    for number in range(options.steps):
        step(number)
        counterpoint.step()
        if (number + 1) % (options.steps // 4) == 0:
            ends[(number + 1) // (options.steps // 4)].record()
    most_behind = time.perf_counter() - began
    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        total = time.perf_counter() - began
        quarters = [ends[place].elapsed_time(ends[place + 1]) / (options.steps // 4) for place in range(4)]
        print(f"issued in {most_behind:.1f} s, done in {total:.1f} s")
        print("ms per step by quarter: " + ", ".join(f"{quarter:.3f}" for quarter in quarters), flush=True)
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(0)


if __name__ == "__main__":
    main()
