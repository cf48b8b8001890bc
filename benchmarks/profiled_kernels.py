"""What torch's profiler costs: how much longer kernels take while it records, and how much longer the host's launches.

    python -m benchmarks.profiled_kernels -o profiled_kernels.json

Each operator of `library_operators`, and softmax of several sizes, runs twelve times in a row between two events, before,
while and after the profiler records the GPU. So does a kernel whose CTAs do nothing: what it takes longer is the time until
an SM has its next CTA. Launches are timed on kernels so short that the GPU waits for the host.
"""

import argparse
import faulthandler
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch.profiler import ProfilerActivity, profile

from benchmarks.library_operators import OPERATORS
from benchmarks.on_gpus import log, save

IN_A_ROW, BLOCKS, LAUNCHES, LIMIT_S = 12, 5, 500, 200
SOFTMAX = ((8192, 16384), (16384, 16384), (24576, 16384), (16384, 4096), (65536, 2048), (65536, 1024), (8192, 32768))
EMPTY_CTAS, EMPTY_WARPS = 1 << 18, 32  # an SM has room for two
HEAD_START_CYCLES = 20_000_000  # of a kernel that only waits, so that the host is ahead
Call = Callable[[], object]


@triton.jit
def leave(given, number):
    """End at once, since `number` is 0."""
    if number != 0:
        tl.store(given + tl.program_id(0), number)


def operators() -> Iterator[tuple[str, Call]]:
    """A name and a call: CTAs that do nothing, softmax by size, then the library's operators."""
    unused = torch.zeros(8, device="cuda")
    name = f"{EMPTY_CTAS} CTAs of {32 * EMPTY_WARPS} threads that do nothing"
    yield name, lambda: leave[(EMPTY_CTAS,)](unused, 0, num_warps=EMPTY_WARPS)
    for rows, columns in SOFTMAX:
        given = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        yield f"softmax {rows}x{columns}", lambda given=given: torch.softmax(given, -1)
    for name, make in OPERATORS.items():
        yield name, make()
        torch.cuda.empty_cache()


def in_a_row_us(call: Call) -> float:
    """The median time of a call on the GPU, without the gaps in which the host launches."""
    found = []
    for _ in range(BLOCKS):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START_CYCLES)
        begun.record()
        for _ in range(IN_A_ROW):
            call()
        ended.record()
        torch.cuda.synchronize()
        found.append(1000 * begun.elapsed_time(ended) / IN_A_ROW)
    return statistics.median(found)


def kernel(name: str, call: Call) -> dict[str, Any]:
    """One operator's times in microseconds: bare, while it is profiled, and what the profiler says of its kernels."""
    for _ in range(4):
        call()
    before_us = in_a_row_us(call)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        profiled_us = in_a_row_us(call)
    after_us = in_a_row_us(call)
    # the kernel that only waits is called spin_kernel
    kernels = [each for each in recorded.events() if "spin" not in each.name and each.device_type.name == "CUDA"]
    said_us = sum(each.device_time_total for each in kernels) / (BLOCKS * IN_A_ROW)
    bare_us = min(before_us, after_us)
    times = {"before_us": before_us, "after_us": after_us, "bare_us": bare_us}
    return {"name": name, **times, "profiled_us": profiled_us, "said_us": said_us}


def launches() -> Iterator[dict[str, Any]]:
    """The host's time for a launch, in microseconds, without the profiler and under its options."""
    small = torch.zeros(8, device="cuda")
    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    options: dict[str, dict[str, Any] | None] = {
        "bare": None,
        "GPU": {"activities": both[1:]},
        "CPU and GPU": {"activities": both},
        "CPU and GPU, shapes": {"activities": both, "record_shapes": True},
        "CPU and GPU, stacks": {"activities": both, "with_stack": True},
        "bare again": None,
    }
    for name, chosen in options.items():
        found = []
        with nullcontext() if chosen is None else profile(**chosen):
            for _ in range(BLOCKS):
                torch.cuda.synchronize()
                begun = time.perf_counter()
                for _ in range(LAUNCHES):
                    small.add_(1)
                found.append(1e6 * (time.perf_counter() - begun) / LAUNCHES)
        yield {"name": f"launch, {name}", "host_us": statistics.median(found)}


def main() -> None:
    """Measure all, and print shares of the time without the profiler."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    rows = []
    for row in launches():
        rows.append(row)
        log(f"{row['name']}: {row['host_us']:.1f} us")
    for name, call in operators():
        rows.append(kernel(name, call))
        profiled, said = (rows[-1][each] / rows[-1]["bare_us"] for each in ("profiled_us", "said_us"))
        log(f"{name}: {rows[-1]['bare_us']:.1f} us; profiled {profiled:.3f} times, its kernels {said:.3f} times as long")
        save(options.output, rows)


if __name__ == "__main__":
    main()
