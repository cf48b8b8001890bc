"""Ranks that hold the integrations against stock DDP, FSDP2 and tensor parallelism; rank 0 prints `NAME: ok` per section.

With GPUs over NCCL and copy engines, without over gloo: the sections are the same.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from counterpoint import ops
from counterpoint.errors import IntegrationError
from counterpoint.integrations import ddp, fsdp2, tensor_parallel
from counterpoint.integrations.in_flight import Lanes, all_reduce_mean, reduce_scatter
from counterpoint.integrations.wire import AsBfloat16, AsIs, AsScaledFloat8
from counterpoint.schedule import ScheduleDescription

LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
DEVICE = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")
ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def everyones(num_elements: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Every rank's tensor, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_elements, generator=generator).to(dtype).to(DEVICE) for _ in range(dist.get_world_size())]


def assert_close(found: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor], limit: float) -> None:
    """Within `limit` of the largest element, or of 1e-3: some gradients are zero but for rounding."""
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.shape == other.shape, (one.shape, other.shape)
        if other.numel():
            scale = other.double().abs().max().clamp_min(1e-3)
            difference = ((one.double() - other.double()).abs().max() / scale).item()
            assert difference < limit, (number, difference, limit)


def assert_equal(found: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def same_on_every_rank(tensor: torch.Tensor) -> bool:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return all(torch.equal(each, tensor) for each in gathered)


def all_reduces() -> None:
    """Any size and type, more in flight than lanes, the same bits twice and on every rank."""
    lanes = Lanes(dist.group.WORLD, DEVICE, "job", 3)
    rank = dist.get_rank()
    for dtype, limit in ROUNDING.items():
        cases = [everyones(size, dtype, seed) for seed, size in enumerate((1, 127, 128, 1000, 4097, 100_003, 64))]
        for wire, rounding in ((AsIs(), limit), (AsBfloat16(), 2e-2), (AsScaledFloat8(), 0.15)):
            results = []
            for _ in range(2):
                buckets = [case[rank].clone() for case in cases]
                for bucket in buckets:
                    lane = lanes.next()
                    with lane.issuing():
                        all_reduce_mean(lane, bucket, wire)
                if DEVICE.type == "cuda":
                    torch.cuda.synchronize()
                results.append(buckets)
            assert_equal(*results)
            for bucket, case in zip(results[0], cases, strict=True):  # relative to what was sent: a mean may be near zero
                sent = torch.stack(case).double()
                assert_close([bucket.double() + sent.abs().max()], [sent.mean(0) + sent.abs().max()], rounding)
            assert all(same_on_every_rank(bucket) for bucket in results[0])


def reduce_scatters() -> None:
    lanes = Lanes(dist.group.WORLD, DEVICE, "job", 2)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for seed, size in enumerate((1, 100, 5000)):
        given = everyones(size * num_ranks, torch.float32, seed)
        wanted = torch.stack(given).double().sum(0).chunk(num_ranks)[rank]
        for is_mean in (False, True):
            output = torch.empty(size, device=DEVICE)
            reduce_scatter(lanes.next(), output, given[rank], is_mean=is_mean)
            assert_close([output], [wanted / num_ranks if is_mean else wanted], 1e-5)


class Deep(nn.Module):
    """Layers of odd sizes, one of which is used twice and one not at all."""

    def __init__(self, width: int = 33) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.last = nn.Linear(width, 7)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.layers[0]):
            given = torch.tanh(layer(given))
        return self.last(given)


def deep_model(dtype: torch.dtype = torch.float32) -> Deep:
    torch.manual_seed(0)
    return Deep().to(DEVICE, dtype)


def given_to(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(5, 33, generator=torch.Generator().manual_seed(100 + rank)).to(DEVICE, dtype)


def gradients(model: nn.Module, given: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(given).float().pow(2).sum().backward()
    found = [parameter.grad for parameter in model.parameters()]
    return [each.full_tensor() if isinstance(each, DTensor) else each.clone() for each in found]


def ddp_gradients() -> None:
    """Stock gradients within rounding, the same bits twice, whatever the buckets and however many are in flight."""
    given = given_to(dist.get_rank())
    wanted = gradients(DistributedDataParallel(deep_model()), given)
    for bucket_mb, in_flight in ((0.001, 1), (0.001, 3), (0.003, 8), (25, 3)):
        model = DistributedDataParallel(deep_model(), bucket_cap_mb=bucket_mb, gradient_as_bucket_view=in_flight > 1)
        averages = ddp.register(model, in_flight=in_flight, least_part_bytes=0, max_buffer_bytes=4096)
        results = [gradients(model, given) for _ in range(3)]
        assert_close(results[0], wanted, 1e-5)
        assert_equal(results[1], results[2])
        assert averages.num_by_copies > 2 or bucket_mb == 25
        assert averages.num_by_library == 0


def ddp_types() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        given = given_to(dist.get_rank(), dtype)
        wanted = gradients(DistributedDataParallel(deep_model(dtype)), given)
        model = DistributedDataParallel(deep_model(dtype))
        ddp.register(model, least_part_bytes=0)
        assert_close(gradients(model, given), wanted, ROUNDING[dtype])


def ddp_compression() -> None:
    given = given_to(dist.get_rank())
    wanted = gradients(DistributedDataParallel(deep_model()), given)
    for compression, limit in (("bf16", 2**-7), ("fp8", 0.15)):
        model = DistributedDataParallel(deep_model(), bucket_cap_mb=0.01)
        ddp.register(model, compression=compression, least_part_bytes=0)
        found = gradients(model, given)
        assert_close(found, wanted, limit)
        assert not all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def ddp_falls_back() -> None:
    """Small buckets are the library's, and nothing is lost."""
    given = given_to(dist.get_rank())
    wanted = gradients(DistributedDataParallel(deep_model()), given)
    model = DistributedDataParallel(deep_model())
    averages = ddp.register(model)
    assert_close(gradients(model, given), wanted, 1e-6)
    assert averages.num_by_copies == 0
    assert averages.num_by_library == 1


