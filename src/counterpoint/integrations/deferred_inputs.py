"""Inputs of which a module has a rank's part, where torchtitan 0.3 would gather them or sum their gradient (`spmd_types`).

This backend has plain tensors, whose sizes are those of a part. A module may read the sizes of its input, so a `Deferred`
has those of the whole. Linears that were taken multiply its part. Any other operation is done on the whole, which is
gathered then, and in backward its gradient is summed over the ranks, as torchtitan does.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils._pytree import tree_map_only

from counterpoint.integrations.layouts import Boundary
from counterpoint.integrations.switched_hooks import Switch, unchanged_inputs_of


class Spread(NamedTuple):
    """How a tensor is spread over ranks: sharded, or whole on each of them."""

    mesh: DeviceMesh
    placement: Placement

    def changed(self, local: torch.Tensor, given: Placement, wanted: Placement) -> torch.Tensor:
        """Return a rank's part of another layout."""
        found = DTensor.from_local(local, self.mesh, [given], run_check=False)
        changed: torch.Tensor = found.redistribute(placements=[wanted]).to_local()
        return changed


@final
class Deferred(torch.Tensor):  # type: ignore[misc]  # torch is untyped here
    """A whole input of which there is only this rank's `part` so far."""

    part: torch.Tensor
    _spread: Spread
    _whole: torch.Tensor | None

    @classmethod
    def of(cls, part: torch.Tensor, spread: Spread) -> torch.Tensor:
        """Return the whole of which this is a part."""
        made: Deferred = _Defer.apply(part, spread)
        made.part = part
        return made

    def whole(self) -> torch.Tensor:
        """Return the plain whole tensor, without gradients: backward passes come by `_Defer`."""
        if self._whole is None:
            self._whole = self._spread.changed(self.part.detach(), self._spread.placement, Replicate())
        return self._whole

    @classmethod
    def __torch_dispatch__(cls, operation: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain, named = tree_map_only(cls, cls.whole, (args, kwargs or {}))
        return operation(*plain, **named)


class _Defer(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """Its backward pass has the gradients of all operations on the whole; those of linears go to the part itself."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, spread: Spread) -> torch.Tensor:
        ctx.spread = spread
        sizes = list(part.shape)
        if isinstance(spread.placement, Shard):
            sizes[spread.placement.dim] *= spread.mesh.size()
        made = torch.Tensor._make_wrapper_subclass(Deferred, sizes, dtype=part.dtype, device=part.device)
        made._spread, made._whole = spread, None
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        spread: Spread = ctx.spread
        return spread.changed(gradient.contiguous(), Partial(), spread.placement).contiguous(), None


def defer_inputs(module: Any, found: Boundary, switch: Switch) -> Callable[..., Any]:
    """Replace the function by which torchtitan redistributes a module's inputs: these are deferred.

    Its own function runs under torch.compile, and while torchtitan checks types, which operators do not state.
    """
    earlier, leave = module._redistribute_inputs, unchanged_inputs_of(module, found.dims)
    assert found.mesh is not None
    spreads = {name: Spread(found.mesh, Replicate() if dim is None else Shard(dim)) for name, dim in found.dims.items()}

    def defer(name: str, value: Any) -> Any:
        spread = spreads.get(name)
        return value if spread is None else Deferred.of(value, spread)

    def prepare(parallel_dims: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling() or not switch.holds or checks_types():
            return earlier(parallel_dims, inputs, named)
        names = [name for name in module._cache_pos_arg_names() if name not in named]
        given = dict(zip(names, inputs, strict=False)) | named
        if any(name in given and type(given[name]) is not torch.Tensor for name in spreads):
            return earlier(parallel_dims, inputs, named)
        prepared, rest = leave(parallel_dims, inputs, named)
        return (
            tuple([defer(name, value) for name, value in zip(names, prepared, strict=False)]),
            {name: defer(name, value) for name, value in rest.items()},
        )

    return prepare


def checks_types() -> bool:
    """Return whether torchtitan checks how tensors are spread (`debug.spmd_typechecking`), which operators do not state."""
    checker = sys.modules.get("spmd_types")
    return checker is not None and bool(checker.is_type_checking())
