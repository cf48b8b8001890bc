"""The Triton kernel that adds blocks. It needs Triton, which comes with torch for GPUs."""

from functools import cache

import torch
import triton
import triton.language as tl

BLOCK = 4096  # numbers of each block that a CTA adds at once
NUM_WARPS = 8
CTAS_PER_SM = 2  # measured on an H200: more are not faster, and one is a fifth slower


@triton.jit  # type: ignore[untyped-decorator]
def counterpoint_add_blocks(  # type: ignore[no-untyped-def]  # noqa: PLR0917  what a kernel is launched with
    rows, own, out, copy, number, stride, factor, count: tl.constexpr, rank: tl.constexpr, block: tl.constexpr
):
    """out = factor * (row 0 + row 1 + ...), where row `rank` is `own`; the same to `copy`, unless it is `out`."""
    step = tl.num_programs(0).to(tl.int64) * block
    for start in range(tl.program_id(0).to(tl.int64) * block, number, step):
        at = start + tl.arange(0, block)
        inside = at < number
        total = tl.zeros((block,), tl.float32)
        for row in tl.static_range(count):
            if row == rank:
                total += tl.load(own + at, mask=inside, eviction_policy="evict_first").to(tl.float32)
            else:
                total += tl.load(rows + row * stride + at, mask=inside, eviction_policy="evict_first").to(tl.float32)
        result = (total * factor).to(out.dtype.element_ty)
        tl.store(out + at, result, mask=inside)
        if copy is not None:
            tl.store(copy + at, result, mask=inside)


def add_blocks(
    rows: torch.Tensor, own: torch.Tensor, rank: int, *, out: torch.Tensor, copy: torch.Tensor | None, divisor: float
) -> None:
    """Launch the kernel on the current stream; each row, `own`, `out` and `copy` have no gaps."""
    number = out.numel()
    num_ctas = min(triton.cdiv(number, BLOCK), CTAS_PER_SM * _num_sms(out.device))
    counterpoint_add_blocks[(num_ctas,)](
        rows, own, out, copy, number, rows.stride(0), 1.0 / divisor, len(rows), rank, BLOCK, num_warps=NUM_WARPS
    )


@cache
def _num_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
