"""Tensor-parallel blocks with overlapped linears against DTensor's own."""

import torch
import torch.distributed as dist

from counterpoint.integrations import tensor_parallel
from counterpoint.schedule import ScheduleDescription
from integration_sections.comparing import DEVICE, assert_close, assert_equal
from integration_sections.parallel_blocks import Block, block_results, hooks_of, parallel_block


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
    """Weights train as without us, and checkpoints load into them."""
    num_ranks = dist.get_world_size()
    trained = []
    for is_ours in (False, True):
        block = parallel_block()
        if is_ours:
            tensor_parallel.overlap(block)
        # torch 2.11 updates many parameters at once by default on GPUs, and is wrong where gradients are not reduced yet
        optimizer = torch.optim.SGD(block.parameters(), lr=0.01, momentum=0.9, foreach=False)
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
