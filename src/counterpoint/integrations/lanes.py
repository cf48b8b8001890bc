"""The lanes of one group for one purpose, and what becomes of a group that spans hosts.

Copy engines reach peers on the same host only. A group of several hosts can be split into two levels (`ops/host_levels.py`):
lanes within each host, the library between hosts. Both levels follow one another, so whether that pays depends on the
message, the machine and the number of hosts. `across_hosts` chooses: "auto" asks the cluster estimate for each message
(docs/scale.md), "always" splits whatever can be split, "never" leaves such groups to the library. Two levels have not
run on several real hosts.
"""

from functools import cache, lru_cache
from typing import Literal, final, get_args

import torch
import torch.distributed as dist

from counterpoint.errors import IntegrationError, MachineError, RefusedTogetherError
from counterpoint.integrations.lane_collectives import CollectiveCounts
from counterpoint.machine import machine_names
from counterpoint.ops.agreement import CallNotice
from counterpoint.ops.host_levels import HostLevels, one_level, places_of, two_levels
from counterpoint.ops.lane import AbstractLane
from counterpoint.ops.peer_access import obstacle_across
from counterpoint.ops.runtime import Runtime, all_runtimes, runtime_of
from counterpoint.sim.calibration import load_calibration
from counterpoint.sim.collective_times import CollectiveTimes, RankGroup
from counterpoint.sim.network import Cluster
from counterpoint.step import CollectiveKind
from counterpoint.value import require

AcrossHosts = Literal["auto", "always", "never"]
NO_ESTIMATE = "so no estimate says whether two levels pay"


@final
class Lanes:
    """The lanes of one group for one purpose, used in turn. All ranks ask for them in the same order.

    All ranks create them together, when `obstacle` is first read. Lanes for shared parts alone take less memory.
    """

    def __init__(
        self,
        place: tuple[dist.ProcessGroup, torch.device, str],
        num_lanes: int,
        across_hosts: AcrossHosts = "never",
        *,
        is_shared_only: bool = False,
    ) -> None:
        self._is_shared_only = is_shared_only
        self.group, self.device, self._purpose = place
        self._num_lanes, self._across_hosts = num_lanes, across_hosts
        self._next = 0
        self._obstacle: str | None = None
        self._places: tuple[range, ...] | str | None = None
        self._levels: HostLevels | None = None
        self._opened: Runtime | None = None  # that holds the lanes
        self._machines: tuple[str, ...] = ()

    def prepare(self) -> None:
        """Create the lanes, unless it depends on each collective whether any are needed."""
        if self._across_hosts != "auto" or self.num_hosts == 1:
            _ = self.obstacle

    @property
    def num_hosts(self) -> int:
        """The number of hosts between which collectives can be split; 1 if they are not split. Lanes are not created yet."""
        places = self._split()
        return 1 if isinstance(places, str) or not places else len(places[0])

    def obstacle_to(self, kind: CollectiveKind, num_bytes: int) -> str:
        """Return why the library should do this collective of `num_bytes`, as nccl-tests counts them; or nothing.

        A group that is split gets its lanes when `obstacle` is read afterwards.
        """
        places = self._split()
        if self._obstacle or isinstance(places, str) or not places:
            return self.obstacle
        if kind == "all_to_all":
            return "its group spans hosts, and no all-to-all is split between them"
        if self._across_hosts == "always":
            return ""
        return obstacle_by_estimate(self._machines, len(places[0]), len(places), (kind, num_bytes))

    def leave_to_library(self, tally: CollectiveCounts, part_bytes: int, obstacle: str) -> bool:
        """Return whether the library should do a collective with this many bytes from each rank; if so, count it.

        `obstacle` is what `obstacle_to` returned. Lanes are not created for small collectives.
        """
        return tally.is_librarys(part_bytes, obstacle) or tally.is_librarys(part_bytes, self.obstacle)

    @property
    def obstacle(self) -> str:
        """Why there are no lanes, or nothing."""
        places = self._split()
        is_released = self._obstacle == "" and self._opened not in all_runtimes()  # by ops.release()
        if self._obstacle is None or is_released:
            self._obstacle = places if isinstance(places, str) else self._create(places)
        return self._obstacle

    def _split(self) -> tuple[range, ...] | str:
        """Return the places of ranks on their hosts if the group is to be split; none on one host; or why it is not."""
        if self._places is None:
            try:
                runtime = self._runtime()
            except RefusedTogetherError as refusal:  # its first use takes memory for flags
                self._places = ()
                self.give_up(refusal)
                return self._places
            self._machines = tuple(sorted({each.machine for each in runtime.locations}))
            if runtime.num_hosts == 1:
                self._places = ()
            elif self._across_hosts == "never":
                self._places = obstacle_across(runtime.num_hosts)
            else:
                self._places = places_of([each.host for each in runtime.locations])
        return self._places

    def _create(self, places: tuple[range, ...]) -> str:
        """Create the lanes on all hosts; return why there are none, or nothing."""
        self._obstacle = None
        try:
            runtime = self._runtime()
            self._levels = two_levels(runtime, places) if places else one_level(runtime)
            self._levels.on_all_hosts(f"lanes for {self._purpose}", self._create_here)
        except RefusedTogetherError as refusal:
            self.give_up(refusal)
        return self._obstacle or ""

    def _create_here(self) -> None:
        runtime = runtime_of(self.levels.within.group_name, self.device)
        if not all(self._lane(number) is not None for number in range(self._num_lanes)):
            raise RefusedTogetherError(runtime.obstacle)
        self._opened = runtime

    def give_up(self, refusal: RefusedTogetherError) -> None:
        """Let the library do everything from now on, on all ranks: one of them has no more memory."""
        self._obstacle = str(refusal).rstrip(".")

    def refusal_of(self, what: str, problem: str) -> str:
        """Return why a rank refuses what all ranks are about to do, or nothing; `problem` is this rank's."""
        try:
            self._runtime().agreement.compare(CallNotice(request=what, problem=problem))
        except RefusedTogetherError as refusal:
            return str(refusal).rstrip(".")
        return ""

    @property
    def levels(self) -> HostLevels:
        """The levels that the lanes serve."""
        assert self._levels is not None, "read obstacle first"
        return self._levels

    def _runtime(self) -> Runtime:
        return runtime_of(self.group.group_name, self.device)

    def _lane(self, number: int) -> AbstractLane | None:
        return runtime_of(self.levels.within.group_name, self.device).lane(f"{self._purpose} {number}")

    def __len__(self) -> int:
        return self._num_lanes

    def present(self) -> AbstractLane:
        """Return the lane whose turn it is, without moving on."""
        lane = self._lane(self._next)
        assert lane is not None, "read obstacle first"
        return lane

    def next(self) -> AbstractLane:
        """Return the lane whose turn it is, and move on."""
        lane = self.present()
        self._next = (self._next + 1) % self._num_lanes
        return lane

    def reserve(self, num_bytes: int, num_turns: int) -> None:
        """Reserve memory for blocks of this many bytes in the next lanes. Raises `RefusedTogetherError`."""
        for turn in range(min(num_turns, self._num_lanes)):
            lane = self._lane((self._next + turn) % self._num_lanes)
            assert lane is not None, "read obstacle first"
            self.levels.reserve(lane, num_bytes, is_shared_only=self._is_shared_only)

    def grow(self) -> None:
        """Add a lane, whose turn is next. Raises `RefusedTogetherError` if a rank has no memory for it."""
        self._next = self._num_lanes
        self._num_lanes += 1
        self.levels.on_all_hosts(f"one more lane for {self._purpose}", self.present)


