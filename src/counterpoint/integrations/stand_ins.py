"""Tensors that stand for FSDP2's flat buffers, so that copies go straight to parameters and straight from gradients.

FSDP gathers into a flat buffer, from which a kernel on the computation's stream writes every parameter. Likewise a kernel
puts gradients into a flat buffer, from which they are reduced. FSDP asks the collective for both buffers, and uses them in
custom operators only. A stand-in has no memory. It takes the operators' other tensors, and copy engines move those.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, final

import torch

from counterpoint.errors import IntegrationError
from counterpoint.ops.tested_torch import USE_TESTED_TORCH

Operators = Mapping[Any, Callable[..., Any]]


@final
class BufferStandIn(torch.Tensor):  # type: ignore[misc]  # torch is untyped here
    """A tensor without memory that passes operators on to those of its owner."""

    owner: Any
    operators: Operators

    @staticmethod
    def __new__(
        cls, size: Sequence[int], kind: tuple[torch.dtype, torch.device], owner: object, operators: Operators
    ) -> Self:
        """Stand for a tensor of this size, type and device; `operators` are the owner's."""
        dtype, device = kind
        made: Self = torch.Tensor._make_wrapper_subclass(cls, torch.Size(size), dtype=dtype, device=device)
        made.owner, made.operators = owner, operators
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, operator: Any, types: Sequence[type], given: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        """Call the owner's operator; a view is another stand-in."""
        named = named or {}
        stand_in = next(each for each in (*given, *named.values()) if isinstance(each, cls))
        if operator is torch.ops.aten.view.default:
            size = torch.empty(stand_in.shape, device="meta").view(given[1]).shape
            return cls(size, (stand_in.dtype, stand_in.device), stand_in.owner, stand_in.operators)
        if operator not in stand_in.operators:
            raise IntegrationError(
                f"torch {torch.__version__} uses FSDP's flat buffers in an unknown way ({operator}). {USE_TESTED_TORCH}"
            )
        return stand_in.operators[operator](*given, **named)
