"""What copies between GPUs deliver, and what they wait for: figures behind the heuristic's constants.

torchrun --nproc-per-node 4 -m benchmarks.ops_copies

Push and pull by size and number of streams; a copy beside a matmul that fills every SM, to a peer and within a GPU
(does it need an SM?); the sum of partial products; matmuls in pieces on one and two streams;
accumulating matmuls.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from cuda.bindings import driver as cu

from benchmarks.on_gpus import join, log, run_and_leave
from benchmarks.ops_timing import time_interleaved
from counterpoint.cuda.driver import check

NUM_BYTES = 256 << 20
SIZES = (1 << 20, 4 << 20, 16 << 20, 64 << 20)
ROUNDS = 9


class Copies:
    """Symmetric memory, and copies by address."""

    def __init__(self) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.local = symmetric_memory.empty(NUM_BYTES, dtype=torch.uint8, device="cuda")
        self._handle = symmetric_memory.rendezvous(self.local, dist.group.WORLD.group_name)
        self.peers = [int(address) for address in self._handle.buffer_ptrs]
        self.own = torch.empty(NUM_BYTES, dtype=torch.uint8, device="cuda")
        self.streams = [torch.cuda.Stream() for _ in range(3)]

    def copy(self, num_bytes: int, *, is_push: bool, num_streams: int = 1, num_peers: int = 1) -> Callable[[], None]:
        """To or from the next `num_peers` ranks, split over the streams."""

        def call() -> None:
            current = torch.cuda.current_stream()
            used = self.streams[:num_streams]
            for stream in used:
                stream.wait_stream(current)
            part = num_bytes // num_streams
            for turn in range(1, num_peers + 1):
                peer = self.peers[(self.rank + (-turn if is_push else turn)) % self.num_ranks]
                for number, stream in enumerate(used):
                    ends = (peer + number * part, self.own.data_ptr() + number * part)
                    target, source = ends if is_push else ends[::-1]
                    check("Copying", cu.cuMemcpyAsync(target, source, part, cu.CUstream(stream.cuda_stream)))
            for stream in used:
                current.wait_stream(stream)

        return call


def bandwidth(copies: Copies) -> None:
    peers = copies.num_ranks - 1
    for num_bytes in SIZES:
        calls = {
            "push": copies.copy(num_bytes, is_push=True),
            "pull": copies.copy(num_bytes, is_push=False),
            "push 3 streams": copies.copy(num_bytes, is_push=True, num_streams=3),
            "push all peers": copies.copy(num_bytes, is_push=True, num_peers=peers),
            "pull all peers": copies.copy(num_bytes, is_push=False, num_peers=peers),
        }
        timed = time_interleaved(calls, ROUNDS)
        cells = []
        for name, timing in timed.items():
            total = num_bytes * (peers if "all" in name else 1)
            cells.append(f"{name} {timing.median_us:.0f} us {total / timing.median_us / 1e3:.0f} GB/s")
        log(f"{num_bytes >> 20} MiB:", ", ".join(cells))


def beside_a_matmul(copies: Copies) -> None:
    """When a copy issued behind a matmul of another stream ends: at once if no SM is needed, with the matmul if one is."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    side = copies.streams[0]
    handle = cu.CUstream(side.cuda_stream)
    next_peer = copies.peers[(copies.rank + 1) % copies.num_ranks]
    half = NUM_BYTES // 2
    own = copies.own.data_ptr()
    kinds = {
        "to a peer": lambda: cu.cuMemcpyAsync(next_peer, own, 32 << 20, handle),
        "within the GPU": lambda: cu.cuMemcpyAsync(own + half, own, 32 << 20, handle),
        "within the GPU, to symmetric memory": lambda: cu.cuMemcpyAsync(copies.peers[copies.rank], own, 32 << 20, handle),
    }
    for name, issue in kinds.items():
        found = []
        for _ in range(5):
            start, copied, done = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            torch.cuda._sleep(1_000_000)
            dist.all_reduce(torch.ones(1, device="cuda"))
            start.record()
            torch.mm(a, a)
            side.wait_event(start)
            with torch.cuda.stream(side):
                torch.cuda._sleep(100_000)
                check("Copying", issue())
                copied.record()
            done.record()
            torch.cuda.synchronize()
            found.append((start.elapsed_time(copied), start.elapsed_time(done)))
        copy_ms, matmul_ms = sorted(found)[2]
        log(f"copy {name} beside a matmul: copy done after {copy_ms:.3f} ms, matmul after {matmul_ms:.3f} ms")


def reductions() -> None:
    """Sum of W partial products against matmuls that accumulate, and matmuls of pieces on one and two streams."""
    num_ranks, rows, columns, inner = dist.get_world_size(), 4096, 8192, 2560
    stacked = torch.randn(num_ranks, rows, columns, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
    a = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(inner, columns, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()

    def pieces(num_streams: int) -> None:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        for number in range(4):
            torch.cuda.set_stream(side if number % 2 < num_streams - 1 else current)
            part = slice(number * rows // 4, (number + 1) * rows // 4)
            torch.mm(a[part], b, out=out[part])
        torch.cuda.set_stream(current)
        current.wait_stream(side)

    calls = {
        "sum": lambda: torch.sum(stacked, 0, dtype=out.dtype, out=out),
        "mm": lambda: torch.mm(a, b, out=out),
        "mm that accumulates": lambda: torch.addmm(out, a, b, out=out),
        "mm that accumulates elsewhere": lambda: torch.addmm(stacked[0], a, b, out=out),
        "mm in 4 pieces, 1 stream": lambda: pieces(1),
        "mm in 4 pieces, 2 streams": lambda: pieces(2),
    }
    timed = time_interleaved(calls, ROUNDS)
    log(f"{rows} x {columns} x {inner}:", ", ".join(f"{name} {timing.median_us:.0f} us" for name, timing in timed.items()))


def main() -> None:
    join(120)
    copies = Copies()
    bandwidth(copies)
    beside_a_matmul(copies)
    reductions()


if __name__ == "__main__":
    run_and_leave(main)
