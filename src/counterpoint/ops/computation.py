"""The matmul pieces and sums of a schedule as calls of torch: plain `mm`, `bmm` where the same chunk of several peers
is one piece.

Bound once to the rows of an action, called with the tensors of each call. Sums add the partial products of all ranks
in rank order in one kernel, which accumulates in single precision for half-precision types, so they are the same bits
in every run.
"""

import itertools
from collections.abc import Callable, Sequence

import torch

from counterpoint.ops.transport import Tensors
from counterpoint.schedule.actions import Action, Region

Compute = Callable[[Tensors, torch.Tensor], None]


def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right in their own type, also under autocast, which leaves alone what is given an `out`."""
    return torch.mm(left, right, out=left.new_empty(left.shape[0], right.shape[1]))


def half_precision_settings() -> tuple[object, ...]:
    """torch's settings that decide which kernels multiply half-precision matrices, or that none may. They are asked for in
    every call, so torch's own getters are called, at a tenth of the time of its documented properties."""
    return (
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_fp16_accumulation(),
        torch._C._get_blas_preferred_backend(),
        torch._C._get_sm_carveout_experimental(),
        torch._C._get_deterministic_algorithms(),
    )


def bind_computation(action: Action) -> Compute:
    """The call that does an action which is no copy between ranks."""
    if action.kind == "matmul":
        return _matmul(action.reads, action.writes)
    if action.kind == "add_matmul":
        return _add_matmul(action)
    if action.kind == "sum":
        return _sum(action)
    if action.kind == "weight_gradient":
        return _weight_gradient(action)
    assert action.kind == "place"
    return _place(action)


def _matmul(reads: Sequence[Region], writes: Sequence[Region]) -> Compute:
    if len(reads) == 1:
        return _one_matmul(reads[0], writes[0])
    stride = _equal_stride(reads)
    if stride is None or stride != _equal_stride(writes):
        pieces = _split_evenly(reads, writes)

        def compute(tensors: Tensors, weight: torch.Tensor) -> None:
            for piece in pieces:
                piece(tensors, weight)

        return compute
    return _batched_matmul(reads, writes, stride)


def _one_matmul(source: Region, target: Region) -> Compute:
    left, start, num_rows = source.buffer, source.start, source.num_rows
    out, out_start = target.buffer, target.start

    def compute(tensors: Tensors, weight: torch.Tensor) -> None:
        torch.mm(tensors[left].narrow(0, start, num_rows), weight, out=tensors[out].narrow(0, out_start, num_rows))

    return compute


def _batched_matmul(reads: Sequence[Region], writes: Sequence[Region], stride: int) -> Compute:
    """The regions lie `stride` rows apart, as the same chunk of consecutive peers does."""
    left, start, out, out_start = reads[0].buffer, reads[0].start, writes[0].buffer, writes[0].start
    count, num_rows = len(reads), reads[0].num_rows

    def batch(tensor: torch.Tensor, first: int) -> torch.Tensor:
        row, column = tensor.stride()
        shape = (count, num_rows, tensor.shape[1])
        return tensor.as_strided(shape, (stride * row, row, column), tensor.storage_offset() + first * row)

    def compute(tensors: Tensors, weight: torch.Tensor) -> None:
        torch.bmm(batch(tensors[left], start), weight.expand(count, *weight.shape), out=batch(tensors[out], out_start))

    return compute


def _equal_stride(regions: Sequence[Region]) -> int | None:
    """Rows from each region to the next, if they are equally long and equally far apart."""
    strides = {later.start - earlier.start for earlier, later in itertools.pairwise(regions)}
    lengths = {region.num_rows for region in regions}
    return strides.pop() if len(strides) == 1 and len(lengths) == 1 else None


def _split_evenly(reads: Sequence[Region], writes: Sequence[Region]) -> list[Compute]:
    """Runs of equally distant regions, each one call: a rank's own block leaves a gap between those below and above."""
    pieces: list[Compute] = []
    first = 0
    for last in range(1, len(reads) + 1):
        run = reads[first : last + 1]
        fits = last < len(reads) and (
            len(run) <= 1
            or (_equal_stride(run) is not None and _equal_stride(run) == _equal_stride(writes[first : last + 1]))
        )
        if not fits:
            pieces.append(_matmul(reads[first:last], writes[first:last]))
            first = last
    return pieces


def _add_matmul(action: Action) -> Compute:
    source, added = action.reads
    target = action.writes[0]
    left, start, num_rows = source.buffer, source.start, source.num_rows

    def compute(tensors: Tensors, weight: torch.Tensor) -> None:
        rows = tensors[left].narrow(0, start, num_rows)
        there = tensors[added.buffer].narrow(0, added.start, num_rows)
        out = there if target == added else tensors[target.buffer].narrow(0, target.start, num_rows)
        torch.addmm(there, rows, weight, out=out)

    return compute


def _sum(action: Action) -> Compute:
    parts, target = action.reads, action.writes[0]
    count, name, start, num_rows = len(parts), parts[0].buffer, parts[0].start, parts[0].num_rows
    stride = parts[1].start - start if count > 1 else num_rows

    def compute(tensors: Tensors, _weight: torch.Tensor) -> None:
        staged, out = tensors[name], tensors[target.buffer].narrow(0, target.start, num_rows)
        shape, strides = (count, num_rows, staged.shape[1]), (stride * staged.stride(0), staged.stride(0), 1)
        stacked = staged.as_strided(shape, strides, staged.storage_offset() + start * staged.stride(0))
        torch.sum(stacked, 0, dtype=out.dtype, out=out)

    return compute


def _weight_gradient(action: Action) -> Compute:
    left, right = action.reads
    out = action.writes[0].buffer

    def compute(tensors: Tensors, _weight: torch.Tensor) -> None:
        transposed = tensors[left.buffer].narrow(0, left.start, left.num_rows).t()
        torch.mm(transposed, tensors[right.buffer].narrow(0, right.start, right.num_rows), out=tensors[out])

    return compute


def _place(action: Action) -> Compute:
    if not action.reads:
        return lambda _tensors, _weight: None
    source, target = action.reads[0], action.writes[0]

    def compute(tensors: Tensors, _weight: torch.Tensor) -> None:
        rows = tensors[source.buffer].narrow(0, source.start, source.num_rows)
        tensors[target.buffer].narrow(0, target.start, target.num_rows).copy_(rows)

    return compute
