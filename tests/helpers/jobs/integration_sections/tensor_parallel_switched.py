"""Tensor parallelism that is switched, compiled, checkpointed, copied and saved; `overlap` on models with whole outputs."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from counterpoint import ops
from counterpoint.integrations import tensor_parallel
from counterpoint.schedule import ScheduleDescription
from integration_sections.comparing import DEVICE, assert_close, assert_equal, refused, said_of, without_memory_above
from integration_sections.parallel_blocks import (
    Block,
    FeedForward,
    block_results,
    hooks_of,
    parallel_block,
    parallelize_block,
    parallelize_feed_forward,
)

CHUNKED = ScheduleDescription(pattern="one_peer", chunks=2)
NUM_CALLS = 8  # of operators in one step of a block: two gathers, two reductions, and the backward pass of each


class Blocks(nn.Module):
    """What torchtitan's model is to its blocks; norms by the root of mean squares, which DTensor compiles."""

    def __init__(self, mesh: DeviceMesh, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(num_blocks):
            torch.manual_seed(0)
            block = Block(bias=False)
            block.norm1, block.norm2 = nn.RMSNorm(64), nn.RMSNorm(64)
            self.blocks.append(parallelize_block(block.to(DEVICE, torch.float64), mesh))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def whole_mesh() -> DeviceMesh:
    return init_device_mesh(DEVICE.type, (dist.get_world_size(),))


def results_of(model: nn.Module) -> list[torch.Tensor]:
    return block_results(model, 2, 4 * dist.get_world_size())


def tensor_parallel_switches() -> None:
    """Off, the linears give the bits that they gave before; every call is counted while it is on."""
    block = parallel_block()
    wanted = results_of(block)
    overlapped = tensor_parallel.overlap(block, schedule=CHUNKED, is_on=False)
    assert_equal(results_of(block), wanted)
    assert (overlapped.num_by_copies, overlapped.num_by_library, overlapped.num_bytes) == (0, 0, 0)
    hooks = hooks_of(block)
    for turn in range(1, 4):
        overlapped.use(True)
        assert_close(results_of(block), wanted, 1e-12)
        assert overlapped.num_by_copies == NUM_CALLS * turn
        overlapped.use(False)
        assert_equal(results_of(block), wanted)
    assert hooks_of(block) == hooks
    assert overlapped.num_by_library == 0
    # a gather or a reduction sends W - 1 shards of 2 x 4 tokens with 64 features in 8 bytes from each rank; a forward pass
    # has four, a gather's backward pass two (it gathers again, and reduces), a reduction's one
    assert overlapped.num_bytes == 3 * (4 + 2 * 2 + 2 * 1) * (dist.get_world_size() - 1) * 2 * 4 * 64 * 8
    words = str(overlapped)
    assert words.startswith("overlap: off for 7 linears: attention.q, attention.k")
    assert f"{NUM_CALLS * 3} calls by copies" in words
    refused(lambda: tensor_parallel.overlap(block), "is already overlapped")
    refused(lambda: overlapped.use(1), "is_on must be True or False; found 1")
    overlapped.undo()
    refused(lambda: overlapped.use(True), "was undone")
    tensor_parallel.overlap(block).undo()
    assert_equal(results_of(block), wanted)


def tensor_parallel_without_memory() -> None:
    """One rank has no memory in mid-job for a larger shape: its linears run the library's collectives on all ranks, which
    are said once for each call, and those of the shape before go on by copies."""
    ops.release()
    block, bare = parallel_block(), parallel_block()
    overlapped = tensor_parallel.overlap(block, schedule=CHUNKED)
    wanted, num_ranks = results_of(block), dist.get_world_size()
    counted = overlapped.num_by_copies
    with without_memory_above(3 * ops.pool_report()[0].num_bytes, on_rank=num_ranks - 1):
        said = said_of(
            lambda: assert_close(block_results(block, 8, 8 * num_ranks), block_results(bare, 8, 8 * num_ranks), 1e-12)
        )
    assert all("runs the library's collective: Rank" in line for line in said), said
    assert said
    assert overlapped.num_in_operators == overlapped.num_by_library > 0
    assert_equal(results_of(block), wanted)
    assert overlapped.num_by_copies >= 2 * counted
    ops.release()


def tensor_parallel_compiled() -> None:
    """Blocks that are compiled one by one: one graph for each state, however many blocks, and none for a switch back."""
    mesh, num_blocks = whole_mesh(), 9  # one more than dynamo compiles a function anew
    wanted = results_of(Blocks(mesh, num_blocks))
    for is_early in (True, False):
        torch._dynamo.reset()
        counters.clear()
        model = Blocks(mesh, num_blocks)
        overlapped = tensor_parallel.overlap(model, schedule=CHUNKED) if is_early else None
        for number, block in enumerate(model.blocks):
            model.blocks[number] = torch.compile(block, backend="aot_eager", fullgraph=True)
        if overlapped is None:  # compiled and run before
            assert_equal(results_of(model), wanted)
            overlapped = tensor_parallel.overlap(model, schedule=CHUNKED)
        for turn in range(1, 3):
            overlapped.use(True)
            assert_close(results_of(model), wanted, 1e-12)
            assert overlapped.num_by_copies == NUM_CALLS * num_blocks * turn
            overlapped.use(False)
            assert_equal(results_of(model), wanted)
            assert counters["stats"]["unique_graphs"] == (2 if is_early else 3)
        assert not counters["graph_break"]
    torch._dynamo.reset()
    model = Blocks(mesh, 2)
    overlapped = tensor_parallel.overlap(model, schedule=CHUNKED)
    assert_close(results_of(torch.compile(model, backend="aot_eager", fullgraph=True)), results_of(model), 1e-12)
    assert overlapped.num_by_copies == 2 * NUM_CALLS * 2


def tensor_parallel_checkpointed() -> None:
    """Activation checkpointing, eager and compiled, plain and selective; a policy may save what operators gave."""
    mesh = whole_mesh()
    wanted = results_of(Blocks(mesh, 1))

    def contexts_of(saved: tuple[object, ...]) -> object:
        def decide(_context: object, operator: object, *_: object, **__: object) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(decide)

    def plain(block: nn.Module) -> nn.Module:
        return checkpoint_wrapper(block)

    def selective(block: nn.Module, *saved: object) -> nn.Module:
        return checkpoint_wrapper(block, context_fn=lambda: contexts_of(saved))

    ways = {
        "plain": plain,
        "matmuls": lambda block: selective(block, torch.ops.aten.mm.default),
        "operators": lambda block: selective(block, *tensor_parallel.OPERATORS),
    }
    num_calls: dict[tuple[str, bool], int] = {}
    for way, wrap in ways.items():
        for is_compiled in (False, True):
            torch._dynamo.reset()
            model = Blocks(mesh, 1)
            overlapped = tensor_parallel.overlap(model, schedule=CHUNKED)
            model.blocks[0] = wrap(model.blocks[0])
            if is_compiled:
                model.blocks[0] = torch.compile(model.blocks[0], backend="aot_eager", fullgraph=True)
            assert_close(results_of(model), wanted, 1e-12)
            num_calls[way, is_compiled] = overlapped.num_by_copies
            if not is_compiled:
                overlapped.use(False)
                assert_equal(results_of(model), wanted)
    assert num_calls["operators", False] == num_calls["operators", True] == NUM_CALLS, num_calls
    assert all(
        NUM_CALLS < num_calls[way, is_compiled] <= 12 for way in ("plain", "matmuls") for is_compiled in (False, True)
    )
    for is_on in (False, True):  # switched once the forward pass has ended, and where the first gradient is complete
        for number in (0, 1):
            model = Blocks(mesh, 1)
            overlapped = tensor_parallel.overlap(model, schedule=CHUNKED, is_on=is_on)
            model.blocks[0] = plain(model.blocks[0])
            watched = (model.register_forward_hook, model.blocks[0].mlp.down.bias.register_post_accumulate_grad_hook)[number]
            watched(lambda *_, overlapped=overlapped, is_on=is_on: overlapped.use(not is_on))
            assert_close(results_of(model), wanted, 1e-12)
            assert overlapped.is_on is not is_on


class Stumbles(FeedForward):
    """Raises in its middle if it is told to."""

    is_stumbling = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated = self.gate(x)
        if self.is_stumbling:
            raise ArithmeticError
        return self.down(gated * self.up(x))


def tensor_parallel_in_a_job() -> None:
    """Checkpoints are those of the bare job; a forward pass that raises, evaluation, and copies do no harm."""
    bare, block = parallel_block(), parallel_block()
    overlapped = tensor_parallel.overlap(block, schedule=CHUNKED)
    wanted = results_of(bare)
    results_of(block)
    saved, of_bare = block.state_dict(), bare.state_dict()
    assert list(saved) == list(of_bare)
    assert_equal(
        *([each.full_tensor() if isinstance(each, DTensor) else each for each in of.values()] for of in (saved, of_bare))
    )
    bare.load_state_dict(saved)
    block.load_state_dict(of_bare)
    copied = copy.deepcopy(block)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(0.5)
    before = overlapped.num_by_copies
    teacher = parallel_block().eval()
    of_teacher = tensor_parallel.overlap(teacher, schedule=CHUNKED)
    shard = torch.ones(2, 4, 64, device=DEVICE, dtype=torch.float64)
    with torch.no_grad():
        assert_close([teacher(shard)], [bare(shard)], 1e-12)
    assert of_teacher.num_by_copies == NUM_CALLS // 2
    of_teacher.use(False)
    assert_close(results_of(block), wanted, 1e-12)
    halved = copy.deepcopy(bare)
    with torch.no_grad():
        for parameter in halved.parameters():
            parameter.mul_(0.5)
    assert_close(results_of(copied), results_of(halved), 1e-12)
    assert overlapped.num_by_copies > before
    overlapped.undo()
    assert_equal(results_of(copied), results_of(halved))
    torch.manual_seed(0)
    mlp = Stumbles(64).to(DEVICE, torch.float64)
    parallelize_feed_forward(mlp, whole_mesh())
    overlapped = tensor_parallel.overlap(mlp, schedule=CHUNKED)
    wanted = block_results(mlp, 1, 4 * dist.get_world_size())
    mlp.is_stumbling = True
    try:
        mlp(shard[:1])
    except ArithmeticError:
        mlp.is_stumbling = False
    assert not mlp.is_stumbling
    before = overlapped.num_by_copies
    assert_equal(block_results(mlp, 1, 4 * dist.get_world_size()), wanted)
    assert overlapped.num_by_copies == before + NUM_CALLS // 2, "they still share one gather"


def tensor_parallel_compiled_with_fsdp2() -> None:
    """As torchtitan does it: overlap, compile every block, then `fully_shard` over another dimension of the mesh.

    What it is compared with is not compiled, for that takes seconds and changes nothing in double precision.
    """
    num_ranks = dist.get_world_size()
    if num_ranks % 2:
        return
    mesh = init_device_mesh(DEVICE.type, (2, num_ranks // 2), mesh_dim_names=("dp", "tp"))
    results = []
    for is_ours in (False, True):
        torch._dynamo.reset()
        model = Blocks(mesh["tp"], 2)
        overlapped = tensor_parallel.overlap(model, schedule=CHUNKED) if is_ours else None
        for number, block in enumerate(model.blocks):
            if is_ours:
                model.blocks[number] = torch.compile(block, backend="aot_eager", fullgraph=True)
            fully_shard(model.blocks[number], mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        shard = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(dist.get_rank())).to(DEVICE).double()
        found: list[torch.Tensor] = []
        for is_on in (True, False, True):
            if overlapped is not None:
                overlapped.use(is_on)
            model.zero_grad()
            output = model(shard)
            output.pow(2).sum().backward()
            found += [output.detach(), *(each.grad.full_tensor() for each in model.parameters())]
        results.append(found)
        if overlapped is not None:
            assert overlapped.num_by_copies == 2 * NUM_CALLS * 2
    assert_close(results[1], results[0], 1e-12)
