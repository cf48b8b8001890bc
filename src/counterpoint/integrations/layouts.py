"""Reads what `parallelize_module`, or the `tp_plan` of a Hugging Face model, left on a module: DTensor parameters, and
functions that hold the layouts of inputs and outputs.

torch's styles keep layouts only in the closures of the hooks that they register, the same way in torch 2.11 to 2.13. The
styles of transformers (read in 5.23) keep them in the closure of the `forward` that replaces the linear's. A module that
looks different is refused, because its layout would be a guess.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any, Literal

import msgspec
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput

from counterpoint.integrations.sequence_shards import Route

Hook = Callable[..., Any]
Layouts = tuple[Any, ...]
LOCAL_NAMES = frozenset({"to_local", "_local_tensor"})  # of what gives a rank's part of a DTensor
DTENSOR_NAMES = LOCAL_NAMES | {"full_tensor", "redistribute", "placements", "device_mesh"}
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
BY_TORCHTITAN = (
    "torchtitan 0.3 spread it over ranks (Module.parallelize), but only what torchtitan 0.2 leaves on a module is known. "
    "Leave it unchanged, or use torchtitan 0.2"
)
NUM_OUTPUT_ARGUMENTS = 2  # arguments bound into the styles' output functions: layouts, and whether to return local tensors


class LinearLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A parallelized linear: how its weight is split, and the layouts of its inputs and outputs in its hooks.

    `is_output_local`: its output hook only unwraps the local tensor of the linear's natural output. Linears of Hugging
    Face models have no hooks: their forward does all of it, also if another output than the natural one is made local.
    """

    kind: Literal["column", "row"]
    mesh: DeviceMesh
    input_layouts: Layouts
    output_layouts: Layouts
    input_hook: int | None = None
    output_hook: int | None = None
    is_output_local: bool

    def __deepcopy__(self, _memo: dict[int, Any]) -> "LinearLayout":
        return self  # a mesh cannot be copied

    def route(self, schedule: str) -> Route:
        """Return the arguments of the linear's operator other than tensors."""
        return Route(self.mesh.get_group().group_name, self.mesh.size(), schedule)


class GatheringHook(msgspec.Struct, frozen=True, kw_only=True):
    """A module's hook that gathers some of its inputs: its key, its style, and the positions of these inputs."""

    key: int
    style: PrepareModuleInput
    mesh: DeviceMesh
    positions: tuple[int, ...]


def linear_layout(linear: nn.Linear) -> LinearLayout | str:
    """Return the layout of a linear with a DTensor weight, or why it is unknown."""
    weight = linear.weight
    assert isinstance(weight, DTensor)
    if _is_by_torchtitan(linear):
        return BY_TORCHTITAN
    mesh = tensor_parallel_mesh(linear)
    if mesh is None:
        return (
            f"its weight is on a mesh of {weight.device_mesh.ndim} dimensions, and it is unknown which one is "
            "tensor-parallel. Parallelize over mesh['tp'], then call overlap, then fully_shard"
        )
    kinds: dict[Any, Literal["column", "row"]] = {Shard(0): "column", Shard(1): "row"}
    placement = weight.placements[-1]  # FSDP2 puts its own dimensions in front
    if placement not in kinds:
        return f"its weight is {placement}, neither column- nor row-parallel. Leave it unchanged"
    kind = kinds[placement]
    divided, num_ranks = weight.shape[0 if kind == "column" else 1], mesh.size()
    if divided % num_ranks:
        return (
            f"its {divided} {kind}s do not divide by the {num_ranks} ranks, but only equal parts are supported. Pad "
            "its weight"
        )
    forward = closure_of(vars(linear).get("forward")).get("original_forward", linear.forward)  # transformers wraps it
    if getattr(forward, "__func__", None) is not nn.Linear.forward:
        return "its forward is not that of torch.nn.Linear, and operators compute no other formula. Leave it unchanged"
    return _transformers_layout(linear, kind, mesh) or _torch_layout(linear, kind, mesh)


def is_split(linear: nn.Linear) -> bool:
    """Return whether tensor parallelism has split a linear with a DTensor weight; FSDP2's weights are DTensors as well."""
    return bool(_meshes_of(linear)) or _is_by_torchtitan(linear)


def _is_by_torchtitan(module: nn.Module) -> bool:
    """Return whether torchtitan 0.3 spread a module over ranks: its forward is a function within `Module.parallelize`."""
    return {"parallel_dims", "fn"} <= closure_of(vars(module).get("forward")).keys()


def tensor_parallel_mesh(linear: nn.Linear) -> DeviceMesh | None:
    """Return the one-dimensional mesh over which a linear was parallelized; None if it is unknown.

    Outside of forward passes, `fully_shard` keeps a weight on a mesh of more dimensions, of which this is the last.
    """
    whole = linear.weight.device_mesh
    if whole.ndim == 1:
        return whole
    last = dist.get_process_group_ranks(
        whole.get_group(whole.ndim - 1)
    )  # torch treats equal meshes as one; their groups may differ
    for mesh in _meshes_of(linear):
        if mesh.ndim == 1 and dist.get_process_group_ranks(mesh.get_group()) == last:
            return mesh
    return None


