"""`tensor_parallel.overlap` where torchtitan 0.3 gives linears plain tensors, as its backend `spmd_types` does."""

import sys
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from counterpoint.integrations import tensor_parallel
from integration_sections import configured_linears
from integration_sections.comparing import DEVICE, assert_close, assert_equal, refused
from integration_sections.configured_linears import (
    BATCH,
    COLUMNS,
    FEATURES,
    PARTS,
    PLAIN,
    Attention,
    Block,
    Config,
    Dims,
    FeedForward,
    I,
    Layout,
    Linear,
    Mixed,
    P,
    R,
    S,
    forwards_of,
    num_calls_of,
    overlapped_right,
    overlapped_with_fsdp_right,
    undone_right,
    whole_mesh,
)


def plain_block(activations: Layout, mesh: DeviceMesh | None = None) -> Block:
    torch.manual_seed(0)
    block = Block(activations).to(DEVICE, torch.float64)
    block.attention.wo.bias = None  # each rank would add it
    block.parallelize(Dims(mesh or whole_mesh(), PLAIN))
    return block


results_of = partial(configured_linears.results_of, is_plain=True)


def tensor_parallel_plain() -> None:
    """Outputs and gradients are those without us, of parts of the sequence and whole; off, and after `undo`, to the bit."""
    for activations, num_calls in ((PARTS, 8), (I, 4)):
        block = plain_block(activations)
        before, wanted = forwards_of(block), results_of(block, activations)
        overlapped = overlapped_right(block, activations, wanted, num_calls, is_plain=True)
        with torch.no_grad():
            block(torch.zeros(BATCH, 4, FEATURES, dtype=torch.float64, device=DEVICE))
        overlapped.use(False)
        num_before = num_calls_of(overlapped)
        assert_equal(results_of(block, activations), wanted)
        sys.modules["spmd_types"] = checker = SimpleNamespace(is_type_checking=lambda: True)  # type: ignore[assignment]
        overlapped.use(True)
        assert_equal(results_of(block, activations), wanted)
        assert num_calls_of(overlapped) == num_before, "operators state no types"
        assert sys.modules.pop("spmd_types") is checker
        overlapped.undo()
        assert forwards_of(block) == before
        undone_right(block, activations, wanted, num_calls, is_plain=True)


def tensor_parallel_plain_with_fsdp() -> None:
    """`overlap` may come before `fully_shard` or after it."""
    overlapped_with_fsdp_right(plain_block, is_plain=True)


def tensor_parallel_plain_compiled() -> None:
    """A block is one graph. Row-parallel linears have operators there, and what gathers or sums does so itself."""
    for activations in (PARTS, I):
        block = plain_block(activations)
        wanted = results_of(block, activations)
        overlapped = tensor_parallel.overlap(block)
        block.compile(backend="aot_eager", fullgraph=True)
        assert_close(results_of(block, activations), wanted, 1e-12)
        num_calls = num_calls_of(overlapped)
        assert num_calls == (4 if activations == PARTS else 2)
        overlapped.use(False)
        assert_close(results_of(block, activations), wanted, 1e-12)
        assert num_calls_of(overlapped) == num_calls
        torch._dynamo.reset()


class Scaled(FeedForward):
    """It has other uses of its whole input than its linears."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, rest = x.split([1, x.shape[1] - 1], dim=1)
        return super().forward(x) * first.square().mean() * torch.tanh(rest * x[:, 1:]).mean()


class Latent(FeedForward):
    """It has a linear with the same weight on every rank beside the others, as DeepSeek-V3's attention."""

    def __init__(self, activations: Layout) -> None:
        super().__init__(activations)
        self.latent = Linear(FEATURES, 8, bias=False)
        self.latent._sharding_config = Config(state_shardings={"weight": R})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.latent(x).square().mean()


class AllGatherFusedFeedForward(FeedForward):
    """It has the name of one that multiplies by kernels of its own."""


class RowParallelLinear(Linear):
    pass


class Fused(Attention):
    def __init__(self, activations: Layout) -> None:
        super().__init__(activations)
        config, self.wo = self.wo._sharding_config, RowParallelLinear(64, FEATURES, bias=False)
        self.wo._sharding_config = config


def tensor_parallel_plain_in_part() -> None:
    """What else a module does with its whole input is right; what is refused stays unchanged."""
    names = ["w1", "w2", "w3"]
    fused = "sends beside its own matmuls"
    for build, name, taken, reason in (
        (Scaled, "", names, ""),
        (Latent, "w1", ["w2"], "but latent within needs it whole"),
        (lambda _: Mixed(), "w1", ["w2"], "the Mixed around it gathers its input, but w3 within needs it whole"),
        (Attention, "wo", ["qkv_linear.wq", "qkv_linear.wk", "qkv_linear.wv"], "each rank adds its bias before the sum"),
        (Fused, "wo", ["qkv_linear.wq", "qkv_linear.wk", "qkv_linear.wv"], f"torchtitan's RowParallelLinear {fused}"),
        (AllGatherFusedFeedForward, "w2", [], f"the AllGatherFusedFeedForward around it {fused}"),
    ):
        for activations in (PARTS, I):
            torch.manual_seed(0)
            model = build(activations).to(DEVICE, torch.float64)
            model.parallelize(Dims(whole_mesh(), PLAIN))
            given = PARTS if isinstance(model, Mixed) else activations
            wanted = results_of(model, given)
            if not taken:
                refused(lambda model=model: tensor_parallel.overlap(model), reason)
                assert reason in tensor_parallel.why_none_waits(model)
                continue
            overlapped = tensor_parallel.overlap(model)
            assert overlapped.taken == taken, overlapped.refused
            assert reason in overlapped.refused.get(name, ""), overlapped.refused
            assert_close(results_of(model, given), wanted, 1e-12)


def tensor_parallel_plain_refused() -> None:
    """Layouts whose gradients operators would not sum are refused in one line."""
    whole = Config(state_shardings={"weight": Layout(S(1))}, out_src_shardings=P, out_dst_shardings=R)
    alike = Config(state_shardings={"weight": R}, out_src_shardings=R)
    ends = Config(state_shardings={"weight": Layout(S(0))}, out_src_shardings=COLUMNS)
    for config, reason in (
        (whole, "its output is R, so backward sums the output's gradient"),
        (alike, "its weight is R, neither column- nor row-parallel"),
        (ends, "its input arrives whole, and no module around it gathers it or sums its gradient"),
    ):
        model = nn.Sequential(Linear(FEATURES, 64, bias=False)).to(DEVICE)
        model[0]._sharding_config = config
        model[0].parallelize(Dims(whole_mesh(), PLAIN))
        refused(lambda model=model: tensor_parallel.overlap(model), reason)
        assert not tensor_parallel.waiting_linears(model)
