"""The operators as torch custom operators, with their shapes for torch.compile and their gradients.

Forward and backward are operators of their own, so a compiled graph holds both whole. Nothing gathered is kept for
backward: the shard is sent again while the gradient's matmul runs, which keeps the memory that sequence parallelism
saves. Groups travel by name and schedules as JSON text, because an operator's arguments must be plain.
"""

import msgspec
import torch
from torch.distributed import distributed_c10d

from counterpoint.ops.computation import multiply
from counterpoint.ops.dispatch import Gradients, Kept, Matrices, Operator
from counterpoint.ops.runtime import Request, Runtime, runtime_of
from counterpoint.ops.transport import AbstractPrepared, named_parts
from counterpoint.schedule import ScheduleDescription, backward_description
from counterpoint.schedule.actions import Operation, Pass

Pair = tuple[torch.Tensor, torch.Tensor]


def _group_size(group_name: str) -> int:
    return int(distributed_c10d._resolve_process_group(group_name).size())


def _own_rows(num_rows: int, group_name: str) -> int:
    """Rows of this rank's block, as `torch.tensor_split` divides them."""
    group = distributed_c10d._resolve_process_group(group_name)
    size, rank = int(group.size()), int(group.rank())
    return num_rows // size + int(rank < num_rows % size)


def _run_all_gather_matmul(
    shard: torch.Tensor, weights: Matrices, num_rows: int, group_name: str, schedule: str
) -> list[torch.Tensor]:
    """See `counterpoint.ops.all_gather_matmul`; the products of all weights."""
    run = _Run("all_gather_matmul", "forward", ([shard], weights, group_name))
    run.require_shard(num_rows)
    run.plan((num_rows, shard.shape[1], _num_columns(weights)), schedule)
    products = [shard.new_empty(num_rows, weight.shape[1]) for weight in weights]
    run({"shard": shard.contiguous(), **named_parts("product", products)})
    return products


def _run_all_gather_matmul_backward(
    gradients: Matrices, shard: torch.Tensor, weights: Matrices, group_name: str, schedule: str
) -> list[torch.Tensor]:
    """Gradients of `all_gather_matmul` for its shard and for each of its weights."""
    run = _Run("all_gather_matmul", "backward", (gradients, [weight.t() for weight in weights], group_name))
    run.plan((gradients[0].shape[0], shard.shape[1], _num_columns(weights)), schedule)
    of_shard, of_weights = shard.new_empty(shard.shape), [torch.empty_like(weight) for weight in weights]
    activations = named_parts("activation", [gradient.contiguous() for gradient in gradients])
    results = {"product": of_shard, **named_parts("weight_gradient", of_weights)}
    run({**activations, "shard": shard.contiguous(), **results})
    return [of_shard, *of_weights]


def _run_matmul_reduce_scatter(
    activation: torch.Tensor, weight: torch.Tensor, group_name: str, schedule: str
) -> torch.Tensor:
    """See `counterpoint.ops.matmul_reduce_scatter`."""
    return _run_matmuls_reduce_scatter([activation], [weight], group_name, schedule)


def _run_matmuls_reduce_scatter(activations: Matrices, weights: Matrices, group_name: str, schedule: str) -> torch.Tensor:
    """This rank's block of the sum of all products and all ranks."""
    run = _Run("matmul_reduce_scatter", "forward", (activations, weights, group_name))
    num_rows, num_columns = activations[0].shape[0], weights[0].shape[1]
    run.plan((num_rows, sum(weight.shape[0] for weight in weights), num_columns), schedule)
    product = activations[0].new_empty(_own_rows(num_rows, group_name), num_columns)
    run({**named_parts("activation", activations), "product": product})
    return product


def _run_matmul_reduce_scatter_backward(
    gradient: torch.Tensor, activation: torch.Tensor, weight: torch.Tensor, group_name: str, schedule: str
) -> Pair:
    """Gradients of `matmul_reduce_scatter` for its activation and its weight."""
    run = _Run("matmul_reduce_scatter", "backward", ([gradient], [weight.t()], group_name))
    run.plan((activation.shape[0], *weight.shape), schedule)
    results = activation.new_empty(activation.shape), torch.empty_like(weight)
    run({"shard": gradient.contiguous(), "activation": activation.contiguous(), **_result_buffers(results)})
    return results


def _run_matmul_all_reduce(activation: torch.Tensor, weight: torch.Tensor, group_name: str, schedule: str) -> torch.Tensor:
    """See `counterpoint.ops.matmul_all_reduce`."""
    run = _Run("matmul_all_reduce", "forward", ([activation], [weight], group_name))
    run.plan((activation.shape[0], *weight.shape), schedule)
    product = activation.new_empty(activation.shape[0], weight.shape[1])
    run({"activation": activation, "product": product})
    return product


