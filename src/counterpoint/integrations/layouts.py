"""Reads what `parallelize_module`, or the `tp_plan` of a Hugging Face model, left on a module: DTensor parameters, and
functions that hold the layouts of inputs and outputs; or torchtitan 0.3, which keeps these in a configuration.

torch's styles keep layouts only in the closures of the hooks that they register, the same way in torch 2.11 to 2.13. The
styles of transformers (read in 5.23) keep them in the closure of the `forward` that replaces the linear's. A module that
looks different is refused, because its layout would be a guess.
"""

from typing import Any, Literal

import msgspec
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput

from counterpoint.integrations.closures import bound_in, closure_of, original_forward, uses
from counterpoint.integrations.module_tree import modules_within, named_modules, own_parameters
from counterpoint.integrations.sequence_shards import Route
from counterpoint.integrations.sharding_configs import (
    WHOLE,
    config_of,
    has_plain_tensors,
    inputs_of,
    kind_of,
    output_of,
    refusal_of_backend,
    tensor_parallel_mesh_of,
    weights_of,
)

Layouts = tuple[Any, ...]
LOCAL_NAMES = frozenset({"to_local", "_local_tensor"})  # of what gives a rank's part of a DTensor
DTENSOR_NAMES = LOCAL_NAMES | {"full_tensor", "redistribute", "placements", "device_mesh"}
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
TAKES_DTENSORS = (
    "a hook of the job's takes its inputs or outputs for DTensors, but operators have a rank's part. Remove the hook"
)
# torchtitan's modules that send beside their own matmuls (`tp_gemm_backend`)
FUSED = frozenset({"AllGatherFusedQKVLinear", "AllGatherFusedFeedForward", "RowParallelLinear"})
IS_FUSED = "sends beside its own matmuls. Leave it unchanged, or set tp_gemm_backend to default"
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
    is_configured: bool = False  # by torchtitan 0.3; inputs and outputs are DTensors, or else `is_plain`
    is_plain: bool = False  # its weight, its inputs and outputs are plain tensors, a rank's parts

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


def linear_layout(linear: nn.Module) -> LinearLayout | str:
    """Return the layout of a linear that `is_parallel`, or why it is unknown."""
    refusal = refusal_of_backend(linear)
    if refusal:
        return refusal
    weight, mesh, is_plain = linear.weight, tensor_parallel_mesh(linear), has_plain_tensors(linear)
    if mesh is None:
        return (
            f"its weight is on a mesh of {weight.device_mesh.ndim} dimensions, and it is unknown which one is "
            "tensor-parallel. Parallelize over mesh['tp'], then call overlap, then fully_shard"
        )
    kinds: dict[Any, Literal["column", "row"]] = {Shard(0): "column", Shard(1): "row", 0: "column", 1: "row"}
    placement = _plain_kind(linear) if is_plain else weight.placements[-1]  # FSDP2 puts its own dimensions in front
    if placement not in kinds:
        return f"its weight is {placement}, neither column- nor row-parallel. Leave it unchanged"
    if is_plain and type(linear).__name__ in FUSED:
        return f"torchtitan's {type(linear).__name__} {IS_FUSED}"
    kind = kinds[placement]
    whole = (linear.out_features, linear.in_features) if is_plain else weight.shape
    divided, num_ranks = whole[0 if kind == "column" else 1], mesh.size()
    if divided % num_ranks:
        return (
            f"its {divided} {kind}s do not divide by the {num_ranks} ranks, but only equal parts are supported. Pad "
            "its weight"
        )
    if getattr(original_forward(linear), "__func__", None) is not nn.Linear.forward:
        return "its forward is not that of torch.nn.Linear, and operators compute no other formula. Leave it unchanged"
    for read in (_configured_layout, _transformers_layout):
        layout = read(linear, kind, mesh)
        if layout is not None:
            return layout
    return _torch_layout(linear, kind, mesh)


def is_parallel(module: nn.Module) -> bool:
    """Return whether a module is a linear with a DTensor weight, or one that torchtitan split without DTensors."""
    if not isinstance(module, nn.Linear):
        return False
    return isinstance(module.weight, DTensor) or has_plain_tensors(module) or bool(refusal_of_backend(module))


