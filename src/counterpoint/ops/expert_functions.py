"""Calls of experts as autograd functions, and as operators that dispatch modes can see.

Where a mode is active, such as selective checkpointing's, a forward call is one operator (`OPERATORS`): the mode handles it
whole, and not the matmuls within. Its results are all that backward needs of the call, the counts of rows included. So a
call whose results a policy saves is not run again, and its rows do not travel again.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar, final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from counterpoint.ops.dispatch import LIBRARY, is_checkpointed, refuse_second_derivative
from counterpoint.ops.expert_passes import (
    Layer,
    Linear,
    Totals,
    Wanted,
    dispatch_multiply,
    dispatch_multiply_backward,
    ffn,
    ffn_backward,
    multiply_combine,
    multiply_combine_backward,
)
from counterpoint.ops.expert_routing import Called, ExpertRouting, route, route_again
from counterpoint.ops.gated_activation import Activation
from counterpoint.ops.runtime import Runtime

NAMES = ("expert_ffn", "dispatch_grouped_matmul", "grouped_matmul_combine")
Run = Callable[[], list[torch.Tensor]]
T = TypeVar("T")
_RUN: ContextVar[Run] = ContextVar("the call of an operator that a dispatch mode handles")


def _run_named(_given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return _RUN.get()()


for _name in NAMES:
    LIBRARY.define(f"{_name}(Tensor[] given) -> Tensor[]")
    LIBRARY.impl(_name, _run_named, "CompositeExplicitAutograd")

# What a policy of selective checkpointing can name
OPERATORS = tuple(getattr(torch.ops.counterpoint, name).default for name in NAMES)


def _seen(name: str, given: Sequence[torch.Tensor | None], run: Run) -> list[torch.Tensor]:
    """Return the results of `run`, which dispatch modes see as the operator of that name; a mode that has saved them does
    not run it.
    """
    if not _is_seen():
        return run()
    with _unseen():
        keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()

    def run_with_autograd() -> list[torch.Tensor]:
        with torch._C._ForceDispatchKeyGuard(*keys):  # within an operator of torch, autograd records nothing
            return run()

    token = _RUN.set(run_with_autograd)
    try:
        operator = getattr(torch.ops.counterpoint, name).default
        return list(operator([each for each in given if each is not None]))
    finally:
        _RUN.reset(token)


@final
class ExpertCall:
    """The arguments of a call other than its tensors. `routing` is set by the forward pass."""

    routing: ExpertRouting

    def __init__(
        self,
        runtime: Runtime,
        called: Called,
        *,
        activation: Activation | None = None,
        beside: Callable[[], None] | None = None,
        is_fp8: bool = False,
        totals: Sequence[Totals | None] = (),
    ) -> None:
        self.activation, self.is_fp8, self.totals = activation, is_fp8, totals
        self._runtime, self._called, self._is_routed = runtime, called, False
        self._beside = None if beside is None else _with_gradients(beside)
        self._problem: BaseException | None = None  # of `beside`

    def route(self, tokens: torch.Tensor, firsts: Sequence[Linear]) -> ExpertRouting:
        """Exchange the counts of rows, and compute what hides them and the tokens, which are contiguous. `firsts`: the
        linears that multiply the tokens.
        """
        weights = [] if any(each.is_fp8 for each in firsts) else [each.weights for each in firsts]
        called = self._called._replace(tokens=tokens, is_checkpointed=is_checkpointed())
        self.routing, self._is_routed = route(self._runtime, called, weights, self.compute_beside), True
        return self.routing

    def keeps(self, routing: ExpertRouting) -> bool:
        """Return whether the tokens that arrive are kept for the gradients of weights."""
        is_asked = self._called.keeps_tokens or (self._called.schedule is None and routing.is_small)
        return routing.has_gradients and is_asked

    def settle(self, gathered: torch.Tensor) -> ExpertRouting:
        """Return the routing; a call whose results were saved finds it in what it gathered."""
        if not self._is_routed:
            with _unseen():
                self.routing = route_again(self._runtime, self._called, gathered)
        self.compute_beside()
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        return self.routing

    def compute_beside(self) -> None:
        """Compute what hides the tokens, once. A recomputation whose results were saved computes it too.

        The other ranks go on meanwhile, so an error waits until the call has ended: `settle` raises it. Checkpointing ends
        recomputations by such an error.
        """
        beside, self._beside = self._beside, None
        if beside is None:
            return
        try:
            beside()
        except BaseException as problem:
            self._problem = problem


@final
class ExpertFfn(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """The whole layer."""

    @staticmethod
    def forward(ctx: Any, call: ExpertCall, tokens: torch.Tensor, *layer: torch.Tensor | None) -> torch.Tensor:
        """See `torch.autograd.Function.forward`."""
        operands = [tokens.contiguous(), *map(_in_place, layer)]
        _, _, *of_layer = ctx.needs_input_grad
        (of_first, _, *of_third), _ = _halves(of_layer)
        of_ups = any((of_first, *of_third))

        def run() -> list[torch.Tensor]:
            layer_of_call = _as_layer(operands, is_fp8=call.is_fp8)
            routing = call.route(layer_of_call[0], layer_of_call[1].ups)
            keeps_tokens = of_ups and call.keeps(routing)
            is_sent_again = of_ups and routing.has_gradients and not keeps_tokens
            named = {"is_sent_again": is_sent_again, "keeps_tokens": keeps_tokens}
            with routing.forward():
                results, kept = ffn(routing, call.activation, layer_of_call, **named)
            if routing.has_gradients:
                routing.count_kept((results, *kept))
            return [routing.gathered, results, *kept]

        gathered, results, *kept = _seen("expert_ffn", operands, run)
        ctx.routing, ctx.activation, ctx.totals = call.settle(gathered), call.activation, call.totals
        ctx.keeps_tokens = of_ups and call.keeps(ctx.routing)
        ctx.num_operands = len(operands)
        ctx.save_for_backward(*operands, *kept)
        return results

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """See `torch.autograd.Function.backward`."""
        refuse_second_derivative("expert_ffn")
        saved = ctx.saved_tensors  # checkpointing allows one read
        operands, kept = saved[: ctx.num_operands], saved[ctx.num_operands :]
        _, of_tokens, *of_layer = ctx.needs_input_grad
        (of_first, of_down, *of_third), biases = _halves(of_layer)
        first_bias, down_bias, *third_bias = biases
        wanted = Wanted(of_tokens, any((of_first, *of_third)), of_down, any((first_bias, *third_bias)), down_bias)
        with _unseen():
            tensors = _as_layer(operands, totals=ctx.totals), kept, gradient.contiguous()
            found = ffn_backward(ctx.routing, ctx.activation, tensors, wanted, keeps_tokens=ctx.keeps_tokens)
        first, *third = found.ups
        of_weights, of_biases = zip(first, found.down, *third, strict=True)
        asked = zip(of_layer, (*of_weights, *of_biases), strict=True)
        return None, found.tokens, *(each if is_wanted else None for is_wanted, each in asked)


@final
class Dispatch(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """The first half."""

    @staticmethod
    def forward(
        ctx: Any, call: ExpertCall, tokens: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """See `torch.autograd.Function.forward`."""
        tokens, weights = tokens.contiguous(), _in_place(weights)

        def run() -> list[torch.Tensor]:
            linear = Linear(weights, bias)
            routing = call.route(tokens, [linear])
            keeps_tokens = ctx.needs_input_grad[2] and call.keeps(routing)
            with routing.forward():
                products, kept = dispatch_multiply(routing, tokens, linear, keeps_tokens=keeps_tokens)
            if routing.has_gradients:
                routing.count_kept((*products, *kept))
            return [routing.gathered, *kept, *products]

        gathered, *found = _seen("dispatch_grouped_matmul", (tokens, weights, bias), run)
        ctx.routing = call.settle(gathered)
        keeps_tokens = ctx.needs_input_grad[2] and call.keeps(ctx.routing)
        kept, products = found[:keeps_tokens], found[keeps_tokens:]
        ctx.save_for_backward(tokens, weights, *kept)
        return tuple(products)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """See `torch.autograd.Function.backward`."""
        refuse_second_derivative("dispatch_grouped_matmul")
        _, of_tokens, of_weights, of_bias = ctx.needs_input_grad
        tokens, weights, *kept = ctx.saved_tensors
        wanted = Wanted(tokens=of_tokens, ups=of_weights, up_biases=of_bias)
        with _unseen():
            sent = tokens, kept[0] if kept else None
            return None, *dispatch_multiply_backward(ctx.routing, sent, weights, _dense(gradients), wanted)


@final
class Combine(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """The second half."""

    @staticmethod
    def forward(
        ctx: Any, routing: ExpertRouting, weights: torch.Tensor, bias: torch.Tensor | None, *inputs: torch.Tensor
    ) -> torch.Tensor:
        """See `torch.autograd.Function.forward`."""
        ctx.routing = routing
        weights, groups = _in_place(weights), _dense(inputs)

        def run() -> list[torch.Tensor]:
            return [multiply_combine(routing, groups, Linear(weights, bias))]

        (results,) = _seen("grouped_matmul_combine", (weights, bias, *groups), run)
        ctx.save_for_backward(weights, *groups)
        return results

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """See `torch.autograd.Function.backward`."""
        refuse_second_derivative("grouped_matmul_combine")
        _, of_weights, of_bias, *of_inputs = ctx.needs_input_grad
        weights, *inputs = ctx.saved_tensors
        with _unseen():
            wanted = Wanted(tokens=any(of_inputs), down=of_weights, down_bias=of_bias)
            found, of_linear = multiply_combine_backward(ctx.routing, inputs, weights, gradient.contiguous(), wanted)
        return None, *of_linear, *found


def _halves(layer: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """Split a sequence into the half for weights and the half for their biases."""
    number = len(layer) // 2
    return layer[:number], layer[number:]


def _as_layer(
    operands: Sequence[Any], *, is_fp8: bool = False, totals: Sequence[Totals | None] = ()
) -> tuple[torch.Tensor, Layer]:
    """Return the tokens, and the layer of the weights and biases."""
    tokens, *layer = operands
    weights, biases = _halves(layer)
    linears = zip(weights, biases, totals or [None] * len(weights), strict=True)
    first, down, *third = (Linear(weight, bias, is_fp8, total) for weight, bias, total in linears)
    return tokens, Layer([first, *third], down)


def _with_gradients(beside: Callable[[], None]) -> Callable[[], None]:
    """Run what is called within an operator, with gradients if they are on here."""
    is_enabled = torch.is_grad_enabled()

    def call() -> None:
        with torch.set_grad_enabled(is_enabled), _unseen():
            beside()

    return call


def _is_seen() -> bool:
    """Return whether dispatch modes are active."""
    return bool(torch._C._len_torch_dispatch_stack())


def _unseen() -> AbstractContextManager[object]:
    """Hide calls from dispatch modes."""
    return _disable_current_modes() if _is_seen() else nullcontext()


def _dense(operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [each.contiguous() for each in operands]


def _in_place(weights: Any) -> Any:
    """Return the weights themselves if matmuls can read their layout, and a copy otherwise. None stays None."""
    return weights if weights is None or weights.dim() < 3 or 1 in weights.stride()[-2:] else weights.contiguous()
