"""The models of `training_steps.py`: a 1.2 B-parameter transformer, and Llama-like blocks with a tensor-parallel plan."""

from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional

HEAD_FEATURES = 128


class Sizes(NamedTuple):
    """Of one transformer block; `kv_features` below `features` is grouped-query attention."""

    features: int
    hidden: int
    kv_features: int
    is_gated: bool

    def share(self, num_ranks: int) -> "Sizes":
        """One rank's part of the heads and hidden features."""
        return self._replace(hidden=self.hidden // num_ranks, kv_features=self.kv_features // num_ranks)


GPT_1B = Sizes(features=4096, hidden=16384, kv_features=4096, is_gated=False)
LLAMA = {
    "8B": Sizes(features=4096, hidden=14336, kv_features=1024, is_gated=True),
    "70B": Sizes(features=8192, hidden=28672, kv_features=1024, is_gated=True),
}


class Attention(nn.Module):
    def __init__(self, sizes: Sizes, q_features: int) -> None:
        super().__init__()
        self.q = nn.Linear(sizes.features, q_features, bias=False)
        self.k = nn.Linear(sizes.features, sizes.kv_features, bias=False)
        self.v = nn.Linear(sizes.features, sizes.kv_features, bias=False)
        self.o = nn.Linear(q_features, sizes.features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (linear(x).view(batch, length, -1, HEAD_FEATURES).transpose(1, 2) for linear in (self.q, self.k, self.v))
        grouped = {"enable_gqa": True} if k.shape[1] != q.shape[1] else {}
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, **grouped)
        return self.o(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.features, sizes.hidden, bias=False) if sizes.is_gated else None
        self.up = nn.Linear(sizes.features, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            return self.down(functional.gelu(self.up(x)))
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, sizes: Sizes, q_features: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(sizes.features), nn.LayerNorm(sizes.features)
        self.attention, self.feed_forward = Attention(sizes, q_features), FeedForward(sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


def blocks(sizes: Sizes, num_blocks: int, dtype: torch.dtype, num_parts: int = 1) -> nn.Sequential:
    """Blocks with the same weights at every call; with `num_parts`, of the sizes that one rank has."""
    torch.manual_seed(0)
    share = sizes.share(num_parts)
    with torch.device("cuda"):
        return nn.Sequential(*(Block(share, sizes.features // num_parts) for _ in range(num_blocks))).to(dtype)


def sequence_parallel_plan() -> dict[str, ParallelStyle]:
    """The usual plan: everything but the linears works on a shard of the sequence."""
    whole = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    plan: dict[str, ParallelStyle] = {
        "*.attention_norm": SequenceParallel(),
        "*.feed_forward_norm": SequenceParallel(),
        "*.attention": PrepareModuleInput(**whole),
        "*.feed_forward": PrepareModuleInput(**whole),
    }
    for name in ("attention.q", "attention.k", "attention.v", "feed_forward.gate", "feed_forward.up"):
        plan[f"*.{name}"] = ColwiseParallel()
    for name in ("attention.o", "feed_forward.down"):
        plan[f"*.{name}"] = RowwiseParallel(output_layouts=Shard(1))
    return plan
