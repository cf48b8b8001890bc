"""Tensor-parallel linears as Megatron-LM's core (read in 0.12 and 0.19) and TransformerEngine (read in 2.20) have them: the
names and attributes that the integration looks for, and the same sums, by the library's collectives."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor
from torch.nn import functional

from integration_sections.comparing import DEVICE

MEGATRON, OF_ENGINE = "megatron.core.tensor_parallel.layers", "megatron.core.extensions.transformer_engine"
ENGINE, LINEAR, NORMED = (f"transformer_engine.pytorch{rest}" for rest in ("", ".module.linear", ".module.layernorm_linear"))


class Engine:
    """What TransformerEngine would do besides multiplying."""

    is_fp8 = is_offloading = False


class Moved(torch.autograd.Function):
    """Changes tokens on the way forward, and their gradients on the way back."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, ways: tuple[Any, Any]) -> torch.Tensor:
        ctx.back = ways[1]
        return ways[0](tokens)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.back(gradient), None


def gathered(tokens: torch.Tensor) -> torch.Tensor:
    return all_gather_tensor(tokens.contiguous(), 0, dist.group.WORLD) + 0


def scattered(tokens: torch.Tensor) -> torch.Tensor:
    return reduce_scatter_tensor(tokens.contiguous(), "sum", 0, dist.group.WORLD) + 0


def summed(tokens: torch.Tensor) -> torch.Tensor:
    return all_reduce(tokens.contiguous(), "sum", dist.group.WORLD) + 0


def unchanged(tokens: torch.Tensor) -> torch.Tensor:
    return tokens.clone()


class Fused(torch.autograd.Function):
    """A weight whose gradient is added to its main gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Any, is_first: bool) -> torch.Tensor:
        ctx.weight, ctx.is_first = weight, is_first
        return weight.detach().view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        weight = ctx.weight
        if ctx.is_first:
            weight.main_grad.zero_()
        weight.main_grad.add_(gradient)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None, None
        weight.grad_added_to_main_grad = True
        return torch.empty_like(weight), None


def product(tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, is_fused: bool, is_first: bool) -> Any:
    return functional.linear(tokens, Fused.apply(weight, is_first) if is_fused else weight, bias)


def part(*shape: int, seed: int, dtype: torch.dtype) -> nn.Parameter:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return nn.Parameter((torch.randn(shape, generator=generator) / 8).to(DEVICE, dtype))


class ColumnParallelLinear(nn.Module):
    def __init__(self, features: int, columns: int, options: SimpleNamespace) -> None:
        super().__init__()
        num_ranks = dist.get_world_size()
        self.input_size, self.output_size, self.output_size_per_partition = features, columns, columns // num_ranks
        self.sequence_parallel, self.allreduce_dgrad = options.is_sequence, not options.is_sequence
        self.skip_bias_add, self.gradient_accumulation_fusion = options.skips_bias, options.is_fused
        self.gather_output = self.explicit_expert_comm = False
        self.config = SimpleNamespace(defer_embedding_wgrad_compute=False, _cpu_offloading_context=None)
        self.tp_group, self.gtp_remat_size = dist.group.WORLD, 1
        self.weight = part(columns // num_ranks, features, seed=1, dtype=options.dtype)
        self.bias = part(columns // num_ranks, seed=2, dtype=options.dtype) if options.has_bias else None

    def forward(self, input_: torch.Tensor, weight: Any = None, runtime_gather_output: bool | None = None) -> Any:
        ways = (gathered, scattered) if self.sequence_parallel else (unchanged, summed)
        tokens = Moved.apply(input_, ways)
        bias = None if self.skip_bias_add else self.bias
        used = self.weight if weight is None else weight
        output = product(tokens, used, bias, is_fused=self.gradient_accumulation_fusion, is_first=False)
        if runtime_gather_output or (self.gather_output and runtime_gather_output is None):
            output = torch.cat(gathered(output.detach()).chunk(dist.get_world_size()), dim=-1)
        return output, self.bias if self.skip_bias_add else None


class RowParallelLinear(nn.Module):
    def __init__(self, features: int, columns: int, options: SimpleNamespace) -> None:
        super().__init__()
        num_ranks = dist.get_world_size()
        self.input_size, self.output_size, self.input_size_per_partition = features, columns, features // num_ranks
        self.sequence_parallel, self.input_is_parallel = options.is_sequence, True
        self.skip_bias_add, self.gradient_accumulation_fusion = options.skips_bias, options.is_fused
        self.explicit_expert_comm = False
        self.config = SimpleNamespace(defer_embedding_wgrad_compute=False)  # and no tp_group, as in 0.12
        self.weight = part(columns, features // num_ranks, seed=3, dtype=options.dtype)
        same = torch.Generator().manual_seed(4)
        bias = torch.randn(columns, generator=same).to(DEVICE, options.dtype)
        self.bias = nn.Parameter(bias) if options.has_bias else None

    def forward(self, input_: torch.Tensor) -> Any:
        output = product(input_, self.weight, None, is_fused=self.gradient_accumulation_fusion, is_first=False)
        output = Moved.apply(output, (scattered, gathered) if self.sequence_parallel else (summed, unchanged))
        if self.skip_bias_add or self.bias is None:
            return output, self.bias
        return output + self.bias, None


class Linear(nn.Module):
    """TransformerEngine's, of columns or rows."""

    def __init__(self, features: int, columns: int, mode: str, options: SimpleNamespace) -> None:
        super().__init__()
        num_ranks = dist.get_world_size()
        self.parallel_mode, self.sequence_parallel = mode, options.is_sequence
        self.tp_size, self.tp_group, self.tp_group_initialized = num_ranks, dist.group.WORLD, True
        self.weight_names, self.fuse_wgrad_accumulation = ["weight"], options.is_fused
        self.use_bias, self.return_bias = options.has_bias, options.skips_bias
        self.apply_bias = self.use_bias and not self.return_bias
        self.wgrad_store = SimpleNamespace(delay_wgrad_compute=lambda: False)
        shape = (columns // num_ranks, features) if mode == "column" else (columns, features // num_ranks)
        self.weight = part(*shape, seed=5 if mode == "column" else 6, dtype=options.dtype)
        if options.has_bias:
            generator = torch.Generator().manual_seed(7 + (dist.get_rank() if mode == "column" else -1))
            self.bias = nn.Parameter(torch.randn(shape[0], generator=generator).to(DEVICE, options.dtype))

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False) -> Any:
        is_column, is_sequence = self.parallel_mode == "column", self.sequence_parallel
        kept = {"is_fused": self.fuse_wgrad_accumulation, "is_first": bool(is_first_microbatch)}
        if is_column:
            tokens = Moved.apply(self.normed(inp), (gathered, scattered) if is_sequence else (unchanged, summed))
            output = product(tokens, self.weight, None, **kept)
        else:
            ways = (scattered, gathered) if is_sequence else (summed, unchanged)
            output = Moved.apply(product(inp, self.weight, None, **kept), ways)
        if self.apply_bias:
            output = output + self.bias
        return (output, self.bias) if self.return_bias else output

    def normed(self, inp: torch.Tensor) -> torch.Tensor:
        return inp


