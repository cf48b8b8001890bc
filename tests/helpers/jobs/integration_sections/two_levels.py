"""Collectives of groups that span hosts: within a host by copies, between hosts by the library. Hosts are pretended."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from counterpoint import ops
from counterpoint.integrations import collectives, ddp, fsdp2
from counterpoint.machine import load_machine
from counterpoint.ops import peer_access, runtime
from integration_sections.bare_collectives import GATHER, REDUCE
from integration_sections.comparing import (
    DEVICE,
    ROUNDING,
    assert_close,
    assert_equal,
    everyones,
    refused,
    said_of,
    same_on_every_rank,
    without_memory_above,
)
from integration_sections.layered import deep_model, given_to, gradients

LAYOUTS = ("aabb", "abab", "abba")  # which host each rank is on
OF_EIGHT = ("aabbccdd", "abcdabcd", "ababbaba")
SIZES = (1, 127, 1000, 4097)


def layouts(most: int = 3) -> tuple[str, ...]:
    """The layouts of this job; of those of eight ranks at most so many, for they take long."""
    return LAYOUTS if dist.get_world_size() == 4 else OF_EIGHT[:most]


@contextmanager
def hosts(layout: str) -> Iterator[None]:
    """Ranks whose letters in the layout differ have different boot ids, as on different hosts."""
    ops.release()
    real = peer_access.BOOT_ID
    with TemporaryDirectory() as folder:
        peer_access.BOOT_ID = Path(folder) / "boot_id"
        peer_access.BOOT_ID.write_text(layout[dist.get_rank()])
        try:
            yield
        finally:
            ops.release()
            peer_access.BOOT_ID = real


def by_hosts(case: list[torch.Tensor], layout: str, divisor: int) -> torch.Tensor:
    """The sum over ranks, each host's in its order first, divided, and then between the hosts, each rounded to the type."""
    of_hosts = [
        torch.stack([case[rank] for rank in range(len(case)) if layout[rank] == host]) for host in sorted(set(layout))
    ]
    sums = [torch.sum(rows, 0, dtype=rows.dtype) / divisor for rows in of_hosts]
    while len(sums) > 1:
        sums = [sum(sums[2:], sums[0] + sums[1])]
    return sums[0]


def two_levels_give_the_sequential_results() -> None:
    """To the bit with two hosts, whose sum has one order; with more hosts for whole numbers; in parts, at once, twice."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for layout in layouts():
        with hosts(layout):
            replaced = collectives.replace(least_part_bytes=0, max_buffer_bytes=8192, across_hosts="always")
            num_calls = 0
            for dtype in ROUNDING:
                for size in SIZES:
                    case = everyones(size, dtype, size)
                    if len(set(layout)) > 2:
                        case = [(16 * each).round() for each in case]
                    for is_async in (False, True):
                        _check(case, layout, is_async=is_async)
                        num_calls += 5
            numbers = torch.full((4096,), rank, device=DEVICE)
            gathered = numbers.new_empty(num_ranks * 4096)
            getattr(dist, GATHER)(gathered, numbers)
            assert torch.equal(gathered, torch.arange(num_ranks, device=DEVICE).repeat_interleave(4096))
            tallies = replaced.tallies.values()
            assert sum(tally.num_in_two_levels for tally in tallies) == replaced.num_by_copies == num_calls + 1
            assert replaced.num_by_library == 0
            for tally in (each for each in tallies if each.num_by_copies):  # no all-to-all ran
                assert f"sent, {tally.num_by_copies} in two levels)" in str(replaced)
            replaced.undo()


def _check(case: list[torch.Tensor], layout: str, *, is_async: bool) -> None:
    """All begun before the first is waited for; the last two in place."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    given = case[rank]
    gathered, scattered = given.new_empty(num_ranks * len(given)), torch.empty_like(given)
    summed, mean, again = given.clone(), given.clone(), given.clone()
    blocks = torch.stack([given + number for number in range(num_ranks)])
    handles = [
        getattr(dist, GATHER)(gathered, given, async_op=is_async),
        dist.all_reduce(summed, async_op=is_async),
        dist.all_reduce(mean, op=dist.ReduceOp.AVG, async_op=is_async),
        getattr(dist, REDUCE)(scattered, blocks, async_op=is_async),
        dist.all_reduce(again, async_op=is_async),
    ]
    for handle in handles:
        assert (handle is not None) == is_async
        if is_async:
            handle.wait()
    assert torch.equal(gathered, torch.cat(case))
    assert torch.equal(summed, by_hosts(case, layout, 1))
    assert torch.equal(again, summed)
    assert torch.equal(mean, by_hosts(case, layout, num_ranks))
    assert torch.equal(scattered, by_hosts([each + rank for each in case], layout, 1))
    assert same_on_every_rank(mean)