def _meshes_of(linear: nn.Linear) -> list[DeviceMesh]:
    """Return the meshes in closures of a linear's hooks and forward: torch calls them `device_mesh`, transformers `mesh`."""
    functions = *linear._forward_pre_hooks.values(), vars(linear).get("forward")
    found = [closure_of(function).get(name) for function in functions for name in ("device_mesh", "mesh")]
    return [each for each in found if isinstance(each, DeviceMesh)]


def _torch_layout(linear: nn.Linear, kind: Literal["column", "row"], mesh: DeviceMesh) -> LinearLayout | str:
    """Read the layout that torch's ColwiseParallel or RowwiseParallel left."""
    inputs = [(key, found) for key, hook in linear._forward_pre_hooks.items() if (found := _bound(hook, "input_fn"))]
    outputs = [(key, found) for key, hook in linear._forward_hooks.items() if (found := _bound(hook, "output_fn"))]
    if len(inputs) != 1 or len(outputs) != 1 or len(outputs[0][1]) != NUM_OUTPUT_ARGUMENTS:
        return "its hooks are not those of ColwiseParallel or RowwiseParallel. Parallelize it by parallelize_module"
    if _uses_in_hooks(linear, DTENSOR_NAMES):
        return (
            "a hook of the job's takes its inputs or outputs for DTensors, but operators have a rank's part. Remove the hook"
        )
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


def _transformers_layout(linear: nn.Linear, kind: Literal["column", "row"], mesh: DeviceMesh) -> LinearLayout | str | None:
    """Read the layout that a style of transformers left; None if there is none."""
    style = closure_of(vars(linear).get("forward")).get("self")
    if style is None or not type(style).__module__.startswith("transformers."):
        return None
    name = type(style).__name__
    if name not in ("ColwiseParallel", "RowwiseParallel"):
        return f"its style in the model's tp_plan is {name}, but only ColwiseParallel and RowwiseParallel are supported"
    if vars(linear).get("_hf_quantized_needs_local_tp"):
        return "its weight is quantized, but operators multiply by torch.mm. Load the model without quantization"
    return LinearLayout(
        kind=kind,
        mesh=mesh,
        input_layouts=(style.input_layouts,),
        output_layouts=(style.output_layouts,),
        is_output_local=bool(style.use_local_output),
    )


def gathering_hook(module: nn.Module) -> GatheringHook | None:
    """Return the hook that gathers sequence-sharded inputs before the module runs, if there is one.

    One that makes inputs local (`use_local_output`) is left alone: the module may use them beside plain tensors, and DTensor
    would refuse to mix these with a sharded input. So is one of a module in which a forward or a hook calls `to_local`,
    which would return this rank's part.
    """
    for key, hook in module._forward_pre_hooks.items():
        found = closure_of(hook)
        style, mesh = found.get("self"), found.get("device_mesh")
        if not isinstance(style, PrepareModuleInput) or style.with_kwargs or not style.input_layouts:
            continue
        if style.use_local_output or any(map(_takes_local, module.modules())):
            continue
        pairs = enumerate(zip(style.input_layouts, style.desired_input_layouts, strict=True))
        positions = tuple(number for number, (given, wanted) in pairs if is_sequence(given) and wanted == Replicate())
        if positions and isinstance(mesh, DeviceMesh) and mesh.ndim == 1:
            return GatheringHook(key=key, style=style, mesh=mesh, positions=positions)
    return None


def _takes_local(module: nn.Module) -> bool:
    """Return whether the code of a module's forward or hooks names this rank's part of a DTensor; functions that it calls
    are not read.
    """
    return _uses(module.forward, LOCAL_NAMES) or _uses_in_hooks(module, LOCAL_NAMES)


def _uses_in_hooks(module: nn.Module, names: frozenset[str]) -> bool:
    return any(_uses(hook, names) for kind in HOOKS for hook in vars(module)[kind].values())


def _uses(function: Callable[..., Any], names: frozenset[str]) -> bool:
    """Return whether the code of a function, or of functions defined within, has one of these names."""
    waiting = [getattr(inspect.unwrap(function), "__code__", None)]
    while waiting:
        code = waiting.pop()
        if isinstance(code, CodeType):
            if not names.isdisjoint(code.co_names):
                return True
            waiting += code.co_consts
    return False


def is_sequence(layout: Any) -> bool:
    """Return whether a layout shards a dimension other than the last, as far as that is known without a tensor."""
    return isinstance(layout, Shard) and layout.dim >= 0


def _bound(hook: Hook, name: str) -> Layouts:
    """Return the arguments bound into the function that a hook of `distribute_module` calls."""
    function = closure_of(hook).get(name)
    return function.args if isinstance(function, partial) else ()


def closure_of(hook: Hook | None) -> dict[str, Any]:
    """Return a function's closure variables by name; nothing for objects that are no such function."""
    code, cells = getattr(hook, "__code__", None), getattr(hook, "__closure__", None)
    return (
        {} if code is None or not cells else dict(zip(code.co_freevars, [cell.cell_contents for cell in cells], strict=True))
    )
