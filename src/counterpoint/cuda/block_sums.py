"""Sums of the blocks that the ranks of a group sent to one of them.

On GPUs one Triton kernel reads every block once, and rounds once. torch's sum over a first dimension reads more slowly, and
costs matmuls beside it four times as much (measured on an H200, docs/log.md). It stays for CPUs, for types that the kernel
does not add, and where Triton is missing.
"""

import logging
from collections.abc import Iterator, Sequence
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
Pieces = Sequence[torch.Tensor]  # a block, in this order
_failed: list[Exception] = []  # after the first, torch adds everything


class Arrived(NamedTuple):
    """The ranks' blocks for this rank: row p of `rows` (ranks, n) is rank p's, but this rank's own block is in `own`."""

    rows: torch.Tensor
    own: Pieces
    rank: int

    def by_piece(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, slice]]:
        """Yield every piece of the own block, with the rows' columns for it and their place."""
        start = 0
        for piece in self.own:
            place = slice(start, start + piece.numel())
            yield piece, self.rows[:, place], place
            start = place.stop

    def completed(self) -> torch.Tensor:
        """Return the rows with the own block copied into them."""
        for piece, rows, _ in self.by_piece():
            _complete(rows, piece, self.rank)
        return self.rows


def sum_arrived(arrived: Arrived, out: torch.Tensor, divisor: float = 1.0, *, into_own: bool = False) -> None:
    """Write the sum of the blocks, divided by `divisor`, to `out` (n), and into the own block, if asked.

    Sums accumulate in single precision in the order of ranks. Where torch adds, a divisor other than 1 and the number of
    ranks costs one more rounding.
    """
    for piece, rows, place in arrived.by_piece():
        own = piece if piece.is_contiguous() else _complete(rows, piece, arrived.rank)
        copy = own if into_own and own is piece else None
        if not (_is_fused(rows, out[place]) and _launch((rows, own, arrived.rank), out[place], divisor, copy)):
            _complete(rows, own, arrived.rank)
            _sum_by_torch(rows, out[place], divisor)
            copy = None
        if into_own and copy is None:
            piece.copy_(out[place].view(piece.shape))


def _complete(rows: torch.Tensor, piece: torch.Tensor, rank: int) -> torch.Tensor:
    """Return this rank's row with the own piece in it."""
    row = rows[rank]
    if piece.data_ptr() != row.data_ptr():
        row.view(piece.shape).copy_(piece)
    return row


def sum_rows(rows: torch.Tensor, out: torch.Tensor, divisor: float = 1.0) -> None:
    """Write the sum of the rows, divided by `divisor`, to `out`, as `sum_arrived` does."""
    sum_arrived(Arrived(rows, (rows[0],), 0), out, divisor)


def warm_up(arrived: Arrived, out: torch.Tensor) -> None:
    """Compile the kernel for such blocks, if it adds them, before a capture: it adds the first numbers to a scratch.

    Triton compiles apart for addresses and numbers that 16 does not divide, so the scratch lies as `out` does. The own
    block must be in one piece.
    """
    few = min(out.numel(), FEW + out.numel() % FEW)
    shift = out.data_ptr() % ALIGNMENT // out.itemsize
    scratch = torch.empty(few + shift, dtype=out.dtype, device=out.device)[shift:]
    (own,) = arrived.own
    sum_arrived(Arrived(arrived.rows[:, :few], (own.flatten()[:few],), arrived.rank), scratch)


def _launch(
    blocks: tuple[torch.Tensor, torch.Tensor, int], out: torch.Tensor, divisor: float, copy: torch.Tensor | None
) -> bool:
    """Launch the kernel. Return False, and log the reason once, if Triton cannot compile it, as without a C compiler."""
    from counterpoint.cuda.sum_kernel import add_blocks  # noqa: PLC0415  needs Triton

    try:
        add_blocks(*blocks, out=out, copy=copy, divisor=divisor)
    except Exception as problem:  # Triton's own kinds are not part of its interface
        if "[CUDA]" in str(problem):  # the GPU failed, not the compiler
            raise
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
