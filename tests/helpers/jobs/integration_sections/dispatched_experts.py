"""`expert_parallel.overlap` on experts whose tokens a dispatcher sends, as in torchtitan 0.3: the same classes in short."""

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from counterpoint.integrations import expert_parallel
from integration_sections.comparing import DEVICE, assert_close, assert_equal, refused

PER_RANK, DIM, HIDDEN, NUM_TOKENS, TOP = 2, 16, 24, 12, 2
LIMIT = 2**-6  # bf16


@dataclass
class LocalDispatchMetadata:
    order: torch.Tensor
    scores: torch.Tensor


class LocalTokenDispatcher:
    """Sorts a rank's tokens by expert, and adds results up by their scores."""

    def dispatch(self, tokens: torch.Tensor, *routing: torch.Tensor) -> tuple[Any, ...]:
        scores, ids, counts = routing
        order = torch.argsort(ids.flatten(), stable=True)
        return tokens[order // TOP], counts, LocalDispatchMetadata(order // TOP, scores.flatten()[order])

    def combine(self, rows: torch.Tensor, metadata: Any, tokens: torch.Tensor) -> torch.Tensor:
        scored = rows * metadata.scores[:, None]
        return torch.zeros_like(tokens).index_add(0, metadata.order, scored)


@dataclass
class AllToAllDispatchMetadata(LocalDispatchMetadata):
    sent: list[int]
    received: list[int]
    by_expert: torch.Tensor


class AllToAllTokenDispatcher(LocalTokenDispatcher):
    """Also sends them."""

    ep_mesh: DeviceMesh | None = None

    def dispatch(self, tokens: torch.Tensor, *routing: torch.Tensor) -> tuple[Any, ...]:
        rows, counts, local = super().dispatch(tokens, *routing)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        table = arriving.view(-1, PER_RANK)
        sent, received = counts.view(-1, PER_RANK).sum(1).tolist(), table.sum(1).tolist()
        experts = torch.arange(PER_RANK, device=DEVICE).repeat(len(table)).repeat_interleave(arriving)
        by_expert = torch.argsort(experts, stable=True)
        arrived = _Exchange.apply(rows, sent, received)[by_expert]
        metadata = AllToAllDispatchMetadata(local.order, local.scores, sent, received, by_expert)
        return arrived, table.sum(0), metadata

    def combine(self, rows: torch.Tensor, metadata: Any, tokens: torch.Tensor) -> torch.Tensor:
        returned = _Exchange.apply(rows[torch.argsort(metadata.by_expert)], metadata.received, metadata.sent)
        return super().combine(returned, metadata, tokens)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.sizes = sent, received
        found = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(found, rows.contiguous(), received, sent)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        sent, received = ctx.sizes
        found = gradient.new_empty(sum(sent), gradient.shape[1])
        dist.all_to_all_single(found, gradient.contiguous(), sent, received)
        return found, None, None


class GroupedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(dist.get_rank())

        def weights(*sizes: int) -> nn.Parameter:
            return nn.Parameter(0.3 * torch.randn(PER_RANK, *sizes, generator=generator).to(DEVICE))

        self.w1_EFD, self.w2_EDF, self.w3_EFD = weights(HIDDEN, DIM), weights(DIM, HIDDEN), weights(HIDDEN, DIM)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        gate = nn.functional.silu(self._grouped_mm(rows, self.w1_EFD, counts))
        return self._grouped_mm(gate * self._grouped_mm(rows, self.w3_EFD, counts), self.w2_EDF, counts).type_as(rows)

    def _grouped_mm(self, rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        parts = rows.bfloat16().split(counts.tolist())
        return torch.cat([part @ weight.bfloat16().T for part, weight in zip(parts, weights, strict=True)])


class QuantizedExperts(GroupedExperts):
    def _grouped_mm(self, *given: Any) -> torch.Tensor:
        return super()._grouped_mm(*given)


class RoutedExperts(nn.Module):
    def __init__(self, experts: Callable[[], nn.Module] = GroupedExperts) -> None:
        super().__init__()
        self.inner_experts, self.token_dispatcher = experts(), AllToAllTokenDispatcher()
        self.token_dispatcher.ep_mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))

    def forward(self, tokens: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        rows, counts, metadata = self.token_dispatcher.dispatch(tokens, *routing)
        return self.token_dispatcher.combine(self.inner_experts(rows, counts), metadata, tokens)


def results_of(model: nn.Module, run: Callable[..., torch.Tensor] | None = None) -> list[torch.Tensor]:
    """Output and gradients of a step, of tokens that differ by rank."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    tokens = torch.randn(NUM_TOKENS, DIM, generator=generator).to(DEVICE).requires_grad_()
    num_experts = PER_RANK * dist.get_world_size()
    scores = torch.rand(NUM_TOKENS, TOP, generator=generator).to(DEVICE).requires_grad_()
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:TOP] for _ in range(NUM_TOKENS)]).to(DEVICE)
    model.zero_grad()
    found = (run or model)(tokens, scores, ids, torch.bincount(ids.flatten(), minlength=num_experts))
    found.square().sum().backward()
    gradients = [tokens.grad, scores.grad, *(each.grad for each in model.parameters())]
    return [found.detach(), *(each.clone() for each in gradients if each is not None)]


def expert_parallel_of_a_dispatcher() -> None:
    """Outputs and gradients are the bare job's, within the rounding of bf16; off, and after `undo`, to the bit."""
    model = nn.ModuleList([RoutedExperts()])
    (routed,) = model
    wanted = results_of(routed)
    overlapped = expert_parallel.overlap(model)
    assert overlapped.taken == ["0"], overlapped.refused
    found = results_of(routed)
    assert_close(found, wanted, LIMIT)
    assert overlapped.num_by_copies + overlapped.num_by_library == 2, "forward and backward"
    assert_equal(results_of(routed), found)
    assert_equal(results_of(routed, lambda *given: checkpoint(routed, *given, use_reentrant=False)), found)
    assert not expert_parallel.waiting_experts(model)
    refused(lambda: expert_parallel.overlap(model), "0 is already overlapped")
    overlapped.use(False)
    assert_equal(results_of(routed), wanted)
    overlapped.undo()
    assert not vars(routed.token_dispatcher).keys() & {"dispatch", "combine"}
    assert_equal(results_of(routed), wanted)
    assert expert_parallel.waiting_experts(model) == [routed]


def expert_parallel_of_other_dispatchers() -> None:
    """Other dispatchers, and experts that multiply in another way, stay as they are, with the reason."""
    deep = RoutedExperts()
    deep.token_dispatcher = types.SimpleNamespace(ep_mesh=deep.token_dispatcher.ep_mesh)
    refused(lambda: expert_parallel.overlap(deep), "a SimpleNamespace sends its tokens, but only AllToAllTokenDispatcher")
    refused(
        lambda: expert_parallel.overlap(RoutedExperts(QuantizedExperts)), "do not multiply as torchtitan's GroupedExperts"
    )
    refused(lambda: expert_parallel.overlap(RoutedExperts(lambda: nn.Linear(2, 2))), "Linear, whose formula is unknown")
    assert "SimpleNamespace" in expert_parallel.why_none_waits(deep)
