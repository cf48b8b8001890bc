"""Collectives that a job calls itself, by copies in place of the library's: results, handles, and what is left alone."""

import functools
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from counterpoint import ops
from counterpoint.integrations import collectives, ddp
from counterpoint.integrations.paths import WORDS
from counterpoint.ops.collectives import library_all_gather, library_all_to_all, library_reduce_scatter
from integration_sections.comparing import (
    DEVICE,
    ROUNDING,
    assert_close,
    assert_equal,
    everyones,
    refused,
    said_of,
    without_memory_above,
)
from integration_sections.layered import deep_model, given_to, gradients

SIZES = (1, 127, 128, 1000, 4097, 30_001)
GATHER = "all_gather_single" if "all_gather_single" in dir(dist) else "all_gather_into_tensor"
REDUCE = GATHER.replace("all_gather", "reduce_scatter").replace("into_", "")
NAMES = (GATHER, REDUCE, "all_reduce", "all_to_all_single")


def bare_collectives_give_the_librarys_results() -> None:
    """Any size and type, in parts, at once and asynchronously, the same bits twice; undone, the library's again."""
    known = [getattr(module, name) for module in (dist, distributed_c10d) for name in NAMES]
    replaced = collectives.replace(least_part_bytes=0, max_buffer_bytes=32768)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for is_async in (False, True):
        for dtype, limit in ROUNDING.items():
            cases = [everyones(size, dtype, size) for size in SIZES]
            first, again = (_everything(cases, is_async=is_async) for _ in range(2))
            assert_equal(first, again)
            for number, case in enumerate(cases):
                gathered, summed, mean, scattered, exchanged = first[5 * number : 5 * number + 5]
                assert torch.equal(gathered, torch.cat(case))
                total = torch.stack(case).double().sum(0)
                assert_close([summed, mean], [total, total / num_ranks], 3 * limit)
                whole = total.repeat(num_ranks).chunk(num_ranks)[rank]
                assert_close([scattered], [whole], 3 * limit)
                assert torch.equal(exchanged, torch.stack([_blocks_of(each)[rank] for each in case]))
    assert replaced.num_by_copies == 2 * len(ROUNDING) * 2 * 5 * len(SIZES)
    assert replaced.num_by_library == 0
    assert replaced.num_bytes > 0
    for kind, tally in replaced.tallies.items():
        assert f"one of the job's own {WORDS[kind]}: {tally.num_by_copies} times by copies" in str(replaced)
    refused(collectives.replace, "collectives.replace\\(\\) has already replaced torch's functions")
    replaced.undo()
    assert known == [getattr(module, name) for module in (dist, distributed_c10d) for name in NAMES]
    refused(lambda: replaced.use(True), "restored the library's functions")


def _everything(cases: list[list[torch.Tensor]], *, is_async: bool) -> list[torch.Tensor]:
    """Of each case the gathered, the sum, the mean, the scattered sum and the exchanged blocks; all begun before the first
    is waited for.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    results, handles = [], []
    for case in cases:
        given = case[rank]
        gathered, scattered = given.new_empty(num_ranks * len(given)), torch.empty_like(given)
        summed, mean = given.clone(), given.clone()
        exchanged = torch.empty_like(_blocks_of(given))
        handles += [
            getattr(dist, GATHER)(gathered, given, async_op=is_async),
            distributed_c10d.all_reduce(summed, async_op=is_async),
            dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=dist.group.WORLD, async_op=is_async),
            getattr(distributed_c10d, REDUCE)(scattered, given.repeat(num_ranks), async_op=is_async),
            dist.all_to_all_single(exchanged, _blocks_of(given), async_op=is_async),
        ]
        results += [gathered, summed, mean, scattered, exchanged]
    for handle in handles:
        assert (handle is not None) == is_async
        if is_async:
            handle.wait()
    return results


def _blocks_of(given: torch.Tensor) -> torch.Tensor:
    """A row for every rank, each other than the rest."""
    return torch.stack([given.roll(peer) for peer in range(dist.get_world_size())])


def bare_collectives_repeated() -> None:
    """Calls at the same addresses, which GPUs record and replay, with other numbers each time; a lane gets more memory."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    replaced = collectives.replace(least_part_bytes=0, in_flight=2)
    given = {dtype: torch.empty(4097, dtype=dtype, device=DEVICE) for dtype in (torch.float32, torch.bfloat16)}
    gathered = {dtype: part.new_empty(num_ranks, len(part)) for dtype, part in given.items()}
    exchanged = {dtype: torch.empty_like(whole) for dtype, whole in gathered.items()}
    for turn in range(14):
        for dtype, part in given.items():
            case = everyones(len(part), dtype, turn)
            total = torch.stack(case).double().sum(0)
            part.copy_(case[rank])
            getattr(dist, GATHER)(gathered[dtype], part)
            assert torch.equal(gathered[dtype], torch.stack(case)), (turn, dtype)
            for op, wanted in ((dist.ReduceOp.SUM, total), (dist.ReduceOp.AVG, total / num_ranks)):
                part.copy_(case[rank])
                dist.all_reduce(part, op=op)
                assert_close([part], [wanted], 3 * ROUNDING[dtype])
            gathered[dtype].copy_(case[rank].expand_as(gathered[dtype]))
            getattr(dist, REDUCE)(part, gathered[dtype])
            assert_close([part], [total], 3 * ROUNDING[dtype])
            exchanged[dtype].copy_(_blocks_of(case[rank]))
            dist.all_to_all_single(gathered[dtype], exchanged[dtype])
            assert torch.equal(gathered[dtype], torch.stack([_blocks_of(each)[rank] for each in case]))
        if turn == 7:
            num_before = _num_recordings()
            assert (num_before > 0) == (DEVICE.type == "cuda")
            dist.all_reduce(torch.ones(80_000, device=DEVICE))  # more memory in one lane, whose recordings are out of date
            assert _num_recordings() < num_before or not num_before
    replaced.undo()