def _run_all_to_all_matmul(tokens: torch.Tensor, weight: torch.Tensor, group_name: str, schedule: str) -> torch.Tensor:
    """See `counterpoint.ops.all_to_all_matmul`."""
    run = _Run("all_to_all_matmul", "forward", ([tokens], [weight], group_name))
    run.plan((tokens.shape[0], *weight.shape), schedule)
    num_received = _group_size(group_name) * _own_rows(tokens.shape[0], group_name)
    product = tokens.new_empty(num_received, weight.shape[1])
    run({"shard": tokens.contiguous(), "product": product})
    return product


def _run_all_to_all_matmul_backward(
    gradient: torch.Tensor, tokens: torch.Tensor, weight: torch.Tensor, group_name: str, schedule: str
) -> Pair:
    """Gradients of `all_to_all_matmul` for its tokens and its weight."""
    run = _Run("all_to_all_matmul", "backward", ([gradient], [weight.t()], group_name))
    run.plan((tokens.shape[0], *weight.shape), schedule)
    results = tokens.new_empty(tokens.shape), torch.empty_like(weight)
    run({"activation": gradient.contiguous(), "shard": tokens.contiguous(), **_result_buffers(results)})
    return results


def _num_columns(weights: Matrices) -> int:
    return sum(weight.shape[1] for weight in weights)


def _result_buffers(results: Pair) -> dict[str, torch.Tensor]:
    return {"product": results[0], "weight_gradient": results[1]}


class _Run:
    """One call: checks its operands, finds the plan, runs it, in this order.

    Left matrices are one for all weights, or one for each.
    """

    _prepared: AbstractPrepared

    def __init__(self, operation: Operation, direction: Pass, operands: tuple[Matrices, Matrices, str]) -> None:
        self._operation, self._direction = operation, direction
        lefts, self._weights, group_name = operands
        self._left = lefts[0]
        # if one operand was left on the CPU, the other ranks meet where the GPU is
        device = next((each.device for each in (*lefts, *self._weights) if each.is_cuda), self._left.device)
        self._runtime: Runtime = runtime_of(group_name, device)
        pairs = zip(lefts if len(lefts) > 1 else [self._left] * len(self._weights), self._weights, strict=True)
        problem = next((found for left, weight in pairs if (found := self._problem_of(left, weight))), "")
        if problem:
            self._runtime.refuse(problem)

    def plan(self, sizes: tuple[int, int, int], schedule: str) -> None:
        """Find the plan for (rows, inner, columns), before memory for results is taken: ranks fail together here."""
        num_rows, num_inner, num_columns = sizes
        request = Request(
            operation=self._operation,
            direction=self._direction,
            num_rows=num_rows,
            num_inner=num_inner,
            num_columns=num_columns,
            dtype=self._left.dtype,
            schedule=schedule,
        )
        self._prepared = self._runtime.plan(request).prepared

    def __call__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._prepared.run(tensors, self._weights)

    def require_shard(self, num_rows: int) -> None:
        """Refuse a shard that is not this rank's part of `num_rows` rows."""
        group, found = self._runtime.group, self._left.shape[0]
        own_rows = _own_rows(num_rows, group.group_name)
        if found != own_rows:
            self._runtime.refuse(
                f"{self._operation} of {num_rows} rows needs {own_rows} of them on rank {group.rank()} of {group.size()}; "
                f"found {found}. Split them as torch.tensor_split does, or give the right num_rows."
            )

    def _problem_of(self, left: torch.Tensor, weight: torch.Tensor) -> str:
        """What is wrong with two operands, in one line, or nothing."""
        if left.device != weight.device:
            return f"{self._operation} needs its operands on one device; found {left.device} and {weight.device}. Move one."
        if left.dtype != weight.dtype:
            return f"{self._operation} needs operands of one type; found {left.dtype} and {weight.dtype}. Convert one."
        if left.dim() != 2 or weight.dim() != 2 or left.shape[1] != weight.shape[0]:
            shapes = f"{tuple(left.shape)} and {tuple(weight.shape)}"
            return f"{self._operation} multiplies (rows, K) by (K, columns); found {shapes}. Change one."
        return ""


def _gathered_shapes(
    shard: torch.Tensor, weights: Matrices, num_rows: int, group_name: str, schedule: str
) -> list[torch.Tensor]:
    return [shard.new_empty(num_rows, weight.shape[1]) for weight in weights]


def _gathered_gradient_shapes(
    gradients: Matrices, shard: torch.Tensor, weights: Matrices, group_name: str, schedule: str
) -> list[torch.Tensor]:
    return [shard.new_empty(shard.shape), *(torch.empty_like(weight) for weight in weights)]


