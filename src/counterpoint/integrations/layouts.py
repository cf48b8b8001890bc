"""What `parallelize_module`, or the `tp_plan` of a Hugging Face model, left on a module: DTensor parameters, and functions
that hold the layouts of inputs and outputs.

The styles of torch keep layouts nowhere but in the closures of the hooks that they register, the same in torch 2.11 to 2.13;
those of transformers (read in 5.23) in the closure of the `forward` that they put in the linear's place. What looks
different is not recognized, and its module is then refused rather than guessed at.
"""

from collections.abc import Callable
from functools import partial
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
NUM_OUTPUT_ARGUMENTS = 2  # bound into the styles' functions for outputs: layouts, and whether to give local tensors


class LinearLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A linear as it was parallelized: which way its weight is split, where its hooks take inputs from and outputs to.

    `is_output_local`: its output hook only takes the local tensor out of what the linear gives by its nature. Linears of
    Hugging Face models have no hooks.
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
        """What the linear's operator is told besides its tensors."""
        return Route(self.mesh.get_group().group_name, self.mesh.size(), schedule)


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
    mesh = tensor_parallel_mesh(linear)
    if mesh is None:
        return (
            f"its weight lies on a mesh of {weight.device_mesh.ndim} dimensions, and none of them is known as that of its "
            "tensor parallelism. Parallelize over mesh['tp'], then call overlap, then fully_shard"
        )
    kinds: dict[Any, Literal["column", "row"]] = {Shard(0): "column", Shard(1): "row"}
    placement = weight.placements[-1]  # FSDP2 puts its own dimensions in front
    if placement not in kinds:
        return f"its weight is {placement}, neither column- nor row-parallel. Leave it as it is"
    kind = kinds[placement]
    divided, num_ranks = weight.shape[0 if kind == "column" else 1], mesh.size()
    if divided % num_ranks:
        return f"its {divided} {kind}s do not divide by the {num_ranks} ranks, and equal parts are served. Pad its weight"
    return _transformers_layout(linear, kind, mesh) or _torch_layout(linear, kind, mesh)


def tensor_parallel_mesh(linear: nn.Linear) -> DeviceMesh | None:
    """The mesh that a linear was parallelized over, of one dimension; None where it cannot be told.

    Outside of forward passes `fully_shard` keeps a weight on a mesh of more dimensions, whose last one is this.
    """
    whole = linear.weight.device_mesh
    if whole.ndim == 1:
        return whole
    last = dist.get_process_group_ranks(
        whole.get_group(whole.ndim - 1)
    )  # torch takes equal meshes for one; groups may differ
    for hook in (*linear._forward_pre_hooks.values(), vars(linear).get("forward")):
        mesh = closure_of(hook).get("device_mesh")
        if isinstance(mesh, DeviceMesh) and mesh.ndim == 1 and dist.get_process_group_ranks(mesh.get_group()) == last:
            return mesh
    return None


def _torch_layout(linear: nn.Linear, kind: Literal["column", "row"], mesh: DeviceMesh) -> LinearLayout | str:
    """Of what ColwiseParallel and RowwiseParallel of torch left."""
    inputs = [(key, found) for key, hook in linear._forward_pre_hooks.items() if (found := _bound(hook, "input_fn"))]
    outputs = [(key, found) for key, hook in linear._forward_hooks.items() if (found := _bound(hook, "output_fn"))]
    if len(inputs) != 1 or len(outputs) != 1 or len(outputs[0][1]) != NUM_OUTPUT_ARGUMENTS:
        return "its hooks are not those of ColwiseParallel or RowwiseParallel. Parallelize it by parallelize_module"
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
    """Of what a style of transformers left; None where there is none."""
    style = closure_of(vars(linear).get("forward")).get("self")
    if style is None or not type(style).__module__.startswith("transformers."):
        return None
    name = type(style).__name__
    if name not in ("ColwiseParallel", "RowwiseParallel"):
        return f"its style in the model's tp_plan is {name}, and ColwiseParallel and RowwiseParallel are served"
    if vars(linear).get("_hf_quantized_needs_local_tp"):
        return "its weight is quantized, and operators multiply by torch.mm. Load the model without quantization"
    return LinearLayout(
        kind=kind,
        mesh=mesh,
        input_layouts=(style.input_layouts,),
        output_layouts=(style.output_layouts,),
        is_output_local=bool(style.use_local_output),
    )


def gathering_hook(module: nn.Module) -> GatheringHook | None:
    """The hook that makes sequence-sharded inputs whole before the module runs, if there is one."""
    for key, hook in module._forward_pre_hooks.items():
        found = closure_of(hook)
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
    function = closure_of(hook).get(name)
    return function.args if isinstance(function, partial) else ()


def closure_of(hook: Hook | None) -> dict[str, Any]:
    """What a function keeps of where it was made, by name; nothing of what is no such function."""
    code, cells = getattr(hook, "__code__", None), getattr(hook, "__closure__", None)
    return (
        {} if code is None or not cells else dict(zip(code.co_freevars, [cell.cell_contents for cell in cells], strict=True))
    )
