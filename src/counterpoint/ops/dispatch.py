"""Dispatches an operator as a torch custom operator if some part of torch has to see it, and otherwise as a plain call.

torch.compile, dispatch modes (selective checkpointing, counting of FLOPs), function transforms, tensor subclasses and
the profiler must see an operator whole. In plain eager code none of them is active, and torch's dispatch of a custom
operator is skipped: some 25 us of the host with gradients and 15 without (measured on a CPU, 2026-11-21). Both ways use
the same functions for forward and gradients.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch._library.autograd import make_autograd_impl
from torch.autograd import forward_ad

from counterpoint.errors import OperatorError

LIBRARY = torch.library.Library("counterpoint", "FRAGMENT")
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)

Matrices = Sequence[torch.Tensor]
Gradients = tuple[torch.Tensor | None, Sequence[torch.Tensor | None]]  # the gradients of the left operand and of the weights
# (what forward kept, the products' gradients, whether the left operand and any weight need theirs) -> their gradients
Differentiate = Callable[["Kept", Matrices, tuple[bool, bool]], Gradients]


class MainTotals(NamedTuple):
    """Matrices to which the gradients of weights are added; or which are set to them, if nothing was added yet."""

    matrices: Matrices = ()
    are_set: bool = False


NO_TOTALS = MainTotals()


class Kept:
    """What backward needs from a forward call, and the `totals` of its weights' gradients, if there are any."""

    __slots__ = ("group_name", "left", "schedule", "totals", "weights")

    def __init__(
        self, left: torch.Tensor, weights: Matrices, others: tuple[str, str], totals: MainTotals = NO_TOTALS
    ) -> None:
        self.left, self.weights, self.totals = left, weights, totals
        self.group_name, self.schedule = others


@final
class Operator:
    """A function of a tensor, a weight or a list of them, further arguments, a group's name and a schedule's text.

    `run` computes, `shape` creates empty results for fake tensors, `gradients` is the derivative. An operator without a
    derivative is part of another's backward pass, and may take its tensors in any order. A list of weights gives a list.
    """

    def __init__(
        self, name: str, run: Callable[..., Any], shape: Callable[..., Any], gradients: Differentiate | None = None
    ) -> None:
        self.name, self._run, self._gradients = name, run, gradients
        self.custom = torch.library.custom_op(f"counterpoint::{name}", run, mutates_args=())
        self.custom.register_fake(shape)
        if gradients is not None:
            self.custom.register_autograd(self._differentiate_custom, setup_context=_keep_custom)
        self._whole_way = make_autograd_impl(self.custom._opoverload, self.custom)
        for key in ("AutogradCPU", "AutogradCUDA"):
            LIBRARY.impl(name, self._run_from_dispatcher, key, with_keyset=True)
        overload = self.custom._opoverload
        overload._op = _Shortcut(self, overload._op)

    def __call__(self, *arguments: Any) -> Any:
        """Run; arguments as `run` takes them."""
        if torch.compiler.is_compiling():
            return self.custom(*arguments)
        tensors = _tensors(arguments)
        if needs_dispatcher(tensors):
            refuse_transforms(self.name, tensors)
            return self.custom(*arguments)
        if torch.is_grad_enabled() and _is_any_wanted(tensors):
            return self._run_with_gradients(*arguments) if self._gradients is not None else self.custom(*arguments)
        return self.run_plainly(arguments)

    def run_unobserved(self, *arguments: Any) -> Any:
        """Run for a caller that knows that only the profiler looks at plain tensors, and that handles gradients."""
        if torch.autograd._profiler_enabled():
            return self.custom(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return self._run(*arguments)

    def _run_from_dispatcher(self, keyset: Any, *arguments: Any) -> Any:
        """Run when torch's dispatcher calls first, for example from compiled code: if nothing else has to see the
        operator, the rest of the dispatcher is skipped.
        """
        if self.is_plain(arguments, is_profiled=False):
            return self.run_plainly(arguments)
        return self._whole_way(keyset, *arguments)

    def is_plain(self, arguments: tuple[Any, ...], *, is_profiled: bool = True) -> bool:
        """Return whether nothing has to see a call of the custom operator; `is_profiled` as in `needs_dispatcher`."""
        tensors = _tensors(arguments)
        return not (
            callable(get_eval_frame_callback())
            or needs_dispatcher(tensors, is_profiled=is_profiled)
            or (torch.is_grad_enabled() and _is_any_wanted(tensors))
        )

    def run_plainly(self, arguments: tuple[Any, ...]) -> Any:
        """Run as torch runs a custom operator: calls within it have nothing to do with gradients."""
        with torch._C._AutoDispatchBelowAutograd():
            return self._run(*arguments)

    def _run_with_gradients(self, left: torch.Tensor, weights: Any, *others: Any) -> Any:
        """Run with gradients, without torch's dispatcher."""
        if isinstance(weights, torch.Tensor):
            return _Differentiable.apply(self, others, False, left, weights)
        return list(_Differentiable.apply(self, others, True, left, *weights))

    def differentiate(self, ctx: Any, gradients: Sequence[torch.Tensor | None], is_wanted: tuple[bool, bool]) -> Gradients:
        """Return the gradients of the left operand and of the weights; none of a weight whose product was not used."""
        left, *weights = ctx.saved_tensors
        return self.differentiate_kept(Kept(left, weights, (ctx.group_name, ctx.schedule)), gradients, is_wanted)

    def differentiate_kept(
        self, kept: Kept, gradients: Sequence[torch.Tensor | None], is_wanted: tuple[bool, bool]
    ) -> Gradients:
        """Return what `differentiate` does of what was kept; gradients of weights go to its totals, if it has any. If no
        weight needs a gradient, only the number of the left operand's rows counts.
        """
        assert self._gradients is not None
        refuse_second_derivative(self.name)
        weights = kept.weights
        used = next((each for each in gradients if each is not None), None)
        if used is None:
            return None, [None] * len(weights)
        pairs = zip(gradients, weights, strict=True)
        whole = [used.new_zeros(used.shape[0], weight.shape[1]) if each is None else each for each, weight in pairs]
        of_left, found = self._gradients(kept, whole, is_wanted)
        return of_left, [None if each is None else of for each, of in zip(gradients, found, strict=True)]

    def _differentiate_custom(self, ctx: Any, gradient: Any) -> tuple[Any, ...]:
        """Return the gradients of all arguments of the custom operator."""
        of_left, of_weights = ctx.needs_input_grad[:2]
        if not ctx.is_list:
            found, (of_weight,) = self.differentiate(ctx, [gradient], (of_left, of_weights))
            return found, of_weight, *[None] * ctx.num_others
        return *self.differentiate(ctx, gradient, (of_left, any(of_weights))), *[None] * ctx.num_others


@final
class _Shortcut:
    """Calls a custom operator from Python, in place of torch's own caller: code made by torch.compile calls the operator
    by its name, and torch's dispatcher takes the host longer than the operator's own look-ups.
    """

    __slots__ = ("_dispatched", "_operator")

    def __init__(self, operator: Operator, dispatched: Callable[..., Any]) -> None:
        self._operator, self._dispatched = operator, dispatched

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if named or not self._operator.is_plain(arguments):
            return self._dispatched(*arguments, **named)
        return self._operator.run_plainly(arguments)

    def __hash__(self) -> int:
        return hash(self._dispatched)  # torch hashes operators by it

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dispatched, name)


