"""Kernels in common use whose CTAs run long, and some whose CTAs do not, as computation beside collectives.

Each entry of `KERNELS` makes its tensors and returns a function that launches the kernel once into them. All are ATen's but
the selective scan, which is Mamba's recurrence (Gu and Dao 2023, eq. 2) as recurrent kernels of inference and training
libraries run it: a CTA keeps the states of some channels and walks along the sequence.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

Launch = Callable[[], object]
CHANNELS_PER_CTA = 64


@triton.jit
def selective_scan(x, delta, a, b, c, y, length, channels, CHANNELS: tl.constexpr, STATES: tl.constexpr):  # noqa: N803, PLR0917
    """y[t] = sum over states of c[t] h[t], with h[t] = exp(delta[t] a) h[t-1] + delta[t] b[t] x[t].

    x, delta, y: batch x length x channels; a: channels x states; b, c: batch x length x states.
    """
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    state = tl.arange(0, STATES)
    decay = tl.load(a + channel[:, None] * STATES + state[None, :])
    hidden = tl.zeros([CHANNELS, STATES], tl.float32)
    first = tl.program_id(1).to(tl.int64) * length
    for step in range(length):
        row = first + step
        change = tl.load(delta + row * channels + channel).to(tl.float32)
        given = tl.load(x + row * channels + channel).to(tl.float32)
        inward = tl.load(b + row * STATES + state).to(tl.float32)
        outward = tl.load(c + row * STATES + state).to(tl.float32)
        hidden = tl.exp(change[:, None] * decay) * hidden + (change * given)[:, None] * inward[None, :]
        tl.store(y + row * channels + channel, tl.sum(hidden * outward[None, :], 1).to(y.dtype.element_ty))


class ScanInputs:
    """What a selective scan reads besides its tokens: steps, decays, and the projections into and out of the state."""

    def __init__(self, batch: int, length: int, channels: int, states: int = 16) -> None:
        make = {"device": "cuda", "dtype": torch.bfloat16}
        self.sizes = batch, length, channels, states
        self.delta = torch.rand(batch, length, channels, **make)
        self.a = -torch.rand(channels, states, device="cuda")
        self.b, self.c = (torch.randn(batch, length, states, **make) for _ in range(2))


def scan_into(inputs: ScanInputs, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    """Mamba's selective scan of tokens x channels in bf16, its state in float32."""
    batch, length, channels, states = inputs.sizes
    y = torch.empty_like(x) if y is None else y
    grid = (channels // CHANNELS_PER_CTA, batch)
    selective_scan[grid](
        x, inputs.delta, inputs.a, inputs.b, inputs.c, y, length, channels, CHANNELS_PER_CTA, states, num_warps=4
    )
    return y


def scan(batch: int, length: int, channels: int) -> Launch:
    """A selective scan into memory that is there."""
    inputs = ScanInputs(batch, length, channels)
    x, y = (torch.randn(batch * length, channels, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return lambda: scan_into(inputs, x, y)


def cumulative_sum(rows: int, length: int, columns: int) -> Launch:
    """A sum along the sequence: each thread walks down one column."""
    given = torch.randn(rows, length, columns, device="cuda")
    sums = torch.empty_like(given)
    return lambda: torch.cumsum(given, 1, out=sums)


def cholesky(matrices: int, size: int) -> Launch:
    """Batched Cholesky factors of small matrices."""
    given = torch.randn(matrices, size, size, device="cuda")
    given = given @ given.mT + size * torch.eye(size, device="cuda")
    return lambda: torch.linalg.cholesky_ex(given, check_errors=False)


def top(rows: int, columns: int, count: int = 50) -> Launch:
    """The largest of long rows, as samplers take them."""
    given = torch.randn(rows, columns, device="cuda")
    return lambda: torch.topk(given, count, dim=1, sorted=False)


def softmax(rows: int, columns: int) -> Launch:
    """Softmax of long rows, as over a vocabulary."""
    given = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.softmax(given, 1)


def sort(rows: int, columns: int) -> Launch:
    """Rows sorted one by one."""
    given = torch.randn(rows, columns, device="cuda")
    return lambda: torch.sort(given, 1)


def group_norm(batch: int, channels: int, pixels: int, groups: int) -> Launch:
    """Norms of long groups, as of feature maps."""
    given = torch.randn(batch, channels, pixels, device="cuda", dtype=torch.bfloat16)
    return lambda: functional.group_norm(given, groups)


def attention(batch: int, heads: int, length: int, width: int) -> Launch:
    """Causal flash attention of ATen."""
    query, key, value = (torch.randn(batch, heads, length, width, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def launch() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    return launch


def matmul(size: int) -> Launch:
    """A bf16 matmul of cuBLAS."""
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return lambda: left @ right


KERNELS: dict[str, Callable[[], Launch]] = {
    "selective scan": lambda: scan(40, 1024, 4096),
    "cumsum 768 x 128": lambda: cumulative_sum(4224, 768, 128),
    "cumsum 384 x 128": lambda: cumulative_sum(8448, 384, 128),
    "cumsum 192 x 128": lambda: cumulative_sum(16896, 192, 128),
    "cumsum 96 x 128": lambda: cumulative_sum(33792, 96, 128),
    "cumsum 768 x 512": lambda: cumulative_sum(1056, 768, 512),
    "cumsum 192 x 512": lambda: cumulative_sum(4224, 192, 512),
    "topk": lambda: top(1056, 131072),
    "softmax": lambda: softmax(2112, 131072),
    "sort": lambda: sort(8448, 4096),
    "group norm": lambda: group_norm(16, 256, 65536, 32),
    "attention": lambda: attention(2, 16, 8192, 64),
    "matmul": lambda: matmul(8192),
    "cholesky": lambda: cholesky(16384, 64),
}