def _num_recordings() -> int:
    return sum(entry.num_recordings for entry in ops.pool_report())


def bare_collectives_in_place() -> None:
    """A rank's part that lies in the result already, a futures' value as the library gives it, and groups of some ranks."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    replaced = collectives.replace(least_part_bytes=0, max_buffer_bytes=8192)
    case = everyones(3000, torch.float32, 1)
    whole = torch.zeros(num_ranks, 3000, device=DEVICE)
    whole[rank] = case[rank]
    getattr(dist, GATHER)(whole, whole[rank])
    assert torch.equal(whole, torch.stack(case))
    given = torch.stack(case) * (rank + 1)
    getattr(dist, REDUCE)(given[rank], given)
    assert_close([given[rank]], [case[rank] * (num_ranks * (num_ranks + 1) / 2)], 1e-5)
    summed = case[rank].clone()
    future = dist.all_reduce(summed, async_op=True).get_future().then(lambda done: done.value()[0])
    assert_close([future.wait()], [torch.stack(case).sum(0)], 1e-5)
    halves = [dist.new_group(list(range(half, num_ranks, 2))) for half in range(2)]
    mine = halves[rank % 2]
    if mine.size() > 1:
        before = replaced.num_by_copies
        partial = case[rank].clone()
        dist.all_reduce(partial, group=mine)
        assert_close([partial], [sum(case[rank % 2 :: 2])], 1e-5)
        assert replaced.num_by_copies == before + 1
    replaced.undo()
    for half in halves:
        if half is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(half)


def bare_collectives_answer_as_the_librarys() -> None:
    """Handles answer what the library's do, and autograd takes a result for a tensor that did not change, as there."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    replaced = collectives.replace(least_part_bytes=0)
    case = everyones(3000, torch.float32, 1)
    summed = case[rank].clone()
    handle = dist.all_reduce(summed, async_op=True)
    assert handle.wait(timedelta(seconds=60))
    assert handle.is_completed()
    assert handle.wait()
    (result,) = handle.result()
    assert_close([summed, result], [torch.stack(case).sum(0)] * 2, 1e-5)
    weight = torch.nn.Parameter(case[rank] / 10)
    outputs = weight.exp()  # which autograd saves
    partial = outputs * 1
    gathered = outputs.new_empty(num_ranks * 3000)
    versions = [each._version for each in (outputs, gathered, partial)]
    dist.all_reduce(outputs)
    getattr(dist, GATHER)(gathered, partial)
    assert [each._version for each in (outputs, gathered, partial)] == versions
    outputs.sum().backward()
    assert_close([weight.grad], [outputs.detach()], 1e-6)
    assert replaced.num_by_library == 0
    replaced.undo()