def require_across_hosts(across_hosts: object) -> None:
    """Raise `IntegrationError` unless this is one of the choices for groups that span hosts."""
    require(
        across_hosts in get_args(AcrossHosts),
        IntegrationError,
        f"across_hosts must be 'auto', 'always' or 'never'; found {across_hosts!r}. Leave it out, and an estimate decides.",
    )


@lru_cache(maxsize=1024)
def obstacle_by_estimate(
    machines: tuple[str, ...], num_hosts: int, ranks_per_host: int, message: tuple[CollectiveKind, int]
) -> str:
    """Return why two levels do not pay for a message (kind and bytes) between hosts with these machines; or nothing."""
    if len(machines) > 1:
        return f"its hosts have different GPUs ({', '.join(machines)}), {NO_ESTIMATE}"
    times = _times(machines[0], num_hosts)
    if isinstance(times, str):
        return times
    gpus = times.fabric.machine.num_gpus
    if gpus % ranks_per_host:
        return f"{ranks_per_host} ranks are no even share of a host's {gpus} GPUs, {NO_ESTIMATE}"
    group = RankGroup(size=num_hosts * ranks_per_host, stride=gpus // ranks_per_host)
    is_faster = times.with_copies_us(*message, group) < times.time_us(*message, group)
    return "" if is_faster else f"on {num_hosts} hosts of {ranks_per_host} ranks NCCL is faster than two levels, by estimate"


@cache
def _times(machine_name: str, num_hosts: int) -> CollectiveTimes | str:
    """Return the times of collectives on hosts of a shipped machine with its own network, or why there are none."""
    if machine_name not in machine_names():
        return f"no shipped machine describes its {f'GPUs ({machine_name})' if machine_name else 'CPUs'}, {NO_ESTIMATE}"
    try:
        fabric = Cluster(name="this job", machine=machine_name, num_nodes=num_hosts).load()
    except MachineError:
        return f"machine '{machine_name}' describes no network, {NO_ESTIMATE}"
    return CollectiveTimes(fabric=fabric, calibration=load_calibration(fabric.machine))