def ddp_refuses() -> None:
    wide, narrow = DistributedDataParallel(deep_model()), DistributedDataParallel(deep_model(torch.bfloat16))
    refused(lambda: ddp.register(wide, in_flight=0), "in_flight")
    refused(lambda: ddp.register(wide, compression="zip"), "compression")
    refused(lambda: ddp.register(wide, max_buffer_bytes=1), "max_buffer_bytes")
    refused(lambda: ddp.register(narrow, compression="bf16"), "makes nothing smaller")


def refused(call: Callable[[], object], word: str) -> None:
    with pytest.raises(IntegrationError, match=word) as caught:
        call()
    assert "\n" not in str(caught.value)


def sharded(**options: object) -> Deep:
    model = deep_model()
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def fsdp2_steps() -> None:
    """Gradients and trained parameters are stock FSDP2's; the same bits twice; undone, its own again."""
    given = given_to(dist.get_rank())
    for options in (
        {},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        {"reshard_after_forward": False},
    ):
        results = []
        for is_ours in (False, True, True):
            model = sharded(**options)
            in_use = fsdp2.use_copy_engines(model, least_part_bytes=0) if is_ours else None
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            found = []
            for _ in range(3):
                found += gradients(model, given)
                optimizer.step()
            found += [parameter.full_tensor() for parameter in model.parameters()]
            results.append(found)
        assert_close(results[1], results[0], 1e-5)
        assert_equal(results[1], results[2])
        assert in_use is not None
        assert in_use.num_by_copies > 9
        assert in_use.num_by_library == 0
        copies_before = in_use.num_by_copies
        in_use.undo()
        gradients(model, given)
        assert in_use.num_by_copies == copies_before


def fsdp2_small_groups_stay() -> None:
    given, model = given_to(dist.get_rank()), sharded()
    wanted = gradients(sharded(), given)
    in_use = fsdp2.use_copy_engines(model)
    assert_close(gradients(model, given), wanted, 1e-6)
    assert in_use.num_by_copies == 0
    assert in_use.num_by_library > 0


