"""Tensor-parallel linears whose inputs, outputs and neighbors are laid out in other ways, and what is refused."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from counterpoint.integrations import tensor_parallel
from counterpoint.integrations.paths import Paths
from counterpoint.integrations.prepared_overlaps import PreparedOverlaps
from counterpoint.schedule import ScheduleDescription
from integration_sections.comparing import DEVICE, assert_close, refused
from integration_sections.layered import gradients
from integration_sections.parallel_blocks import FeedForward, block_results, parallelize_feed_forward


class Between(FeedForward):
    """Its linears hand DTensors on, and the last one gets one that is whole if it asks for it."""

    is_whole = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.gate(x) * self.up(x)
        assert isinstance(hidden, DTensor)
        return self.down(hidden.redistribute(placements=[Replicate()]) if self.is_whole else hidden)


def tensor_parallel_hands_dtensors_on() -> None:
    """`use_local_output=False` is kept, and inputs that are DTensors are taken as they are laid out."""
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    results: list[list[torch.Tensor]] = []
    for is_ours in (False, True):
        found: list[torch.Tensor] = []
        for is_whole in (False, True):
            torch.manual_seed(0)
            mlp = Between(64).to(DEVICE, torch.float64)
            mlp.is_whole, mlp.down.bias = is_whole, None
            column = ColwiseParallel(use_local_output=False)
            plan = {"gate": column, "up": column, "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False)}
            parallelize_module(mlp, mesh, plan)
            parallelize_module(mlp, mesh, PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()))
            if is_ours:
                assert len(tensor_parallel.overlap(mlp).taken) == 3
            output = mlp(torch.ones(1, 4, 64, device=DEVICE, dtype=torch.float64))
            assert isinstance(output, DTensor)
            assert output.placements == (Shard(1),)
            found += block_results(mlp, 1, 4 * dist.get_world_size())
        results.append(found)
    assert_close(results[1], results[0], 1e-12)


class Routed(FeedForward):
    """It uses its input beside plain parameters, too, and draws random numbers for it."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.router = nn.Linear(features, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(functional.dropout(x)) * self.router(x).mean()


class TakesLocal(FeedForward):
    """It takes the local tensor of its gathered input, which is all of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(x, DTensor)
        return super().forward(x) * x.to_local().square().mean()


class Adapter(nn.Module):
    """It adds to a linear's output, from the local tensor of its input."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(x, DTensor)
        return self.base(x) + x.to_local().square().mean()


def tensor_parallel_leaves_local_inputs() -> None:
    """A module whose inputs are gathered to plain tensors gets them so, and may use them as it likes; so does one that makes
    them plain by itself, in its parts or in hooks.
    """
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))

    def routed() -> nn.Module:
        return parallelize_feed_forward(Routed(64).to(DEVICE, torch.float64), mesh, use_local_output=True)

    def split(kind: type[FeedForward] = FeedForward) -> nn.Module:
        return parallelize_feed_forward(kind(64).to(DEVICE, torch.float64), mesh)

    def adapted() -> nn.Module:
        mlp = split()
        mlp.up = Adapter(mlp.up)
        return mlp

    seen: list[torch.Tensor] = []

    def hooked() -> nn.Module:
        mlp = split()
        mlp.gate.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].to_local().detach()))
        mlp.down.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].full_tensor().detach()))
        return mlp

    three = ["gate", "up", "down"]
    for build, taken in (
        (routed, three),
        (lambda: split(TakesLocal), three),
        (adapted, ["gate", "up.base", "down"]),
        (hooked, ["up"]),
    ):
        results: list[list[torch.Tensor]] = []
        for is_ours in (False, True):
            torch.manual_seed(0)
            seen.clear()
            mlp = nn.Sequential(build(), split())
            if is_ours:
                overlapped = tensor_parallel.overlap(mlp)
                assert [name for name in overlapped.taken if name.startswith("0.")] == [f"0.{name}" for name in taken]
                assert ("a hook of the job's takes" in str(overlapped)) is (build is hooked)
            results.append([*block_results(mlp, 1, 4 * dist.get_world_size()), *seen])
        assert_close(results[1], results[0], 1e-12)


