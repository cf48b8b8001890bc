"""Triton kernels for experts: silu(first) * second and its gradients, and the places, the placement and the sending of rows.

They read and write every number once, whereas torch's own operators make five passes over the matrices forward and
fourteen backward, and place rows element by element. Intermediate results are rounded as in torch. They need Triton,
which comes with torch for GPUs.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl

from counterpoint.schedule.expert_choice import FEW_CTAS
from counterpoint.schedule.expert_layout import ExpertLayout

BLOCK = 2048
GATE_TILE = 4, 512  # rows and columns of what a CTA computes of an activation whose inputs lie in one matrix
ROW_BLOCK = 1024
UNITS_OF_A_CTA = 8  # about how many; with 2 to 16 calls took equally long (2 H200s)
NUM_WARPS = 8
VECTOR_BYTES = 16  # what a thread reads and writes at once
# Of a kernel that sends rows: the number of CTAs, the most numbers that one has in flight, and its warps
MANY = 1056, 8192, NUM_WARPS  # as many as an H200 runs at once
FEW = FEW_CTAS, 32768, 32  # eight are as fast as all between two H200s
Part = Literal["all", "first", "rest", "own"]


@triton.jit  # type: ignore[untyped-decorator]
def tile(num_rows, width, rows: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the rows and columns of this CTA's tile of a matrix, and which of them are inside of it."""
    tiles_of_row = tl.cdiv(width, columns)
    at = tl.program_id(0).to(tl.int64)
    row = at // tiles_of_row * rows + tl.arange(0, rows)[:, None]
    column = at % tiles_of_row * columns + tl.arange(0, columns)[None, :]
    return row, column, (row < num_rows) & (column < width)


@triton.jit  # type: ignore[untyped-decorator]
def gate_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917  what a kernel is launched with
    first, second, result, stride, num_rows, width, rows: tl.constexpr, columns: tl.constexpr
):
    """result = silu(first) * second; `stride`: of the inputs' rows."""
    row, column, inside = tile(num_rows, width, rows, columns)
    x = tl.load(first + row * stride + column, mask=inside).to(tl.float32)
    y = tl.load(second + row * stride + column, mask=inside).to(tl.float32)
    silu = (x / (1.0 + tl.exp(-x))).to(result.dtype.element_ty).to(tl.float32)
    tl.store(result + row * width + column, (silu * y).to(result.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def gate_backward_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917  what a kernel is launched with
    first, second, gradient, result, of_first, of_second, stride, num_rows, width, rows: tl.constexpr, columns: tl.constexpr
):
    """result = silu(first) * second again, and the gradients of both; `stride`: of the rows of the inputs and of these."""
    row, column, inside = tile(num_rows, width, rows, columns)
    kind = result.dtype.element_ty
    at, there = row * stride + column, row * width + column
    x = tl.load(first + at, mask=inside).to(tl.float32)
    y = tl.load(second + at, mask=inside).to(tl.float32)
    dz = tl.load(gradient + there, mask=inside).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-x))
    silu = (x * sigmoid).to(kind).to(tl.float32)
    tl.store(result + there, (silu * y).to(kind), mask=inside)
    tl.store(of_second + at, (dz * silu).to(kind), mask=inside)
    of_silu = (dz * y).to(kind).to(tl.float32)
    tl.store(of_first + at, (of_silu * sigmoid * (1.0 + x * (1.0 - sigmoid))).to(kind), mask=inside)


