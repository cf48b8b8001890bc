"""What cutting and overlapping cost on GPUs: the two losses behind every schedule, each alone, from static sizes.

torchrun --nproc-per-node 2 -m benchmarks.ops_losses -o losses.json

Decomposition: a matmul whole, and in 2, 4 and 8 pieces along its rows, its columns or its inner size (those are added
up), on one and on two streams. Contention: matmuls alone, copies to the next rank alone, and both at once, each long enough
to cover the other; all ranks do the same, so every GPU sends and receives. Short bursts run at full clock, long ones at the
power limit.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from cuda.bindings import driver as cu

from benchmarks.on_gpus import join_with_options, largest, log, run_and_leave, save
from benchmarks.ops_timing import time_interleaved
from counterpoint.cuda.driver import check
from counterpoint.measurement.values import half_width

SIZES = (  # rows, columns, inner
    (4096, 4096, 4096),
    (8192, 3072, 4096),
    (8192, 14336, 4096),
    (16384, 2560, 8192),
    (8192, 8192, 8192),
    (4096, 9216, 16384),
    (65536, 1024, 1024),
)
NUM_PIECES = (2, 4, 8)
COPY_BYTES = 64 << 20
BURSTS_US = (3000.0, 30000.0)  # at full clock, at the power limit
COVER = 1.3  # by how much what runs beside must outlast what is timed
PEAK_BYTES_PER_US, PEAK_FLOPS_PER_US = 3.6e5, 7e8  # rough, only to choose how many copies and matmuls cover a burst
ROUNDS, WARM_UPS, BURST_ROUNDS = 7, 2, 5
SPIN_CYCLES = 4_000_000
Sizes = tuple[int, int, int]


class Operands:
    """A matmul's matrices."""

    def __init__(self, sizes: Sizes) -> None:
        rows, columns, inner = self.sizes = sizes
        self.a = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
        self.b = torch.randn(inner, columns, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
        self.side = torch.cuda.Stream()

    def whole(self) -> None:
        torch.mm(self.a, self.b, out=self.out)

    def piece(self, dimension: str, number: int, count: int) -> None:
        """One of `count` equal pieces along a dimension."""
        size = self.sizes[("rows", "columns", "inner").index(dimension)]
        part = slice(number * size // count, (number + 1) * size // count)
        if dimension == "rows":
            torch.mm(self.a[part], self.b, out=self.out[part])
        elif dimension == "columns":
            torch.mm(self.a, self.b[:, part], out=self.out[:, part])
        elif number == 0:
            torch.mm(self.a[:, part], self.b[part], out=self.out)
        else:
            torch.addmm(self.out, self.a[:, part], self.b[part], out=self.out)

    def pieces(self, dimension: str, count: int, num_streams: int) -> None:
        """All pieces, taking turns on the streams."""
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        for number in range(count):
            with torch.cuda.stream(self.side if number % num_streams else current):
                self.piece(dimension, number, count)
        current.wait_stream(self.side)


class Copies:
    """Memory of the next rank, and the copies there."""

    def __init__(self) -> None:
        self._symmetric = symmetric_memory.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
        self._met = symmetric_memory.rendezvous(self._symmetric, dist.group.WORLD.group_name)
        self._peer = int(self._met.buffer_ptrs[(dist.get_rank() + 1) % dist.get_world_size()])
        self._own = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
        self.stream = torch.cuda.Stream()
        self._handle = cu.CUstream(self.stream.cuda_stream)

    def issue(self) -> None:
        """Issue one copy on its stream."""
        check("Copying", cu.cuMemcpyAsync(self._peer, self._own.data_ptr(), COPY_BYTES, self._handle))


def decomposition(sizes: Sizes) -> dict[str, object]:
    """Times in pieces over the time whole."""
    operands = Operands(sizes)
    calls: dict[str, Callable[[], object]] = {"whole": operands.whole}
    for count in NUM_PIECES:
        for dimension, most_streams in (("rows", 2), ("columns", 2), ("inner", 1)):
            for streams in range(1, most_streams + 1):
                calls[f"{dimension}/{count} on {streams}"] = lambda d=dimension, c=count, s=streams: operands.pieces(d, c, s)
    timed = time_interleaved(calls, ROUNDS, WARM_UPS)
    whole_us = timed["whole"].median_us
    ratios = {name: round(timing.median_us / whole_us, 4) for name, timing in timed.items() if name != "whole"}
    log(f"{sizes}: whole {whole_us:.0f} us;", ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items()))
    return {"loss": "decomposition", "sizes_m_n_k": sizes, "whole_us": round(whole_us, 2), "over_whole": ratios}


def contention(sizes: Sizes, burst_us: float, copies: Copies) -> dict[str, object]:
    """How much longer matmuls take beside copies, and copies beside matmuls."""
    operands = Operands(sizes)
    rows, columns, inner = sizes
    matmul_us = max(2.0 * rows * columns * inner / PEAK_FLOPS_PER_US, 10.0)
    num_matmuls = max(1, round(burst_us / matmul_us))
    num_copies = max(1, round(num_matmuls * matmul_us / (COPY_BYTES / PEAK_BYTES_PER_US)))
    more = {"matmuls": round(COVER * num_matmuls) + 1, "copies": round(COVER * num_copies) + 1}
    found: dict[str, list[tuple[float, float]]] = {}
    for number in range(1 + BURST_ROUNDS):
        for name, counts in (
            ("matmuls alone", (num_matmuls, 0)),
            ("matmuls beside copies", (num_matmuls, more["copies"])),
            ("copies alone", (0, num_copies)),
            ("copies beside matmuls", (more["matmuls"], num_copies)),
        ):
            times = _burst(operands, copies, counts)
            if number:
                found.setdefault(name, []).append(times)
    medians = {name: [statistics.median(column) for column in zip(*rounds, strict=True)] for name, rounds in found.items()}
    medians = dict(zip(medians, largest(list(medians.values())), strict=True))
    matmul, copy = (medians[f"{name} alone"][place] for place, name in enumerate(("matmuls", "copies")))
    beside, beside_copy = medians["matmuls beside copies"], medians["copies beside matmuls"]
    covered_us = [matmuls_us for matmuls_us, _ in found["matmuls beside copies"]]
    result = {
        "loss": "contention",
        "sizes_m_n_k": sizes,
        "burst_us": burst_us,
        "counts": [num_matmuls, num_copies],
        "matmuls_alone_us": round(matmul, 1),
        "matmuls_beside_us": round(beside[0], 1),
        "matmuls_beside_over_alone": round(beside[0] / matmul, 4),
        "is_matmul_covered": beside[1] >= beside[0],
        "copies_alone_gb_per_s": round(num_copies * COPY_BYTES / copy / 1e3, 1),
        "copies_beside_over_alone": round(beside_copy[1] / copy, 4),
        "is_copy_covered": beside_copy[0] >= beside_copy[1],
        "spread": round(half_width(covered_us) / statistics.median(covered_us), 4),
    }
    log(" ".join(f"{name} {value}" for name, value in result.items() if name != "loss"))
    return result


def _burst(operands: Operands, copies: Copies, counts: tuple[int, int]) -> tuple[float, float]:
    """Matmuls and copies that start together; microseconds until the last of each."""
    num_matmuls, num_copies = counts
    current = torch.cuda.current_stream()
    start, multiplied, copied = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda._sleep(SPIN_CYCLES)
    dist.all_reduce(torch.ones(1, device="cuda"))
    start.record()
    copies.stream.wait_event(start)
    for number in range(max(num_matmuls, num_copies)):
        if number < num_matmuls:
            operands.whole()
        if number < num_copies:
            copies.issue()
    multiplied.record()
    copied.record(copies.stream)
    current.wait_stream(copies.stream)
    torch.cuda.synchronize()
    return 1000 * start.elapsed_time(multiplied), 1000 * start.elapsed_time(copied)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments = join_with_options(parser, limit_s=120)
    results = []
    for sizes in SIZES:
        results.append(decomposition(sizes))
        save(arguments.output, results)
    copies = Copies()
    for sizes in SIZES:
        for burst_us in BURSTS_US:
            results.append(contention(sizes, burst_us, copies))
            save(arguments.output, results)


if __name__ == "__main__":
    run_and_leave(main)
