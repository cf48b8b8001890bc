"""Grouped matmuls: rows sorted by expert times each expert's weight plus its bias, and the gradients of these.

On GPUs that support it, bf16 rows use torch's grouped matmul, one kernel for all experts; everything else uses a matmul
for each expert that has rows. Both give the same bits in every run. In fp8, GPUs use torch's scaled grouped matmul. CPUs
have none; they multiply the rounded numbers in single precision, so that tests without GPUs check the rounding.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import NamedTuple, TypeAlias

import torch

from counterpoint.ops.computation import set_product

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = torch.finfo(FP8).max
LEAST_SCALE = 1e-12  # for rows of zeros
GROUPED_TYPE = torch.bfloat16
ALIGNMENT = 16  # alignment of rows in bytes for torch's grouped matmul
# compute capabilities of GPUs whose grouped matmul is one kernel; torch 2.11 loops on others
GROUPED_CAPABILITIES = ((9, 0), (10, 0))

Memory: TypeAlias = Callable[[], AbstractContextManager[None]]  # a context in which torch allocates a product


class ExpertRows(NamedTuple):
    """The number of rows of each of some experts, and where they end, which a grouped matmul reads on the GPU (int32)."""

    counts: tuple[int, ...]
    ends: torch.Tensor


class ExpertTotals(NamedTuple):
    """Matrices (N, K) to which the gradients of experts' weights are added, or which are set to them; None for an expert
    whose weight needs no gradient.
    """

    matrices: Sequence[torch.Tensor | None]
    are_set: bool = False


def multiply(
    rows: torch.Tensor,
    weights: torch.Tensor,
    experts: ExpertRows,
    bias: torch.Tensor | None = None,
    memory: Memory = nullcontext,
) -> torch.Tensor:
    """Return each expert's rows times its weight, plus its bias: (n, K), (E, K, N), (E, N) -> (n, N), in this memory."""
    product = multiply_grouped(rows, weights, experts.ends, memory)
    if product is not None:
        return add_bias(product, bias, experts)
    with memory():
        product = rows.new_empty(rows.shape[0], weights.shape[2])
    start = 0
    for expert, (number, weight) in enumerate(zip(experts.counts, weights.unbind(), strict=True)):
        part = slice(start, start + number)
        if number and bias is not None:
            torch.addmm(bias[expert], rows[part], weight, out=product[part])
        elif number:
            torch.mm(rows[part], weight, out=product[part])
        start += number
    return product


def multiply_grouped(
    rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, memory: Memory = nullcontext
) -> torch.Tensor | None:
    """Return each expert's rows times its weight by one kernel, or None if these operands need a matmul for each expert.

    `ends` may be smaller than the number of rows; then the last rows of the product are not set.
    """
    if not (rows.shape[0] and is_grouped(rows, weights)) or weights.shape[2] * weights.itemsize % ALIGNMENT:
        return None
    with memory():
        found: torch.Tensor = torch._grouped_mm(rows, weights, offs=ends)  # it takes no bias
    return found


def multiply_in_fp8(
    rows: torch.Tensor,
    weights: torch.Tensor,
    experts: ExpertRows,
    bias: torch.Tensor | None = None,
    memory: Memory = nullcontext,
) -> torch.Tensor:
    """Do what `multiply` does, with operands rounded to fp8 (e4m3). Each row, and each column of a weight, is scaled so that
    its largest number is that of fp8. Sums are in single precision, products of the rows' type.
    """
    (left, left_scale), (right, right_scale) = _scaled(rows), _scaled(weights.mT)
    if rows.is_cpu:
        dense = right.float() * right_scale[..., None]
        product = multiply(left.float() * left_scale[:, None], dense.mT, experts).to(rows.dtype)
    elif not rows.shape[0]:
        product = rows.new_empty(0, weights.shape[2])
    else:
        scales = {"scale_a": left_scale, "scale_b": right_scale}
        with memory():
            product = torch._scaled_grouped_mm(left, right.mT, **scales, offs=experts.ends, out_dtype=rows.dtype)
    return add_bias(product, bias, experts)


def obstacle_to_fp8(weights: torch.Tensor) -> str:
    """Return why weights (E, N, K) cannot be multiplied in fp8 on their device, or nothing."""
    if weights.dtype != torch.bfloat16:
        return f"takes operands in bf16; found {weights.dtype}. Convert them"
    if any(number % ALIGNMENT for number in weights.shape[1:]):
        return f"takes weights whose sizes are multiples of {ALIGNMENT}; found {tuple(weights.shape[1:])}. Pad them"
    if weights.is_cuda and not (_has_grouped_kernel(weights.device) and hasattr(torch, "_scaled_grouped_mm")):
        return "needs torch's scaled grouped matmul, which GPUs of capability 9.0 and 10.0 have. Multiply in bf16"
    return ""


def _scaled(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values rounded to fp8, and the scale of each row of the last dimension."""
    scales = values.abs().amax(-1).float().clamp(min=LEAST_SCALE) / LARGEST_FP8
    return (values.float() / scales[..., None]).clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8), scales


def add_bias(product: torch.Tensor, bias: torch.Tensor | None, experts: ExpertRows) -> torch.Tensor:
    """Add the bias of each row's expert, if there are any, in place: (n, N), (E, N) -> (n, N)."""
    if bias is None:
        return product
    numbers = torch.arange(product.shape[0], dtype=torch.int32, device=bias.device)
    return product.add_(bias.index_select(0, torch.searchsorted(experts.ends, numbers, right=True)))


def add_weight_gradients(gradient: torch.Tensor, rows: torch.Tensor, experts: ExpertRows, totals: ExpertTotals) -> None:
    """Add the gradient of each expert's weight to its total; or set it: (n, N), (n, K). Each is one matmul, which adds in
    the total's type.
    """
    start = 0
    for number, total in zip(experts.counts, totals.matrices, strict=True):
        part = slice(start, start + number)
        if total is not None and number:
            set_product(gradient[part].t(), rows[part], total, is_added=not totals.are_set)
        elif total is not None and totals.are_set:
            total.zero_()
        start += number


def bias_gradient(rows: torch.Tensor, experts: ExpertRows) -> torch.Tensor:
    """Return the sum of each expert's rows: (n, N) -> (E, N). A matmul with ones adds up in the same order in every run."""
    ones = rows.new_ones(rows.shape[0], ALIGNMENT // rows.itemsize)
    return weight_gradient(rows, ones, experts)[:, :, 0]


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


@cache
def can_spare_sms(device: torch.device) -> bool:
    """Return whether torch's grouped matmul is one kernel on this GPU that can leave SMs to others. Within an operator torch
    warns once, in Python, that this is experimental.
    """
    warnings.filterwarnings("ignore", message="Setting the SM carveout")
    return hasattr(torch._C, "_set_sm_carveout_experimental") and _has_grouped_kernel(device)


@contextmanager
def fewer_sms(number: int) -> Iterator[None]:
    """Let torch's grouped matmuls, whose CTAs each keep an SM to the end, leave so many SMs to other kernels."""
    former = torch._C._get_sm_carveout_experimental()
    torch._C._set_sm_carveout_experimental(number + (former or 0))
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(former)


def is_grouped(*operands: torch.Tensor) -> bool:
    """Return whether torch's grouped matmul accepts these operands, and runs them as one kernel."""
    first = operands[0]
    return bool(
        first.is_cuda
        and first.dtype == GROUPED_TYPE
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
