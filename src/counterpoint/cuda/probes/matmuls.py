"""Times matmuls by type and size (cuBLAS), and with fewer CTAs per SM matmuls, attention and fused multiply-adds."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from counterpoint.cuda.probes.capped import residency_times
from counterpoint.cuda.probes.occupying import Marks, ProbeLaunch, compute
from counterpoint.cuda.probes.session import Issue, Session
from counterpoint.errors import DeviceError
from counterpoint.measurement.points import Point, point

SIZES = (1024, 2048, 4096, 8192)
TYPES = ("bf16", "fp16", "fp8", "tf32", "fp32")
SKINNY = ((16, 8192, 8192), (128, 8192, 8192), (8192, 8192, 64))  # limited by memory or by their few tiles
TILES = {  # tile M, N, K, warps, stages
    "64x64x32": (64, 64, 32, 4, 2),
    "128x128x32": (128, 128, 32, 8, 2),
    "64x64x32, 4 stages": (64, 64, 32, 4, 4),
    "128x128x32, 4 stages": (128, 128, 32, 8, 4),
    "128x128x64, 3 stages": (128, 128, 64, 8, 3),
}
TILED_SIZE = 6144  # enough waves for any residency, and larger than any L2
LOADED_MS = 250  # load before a tiled matmul is timed, so that the power limit sets the clock as in steps
CAPS = (6, 5, 4, 3, 2, 1)
ATTENTION_HEADS = {64: 64, 128: 48}  # size of a head, and how many heads of all sequences
ATTENTION_TOKENS = 4096
ITERATIONS = 1000
WAVES = 4


@triton.jit  # type: ignore[untyped-decorator]
def tile_matmul(  # type: ignore[no-untyped-def]  # noqa: PLR0917  Triton passes by position
    a, b, c, n, k, tm: tl.constexpr, tn: tl.constexpr, tk: tl.constexpr
):
    """C = A B, one tile a CTA, rows of tiles in groups of 8 so that they share what L2 holds."""
    tiles_n = n // tn
    group = tl.program_id(0) // (8 * tiles_n)
    within = tl.program_id(0) % (8 * tiles_n)
    row, column = group * 8 + within % 8, within // 8
    rows, columns, inner = row * tm + tl.arange(0, tm), column * tn + tl.arange(0, tn), tl.arange(0, tk)
    at_a = a + rows[:, None] * k + inner[None, :]
    at_b = b + inner[:, None] * n + columns[None, :]
    total = tl.zeros((tm, tn), tl.float32)
    for _ in range(0, k, tk):
        total = tl.dot(tl.load(at_a), tl.load(at_b), total)
        at_a += tk
        at_b += tk * n
    tl.store(c + rows[:, None] * n + columns[None, :], total.to(tl.bfloat16))


def probe_matmuls(session: Session) -> list[Point]:
    """Time torch.mm, and torch._scaled_mm for fp8, at every type and size; types that cannot run are left out."""
    points: list[Point] = []
    for kind in TYPES:
        for m, n, k in (*((size, size, size) for size in SIZES), *(SKINNY if kind == "bf16" else ())):
            issue = matmul(kind, m, n, k)
            if issue is None:
                continue
            calls = 1 if m * n * k > 4096**3 else 8
            points.append(point("matmul_us", session.times_us(issue, calls=calls, rounds=4), type=kind, m=m, n=n, k=k))
    if not points:
        raise DeviceError("torch.mm runs with none of the types")
    return points


def matmul(kind: str, m: int, n: int, k: int) -> Issue | None:
    """Return a matmul of random operands of a type; None if this GPU or this torch cannot run it."""
    options: dict[str, Any] = {"device": "cuda"}
    types = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
    dtype = types.get(kind, torch.float32)
    a, b = (torch.randn(*shape, **options).to(dtype) for shape in ((m, k), (n, k)))
    if kind == "fp8":
        one = torch.ones((), **options)

        def scaled() -> object:
            return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

        try:
            scaled()
        except (RuntimeError, ValueError, NotImplementedError):  # no fp8 on this GPU, or not in this torch
            return None
        return scaled
    out = torch.empty(m, n, dtype=dtype, **options)

    def multiply() -> None:
        torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
        torch.mm(a, b.t(), out=out)
        torch.backends.cuda.matmul.allow_tf32 = False

    return multiply


def tiled(tile: str) -> Issue:
    """Return a Triton matmul of square matrices of random bf16 values, with a tile of `TILES`."""
    size, (tm, tn, tk, warps, stages) = TILED_SIZE, TILES[tile]
    a, b, c = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    grid = (size // tm * (size // tn),)
    return lambda: tile_matmul[grid](a, b, c, size, size, tm, tn, tk, num_warps=warps, num_stages=stages)


def attention(backend: SDPBackend, heads: int, tokens: int, head_size: int) -> Issue:
    """Return PyTorch's attention of random values in bf16 without a mask, by one of its backends."""
    shape = (1, heads, tokens, head_size)
    query, key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def attend() -> object:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(query, key, value)

    return attend


def probe_residency(session: Session) -> list[Point]:
    """Time Triton matmuls of several tiles, FlashAttention 2 and a kernel of fused multiply-adds, at each residency."""
    points: list[Point] = []
    for tile in TILES:
        at: dict[str, int | str] = {"tile": tile, "size": TILED_SIZE, "loaded_ms": LOADED_MS}
        points += residency_times(session, tiled(tile), "matmul_capped_us", CAPS, **at)
    for head_size, heads in ATTENTION_HEADS.items():
        attend = attention(SDPBackend.FLASH_ATTENTION, heads, ATTENTION_TOKENS, head_size)
        at = {"head_size": head_size, "heads": heads, "tokens": ATTENTION_TOKENS}
        points += residency_times(session, attend, "attention_capped_us", CAPS, **at)
    launch = ProbeLaunch(num_ctas=8 * session.num_sms * WAVES)
    marks = Marks(launch.num_ctas)
    for num_chains in (8, 1):

        def add(num_chains: int = num_chains) -> None:
            compute(launch, marks, ITERATIONS, num_chains)

        points += residency_times(session, add, "arithmetic_capped_us", CAPS, chains=num_chains, iterations=ITERATIONS)
    return points