def tensor_parallel_lays_gradients_out_alike() -> None:
    """An optimizer that reads local gradients finds what it would find without us, also of a bias."""
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    found = []
    for is_ours in (False, True):
        torch.manual_seed(0)
        mlp = parallelize_feed_forward(FeedForward(64).to(DEVICE, torch.float64), mesh)
        if is_ours:
            assert len(tensor_parallel.overlap(mlp).taken) == 3
        block_results(mlp, 1, 4 * dist.get_world_size())
        found.append({name: each.grad for name, each in mlp.named_parameters() if each.grad is not None})
    bare, ours = found
    assert {name: each.placements for name, each in ours.items()} == {name: each.placements for name, each in bare.items()}
    assert_close([each.to_local() for each in ours.values()], [each.to_local() for each in bare.values()], 1e-12)


def tensor_parallel_refuses() -> None:
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    by_features = ColwiseParallel(input_layouts=Shard(-1))
    sliced = parallelize_module(FeedForward(64).to(DEVICE), mesh, {"gate": by_features, "up": by_features})
    refused(lambda: tensor_parallel.overlap(sliced), "only a whole or sequence-sharded input")
    refused(lambda: tensor_parallel.overlap(FeedForward(64)), "parallelize_module")
    refused(lambda: tensor_parallel.overlap(sliced, is_on="x"), "is_on must be True or False; found 'x'")
    refused(lambda: tensor_parallel.overlap(None), "parallelize_module has split; found one of type NoneType")
    refused(lambda: tensor_parallel.overlap(sliced, schedule="ring"), "takes a ScheduleDescription or None; found .* str")
    found: list[list[torch.Tensor]] = []
    for layouts in ({"input_layouts": Shard(1)}, {}):
        torch.manual_seed(0)
        normed = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 32)).to(DEVICE, torch.float64)
        row = RowwiseParallel(output_layouts=Shard(1), **layouts)
        parallelize_module(normed, mesh, {"0": SequenceParallel(), "1": row})
        if layouts:
            refused(
                partial(tensor_parallel.overlap, normed), "is Shard.dim=1.*from SequenceParallel, leave out input_layouts"
            )
        else:
            assert tensor_parallel.overlap(normed).taken == ["1"], "as the refusal says"
        given = torch.ones(1, 4, 64, device=DEVICE, dtype=torch.float64) * torch.arange(64, device=DEVICE) * dist.get_rank()
        output = normed(given.requires_grad_())
        output.pow(2).sum().backward()
        grads = [each.grad.full_tensor() for each in normed.parameters() if each.grad is not None]
        found.append([output, given.grad, *grads])
    assert_close(found[1], found[0], 1e-12)


