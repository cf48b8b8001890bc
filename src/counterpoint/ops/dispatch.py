"""An operator as a custom operator of torch for whoever looks at operators, and as a plain call where nobody does.

torch.compile, dispatch modes (selective checkpointing, counting of FLOPs), function transforms, tensor subclasses and the
profiler must see an operator whole. In plain eager code they are not there, and torch's way to a custom operator, some
25 us of the host with gradients and 15 without (measured on a CPU, 2026-11-21), is left out. Forward and gradients are the
same functions on both ways.
"""

from collections.abc import Callable
from typing import Any, final

import torch

from counterpoint.errors import OperatorError

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)

# (what forward kept, the product's gradient, whether the left operand and the weight need theirs) -> their gradients
Gradients = Callable[["Kept", torch.Tensor, tuple[bool, bool]], tuple[torch.Tensor | None, torch.Tensor | None]]


class Kept:
    """What backward needs of a forward call."""

    __slots__ = ("group_name", "left", "schedule", "weight")

    def __init__(self, left: torch.Tensor, weight: torch.Tensor, group_name: str, schedule: str) -> None:
        self.left, self.weight, self.group_name, self.schedule = left, weight, group_name, schedule


@final
class Operator:
    """A function of two tensors, what else it takes, a group's name and a schedule's text.

    `run` computes, `shape` makes an empty result for tensors without numbers, `gradients` is the derivative; an operator
    without one is part of another's backward pass.
    """

    def __init__(
        self, name: str, run: Callable[..., Any], shape: Callable[..., Any], gradients: Gradients | None = None
    ) -> None:
        self.name, self._run, self._gradients = name, run, gradients
        self.custom = torch.library.custom_op(f"counterpoint::{name}", run, mutates_args=())
        self.custom.register_fake(shape)
        if gradients is not None:
            self.custom.register_autograd(self.differentiate, setup_context=_keep)

    def __call__(self, *arguments: Any) -> Any:
        """Run; arguments as `run` takes them."""
        if torch.compiler.is_compiling() or _is_looked_at(arguments):
            return self.custom(*arguments)
        if torch.is_grad_enabled() and (arguments[0].requires_grad or arguments[1].requires_grad):
            return _Differentiable.apply(*arguments, self) if self._gradients is not None else self.custom(*arguments)
        return self._run_plainly(arguments)

    def forward(self, ctx: Any, arguments: tuple[Any, ...]) -> torch.Tensor:
        """Run, and keep what the derivative needs."""
        product: torch.Tensor = self._run_plainly(arguments)
        _keep(ctx, arguments, product)
        return product

    def _run_plainly(self, arguments: tuple[Any, ...]) -> Any:
        """Run as torch runs a custom operator: what is called within has nothing to do with gradients."""
        with torch._C._AutoDispatchBelowAutograd():
            return self._run(*arguments)

    def differentiate(self, ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of all arguments."""
        assert self._gradients is not None
        refuse_second_derivative(self.name)
        left, weight = ctx.saved_tensors
        kept = Kept(left, weight, ctx.group_name, ctx.schedule)
        is_wanted = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        return *self._gradients(kept, gradient, is_wanted), *[None] * ctx.num_others


class _Differentiable(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """An operator, its last argument, with gradients and without torch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        ctx.operator = arguments[-1]
        return ctx.operator.forward(ctx, arguments[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *ctx.operator.differentiate(ctx, gradient), None


def refuse_second_derivative(name: str) -> None:
    """Raise `OperatorError` in a backward pass that is to be differentiated: only there gradients are recorded."""
    if torch.is_grad_enabled():
        raise OperatorError(f"{name} has no second derivative. Call backward() without create_graph=True.")


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    left, weight, *others = inputs
    ctx.group_name, ctx.schedule = others[-2:]
    ctx.num_others = len(others)
    ctx.save_for_backward(left, weight)


def _is_looked_at(arguments: tuple[Any, ...]) -> bool:
    """Whether somebody other than autograd has to see this call as an operator."""
    return (
        type(arguments[0]) not in PLAIN_TYPES
        or type(arguments[1]) not in PLAIN_TYPES
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch.autograd._profiler_enabled()
    )