def two_levels_of_some_ranks() -> None:
    """A group of some of the job's ranks, of which only these make groups; and one that takes a destroyed one's place."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    members = list(range(num_ranks - 4, num_ranks))
    case = everyones(1000, torch.float64, 3)
    with hosts("ab" * (num_ranks // 2)):
        replaced = collectives.replace(least_part_bytes=0, across_hosts="always")
        for turn in range(2):
            some = dist.new_group(members)
            if rank in members:
                whole = case[0].new_empty(4, 1000)
                with groups_made() as made:
                    for _ in range(2):
                        getattr(dist, GATHER)(whole, case[rank], group=some)
                assert torch.equal(whole, torch.stack(case[-4:]))
                assert replaced.num_by_copies == 2 * turn + 2
                assert [len(ranks) for ranks in made] == [2, 2]
                assert set(made[0]) & set(made[1]) == {rank}
                dist.destroy_process_group(some)
            ops.release()
        replaced.undo()
        _small_ones_make_no_groups(dist.new_group(members), case)


def _small_ones_make_no_groups(some: dist.ProcessGroup, case: list[torch.Tensor]) -> None:
    """Small is what a rank sends to another of its host: the parts of both hosts, 16,000 bytes."""
    if some is dist.GroupMember.NON_GROUP_MEMBER:
        return
    for least, num_made in ((16_001, 0), (16_000, 2)):
        replaced = collectives.replace(least_part_bytes=least, across_hosts="always")
        with groups_made() as made:
            getattr(dist, GATHER)(case[0].new_empty(4000), case[dist.get_rank()], group=some)
        assert len(made) == num_made
        assert replaced.num_by_copies == (num_made > 0)
        replaced.undo()
    dist.destroy_process_group(some)


@contextmanager
def groups_made() -> Iterator[list[list[int]]]:
    """The ranks of each group that is made meanwhile; none may split the communicator of the whole job, as NCCL does where
    the job is bound to a device.
    """
    real, made = distributed_c10d._new_process_group_helper, []
    everyone = distributed_c10d._get_default_group()
    bound = everyone.bound_device_id

    def helper(size: int, rank: int, ranks: list[int], *rest: object, **named: object) -> object:
        assert everyone.bound_device_id is None
        made.append(ranks)
        return real(size, rank, ranks, *rest, **named)

    distributed_c10d._new_process_group_helper = helper
    everyone.bound_device_id = torch.device("cuda", 0)
    try:
        yield made
        assert everyone.bound_device_id == torch.device("cuda", 0)
    finally:
        everyone.bound_device_id = bound
        distributed_c10d._new_process_group_helper = real


def two_levels_under_ddp() -> None:
    """Stock gradients within rounding, the same bits twice, in buckets of several parts; fp8 stays the library's."""
    given = given_to(dist.get_rank())
    wanted = gradients(DistributedDataParallel(deep_model()), given)
    for layout in layouts(1):
        for compression, limit in ((None, 1e-5), ("bf16", 2**-6)):
            with hosts(layout):
                model = DistributedDataParallel(deep_model(), bucket_cap_mb=0.003)
                averages = ddp.register(
                    model, least_part_bytes=0, max_buffer_bytes=4096, across_hosts="always", compression=compression
                )
                first, again = gradients(model, given), gradients(model, given)
                assert_close(first, wanted, limit)
                assert_equal(again, gradients(model, given))
                assert averages.num_by_copies > 2
                assert averages.num_by_library == 0
                assert f"{averages.num_by_copies} in two levels" in str(averages)
    with hosts(layouts()[0]):
        model = DistributedDataParallel(deep_model())
        averages = ddp.register(model, least_part_bytes=0, compression="fp8", across_hosts="always")
        assert_close(gradients(model, given), wanted, 1e-6)
        assert averages.num_by_copies == 0
        assert "fp8 is summed within one host only" in str(averages)


