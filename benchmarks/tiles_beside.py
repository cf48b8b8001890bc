"""What matmuls lose beside CTAs that hold SMs, CTAs that copy within the memory, and NCCL's collectives.

    torchrun --nproc-per-node 1 -m benchmarks.tiles_beside -o tiles.json    # beside CTAs
    torchrun --nproc-per-node 2 -m benchmarks.tiles_beside -o tiles.json    # beside collectives of 256 MiB

Triton's matmuls of 6144^3 in several tiles, and of 64 tiles alone (8 x 8, an inner size of 32,768), in bf16. What runs
beside them is placed first and outlasts them; its CTAs leave no room on their SMs. A ratio is the time of a matmul there
over its time alone: the median of three, each of several calls after 50 ms of the same matmul.
"""

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from cuda.bindings import driver as cu

from benchmarks.on_gpus import join_with_options, largest, log, run_and_leave, save
from counterpoint.cuda.driver import check
from counterpoint.cuda.probes.matmuls import tile_matmul
from counterpoint.ops.light_kernels import compiled
from counterpoint.units import MIB

SOURCE = rb"""
extern "C" __global__ void side(const uint4* source, uint4* target, unsigned long long count, unsigned long long ns,
                                int loads, unsigned long long* moved) {
  unsigned long long begun, now, done = 0, at = 0;
  unsigned long long part = count / gridDim.x, first = part * blockIdx.x + threadIdx.x;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begun));
  do {
    if (!loads) __nanosleep(200);
    for (int turn = 0; loads && turn < 8; turn++) {
      uint4 kept[4];
      #pragma unroll
      for (int each = 0; each < 4; each++) if (each < loads) kept[each] = __ldcs(source + first + at + each * blockDim.x);
      #pragma unroll
      for (int each = 0; each < 4; each++) if (each < loads) __stcs(target + first + at + each * blockDim.x, kept[each]);
      done += loads;
      at = at + 8 * blockDim.x < part ? at + loads * blockDim.x : 0;
    }
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begun < ns);
  if (!threadIdx.x) atomicAdd(moved, done * blockDim.x * sizeof(uint4));
}
"""
SIZE, INNER, CALLS, ROUNDS = 6144, 32768, 4, 3
TILES = {  # rows, columns, depth, warps, stages
    "64x64x32, 4 stages": (64, 64, 32, 4, 4),
    "64x64x32, 2 stages": (64, 64, 32, 4, 2),
    "64x64x64, 2 stages": (64, 64, 64, 4, 2),
    "64x128x32, 4 stages": (64, 128, 32, 4, 4),
    "128x64x64, 3 stages": (128, 64, 64, 4, 3),
    "256x64x32, 3 stages": (256, 64, 32, 8, 3),
    "128x128x32, 4 stages": (128, 128, 32, 8, 4),
    "128x128x32, 2 stages": (128, 128, 32, 8, 2),
    "128x128x64, 3 stages": (128, 128, 64, 8, 3),
}
FEW = ("64x64x32, 2 stages", "64x64x32, 4 stages", "128x128x32, 2 stages", "128x128x64, 3 stages")
SIDES = ((24, 544, 0), (24, 544, 1), (24, 544, 4), (8, 544, 0), (8, 544, 1), (8, 544, 4), (32, 640, 0), (32, 640, 1))
SHARED_BYTES = 205 * 1024  # of a CTA beside a matmul: no other fits on its SM
Begin = Callable[[float], None]  # begins what runs beside, for so many microseconds


