"""Grouped matmuls: rows sorted by expert times each expert's weight, and the gradients of those weights.

On GPUs that support it, bf16 rows use torch's grouped matmul, one kernel for all experts; everything else uses a matmul
for each expert that has rows. Both give the same bits in every run.
"""

from functools import cache
from typing import NamedTuple

import torch

ALIGNMENT = 16  # alignment of rows in bytes for torch's grouped matmul
# compute capabilities of GPUs whose grouped matmul is one kernel; torch 2.11 loops on others
GROUPED_CAPABILITIES = ((9, 0), (10, 0))


class ExpertRows(NamedTuple):
    """The number of rows of each of some experts, and where they end, which a grouped matmul reads on the GPU (int32)."""

    counts: tuple[int, ...]
    ends: torch.Tensor


def multiply(
    rows: torch.Tensor, weights: torch.Tensor, experts: ExpertRows, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return each expert's rows times its weight: (n, K), (E, K, N) -> (n, N), in `out` if that is given."""
    if rows.shape[0] and is_grouped(rows, weights) and weights.shape[2] * weights.itemsize % ALIGNMENT == 0:
        product = torch._grouped_mm(rows, weights, offs=experts.ends)
        return product if out is None else out.copy_(product)
    product = rows.new_empty(rows.shape[0], weights.shape[2]) if out is None else out
    start = 0
    for expert, number in enumerate(experts.counts):
        if number:
            torch.mm(rows[start : start + number], weights[expert], out=product[start : start + number])
        start += number
    return product


def weight_gradient(left: torch.Tensor, right: torch.Tensor, experts: ExpertRows) -> torch.Tensor:
    """Return left^T right of each expert's rows: (n, M), (n, N) -> (E, M, N); 0 for experts without rows."""
    if right.shape[0] and is_grouped(left, right):
        found = torch._grouped_mm(left.t(), right, offs=experts.ends)
        empty = [found[expert] for expert, number in enumerate(experts.counts) if not number]
        if empty:  # a kernel may not write experts without rows
            torch._foreach_zero_(empty)
        return found
    found = left.new_zeros(len(experts.counts), left.shape[1], right.shape[1])
    start = 0
    for expert, number in enumerate(experts.counts):
        if number:
            part = slice(start, start + number)
            torch.mm(left[part].t(), right[part], out=found[expert])
        start += number
    return found


def is_grouped(*operands: torch.Tensor) -> bool:
    """Return whether torch's grouped matmul accepts these operands, and runs them as one kernel."""
    first = operands[0]
    return bool(
        first.is_cuda
        and first.dtype == torch.bfloat16
        and _has_grouped_kernel(first.device)
        and all(_is_aligned(each) for each in operands)
    )


def _is_aligned(operand: torch.Tensor) -> bool:
    """Return whether one of the last two dimensions is dense, the other aligned, and the operand begins at an aligned
    address.
    """
    *_, outer, inner = operand.stride()
    wide = outer if inner == 1 else inner
    return bool(min(outer, inner) == 1 and wide * operand.itemsize % ALIGNMENT == 0 == operand.data_ptr() % ALIGNMENT)


@cache
def _has_grouped_kernel(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) in GROUPED_CAPABILITIES
