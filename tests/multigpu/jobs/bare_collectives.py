"""The job's own collectives by copies on GPUs: in flight beside matmuls, from several streams, in captures; and a divisor
of gradients against NCCL's mean."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from counterpoint import ops
from counterpoint.cuda.ranks import wait_until_all_leave
from counterpoint.integrations import collectives, fsdp2

DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
NUM_ELEMENTS = 8 * 2**20
NUM_IN_TURN = 12


def overlapping() -> None:
    """More asynchronous all-reduces than lanes behind matmuls that produce them; memory is free to be used again at once."""
    factor = torch.full((2048, 2048), 1 / 2048, device=DEVICE)
    handles, sums = [], []
    for number in range(NUM_IN_TURN):
        given = torch.full((2048, 2048), number + dist.get_rank(), device=DEVICE, dtype=torch.float32)
        product = given @ factor
        handles.append(dist.all_reduce(product, async_op=True))
        sums.append(product)
        del given, product
        torch.empty(2048, 2048, device=DEVICE).fill_(torch.nan)
    for number, (handle, found) in enumerate(zip(handles, sums, strict=True)):
        handle.wait()
        num_ranks = dist.get_world_size()
        wanted = number * num_ranks + num_ranks * (num_ranks - 1) / 2
        torch.testing.assert_close(found, torch.full_like(found, wanted), rtol=1e-2, atol=1e-2)


def streams() -> None:
    """Collectives of several streams follow each other on their lanes, however the streams run."""
    own = [torch.cuda.Stream(DEVICE) for _ in range(4)]
    found = []
    for number in range(NUM_IN_TURN):
        stream = own[number % len(own)]
        stream.wait_stream(torch.cuda.current_stream(DEVICE))
        with torch.cuda.stream(stream):
            if (number + dist.get_rank()) % 2:
                torch.cuda._sleep(2_000_000)
            part = torch.full((NUM_ELEMENTS,), float(number + dist.get_rank()), device=DEVICE)
            gathered = part.new_empty(NUM_ELEMENTS * dist.get_world_size())
            dist.all_gather_into_tensor(gathered, part)
            found.append(gathered.view(dist.get_world_size(), -1)[:, :: NUM_ELEMENTS // 4].clone())
    torch.cuda.synchronize(DEVICE)
    for number, rows in enumerate(found):
        for rank, row in enumerate(rows):
            assert bool((row == number + rank).all()), (number, rank)


def captured(replaced: collectives.ReplacedCollectives) -> None:
    """In a capture the library's collective is recorded."""
    tensor = torch.ones(NUM_ELEMENTS, device=DEVICE)
    before = replaced.num_by_copies
    dist.all_reduce(tensor)
    tensor.fill_(1)
    assert replaced.num_by_copies == before + 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(tensor)
    assert replaced.num_by_copies == before + 1
    graph.replay()
    torch.cuda.synchronize(DEVICE)
    assert bool((tensor == dist.get_world_size()).all())


def given_back() -> None:
    """What was recorded is not replayed at the same addresses after their memory went back to the driver and came again."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # addresses come again at once
    addresses, counts = set(), []
    for turn in range(2):
        torch.cuda.synchronize(DEVICE)
        torch.cuda.empty_cache()
        tensor = torch.empty(4 * NUM_ELEMENTS, device=DEVICE)
        addresses.add(tensor.data_ptr())
        for number in range(3 * NUM_IN_TURN):
            tensor.fill_(turn + number + dist.get_rank())
            dist.all_reduce(tensor)
            wanted = dist.get_world_size() * (turn + number + (dist.get_world_size() - 1) / 2)
            assert bool((tensor == wanted).all()), (turn, number)
            counts.append(sum(report.num_recordings for report in ops.pool_report()))
        del tensor
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    first, second = counts[: 3 * NUM_IN_TURN], counts[3 * NUM_IN_TURN :]
    assert first[-1] > first[0]
    assert len(addresses) == 2 or min(second) < first[-1]


def divisor() -> None:
    """A factor of the user's: NCCL's mean, times the ranks, divided by the factor, within rounding.

    Not NCCL's pre-multiplied sum, which FSDP2 asks for then: in torch 2.11 that is wrong for bfloat16, as torch hands NCCL
    the factor in single precision (pytorch/pytorch#190745).
    """
    factor = 7.0
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        results = []
        for is_ours in (False, True):
            torch.manual_seed(0)
            model = nn.Linear(1024, 1024, bias=False, device=DEVICE, dtype=dtype)
            fully_shard(model)
            in_use = None
            if is_ours:
                model.set_gradient_divide_factor(factor)
                in_use = fsdp2.use_copy_engines(model, least_part_bytes=0)
            torch.manual_seed(dist.get_rank())
            model(torch.randn(64, 1024, device=DEVICE, dtype=dtype)).float().pow(2).sum().backward()
            gradient = model.weight.grad.full_tensor().float()
            results.append(gradient if is_ours else gradient * (dist.get_world_size() / factor))
        assert in_use is not None
        assert in_use.num_by_library == 0
        largest = results[0].abs().max()
        torch.testing.assert_close(results[1] / largest, results[0] / largest, rtol=0, atol=limit)


def main() -> int:
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl", device_id=DEVICE)
    replaced = collectives.replace()
    for name, section in (
        ("overlapping", overlapping),
        ("streams", streams),
        ("captured", lambda: captured(replaced)),
        ("given_back", given_back),
        ("divisor", divisor),
    ):
        section()
        torch.cuda.synchronize(DEVICE)
        print(f"rank {dist.get_rank()}: {name}: ok", flush=True)
    print(replaced, flush=True)
    return 0


if __name__ == "__main__":
    code = main()
    wait_until_all_leave()
    sys.stdout.flush()
    os._exit(code)