def _gradient_shapes(
    gradient: torch.Tensor, given: torch.Tensor, weight: torch.Tensor, group_name: str, schedule: str
) -> Pair:
    return given.new_empty(given.shape), torch.empty_like(weight)


def _scattered_shape(activation: torch.Tensor, weight: torch.Tensor, group_name: str, schedule: str) -> torch.Tensor:
    return activation.new_empty(_own_rows(activation.shape[0], group_name), weight.shape[1])


def _scattered_sum_shape(activations: Matrices, weights: Matrices, group_name: str, schedule: str) -> torch.Tensor:
    return _scattered_shape(activations[0], weights[0], group_name, schedule)


def _reduced_shape(activation: torch.Tensor, weight: torch.Tensor, group_name: str, schedule: str) -> torch.Tensor:
    return activation.new_empty(activation.shape[0], weight.shape[1])


def _exchanged_shape(tokens: torch.Tensor, weight: torch.Tensor, group_name: str, schedule: str) -> torch.Tensor:
    return tokens.new_empty(_group_size(group_name) * _own_rows(tokens.shape[0], group_name), weight.shape[1])


def _gather_gradients(kept: Kept, gradients: Matrices, is_wanted: tuple[bool, bool]) -> Gradients:
    """Of weights that need none, nothing is gathered again."""
    if is_wanted[1]:
        found = all_gather_matmul_backward(list(gradients), kept.left, kept.weights, kept.group_name, kept.schedule)
        return found[0], found[1:]
    schedule = _backward_text("all_gather_matmul", kept.schedule)
    weights = [weight.t() for weight in kept.weights]
    return matmuls_reduce_scatter(list(gradients), weights, kept.group_name, schedule), [None] * len(weights)


def _reduce_gradients(kept: Kept, gradients: Matrices, is_wanted: tuple[bool, bool]) -> Gradients:
    (gradient,), (weight,), left, group_name = gradients, kept.weights, kept.left, kept.group_name
    if is_wanted[1]:
        of_left, of_weight = matmul_reduce_scatter_backward(gradient, left, weight, group_name, kept.schedule)
        return of_left, [of_weight]
    schedule = _backward_text("matmul_reduce_scatter", kept.schedule)
    return all_gather_matmul(gradient, [weight.t()], left.shape[0], group_name, schedule)[0], [None]


def _all_reduce_gradients(kept: Kept, gradients: Matrices, is_wanted: tuple[bool, bool]) -> Gradients:
    """The product is the same on every rank, and so is what follows: its gradient is not summed again."""
    (gradient,), (weight,) = gradients, kept.weights
    return (
        multiply(gradient, weight.t()) if is_wanted[0] else None,
        [multiply(kept.left.t(), gradient) if is_wanted[1] else None],
    )


def _exchange_gradients(kept: Kept, gradients: Matrices, _is_wanted: tuple[bool, bool]) -> Gradients:
    (gradient,), (weight,) = gradients, kept.weights
    of_tokens, of_weight = all_to_all_matmul_backward(gradient, kept.left, weight, kept.group_name, kept.schedule)
    return of_tokens, [of_weight]


def _backward_text(operation: Operation, schedule: str) -> str:
    """The schedule that the backward pass of an operator takes, for an operator that is one half of it."""
    if not schedule:
        return ""
    description = backward_description(operation, msgspec.json.decode(schedule, type=ScheduleDescription))
    return msgspec.json.encode(description).decode()


all_gather_matmul_backward = Operator(
    "all_gather_matmul_backward", _run_all_gather_matmul_backward, _gathered_gradient_shapes
)
matmul_reduce_scatter_backward = Operator(
    "matmul_reduce_scatter_backward", _run_matmul_reduce_scatter_backward, _gradient_shapes
)
matmuls_reduce_scatter = Operator("matmuls_reduce_scatter", _run_matmuls_reduce_scatter, _scattered_sum_shape)
all_to_all_matmul_backward = Operator("all_to_all_matmul_backward", _run_all_to_all_matmul_backward, _gradient_shapes)
all_gather_matmul = Operator("all_gather_matmul", _run_all_gather_matmul, _gathered_shapes, _gather_gradients)
matmul_reduce_scatter = Operator("matmul_reduce_scatter", _run_matmul_reduce_scatter, _scattered_shape, _reduce_gradients)
matmul_all_reduce = Operator("matmul_all_reduce", _run_matmul_all_reduce, _reduced_shape, _all_reduce_gradients)
all_to_all_matmul = Operator("all_to_all_matmul", _run_all_to_all_matmul, _exchanged_shape, _exchange_gradients)
