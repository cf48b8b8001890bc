"""The operators as torch custom operators: their sequential form, their shapes for torch.compile, their gradients.

Forward and backward are separate operators, so a compiled graph holds both whole. Nothing gathered is kept for backward:
the shard is sent again while the gradient's matmul runs, which keeps the memory savings of sequence parallelism. Groups
are passed by name and schedules as JSON text, because an operator's arguments must be plain.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import msgspec
import torch
from torch.profiler import record_function
from torch.utils.flop_counter import register_flop_formula

from counterpoint.ops.collectives import Collectives
from counterpoint.ops.computation import MAIN_GRADIENT, multiply, set_product, set_weight_gradients
from counterpoint.ops.dispatch import Gradients, Kept, Matrices, Operator
from counterpoint.ops.operator_call import (
    OperatorCall,
    TorchPass,
    group_size,
    key_of,
    known_call,
    own_rows,
    require_operands,
)
from counterpoint.ops.transport import Tensors, Weights, part_names, parts_of
from counterpoint.schedule import ScheduleDescription, backward_description
from counterpoint.schedule.actions import Operation

Pair = tuple[torch.Tensor, torch.Tensor]


# --- without a schedule: the library's collectives and the matmuls, one after the other ---


def _gather_then_multiply(library: Collectives, tensors: Tensors, weights: Weights) -> None:
    gathered = library.gather(tensors["shard"])
    for weight, product in zip(weights, parts_of(tensors, "product"), strict=True):
        torch.mm(gathered, weight, out=product)


def _gather_then_multiply_backward(library: Collectives, tensors: Tensors, weights: Weights) -> None:
    _multiply_then_reduce(library, tensors, weights)
    set_weight_gradients(library.gather(tensors["shard"]), parts_of(tensors, "activation"), tensors, "weight_gradient")


def _multiply_then_reduce(library: Collectives, tensors: Tensors, weights: Weights) -> None:
    factors = parts_of(tensors, "activation")
    partial = factors[0].new_empty(factors[0].shape[0], weights[0].shape[1])
    _sum_products(factors, weights, partial)
    library.reduce(partial, tensors["product"])


def _sum_products(factors: Matrices, weights: Weights, out: torch.Tensor) -> None:
    """Set `out` to the sum of each matrix times its weight."""
    torch.mm(factors[0], weights[0], out=out)
    for factor, weight in zip(factors[1:], weights[1:], strict=True):
        torch.addmm(out, factor, weight, out=out)


def _multiply_then_reduce_backward(library: Collectives, tensors: Tensors, weights: Weights) -> None:
    gathered = library.gather(tensors["shard"])
    torch.mm(gathered, weights[0], out=tensors["product"])
    set_weight_gradients(tensors["activation"], [gathered], tensors, "weight_gradient")


def _multiply_then_all_reduce(library: Collectives, tensors: Tensors, weights: Weights) -> None:
    _sum_products(parts_of(tensors, "activation"), weights, tensors["product"])
    library.reduce_all(tensors["product"])


def _multiply_then_all_reduce_backward(library: Collectives, tensors: Tensors, weights: Weights) -> None:
    _multiply_then_all_reduce(library, tensors, weights)
    set_weight_gradients(tensors["left"], parts_of(tensors, "activation"), tensors, "weight_gradient")


def _exchange_then_multiply(library: Collectives, tensors: Tensors, weights: Weights) -> None:
    torch.mm(library.exchange(tensors["shard"]), weights[0], out=tensors["product"])


def _exchange_then_multiply_backward(library: Collectives, tensors: Tensors, weights: Weights) -> None:
    gradient = tensors["activation"]
    tensors["product"].copy_(library.exchange(multiply(gradient, weights[0]), is_return=True))
    set_weight_gradients(library.exchange(tensors["shard"]), [gradient], tensors, "weight_gradient")


GATHER = TorchPass("all_gather_matmul", "forward", _gather_then_multiply)
GATHER_BACKWARD = TorchPass("all_gather_matmul", "backward", _gather_then_multiply_backward)
REDUCE = TorchPass("matmul_reduce_scatter", "forward", _multiply_then_reduce)
REDUCE_BACKWARD = TorchPass("matmul_reduce_scatter", "backward", _multiply_then_reduce_backward)
ALL_REDUCE = TorchPass("matmul_all_reduce", "forward", _multiply_then_all_reduce)
COLUMNS_BACKWARD = TorchPass("column_parallel_matmul", "backward", _multiply_then_all_reduce_backward)
EXCHANGE = TorchPass("all_to_all_matmul", "forward", _exchange_then_multiply)
EXCHANGE_BACKWARD = TorchPass("all_to_all_matmul", "backward", _exchange_then_multiply_backward)
PASSES = (GATHER, GATHER_BACKWARD, REDUCE, REDUCE_BACKWARD, ALL_REDUCE, COLUMNS_BACKWARD, EXCHANGE, EXCHANGE_BACKWARD)


# --- forward and backward ---


def _run_all_gather_matmul(
    shard: torch.Tensor, weights: Matrices, num_rows: int, group_name: str, schedule: str
) -> list[torch.Tensor]:
    """See `counterpoint.ops.all_gather_matmul`; the products of all weights."""
    key = key_of((GATHER, group_name, schedule, num_rows), shard, *weights)
    known = known_call(key, group_name)
    if known is None:
        call = OperatorCall(GATHER, ([shard], weights, group_name))
        call.require_shard(num_rows)
        call.plan((num_rows, shard.shape[1], _num_columns(weights)), schedule)
        names = "shard", *part_names("product", len(weights))
        known = call.keep(key, names, _gathered_shapes(shard, weights, num_rows, group_name, schedule))
    return known.run([shard.contiguous()], weights)


def _run_all_gather_matmul_backward(
    gradients: Matrices, shard: torch.Tensor, weights: Matrices, group_name: str, schedule: str
) -> list[torch.Tensor]:
    """Gradients of `all_gather_matmul` for its shard and for each of its weights."""
    return _gradients_of_several((GATHER_BACKWARD, "shard"), gradients, Kept(shard, weights, (group_name, schedule)))


def _run_matmul_reduce_scatter(
    activation: torch.Tensor, weight: torch.Tensor, group_name: str, schedule: str
) -> torch.Tensor:
    """See `counterpoint.ops.matmul_reduce_scatter`."""
    return _run_matmuls_reduce_scatter([activation], [weight], group_name, schedule)


def _run_matmuls_reduce_scatter(activations: Matrices, weights: Matrices, group_name: str, schedule: str) -> torch.Tensor:
    """Return this rank's block of the sum of all products and all ranks."""
    return _sum_of_several((REDUCE, _scattered_sum_shape), activations, weights, group_name, schedule)