def fsdp2_refuses_a_buffer_in_use() -> None:
    """Prefetching more groups than there are buffers is refused, and enough buffers serve it."""
    given, model = given_to(dist.get_rank()), sharded()
    wanted = gradients(sharded(), given)
    model.set_modules_to_forward_prefetch(list(model.layers))
    in_use = fsdp2.use_copy_engines(model, least_part_bytes=0, num_buffers=2)
    refused(lambda: model(given), "num_buffers=3")
    in_use.undo()
    model = sharded()
    model.set_modules_to_forward_prefetch(list(model.layers))
    fsdp2.use_copy_engines(model, least_part_bytes=0, num_buffers=6)
    assert_close(gradients(model, given), wanted, 1e-6)


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
    whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    column = {"input_layouts": Shard(1)} if is_annotated else {}
    plan = {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    if not is_annotated:
        plan |= {"attention": whole, "mlp": whole}
    for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"):
        plan[name] = ColwiseParallel(**column)
    plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.o", "mlp.down")}
    block = Block(bias=bias).to(DEVICE, dtype)
    return parallelize_module(block, init_device_mesh(DEVICE.type, (dist.get_world_size(),)), plan)


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


def tensor_parallel_blocks() -> None:
    """Outputs and gradients are those of DTensor's own linears, with and without bias, whoever gathers."""
    num_ranks = dist.get_world_size()
    schedules = (None, ScheduleDescription(pattern="one_peer", chunks=2), ScheduleDescription(pattern="sequential"))
    for bias in (True, False):
        for batch, schedule in zip((1, 3, 2), schedules, strict=True):
            stock, block = parallel_block(bias=bias), parallel_block(bias=bias)
            wanted = block_results(stock, batch, 4 * num_ranks)
            hooks_before = hooks_of(block)
            overlapped = tensor_parallel.overlap(block, schedule=schedule)
            assert len(overlapped.taken) == 7
            assert not overlapped.refused
            results = [block_results(block, batch, 4 * num_ranks) for _ in range(3)]
            for found in results:
                assert_close(found, wanted, 1e-12)
            assert_equal(results[1], results[2])
            overlapped.undo()
            assert hooks_of(block) == hooks_before
            assert not any("forward" in vars(module) for module in block.modules())
            assert_equal(block_results(block, batch, 4 * num_ranks), wanted)


def tensor_parallel_trains() -> None:
    """Weights that adjoin in memory train like any other, and checkpoints load into them."""
    num_ranks = dist.get_world_size()
    trained = []
    for is_ours in (False, True):
        block = parallel_block()
        if is_ours:
            tensor_parallel.overlap(block)
        optimizer = torch.optim.SGD(block.parameters(), lr=0.01, momentum=0.9)
        for _ in range(3):
            block_results(block, 1, 4 * num_ranks)
            optimizer.step()
        block.load_state_dict({name: each.clone() for name, each in block.state_dict().items()})
        block_results(block, 1, 4 * num_ranks)
        optimizer.step()
        trained.append([parameter.full_tensor() for parameter in block.parameters()])
    assert_close(trained[1], trained[0], 1e-9)


def tensor_parallel_annotated() -> None:
    """Linears that gather by their own layouts, and autocast."""
    num_ranks = dist.get_world_size()
    stock, block = parallel_block(is_annotated=True), parallel_block(is_annotated=True)
    wanted = block_results(stock, 2, 2 * num_ranks)
    tensor_parallel.overlap(block)
    assert_close(block_results(block, 2, 2 * num_ranks), wanted, 1e-12)
    stock, block = (parallel_block(dtype=torch.float32, bias=False) for _ in range(2))
    tensor_parallel.overlap(block)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        wanted, found = (block_results(each, 1, 2 * num_ranks, torch.float32) for each in (stock, block))
    assert_close(found, wanted, 0.05)


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


def tensor_parallel_frozen() -> None:
    """Weights that are not trained get no gradient; those beside them, and inputs, get theirs."""
    num_ranks = dist.get_world_size()
    for frozen in (("attention.q.weight", "mlp.gate.weight"), tuple(name for name, _ in Block().named_parameters())):
        results = []
        for is_ours in (False, True):
            block = parallel_block()
            for name, parameter in block.named_parameters():
                parameter.requires_grad_(name not in frozen)
            if is_ours:
                tensor_parallel.overlap(block)
            results.append(block_results(block, 1, 4 * num_ranks))
            assert [name for name, each in block.named_parameters() if each.grad is None] == [
                name for name, _ in block.named_parameters() if name in frozen
            ]
        assert_close(results[1], results[0], 1e-12)


def tensor_parallel_refuses() -> None:
    num_ranks = dist.get_world_size()
    block = parallel_block()
    tensor_parallel.overlap(block)
    mesh = init_device_mesh(DEVICE.type, (num_ranks,))
    odd = distribute_tensor(torch.randn(1, 4 * num_ranks + 1, 64, device=DEVICE, dtype=torch.float64), mesh, [Shard(1)])
    refused(lambda: block(odd), "Pad it")
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    whole = parallelize_module(FeedForward(64).to(DEVICE), mesh, plan)
    refused(lambda: tensor_parallel.overlap(whole), "comes whole")
    refused(lambda: tensor_parallel.overlap(FeedForward(64)), "parallelize_module")


class Sometimes(FeedForward):
    """Its gate has an input of its own in some steps, and is not called in others."""

    mode = "both"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mode == "up":
            return self.down(self.up(x))
        return self.down(self.up(x) * self.gate(x * 2 if self.mode == "apart" else x))


def tensor_parallel_neighbors_part() -> None:
    """Linears that turn out not to share an input give the same results; so do recomputed activations."""
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    results: list[list[torch.Tensor]] = []
    for is_ours in (False, True):
        found: list[torch.Tensor] = []
        for modes in (("both", "both"), ("both", "up", "both"), ("apart", "both"), ("up", "apart")):
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
                given = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(dist.get_rank())).to(DEVICE).double()
                mlp.zero_grad()
                given = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(dist.get_rank())).to(DEVICE).double()
                checkpoint(mlp, given.requires_grad_(), use_reentrant=False).pow(2).sum().backward()
                assert given.grad is not None
                grads = [each.grad.full_tensor() for each in mlp.parameters() if each.grad is not None]
                found += [given.grad, *(each.clone() for each in grads if each.any())]  # of what is unused: zero, or none
        results.append(found)
    assert_close(results[1], results[0], 1e-12)


