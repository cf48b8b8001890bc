"""Operators for a mixture of experts that are spread over ranks: tokens travel to their experts' ranks while the first
matmuls run, and results return while the last ones run.

A row is a token's copy for one expert; rows are sorted by expert. Counts say how many rows each expert gets; the ranks
exchange them in every call. `expert_passes.py` has the order of computation.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from counterpoint.ops.dispatch import refuse_second_derivative
from counterpoint.ops.expert_passes import (
    Wanted,
    dispatch_multiply,
    dispatch_multiply_backward,
    ffn,
    ffn_backward,
    multiply_combine,
    multiply_combine_backward,
)
from counterpoint.ops.expert_routing import Called, ExpertRouting, TokensPerExpert, route
from counterpoint.ops.gated_activation import Activation
from counterpoint.ops.runtime import Runtime, group_or_world, runtime_of, runtime_of_group
from counterpoint.schedule import ScheduleDescription

Group: TypeAlias = dist.ProcessGroup


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the host waits for counts within
def expert_ffn(
    tokens: torch.Tensor,
    tokens_per_expert: TokensPerExpert,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w3: torch.Tensor | None = None,
    *,
    group: Group | None = None,
    activation: Activation | None = None,
    schedule: ScheduleDescription | None = None,
    beside: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Run the experts' feed-forward layers on this rank's tokens, each on the rank that holds its expert: (T, dim) ->
    (T, dim).

    `tokens` are sorted by expert; each of W ranks holds E experts. `tokens_per_expert` are W * E numbers of rows that
    add up to T, which may differ between ranks. w1 and w3 are (E, hidden, dim), w2 is (E, dim, hidden). A token's result
    is `silu(w1 x) * (w3 x)` times w2; without w3, `silu(w1 x)` times w2. `activation` replaces that function of one or
    two matrices (n, hidden); it works elementwise and autograd differentiates it.

    `beside` is called once, in forward, as soon as tokens are in transit: its computation on the current stream hides
    them, and has its own gradients. Without a `schedule`, `expert_choice.py` decides whether rows go by copies and in
    how many pieces. All ranks call it together, with the same sizes of experts. The host waits for the counts, in
    forward only. The same tensors must need gradients on all ranks. Raises `OperatorError`.
    """
    weights = [w1, w2] if w3 is None else [w1, w2, w3]
    runtime = _runtime_for("expert_ffn", tokens, weights, group)
    problem = _problem_of_ffn(tokens, weights)
    if problem:
        runtime.refuse(problem)
    sizes = (w1.shape[0], len(weights), *w1.shape[1:])
    routing = _routed(runtime, Called("expert_ffn", tokens, tokens_per_expert, sizes, schedule))
    call = _Call(routing, activation, None if beside is None else _with_gradients(beside))
    found: torch.Tensor = _ExpertFfn.apply(call, tokens, *weights)
    return found


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the host waits for counts within
def dispatch_grouped_matmul(
    tokens: torch.Tensor,
    tokens_per_expert: TokensPerExpert,
    weights: torch.Tensor,
    group: Group | None = None,
    *,
    schedule: ScheduleDescription | None = None,
) -> tuple[tuple[torch.Tensor, ...], ExpertRouting]:
    """Run the first half of `expert_ffn`: all ranks' tokens for this rank's experts, times these experts' weights.

    (T, dim), (E, N, dim) -> (rows, N) of each group of experts that was computed together; none if no rows came. Rows
    are in the order of experts, and within an expert in the order of source ranks. The routing says how many there are,
    and `grouped_matmul_combine` uses it to bring rows back. Raises `OperatorError`.
    """
    runtime = _runtime_for("dispatch_grouped_matmul", tokens, [weights], group)
    problem = _problem_of("dispatch_grouped_matmul", tokens, weights, tokens.shape[-1] if tokens.dim() else 0)
    if problem:
        runtime.refuse(problem)
    call = Called("dispatch_grouped_matmul", tokens, tokens_per_expert, tuple(weights.shape), schedule)
    routing = _routed(runtime, call)
    return _Dispatch.apply(routing, tokens, weights), routing


@torch.compiler.disable  # type: ignore[untyped-decorator]  # as the first half
def grouped_matmul_combine(inputs: Sequence[torch.Tensor], weights: torch.Tensor, routing: ExpertRouting) -> torch.Tensor:
    """Run the second half of `expert_ffn`: rows of this rank's experts times their weights, sent back to the tokens'
    ranks.

    (rows, K) of each group, (E, dim, K) -> (T, dim): groups as `dispatch_grouped_matmul` returned them, results in the
    order of its tokens. Raises `OperatorError`.
    """
    problem = _problem_of_combine(inputs, weights, routing)
    if problem:
        routing.runtime.refuse(problem)
    found: torch.Tensor = _Combine.apply(routing, weights, *inputs)
    return found


class _Call(NamedTuple):
    """The arguments of a call of the whole layer other than tensors."""

    routing: ExpertRouting
    activation: Activation | None
    beside: Callable[[], None] | None