def _run_matmul_reduce_scatter_backward(
    gradient: torch.Tensor, activation: torch.Tensor, weight: torch.Tensor, group_name: str, schedule: str
) -> Pair:
    """Gradients of `matmul_reduce_scatter` for its activation and its weight."""
    kept = Kept(activation, [weight], (group_name, schedule))
    of_left, of_weight = _gradients_of_one(REDUCE_BACKWARD, ("shard", "activation"), gradient, kept)
    return of_left, of_weight


def _run_matmul_all_reduce(activation: torch.Tensor, weight: torch.Tensor, group_name: str, schedule: str) -> torch.Tensor:
    """See `counterpoint.ops.matmul_all_reduce`."""
    return _run_matmuls_all_reduce([activation], [weight], group_name, schedule)


def _run_matmuls_all_reduce(activations: Matrices, weights: Matrices, group_name: str, schedule: str) -> torch.Tensor:
    """Return the sum of all products and all ranks."""
    return _sum_of_several((ALL_REDUCE, _reduced_sum_shape), activations, weights, group_name, schedule)


def _sum_of_several(
    shaped: tuple[TorchPass, Callable[..., torch.Tensor]],
    activations: Matrices,
    weights: Matrices,
    group_name: str,
    schedule: str,
) -> torch.Tensor:
    """Return what this rank keeps of the sum of all products. `shaped`: the pass, and the function that makes its result."""
    torch_pass, shape = shaped
    key = key_of((torch_pass, group_name, schedule), *activations, *weights)
    known = known_call(key, group_name)
    if known is None:
        call = OperatorCall(torch_pass, (activations, weights, group_name))
        sizes = activations[0].shape[0], sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        call.plan(sizes, schedule)
        names = *part_names("activation", len(activations)), "product"
        known = call.keep(key, names, [shape(activations, weights, group_name, schedule)])
    return known.run(activations, weights)[0]


