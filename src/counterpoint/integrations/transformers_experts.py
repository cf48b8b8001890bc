"""Experts of Hugging Face models as transformers spreads them over ranks (read in 5.23): `AllToAllEP`, or `AutoEP` if it
chooses that.

Their tokens arrive unsorted, with the experts of each token and the weights of these. This module sorts, weights and
sums exactly what `AllToAllEP` does; one operator does the part in between.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from counterpoint.integrations.expert_layouts import implementation_of
from counterpoint.integrations.sequence_shards import cast_for_matmul, part_of
from counterpoint.integrations.switched_hooks import Switch
from counterpoint.ops import expert_ffn, gated_silu
from counterpoint.ops.operator_call import expert_calls_of

NOT_SERVED = {
    "AllReduceEP": (
        "its ranks share one batch and sum by an all-reduce, so there is no all-to-all to hide. Give "
        "DistributedConfig ep_implementation='all_to_all'"
    ),
    "MegaMoeEP": "its tokens are sent inside DeepGEMM's kernel. Leave it unchanged",
}
NOT_SENT = "AutoEP sums by all-reduces without gradients; give DistributedConfig ep_implementation='all_to_all'"
# attributes that transformers' `use_experts_implementation` sets on experts, and the supported values
FORM = {"has_gate": True, "has_post_expert_norm": False}
PARAMETERS = frozenset({"gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"})


class Routes(NamedTuple):
    """Where the tokens of one call go."""

    experts: torch.Tensor  # (tokens, k)
    weights: torch.Tensor  # (tokens, k)


def refusal(experts: nn.Module) -> str:
    """Return why experts that transformers has spread over ranks stay unchanged, or nothing."""
    implementation = implementation_of(experts)
    name = type(implementation).__name__
    if name in NOT_SERVED:
        return NOT_SERVED[name]
    if name not in ("AllToAllEP", "AutoEP"):
        return f"its tokens are sent by {name}, but only AllToAllEP is supported"
    if getattr(implementation, "megamoe", None) is not None:
        return NOT_SERVED["MegaMoeEP"]
    wrong = [each for each, wanted in FORM.items() if getattr(experts, each, None) is not wanted]
    if wrong:
        return f"its experts have {wrong[0]}={getattr(experts, wrong[0], None)}, but only {FORM[wrong[0]]} is supported"
    others = {name for name, _ in experts.named_parameters()} - PARAMETERS
    if others or not callable(getattr(experts, "_apply_gate", None)):
        found = ", ".join(sorted(others)) or "no _apply_gate"
        return f"its experts have {found}, but only a gate of gate and up, with or without biases, is supported"
    return ""


def _has_usual_gate(experts: nn.Module) -> bool:
    """Return whether the gate is silu(gate) * up of two halves."""
    gate, activation = getattr(type(experts), "_apply_gate", None), type(getattr(experts, "act_fn", None)).__name__
    return getattr(gate, "__name__", "") == "_default_apply_gate" and activation in ("SiLU", "SiLUActivation")


@final
class TransformersExperts:
    """A module of experts whose tokens `AllToAllEP` sends."""

    def __init__(self, experts: nn.Module, switch: Switch, options: Mapping[str, Any]) -> None:
        """`options`: those of `expert_ffn`."""
        self._experts, self._forward, self._switch, self._options = experts, experts.forward, switch, options
        self._implementation = implementation_of(experts)
        assert self._implementation is not None
        mesh: DeviceMesh = self._implementation.ep_mesh
        self.group: dist.ProcessGroup = mesh.get_group()
        self._num_experts = self._implementation.num_local_experts * mesh.size()
        self._tokens_mesh: DeviceMesh = self._implementation.tp_mesh

    def __deepcopy__(self, _memo: dict[int, Any]) -> "TransformersExperts":
        return self  # a copy of the model has the same `forward`, as without Counterpoint

    def replacements(self) -> list[tuple[dict[str, Any], str, Callable[..., Any]]]:
        """Return what else to put into which object under which name: nothing."""
        return []

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the sizes of what is sent are read on the host
    def run(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the experts' results for each token (tokens, dim)."""
        given, weights = part_of(hidden_states), part_of(top_k_weights)
        if not self._switch.holds:
            return self._switch.watch(self._forward(hidden_states, top_k_index, top_k_weights))
        if not self._is_sent(given):
            expert_calls_of(self.group.group_name).add_library(NOT_SENT, is_original=True)
            return self._switch.watch(self._forward(hidden_states, top_k_index, top_k_weights))
        routes = Routes(top_k_index, weights)
        if self._tokens_mesh.size() == 1:
            return self._results(given, routes).to(given.dtype)
        own, *rest = (self._own_part(each) for each in (given, *routes))
        results = self._results(own, Routes(*rest)).contiguous()
        shape, stride = given.shape, (given.shape[1], 1)
        parts = DTensor.from_local(results, self._tokens_mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        return parts.full_tensor().to(given.dtype)

    def _is_sent(self, given: torch.Tensor) -> bool:
        """Return whether an all-to-all sends these tokens; if ranks share a batch, `AutoEP` evaluates by all-reduces."""
        may_share: Any = getattr(self._implementation, "all_reduce", None)
        return may_share is None or (torch.is_grad_enabled() and given.requires_grad)

    def _own_part(self, shared: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens of those that all ranks of a tensor-parallel group have."""
        whole = DTensor.from_local(shared, self._tokens_mesh, [Replicate()], run_check=False)
        part: torch.Tensor = whole.redistribute(self._tokens_mesh, [Shard(0)]).to_local()
        return part

    def _results(self, tokens: torch.Tensor, routes: Routes) -> torch.Tensor:
        num_routes = routes.experts.shape[-1]
        chosen = routes.experts.reshape(-1)
        order = torch.argsort(chosen, stable=True)
        counts = torch.zeros(self._num_experts, dtype=torch.long, device=tokens.device)
        counts = counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        sorted_results = self._sorted_results(cast_for_matmul(tokens[order // num_routes]), counts)
        results = torch.empty_like(sorted_results)
        results[order] = sorted_results
        by_token = results.view(*routes.weights.shape, results.shape[-1])
        return (by_token * routes.weights.unsqueeze(-1)).sum(dim=1)

    def _sorted_results(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the experts' results for rows sorted by expert.

        Gate and up lie in one weight, and one matmul gives both. Of gates other than the usual one, autograd has the
        derivative.
        """
        both, down = self._parameter("gate_up_proj"), self._parameter("down_proj")
        of_both, of_down = self._parameter("gate_up_proj_bias"), self._parameter("down_proj_bias")
        assert both is not None
        assert down is not None
        if self._experts.is_transposed:
            both, down = both.mT, down.mT
        gate: Any = gated_silu if _has_usual_gate(self._experts) else self._experts._apply_gate
        named = {"group": self.group, "biases": (of_both, of_down), "activation": gate, **self._options}
        return expert_ffn(rows, counts, both, down, **named)

    def _parameter(self, name: str) -> torch.Tensor | None:
        found = getattr(self._experts, name, None)
        return None if found is None else cast_for_matmul(part_of(found))
