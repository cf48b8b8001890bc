"""Reads what a framework left on a module of routed experts when it spread them over ranks: hooks or a `forward` that
send tokens.

torchtitan (read in v0.2.2) registers `_token_dispatch` and `_token_combine` of a style by `distribute_module`, as hooks
around `GroupedExperts`; transformers (read in 5.23) puts a `forward` in the module's place, whose closure holds an
implementation. torchtitan 0.3 (read in 0.3.0) gives `RoutedExperts` a token dispatcher that knows the ranks, as
Megatron-LM's core does with `MoELayer` (`megatron_experts.py`). What looks different is not recognized, and its module is
then refused rather than guessed at.
"""

from typing import Any, Literal

import msgspec
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from counterpoint.integrations.closures import closure_of

WEIGHTS = ("w1", "w2", "w3")
DISPATCHED_WEIGHTS = ("w1_EFD", "w2_EDF", "w3_EFD")  # of torchtitan 0.3, in the same order
WEIGHT_DIMS = 3
OF_MEGATRON = "megatron.core.transformer.moe."  # where Megatron-LM's expert layers, experts and dispatchers are
# functions that torchtitan's GroupedExperts calls
FORMULAS = frozenset({"_run_experts_grouped_mm", "_run_experts_for_loop"})
HIDES_ALREADY = (
    "it already overlaps the all-to-alls of one micro-batch with another micro-batch's computation. Leave it unchanged"
)
# Why some torchtitan styles that spread experts over ranks stay unchanged
REFUSED_STYLES = {
    "DeepEPExpertParallel": (
        "DeepEP's kernels send its tokens, so there is no all-to-all of torch to replace. Leave it unchanged, or "
        "use ExpertParallel"
    ),
    "DualPipeExpertParallel": HIDES_ALREADY,
}


class SpreadLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Experts as they were spread: over which ranks, and the keys of the hooks that send their tokens.

    `tensor_mesh`: the ranks that share each expert's hidden features, as torchtitan's expert tensor parallelism does.
    """

    mesh: DeviceMesh
    tensor_mesh: DeviceMesh | None = None
    input_hook: int
    output_hook: int

    def __deepcopy__(self, _memo: dict[int, Any]) -> "SpreadLayout":
        return self  # a mesh cannot be copied


def spread_by(module: nn.Module) -> Literal["torchtitan", "torchtitan 0.3", "transformers", "Megatron-LM"] | None:
    """Return the framework that sends a module's tokens to experts on other ranks; None if none does."""
    if _dispatch_hook(module) is not None:
        return "torchtitan"
    if getattr(getattr(module, "token_dispatcher", None), "ep_mesh", None) is not None:
        return "torchtitan 0.3"
    if _is_megatron_layer(module):
        return "Megatron-LM"
    return "transformers" if implementation_of(module) is not None else None


def _is_megatron_layer(module: nn.Module) -> bool:
    """Return whether a module is an expert layer of Megatron-LM's core whose experts are on several ranks."""
    is_theirs = any(each.__name__ == "MoELayer" and each.__module__.startswith(OF_MEGATRON) for each in type(module).__mro__)
    group = getattr(getattr(module, "token_dispatcher", None), "ep_group", None)
    return is_theirs and group is not None and group.size() > 1


def torchtitan_layout(experts: nn.Module) -> SpreadLayout | str:
    """Return the layout of experts whose tokens torchtitan's hooks send, or why they stay as they are."""
    found = _dispatch_hook(experts)
    assert found is not None
    input_hook, style, mesh = found
    name = type(style).__name__
    if name in REFUSED_STYLES:
        return REFUSED_STYLES[name]
    if name not in ("ExpertParallel", "ExpertTensorParallel"):
        return f"its style is {name}, but only ExpertParallel and ExpertTensorParallel are supported. Leave it as it is"
    outputs = [key for key, hook in experts._forward_hooks.items() if _style_in(closure_of(hook), "output_fn") is style]
    if len(outputs) != 1:
        return "one hook sends its tokens and no matching hook brings them back. Parallelize it by parallelize_module"
    problem = _formula_problem(experts) or _mesh_problem(name, mesh) or _weights_problem(experts)
    if problem:
        return problem
    is_split = name == "ExpertTensorParallel"
    return SpreadLayout(
        mesh=mesh["ep"] if is_split else mesh,
        tensor_mesh=mesh["etp"] if is_split else None,
        input_hook=input_hook,
        output_hook=outputs[0],
    )


def implementation_of(module: nn.Module) -> Any | None:
    """Return how transformers sends the tokens of a module of experts, if it does."""
    found = closure_of(vars(module).get("forward"))
    implementation = found.get("implementation")
    is_theirs = type(found.get("self")).__name__ == "EpDispatchExpertsParallel"
    return implementation if is_theirs and hasattr(implementation, "ep_mesh") else None


