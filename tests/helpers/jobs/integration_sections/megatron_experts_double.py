"""Expert layers as Megatron-LM's core (read in 0.14 to 0.19) has them: the names and attributes that the integration looks
for, and the same results, by the library's all-to-alls."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from integration_sections.comparing import DEVICE
from integration_sections.megatron_double import product

MOE = "megatron.core.transformer.moe."
LINEARS, ENGINE = "megatron.core.tensor_parallel.layers", "megatron.core.extensions.transformer_engine"


class AllToAll(torch.autograd.Function):
    """Rows to other ranks, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sizes: tuple[list[int], list[int]]) -> torch.Tensor:
        ctx.sizes = sizes
        arriving, leaving = sizes
        arrived = rows.new_empty(sum(arriving), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), arriving, leaving)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return AllToAll.apply(gradient, ctx.sizes[::-1]), None


def unpermute(  # noqa: PLR0917  as in Megatron-LM
    rows: torch.Tensor,
    order: torch.Tensor,
    restore_shape: torch.Size,
    probs: torch.Tensor | None = None,
    routing_map: torch.Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> torch.Tensor:
    assert not fused
    assert not drop_and_pad
    assert routing_map is not None
    if probs is not None:
        rows = rows * probs.T[routing_map.T].unsqueeze(-1)
    return torch.zeros(restore_shape, dtype=rows.dtype, device=rows.device).index_add(0, order, rows)


class MoEAlltoAllTokenDispatcher:
    tp_size, drop_and_pad = 1, False

    def __init__(self, config: SimpleNamespace) -> None:
        self.config, self.ep_group = config, dist.group.WORLD
        self.num_experts, self.num_local_experts = config.num_experts, config.num_experts // dist.get_world_size()
        self.shared_experts: Any = None

    def dispatch_preprocess(self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor) -> Any:
        self.hidden_shape, self.routing_map = hidden_states.shape, routing_map
        rows = hidden_states.view(-1, self.hidden_shape[-1])
        self.hidden_shape_before_permute = rows.shape
        if self.shared_experts is not None:
            self.shared_experts.cached = hidden_states
        self.tokens_per_expert: Any = self.preprocess(routing_map)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", self.tokens_per_expert)
        self.reversed_local_input_permutation_mapping = routing_map.T.nonzero()[:, 1]
        return rows[self.reversed_local_input_permutation_mapping], probs.T[routing_map.T]

    def preprocess(self, routing_map: torch.Tensor) -> Any:
        own = routing_map.sum(0)
        everyones = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, own)
        here = slice(dist.get_rank() * self.num_local_experts, (dist.get_rank() + 1) * self.num_local_experts)
        self.arriving = torch.stack(everyones)[:, here]
        self.splits = self.arriving.sum(1).tolist(), own.view(dist.get_world_size(), -1).sum(1).tolist()
        return self.arriving.sum(0)

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Any = None) -> Any:
        assert point
        return tokens_per_expert.cpu()

    def token_dispatch(self, tokens: torch.Tensor, probs: torch.Tensor) -> Any:
        if hasattr(self.shared_experts, "wait_current_stream"):  # not before 0.19
            self.shared_experts.wait_current_stream()
        arrived = AllToAll.apply(tokens, self.splits)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(arrived)
        return arrived, AllToAll.apply(probs, self.splits)

    def dispatch_postprocess(self, tokens: torch.Tensor, probs: torch.Tensor) -> Any:
        numbers = torch.arange(self.num_local_experts, device=tokens.device).repeat(dist.get_world_size())
        self.order = torch.argsort(numbers.repeat_interleave(self.arriving.flatten()), stable=True)
        return tokens[self.order], self.tokens_per_expert, probs[self.order]

    def combine_preprocess(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(rows).index_copy(0, self.order, rows)

    def token_combine(self, rows: torch.Tensor, async_finish: bool = True) -> torch.Tensor:
        back = AllToAll.apply(rows, self.splits[::-1])
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(back)
            self.shared_experts.post_forward_comm()
        return back

    def combine_postprocess(self, rows: torch.Tensor) -> torch.Tensor:
        order, shape = self.reversed_local_input_permutation_mapping, self.hidden_shape_before_permute
        output = unpermute(rows, order, shape, routing_map=self.routing_map).view(self.hidden_shape)
        return output if self.shared_experts is None else output + self.shared_experts.get_output()


def expert_parameter(*shape: int, seed: int, dtype: torch.dtype) -> nn.Parameter:
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return nn.Parameter((torch.randn(shape, generator=generator) / 4).to(DEVICE, dtype))


class TEColumnParallelGroupedLinear(nn.Module):
    """Columns of every expert on this rank, by one module."""

    seed = 1

    def __init__(self, columns: int, features: int, config: SimpleNamespace) -> None:
        super().__init__()
        self.num_gemms = config.num_experts // dist.get_world_size()
        self.fuse_wgrad_accumulation = config.is_fused
        self.is_first_microbatch, self.disable_parameter_transpose_cache, self.te_quant_params = False, True, None
        for number in range(self.num_gemms):
            seed = 100 * self.seed + number
            setattr(self, f"weight{number}", expert_parameter(columns, features, seed=seed, dtype=config.dtype))
            if config.add_bias_linear:
                setattr(self, f"bias{number}", expert_parameter(columns, seed=seed + 50, dtype=config.dtype))

    def forward(self, tokens: torch.Tensor, tokens_per_expert: list[int]) -> list[torch.Tensor]:
        return [
            product(rows, getattr(self, f"weight{number}"), None, is_fused=self.fuse_wgrad_accumulation, is_first=False)
            for number, rows in enumerate(tokens.split(tokens_per_expert))
        ]


class TERowParallelGroupedLinear(TEColumnParallelGroupedLinear):
    seed = 2


def activated(config: SimpleNamespace, rows: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    if config.gated_linear_unit:
        gate, up = rows.chunk(2, -1)
        most = config.activation_func_clamp_value
        gate, up = (gate, up) if most is None else (gate.clamp(max=most), up.clamp(-most, most))
        rows = config.activation_func(gate) * (up + config.glu_linear_offset)
    else:
        rows = config.activation_func(rows)
    return rows * probs.unsqueeze(-1)


class TEGroupedMLP(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config, self.num_local_experts = config, config.num_experts // dist.get_world_size()
        width = 2 * config.width if config.gated_linear_unit else config.width
        self.linear_fc1 = TEColumnParallelGroupedLinear(width, config.features, config)
        self.linear_fc2 = TERowParallelGroupedLinear(config.features, config.width, config)

    def forward(self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor) -> Any:
        counts, found = tokens_per_expert.tolist(), []
        for number, (rows, some) in enumerate(zip(self.linear_fc1(tokens, counts), probs.split(counts), strict=True)):
            biased = rows + getattr(self.linear_fc1, f"bias{number}") if self.config.add_bias_linear else rows
            found.append(activated(self.config, biased, some))
        found = self.linear_fc2(torch.cat(found), counts)
        if self.config.add_bias_linear:
            biases = [getattr(self.linear_fc2, f"bias{number}") for number in range(self.num_local_experts)]
            found = [rows + b * p[:, None] for rows, b, p in zip(found, biases, probs.split(counts), strict=True)]
        return torch.cat(found), None


class ColumnParallelLinear(nn.Module):
    """One linear of one expert."""

    def __init__(self, columns: int, features: int, config: SimpleNamespace, seed: int) -> None:
        super().__init__()
        self.gradient_accumulation_fusion = config.is_fused
        self.weight = expert_parameter(columns, features, seed=seed, dtype=config.dtype)
        self.bias = expert_parameter(columns, seed=seed + 50, dtype=config.dtype) if config.add_bias_linear else None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return product(rows, self.weight, None, is_fused=self.gradient_accumulation_fusion, is_first=False)


class RowParallelLinear(ColumnParallelLinear):
    pass


class MLP(nn.Module):
    def __init__(self, config: SimpleNamespace, number: int) -> None:
        super().__init__()
        self.config = config
        width = 2 * config.width if config.gated_linear_unit else config.width
        self.linear_fc1 = ColumnParallelLinear(width, config.features, config, 100 + number)
        self.linear_fc2 = RowParallelLinear(config.features, config.width, config, 200 + number)

    def forward(self, rows: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        first, second = self.linear_fc1, self.linear_fc2
        rows = first(rows) if first.bias is None else first(rows) + first.bias
        rows = second(activated(self.config, rows, probs))
        return rows if second.bias is None else rows + second.bias * probs[:, None]


class SequentialMLP(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config, self.num_local_experts = config, config.num_experts // dist.get_world_size()
        self.local_experts = nn.ModuleList(MLP(config, number) for number in range(self.num_local_experts))

    def forward(self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor) -> Any:
        counts = tokens_per_expert.tolist()
        parts = zip(self.local_experts, tokens.split(counts), probs.split(counts), strict=True)
        return torch.cat([expert(rows, some) for expert, rows, some in parts]), None


class SharedExperts(nn.Module):
    """One linear for all tokens; it may run beside the dispatch, in steps in this order."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.linear = nn.Linear(config.features, config.features, bias=False, dtype=config.dtype, device=DEVICE)
        nn.init.constant_(self.linear.weight, 0.1)
        self.steps: list[str] = []
        self.cached: Any = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(tokens))

    def wait_current_stream(self) -> None:
        self.steps.append("wait")

    def linear_fc1_forward_and_act(self, tokens: torch.Tensor) -> None:
        self.steps.append("first")

    def linear_fc2_forward(self, rows: torch.Tensor) -> None:
        self.steps.append("second")

    def post_forward_comm(self) -> None:
        self.steps.append("sum")

    def get_output(self) -> torch.Tensor:
        self.steps.append("output")
        return self(self.cached)


class MoELayer(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config, self.num_moved = config, 0
        self.router = nn.Linear(config.features, config.num_experts, bias=False, dtype=config.dtype, device=DEVICE)
        weight = torch.randn(self.router.weight.shape, generator=torch.Generator().manual_seed(5))
        self.router.weight.data.copy_(weight)
        self.token_dispatcher = MoEAlltoAllTokenDispatcher(config)
        self.experts = {"grouped": TEGroupedMLP, "sequential": SequentialMLP}[config.kind](config)
        self.shared_experts = SharedExperts(config) if config.shared else None
        if config.shared == "beside":
            self.token_dispatcher.shared_experts = self.shared_experts

    def forward(self, hidden_states: torch.Tensor) -> Any:
        if self.config.recomputes and self.training:
            found = torch.utils.checkpoint.checkpoint(self.compute, hidden_states, use_reentrant=True)
        else:
            found = self.compute(hidden_states)
        return found, None

    def compute(self, hidden_states: torch.Tensor) -> torch.Tensor:
        scores = functional.softmax(self.router(hidden_states).flatten(0, -2), -1)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(self.config.top).indices, True)
        dispatcher = self.token_dispatcher
        rows, probs = dispatcher.dispatch_preprocess(hidden_states, chosen, scores)
        rows, probs = dispatcher.token_dispatch(rows, probs)
        rows, counts, probs = dispatcher.dispatch_postprocess(rows, probs)
        rows, bias = self.experts(rows, counts, probs)
        assert bias is None
        output = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(rows)))
        return output + self.shared_experts(hidden_states) if self.config.shared == "after" else output


def install_experts() -> None:
    """Let the classes look as if they came from Megatron-LM's modules."""
    homes = {
        f"{MOE}moe_layer": (MoELayer,),
        f"{MOE}token_dispatcher": (MoEAlltoAllTokenDispatcher,),
        f"{MOE}experts": (TEGroupedMLP, SequentialMLP),
        "megatron.core.transformer.mlp": (MLP,),
        LINEARS: (ColumnParallelLinear, RowParallelLinear),
        ENGINE: (TEColumnParallelGroupedLinear, TERowParallelGroupedLinear),
    }
    for home, kinds in homes.items():
        sys.modules.setdefault(home, ModuleType(home))
        for kind in kinds:
            kind.__module__ = home
            for method in filter(callable, vars(kind).values()):
                method.__module__ = home
    sys.modules[f"{MOE}token_dispatcher"].unpermute = unpermute  # type: ignore[attr-defined]
