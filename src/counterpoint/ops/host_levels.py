"""Splits a group that spans hosts into two levels: the ranks of one host, whose copy engines reach each other, and the ranks
that have the same place on every host, among which the library communicates.

A rank's lanes belong to the inner level. Between hosts each part travels once, from its own rank, so all ranks of a host
share the network ports. Both levels keep the group's order of ranks: the ranks of one place are at equal distances in it,
whether hosts hold neighboring ranks or take turns. Hosts with unequal numbers of ranks, or in no regular order, are left to
the library.

Groups of both levels are made lazily, by the ranks of the given group alone. `dist.new_group` would need every rank of the
job, or would name groups by how many each rank belongs to, which may differ. So torch's own function under it is called,
with a name of ours. Its signature is the same in torch 2.11 to 2.13.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from itertools import pairwise
from typing import final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from counterpoint.errors import RefusedTogetherError
from counterpoint.ops.agreement import CallNotice
from counterpoint.ops.collectives import (
    is_of_lost_rank,
    library_all_gather,
    library_all_reduce,
    library_reduce_scatter,
)
from counterpoint.ops.graph_cache import refuse_in_capture
from counterpoint.ops.lane import AbstractLane
from counterpoint.ops.runtime import Runtime, runtime_of

LOST_ACROSS = "a rank of the group did not exchange its blocks in time, or ended"


@final
class HostLevels:
    """Both levels of a group, as one of its ranks sees them; on one host the inner level is the group itself.

    `places` are the group's ranks that have each place on their hosts, in the order of the group.
    """

    def __init__(self, runtime: Runtime, places: Sequence[range], levels: Sequence[dist.ProcessGroup]) -> None:
        self.group, self._device = runtime.group, runtime.device
        self.within, *across = levels
        self._across = across[0] if across else None
        self._places = places
        self.num_hosts = len(places[0])

    def of_place(self, place: int, parts: torch.Tensor) -> torch.Tensor:
        """Return the parts, one for each rank of the group, of the ranks with this place on their hosts."""
        ranks = self._places[place]
        return parts[ranks.start : ranks.stop : ranks.step]

    def gather(self, gathered: torch.Tensor, given: torch.Tensor) -> None:
        """Fill `gathered` (flat) with what the ranks of this place give, in order; for several hosts only."""
        self._by_library(library_all_gather, gathered.view(torch.uint8), given.view(torch.uint8), group=self._across)

    def reduce_scatter(self, output: torch.Tensor, given: torch.Tensor) -> None:
        """Sum what the ranks of this place give, and fill `output` with this rank's block of it; for several hosts only."""
        self._by_library(library_reduce_scatter, output, given, group=self._across)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace the tensor by the sum over the ranks of this place; on one host it is that sum."""
        if self._across is not None and tensor.numel():
            self._by_library(library_all_reduce, tensor, group=self._across)

    def reserve(self, lane: AbstractLane, num_bytes: int, *, is_shared_only: bool = False) -> None:
        """Reserve a lane's memory for blocks of this many bytes, or for a shared part alone, on all ranks of the group, or
        raise `RefusedTogetherError` on all.
        """
        if num_bytes > lane.block_bytes:
            try:
                self.on_all_hosts(
                    f"blocks of {num_bytes} bytes", lambda: lane.reserve(num_bytes, is_shared_only=is_shared_only)
                )
            except RefusedTogetherError:
                lane.discard()  # hosts that had memory, too: whoever uses this lane next must find the same on all of them
                raise

    def on_all_hosts(self, what: str, act: Callable[[], object]) -> None:
        """Do what the ranks of a host do together, on all hosts; if those of one host refuse, raise `RefusedTogetherError`
        on all ranks.
        """
        if self._across is None:
            act()
            return
        problem = ""
        try:
            act()
        except RefusedTogetherError as refusal:
            problem = f"on its host, {str(refusal).partition(': ')[2] or refusal}"
        num_refusals = torch.tensor([len(problem) > 0], dtype=torch.int32, device=self._device)
        self._by_library(library_all_reduce, num_refusals, group=self.group)  # cheaper than the store
        if num_refusals.item():
            self._runtime().agreement.compare(CallNotice(request=what, problem=problem))

    def _by_library(
        self, collective: Callable[..., object], first: torch.Tensor, *others: torch.Tensor, group: dist.ProcessGroup | None
    ) -> None:
        """Run a collective of the library; on CPUs, a missing rank becomes a one-line error."""
        try:
            collective(first, *others, group=group)
        except RuntimeError as problem:
            if not is_of_lost_rank(problem, first):
                raise
            raise self._runtime().agreement.give_up(LOST_ACROSS) from problem

    def _runtime(self) -> Runtime:
        return runtime_of(self.group.group_name, self._device)


def places_of(hosts: Sequence[str]) -> tuple[range, ...] | str:
    """Return for each place on a host the ranks that have it, given every rank's host; or why there are no two levels."""
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    sizes = sorted({len(ranks) for ranks in members.values()})
    if len(sizes) > 1:
        return f"its {len(members)} hosts have unequal numbers of ranks, from {sizes[0]} to {sizes[-1]}"
    if sizes == [1]:
        return f"each of its {len(members)} hosts has one rank, so nothing stays within a host"
    found = []
    for place in zip(*members.values(), strict=True):
        ranks = sorted(place)
        step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        if any(later - earlier != step for earlier, later in pairwise(ranks)):
            return f"its ranks are on {len(members)} hosts in no regular order"
        found.append(range(ranks[0], ranks[-1] + 1, step))
    return tuple(found)


