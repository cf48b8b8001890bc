"""Sums of the blocks that the ranks of a group sent to one of them.

On GPUs one Triton kernel reads every block once, and rounds once. torch's sum over a first dimension reads more slowly, and
costs matmuls beside it four times as much (measured on an H200, docs/log.md). It stays for CPUs, for types that the kernel
does not add, and where Triton is missing.
"""

import logging
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch

from counterpoint.errors import cause_of

logger = logging.getLogger("counterpoint")
SUMMED_TYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_BLOCKS = 16  # that the kernel adds: it holds a load of each
FEW, ALIGNMENT = 4096, 16
MOST_LETTERS = 200
_failed: list[Exception] = []  # after the first, torch adds everything


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
    if not arrived.own.is_contiguous():
        arrived = arrived._replace(own=arrived.completed()[arrived.rank])
    if _is_fused(arrived.rows, out) and _launch(arrived, out, divisor, copy):
        return
    _sum_by_torch(arrived.completed(), out, divisor)
    if copy is not None:
        copy.copy_(out)


def sum_rows(rows: torch.Tensor, out: torch.Tensor, divisor: float = 1.0) -> None:
    """Write the sum of the rows, divided by `divisor`, to `out`, as `sum_arrived` does."""
    sum_arrived(Arrived(rows, rows[0], 0), out, divisor)


def warm_up(arrived: Arrived, out: torch.Tensor) -> None:
    """Compile the kernel for such blocks, if it adds them, before a capture: it adds the first numbers to a scratch.

    Triton compiles apart for addresses and numbers that 16 does not divide, so the scratch lies as `out` does.
    """
    few = min(out.numel(), FEW + out.numel() % FEW)
    shift = out.data_ptr() % ALIGNMENT // out.itemsize
    scratch = torch.empty(few + shift, dtype=out.dtype, device=out.device)[shift:]
    sum_arrived(Arrived(arrived.rows[:, :few], arrived.own.flatten()[:few], arrived.rank), scratch)


def _launch(arrived: Arrived, out: torch.Tensor, divisor: float, copy: torch.Tensor | None) -> bool:
    """Launch the kernel. Return False, and log the reason once, if Triton cannot compile it, as without a C compiler."""
    from counterpoint.cuda.sum_kernel import add_blocks  # noqa: PLC0415  needs Triton

    try:
        add_blocks(*arrived, out=out, copy=copy, divisor=divisor)
    except Exception as problem:  # Triton's own kinds are not part of its interface
        _failed.append(problem)
        logger.warning("counterpoint: torch adds blocks, since Triton failed: %s", cause_of(problem, MOST_LETTERS))
        return False
    return True


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
        and not _failed
    )


@cache
def has_triton() -> bool:
    """Return whether Triton is available."""
    return find_spec("triton") is not None