def _run_column_parallel_matmul(
    activation: torch.Tensor, weights: Matrices, group_name: str, schedule: str
) -> list[torch.Tensor]:
    """See `counterpoint.ops.column_parallel_matmul`; the products of all weights."""
    for weight in weights:
        require_operands("column_parallel_matmul", activation, weight)
    return [multiply(activation, weight) for weight in weights]


def _run_column_parallel_matmul_backward(
    gradients: Matrices, left: torch.Tensor, weights: Matrices, group_name: str, schedule: str
) -> list[torch.Tensor]:
    """Gradients of `column_parallel_matmul` for its activation and for each of its weights."""
    return _gradients_of_several((COLUMNS_BACKWARD, "left"), gradients, Kept(left, weights, (group_name, schedule)))


def _run_all_to_all_matmul(tokens: torch.Tensor, weight: torch.Tensor, group_name: str, schedule: str) -> torch.Tensor:
    """See `counterpoint.ops.all_to_all_matmul`."""
    key = key_of((EXCHANGE, group_name, schedule), tokens, weight)
    known = known_call(key, group_name)
    if known is None:
        call = OperatorCall(EXCHANGE, ([tokens], [weight], group_name))
        call.plan((tokens.shape[0], *weight.shape), schedule)
        known = call.keep(key, ("shard", "product"), [_exchanged_shape(tokens, weight, group_name, schedule)])
    return known.run([tokens.contiguous()], [weight])[0]


def _run_all_to_all_matmul_backward(
    gradient: torch.Tensor, tokens: torch.Tensor, weight: torch.Tensor, group_name: str, schedule: str
) -> Pair:
    """Gradients of `all_to_all_matmul` for its tokens and its weight."""
    kept = Kept(tokens, [weight], (group_name, schedule))
    of_tokens, of_weight = _gradients_of_one(EXCHANGE_BACKWARD, ("activation", "shard"), gradient, kept)
    return of_tokens, of_weight


def _gradients_of_several(named: tuple[TorchPass, str], gradients: Matrices, kept: Kept) -> list[torch.Tensor]:
    """Return the gradients of an operator's left operand and of each of its weights, unless totals take these.

    `named`: the pass, and the buffer of the left operand.
    """
    (torch_pass, left_name), left, weights, totals = named, kept.left, kept.weights, kept.totals
    key = key_of((torch_pass, kept.group_name, kept.schedule, totals.are_set), left, *gradients, *weights, *totals.matrices)
    known, transposed = known_call(key, kept.group_name), [weight.t() for weight in weights]
    if known is None:
        call = OperatorCall(torch_pass, (gradients, transposed, kept.group_name))
        call.plan((gradients[0].shape[0], left.shape[1], _num_columns(weights)), kept.schedule)
        names = left_name, *part_names("activation", len(weights)), *_gradient_names(kept)
        shapes = _gradients_of_several_shapes(gradients, left, weights, kept.group_name, kept.schedule)
        known = call.keep(key, names, shapes[:1] if totals.matrices else shapes)
    given = [left.contiguous(), *[gradient.contiguous() for gradient in gradients], *totals.matrices]
    return known.run(given, transposed)


