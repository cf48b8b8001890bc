"""The first paper's workloads on GPUs: a Triton matmul of a given tile and a collective of 896 MiB, four iterations.

In each iteration the collective waits for its own matmul and may run beside the next one. Needs Triton, which comes with
torch. The matmul follows the grouped order of tiles, so that rows of A stay in L2.
"""

from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from counterpoint.cuda.graph import AbstractExecutable
from counterpoint.errors import WorkloadError

ITERATIONS = 4
BUFFER_BYTES = 896 << 20
SIZES = {"cb": (8192, 8192, 8192), "mb": (8192, 57344, 8192)}
COLLECTIVES = ("ar", "a2a")
# tile M, N, K, warps, pipeline stages; opt1 and opt2 are the paper's, large is one more
TILES = {"opt1": (64, 64, 32, 4, 2), "opt2": (64, 64, 64, 4, 2), "large": (128, 128, 64, 8, 3)}


@triton.jit  # type: ignore[untyped-decorator]
def matmul_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917  Triton passes by position
    a, b, c, m, n, k, tm: tl.constexpr, tn: tl.constexpr, tk: tl.constexpr
):
    """C = A B, one tile a CTA, tiles in groups of 8 rows so that they share what L2 holds."""
    tiles_n = tl.cdiv(n, tn)
    group = tl.program_id(0) // (8 * tiles_n)
    rows = min(tl.cdiv(m, tm) - group * 8, 8)
    within = tl.program_id(0) % (8 * tiles_n)
    row, column = group * 8 + within % rows, within // rows
    row_offsets, column_offsets = row * tm + tl.arange(0, tm), column * tn + tl.arange(0, tn)
    inner = tl.arange(0, tk)
    at_a = a + row_offsets[:, None] * k + inner[None, :]
    at_b = b + inner[:, None] * n + column_offsets[None, :]
    total = tl.zeros((tm, tn), tl.float32)
    for _ in range(0, k, tk):
        total = tl.dot(tl.load(at_a), tl.load(at_b), total)
        at_a += tk
        at_b += tk * n
    # 8192 x 57344 outputs still fit 32-bit offsets
    tl.store(c + row_offsets[:, None] * n + column_offsets[None, :], total.to(tl.bfloat16))


def paper_workload_names() -> list[str]:
    """`SIZE_COLLECTIVE_TILE`, small ones first."""
    return [f"{size}_{collective}_{tile}" for size in SIZES for collective in COLLECTIVES for tile in TILES]


class PaperWorkload:
    """One workload as two step functions over the same buffers: `sequential` and `overlapped`."""

    def __init__(self, name: str) -> None:
        if name not in paper_workload_names():
            raise WorkloadError(f"Unknown workload '{name}'. Known: {', '.join(paper_workload_names())}.")
        size, collective, tile = name.split("_")
        self.name = name
        self._m, self._n, self._k = SIZES[size]
        self._tile = TILES[tile]
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self._a, self._b = torch.randn(self._m, self._k, **options), torch.randn(self._k, self._n, **options)
        self._product = torch.empty(self._m, self._n, **options)
        self._sent = torch.randn(BUFFER_BYTES // 2, **options)
        # all-reduce works in place, and the average of equal buffers is the buffer
        dist.broadcast(self._sent, 0)
        self._received = self._sent if collective == "ar" else torch.empty_like(self._sent)
        self._communication = torch.cuda.Stream()

    def _matmul(self) -> None:
        tm, tn, tk, warps, stages = self._tile
        grid = (triton.cdiv(self._m, tm) * triton.cdiv(self._n, tn),)
        sizes = (self._m, self._n, self._k)
        matmul_kernel[grid](self._a, self._b, self._product, *sizes, tm, tn, tk, num_warps=warps, num_stages=stages)

    def _communicate(self) -> None:
        if self._received is self._sent:
            dist.all_reduce(self._sent, op=dist.ReduceOp.AVG)
        else:
            dist.all_to_all_single(self._received, self._sent)

    def sequential(self) -> None:
        """Matmul, collective, matmul, collective, ..., on one stream."""
        for _ in range(ITERATIONS):
            self._matmul()
            self._communicate()

    def overlapped(self) -> None:
        """Each collective on a second stream, behind its own matmul."""
        current = torch.cuda.current_stream()
        for _ in range(ITERATIONS):
            self._matmul()
            self._communication.wait_stream(current)
            with torch.cuda.stream(self._communication):
                self._communicate()
        current.wait_stream(self._communication)

    @property
    def is_all_to_all(self) -> bool:
        """Whether its collective only moves data."""
        return self._received is not self._sent

    def output_bits(self, executable: AbstractExecutable) -> bytes:
        """Poison the outputs, replay once, and return their bits: a sample of every 61st element of each, as bytes."""
        if self.is_all_to_all:
            self._received.fill_(float("nan"))
        self._product.fill_(float("nan"))
        torch.cuda.synchronize()
        dist.barrier()  # others write into this rank's memory as soon as they start
        executable.launch(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        sampled = [tensor.flatten()[::61].contiguous() for tensor in (self._product, self._received)]
        return b"".join(sample.view(torch.int16).cpu().numpy().tobytes() for sample in sampled)
