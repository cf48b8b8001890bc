"""A schedule's matmul pieces and sums as calls of torch: plain `mm`, and `bmm` if the same chunk of several peers is one
piece.

They are bound once to the rows of an action, and called with the tensors of each call. With several weights, each has
its own matmul: one matmul over all of them would give strided products, on which later kernels take up to twice the
time. Sums add the partial products of all ranks in rank order in one kernel, which accumulates in single precision for
half-precision types, so they have the same bits in every run.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from counterpoint.cuda.block_sums import sum_rows
from counterpoint.ops.added_matmul import add_product
from counterpoint.ops.transport import Tensors, Weights, parts_of
from counterpoint.schedule.actions import Action, Region

Compute = Callable[[Tensors, Weights], None]
Rows = Callable[[Tensors], torch.Tensor]
# sets rows of a result by a matmul; takes the call's tensors, the left rows, the weight and the rows of the result
Multiply = Callable[[Tensors, torch.Tensor, torch.Tensor, torch.Tensor], object]

NO_TENSORS: Tensors = {}
MAIN_GRADIENT = "main_gradient"  # the buffer to which a weight's gradient is added, in a call without weight_gradient


def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Compute left @ right in their own type, also under autocast, which ignores calls with an `out`."""
    return torch.mm(left, right, out=left.new_empty(left.shape[0], right.shape[1]))


def set_weight_gradients(left: torch.Tensor, gradients: Sequence[torch.Tensor], tensors: Tensors, name: str) -> None:
    """Set the gradient of each weight by which (rows, K) `left` was multiplied, or add it to the main gradients.

    `gradients`: those of the products, (rows, columns) each. `name`: the buffer of the weights' gradients.
    """
    transposed, is_added = left.t(), MAIN_GRADIENT in tensors
    for gradient, out in zip(gradients, parts_of(tensors, MAIN_GRADIENT if is_added else name), strict=True):
        set_product(transposed, gradient, out, is_added=is_added)


def set_product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, *, is_added: bool = False) -> None:
    """Set `out` to left @ right, or add the product to it. One kernel does so if `out` has the operands' type, or, on GPUs,
    single precision where the operands have half.
    """
    is_widened = out.is_cuda and out.dtype == torch.float32 and left.dtype in (torch.float16, torch.bfloat16)
    if out.dtype != left.dtype and not is_widened:
        product = multiply(left, right)
        _ = out.add_(product) if is_added else out.copy_(product)
        return
    types = {} if out.dtype == left.dtype else {"out_dtype": out.dtype}
    if is_added:
        torch.addmm(out, left, right, **types, out=out)
    else:
        torch.mm(left, right, **types, out=out)


def half_precision_settings() -> tuple[object, ...]:
    """Return torch's settings that determine which kernels multiply half-precision matrices, or that none may. Every
    call reads them, so torch's own getters are called, in a tenth of the time of its documented properties.
    """
    return (
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_fp16_accumulation(),
        torch._C._get_blas_preferred_backend(),
        torch._C._get_sm_carveout_experimental(),
        torch._C._get_deterministic_algorithms(),
    )


def bind_computation(action: Action, fixed: Tensors = NO_TENSORS) -> Compute:
    """Return the call for an action which is no copy between ranks. `fixed` tensors are the same in every call."""
    if action.kind == "matmul":
        return _with_part_of_weights(action, _matmul(action.reads, action.writes, fixed))
    if action.kind == "add_matmul":
        return _with_part_of_weights(action, _add_matmul(fixed, *action.reads, *action.writes))
    if action.kind == "sum":
        return _sum(action, fixed)
    if action.kind == "weight_gradient":
        return _weight_gradient(action, fixed)
    assert action.kind == "place"
    return _place(action, fixed)


def _with_part_of_weights(action: Action, compute: Compute) -> Compute:
    """Return the same call with only the rows or columns of the weights that an action names."""
    if action.weight_rows is None and action.weight_columns is None:
        return compute
    rows, columns = (slice(*part) if part else slice(None) for part in (action.weight_rows, action.weight_columns))

    def compute_part(tensors: Tensors, weights: Weights) -> None:
        compute(tensors, [weight[rows, columns] for weight in weights])

    return compute_part


