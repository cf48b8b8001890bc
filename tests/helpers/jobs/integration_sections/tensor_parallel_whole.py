"""`overlap` on models whose activations are whole on every rank, as in Hugging Face models and torch's plain styles."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from counterpoint.integrations import sequence_shards, tensor_parallel
from counterpoint.integrations.eager_linears import EagerLinear
from counterpoint.integrations.overlapped import Overlapped
from counterpoint.schedule import ScheduleDescription
from integration_sections.comparing import DEVICE, ROUNDING, assert_close, assert_equal
from integration_sections.parallel_blocks import FeedForward

CHUNKED = ScheduleDescription(pattern="one_peer", chunks=2)
Run = Callable[[torch.Tensor], torch.Tensor]


class OfTwoInputs(FeedForward):
    """Its gate has an input of its own, as keys and values have in cross-attention."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate(x * 2) * self.up(x))


class OfLists(nn.Module):
    """Linears with inputs of their own in lists, which have no forward pass."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(features, 2 * features) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(2 * features, features) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = down(torch.relu(up(x)))
        return x


class OfOne(FeedForward):
    """One of its neighbors is not used."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate(x))


class WithHead(FeedForward):
    """Its output goes through a column-parallel linear whose output is gathered, as that of a language model is."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.model = nn.ModuleDict({"head": nn.Linear(features, 3 * features, bias=False)})  # no neighbor of gate and up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model["head"](super().forward(x))


class Packed(nn.Module):
    """One linear for gate and up, whose output is gathered to be cut in two, as in Phi-3 and GLM-4; the next linear takes
    this rank's features of its whole input.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(features, 4 * features, bias=False), nn.Linear(2 * features, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(torch.relu(gate) * up)


class Style:
    """A style of transformers (read in 5.23): it keeps layouts in the closure of the forward that replaces the linear's."""

    use_local_output = True

    def __init__(self, layouts: tuple[Any, Any]) -> None:
        self.input_layouts, self.output_layouts = layouts

    def install(self, linear: nn.Linear, mesh: DeviceMesh) -> None:
        original_forward = linear.forward

        def tp_forward(x: torch.Tensor) -> torch.Tensor:
            product = original_forward(DTensor.from_local(x, mesh, [self.input_layouts], run_check=False))
            return product.redistribute(placements=[self.output_layouts]).to_local()

        linear.forward = tp_forward


def by_torch(mlp: nn.Module, mesh: DeviceMesh) -> None:
    linears = [name for name, each in mlp.named_modules() if isinstance(each, nn.Linear)]
    plan = {name: RowwiseParallel() if "down" in name else ColwiseParallel() for name in linears}
    if isinstance(mlp, Packed):
        whole = Replicate()
        plan = {"gate_up": ColwiseParallel(output_layouts=whole), "down": RowwiseParallel(input_layouts=whole)}
    if isinstance(mlp, WithHead):
        plan["model.head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(mlp, mesh, plan)


def by_transformers(mlp: nn.Module, mesh: DeviceMesh) -> None:
    linears = {name: each for name, each in mlp.named_modules() if isinstance(each, nn.Linear)}
    for name, linear in linears.items():
        kind = "RowwiseParallel" if "down" in name else "ColwiseParallel"
        layouts = (Shard(-1), Replicate()) if "down" in name else (Replicate(), Shard(-1))
        if name == "model.head" or isinstance(mlp, Packed):
            layouts = Replicate(), Replicate()
        for key, each in list(linear.named_parameters()):
            placement = Shard(1 if kind == "RowwiseParallel" else 0)
            if key == "bias" and kind == "RowwiseParallel":
                placement = Replicate()
            setattr(linear, key, nn.Parameter(distribute_tensor(each.detach(), mesh, [placement])))
        type(kind, (Style,), {"__module__": "transformers.of_a_test"})(layouts).install(linear, mesh)


def pair_of(
    spread: Callable[[nn.Module, DeviceMesh], None],
    kind: type[FeedForward | OfLists | Packed] = FeedForward,
    schedule: ScheduleDescription = CHUNKED,
) -> tuple[nn.Module, nn.Module, Overlapped]:
    """The same spread module twice, the second one with `overlap`."""
    mlps = []
    for _ in range(2):
        torch.manual_seed(0)
        mlps.append(kind(64).to(DEVICE, torch.float64))
        spread(mlps[-1], init_device_mesh(DEVICE.type, (dist.get_world_size(),)))
    return *mlps, tensor_parallel.overlap(mlps[1], schedule=schedule)  # type: ignore[return-value]  # a pair


def results_of(mlp: nn.Module, run: Run, *, is_input_wanted: bool = True) -> list[torch.Tensor]:
    """The output, and the gradients of an input that is the same on every rank and of the parameters."""
    mlp.zero_grad()
    given = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(DEVICE)
    given.requires_grad_(is_input_wanted)
    output = run(given)
    output.pow(2).sum().backward()
    gradients = [given.grad, *(each.grad for each in mlp.parameters())]
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in gradients if each is not None]
    return [output.detach(), *whole]