def tensor_parallel_with_fsdp2() -> None:
    """`overlap`, then `fully_shard` over another dimension of the mesh."""
    num_ranks = dist.get_world_size()
    if num_ranks % 2:
        return
    mesh = init_device_mesh(DEVICE.type, (2, num_ranks // 2), mesh_dim_names=("dp", "tp"))
    results = []
    for is_ours in (False, True):
        torch.manual_seed(0)
        mlp = FeedForward(64).to(DEVICE)
        plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Shard(1))}
        parallelize_module(mlp, mesh["tp"], plan)
        parallelize_module(mlp, mesh["tp"], PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()))
        if is_ours:
            tensor_parallel.overlap(mlp)
        fully_shard(mlp, mesh=mesh["dp"])
        assert isinstance(mlp, FSDPModule)
        given = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(dist.get_rank())).to(DEVICE)
        for _ in range(2):
            results.append(gradients(mlp, given))
    assert_close(results[2], results[0], 1e-5)
    assert_close(results[3], results[1], 1e-5)


def memory_is_reported_and_given_back() -> None:
    model = DistributedDataParallel(deep_model())
    ddp.register(model, least_part_bytes=0)
    given = given_to(dist.get_rank())
    wanted = gradients(model, given)
    num_bytes = sum(report.num_bytes for report in ops.pool_report())
    assert num_bytes > 0
    ops.release()
    assert not ops.pool_report()
    assert_equal(gradients(model, given), wanted)
    ops.release()


SECTIONS: dict[str, Callable[[], None]] = {
    section.__name__: section
    for section in (
        all_reduces,
        reduce_scatters,
        ddp_gradients,
        ddp_types,
        ddp_compression,
        ddp_falls_back,
        ddp_refuses,
        fsdp2_steps,
        fsdp2_small_groups_stay,
        fsdp2_refuses_a_buffer_in_use,
        tensor_parallel_blocks,
        tensor_parallel_trains,
        tensor_parallel_annotated,
        tensor_parallel_hands_dtensors_on,
        tensor_parallel_frozen,
        tensor_parallel_refuses,
        tensor_parallel_neighbors_part,
        tensor_parallel_with_fsdp2,
        memory_is_reported_and_given_back,
    )
}


def main(names: list[str]) -> int:
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
        dist.init_process_group("nccl", device_id=DEVICE)
    else:
        meeting = f"file://{os.environ['MEETING_FILE']}"
        dist.init_process_group("gloo", meeting, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    failed = 0
    for name in names or SECTIONS:
        try:
            SECTIONS[name]()
            outcome = "ok"
        except Exception:
            outcome, failed = f"failed\n{traceback.format_exc()}", 1
        outcomes: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(outcomes, outcome)
        if dist.get_rank() == 0:
            wrong = [f"rank {rank} {each}" for rank, each in enumerate(outcomes) if each != "ok"]
            print(f"{name}: {'ok' if not wrong else wrong[0]}", flush=True)
    return failed


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