class Doubled(nn.Linear):
    """A linear of another formula."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def tensor_parallel_keeps_other_formulas() -> None:
    """Linears with a forward of the job's own stay unchanged; one that the job gave them after `overlap` runs, and outlives
    `undo`, as do hooks that the job removed.
    """
    mesh, num_tokens = init_device_mesh(DEVICE.type, (dist.get_world_size(),)), 4 * dist.get_world_size()

    def halve(linear: nn.Module) -> None:
        linear.forward = partial(lambda forward, x: forward(x) / 2, linear.forward)

    def feed_forward() -> FeedForward:
        torch.manual_seed(0)
        mlp = FeedForward(64).to(DEVICE, torch.float64)
        doubled = Doubled(64, 128, bias=False).to(DEVICE, torch.float64)
        doubled.load_state_dict(mlp.gate.state_dict())
        mlp.gate = doubled
        return parallelize_feed_forward(mlp, mesh)

    stock, mlp = feed_forward(), feed_forward()
    halve(stock.up)
    halve(mlp.up)
    overlapped = tensor_parallel.overlap(mlp)
    assert overlapped.taken == ["down"]
    assert all("its forward is not that of torch.nn.Linear" in overlapped.refused[name] for name in ("gate", "up"))
    for each in (stock, mlp):
        halve(each.down)
    wanted = block_results(stock, 1, num_tokens)
    assert_close(block_results(mlp, 1, num_tokens), wanted, 1e-12)
    (key,) = mlp.down._forward_pre_hooks
    removed = mlp.down._forward_pre_hooks.pop(key)
    overlapped.undo()
    assert key not in mlp.down._forward_pre_hooks
    mlp.down._forward_pre_hooks[key] = removed
    assert_close(block_results(mlp, 1, num_tokens), wanted, 1e-12)
    alone = parallelize_module(nn.Sequential(Doubled(64, 128)).to(DEVICE), mesh, {"0": ColwiseParallel()})
    sharded = fully_shard(nn.Sequential(nn.Linear(64, 128)).to(DEVICE), mesh=mesh)
    prepared = PreparedOverlaps(Paths(overlaps_matmuls=True))
    prepared.prepare([alone, sharded])
    (offer,) = prepared.offers()
    assert offer.refusal.startswith("0: its forward is not that of torch.nn.Linear"), "`run` says why it takes nothing"


class Sometimes(FeedForward):
    """Its gate has an input of its own in some steps, and is not called in others."""

    mode = "both"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mode == "up":
            return self.down(self.up(x))
        return self.down(self.up(x) * self.gate(x * 2 if self.mode == "apart" else x))


def tensor_parallel_left_to_dtensor() -> None:
    """Activations that operators do not multiply give what the linears' original forward gives, between others that they
    multiply, eager and compiled.
    """
    num_ranks = dist.get_world_size()
    mesh = init_device_mesh(DEVICE.type, (num_ranks,))
    along, whole = [Shard(1)], [Replicate()]
    sharded, odd, empty = (1, 4 * num_ranks, 64), (1, 4 * num_ranks + 1, 64), (1, 0, 64)
    features = (4 * num_ranks, 64)  # Shard(1) means its features
    for is_gathered, placements, shapes in (
        (True, along, (sharded, odd, empty, features, sharded)),
        (False, along, (sharded, odd, empty, features, sharded)),
        (False, whole, (sharded, empty, (64,), sharded)),
    ):
        plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=placements[0])}
        if not is_gathered:
            plan |= {name: ColwiseParallel(input_layouts=placements[0]) for name in ("gate", "up")}
        mlps = []
        for _ in range(2):
            torch.manual_seed(0)
            mlps.append(parallelize_module(FeedForward(64).to(DEVICE, torch.float64), mesh, plan))
            if is_gathered:
                style = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
                parallelize_module(mlps[-1], mesh, style)
        overlapped = tensor_parallel.overlap(mlps[0], schedule=ScheduleDescription(pattern="one_peer", chunks=2))
        for shape in shapes:
            given = distribute_tensor(torch.randn(shape, device=DEVICE, dtype=torch.float64), mesh, placements)
            wanted, by_library = _results(mlps[1], given), overlapped.num_by_library
            assert_close(_results(mlps[0], given), wanted, 1e-12)
            num_whole = 2 if placements == whole else 0  # gate and up get DTensors, whose gradients torch reduces
            num_originals = num_whole if shape == sharded else len(overlapped.taken)
            assert overlapped.num_by_library - by_library == num_originals, shape
            if shape != sharded:
                compiled = torch.compile(mlps[0], backend="aot_eager", fullgraph=True)
                assert_close(_results(compiled, given), wanted, 1e-12)
                torch._dynamo.reset()  # a second size becomes dynamic, which torch's DTensor does not compile
        assert overlapped.num_in_operators == 0, "the original modules ran"
        assert overlapped.library_reason in str(overlapped)


def _results(mlp: nn.Module, given: DTensor) -> list[torch.Tensor]:
    """The output, and the gradients of a DTensor input and of the parameters."""
    mlp.zero_grad()
    leaf = given.detach().requires_grad_()
    output = mlp(leaf)
    output.pow(2).sum().backward()
    found = [leaf.grad, *(each.grad for each in mlp.parameters())]
    return [output.detach(), *(each.full_tensor() for each in found if isinstance(each, DTensor))]


def tensor_parallel_neighbors_part() -> None:
    """Linears that turn out not to share an input give the same results; so do recomputed activations."""
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    results: list[list[torch.Tensor]] = []
    for is_ours in (False, True):
        found: list[torch.Tensor] = []
        ways = (("both", "both"), ("both", "up", "both"), ("apart", "both"), ("up", "apart"))
        for modes, num_runs in ((modes, num_runs) for modes in ways for num_runs in (1, 2)):
            torch.manual_seed(0)
            mlp = Sometimes(64).to(DEVICE, torch.float64)
            plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Shard(1))}
            parallelize_module(mlp, mesh, plan)
            whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
            parallelize_module(mlp, mesh, whole)
            if is_ours:
                tensor_parallel.overlap(mlp)
            for mode in modes:
                mlp.mode = mode
                mlp.zero_grad()
                given = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(dist.get_rank())).to(DEVICE).double()
                runs = [checkpoint(mlp, given.requires_grad_(), use_reentrant=False) for _ in range(num_runs)]
                torch.stack(runs).pow(2).sum().backward()
                assert given.grad is not None
                grads = [each.grad.full_tensor() for each in mlp.parameters() if each.grad is not None]
                found += [given.grad, *(each.clone() for each in grads if each.any())]  # of what is unused: zero, or none
        results.append(found)
    assert_close(results[1], results[0], 1e-12)


class Conditional(FeedForward):
    """Its gate has the input of its neighbor, but runs under other conditions, before it or after it."""

    condition, is_first = "", False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_first:
            gate = self.gate_under_condition(x)
            return self.down(self.up(x) * gate)
        up = self.up(x)
        if self.condition == "in place":
            x.mul_(2)
        return self.down(up * self.gate_under_condition(x))

    def gate_under_condition(self, x: torch.Tensor) -> torch.Tensor:
        if self.condition in ("recomputed", "reentrant"):
            gate: torch.Tensor = checkpoint(self.gate, x, use_reentrant=self.condition == "reentrant")
            return gate
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.condition != "no gradients"):
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=self.condition == "autocast"):
                gate = self.gate(x)
            assert (gate.dtype == torch.bfloat16) is (self.condition == "autocast")
            return gate.to(x.dtype)


class Halved(nn.Module):
    """A parametrization, which gives another tensor each time."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def tensor_parallel_neighbors_under_other_conditions() -> None:
    """What one neighbor computes without gradients, in a checkpoint, under autocast or before a change in place is not what
    the other needs. Parametrized weights are new tensors on each rank, and share a gather on all ranks.
    """
    mesh, num_ranks = init_device_mesh(DEVICE.type, (dist.get_world_size(),)), dist.get_world_size()
    for condition in ("no gradients", "recomputed", "reentrant", "autocast", "in place", "parametrized"):
        for is_first in (False, True):
            results: list[list[torch.Tensor]] = []
            for is_ours in (False, True):
                torch.manual_seed(0)
                mlp = parallelize_feed_forward(Conditional(64).to(DEVICE), mesh)
                mlp.condition, mlp.is_first = condition, is_first
                if condition == "parametrized":
                    register_parametrization(mlp.gate, "weight", Halved())
                    register_parametrization(mlp.up, "weight", Halved())
                overlapped = tensor_parallel.overlap(mlp) if is_ours else None
                found = []
                for _ in range(2):
                    if condition == "in place":
                        with torch.no_grad():
                            found.append(mlp(torch.ones(1, 4, 64, device=DEVICE)))
                    else:
                        block_results(mlp, 1, 4 * num_ranks, torch.float32)
                        grads = [each.grad.full_tensor() for each in mlp.parameters() if each.grad is not None]
                        found += [each.clone() for each in grads if each.any()]  # of what is unused: zero, or none
                if overlapped is not None and condition == "parametrized":
                    assert overlapped.num_by_copies + overlapped.num_by_library == 2 * 4
                results.append(found)
            assert_close(results[1], results[0], 0.02 if condition == "autocast" else 1e-5, f"{condition} {is_first}")