def as_it_is(mlp: nn.Module) -> Run:
    return mlp


def compiled(mlp: nn.Module) -> Run:
    return torch.compile(mlp, backend="aot_eager")  # type: ignore[no-any-return]


def checkpointed(mlp: nn.Module) -> Run:
    return partial(checkpoint, mlp, use_reentrant=False)


def tensor_parallel_whole_activations() -> None:
    """Row-parallel linears become matmul + all-reduce, and column-parallel ones sum their input's gradient once."""
    for spread in (by_torch, by_transformers):
        bare, ours, overlapped = pair_of(spread, WithHead)
        assert overlapped.taken == ["gate", "up", "down", "model.head"]
        assert not overlapped.refused
        for run_of, num_calls in ((as_it_is, 3), (compiled, 3), (checkpointed, 4)):
            before = overlapped.num_by_copies
            assert_close(results_of(ours, run_of(ours)), results_of(bare, run_of(bare)), 1e-12)
            assert overlapped.num_by_copies - before == num_calls, (run_of, overlapped.num_by_copies - before)
        weights = [each.weight for each in ours.modules() if isinstance(each, nn.Linear)]
        found = torch.autograd.grad(compiled(ours)(torch.ones(2, 5, 64, dtype=torch.float64).to(DEVICE)).sum(), weights)
        pairs = zip(found, weights, strict=True)
        assert all(one.to_local().stride() == weight.to_local().stride() for one, weight in pairs), "nothing is copied"
        with torch.no_grad():
            given, before = torch.randn(3, 64, dtype=torch.float64).to(DEVICE), overlapped.num_by_copies
            dist.broadcast(given, 0)
            assert_close([ours(given)], [bare(given)], 1e-12)
            assert overlapped.num_by_copies == before + 1, "only the row-parallel linear sends anything without gradients"
        overlapped.use(False)
        before = overlapped.num_by_copies
        assert_equal(results_of(ours, ours), results_of(bare, bare))
        assert overlapped.num_by_copies == before, "off, no operator runs"
        overlapped.undo()
        assert_close(results_of(ours, ours), results_of(bare, bare), 1e-12)


def tensor_parallel_whole_and_small() -> None:
    """Small calls without gradients that the operator leaves to the library skip the operator, and are counted alike."""
    for spread in (by_torch, by_transformers):
        bare, ours, overlapped = pair_of(spread, Packed, ScheduleDescription(pattern="sequential"))
        given = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(DEVICE)
        with mock.patch.object(EagerLinear, "multiply", autospec=True, side_effect=EagerLinear.multiply) as multiplied:
            for number in range(4):
                with torch.inference_mode() if number % 2 else torch.no_grad():
                    assert_close([ours(number * given)], [bare(number * given)], 1e-12)
                assert overlapped.num_by_library == number + 1
            assert len(multiplied.mock_calls) == 1
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, torch.no_grad():
                ours(given)
            assert "counterpoint::matmul_all_reduce" in {each.key for each in profile.key_averages()}
        assert_close(results_of(ours, ours), results_of(bare, bare), 1e-12)
        overlapped.undo()


