"""The remaining work of each operation while the engine runs. This is the only mutable state of the simulator.

`SmWork` and `CopyWork` describe an operation's work and the resources that it uses; `costs.py` computes them once, and they
never change while the engine runs.
"""

import math
from collections import deque
from dataclasses import dataclass

import msgspec

from counterpoint.step import Footprint
from counterpoint.value import Value

DONE = 1e-9  # work left, in CTAs or copies, that is only rounding


class SmWork(Value, frozen=True, kw_only=True):
    """A kernel or collective on SMs: how fast one CTA is, and which resources it uses.

    The reference state is the kernel alone, uncapped, at its usual residency. `cta_ps`: time of one CTA there.
    `issue_per_cta`: share of an SM's throughput that one CTA can use at most; `issue_reference`: their sum there.
    `hbm_per_cta`: bytes per second that one CTA can keep in flight; `hbm_reference`: achieved share of that there.
    `link_per_cta`, `link_limit`: the same for the link, 0 for computation; `link_reference`: what one CTA achieves there.
    `is_work_sharing`: the CTAs share the work in arbitrarily small parts. `num_tiles`: they take that many tiles, one after
    the other, and `cta_ps` is the time of one; 0 if each CTA has its own work. `waits_for_memory`: `hbm_per_cta` is what its
    CTAs keep in flight at idle latency. `loads_l2`: it reads more from L2 than from the memory. `has_tiles`: its CTAs wait
    for tiles of a matmul, so they keep less in flight as the memory's latency grows. `clock_latency`: how much longer these
    are on their way at the step's clock than at that of the lone time. `l2_reference`: for matmuls that L2
    limits, how much longer they take in the reference state because their CTAs crowd L2; 0 for other work.
    `latency_weight`: the share of the growth of the memory's latency that a collective's CTA sees. `least_l1`: by how much
    longer it takes beside the largest carveout, as a share of its time.
    """

    cta_ps: float
    issue_per_cta: float = 0.0
    issue_reference: float = 0.0
    hbm_per_cta: float = 0.0
    hbm_reference: float = 1.0
    link_per_cta: float = 0.0
    link_limit: float = 0.0
    link_reference: float = 1.0
    is_work_sharing: bool = False
    num_tiles: int = 0
    cta_time_spread: float = 0.0
    waits_for_memory: bool = False
    loads_l2: bool = False
    has_tiles: bool = False
    clock_latency: float = 1.0
    l2_reference: float = 0.0
    latency_weight: float = 1.0
    least_l1: float = 0.0


class CopyWork(Value, frozen=True, kw_only=True):
    """A copy, or a collective moved by copy engines: its time alone, and the bytes per second on memory and link."""

    lone_ps: float
    hbm_demand: float = 0.0
    link_demand: float = 0.0
    link_limit: float = 0.0

    def less(self, elapsed_ps: float) -> "CopyWork":
        """Return what is left after `elapsed_ps` alone; at least a picosecond, because rates are work per time."""
        return msgspec.structs.replace(self, lone_ps=max(1.0, self.lone_ps - elapsed_ps))


Work = SmWork | CopyWork


@dataclass(slots=True, eq=False)
class SmTask:
    """A kernel or collective between becoming ready and its last CTA's end.

    `shared_work` is the work left, in CTAs, of a kernel whose CTAs take tiles from a shared counter, and `rate` its work per
    picosecond; both are 0 for any other kernel, whose cohorts have their own rates. `tiles_left` is the number of tiles that
    no CTA has taken yet. `kind` is the number of works that use resources alike (`RateModel.kind`), `shape` that of its
    footprint, and `place` its place among the running tasks.
    """

    index: int
    footprint: Footprint
    priority: int
    work: SmWork
    carveout_bytes: int
    num_unplaced: int
    shared_work: float = 0.0
    tiles_left: int = 0
    num_resident: int = 0
    num_placed: int = 0
    arrival: int = 0
    has_started: bool = False
    found_no_room: bool = False
    rate: float = 0.0
    kind: int = 0
    shape: int = 0
    place: int = 0

    def take_tiles(self, number: int) -> None:
        """Let CTAs begin up to `number` tiles."""
        self.tiles_left = max(0, self.tiles_left - number)


@dataclass(slots=True, eq=False)
class CopyTask:
    """A copy between becoming ready and its end; `remaining` falls from 1 to 0. `kind` and `place` as of `SmTask`."""

    index: int
    work: CopyWork
    remaining: float = 1.0
    rate: float = 0.0
    kind: int = 0
    place: int = 0


Task = SmTask | CopyTask


@dataclass(slots=True, eq=False)
class Cohort:
    """CTAs of one task that were placed together on each SM of a group and progress equally.

    `remaining` is the work left in each slot, which runs CTAs one after the other, in mean CTAs. `ahead` CTAs, each
    `ahead_length` long, were handed to the slot before it can start them. `runs_through`: nothing changes when the slot
    begins the last of them.
    """

    task: SmTask
    count: int
    remaining: float
    rate: float = 0.0
    ahead: int = 0
    ahead_length: float = 1.0
    runs_through: bool = False

    def hand(self, number: int, length: float) -> None:
        """Let each slot run `number` further CTAs of this length after the current one."""
        self.ahead, self.ahead_length = number, length
        self.remaining += number * length

    def recall(self) -> int:
        """Take back the CTAs that were handed to each slot and have not started; return how many."""
        if not self.ahead:
            return 0
        # whether the CTA that ran when they were handed out still runs
        is_first = self.remaining > self.ahead * self.ahead_length + DONE
        left = self.ahead if is_first else max(0, math.ceil(self.remaining / self.ahead_length - DONE) - 1)
        self.remaining -= left * self.ahead_length
        self.ahead = 0
        return left


class CopyQueue:
    """Which copies the copy engines run: the oldest `num_engines` of those submitted. Holds operation numbers only.

    Copy engines serve copies first come, first served, and use no SM; stream priority has no effect on them.
    """

    def __init__(self, num_engines: int) -> None:
        self._num_engines = num_engines
        self._active: list[int] = []
        self._waiting: deque[int] = deque()

    def submit(self, index: int) -> None:
        """Queue operation `index` after those already submitted."""
        self._waiting.append(index)

    def start_next(self) -> list[int]:
        """Move waiting copies onto free engines, in order; return those that start now."""
        started = []
        while self._waiting and len(self._active) < self._num_engines:
            started.append(self._waiting.popleft())
            self._active.append(started[-1])
        return started

    def finish(self, index: int) -> None:
        """Free the engine that ran operation `index`."""
        self._active.remove(index)
