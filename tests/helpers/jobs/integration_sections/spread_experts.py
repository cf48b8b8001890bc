"""A layer of routed experts with the structure of torchtitan's (v0.2.2), small and without padding: what its styles and
`GroupedExperts` are called, which hooks send tokens, and which functions multiply."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.functional import silu

from integration_sections.comparing import DEVICE

DIM, HIDDEN, TOP_K = 16, 24, 2


def _run_experts_for_loop(
    weights: tuple[torch.Tensor, ...], tokens: torch.Tensor, num_tokens_per_expert: torch.Tensor
) -> torch.Tensor:
    first, second, third = weights
    parts = torch.split(tokens, num_tokens_per_expert.tolist())
    return torch.cat([(silu(part @ first[e].t()) * (part @ third[e].t())) @ second[e].t() for e, part in enumerate(parts)])


def _run_experts_grouped_mm(
    weights: tuple[torch.Tensor, ...], tokens: torch.Tensor, num_tokens_per_expert: torch.Tensor
) -> torch.Tensor:
    return _run_experts_for_loop(
        tuple(each.bfloat16() for each in weights), tokens.bfloat16(), num_tokens_per_expert
    ).type_as(tokens)


class GroupedExperts(nn.Module):
    def __init__(self, num_experts: int, *, use_grouped_mm: bool = False) -> None:
        super().__init__()
        self.use_grouped_mm = use_grouped_mm
        for name, shape in (("w1", (HIDDEN, DIM)), ("w2", (DIM, HIDDEN)), ("w3", (HIDDEN, DIM))):
            self.register_parameter(name, nn.Parameter(torch.randn(num_experts, *shape) / 4))

    def forward(self, tokens: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        weights = tuple(each.to_local() if isinstance(each, DTensor) else each for each in (self.w1, self.w2, self.w3))
        if self.use_grouped_mm:
            return _run_experts_grouped_mm(weights, tokens, num_tokens_per_expert)
        return _run_experts_for_loop(weights, tokens, num_tokens_per_expert)


class SquaredExperts(GroupedExperts):
    """Its formula is another."""

    def forward(self, tokens: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens, num_tokens_per_expert).square()


class ExpertParallel(ParallelStyle):
    placements: tuple[tuple[Shard, ...], ...] = ((Shard(0),), (Shard(0),), (Shard(0),))

    def _split_weights(self, _name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, placements in zip(("w1", "w2", "w3"), self.placements, strict=True):
            parameter = nn.Parameter(distribute_tensor(getattr(module, name), mesh, placements))
            module.register_parameter(name, parameter)

    def _token_dispatch(
        self, _module: nn.Module, inputs: tuple[torch.Tensor, torch.Tensor], mesh: DeviceMesh
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, counts = inputs
        num_ranks = mesh.size()
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=mesh.get_group())
        self.sent = counts.view(num_ranks, -1).sum(dim=1).tolist()
        self.received = received.view(num_ranks, -1).sum(dim=1).tolist()
        tokens = all_to_all_single_autograd(tokens, self.received, self.sent, mesh.get_group())
        experts = torch.arange(counts.numel() // num_ranks, device=counts.device).repeat(num_ranks)
        self.order = torch.argsort(experts.repeat_interleave(received), stable=True)
        return tokens[self.order], received.view(num_ranks, -1).sum(dim=0)

    def _token_combine(self, _module: nn.Module, results: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        unsorted = torch.empty_like(results).index_copy(0, self.order, results)
        return all_to_all_single_autograd(unsorted, self.sent, self.received, mesh.get_group())

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._split_weights, self._token_dispatch, self._token_combine)


class ExpertTensorParallel(ExpertParallel):
    placements = ((Shard(0), Shard(1)), (Shard(0), Shard(2)), (Shard(0), Shard(1)))

    def _token_dispatch(
        self, module: nn.Module, inputs: tuple[torch.Tensor, torch.Tensor], mesh: DeviceMesh
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shared = DTensor.from_local(inputs[0], mesh["etp"], (Replicate(),))
        own = shared.to_local(grad_placements=(Partial(),))
        return super()._token_dispatch(module, (own, inputs[1]), mesh["ep"])

    def _token_combine(self, module: nn.Module, results: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return super()._token_combine(module, results, mesh["ep"])


class DeepEPExpertParallel(ExpertParallel):
    """Its tokens would travel otherwise."""


class MoE(nn.Module):
    """A router, routed experts, and a shared one."""

    def __init__(self, num_experts: int, kind: type[GroupedExperts] = GroupedExperts) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.router, self.shared_experts = nn.Linear(DIM, num_experts, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.experts = kind(num_experts)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.router(tokens).softmax(dim=-1).topk(TOP_K, dim=-1)
        counts = torch.bincount(chosen.flatten(), minlength=self.num_experts)
        order = torch.argsort(chosen.flatten(), stable=True)
        results = self.experts(tokens[order // TOP_K], counts)
        by_token = torch.empty_like(results).index_copy(0, order, results).view(*chosen.shape, DIM)
        return tokens + self.shared_experts(tokens) + (by_token * scores.unsqueeze(-1)).sum(dim=1)


class Mixtures(nn.Module):
    """Blocks of a model; `spread` splits their experts over ranks."""

    def __init__(self, num_blocks: int, num_experts: int, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(MoE(num_experts) for _ in range(num_blocks))
        self.to(DEVICE, torch.float64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            tokens = block(tokens)
        return tokens


def spread(model: nn.Module, mesh: DeviceMesh, style: type[ExpertParallel] = ExpertParallel) -> nn.Module:
    """Split the experts of all its layers over the ranks of a mesh."""
    for each in model.modules():
        if isinstance(each, GroupedExperts):
            parallelize_module(each, mesh, style())
    return model


def tokens_of_rank(rank: int | None = None) -> torch.Tensor:
    """Other tokens on every rank, so that routing is uneven."""
    generator = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
    return torch.randn(12, DIM, generator=generator).to(DEVICE).double()


def results_of(model: nn.Module, *, rank: int | None = None) -> list[torch.Tensor]:
    """The output and all gradients of one step."""
    model.zero_grad()
    given = tokens_of_rank(rank=rank).requires_grad_()
    output = model(given)
    output.square().sum().backward()
    found = [output.detach(), given.grad]
    for each in model.parameters():
        assert each.grad is not None
        found.append(each.grad.to_local() if isinstance(each.grad, DTensor) else each.grad)
    assert all(each is not None for each in found)
    return [each.clone() for each in found if each is not None]