def tensor_parallel_whole_and_packed() -> None:
    """A row-parallel linear multiplies its features of a whole input, and the gradient of that input is whole."""
    for spread in (by_torch, by_transformers):
        bare, ours, overlapped = pair_of(spread, Packed)
        assert overlapped.taken == ["gate_up", "down"], overlapped.refused
        for run_of in (as_it_is, compiled, checkpointed):
            before = overlapped.num_by_copies
            assert_close(results_of(ours, run_of(ours)), results_of(bare, bare), 1e-12)
            assert overlapped.num_by_copies - before == (3 if run_of is checkpointed else 2)


def tensor_parallel_whole_and_left_to_dtensor() -> None:
    """Where the original forward of a row-parallel linear takes its features of a whole input, nothing gathers its weight:
    the weight's gradient is sharded as the weight is, and a DTensor may have uneven tokens.
    """
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    plan = {"down": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
    uneven = torch.randn(6, 5, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(DEVICE)
    for given in (uneven, distribute_tensor(uneven, mesh, [Shard(0)])):
        for run_of in (as_it_is, compiled):
            found = []
            for is_ours in (True, False):
                torch.manual_seed(0)
                mlp = nn.Sequential(OrderedDict(down=nn.Linear(64, 32))).to(DEVICE, torch.float64)
                parallelize_module(mlp, mesh, plan)
                if is_ours:
                    overlapped = tensor_parallel.overlap(mlp, schedule=CHUNKED)
                leaf = given.detach().requires_grad_()
                output = run_of(mlp)(leaf) if is_ours else mlp(leaf)
                output.pow(2).sum().backward()
                weight = mlp.down.weight
                assert weight.grad.placements == weight.placements, weight.grad.placements
                gradients = (leaf.grad, *(each.grad for each in mlp.parameters()))
                found.append(
                    [output.detach(), *(each.full_tensor() if isinstance(each, DTensor) else each for each in gradients)]
                )
            assert_close(*found, 1e-12)
        assert overlapped.num_by_copies == 0


def tensor_parallel_whole_and_frozen() -> None:
    """Frozen weights, as under an adapter, and inputs that need no gradient, as those of a first layer."""
    for is_frozen, is_input_wanted, num_calls in ((True, True, 2), (False, False, 1)):
        bare, ours, overlapped = pair_of(by_transformers)
        for mlp in (bare, ours):
            for name in ("gate", "up"):
                mlp.get_submodule(name).requires_grad_(not is_frozen)
        wanted = results_of(bare, bare, is_input_wanted=is_input_wanted)
        assert_close(results_of(ours, ours, is_input_wanted=is_input_wanted), wanted, 1e-12)
        assert overlapped.num_by_copies == num_calls
        assert overlapped.num_by_library == 0
        if not is_input_wanted:  # nothing is shared, so each may have a backward pass of its own, as heads have
            given = torch.ones(4, 64, dtype=torch.float64).to(DEVICE)
            for each in [linear(given).sum() for linear in (ours.gate, ours.up)]:
                each.backward()


def tensor_parallel_whole_neighbors_part() -> None:
    """Neighbors with inputs of their own are separated after the first step, or while torch.compile looks at them, and
    results are right before and after.
    """
    for spread in (by_torch, by_transformers):
        bare, ours, overlapped = pair_of(spread, OfTwoInputs)
        wanted = results_of(bare, bare)
        for step in range(3):
            before = overlapped.num_by_copies
            assert_close(results_of(ours, ours), wanted, 1e-12)
            assert step == 0 or overlapped.num_by_copies - before == 3, "a sum for each input, and the row-parallel linear"
        _, ours, overlapped = pair_of(spread, OfTwoInputs)
        with mock.patch.object(sequence_shards, "multiply_whole", wraps=sequence_shards.multiply_whole) as multiplied:
            assert_close(results_of(ours, compiled(ours)), wanted, 1e-12)
        assert overlapped.num_by_copies == 3
        assert [len(each.args[1]) for each in multiplied.mock_calls][-2:] == [1, 1], "the last look is the one that runs"


def tensor_parallel_whole_lists_part() -> None:
    """Linears in a list are separated while they run, and leave nothing behind that a copy of the model would meet."""
    for spread in (by_torch, by_transformers):
        bare, ours, overlapped = pair_of(spread, OfLists)
        wanted = results_of(bare, bare)
        with mock.patch.object(EagerLinear, "multiply", autospec=True, side_effect=EagerLinear.multiply) as multiplied:
            for _ in range(2):
                assert_close(results_of(ours, ours), wanted, 1e-12)
        of_columns = [len(each.args[3]) for each in multiplied.mock_calls if each.args[0]._sums_gradient]
        assert of_columns == [3, 1, 1, 1, 1, 1], of_columns
        assert overlapped.num_by_copies == 12
        copy.deepcopy(ours)


def tensor_parallel_whole_and_unused() -> None:
    """The weight of a neighbor that is not used gets no gradient, in the first step and later."""
    for spread in (by_torch, by_transformers):
        for run_of in (as_it_is, compiled, checkpointed):
            bare, ours, _ = pair_of(spread, OfOne)
            for _ in range(2):
                assert_close(results_of(ours, run_of(ours)), results_of(bare, bare), 1e-12)
                assert [each.grad is None for each in ours.parameters()] == [each.grad is None for each in bare.parameters()]
            copy.deepcopy(ours)  # no product is left


def tensor_parallel_whole_and_distributed() -> None:
    """An input that is a DTensor already goes to the original linears, as whole as it is."""
    bare, ours, overlapped = pair_of(by_torch)
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    whole = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(DEVICE)
    placements = (Replicate(), Shard(1))
    for placement in placements[: 1 + (torch.__version__ >= (2, 12))]:  # torch 2.11's DTensor refuses the bare model's, too
        given = distribute_tensor(whole, mesh, [placement])
        found = []
        for mlp in (ours, bare):
            mlp.zero_grad()
            output = mlp(given)
            output.pow(2).sum().backward()
            found.append([output.detach(), *(each.grad.full_tensor() for each in mlp.parameters())])
        assert_close(*found, 1e-12)
    assert overlapped.library_reason == "an input that is a DTensor already"


def tensor_parallel_whole_under_autocast() -> None:
    """Operands are cast as those of the original linears, and outputs have the same type, eager and compiled."""
    for spread in (by_torch, by_transformers):
        for run_of in (as_it_is, compiled):
            bare, ours, _ = pair_of(spread, WithHead)
            found = []
            for mlp in (ours, bare):
                run = run_of(mlp.float())
                with torch.autocast(DEVICE.type, torch.bfloat16):
                    found.append(results_of(mlp, lambda given, run=run: run(given.float())))
            assert_close(*found, ROUNDING[torch.bfloat16])
            assert found[0][0].dtype == found[1][0].dtype == torch.bfloat16


def tensor_parallel_whole_with_fsdp2() -> None:
    """Models that transformers has split and sharded by FSDP2 over another dimension of the mesh are taken as they are."""
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for is_ours in (True, False):
        torch.manual_seed(0)
        mlp = Packed(64).to(DEVICE, torch.float64)
        by_transformers(mlp, mesh["tp"])
        fully_shard(mlp, mesh=mesh["dp"])
        if is_ours:
            overlapped = tensor_parallel.overlap(mlp, schedule=CHUNKED)
            assert overlapped.taken == ["gate_up", "down"], overlapped.refused
        found.append(results_of(mlp, mlp))
    assert_close(*found, 1e-12)
    assert overlapped.num_by_copies == 2


def tensor_parallel_whole_on_two_meshes() -> None:
    """Neighbors on meshes of their own each sum over the ranks of their mesh."""
    num_ranks = dist.get_world_size()
    pairs = init_device_mesh(DEVICE.type, (num_ranks // 2, 2), mesh_dim_names=("replicas", "tp"))["tp"]
    found = []
    for is_ours in (True, False):
        torch.manual_seed(0)
        both = nn.ModuleDict({name: nn.Linear(64, 128) for name in ("of_pairs", "of_all")}).to(DEVICE, torch.float64)
        parallelize_module(both, pairs, {"of_pairs": ColwiseParallel()})
        parallelize_module(both, init_device_mesh(DEVICE.type, (num_ranks,)), {"of_all": ColwiseParallel()})
        if is_ours:
            tensor_parallel.overlap(both, schedule=CHUNKED)
        found.append(
            results_of(both, lambda given, both=both: both["of_pairs"](given).sum() + both["of_all"](given).sum())[1:]
        )
    assert_close(*found, 1e-12)
