"""Hides the all-to-alls of expert parallelism behind the experts' own grouped matmuls, forward and backward.

    overlapped = expert_parallel.overlap(model)      # after the model was parallelized
    ...
    overlapped.use(False)                            # between steps: as before, and use(True) again
    overlapped.undo()

It supports the experts of torchtitan (`ExpertParallel`, `ExpertTensorParallel`), of Hugging Face models that
transformers spreads over ranks by all-to-alls (`AllToAllEP`), and of Megatron-LM (`MoEAlltoAllTokenDispatcher`). Shared
experts of torchtitan 0.2's layers run while tokens are in transit, and so do Megatron-LM's with its own overlap of them. A
layer that is not supported stays unchanged; `refused` and the log say why.

Call `overlap` before or after `fully_shard`, and before or after activation checkpointing, but not between a forward and
a backward pass. In a model under torch.compile, the graph breaks at the experts, as in torchtitan.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from counterpoint.errors import IntegrationError, reason_of
from counterpoint.integrations import megatron_experts, transformers_experts
from counterpoint.integrations.dispatched_experts import DispatchedExperts
from counterpoint.integrations.expert_layouts import (
    refusal_of_dispatched,
    shared_experts_of,
    spread_by,
    torchtitan_layout,
)
from counterpoint.integrations.megatron_experts import MegatronExperts
from counterpoint.integrations.module_tree import modules_within, named_modules
from counterpoint.integrations.overlapped import Overlapped, is_overlapped
from counterpoint.integrations.routed_experts import SharedExperts, TorchtitanExperts
from counterpoint.integrations.switched_hooks import pass_on
from counterpoint.integrations.transformers_experts import TransformersExperts
from counterpoint.ops.expert_functions import OPERATORS
from counterpoint.ops.expert_routing import require_experts_schedule
from counterpoint.schedule import ScheduleDescription
from counterpoint.value import require

# OPERATORS: what a policy of selective checkpointing sees instead of all-to-alls. If it saves them, no token is sent again.
__all__ = ["OPERATORS", "Overlapped", "overlap", "waiting_experts", "why_none_waits"]

OVERLAPPED = TorchtitanExperts | DispatchedExperts | TransformersExperts | MegatronExperts
TORCHTITAN = "torchtitan"  # its hooks send tokens, and its layer's shared experts run meanwhile
# by framework, of the others: why experts stay unchanged, and what replaces their forward
REFUSALS: dict[str | None, Callable[[nn.Module], str]] = {
    "torchtitan 0.3": refusal_of_dispatched,
    "Megatron-LM": megatron_experts.refusal_of,
    "transformers": transformers_experts.refusal,
}
FORWARDS: dict[str | None, type[DispatchedExperts | MegatronExperts | TransformersExperts]] = {
    "torchtitan 0.3": DispatchedExperts,
    "Megatron-LM": MegatronExperts,
    "transformers": TransformersExperts,
}


def overlap(
    module: nn.Module,
    *,
    schedule: ScheduleDescription | None = None,
    keeps_tokens: bool = False,
    is_on: bool = True,
) -> Overlapped:
    """Let the routed experts within `module` communicate beside their own grouped matmuls; call it on every rank.

    `schedule` overrides the choice by size for all of them. With `keeps_tokens` ranks keep the tokens that reached their
    experts instead of having them sent again in backward; the result tells how much memory that takes. With `is_on=False`
    everything is prepared, and nothing changes before `use(True)`. Raises `IntegrationError` if no experts are supported, or
    if some of them are already overlapped.
    """
    _check_arguments(module, schedule)
    overlapped = Overlapped(is_on=is_on, of_experts=True, keeps_tokens=keeps_tokens)
    options = {"schedule": schedule, "keeps_tokens": keeps_tokens}
    found = [(name, each) for name, each in named_modules(module) if spread_by(each) is not None]
    overlapped.require_new(named_modules(module), OVERLAPPED)
    require(
        bool(found),
        IntegrationError,
        f"{type(module).__name__} has no experts that torchtitan, transformers or Megatron-LM spread over ranks. "
        "Parallelize it first.",
    )
    layers = {id(layer._modules.get("experts")): layer for layer in modules_within(module) if "experts" in layer._modules}
    with overlapped.all_or_nothing():
        for name, experts in found:
            if reason := _refusal(experts):
                overlapped.refused[name] = reason
            elif spread_by(experts) == TORCHTITAN:
                _take_torchtitan(overlapped, name, (experts, layers.get(id(experts))), options)
            else:
                _take(overlapped, name, experts, options)
        overlapped.require_taken(f"No experts of {type(module).__name__}")
    overlapped.say_obstacles()
    return overlapped


def _check_arguments(module: object, schedule: object) -> None:
    require(
        isinstance(module, nn.Module),
        IntegrationError,
        "overlap() takes a module whose experts are spread over ranks; found one of type "
        f"{type(module).__name__}. Pass the model.",
    )
    require_experts_schedule(schedule)


def waiting_experts(module: nn.Module) -> list[nn.Module]:
    """Return the experts in the module that a framework has spread over ranks and that `overlap` can still take."""
    waiting = (each for each in modules_within(module) if spread_by(each) and not is_overlapped(each, OVERLAPPED))
    return [each for each in waiting if not _refusal(each)]


def why_none_waits(module: nn.Module) -> str:
    """Return why `overlap` cannot take the first of the experts in the module that it cannot take; nothing without any."""
    for name, each in named_modules(module):
        if spread_by(each) and (reason := _refusal(each)):
            return f"{name or 'the experts'}: {reason}"
    return ""


def _refusal(experts: nn.Module) -> str:
    """Return why experts that a framework has spread cannot be taken, or nothing."""
    framework = spread_by(experts)
    try:
        if framework in REFUSALS:
            return REFUSALS[framework](experts)
        found = torchtitan_layout(experts)
    except Exception as problem:  # attributes that another release does not have
        return f"this release of their framework is not known ({reason_of(problem)}). Leave them unchanged"
    return found if isinstance(found, str) else ""


def _take(overlapped: Overlapped, name: str, experts: nn.Module, options: Mapping[str, Any]) -> None:
    """Take experts of a framework that needs nothing but their module."""
    forward = FORWARDS[spread_by(experts)](experts, overlapped.switch, options)
    overlapped.take(name, experts, forward.run, forward.group.group_name)
    for exchanged in forward.replacements():
        overlapped.exchange(*exchanged)


def _take_torchtitan(
    overlapped: Overlapped, name: str, modules: tuple[nn.Module, nn.Module | None], options: Mapping[str, Any]
) -> None:
    """Take experts and the shared experts of the layer around them, if there are any."""
    experts, layer = modules
    layout = torchtitan_layout(experts)
    assert not isinstance(layout, str), "only experts that are not refused come here"
    shared = None if layer is None else _take_shared(overlapped, layer)
    forward = TorchtitanExperts(experts, layout, (overlapped.switch, options, shared))
    overlapped.take(name, experts, forward.run, forward.group.group_name)
    for hooks, key in ((experts._forward_pre_hooks, layout.input_hook), (experts._forward_hooks, layout.output_hook)):
        overlapped.replace_hook(hooks, key, pass_on(hooks[key], overlapped.switch))


def _take_shared(overlapped: Overlapped, layer: nn.Module) -> SharedExperts | None:
    """Let a layer's shared experts, if it has any, run while tokens are in transit."""
    shared = shared_experts_of(layer)
    if shared is None:
        return None
    forward = SharedExperts(layer, shared)
    overlapped.exchange_forward(shared, forward.run)
    overlapped.exchange_forward(layer, forward.run_layer)
    return forward