def one_level(runtime: Runtime) -> HostLevels:
    """Return a group on one host as levels: every rank has a place of its own, and nothing leaves the host."""
    return HostLevels(runtime, [range(rank, rank + 1) for rank in range(runtime.group.size())], [runtime.group])


def two_levels(runtime: Runtime, places: Sequence[range]) -> HostLevels:
    """Return both levels of a group; made by all of its ranks together at the first call, and kept."""
    splits = _known_splits().setdefault(runtime.group.group_name, [])
    hosts = [location.host for location in runtime.locations]
    own = runtime.group.rank()
    for group, known_hosts, known in splits:
        if group is runtime.group and known_hosts == hosts:  # a group may be destroyed and another one may get its name
            return HostLevels(runtime, places, known)
    refuse_in_capture("Splitting a group between hosts", runtime.device)
    members = {
        "within a host": [rank for rank, host in enumerate(hosts) if host == hosts[own]],
        "across hosts": next(ranks for ranks in places if own in ranks),
    }
    made = [_group_of(runtime, ranks, f"{level}, {len(splits)}") for level, ranks in members.items()]
    splits.append((runtime.group, hosts, made))
    levels = HostLevels(runtime, places, made)
    levels.all_reduce(torch.zeros(1, device=runtime.device))  # NCCL connects the hosts now, while none of our copies waits
    return levels


@cache
def _known_splits() -> dict[str, list[tuple[dist.ProcessGroup, list[str], list[dist.ProcessGroup]]]]:
    """Return the split groups of this process by name: each one's hosts by rank, and its inner and outer group."""
    return {}


def _group_of(runtime: Runtime, ranks: Sequence[int], level: str) -> dist.ProcessGroup:
    """Make a group of these ranks of the runtime's group; they alone take part."""
    parent = runtime.group
    in_job = [dist.get_global_rank(parent, rank) for rank in ranks]
    config = distributed_c10d.BackendConfig(distributed_c10d.Backend(dist.get_backend_config(parent)))
    everyone = distributed_c10d._get_default_group()
    bound = everyone.bound_device_id
    everyone.bound_device_id = None  # or NCCL would split the communicator of the job, which needs all of its ranks
    try:
        made, _ = distributed_c10d._new_process_group_helper(
            len(ranks),
            ranks.index(parent.rank()),
            in_job,
            config.get_device_backend_map()[runtime.device.type],
            distributed_c10d._get_process_group_store(parent),
            f"counterpoint of {parent.group_name} from rank {in_job[0]}, {level}",  # the same on all of these ranks
            timeout=timedelta(seconds=runtime.agreement.limit_s),
            group_desc=f"counterpoint, {level}",
        )
    finally:
        everyone.bound_device_id = bound
    distributed_c10d._world.pg_group_ranks[made] = {rank: number for number, rank in enumerate(in_job)}
    return made
