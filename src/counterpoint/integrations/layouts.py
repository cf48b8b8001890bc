"""What `parallelize_module` left on a module: DTensor parameters, and hooks that hold the layouts of inputs and outputs.

Its styles keep layouts nowhere but in the closures of the hooks that they register, the same in torch 2.11 to 2.13; a hook
that looks different is not recognized, and its module is then refused rather than guessed at.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import msgspec
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput

Hook = Callable[..., Any]
Layouts = tuple[Any, ...]
NUM_OUTPUT_ARGUMENTS = 2  # bound into the styles' functions for outputs: layouts, and whether to give local tensors


class LinearLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A linear as it was parallelized: which way its weight is split, where its hooks take inputs from and outputs to.

    `is_output_local`: its output hook only takes the local tensor out of what the linear gives by its nature.
    """

    kind: Literal["column", "row"]
    mesh: DeviceMesh
    input_layouts: Layouts
    output_layouts: Layouts
    input_hook: int
    output_hook: int
    is_output_local: bool


class GatheringHook(msgspec.Struct, frozen=True, kw_only=True):
    """A module's hook that gathers some of its inputs: its key, its style, and the positions of these inputs."""

    key: int
    style: PrepareModuleInput
    mesh: DeviceMesh
    positions: tuple[int, ...]


def linear_layout(linear: nn.Linear) -> LinearLayout | str:
    """The layout of a linear with a DTensor weight, or why it cannot be told."""
    weight = linear.weight
    assert isinstance(weight, DTensor)
    mesh = weight.device_mesh
    if mesh.ndim != 1:
        return f"its weight lies on a mesh of {mesh.ndim} dimensions, and one is served. Parallelize over mesh['tp']"
    kinds: dict[Any, Literal["column", "row"]] = {Shard(0): "column", Shard(1): "row"}
    if weight.placements[0] not in kinds:
        return f"its weight is {weight.placements[0]}, neither column- nor row-parallel. Leave it as it is"
    inputs = [(key, found) for key, hook in linear._forward_pre_hooks.items() if (found := _bound(hook, "input_fn"))]
    outputs = [(key, found) for key, hook in linear._forward_hooks.items() if (found := _bound(hook, "output_fn"))]
    if len(inputs) != 1 or len(outputs) != 1 or len(outputs[0][1]) != NUM_OUTPUT_ARGUMENTS:
        return "its hooks are not those of ColwiseParallel or RowwiseParallel. Parallelize it by parallelize_module"
    kind = kinds[weight.placements[0]]
    input_hook, (input_layouts, *_) = inputs[0]
    output_hook, (output_layouts, is_local) = outputs[0]
    return LinearLayout(
        kind=kind,
        mesh=mesh,
        input_layouts=input_layouts,
        output_layouts=output_layouts,
        input_hook=input_hook,
        output_hook=output_hook,
        is_output_local=bool(is_local) and (kind == "row" or output_layouts == (Shard(-1),)),
    )


def gathering_hook(module: nn.Module) -> GatheringHook | None:
    """The hook that makes sequence-sharded inputs whole before the module runs, if there is one."""
    for key, hook in module._forward_pre_hooks.items():
        found = _closure(hook)
        style, mesh = found.get("self"), found.get("device_mesh")
        if not isinstance(style, PrepareModuleInput) or style.with_kwargs or not style.input_layouts:
            continue
        pairs = enumerate(zip(style.input_layouts, style.desired_input_layouts, strict=True))
        positions = tuple(number for number, (given, wanted) in pairs if is_sequence(given) and wanted == Replicate())
        if positions and isinstance(mesh, DeviceMesh) and mesh.ndim == 1:
            return GatheringHook(key=key, style=style, mesh=mesh, positions=positions)
    return None


def is_sequence(layout: Any) -> bool:
    """Whether a layout shards a dimension other than the last, as far as that can be told without a tensor."""
    return isinstance(layout, Shard) and layout.dim >= 0


def _bound(hook: Hook, name: str) -> Layouts:
    """What is bound into the function that a hook of `distribute_module` calls."""
    function = _closure(hook).get(name)
    return function.args if isinstance(function, partial) else ()


def _closure(hook: Hook) -> dict[str, Any]:
    code, cells = getattr(hook, "__code__", None), getattr(hook, "__closure__", None)
    return (
        {} if code is None or not cells else dict(zip(code.co_freevars, [cell.cell_contents for cell in cells], strict=True))
    )
