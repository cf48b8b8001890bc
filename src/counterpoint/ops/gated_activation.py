"""The activation between an expert's matmuls: silu(first) * second by default, of two matrices or of the halves of one, or
the caller's function.

Backward keeps its inputs, not its result, and computes the result again.
"""

from collections.abc import Callable, Sequence

import torch

from counterpoint.cuda.block_sums import has_triton

Activation = Callable[..., torch.Tensor]  # a function of one matrix, or of two of one shape; works elementwise
FUSED_TYPES = (torch.bfloat16, torch.float16)
silu = torch.nn.functional.silu


def gated_silu(both: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of (n, 2 * hidden), which holds gate and up, one beside the other: an activation for one matrix
    that is one kernel on GPUs.
    """
    gate, up = both.chunk(2, -1)
    result: torch.Tensor = silu(gate) * up
    return result


def activate(activation: Activation | None, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the activation of one or two matrices (n, hidden), in their type: under autocast a function may return another,
    which the next matmul would not take.
    """
    gated = _gated_at_once(activation, inputs)
    if gated is not None:
        from counterpoint.ops.expert_kernels import gate  # noqa: PLC0415  needs Triton

        return gate(*gated)
    if activation is not None:
        return activation(*inputs).to(inputs[0].dtype)
    result: torch.Tensor = silu(inputs[0])
    return result.mul_(inputs[1]) if len(inputs) > 1 else result


def activate_backward(
    activation: Activation | None,
    inputs: Sequence[torch.Tensor],
    gradient: torch.Tensor,
    outs: Sequence[torch.Tensor],
) -> None:
    """Compute the activation again, and the gradients of its inputs, in `outs` in this order."""
    gated = _gated_at_once(activation, inputs)
    if gated is not None:
        from counterpoint.ops.expert_kernels import gate_backward  # noqa: PLC0415  needs Triton

        result, *of_inputs = outs
        gate_backward(*gated, gradient, (result, *(of_inputs[0].chunk(2, 1) if activation is gated_silu else of_inputs)))
        return
    found = _differentiated(activation, inputs, gradient) if activation else _silu_backward(inputs, gradient)
    for out, each in zip(outs, found, strict=True):
        out.copy_(each)


def _silu_backward(inputs: Sequence[torch.Tensor], gradient: torch.Tensor) -> list[torch.Tensor]:
    first, *others = inputs
    result = silu(first)
    if not others:
        return [result, torch.ops.aten.silu_backward(gradient, first)]
    second, of_second = others[0], gradient * result
    return [result.mul_(second), torch.ops.aten.silu_backward(gradient.mul(second), first), of_second]


def _gated_at_once(
    activation: Activation | None, inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return gate and up, if one kernel computes the activation from them."""
    pair = inputs[0].chunk(2, 1) if activation is gated_silu else inputs
    if activation not in (None, gated_silu) or not _is_fused(pair):
        return None
    gate, up = pair
    return gate, up


def _is_fused(inputs: Sequence[torch.Tensor]) -> bool:
    """Return whether one kernel does it: two matrices on a GPU, in half precision."""
    return (
        len(inputs) == 2 and inputs[0].is_cuda and inputs[0].numel() > 0 and inputs[0].dtype in FUSED_TYPES and has_triton()
    )


def _differentiated(activation: Activation, inputs: Sequence[torch.Tensor], gradient: torch.Tensor) -> list[torch.Tensor]:
    with torch.enable_grad():
        leaves = [each.detach().requires_grad_() for each in inputs]
        result = activate(activation, leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, gradient, materialize_grads=True)]