def two_levels_under_fsdp2() -> None:
    """Gradients and trained parameters are stock FSDP2's; the same bits twice; gathered parameters are exact."""
    given = given_to(dist.get_rank())
    for options in (
        {},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        {"reshard_after_forward": dist.get_world_size() // 2},
    ):
        wanted = _trained(options, given, None)
        for layout in layouts(1):
            with hosts(layout):
                found = _trained(options, given, "always")
                assert_close(found, wanted, 1e-5)
                assert_equal(found, _trained(options, given, "always"))
    with hosts(layouts()[0]):  # gathers alone keep every bit
        assert_equal(_trained({}, given, "always", reduces=False), _trained({}, given, None))


def _trained(options: dict[str, object], given: torch.Tensor, across_hosts: str | None, *, reduces: bool = True) -> list:
    model = deep_model()
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    in_use = None
    if across_hosts is not None:
        in_use = fsdp2.use_copy_engines(model, least_part_bytes=0, across_hosts=across_hosts)
        in_use.use(gathers=True, reduces=reduces)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        found += gradients(model, given)
        optimizer.step()
    found += [parameter.full_tensor() for parameter in model.parameters()]
    if in_use is not None:
        assert sum(tally.num_in_two_levels for tally in in_use.gather_tallies) > 6
        assert (sum(tally.num_in_two_levels for tally in in_use.reduce_tallies) > 6) == reduces
        assert (in_use.num_by_library == 0) == reduces or "reshard_after_forward" in options  # to groups of other hosts
        in_use.undo()
    return found


def two_levels_left_to_the_library() -> None:
    """Groups that cannot be split, or are not to be, with the reason, said once; and the library's results."""
    rest, half = "a" * (dist.get_world_size() - 4), dist.get_world_size() // 2
    in_halves = "a" * half + "b" * half
    for layout, across_hosts, reason in (
        (rest + "aaab", "always", f"its 2 hosts have unequal numbers of ranks, from 1 to {len(rest) + 3}"),
        ("abcdefgh", "always", "hosts has one rank, so nothing stays within a host"),
        (in_halves, "never", "the group spans 2 hosts, but copy engines reach only peers"),
        *([(in_halves, "auto", "no shipped machine describes its CPUs")] if DEVICE.type == "cpu" else []),
        *([("aabcbdcd", "always", "its ranks are on 4 hosts in no regular order")] if rest else []),
    ):
        with hosts(layout):
            said = said_of(lambda choice=across_hosts, reason=reason: _left_alone(choice, reason))
            assert len([line for line in said if reason in line]) == (3 if dist.get_rank() == 0 else 0), said
    refused(lambda: collectives.replace(across_hosts="yes"), "across_hosts must be 'auto', 'always' or 'never'; found 'yes'")


def _left_alone(across_hosts: str, reason: str) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    replaced = collectives.replace(least_part_bytes=0, across_hosts=across_hosts)
    case = [(8 * each).round() for each in everyones(1000, torch.float32, 4)]
    for _ in range(2):
        gathered, summed, scattered = case[0].new_empty(1000 * num_ranks), case[rank].clone(), torch.empty_like(case[0])
        getattr(dist, GATHER)(gathered, case[rank])
        dist.all_reduce(summed)
        getattr(dist, REDUCE)(scattered, case[rank].repeat(num_ranks))
        assert torch.equal(gathered, torch.cat(case))
        assert torch.equal(summed, torch.stack(case).sum(0))
        assert torch.equal(scattered, summed)
    assert (replaced.num_by_copies, replaced.num_by_library) == (0, 6)
    assert reason in str(replaced)
    replaced.undo()


def two_levels_where_the_estimate_says_so() -> None:
    """For each message by itself: on H200s, two hosts gather in two levels and do not scatter so."""
    real = runtime._machine_of
    runtime._machine_of = lambda device: (load_machine("h200"), "h200")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    try:
        with hosts("a" * (num_ranks // 2) + "b" * (num_ranks // 2)):
            replaced = collectives.replace(least_part_bytes=0)
            case = everyones(1000, torch.float32, 4)
            gathered, scattered = case[0].new_empty(1000 * num_ranks), torch.empty_like(case[0])
            getattr(dist, GATHER)(gathered, case[rank])
            getattr(dist, REDUCE)(scattered, case[rank].repeat(num_ranks))
            assert torch.equal(gathered, torch.cat(case))
            assert_close([scattered], [torch.stack(case).sum(0)], 1e-5)
            assert replaced.tallies["all_gather"].num_in_two_levels == 1
            assert replaced.tallies["reduce_scatter"].num_by_copies == 0
            assert f"on 2 hosts of {num_ranks // 2} ranks NCCL is faster than two levels, by estimate" in str(replaced)
            replaced.undo()
    finally:
        runtime._machine_of = real


def two_levels_without_memory() -> None:
    """One rank of one host has no memory in mid-job: all hosts go on with the library. Who uses the same lanes later finds
    them alike on all hosts.
    """
    layout, last = layouts()[0], dist.get_world_size() - 1
    with hosts(layout):
        replaced = collectives.replace(least_part_bytes=0, across_hosts="always")
        rank = dist.get_rank()
        small, large = everyones(1000, torch.float32, 5), everyones(200_000, torch.float32, 6)

        def work(cases: tuple[list[torch.Tensor], ...] = (small, large, small)) -> None:
            for case in cases:
                summed = case[rank].clone()
                dist.all_reduce(summed)
                assert_close([summed], [torch.stack(case).sum(0)], 1e-5)

        with without_memory_above(65536, on_rank=last):
            said = said_of(work)
        assert [f"Rank {last - 1} of the group: on its host, " in line for line in said] == [True] * (rank == 0), said
        assert (replaced.num_by_copies, replaced.num_by_library) == (1, 2)
        replaced.undo()
        again = collectives.replace(least_part_bytes=0, across_hosts="always")
        work((small,) * 4)
        assert (again.num_by_copies, again.num_by_library) == (4, 0)
        again.undo()
