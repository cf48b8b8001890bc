"""Measures HBM rates: a streaming kernel alone and with fewer CTAs, two at once, beside copies, and a sum of blocks."""

from collections.abc import Iterator
from functools import partial
from itertools import cycle

import torch
import triton
import triton.language as tl

from counterpoint.cuda.block_sums import sum_rows
from counterpoint.cuda.probes.capped import residency_times
from counterpoint.cuda.probes.session import Session
from counterpoint.measurement.points import Point, point
from counterpoint.units import MIB

STREAMED_BYTES = 512 * MIB
BLOCK_BYTES = 32 * MIB
HOST_BYTES = 128 * MIB
NUM_COLD = 4  # sets of blocks used in turn, so that none is still in L2
CAPS = (12, 8, 6, 5, 4, 3, 2, 1)
ROW_CAPS = (3, 2, 1)
BLOCK = 2048


def probe_streaming(session: Session) -> list[Point]:
    """Time PyTorch's elementwise kernel on 512 MiB at each residency: threads load 16 bytes of bf16, 32 bytes of fp32."""
    points = []
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        source = torch.ones(STREAMED_BYTES // dtype.itemsize, device="cuda", dtype=dtype)
        target = torch.empty_like(source)

        def stream(source: torch.Tensor = source, target: torch.Tensor = target) -> None:
            torch.mul(source, 2.0, out=target)

        at: dict[str, int | str] = {"type": name, "bytes": 2 * STREAMED_BYTES}
        points.append(point("streaming_us", session.times_us(stream, calls=4), **at))
        points += residency_times(session, stream, "streaming_capped_us", CAPS, type=name)
    copied = session.times_us(lambda: target.copy_(source), calls=4)
    points.append(point("device_copy_us", copied, bytes=2 * STREAMED_BYTES))
    host, device = _pinned(HOST_BYTES), torch.zeros(HOST_BYTES // 4, device="cuda")
    beside = session.times_beside_us(stream, lambda: device.copy_(host, non_blocking=True), num_others=3)
    points.append(point("streaming_beside_us", beside, beside="host_to_device", **at))
    return points


def probe_rows(session: Session) -> list[Point]:
    """Time PyTorch's softmax and cumulative sum along rows, whose CTAs wait for their own loads, at each residency."""
    points: list[Point] = []
    for rows, columns in ((12288, 12288), (40960, 4096)):
        given = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        got = torch.empty_like(given)
        at: dict[str, int | str] = {"kernel": "softmax", "rows": rows, "columns": columns}
        normalize = partial(torch.softmax, given, 1, out=got)
        points += residency_times(session, normalize, "rows_capped_us", ROW_CAPS, **at)
    for rows, columns in ((10240, 12288), (6144, 6144)):
        given = torch.randn(rows, columns, device="cuda")
        got = torch.empty_like(given)
        at = {"kernel": "cumulative sum", "rows": rows, "columns": columns}
        add_up = partial(torch.cumsum, given, 1, out=got)
        points += residency_times(session, add_up, "rows_capped_us", ROW_CAPS, **at)
    return points


@triton.jit  # type: ignore[untyped-decorator]
def persistent_copy(source, target, num_blocks, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy one block after another with CTAs that stay resident, so that two such kernels can share the memory."""
    offsets = tl.arange(0, block)
    for number in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        at = number * block + offsets
        tl.store(target + at, tl.load(source + at))


def probe_sharing(session: Session) -> list[Point]:
    """Time two persistent copies with equal and with half as many CTAs: each alone, and the first beside the second."""
    sources = [torch.ones(STREAMED_BYTES // 4, device="cuda") for _ in range(2)]
    targets = [torch.empty_like(source) for source in sources]
    num_blocks = STREAMED_BYTES // 4 // BLOCK

    def copy(number: int, ctas_per_sm: int) -> None:
        grid = (ctas_per_sm * session.num_sms,)
        persistent_copy[grid](sources[number], targets[number], num_blocks, BLOCK, num_warps=8)

    points = []
    for ctas_per_sm in (1, 2, 3, 4):
        times = session.times_us(lambda own=ctas_per_sm: copy(0, own))  # type: ignore[misc]
        points.append(point("persistent_copy_us", times, ctas_per_sm=ctas_per_sm, bytes=2 * STREAMED_BYTES))
    for own, others in ((4, 4), (2, 4), (4, 2), (1, 4)):
        times = session.times_beside_us(
            lambda own=own: copy(0, own),  # type: ignore[misc]
            lambda others=others: copy(1, others),  # type: ignore[misc]
            num_others=16,
        )
        at = {"ctas_per_sm": own, "others_per_sm": others, "bytes": 2 * STREAMED_BYTES}
        points.append(point("persistent_copy_beside_us", times, **at))
    return points


def probe_sums(session: Session) -> list[Point]:
    """Time the kernel that adds blocks in a reduction by copies, in bf16."""
    points = []
    for num_blocks in (2, 4, 8):
        shape = (NUM_COLD, num_blocks, BLOCK_BYTES // 2)
        turns = cycle(torch.ones(shape, dtype=torch.bfloat16, device="cuda").unbind())
        total = torch.empty(BLOCK_BYTES // 2, dtype=torch.bfloat16, device="cuda")

        def add(turns: Iterator[torch.Tensor] = turns, total: torch.Tensor = total) -> None:
            sum_rows(next(turns), total)

        points.append(
            point("block_sum_us", session.times_us(add, calls=4), blocks=num_blocks, bytes=BLOCK_BYTES, turns=NUM_COLD)
        )
    return points


def probe_host_copies(session: Session) -> list[Point]:
    """Time copies between pinned host memory and the GPU."""
    points = []
    for num_bytes in (MIB // 16, MIB, 16 * MIB, HOST_BYTES):
        host, device = _pinned(num_bytes), torch.zeros(num_bytes // 4, device="cuda")
        for direction, (to, source) in {"host_to_device": (device, host), "device_to_host": (host, device)}.items():

            def copy(to: torch.Tensor = to, source: torch.Tensor = source) -> None:
                to.copy_(source, non_blocking=True)

            points.append(point("host_copy_us", session.times_us(copy), direction=direction, bytes=num_bytes))
    return points


def _pinned(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes // 4, pin_memory=True)