def bare_collectives_left_to_the_library() -> None:
    """What copies do not serve is the library's, with its results and its errors, and each reason is said once."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    said = said_of(lambda: _left_alone(rank, num_ranks))
    for words in ("no sum or mean", "less than 1 KiB", "not plain and contiguous", "differ in type", "no other rank"):
        assert len([line for line in said if words in line]) <= 1, said
    assert any("no sum or mean" in line for line in said) == (rank == 0), said


def _left_alone(rank: int, num_ranks: int) -> None:
    replaced = collectives.replace(least_part_bytes=1024)
    largest = torch.full((4096,), float(rank), device=DEVICE)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    assert torch.equal(largest, torch.full_like(largest, num_ranks - 1.0))
    numbers = torch.full((4096,), rank, device=DEVICE)
    dist.all_reduce(numbers)
    assert torch.equal(numbers, torch.full_like(numbers, num_ranks * (num_ranks - 1) // 2))
    small = torch.ones(3, device=DEVICE)
    dist.all_reduce(small)
    assert torch.equal(small, torch.full_like(small, float(num_ranks)))
    wanted = torch.empty(4096 * num_ranks, dtype=torch.int64, device=DEVICE)
    library_all_gather(wanted, numbers + rank)
    found = torch.empty_like(wanted)
    getattr(dist, GATHER)(found, numbers + rank)  # a gathering takes any type
    assert torch.equal(found, wanted)
    assert (replaced.num_by_library, replaced.num_by_copies) == (3, 1)
    replaced.use(False)
    scattered, plain = torch.empty(4096, device=DEVICE), torch.empty(4096, device=DEVICE)
    given = everyones(4096 * num_ranks, torch.float32, 3)[rank]
    getattr(dist, REDUCE)(scattered, given)
    library_reduce_scatter(plain, given)
    assert torch.equal(scattered, plain)
    assert replaced.num_by_copies == 1
    assert "switched off" in str(replaced)
    replaced.use(True)
    dist.all_reduce(scattered)
    assert replaced.num_by_copies == 2
    refused(lambda: replaced.use(True, "all_reduce"), "kinds takes a list of kinds, .* found 'all_reduce'")
    refused(lambda: replaced.use(True, ["broadcast"]), "found .'broadcast'.")
    _all_to_alls_left_alone(replaced, rank, num_ranks)
    replaced.undo()
    refused(lambda: collectives.replace([None]), "groups must be process groups")
    refused(lambda: collectives.replace(dist.group.WORLD), "list of process groups; found one of type ProcessGroup")
    refused(lambda: collectives.replace([]), "groups is empty")
    refused(lambda: collectives.replace(in_flight=0), "in_flight")
    refused(lambda: collectives.replace(in_flight=True), "in_flight must be from 1 to .* found True")
    refused(lambda: collectives.replace(least_part_bytes=False), "least_part_bytes must be a whole number, .* found False")
    refused(lambda: collectives.replace(is_on="yes"), "is_on must be True or False; found 'yes'")


def _all_to_alls_left_alone(replaced: collectives.ReplacedCollectives, rank: int, num_ranks: int) -> None:
    """Those whose call gives sizes, even ones too and of any type, and those of parts that differ in size. Shapes, in which
    ranks may differ, decide nothing.
    """
    before, given = replaced.num_by_copies, torch.arange(4096 * num_ranks, device=DEVICE) + rank
    whole = [4096] * num_ranks
    wanted, found = torch.empty_like(given), torch.empty_like(given)
    library_all_to_all(wanted, given)
    for sizes in (whole, np.array(whole)):
        dist.all_to_all_single(found.zero_(), given, sizes, sizes)
        assert torch.equal(found, wanted)
    conjugated = given.to(torch.complex64).conj()
    with pytest.raises(RuntimeError, match="view_as_real"):
        dist.all_to_all_single(torch.empty_like(conjugated), conjugated)
    sent = [1024 * (rank + peer + 1) for peer in range(num_ranks)]  # as much in both directions of a pair
    several = torch.full((sum(sent),), rank, device=DEVICE)
    returned = torch.empty_like(several)
    dist.all_to_all_single(returned, several, output_split_sizes=sent, input_split_sizes=sent)
    assert torch.equal(returned, torch.repeat_interleave(torch.arange(num_ranks), torch.tensor(sent)).to(DEVICE))
    assert replaced.num_by_copies == before
    for sizes in (None, [], ()):
        dist.all_to_all_single(found.zero_(), given.view(1, -1) if rank else given, sizes, sizes)
        assert torch.equal(found, wanted)
    assert replaced.num_by_copies == before + 3


def bare_collectives_leave_ddp_alone() -> None:
    """DDP's buckets have a switch of their own: switched off they are the library's, to the bit."""
    given = given_to(dist.get_rank())
    bare = gradients(DistributedDataParallel(deep_model()), given)
    replaced = collectives.replace(least_part_bytes=0)
    model = DistributedDataParallel(deep_model())
    averages = ddp.register(model, is_on=False)
    assert_equal(gradients(model, given), bare)
    assert replaced.num_by_copies == 0
    assert averages.num_by_library == 1
    replaced.undo()


def bare_collectives_by_other_references() -> None:
    """References from before, wrappers around torch's functions and wrappers put on later all come to the replacement."""
    kept, patched = dist.all_reduce, distributed_c10d.all_to_all_single
    calls = []

    @functools.wraps(patched)
    def counting(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        return patched(*arguments, **named)

    distributed_c10d.all_to_all_single = counting
    replaced = collectives.replace(least_part_bytes=0)
    summed = torch.ones(1000, device=DEVICE)
    kept(summed)
    assert torch.equal(summed, torch.full_like(summed, dist.get_world_size()))
    given = torch.ones(1024 * dist.get_world_size(), device=DEVICE)
    for function in (counting, dist.all_to_all_single):
        function(torch.empty_like(given), given)
    assert (replaced.num_by_copies, calls) == (3, [1])
    assert kept is dist.all_reduce
    replaced.undo()
    kept(summed)
    distributed_c10d.all_to_all_single = patched
    with patch.object(distributed_c10d, "all_reduce", lambda _: None):  # nothing of torch's in it
        replaced = collectives.replace(least_part_bytes=0)
        distributed_c10d.all_reduce(summed)
        kept(summed)
        assert replaced.num_by_copies == 0
        replaced.undo()


def bare_collectives_coalesced() -> None:
    """Of coalesced collectives, copies do the large ones when the block ends, and the library the others."""
    coalescing, rank, num_ranks = distributed_c10d._coalescing_manager, dist.get_rank(), dist.get_world_size()
    replaced = collectives.replace(least_part_bytes=1024)
    lengths = (4096, 8, 1024)  # two are large
    cases = [everyones(length * num_ranks, torch.float32, seed) for seed, length in enumerate(lengths)]
    for is_async in (False, True):
        before = replaced.num_by_copies, replaced.num_by_library
        summed = [case[rank].clone() for case in cases]
        with coalescing(async_ops=is_async) as manager:
            for each in summed:
                dist.all_reduce(each)
        scattered = [case[rank].clone() for case in cases]
        with coalescing(dist.group.WORLD, async_ops=is_async) as second:
            for each, length in zip(
                scattered, lengths, strict=True
            ):  # in place, as Megatron-LM's distributed optimizer does
                getattr(dist, REDUCE)(
                    each[rank * length :][:length], each, op=dist.ReduceOp.AVG if is_async else dist.ReduceOp.SUM
                )
        if is_async:
            manager.wait()
            second.wait()
        for case, whole, part, length in zip(cases, summed, scattered, lengths, strict=True):
            wanted = torch.stack(case).sum(0)
            assert_close([whole], [wanted], 1e-5)
            assert_close(
                [part[rank * length :][:length]], [wanted[rank * length :][:length] / (num_ranks if is_async else 1)], 1e-5
            )
        gathered = [torch.empty_like(case[rank]) for case in cases]
        with coalescing(async_ops=is_async) as manager:
            for whole, part, length in zip(gathered, summed, lengths, strict=True):
                getattr(dist, GATHER)(whole, part[rank * length :][:length])
        manager.wait()
        assert_equal(gathered, summed)
        assert (replaced.num_by_copies, replaced.num_by_library) == (before[0] + 6, before[1] + 3)
        replaced.use(True)
    with pytest.raises(KeyError), coalescing():
        raise KeyError  # as without us, the block's end is left out
    distributed_c10d._world.pg_coalesce_state.clear()
    replaced.use(False)
    with coalescing():
        dist.all_reduce(summed[0])
    assert replaced.num_by_copies == 12
    replaced.undo()


def bare_collectives_compiled() -> None:
    """Compiled code keeps the library's functional collectives."""
    replaced = collectives.replace(least_part_bytes=0)

    def work(tensor: torch.Tensor) -> torch.Tensor:
        doubled = tensor * 2
        dist.all_reduce(doubled)
        return doubled + 1

    compiled = torch.compile(work, backend="aot_eager", fullgraph=True)
    given = torch.ones(1000, device=DEVICE)
    assert torch.equal(compiled(given), torch.full_like(given, 2.0 * dist.get_world_size() + 1))
    assert replaced.num_by_copies == 0
    assert torch.equal(work(given), compiled(given))
    assert replaced.num_by_copies == 1
    replaced.undo()


def bare_collectives_without_memory() -> None:
    """One rank has no memory in mid-job: all go on with the library, and say so once of each kind of collective."""
    ops.release()
    replaced = collectives.replace(least_part_bytes=0)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    small, large = everyones(1000, torch.float32, 5), everyones(200_000, torch.float32, 6)

    def work() -> None:
        for case in (small, large, small, large):
            summed = case[rank].clone()
            dist.all_reduce(summed)
            assert_close([summed], [torch.stack(case).sum(0)], 1e-5)
        gathered = large[0].new_empty(num_ranks * 200_000)
        getattr(dist, GATHER)(gathered, large[rank], async_op=True).wait()
        assert torch.equal(gathered, torch.cat(large))

    with without_memory_above(8192, on_rank=num_ranks - 1):
        said = said_of(work)
    kinds = ["all-reduces", "all-gathers"] if rank == 0 else []
    assert [line.partition(", not copies: Rank")[0].split()[-1] for line in said] == kinds, said
    assert all(f"Rank {num_ranks - 1} of the group" in line for line in said)
    assert (replaced.num_by_copies, replaced.num_by_library) == (1, 4)
    replaced.undo()
    ops.release()