def tensor_parallel_with_fsdp2() -> None:
    """`overlap`, and before it or after it `fully_shard` over another dimension of the mesh."""
    num_ranks = dist.get_world_size()
    if num_ranks % 2:
        return
    mesh = init_device_mesh(DEVICE.type, (2, num_ranks // 2), mesh_dim_names=("dp", "tp"))
    results = []
    for order in ("bare", "before", "after"):
        torch.manual_seed(0)
        mlp = FeedForward(64).to(DEVICE)
        plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Shard(1))}
        parallelize_module(mlp, mesh["tp"], plan)
        parallelize_module(mlp, mesh["tp"], PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()))
        if order == "before":
            tensor_parallel.overlap(mlp)
        fully_shard(mlp, mesh=mesh["dp"])
        assert isinstance(mlp, FSDPModule)
        overlapped = tensor_parallel.overlap(mlp) if order == "after" else None
        assert overlapped is None or (overlapped.taken, overlapped.refused) == (["gate", "up", "down"], {})
        given = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(dist.get_rank())).to(DEVICE)
        for _ in range(2):
            results.append(gradients(mlp, given))
        assert overlapped is None or overlapped.num_by_copies + overlapped.num_by_library > 0
    for ours in (results[2:4], results[4:]):
        assert_close(ours[0], results[0], 1e-5)
        assert_close(ours[1], results[1], 1e-5)