class LayerNormLinear(Linear):
    def __init__(self, features: int, columns: int, mode: str, options: SimpleNamespace) -> None:
        super().__init__(features, columns, mode, options)
        self.normalization, self.eps, self.zero_centered_gamma = options.norm, 1e-5, False
        self.return_layernorm_output = False
        self.layer_norm_weight = nn.Parameter(torch.rand(features, generator=torch.Generator().manual_seed(8)).to(DEVICE))
        self.layer_norm_bias = nn.Parameter(torch.zeros(features, device=DEVICE)) if options.norm == "LayerNorm" else None
        self.to(options.dtype)

    forward = None  # type: ignore[assignment]  # set below: TransformerEngine's classes have one each

    def normed(self, inp: torch.Tensor) -> torch.Tensor:
        if self.normalization == "RMSNorm":
            return functional.rms_norm(inp, inp.shape[-1:], self.layer_norm_weight, self.eps)
        return functional.layer_norm(inp, inp.shape[-1:], self.layer_norm_weight, self.layer_norm_bias, self.eps)


def forward_with_norm(self: Linear, *given: Any, **named: Any) -> Any:
    return Linear.forward(self, *given, **named)


LayerNormLinear.forward = forward_with_norm  # type: ignore[method-assign]


class TELinear(Linear):
    """Megatron-LM's around TransformerEngine's: it returns a bias as well, and knows the first micro-batch."""

    def __init__(self, features: int, columns: int, mode: str, options: SimpleNamespace) -> None:
        super().__init__(features, columns, mode, options)
        self.te_return_bias, self.disable_parameter_transpose_cache = options.skips_bias and options.has_bias, False
        self.return_bias, self.te_quant_params, self.is_first_microbatch = self.te_return_bias, None, True

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        is_first = None if self.disable_parameter_transpose_cache else self.is_first_microbatch
        output = super().forward(x, is_first_microbatch=is_first)
        self.is_first_microbatch = False
        return output if self.te_return_bias else (output, None)


def norm_of(kind: type[nn.Module]) -> Any:
    def make(features: int, *, zero_centered_gamma: bool, **named: Any) -> nn.Module:
        assert not zero_centered_gamma
        return kind(features, **named)

    return make


def install() -> None:
    """Let the classes look as if they came from the frameworks' modules."""
    state = ModuleType("megatron.core.parallel_state")
    state.get_tensor_model_parallel_group = lambda: dist.group.WORLD  # type: ignore[attr-defined]
    engine = ModuleType(ENGINE)
    engine.RMSNorm, engine.LayerNorm = norm_of(nn.RMSNorm), norm_of(nn.LayerNorm)  # type: ignore[attr-defined]
    sys.modules |= {state.__name__: state, ENGINE: engine}
    manager = SimpleNamespace(is_fp8_enabled=lambda: Engine.is_fp8, is_fp8_calibration=lambda: False)
    for name in (LINEAR, NORMED):
        module = sys.modules[name] = ModuleType(name)
        module.FP8GlobalStateManager = manager  # type: ignore[attr-defined]
        module.is_cpu_offload_enabled = lambda: Engine.is_offloading  # type: ignore[attr-defined]
    ColumnParallelLinear.__module__ = RowParallelLinear.__module__ = MEGATRON
    ColumnParallelLinear.forward.__module__ = RowParallelLinear.forward.__module__ = MEGATRON
    Linear.__module__, LayerNormLinear.__module__, TELinear.__module__ = LINEAR, NORMED, OF_ENGINE
    TELinear.forward.__module__ = OF_ENGINE