def _gradients_of_one(
    torch_pass: TorchPass, names: tuple[str, str], gradient: torch.Tensor, kept: Kept
) -> list[torch.Tensor]:
    """Return the gradients of an operator's left operand and of its one weight, unless a total takes the latter.

    `names`: the buffers of the result's gradient and of the left operand.
    """
    left, (weight,), totals = kept.left, kept.weights, kept.totals
    key = key_of((torch_pass, kept.group_name, kept.schedule, totals.are_set), gradient, left, weight, *totals.matrices)
    known, transposed = known_call(key, kept.group_name), [weight.t()]
    if known is None:
        call = OperatorCall(torch_pass, ([gradient], transposed, kept.group_name))
        call.plan((left.shape[0], *weight.shape), kept.schedule)
        shapes = _gradient_shapes(gradient, left, weight, kept.group_name, kept.schedule)
        known = call.keep(key, (*names, *_gradient_names(kept)), shapes[:1] if totals.matrices else shapes)
    return known.run([gradient.contiguous(), left.contiguous(), *totals.matrices], transposed)


def _gradient_names(kept: Kept) -> tuple[str, ...]:
    """Return the buffers of totals, which are given, and of results."""
    count = len(kept.weights)
    if kept.totals.matrices:
        return *part_names("weight_gradient" if kept.totals.are_set else MAIN_GRADIENT, count), "product"
    return "product", *part_names("weight_gradient", count)


def _num_columns(weights: Matrices) -> int:
    return sum(weight.shape[1] for weight in weights)


# --- results without numbers, for torch.compile ---


def _gathered_shapes(
    shard: torch.Tensor, weights: Matrices, num_rows: int, group_name: str, schedule: str
) -> list[torch.Tensor]:
    return [shard.new_empty(num_rows, weight.shape[1]) for weight in weights]


def _gradients_of_several_shapes(
    gradients: Matrices, shard: torch.Tensor, weights: Matrices, group_name: str, schedule: str
) -> list[torch.Tensor]:
    return [shard.new_empty(shard.shape), *(torch.empty_like(weight) for weight in weights)]


def _gradient_shapes(
    gradient: torch.Tensor, given: torch.Tensor, weight: torch.Tensor, group_name: str, schedule: str
) -> Pair:
    return given.new_empty(given.shape), torch.empty_like(weight)


def _scattered_shape(activation: torch.Tensor, weight: torch.Tensor, group_name: str, schedule: str) -> torch.Tensor:
    return activation.new_empty(own_rows(activation.shape[0], group_name), weight.shape[1])


def _scattered_sum_shape(activations: Matrices, weights: Matrices, group_name: str, schedule: str) -> torch.Tensor:
    return _scattered_shape(activations[0], weights[0], group_name, schedule)


def _reduced_shape(activation: torch.Tensor, weight: torch.Tensor, group_name: str, schedule: str) -> torch.Tensor:
    return activation.new_empty(activation.shape[0], weight.shape[1])


def _reduced_sum_shape(activations: Matrices, weights: Matrices, group_name: str, schedule: str) -> torch.Tensor:
    return _reduced_shape(activations[0], weights[0], group_name, schedule)


def _column_shapes(activation: torch.Tensor, weights: Matrices, group_name: str, schedule: str) -> list[torch.Tensor]:
    return [_reduced_shape(activation, weight, group_name, schedule) for weight in weights]


def _exchanged_shape(tokens: torch.Tensor, weight: torch.Tensor, group_name: str, schedule: str) -> torch.Tensor:
    return tokens.new_empty(group_size(group_name) * own_rows(tokens.shape[0], group_name), weight.shape[1])


# --- derivatives ---


def _gather_gradients(kept: Kept, gradients: Matrices, is_wanted: tuple[bool, bool]) -> Gradients:
    """Return the gradients; if no weight needs one, nothing is gathered again."""
    if is_wanted[1]:
        return _all_gradients(all_gather_matmul_backward, (GATHER_BACKWARD, "shard"), gradients, kept)
    schedule = _backward_text("all_gather_matmul", kept.schedule)
    weights = [weight.t() for weight in kept.weights]
    return matmuls_reduce_scatter(list(gradients), weights, kept.group_name, schedule), [None] * len(weights)