def refusal_of_dispatched(routed: Any) -> str:
    """Return why experts whose tokens torchtitan 0.3's dispatcher sends stay as they are, or nothing."""
    dispatcher, experts = routed.token_dispatcher, getattr(routed, "inner_experts", None)
    name = type(dispatcher).__name__
    if name != "AllToAllTokenDispatcher" or local_dispatcher(dispatcher) is None:
        return f"a {name} sends its tokens, but only AllToAllTokenDispatcher is supported. Leave it unchanged"
    if not isinstance(experts, nn.Module) or _owner_of_forward(experts).__name__ != "GroupedExperts":
        return f"it has {type(experts).__name__}, whose formula is unknown; only torchtitan's GroupedExperts is supported"
    multiplied_by = next((each.__name__ for each in type(experts).__mro__ if "_grouped_mm" in vars(each)), "")
    if multiplied_by != "GroupedExperts" or not {"silu", *DISPATCHED_WEIGHTS} <= _names_in_forward(
        _owner_of_forward(experts)
    ):
        return "its experts do not multiply as torchtitan's GroupedExperts does. Leave out quantization"
    for name in DISPATCHED_WEIGHTS:
        weight = getattr(experts, name)
        local = weight._local_tensor if isinstance(weight, DTensor) else weight
        if type(local) not in (torch.Tensor, nn.Parameter) or local.ndim != WEIGHT_DIMS:
            return f"its {name} is no plain tensor of {WEIGHT_DIMS} dimensions. Leave out quantization"
    return ""


def local_dispatcher(dispatcher: object) -> type | None:
    """Return torchtitan's class that sorts tokens and adds up results on one rank, from which dispatchers are derived."""
    return next((each for each in type(dispatcher).__mro__ if each.__name__ == "LocalTokenDispatcher"), None)


def _dispatch_hook(module: nn.Module) -> tuple[int, Any, DeviceMesh] | None:
    """Return the hook that sends tokens to experts on other ranks: its key, its style, its mesh."""
    for key, hook in module._forward_pre_hooks.items():
        found = closure_of(hook)
        style, mesh = _style_in(found, "input_fn"), found.get("device_mesh")
        if style is not None and isinstance(mesh, DeviceMesh):
            return key, style, mesh
    return None


def _style_in(found: dict[str, Any], name: str) -> Any | None:
    """Return the style whose method a hook of `distribute_module` calls, if it sends tokens."""
    style = getattr(found.get(name), "__self__", None)
    names = ("_token_dispatch", "_token_combine")
    return style if all(callable(getattr(style, each, None)) for each in names) else None


def shared_experts_of(layer: nn.Module) -> nn.Module | None:
    """Return the shared experts of torchtitan's `MoE`, which gives them the tokens that it routes; None for any other
    layer.

    Shared experts with their own hooks are not taken, because the hooks would see them at another time.
    """
    shared = vars(layer)["_modules"].get("shared_experts")
    if shared is None or shared._forward_pre_hooks or shared._forward_hooks or shared._backward_hooks:
        return None
    owner = _owner_of_forward(layer)
    return shared if owner.__name__ == "MoE" and {"experts", "shared_experts"} <= _names_in_forward(owner) else None


def _owner_of_forward(module: nn.Module) -> type:
    """Return the class that defines `forward`; `fully_shard` inserts one before it."""
    return next(each for each in type(module).__mro__ if "forward" in vars(each))


def _names_in_forward(owner: type) -> set[str]:
    """Return the names used in the code of `forward`."""
    return set(getattr(getattr(vars(owner)["forward"], "__code__", None), "co_names", ()))


def _formula_problem(experts: nn.Module) -> str:
    """Return why it is not certain that the module computes silu(x w1) * (x w3), times w2; or nothing."""
    owner = _owner_of_forward(experts)
    if owner.__name__ != "GroupedExperts" or not _names_in_forward(owner) >= FORMULAS or "forward" in vars(experts):
        return f"it is a {owner.__name__}, whose formula is unknown; only that of torchtitan's GroupedExperts is supported"
    return ""


def _mesh_problem(name: str, mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or ()
    if name == "ExpertTensorParallel" and not {"ep", "etp"} <= set(names):
        return f"its mesh has the dimensions {', '.join(names) or 'without names'}, but ep and etp are required"
    if name == "ExpertParallel" and mesh.ndim != 1:
        return f"its mesh has {mesh.ndim} dimensions, but its experts are spread over one"
    return ""


def _weights_problem(experts: nn.Module) -> str:
    """Return why the weights are not available as plain tensors of this rank's experts, or nothing."""
    for name in WEIGHTS:
        weight = getattr(experts, name, None)
        if not isinstance(weight, DTensor) or weight.ndim != WEIGHT_DIMS:
            return f"its {name} is no DTensor of {WEIGHT_DIMS} dimensions. Parallelize it by parallelize_module"
        local = weight._local_tensor
        if type(local) not in (torch.Tensor, nn.Parameter):
            return f"its {name} is a {type(local).__name__}, but operators multiply plain tensors. Leave out quantization"
        if Shard(0) not in weight.placements:
            return f"its {name} is {weight.placements}, but only experts spread by Shard(0) are supported"
    return ""
