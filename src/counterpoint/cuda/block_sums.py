"""Sums of the blocks that the ranks of a group sent to one of them.

On GPUs one Triton kernel reads every block once, and rounds once. torch's sum over a first dimension reads more slowly, and
costs matmuls beside it four times as much (measured on an H200, docs/log.md). It stays for CPUs, for types that the kernel
does not add, and where Triton is missing.
"""

from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch

SUMMED_TYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_BLOCKS = 16  # that the kernel adds: it holds a load of each


class Arrived(NamedTuple):
    """The ranks' blocks for this rank: row p of `rows` (ranks, n) is rank p's, but this rank's own block is `own`."""

    rows: torch.Tensor
    own: torch.Tensor
    rank: int

    def completed(self) -> torch.Tensor:
        """Return the rows with the own block copied into them."""
        if self.own.data_ptr() != self.rows[self.rank].data_ptr():
            self.rows[self.rank].view(self.own.shape).copy_(self.own)
        return self.rows


def sum_arrived(arrived: Arrived, out: torch.Tensor, divisor: float = 1.0, copy: torch.Tensor | None = None) -> None:
    """Write the sum of the blocks, divided by `divisor`, to `out` (n), and to `copy`, if given, which may be `own`.

    Sums accumulate in single precision in the order of ranks. Where torch adds, a divisor other than 1 and the number of
    ranks costs one more rounding.
    """
    if _is_fused(arrived.rows, out):
        from counterpoint.cuda.sum_kernel import add_blocks  # noqa: PLC0415  needs Triton

        if not arrived.own.is_contiguous():
            arrived = arrived._replace(own=arrived.completed()[arrived.rank])
        add_blocks(*arrived, out=out, copy=copy, divisor=divisor)
        return
    _sum_by_torch(arrived.completed(), out, divisor)
    if copy is not None:
        copy.copy_(out)


def sum_rows(rows: torch.Tensor, out: torch.Tensor, divisor: float = 1.0) -> None:
    """Write the sum of the rows, divided by `divisor`, to `out`, as `sum_arrived` does."""
    sum_arrived(Arrived(rows, rows[0], 0), out, divisor)


def _sum_by_torch(rows: torch.Tensor, out: torch.Tensor, divisor: float) -> None:
    if divisor == len(rows):
        torch.mean(rows, 0, out=out)
        return
    torch.sum(rows, 0, dtype=out.dtype, out=out)
    if divisor != 1:
        out.div_(divisor)


def _is_fused(rows: torch.Tensor, out: torch.Tensor) -> bool:
    """Return whether the kernel can add these rows: on a GPU, each without gaps, of types that it knows."""
    return (
        rows.is_cuda
        and 1 < len(rows) <= MOST_BLOCKS
        and out.numel() > 0
        and {rows.dtype, out.dtype} <= {*SUMMED_TYPES}
        and out.is_contiguous()
        and rows[0].is_contiguous()
        and has_triton()
    )


@cache
def has_triton() -> bool:
    """Return whether Triton is available."""
    return find_spec("triton") is not None