def _matmul(reads: Sequence[Region], writes: Sequence[Region], fixed: Tensors) -> Compute:
    if len(reads) == 1:
        return _one_matmul(reads[0], writes[0], fixed)
    stride = _equal_stride(reads)
    if stride is None or stride != _equal_stride(writes):
        pieces = _split_evenly(reads, writes, fixed)

        def compute(tensors: Tensors, weights: Weights) -> None:
            for piece in pieces:
                piece(tensors, weights)

        return compute
    return _batched_matmul(reads, writes, stride)


def _set(_tensors: Tensors, rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(rows, weight, out=out)


def _add_in_place(_tensors: Tensors, rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    torch.addmm(out, rows, weight, out=out)


def _one_matmul(source: Region, target: Region, fixed: Tensors, first: Multiply = _set) -> Compute:
    """Return the call for the matmul of one region, with `first` as in `_several_matmuls`."""
    several = _several_matmuls(source, target, first)
    rows_of_source, rows_of_target = _bound(source, fixed), _bound(target, fixed)

    def compute(tensors: Tensors, weights: Weights) -> None:
        if len(weights) > 1:
            several(tensors, weights)
        else:
            first(tensors, rows_of_source(tensors), weights[0], rows_of_target(tensors))

    return compute


def _several_matmuls(source: Region, target: Region, first: Multiply) -> Compute:
    """Return the call for a matmul with each weight: `first` sets a result, and further products are added to it."""
    left, start, num_rows = source.buffer, source.start, source.num_rows
    out, out_start = target.buffer, target.start

    def compute(tensors: Tensors, weights: Weights) -> None:
        for factor, weight, product, is_added in _products(tensors, weights, left, out):
            multiply_into = _add_in_place if is_added else first
            multiply_into(tensors, rows_in(factor, start, num_rows), weight, rows_in(product, out_start, num_rows))

    return compute


def _products(
    tensors: Tensors, weights: Weights, left: str, out: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]]:
    """Yield the matmul of each weight: left matrix, weight, result, and whether it is added to what is there.

    With the same rows, each weight gives one result; with a matrix for each weight, there is one sum.
    """
    factors, products = parts_of(tensors, left), parts_of(tensors, out)
    for number, weight in enumerate(weights):
        factor = factors[number] if len(factors) > 1 else factors[0]
        is_own = number < len(products)
        yield factor, weight, products[number] if is_own else products[0], not is_own


def _batched_matmul(reads: Sequence[Region], writes: Sequence[Region], stride: int) -> Compute:
    """Return a batched matmul of regions that are `stride` rows apart, as the same chunk of consecutive peers is."""
    left, start, out, out_start = reads[0].buffer, reads[0].start, writes[0].buffer, writes[0].start
    count, num_rows = len(reads), reads[0].num_rows

    def batch(tensor: torch.Tensor, first: int) -> torch.Tensor:
        row, column = tensor.stride()
        shape = (count, num_rows, tensor.shape[1])
        return tensor.as_strided(shape, (stride * row, row, column), tensor.storage_offset() + first * row)

    def compute(tensors: Tensors, weights: Weights) -> None:
        for factor, weight, product, is_added in _products(tensors, weights, left, out):
            rows, there = batch(factor, start), batch(product, out_start)
            repeated = weight.expand(count, *weight.shape)
            if is_added:
                torch.baddbmm(there, rows, repeated, out=there)
            else:
                torch.bmm(rows, repeated, out=there)

    return compute


def _equal_stride(regions: Sequence[Region]) -> int | None:
    """Return the rows from each region to the next, if they are equally long and equally far apart."""
    strides = {later.start - earlier.start for earlier, later in itertools.pairwise(regions)}
    lengths = {region.num_rows for region in regions}
    return strides.pop() if len(strides) == 1 and len(lengths) == 1 else None


def _split_evenly(reads: Sequence[Region], writes: Sequence[Region], fixed: Tensors) -> list[Compute]:
    """Split regions into runs of equal distance, one call each: a rank's own block leaves a gap between those below and
    above.
    """
    pieces: list[Compute] = []
    first = 0
    for last in range(1, len(reads) + 1):
        run = reads[first : last + 1]
        fits = last < len(reads) and (
            len(run) <= 1
            or (_equal_stride(run) is not None and _equal_stride(run) == _equal_stride(writes[first : last + 1]))
        )
        if not fits:
            pieces.append(_matmul(reads[first:last], writes[first:last], fixed))
            first = last
    return pieces


def _add_matmul(fixed: Tensors, source: Region, added: Region, target: Region) -> Compute:
    """Add a matmul to what is in `target`, or to other rows, if these are `added`."""
    if added == target:
        return _one_matmul(source, target, fixed, _add_in_place)
    rows_of_added = _bound(added, fixed)

    def add(tensors: Tensors, rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        add_product(rows_of_added(tensors), rows, weight, out)

    return _one_matmul(source, target, fixed, add)


def _sum(action: Action, fixed: Tensors) -> Compute:
    parts, target = action.reads, action.writes[0]
    if len(parts) == 2:
        return _sum_of_two(action, fixed)
    count, name, start, num_rows = len(parts), parts[0].buffer, parts[0].start, parts[0].num_rows
    stride = parts[1].start - start if count > 1 else num_rows

    def compute(tensors: Tensors, _weights: Weights) -> None:
        staged, out = tensors[name], rows_of(tensors, target)
        shape, strides = (count, num_rows, staged.shape[1]), (stride * staged.stride(0), staged.stride(0), 1)
        stacked = staged.as_strided(shape, strides, staged.storage_offset() + start * staged.stride(0))
        sum_rows(stacked, out)

    return compute


def _sum_of_two(action: Action, fixed: Tensors) -> Compute:
    """Compute a sum over a dimension of two, except for the sign of zero, in a third of the time: 23 us for two times 32
    MiB (H200).
    """
    first, second, target = (_bound(region, fixed) for region in (*action.reads, action.writes[0]))

    def compute(tensors: Tensors, _weights: Weights) -> None:
        torch.add(first(tensors), second(tensors), out=target(tensors))

    return compute


def _bound(region: Region, fixed: Tensors) -> Rows:
    """Return a function that returns the rows of a region; those of a fixed tensor are looked up once."""
    if region.buffer in fixed:
        found = rows_of(fixed, region)
        return lambda _tensors: found
    name, start, num_rows = region.buffer, region.start, region.num_rows
    return lambda tensors: rows_in(tensors[name], start, num_rows)


def rows_of(tensors: Tensors, region: Region) -> torch.Tensor:
    """Return the rows of a region, as a view."""
    return rows_in(tensors[region.buffer], region.start, region.num_rows)


def rows_in(tensor: torch.Tensor, start: int, num_rows: int) -> torch.Tensor:
    """Return rows of a matrix, or of one of its slices, (slices, rows, columns), numbered one slice below the other."""
    if tensor.dim() == 2:
        return tensor if num_rows == tensor.shape[0] else tensor.narrow(0, start, num_rows)
    number, row = divmod(start, tensor.shape[1])
    return tensor[number].narrow(0, row, num_rows)


def _weight_gradient(action: Action, fixed: Tensors) -> Compute:
    left, right = action.reads
    out, rows_of_left = action.writes[0].buffer, _bound(left, fixed)

    def compute(tensors: Tensors, _weights: Weights) -> None:
        gradients = [rows_in(factor, right.start, right.num_rows) for factor in parts_of(tensors, right.buffer)]
        set_weight_gradients(rows_of_left(tensors), gradients, tensors, out)

    return compute


def _place(action: Action, fixed: Tensors) -> Compute:
    if not action.reads:
        return lambda _tensors, _weights: None
    source, target = _bound(action.reads[0], fixed), _bound(action.writes[0], fixed)

    def compute(tensors: Tensors, _weights: Weights) -> None:
        target(tensors).copy_(source(tensors))

    return compute