def matmuls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Each matmul by its name."""
    for name, (tm, tn, tk, warps, stages) in TILES.items():
        for label, m, n, k in ((name, SIZE, SIZE, SIZE), (f"64 tiles of {name}", 8 * tm, 8 * tn, INNER)):
            if m == SIZE or name in FEW:
                a, b, c = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (k, n), (m, n)))
                launch = tile_matmul[(m // tm * (n // tn),)]
                yield label, partial(launch, a, b, c, n, k, tm, tn, tk, num_warps=warps, num_stages=stages)


class SideCtas:
    """CTAs that hold their SMs, or copy within the memory there."""

    def __init__(self) -> None:
        major, minor = torch.cuda.get_device_capability()
        module = check("Loading a kernel", cu.cuModuleLoadData(compiled(SOURCE, f"sm_{major}{minor}")))
        self._function = check("Finding a kernel", cu.cuModuleGetFunction(module, b"side"))
        shared = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check("Raising shared memory", cu.cuFuncSetAttribute(self._function, shared, SHARED_BYTES))
        self._data = torch.ones(2, 1 << 28, device="cuda")
        self.moved = torch.zeros(1, device="cuda", dtype=torch.int64)
        self.stream = torch.cuda.Stream()

    def begin(self, side: tuple[int, int, int], duration_us: float) -> None:
        """Launch so many CTAs of so many threads, whose threads have so many loads on their way, or none."""
        ctas, threads, loads = side
        source, target = (each.data_ptr() for each in self._data)
        values = (source, target, self._data[0].numel() // 4, round(1000 * duration_us), loads, self.moved.data_ptr())
        types: Any = (*[ctypes.c_ulonglong] * 4, ctypes.c_int, ctypes.c_ulonglong)
        handle = cu.CUstream(self.stream.cuda_stream)
        check(
            "Launching a kernel",
            cu.cuLaunchKernel(self._function, ctas, 1, 1, threads, 1, 1, SHARED_BYTES, handle, (values, types), 0),
        )


def time_us(issue: Callable[[], object], begin: Begin | None = None, side_us: float = 0.0) -> float:
    """Time of one of several calls in a row, alone or beside what `begin` begins, which lasts `side_us`."""
    end = time.monotonic() + 0.05
    while time.monotonic() < end:
        issue()
        torch.cuda.synchronize()
    if begin is not None:
        begin(side_us)
        time.sleep(0.0002)
    issue()
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    for _ in range(CALLS):
        issue()
    ended.record()
    torch.cuda.synchronize()
    return float(1000 * begun.elapsed_time(ended)) / CALLS


def collectives() -> dict[str, Begin]:
    """Collectives of high priority that follow each other on a stream of their own, by kind."""
    whole, other = (torch.randn(128 * MIB, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    part, stream = torch.empty_like(whole[: len(whole) // dist.get_world_size()]), torch.cuda.Stream()
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # else the matmul takes its SMs at each one's end
    first = {"group": dist.new_group(pg_options=options), "async_op": True}

    def begin(call: Callable[[], object], duration_us: float) -> None:
        dist.barrier()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(int(duration_us / 400) + 2):
                call()

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": partial(dist.all_reduce, whole, **first),
        "all_gather": partial(dist.all_gather_into_tensor, whole, part, **first),
        "all_to_all": partial(dist.all_to_all_single, other, whole, **first),
    }
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    return {kind: partial(begin, call) for kind, call in calls.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = join_with_options(parser, limit_s=200)
    if not dist.is_initialized():
        dist.init_process_group("nccl")  # of one rank, which logs and saves
    side = SideCtas() if dist.get_world_size() == 1 else None
    beside: dict[object, Begin] = {each: partial(side.begin, each) for each in SIDES} if side else {**collectives()}
    results: list[object] = []
    for name, issue in matmuls():
        issue()
        lone_us = _of_slowest(statistics.median(time_us(issue) for _ in range(ROUNDS)))
        side_us = 1.9 * (CALLS + 1) * lone_us + 300
        for what, begin in beside.items():
            if side:
                side.moved.zero_()
            found = _of_slowest(statistics.median(time_us(issue, begin, side_us) for _ in range(ROUNDS)))
            row = {
                "matmul": name,
                "beside": what,
                "lone_us": round(lone_us, 1),
                "us": round(found, 1),
                "ratio": found / lone_us,
            }
            if side:
                row["gb_per_s"] = side.moved.item() / ROUNDS / side_us / 1000
            results.append(row)
            log("   " + "  ".join(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
        save(options.output, results)


def _of_slowest(own_us: float) -> float:
    return float(largest([own_us])[0])


if __name__ == "__main__":
    run_and_leave(main)
