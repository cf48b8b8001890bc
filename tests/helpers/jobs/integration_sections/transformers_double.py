"""Experts as transformers (read in 5.23) spreads them over ranks by `AllToAllEP`: the names, attributes and closures that
the integration looks for, and the same sums; in gpt-oss' form (biases, gate and up interleaved, weights transposed) and in
the usual one."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from integration_sections.comparing import DEVICE

DIM, HIDDEN, TOP_K = 16, 24, 2


def _default_apply_gate(self: Any, both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    return self.act_fn(gate) * up


def _interleaved_gate(_self: Any, both: torch.Tensor) -> torch.Tensor:
    gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


class Experts(nn.Module):
    """Of the usual form."""

    has_gate, has_post_expert_norm, has_bias, is_transposed, is_concatenated = True, False, False, False, True
    _apply_gate = _default_apply_gate

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts, self.act_fn = num_experts, nn.SiLU()
        shapes = {"gate_up_proj": (2 * HIDDEN, DIM), "down_proj": (DIM, HIDDEN)}
        for name, (outer, inner) in shapes.items():
            shape = (inner, outer) if self.is_transposed else (outer, inner)
            self.register_parameter(name, nn.Parameter(torch.randn(num_experts, *shape) / 4))
            if self.has_bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(num_experts, outer)))

    def linear(self, name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
        weight, *bias = (
            each.to_local()[expert]
            for each in (getattr(self, name, None), getattr(self, f"{name}_bias", None))
            if each is not None
        )
        return nn.functional.linear(rows, weight.mT if self.is_transposed else weight, *bias)


class GptOssExperts(Experts):
    has_bias, is_transposed, is_concatenated = True, True, False
    _apply_gate = _interleaved_gate


class NormedExperts(Experts):
    has_post_expert_norm = True


class AllToAllEP:
    def __init__(self, experts: Experts, mesh: DeviceMesh) -> None:
        self.experts, self.ep_mesh = experts, mesh
        self.tp_mesh = init_device_mesh(DEVICE.type, (mesh.size(), 1), mesh_dim_names=("ep", "tp"))["tp"]
        self.num_local_experts = experts.num_experts

    def __call__(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        num_ranks, group = self.ep_mesh.size(), self.ep_mesh.get_group()
        order = torch.argsort(chosen.flatten(), stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=num_ranks * self.num_local_experts).view(num_ranks, -1)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=group)
        sizes = received.sum(1).tolist(), counts.sum(1).tolist()
        rows = all_to_all_single_autograd(tokens[order // TOP_K], *sizes, group)
        parts = zip(
            torch.split(rows, received.flatten().tolist()), list(range(self.num_local_experts)) * num_ranks, strict=True
        )
        results = torch.cat([self._expert(expert, part) for part, expert in parts])
        back = all_to_all_single_autograd(results, *sizes[::-1], group)
        by_token = torch.empty_like(back).index_copy(0, order, back).view(*weights.shape, DIM)
        return (by_token * weights.unsqueeze(-1)).sum(dim=1)

    def _expert(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        experts = self.experts
        return experts.linear("down_proj", expert, experts._apply_gate(experts.linear("gate_up_proj", expert, rows)))


class AutoEP(AllToAllEP):
    """Without gradients it sums by an all-reduce; what it computes then does not matter here."""

    all_reduce = True


class EpDispatchExpertsParallel:
    def __init__(self, implementation: type[AllToAllEP] = AllToAllEP) -> None:
        self._kind = implementation

    def install_forward(self, module: Experts, mesh: DeviceMesh) -> nn.Module:
        module.num_experts //= mesh.size()
        for name, weight in list(module.named_parameters()):
            module.register_parameter(name, nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)])))
        implementation = self._kind(module, mesh)

        def ep_forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
            assert self is not None
            return implementation(hidden_states, top_k_index, top_k_weights)

        module.forward = ep_forward
        return module


def spread_experts(kind: type[Experts], mesh: DeviceMesh, implementation: type[AllToAllEP] = AllToAllEP) -> nn.Module:
    """A model of one module of experts, split over the ranks of a mesh."""
    torch.manual_seed(0)
    model = nn.Module()
    model.experts = kind(2 * mesh.size()).to(DEVICE, torch.float64)
    EpDispatchExpertsParallel(implementation).install_forward(model.experts, mesh)
    return model


def step_of(model: nn.Module, *, has_backward: bool = True) -> list[torch.Tensor]:
    """The output and all gradients of one step, with other routes on every rank; the output alone without backward."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randn(12, DIM, generator=generator, dtype=torch.float64).to(DEVICE).requires_grad_()
    scores = torch.rand(12, 2 * dist.get_world_size(), generator=generator, dtype=torch.float64).to(DEVICE)
    weights, chosen = scores.topk(TOP_K)
    weights.requires_grad_()
    model.zero_grad()
    output = model.experts(tokens, chosen, weights)
    if not has_backward:
        return [output]
    output.square().sum().backward()
    gradients = [each.grad for each in model.parameters()]
    return [
        output.detach(),
        tokens.grad,
        weights.grad,
        *(each.to_local() for each in gradients if isinstance(each, DTensor)),
    ]
