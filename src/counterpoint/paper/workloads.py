"""The first paper's workloads on GPUs: a Triton matmul of a given tile and type, and a collective beside it.

In each iteration the collective waits for its own matmul and may run beside the next one. This module needs Triton, which
comes with torch. The matmul follows the grouped order of tiles, so that rows of A stay in L2.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from counterpoint.cuda.driver import pci_bus_id
from counterpoint.cuda.energy import open_counter
from counterpoint.cuda.graph import AbstractExecutable
from counterpoint.cuda.nvml import Nvml
from counterpoint.errors import WorkloadError, shown
from counterpoint.paper.cases import check_memory
from counterpoint.workloads.description import Description, Gemm, parse_bytes
from counterpoint.workloads.gemm import tile_count

# types of operands and output, and how tl.dot takes 32-bit operands
TYPES: dict[str, tuple[torch.dtype, torch.dtype, str]] = {
    "bf16": (torch.bfloat16, torch.bfloat16, "ieee"),
    "fp16": (torch.float16, torch.float16, "ieee"),
    "tf32": (torch.float32, torch.float32, "tf32"),
    "fp32": (torch.float32, torch.float32, "ieee"),
    "fp8": (torch.float8_e4m3fn, torch.bfloat16, "ieee"),
}
SAMPLED_EVERY = 61
MOST_ELEMENTS = 1 << 31  # offsets within a matrix are 32-bit


@triton.jit  # type: ignore[untyped-decorator]
def compute_tile(  # type: ignore[no-untyped-def]  # noqa: PLR0917  Triton passes by position
    a, b, c, m, n, k, number, tm: tl.constexpr, tn: tl.constexpr, tk: tl.constexpr, precision: tl.constexpr
):
    """One tile of C = A B; tiles are counted in groups of 8 rows, so that they share what L2 holds."""
    tiles_n = tl.cdiv(n, tn)
    group = number // (8 * tiles_n)
    rows = min(tl.cdiv(m, tm) - group * 8, 8)
    within = number % (8 * tiles_n)
    row, column = group * 8 + within % rows, within // rows
    row_offsets, column_offsets = row * tm + tl.arange(0, tm), column * tn + tl.arange(0, tn)
    inner = tl.arange(0, tk)
    at_a = a + row_offsets[:, None] * k + inner[None, :]
    at_b = b + inner[:, None] * n + column_offsets[None, :]
    total = tl.zeros((tm, tn), tl.float32)
    for _ in range(0, k, tk):
        total = tl.dot(tl.load(at_a), tl.load(at_b), total, input_precision=precision)
        at_a += tk
        at_b += tk * n
    tl.store(c + row_offsets[:, None] * n + column_offsets[None, :], total.to(c.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def matmul_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917  Triton passes by position
    a, b, c, m, n, k, tm: tl.constexpr, tn: tl.constexpr, tk: tl.constexpr, precision: tl.constexpr
):
    """C = A B, one tile a CTA."""
    compute_tile(a, b, c, m, n, k, tl.program_id(0), tm, tn, tk, precision)


@triton.jit  # type: ignore[untyped-decorator]
def persistent_matmul_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917  Triton passes by position
    a, b, c, m, n, k, tm: tl.constexpr, tn: tl.constexpr, tk: tl.constexpr, precision: tl.constexpr
):
    """C = A B by any number of CTAs, which share the tiles evenly."""
    for number in range(tl.program_id(0), tl.cdiv(m, tm) * tl.cdiv(n, tn), tl.num_programs(0)):
        compute_tile(a, b, c, m, n, k, number, tm, tn, tk, precision)


class PaperWorkload:
    """One workload as two step functions over the same buffers: `sequential` and `overlapped`.

    `description` is a workload of the paper or a case of its sweeps that passes `check_runnable`.
    """

    def __init__(self, description: Description) -> None:
        check_runnable(description)
        (self._gemm,), (self._collective,) = description.gemms, description.collectives
        self.name, self._iterations = description.name, description.iterations
        m, n, k = self._gemm.m, self._gemm.n, self._gemm.k
        operands, output, _ = TYPES[self._gemm.dtype]
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        # torch has no random numbers for some types
        self._a, self._b = torch.randn(m, k, **options).to(operands), torch.randn(k, n, **options).to(operands)
        self._product = torch.empty(m, n, device="cuda", dtype=output)
        self._sent = torch.randn(parse_bytes(self._collective.bytes, "collective") // 2, **options)
        # the all-reduce works in place, and the average of equal buffers equals the buffer
        dist.broadcast(self._sent, 0)
        self._received = torch.empty_like(self._sent) if self._collective.collective == "all_to_all" else self._sent
        self._communication = torch.cuda.Stream()

    def _matmul(self) -> None:
        gemm = self._gemm
        kernel = matmul_kernel if gemm.num_ctas is None else persistent_matmul_kernel
        grid = (gemm.num_ctas or tile_count(gemm.m, gemm.n, gemm.tile_sizes),)
        sizes = (gemm.m, gemm.n, gemm.k, *gemm.tile_sizes, TYPES[gemm.dtype][2])
        options = {"num_warps": gemm.threads_per_cta // 32, "num_stages": gemm.stages}
        try:
            kernel[grid](self._a, self._b, self._product, *sizes, **options)
        except triton.OutOfResources as problem:
            raise WorkloadError(f"Tile {gemm.tile} in {gemm.dtype} does not fit this GPU: {problem}") from problem

    def _communicate(self) -> None:
        if self._received is self._sent:
            dist.all_reduce(self._sent, op=dist.ReduceOp.AVG)
        else:
            dist.all_to_all_single(self._received, self._sent)

    def sequential(self) -> None:
        """Run matmul, collective, matmul, collective, ..., on one stream."""
        for _ in range(self._iterations):
            self._matmul()
            self._communicate()

    def overlapped(self) -> None:
        """Run each collective on a second stream, after its own matmul."""
        current = torch.cuda.current_stream()
        for _ in range(self._iterations):
            self._matmul()
            self._communication.wait_stream(current)
            with torch.cuda.stream(self._communication):
                self._communicate()
        current.wait_stream(self._communication)

    def output_bits(self, executable: AbstractExecutable) -> bytes:
        """Return the bits of a sample of the outputs after one replay, as bytes."""
        received = [self._received] * (self._received is not self._sent)
        return sampled_bits(executable, [self._product, *received], (self._product, self._received))


def sampled_bits(executable: AbstractExecutable, poisoned: Iterable[torch.Tensor], sampled: Iterable[torch.Tensor]) -> bytes:
    """Fill tensors with NaN, replay once, and return a sample of every 61st element of what is `sampled`, as bytes."""
    for tensor in poisoned:
        tensor.fill_(float("nan"))
    torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()  # other ranks write into this rank's memory as soon as they start
    executable.launch(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    samples = [tensor.flatten()[::SAMPLED_EVERY].contiguous() for tensor in sampled]
    return b"".join(sample.view(torch.uint8).cpu().numpy().tobytes() for sample in samples)


def check_runnable(description: Description) -> None:
    """Raise `WorkloadError` for what the kernels here cannot compute, before any memory is taken."""
    counts = len(description.gemms), len(description.collectives)
    if counts != (1, 1):
        raise WorkloadError(
            f"On GPUs bench paper runs workloads of one [[gemms]] and one [[collectives]]; '{shown(description.name)}' has "
            f"{counts[0]} and {counts[1]}. Simulate it: --simulate MACHINE."
        )
    (gemm,), (collective,) = description.gemms, description.collectives
    if description.num_ranks < 2:
        raise WorkloadError(
            "The paper's workloads communicate between GPUs, but only one rank was started. Start two or more: "
            "torchrun --nproc-per-node 2 -m counterpoint bench paper."
        )
    for axis, size, tile in zip("MNK", (gemm.m, gemm.n, gemm.k), gemm.tile_sizes, strict=True):
        if size % tile or tile & (tile - 1) or tile < 16:
            raise WorkloadError(
                f"On GPUs {axis} must be a multiple of the tile's size, and that size a power of two, 16 or more; found "
                f"{axis} {size} and tile {gemm.tile}. Choose another size or tile."
            )
    _check_elements(gemm)
    granule = 2 * description.num_ranks if collective.collective == "all_to_all" else 2
    num_bytes = parse_bytes(collective.bytes, "collective")
    if num_bytes % granule:
        raise WorkloadError(
            f"A collective's bytes must be a multiple of {granule} on {description.num_ranks} ranks; found {num_bytes}."
        )


def _check_elements(gemm: Gemm) -> None:
    largest = max(math.prod(sizes) for sizes in ((gemm.m, gemm.k), (gemm.k, gemm.n), (gemm.m, gemm.n)))
    if largest > MOST_ELEMENTS:
        raise WorkloadError(
            f"A matrix may have at most {MOST_ELEMENTS:,} elements; found {largest:,}. Choose smaller sizes."
        )


def check_fits(description: Description) -> None:
    """Raise `WorkloadError` if the workload's buffers do not fit the free memory of this rank's GPU."""
    free_bytes, _ = torch.cuda.mem_get_info()
    reusable_bytes = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    check_memory(description, free_bytes + reusable_bytes, "what is free is")


def open_energy_counter() -> Nvml:
    """Open the energy counter of this rank's GPU. Raises `DeviceError`."""
    return open_counter(pci_bus_id(torch.cuda.current_device()))


def launch_in_a_row(executable: AbstractExecutable, number: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Issue so many replays without waiting for them, and return the events before and after them."""
    stream = torch.cuda.current_stream()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record(stream)
    for _ in range(number):
        executable.launch(stream.cuda_stream)
    end.record(stream)
    return start, end