class _Differentiable(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """An operator, the first argument, with gradients and without torch's dispatcher; tensors come last."""

    @staticmethod
    def forward(
        ctx: Any, operator: Operator, others: tuple[Any, ...], is_list: bool, left: torch.Tensor, *weights: torch.Tensor
    ) -> Any:
        ctx.operator = operator
        arguments = left, (list(weights) if is_list else weights[0]), *others
        keep_for_backward(ctx, left, weights, others)
        products = operator.run_plainly(arguments)
        return tuple(products) if is_list else products

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        is_wanted = ctx.needs_input_grad[3], any(ctx.needs_input_grad[4:])
        found, of_each = ctx.operator.differentiate(ctx, gradients, is_wanted)
        return None, None, None, found, *of_each


def refuse_second_derivative(name: str) -> None:
    """Raise `OperatorError` in a backward pass that is to be differentiated; only such a pass records gradients."""
    if torch.is_grad_enabled():
        raise OperatorError(f"{name} has no second derivative. Call backward() without create_graph=True.")


def refuse_transforms(name: str, tensors: Matrices) -> None:
    """Raise `OperatorError` for operands of forward-mode derivatives, which would be lost, and of vmap."""
    for tensor in tensors:
        if _is_batched(tensor):
            raise OperatorError(f"{name} has no batching rule for torch.vmap. Call it once for each matrix.")
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
            raise OperatorError(
                f"{name} has no forward-mode derivative (torch.func.jvp, torch.autograd.forward_ad). Use backward(), or "
                "call it on the tangent: it is linear in each operand."
            )


def _is_batched(tensor: torch.Tensor) -> bool:
    """Return whether vmap is among the function transforms applied to a tensor."""
    while is_functorch_wrapped_tensor(tensor):
        if is_batchedtensor(tensor):
            return True
        tensor = get_unwrapped(tensor)
    return False


def keep_for_backward(ctx: Any, left: torch.Tensor, weights: Matrices, others: tuple[Any, ...]) -> None:
    """Keep what `Operator.differentiate` needs; `others` end with the group's name and the schedule."""
    ctx.group_name, ctx.schedule = others[-2:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(left, *weights)


def _keep_custom(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    left, weights, *others = inputs
    ctx.is_list, ctx.num_others = not isinstance(weights, torch.Tensor), len(others)
    keep_for_backward(ctx, left, weights if ctx.is_list else [weights], tuple(others))


def _tensors(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the tensors among the first two arguments and their lists."""
    found: list[torch.Tensor] = []
    for argument in arguments[:2]:
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        else:
            found += argument
    return found


def _is_any_wanted(tensors: Matrices) -> bool:
    """Return whether one of them needs a gradient."""
    return any([tensor.requires_grad for tensor in tensors])  # noqa: C419  a list is faster than a generator


def needs_dispatcher(tensors: Matrices, *, is_profiled: bool = True) -> bool:
    """Return whether anything other than reverse-mode autograd has to see a call with these tensors as an operator. The
    profiler sees calls through the dispatcher (`is_profiled` is False) anyway.
    """
    if is_observed() or (is_profiled and torch.autograd._profiler_enabled()):
        return True
    return any([type(tensor) not in PLAIN_TYPES for tensor in tensors])  # noqa: C419  as above


def is_observed() -> bool:
    """Return whether forward-mode derivatives, dispatch modes or function transforms are active."""
    return bool(
        forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


def is_checkpointed() -> bool:
    """Return whether this is in a region of torch's checkpointing, or its recomputation; reentrant checkpointing, which does
    not compare the two, does not count.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"