def _reduce_gradients(kept: Kept, gradients: Matrices, is_wanted: tuple[bool, bool]) -> Gradients:
    (gradient,), (weight,), left, group_name = gradients, kept.weights, kept.left, kept.group_name
    if is_wanted[1] and kept.totals.matrices:
        with _named(matmul_reduce_scatter_backward):
            return _gradients_of_one(REDUCE_BACKWARD, ("shard", "activation"), gradient, kept)[0], [None]
    if is_wanted[1]:
        of_left, of_weight = matmul_reduce_scatter_backward(gradient, left, weight, group_name, kept.schedule)
        return of_left, [of_weight]
    schedule = _backward_text("matmul_reduce_scatter", kept.schedule)
    return all_gather_matmul(gradient, [weight.t()], left.shape[0], group_name, schedule)[0], [None]


def _all_reduce_gradients(kept: Kept, gradients: Matrices, is_wanted: tuple[bool, bool]) -> Gradients:
    """Return the gradients. The product and all later work are the same on every rank, so its gradient is not summed."""
    (gradient,), (weight,) = gradients, kept.weights
    of_left = multiply(gradient, weight.t()) if is_wanted[0] else None
    return of_left, _weight_gradients(kept, gradients) if is_wanted[1] else [None]


def _column_gradients(kept: Kept, gradients: Matrices, is_wanted: tuple[bool, bool]) -> Gradients:
    """Return the gradients. If the activation needs none, nothing is sent."""
    if not is_wanted[0]:
        return None, _weight_gradients(kept, gradients)
    if is_wanted[1]:
        return _all_gradients(column_parallel_matmul_backward, (COLUMNS_BACKWARD, "left"), gradients, kept)
    schedule = _backward_text("column_parallel_matmul", kept.schedule)
    weights = [weight.t() for weight in kept.weights]
    return matmuls_all_reduce(list(gradients), weights, kept.group_name, schedule), [None] * len(weights)


def _all_gradients(operator: Operator, named: tuple[TorchPass, str], gradients: Matrices, kept: Kept) -> Gradients:
    """Return the gradients of the left operand and of the weights, or None for those that totals take. torch's dispatcher
    does not see the latter, since its operators return what they compute; the profiler sees the operator's name.
    """
    if not kept.totals.matrices:
        found = operator(list(gradients), kept.left, kept.weights, kept.group_name, kept.schedule)
        return found[0], found[1:]
    with _named(operator):
        return _gradients_of_several(named, gradients, kept)[0], [None] * len(kept.weights)


def _named(operator: Operator) -> AbstractContextManager[object]:
    """Return a range of the profiler that is called like an operator."""
    is_profiled = torch.autograd._profiler_enabled()
    return record_function(f"counterpoint::{operator.name}") if is_profiled else nullcontext()


def _weight_gradients(kept: Kept, gradients: Matrices) -> list[torch.Tensor | None]:
    """Return the weights' gradients, unless totals take them, where nothing is sent.

    They are in the layout of their weights, which are often those of linears, transposed: autograd would copy them from
    another. torch.compile traces this, and drops an `out` with its layout.
    """
    left, totals = kept.left, kept.totals
    if totals.matrices:
        for gradient, total in zip(gradients, totals.matrices, strict=True):
            set_product(left.t(), gradient, total, is_added=not totals.are_set)
        return [None] * len(gradients)
    return [
        multiply(left.t(), gradient) if weight.is_contiguous() else multiply(gradient.t(), left).t()
        for gradient, weight in zip(gradients, kept.weights, strict=True)
    ]


def _exchange_gradients(kept: Kept, gradients: Matrices, _is_wanted: tuple[bool, bool]) -> Gradients:
    (gradient,), (weight,) = gradients, kept.weights
    of_tokens, of_weight = all_to_all_matmul_backward(gradient, kept.left, weight, kept.group_name, kept.schedule)
    return of_tokens, [of_weight]


