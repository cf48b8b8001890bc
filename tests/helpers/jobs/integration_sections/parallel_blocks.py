"""A transformer's block over all ranks, and what comes out of it."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from integration_sections.comparing import DEVICE


class Attention(nn.Module):
    def __init__(self, features: int, *, bias: bool) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(features, features, bias=bias), nn.Linear(features, features // 2, bias=bias)
        self.v, self.o = nn.Linear(features, features // 2, bias=False), nn.Linear(features, features, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (linear(x).view(batch, length, -1, 8).transpose(1, 2) for linear in (self.q, self.k, self.v))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        mixed = torch.softmax(q @ k.transpose(2, 3) / 8, -1) @ v
        return self.o(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(features, 2 * features, bias=False), nn.Linear(features, 2 * features)
        self.down = nn.Linear(2 * features, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, features: int = 64, *, bias: bool = True) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.attention, self.mlp = Attention(features, bias=bias), FeedForward(features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def parallel_block(*, dtype: torch.dtype = torch.float64, bias: bool = True, is_annotated: bool = False) -> Block:
    """A block over all ranks; with `is_annotated` linears gather their own inputs."""
    torch.manual_seed(0)
    block = Block(bias=bias).to(DEVICE, dtype)
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    return parallelize_block(block, mesh, is_annotated=is_annotated)


def parallelize_block(block: Block, mesh: DeviceMesh, *, is_annotated: bool = False) -> Block:
    """Split a block over the ranks of a mesh, with its inputs and outputs sharded along the sequence."""
    whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    column = {"input_layouts": Shard(1)} if is_annotated else {}
    plan = {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    if not is_annotated:
        plan |= {"attention": whole, "mlp": whole}
    for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"):
        plan[name] = ColwiseParallel(**column)
    plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.o", "mlp.down")}
    return parallelize_module(block, mesh, plan)


def parallelize_feed_forward(mlp: FeedForward, mesh: DeviceMesh, *, use_local_output: bool = False) -> FeedForward:
    """Split one over the ranks of a mesh, as `parallelize_block` does; its input is a DTensor unless it has to be local."""
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Shard(1))}
    parallelize_module(mlp, mesh, plan)
    whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=use_local_output)
    return parallelize_module(mlp, mesh, whole)


def block_results(block: nn.Module, batch: int, length: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Output, gradient of the input, gradients of the parameters."""
    generator = torch.Generator().manual_seed(7)
    given = torch.randn(batch, length, 64, generator=generator).to(DEVICE, dtype)
    shard = given.chunk(dist.get_world_size(), 1)[dist.get_rank()].clone().requires_grad_()
    block.zero_grad()
    output = block(shard)
    output = output.to_local() if isinstance(output, DTensor) else output
    weights = torch.linspace(-1, 1, output.numel(), device=DEVICE, dtype=dtype).view_as(output)
    (output * weights).sum().backward()
    found = [parameter.grad for parameter in block.parameters()]
    assert shard.grad is not None
    return [
        output.detach(),
        shard.grad,
        *(each.full_tensor() if isinstance(each, DTensor) else each for each in found if each is not None),
    ]


def hooks_of(block: nn.Module) -> list[dict[int, Callable[..., object]]]:
    return [dict(hooks) for module in block.modules() for hooks in (module._forward_pre_hooks, module._forward_hooks)]