class _ExpertFfn(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """The layer as one autograd function. Dispatch modes, such as selective checkpointing's, do not see inside: they
    would handle its matmuls one by one.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, tokens: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        operands = _dense([tokens, *weights])
        with _unseen():
            results, kept = ffn(*call, operands, is_differentiated=any(ctx.needs_input_grad))
        ctx.call, ctx.num_operands = call._replace(beside=None), len(operands)
        ctx.save_for_backward(*operands, *kept)
        return results

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_derivative("expert_ffn")
        saved = ctx.saved_tensors  # checkpointing allows one read
        operands, kept = saved[: ctx.num_operands], saved[ctx.num_operands :]
        _, of_tokens, of_first, of_down, *of_third = ctx.needs_input_grad
        wanted = Wanted(of_tokens, any((of_first, *of_third)), of_down)
        call: _Call = ctx.call
        with _unseen():
            tensors = operands, kept, gradient.contiguous()
            found, of_weights = ffn_backward(call.routing, call.activation, tensors, wanted)
        return None, found, *of_weights


class _Dispatch(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    @staticmethod
    def forward(ctx: Any, routing: ExpertRouting, tokens: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.routing = routing
        ctx.save_for_backward(*(operands := _dense([tokens, weights])))
        with _unseen():
            return dispatch_multiply(routing, *operands)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_derivative("dispatch_grouped_matmul")
        _, of_tokens, of_weights = ctx.needs_input_grad
        tokens, weights = ctx.saved_tensors
        with _unseen():
            wanted = Wanted(tokens=of_tokens, ups=of_weights)
            found = dispatch_multiply_backward(ctx.routing, tokens, weights, _dense(gradients), wanted)
        return None, *found


class _Combine(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    @staticmethod
    def forward(ctx: Any, routing: ExpertRouting, weights: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.routing = routing
        weights, *groups = _dense([weights, *inputs])
        ctx.save_for_backward(weights, *groups)
        with _unseen():
            return multiply_combine(routing, groups, weights)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_derivative("grouped_matmul_combine")
        _, of_weights, *of_inputs = ctx.needs_input_grad
        weights, *inputs = ctx.saved_tensors
        with _unseen():
            wanted = Wanted(tokens=any(of_inputs), down=of_weights)
            found, of_weights = multiply_combine_backward(ctx.routing, inputs, weights, gradient.contiguous(), wanted)
        return None, of_weights, *found


def _with_gradients(beside: Callable[[], None]) -> Callable[[], None]:
    """Run what is called within an operator, with gradients if they are on here."""
    is_enabled = torch.is_grad_enabled()

    def call() -> None:
        with torch.set_grad_enabled(is_enabled):
            beside()

    return call


def _routed(runtime: Runtime, call: Called) -> ExpertRouting:
    with torch.no_grad(), _unseen():
        return route(runtime, call)


def _unseen() -> AbstractContextManager[object]:
    """Hide calls from dispatch modes."""
    is_seen = torch._C._len_torch_dispatch_stack() > 0
    return _disable_current_modes() if is_seen else nullcontext()


def _dense(operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [each.contiguous() for each in operands]


def _runtime_for(operator: str, tokens: object, weights: Sequence[object], group: Group | None) -> Runtime:
    """Return the runtime of a call; operands that are no tensors are refused on every rank."""
    found = group_or_world(group)
    devices = [each.device for each in (tokens, *weights) if isinstance(each, torch.Tensor)]
    device = next((each for each in devices if each.type == "cuda"), next(iter(devices), None))
    runtime = runtime_of_group(found) if device is None else runtime_of(found.group_name, device)
    wrong = next((each for each in (tokens, *weights) if not isinstance(each, torch.Tensor)), None)
    if len(devices) < 1 + len(weights):
        runtime.refuse(
            f"{operator} takes tensors as tokens and weights; found a value of type {type(wrong).__name__}. Pass a tensor."
        )
    return runtime


def _problem_of_ffn(tokens: torch.Tensor, weights: Sequence[torch.Tensor]) -> str:
    """Return what is wrong with a layer's operands, in one line, or nothing."""
    w1, w2, *w3 = weights
    dim = tokens.shape[-1] if tokens.dim() else 0
    found = next((each for each in (_problem_of("expert_ffn", tokens, up, dim) for up in (w1, *w3)) if each), "")
    shapes = [tuple(each.shape) for each in weights]
    if not found and (w1.shape != w2.mT.shape or any(up.shape != w1.shape for up in w3)):
        return f"expert_ffn takes w1 and w3 of (E, hidden, dim) and w2 of (E, dim, hidden); found {shapes}. Change one."
    return found or _problem_of("expert_ffn", tokens, w2, w1.shape[1])


def _problem_of_combine(inputs: Sequence[torch.Tensor], weights: torch.Tensor, routing: ExpertRouting) -> str:
    name, layout = "grouped_matmul_combine", routing.layout
    wanted = [group.rows.stop - group.rows.start for group in layout.groups]
    found = [each.shape[0] if isinstance(each, torch.Tensor) and each.dim() == 2 else None for each in inputs]
    if found != wanted:
        return f"{name} takes matrices of {wanted} rows for this routing; found {found}. Pass those of the dispatch."
    if weights.dim() == 3 and weights.shape[0] != layout.num_experts:
        return f"{name} takes weights of {layout.num_experts} experts; found {weights.shape[0]}. Pass all of them."
    return next((problem for each in inputs if (problem := _problem_of(name, each, weights, each.shape[1]))), "")


def _problem_of(operator: str, rows: torch.Tensor, weights: torch.Tensor, num_inner: int) -> str:
    """Return what is wrong with rows and weights that are to be multiplied along `num_inner` numbers."""
    if rows.device != weights.device:
        return f"{operator} needs its operands on one device; found {rows.device} and {weights.device}. Move one."
    if rows.dtype != weights.dtype:
        return f"{operator} needs operands of one type; found {rows.dtype} and {weights.dtype}. Convert one."
    if not rows.dtype.is_floating_point or rows.dtype.itemsize == 1:
        return f"{operator} multiplies floating-point numbers of 16 bits or more; found {rows.dtype}. Convert both operands."
    if rows.dim() != 2 or weights.dim() != 3 or weights.shape[2] != num_inner or not weights.shape[0]:
        shapes = f"{tuple(rows.shape)} and {tuple(weights.shape)}"
        return f"{operator} multiplies (rows, K) by (experts, columns, K); found {shapes}. Change one."
    return ""