def _backward_text(operation: Operation, schedule: str) -> str:
    """Return the schedule of an operator's backward pass, for an operator that is one half of it."""
    if not schedule:
        return ""
    description = backward_description(operation, msgspec.json.decode(schedule, type=ScheduleDescription))
    return msgspec.json.encode(description).decode()


all_gather_matmul_backward = Operator(
    "all_gather_matmul_backward", _run_all_gather_matmul_backward, _gradients_of_several_shapes
)
matmul_reduce_scatter_backward = Operator(
    "matmul_reduce_scatter_backward", _run_matmul_reduce_scatter_backward, _gradient_shapes
)
matmuls_reduce_scatter = Operator("matmuls_reduce_scatter", _run_matmuls_reduce_scatter, _scattered_sum_shape)
matmuls_all_reduce = Operator("matmuls_all_reduce", _run_matmuls_all_reduce, _reduced_sum_shape)
column_parallel_matmul_backward = Operator(
    "column_parallel_matmul_backward", _run_column_parallel_matmul_backward, _gradients_of_several_shapes
)
all_to_all_matmul_backward = Operator("all_to_all_matmul_backward", _run_all_to_all_matmul_backward, _gradient_shapes)
all_gather_matmul = Operator("all_gather_matmul", _run_all_gather_matmul, _gathered_shapes, _gather_gradients)
matmul_reduce_scatter = Operator("matmul_reduce_scatter", _run_matmul_reduce_scatter, _scattered_shape, _reduce_gradients)
matmul_all_reduce = Operator("matmul_all_reduce", _run_matmul_all_reduce, _reduced_shape, _all_reduce_gradients)
column_parallel_matmul = Operator("column_parallel_matmul", _run_column_parallel_matmul, _column_shapes, _column_gradients)
all_to_all_matmul = Operator("all_to_all_matmul", _run_all_to_all_matmul, _exchanged_shape, _exchange_gradients)


# --- for torch's FlopCounterMode: two operations for each multiplication of this rank's matmuls ---

Shape = Sequence[int]


def _count(flops: Callable[..., int], *counted: Operator) -> None:
    """Let the mode count these operators. It gives `flops` their arguments, with shapes in the place of tensors."""
    register_flop_formula([getattr(torch.ops.counterpoint, each.name) for each in counted])(flops)


def _gathered_flops(_shard: Shape, weights: Sequence[Shape], num_rows: int, *_: object, **__: object) -> int:
    return 2 * num_rows * sum(map(math.prod, weights))


def _gathered_backward_flops(
    gradients: Sequence[Shape], shard: Shape, weights: Sequence[Shape], *_: object, **__: object
) -> int:
    return 2 * _gathered_flops(shard, weights, gradients[0][0])


def _column_flops(left: Shape, weights: Sequence[Shape], *_: object, **__: object) -> int:
    return 2 * left[0] * sum(map(math.prod, weights))


def _multiplied_flops(left: Shape, weight: Shape, *_: object, **__: object) -> int:
    return 2 * left[0] * math.prod(weight)


def _multiplied_backward_flops(_gradient: Shape, left: Shape, weight: Shape, *_: object, **__: object) -> int:
    return 2 * _multiplied_flops(left, weight)


def _added_flops(lefts: Sequence[Shape], weights: Sequence[Shape], *_: object, **__: object) -> int:
    return sum(map(_multiplied_flops, lefts, weights))


_count(_gathered_flops, all_gather_matmul)
_count(_gathered_backward_flops, all_gather_matmul_backward, column_parallel_matmul_backward)
_count(_column_flops, column_parallel_matmul)
_count(_multiplied_flops, matmul_reduce_scatter, matmul_all_reduce, all_to_all_matmul)
_count(_multiplied_backward_flops, matmul_reduce_scatter_backward, all_to_all_matmul_backward)
_count(_added_flops, matmuls_reduce_scatter, matmuls_all_reduce)