def is_split(linear: nn.Linear) -> bool:
    """Return whether tensor parallelism has split a linear that `is_parallel`; FSDP2's weights are DTensors as well."""
    return bool(_meshes_of(linear)) or bool(refusal_of_backend(linear))


def tensor_parallel_mesh(linear: nn.Linear) -> DeviceMesh | None:
    """Return the one-dimensional mesh over which a linear was parallelized; None if it is unknown.

    Outside of forward passes, `fully_shard` keeps a weight on a mesh of more dimensions, of which this is the last.
    """
    if has_plain_tensors(linear):
        return tensor_parallel_mesh_of(linear)
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
    """Return the meshes in closures of a linear's hooks and forward: torch calls them `device_mesh`, transformers `mesh`;
    torchtitan 0.3 knows them by name.
    """
    functions = *linear._forward_pre_hooks.values(), vars(linear).get("forward")
    found = [closure_of(function).get(name) for function in functions for name in ("device_mesh", "mesh")]
    return [each for each in (*found, tensor_parallel_mesh_of(linear)) if isinstance(each, DeviceMesh)]


def _configured_layout(linear: nn.Linear, kind: Literal["column", "row"], mesh: DeviceMesh) -> LinearLayout | str | None:
    """Read the layout that torchtitan 0.3 configured; None if it did not.

    A column-parallel linear gets whole inputs, and `boundary_of` says of the modules around it what makes them whole.
    """
    config = config_of(linear)
    if config is None:
        return None
    if _uses_in_hooks(linear, DTENSOR_NAMES):
        return TAKES_DTENSORS
    given, wanted = inputs_of(config).get("input", (None, None))
    source, output = output_of(config)
    is_column = kind == "column"
    if given != wanted or (wanted not in (None, *WHOLE) if is_column else wanted in WHOLE):
        return f"its configuration makes its input {wanted} of {given}, which is not supported. Leave it unchanged"
    if is_column and source != output:
        return f"its configuration makes its output {output} of {source}, but only its own part is supported"
    if not is_column and not (output in WHOLE or (isinstance(output, int) and output >= 0)):
        return f"its output stays {output or source or 'as it is'}, so it sends nothing itself. Leave it unchanged"
    is_plain = has_plain_tensors(linear)
    if is_plain and not is_column and output == "R":
        return "its output is R, so backward sums the output's gradient, and operators do not. Leave it unchanged"
    if is_plain and not is_column and linear.bias is not None:
        return "each rank adds its bias before the sum, and operators do not. Leave it unchanged"
    outputs = Shard(-1) if is_column else Shard(output) if isinstance(output, int) else Replicate()
    return LinearLayout(
        kind=kind,
        mesh=mesh,
        input_layouts=(Replicate() if is_column else Shard(-1),),
        output_layouts=(outputs,),
        is_output_local=is_plain,
        is_configured=True,
        is_plain=is_plain,
    )


def _plain_kind(linear: nn.Module) -> Any:
    """Return how torchtitan split the plain weight of a linear: the sharded dimension, or R or I."""
    return kind_of(getattr(config_of(linear), "state_shardings", {}).get("weight"))


def _torch_layout(linear: nn.Linear, kind: Literal["column", "row"], mesh: DeviceMesh) -> LinearLayout | str:
    """Read the layout that torch's ColwiseParallel or RowwiseParallel left."""
    inputs = [(key, found) for key, hook in linear._forward_pre_hooks.items() if (found := bound_in(hook, "input_fn"))]
    outputs = [(key, found) for key, hook in linear._forward_hooks.items() if (found := bound_in(hook, "output_fn"))]
    if len(inputs) != 1 or len(outputs) != 1 or len(outputs[0][1]) != NUM_OUTPUT_ARGUMENTS:
        return "its hooks are not those of ColwiseParallel or RowwiseParallel. Parallelize it by parallelize_module"
    if _uses_in_hooks(linear, DTENSOR_NAMES):
        return TAKES_DTENSORS
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
        if style.use_local_output or any(map(_takes_local, modules_within(module))):
            continue
        pairs = enumerate(zip(style.input_layouts, style.desired_input_layouts, strict=True))
        positions = tuple(number for number, (given, wanted) in pairs if is_sequence(given) and wanted == Replicate())
        if positions and isinstance(mesh, DeviceMesh) and mesh.ndim == 1:
            return GatheringHook(key=key, style=style, mesh=mesh, positions=positions)
    return None


