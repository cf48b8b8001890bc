"""The `main_grad` of a weight, to which Megatron-LM and TransformerEngine add its gradients within their matmuls."""

from functools import cache
from typing import Any, final

import torch

from counterpoint.ops.dispatch import is_observed

# attributes that Megatron-FSDP, and custom_fsdp before it, give to weights (read in Megatron-LM's core 0.12 and 0.19)
KEPT_ELSEWHERE = ("get_main_grad", "__fsdp_param__", "fsdp_managed_main_grad")


@final
class MainGradient:
    """Where one pass of a linear adds the gradient of its weight; or what it sets to it, if the pass `is_first`."""

    def __init__(self, weight: Any, *, is_first: bool = False) -> None:
        self._weight, self.is_first = weight, is_first

    @property
    def total(self) -> torch.Tensor:
        """The (columns, K) total, as the weight has it now."""
        total: torch.Tensor = self._weight.main_grad
        return total

    def sign(self) -> torch.Tensor | None:
        """Return what a backward pass returns for the weight: a gradient without values.

        Megatron-LM's hooks on the weight need it as a sign that its gradient is there, and look at
        `grad_added_to_main_grad` before they read it.
        """
        weight = self._weight
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        make = _without_values.__wrapped__ if is_observed() else _without_values  # a mode's tensors are not kept
        sign: torch.Tensor = make(weight.shape, weight.dtype, weight.device)
        return (sign.zero_() if getattr(weight, "zero_out_wgrad", False) else sign).detach()  # autograd takes what is new


def is_kept_elsewhere(weight: torch.Tensor) -> bool:
    """Return whether a framework of sharded data parallelism, as Megatron-LM's, keeps a weight and its gradient itself."""
    return bool(getattr(weight, "overwrite_main_grad", False)) or any(hasattr(weight, name) for name in KEPT_ELSEWHERE)


def main_gradient_of(weight: torch.Tensor, *, is_first: bool = False) -> MainGradient | None:
    """Return the main gradient of a weight; None if it has none, or needs no gradient."""
    has_total = isinstance(getattr(weight, "main_grad", None), torch.Tensor)
    return MainGradient(weight, is_first=is_first) if has_total and weight.requires_grad else None


class ToMainGradient(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """A weight as it is, whose gradient goes to its main gradient: for operators that torch has to see whole."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, main: MainGradient) -> torch.Tensor:
        """Return the weight."""
        ctx.main = main
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        """Add the gradient, and return the sign of it."""
        if gradient is None:
            return None, None
        total = ctx.main.total
        _ = total.copy_(gradient) if ctx.main.is_first else total.add_(gradient)
        return ctx.main.sign(), None


@cache
def _without_values(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)