def num_blocks(number: int, size: int) -> int:
    """Return how many blocks of a size hold a number; Triton's own function is for kernels, and slower on the host."""
    return -(-number // size)


def power_of_2(number: int) -> int:
    """Return the least power of two that is not smaller than a number of 1 or more."""
    return 1 << (number - 1).bit_length()


def gate(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return silu(first) * second of two matrices, contiguous or halves of one."""
    result = torch.empty(first.shape, dtype=first.dtype, device=first.device)
    numbers, tile_size, grid = _tiles(first)
    gate_kernel[grid](first, second, result, *numbers, *tile_size, num_warps=NUM_WARPS)
    return result


def gate_backward(first: torch.Tensor, second: torch.Tensor, gradient: torch.Tensor, outs: Sequence[torch.Tensor]) -> None:
    """Compute silu(first) * second, and the gradients of first and second, in `outs`. These gradients have the inputs'
    strides; the others are contiguous.
    """
    numbers, tile_size, grid = _tiles(first)
    gate_backward_kernel[grid](first, second, gradient, *outs, *numbers, *tile_size, num_warps=NUM_WARPS)


def _tiles(matrix: torch.Tensor) -> tuple[tuple[int, int, int], tuple[int, int], tuple[int]]:
    """Return stride, rows and width of a matrix, which is one row if it is contiguous; the size of a tile; and the grid."""
    if matrix.is_contiguous():
        stride, num_rows, width, tile_size = matrix.numel(), 1, matrix.numel(), (1, BLOCK)
    else:
        stride, (num_rows, width), tile_size = matrix.stride(0), matrix.shape, GATE_TILE
    grid = (num_blocks(num_rows, tile_size[0]) * num_blocks(width, tile_size[1]),)
    return (stride, num_rows, width), tile_size, grid


@triton.jit(do_not_specialize=["first", "first_place", "origin"])  # type: ignore[untyped-decorator]
def place_rows_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917  what a kernel is launched with
    rows, places, target, first, first_place, origin, number, is_back: tl.constexpr, block: tl.constexpr
):
    """One row of `number` numbers: `put_rows`, or `take_rows` if `is_back`."""
    place = tl.load(places + first_place + tl.program_id(0)) - origin
    row = (first + tl.program_id(0)).to(tl.int64)
    if is_back:
        place, row = row, place
    for start in range(0, number, block):
        at = start + tl.arange(0, block)
        inside = at < number
        tl.store(target + place * number + at, tl.load(rows + row * number + at, mask=inside), mask=inside)


def put_rows(rows: torch.Tensor, part: slice, places: torch.Tensor, target: torch.Tensor) -> None:
    """Set target[places[n]] = rows[part][n]: contiguous matrices of one type, all places different (int64)."""
    numbers = part.start, 0, 0, rows.shape[1]
    place_rows_kernel[(part.stop - part.start,)](rows, places, target, *numbers, False, ROW_BLOCK, num_warps=4)


def take_rows(rows: torch.Tensor, places: torch.Tensor, used: tuple[int, int], target: torch.Tensor, part: slice) -> None:
    """Set target[part][n] = rows[places[first + n] - origin], with (first, origin) = `used`: contiguous matrices of one
    type, places in int64.
    """
    numbers = part.start, *used, rows.shape[1]
    place_rows_kernel[(part.stop - part.start,)](rows, places, target, *numbers, True, ROW_BLOCK, num_warps=4)


@triton.jit(do_not_specialize=["first", "num_rows", "rank"])  # type: ignore[untyped-decorator]
def find_places_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917  what a kernel is launched with
    counts, stride, first, places, ends, num_rows, rank, num_ranks, num_experts, size: tl.constexpr, block: tl.constexpr
):
    """One block of rows, of a source and an expert: `places` holds order, order_back and own one after the other."""
    at = tl.program_id(0)
    source, expert = at // num_experts, at % num_experts
    number = tl.load(counts + source * stride + first + expert)
    start = tl.program_id(1) * block
    if (start < number) | (start == 0):
        lanes = tl.arange(0, size)
        sources, experts = lanes // num_experts, lanes % num_experts
        each = tl.load(counts + sources * stride + first + experts, mask=lanes < num_ranks * num_experts, other=0)
        arrived = tl.sum(tl.where(lanes < at, each, 0), 0)
        placed = tl.sum(tl.where((experts < expert) | ((experts == expert) & (sources < source)), each, 0), 0)
        if (source == num_ranks - 1) & (start == 0):
            tl.store(ends + expert, (placed + number).to(tl.int32))
        rows = start + tl.arange(0, block)
        inside = rows < number
        tl.store(places + placed + rows, arrived + rows, mask=inside)
        tl.store(places + num_rows + arrived + rows, placed + rows, mask=inside)
        if source == rank:
            before = tl.sum(tl.where((sources == rank) & (experts < expert), each, 0), 0)
            tl.store(places + 2 * num_rows + before + rows, placed + rows, mask=inside)


def find_places(gathered: torch.Tensor, layout: ExpertLayout) -> tuple[torch.Tensor, ...]:
    """Return order, order_back, own and ends, as `expert_sorting.Places` has them, of `gathered[source, expert]`."""
    counts = layout.counts[:, layout.rank]
    places = gathered.new_empty(2 * layout.num_rows + layout.num_own)
    ends = torch.empty(layout.num_experts, dtype=torch.int32, device=gathered.device)
    grid = counts.size, max(1, num_blocks(int(counts.max()), ROW_BLOCK))
    find_places_kernel[grid](
        gathered,
        gathered.stride(0),
        layout.rank * layout.num_experts,
        places,
        ends,
        layout.num_rows,
        layout.rank,
        *counts.shape,
        size=power_of_2(counts.size),
        block=ROW_BLOCK,
    )
    return *places.split([layout.num_rows, layout.num_rows, layout.num_own]), ends


@triton.jit
def sums_before(numbers):  # type: ignore[no-untyped-def]
    """For each number of a matrix, the sum of those before it, row by row."""
    of_row = tl.sum(numbers, 1)
    return (tl.cumsum(of_row, 0) - of_row)[:, None] + tl.cumsum(numbers, 1) - numbers


@triton.jit  # type: ignore[untyped-decorator]
def copy_numbers(source, target, number, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """target = source, `number` numbers."""
    for start in range(0, number, block):
        place = start + tl.arange(0, block)
        tl.store(target + place, tl.load(source + place, mask=place < number), mask=place < number)


@triton.jit
def over_ranks(counts, inside, stride, rank, num_ranks):  # type: ignore[no-untyped-def]
    """For each number of a matrix that every rank has: the sum, that of the ranks before this one, the least, at most 0, and
    the largest.
    """
    total = inside.to(tl.int64) * 0
    before, least, most = total, total, total
    for source in range(num_ranks):
        there = tl.load(counts + source * stride, mask=inside, other=0)
        total += there
        before += tl.where(source < rank, there, 0)
        least, most = tl.minimum(least, there), tl.maximum(most, there)
    return total, before, least, most


@triton.jit(do_not_specialize=["stride", "rank", "most_rows", "unit"])  # type: ignore[untyped-decorator]
def send_rows_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917  what a kernel is launched with
    rows,
    own,
    addresses,
    counts,
    ends,
    stride,
    rank,
    most_rows,
    firsts,
    unit,
    num_ranks,
    num_experts,
    number,
    part: tl.constexpr,
    peers: tl.constexpr,
    experts: tl.constexpr,
    block: tl.constexpr,
    vector: tl.constexpr,
):
    """Every num_programs-th unit: up to `unit` rows of one block, of an expert of a peer. So a program does as much for one
    large block as for many small ones. Matrices are (peers, experts), each a power of two."""
    peer, expert = tl.arange(0, peers)[:, None], tl.arange(0, experts)[None, :]
    inside, at = (peer < num_ranks) & (expert < num_experts), peer * num_experts + expert
    here = tl.load(counts + rank * stride + at, mask=inside, other=0)
    num_tokens = tl.load(counts + rank * stride + num_ranks * num_experts) // 2
    total, before, least, most = over_ranks(counts + at, inside, stride, rank, num_ranks)
    # no count is larger than what all may be, so that sums cannot wrap around
    has_room = (tl.min(least, 1) >= 0) & (tl.max(most, 1) <= most_rows) & (tl.sum(total, 1) <= most_rows)
    is_own = (tl.min(here) >= 0) & (tl.max(here) <= num_tokens) & (tl.sum(here) == num_tokens)
    arrived = tl.cumsum(total, 1)
    placed = arrived - total + before
    found = tl.where(has_room[:, None], arrived, 0).to(tl.int32)
    tl.store(ends + expert + 0 * peer, found, mask=inside & (peer == rank) & (tl.program_id(0) == 0))
    num_rows = tl.where(has_room[:, None] & is_own, here, 0)
    sent = sums_before(here)
    if part == "own":
        num_rows = tl.where(peer == rank, num_rows, 0)
    elif part != "all":  # other ranks get rows for first places, or for later ones
        first = tl.load(firsts + peer, mask=peer < num_ranks, other=0)
        num_first = tl.minimum(num_rows, tl.maximum(first - placed, 0))
        if part == "rest":
            num_rows = tl.where(peer == rank, 0, num_rows - num_first)
            sent += num_first
            placed += num_first
        else:
            num_rows = tl.where(peer == rank, num_rows, num_first)
    num_units = (num_rows + unit - 1) // unit
    unit_start = sums_before(num_units)
    for taken in range(tl.program_id(0), tl.sum(num_units).to(tl.int32), tl.num_programs(0)):
        is_taken = (unit_start <= taken) & (taken < unit_start + num_units)  # one block
        begin = (taken - tl.sum(tl.where(is_taken, unit_start, 0))) * unit
        end = tl.minimum(begin + unit, tl.sum(tl.where(is_taken, num_rows, 0)))
        source_row, target_row = tl.sum(tl.where(is_taken, sent, 0)), tl.sum(tl.where(is_taken, placed, 0))
        to = tl.sum(tl.where(is_taken, peer, 0))
        target = own
        if to != rank:  # as whole vectors from `own` on, so that the compiler knows that it is aligned
            target += (tl.load(addresses + to) - own.to(tl.int64)) // (vector * own.dtype.element_ty.itemsize) * vector
        origin = rows + (source_row + begin) * number
        copy_numbers(origin, target + (target_row + begin) * number, ((end - begin) * number).to(tl.int32), block)


class Sending(NamedTuple):
    """Rows that one kernel sends: contiguous `rows` of this `rank`, `landed`, this rank's own memory for rows of all ranks,
    and the addresses of the other ranks' memory, by rank. Memory begins at multiples of `VECTOR_BYTES`, and rows are as
    many bytes.
    """

    rank: int
    rows: torch.Tensor
    landed: torch.Tensor
    addresses: torch.Tensor


def send_rows(
    sending: Sending,
    gathered: torch.Tensor,
    ends: torch.Tensor,
    firsts: torch.Tensor | None = None,
    part: Part = "all",
) -> None:
    """Send this rank's rows to their experts' places, as `ExpertLayout` has them, and set `Places.ends` (int32).

    "first": other ranks get rows only for so many first places of each as `firsts` says (int64, on the device). "rest" sends
    what is missing then, by few CTAs, because a matmul runs beside it. "own": only rows for this rank's own experts.

    `gathered[source]` are the counts of a rank for the experts of all ranks, and last twice their sum, or 1 more, on the
    device: the host need not know them. A rank gets no rows if they are more than `landed` has; then its ends are 0. Rows
    whose counts do not add up are not sent.
    """
    rank, rows, landed, addresses = sending
    num_ranks, width = gathered.shape[0], rows.shape[1]
    num_experts = (gathered.shape[1] - 1) // num_ranks
    num_ctas, most_held, num_warps = FEW if part == "rest" else MANY
    unit = max(1, num_blocks(rows.shape[0], UNITS_OF_A_CTA * num_ctas))
    send_rows_kernel[(min(num_ctas, max(1, rows.shape[0])),)](
        rows,
        landed,
        addresses,
        gathered,
        ends,
        gathered.stride(0),
        rank,
        landed.shape[0],
        gathered if firsts is None else firsts,
        unit,
        num_ranks,
        num_experts,
        width,
        part=part,
        peers=power_of_2(num_ranks),
        experts=power_of_2(num_experts),
        block=min(most_held, power_of_2(unit * width)),
        vector=VECTOR_BYTES // rows.itemsize,
        num_warps=num_warps,
    )