class Boundary(msgspec.Struct, frozen=True, kw_only=True):
    """What torchtitan 0.3 does with the inputs of a module before it runs.

    `name`: that of the module's class. `gathered`: the inputs, by name, that it makes whole of parts of the sequence,
    with the sharded dimension. `summed`: those that are whole, and whose gradients are summed. `obstacle`: why its linears
    cannot do that instead. `mesh`: that of the tensor-parallel ranks where tensors are plain, and None where DTensor sums.
    """

    name: str
    gathered: dict[str, int] = {}
    summed: tuple[str, ...] = ()
    obstacle: str = ""
    mesh: DeviceMesh | None = None

    @property
    def dims(self) -> dict[str, int | None]:
        """The inputs that must stay as they come, with the sharded dimension; None for one that is whole."""
        return {**self.gathered, **(dict.fromkeys(self.summed) if self.mesh is not None else {})}

    @property
    def dim(self) -> int | None:
        """The sharded dimension of plain inputs, if they are gathered."""
        return None if self.mesh is None else next(iter(self.dims.values()), None)


def boundary_of(module: nn.Module) -> Boundary | None:
    """Return what torchtitan 0.3 does with the inputs of a module that is no linear; None if nothing is configured."""
    if type(module).__name__ in FUSED and not isinstance(module, nn.Linear):
        return Boundary(name=type(module).__name__, obstacle=IS_FUSED)
    config = config_of(module)
    changes = getattr(module, "_redistribute_inputs", None)
    if config is None or changes is None or isinstance(module, nn.Linear) or not config.in_dst_shardings:
        return None
    mesh = tensor_parallel_mesh_of(module) if has_plain_tensors(module) else None
    found, whole = inputs_of(config), WHOLE if mesh is None else WHOLE[:1]
    gathered = {
        name: given for name, (given, wanted) in found.items() if isinstance(given, int) and given >= 0 and wanted in whole
    }
    summed = tuple(name for name, (given, wanted) in found.items() if given == "I" and wanted == "R")
    made = Boundary(name=type(module).__name__, gathered=gathered, summed=summed, mesh=mesh)
    if mesh is not None and len(set(made.dims.values())) > 1:
        obstacle = "other inputs are spread in another way"
    else:
        obstacle = _obstacle_in(module) if made.dims else ""
    does = "gathers its input" if gathered else "sums its input's gradient"
    return msgspec.structs.replace(made, obstacle=obstacle and f"{does}, but {obstacle}. Leave it unchanged")


def _obstacle_in(module: nn.Module) -> str:
    """Return why the parts of a module do not all run on parts of the sequence; or nothing.

    torchtitan's own check would fail in a part that asks for whole inputs. Where tensors are plain, such a part, and one
    with whole weights, would gather once more.
    """
    is_plain = has_plain_tensors(module)
    for name, each in named_modules(module):
        if not is_plain and _takes_local(each):
            return f"{name or 'its forward'} takes a rank's part of DTensors"
        config = None if each is module else config_of(each)
        if config is None:
            continue
        if is_plain and isinstance(each, nn.Linear) and _plain_kind(each) in WHOLE:
            return f"{name} within needs it whole"
        is_column = (
            0 in weights_of(each)
            if is_plain
            else any(isinstance(own, DTensor) and own.placements[-1] == Shard(0) for own in own_parameters(each))
        )
        is_taken = is_column and isinstance(each, nn.Linear) and not isinstance(linear_layout(each), str)
        if not is_taken and (is_column or any(given in WHOLE for given, _ in inputs_of(config).values())):
            return f"{name} within needs it whole"
    return ""


def _takes_local(module: nn.Module) -> bool:
    """Return whether the code of a module's forward or hooks names this rank's part of a DTensor; functions that it calls
    are not read.
    """
    return uses(original_forward(module), LOCAL_NAMES) or _uses_in_hooks(module, LOCAL_NAMES)


def _uses_in_hooks(module: nn.Module, names: frozenset[str]) -> bool:
    return any(uses(hook, names) for kind in HOOKS for hook in vars(module)[kind].values())


def is_sequence(layout: Any) -> bool:
    """Return whether a layout shards a dimension other than the last, as far as that is known without a tensor."""
    return isinstance(layout, Shard) and layout.dim >= 0
