"""An eager job without Counterpoint: four Triton matmuls, each beside the collective of the one before.

torchrun --nproc-per-node 2 benchmarks/jobs/tiled_chain.py [COLLECTIVE] [STEPS]
"""

import statistics
import sys
import time

import torch
import torch.distributed as dist
import triton
import triton.language as tl

ROWS, COLUMNS, INNER, ELEMENTS = 6144, 5120, 7168, 160 << 20
TILE = (128, 64, 64)


@triton.jit
def matmul(a, b, c, n, k, tm: tl.constexpr, tn: tl.constexpr, tk: tl.constexpr):  # noqa: PLR0917  Triton passes by position
    """C = A B; the CTAs of 8 rows of tiles share what L2 holds."""
    tiles_n = n // tn
    group = tl.program_id(0) // (8 * tiles_n)
    within = tl.program_id(0) % (8 * tiles_n)
    rows = (group * 8 + within % 8) * tm + tl.arange(0, tm)
    columns = within // 8 * tn + tl.arange(0, tn)
    inner = tl.arange(0, tk)
    total = tl.zeros((tm, tn), tl.float32)
    for first in range(0, k, tk):
        left = tl.load(a + rows[:, None] * k + first + inner[None, :])
        total = tl.dot(left, tl.load(b + (first + inner)[:, None] * n + columns[None, :]), total)
    tl.store(c + rows[:, None] * n + columns[None, :], total.to(tl.bfloat16))


def main() -> None:
    kind = sys.argv[1] if len(sys.argv) > 1 else "all_reduce"
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 60
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    options = {"device": "cuda", "dtype": torch.bfloat16}
    a, b, c = (torch.randn(*each, **options) for each in ((ROWS, INNER), (INNER, COLUMNS), (ROWS, COLUMNS)))
    given, got = torch.randn(ELEMENTS, **options), torch.empty(ELEMENTS, **options)
    part = ELEMENTS // dist.get_world_size()
    issue = {
        "all_reduce": lambda: dist.all_reduce(given, async_op=True),
        "all_gather": lambda: dist.all_gather_into_tensor(got, given[:part], async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(got[:part], given, async_op=True),
        "all_to_all": lambda: dist.all_to_all_single(got, given, async_op=True),
    }[kind]
    parameter = torch.nn.Parameter(torch.zeros(1, device="cuda"))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    parameter.grad = torch.zeros_like(parameter)
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        works = []
        for _ in range(4):
            matmul[(ROWS // TILE[0] * (COLUMNS // TILE[1]),)](a, b, c, COLUMNS, INNER, *TILE, num_warps=4, num_stages=3)
            works.append(issue())
        for work in works:
            work.wait()
        optimizer.step()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    if dist.get_rank() == 0:
        late = times[steps // 2 :]
        print(f"{kind}: {statistics.median(late):.3f} ms a step, the median of the last {len(late)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
