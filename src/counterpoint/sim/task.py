"""Work in progress: the remaining work of one operation while the engine runs. The only mutable state of the simulator.

`SmWork` and `CopyWork` say how much an operation is and what it draws on; they are computed once, by `costs.py`, and never
change while the engine runs.
"""

import math
from collections import deque
from dataclasses import dataclass

import msgspec

from counterpoint.step import Footprint
from counterpoint.value import Value

DONE = 1e-9  # work left, in CTAs or copies, that is nothing but rounding


class SmWork(Value, frozen=True, kw_only=True):
    """A kernel or collective on SMs: how fast one CTA is, and what it draws on.

    The reference state is the kernel alone, uncapped, at its usual residency. `cta_ps`: time of one CTA there.
    `issue_per_cta`: share of an SM's throughput that one CTA can use at most; `issue_reference`: their sum there.
    `hbm_per_cta`: bytes per second that one CTA can keep in flight; `hbm_reference`: achieved share of that there.
    `link_per_cta`, `link_limit`: the same for the link, 0 for computation; `link_reference`: what one CTA achieves there.
    `is_work_sharing`: the CTAs share the work without a grain. `num_tiles`: they take that many tiles, one after the other,
    and `cta_ps` is the time of one; 0 where each CTA has work of its own. `waits_for_memory`: `hbm_per_cta` is what its CTAs
    keep in flight at idle latency. `loads_l2`: it reads more from L2 than from the memory. `latency_weight`: how much of the
    growth of the memory's latency a collective's CTA feels.
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
    latency_weight: float = 1.0


class CopyWork(Value, frozen=True, kw_only=True):
    """A copy, or a collective moved by copy engines: time alone, and bytes per second it draws on memory and link."""

    lone_ps: float
    hbm_demand: float = 0.0
    link_demand: float = 0.0
    link_limit: float = 0.0

    def less(self, elapsed_ps: float) -> "CopyWork":
        """What is left of it after a time alone; at least a picosecond, since rates are work per time."""
        return msgspec.structs.replace(self, lone_ps=max(1.0, self.lone_ps - elapsed_ps))


@dataclass(slots=True, eq=False)
class SmTask:
    """A kernel or collective between becoming ready and its last CTA's end.

    `shared_work` is what is left, in CTAs, of a kernel whose CTAs take tiles from a shared counter, and `rate` how many it
    does per picosecond; both are 0 for any other, whose cohorts have rates of their own. `tiles_left` are those that no CTA
    has taken yet.
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
    rate: float = 0.0

    def take_tiles(self, number: int) -> None:
        """Let CTAs begin up to `number` tiles."""
        self.tiles_left = max(0, self.tiles_left - number)


@dataclass(slots=True, eq=False)
class CopyTask:
    """A copy between becoming ready and its end; `remaining` falls from 1 to 0."""

    index: int
    work: CopyWork
    remaining: float = 1.0
    rate: float = 0.0


@dataclass(slots=True, eq=False)
class Cohort:
    """CTAs of one task that were placed together on each SM of a group and run in step.

    `remaining` is what is left of the CTAs to be run one after the other in each slot, in mean CTAs. `ahead` of them were
    handed to the slot before it can begin them, each `ahead_length` long.
    """

    task: SmTask
    count: int
    remaining: float
    rate: float = 0.0
    ahead: int = 0
    ahead_length: float = 1.0

    def hand(self, number: int, length: float) -> None:
        """Let each slot run `number` further CTAs of this length when it has done the present one."""
        self.ahead, self.ahead_length = number, length
        self.remaining += number * length

    def recall(self) -> int:
        """Take back the CTAs that were handed to each slot and have not begun; returns how many."""
        if not self.ahead:
            return 0
        # whether what ran when they were handed out runs still
        is_first = self.remaining > self.ahead * self.ahead_length + DONE
        left = self.ahead if is_first else max(0, math.ceil(self.remaining / self.ahead_length - DONE) - 1)
        self.remaining -= left * self.ahead_length
        self.ahead = 0
        return left


class CopyQueue:
    """Which copies the copy engines serve: the oldest `num_engines` of those handed in. Holds operation numbers only.

    Copy engines serve first come, first served, and take no SM; stream priority does not reach them.
    """

    def __init__(self, num_engines: int) -> None:
        self._num_engines = num_engines
        self._active: list[int] = []
        self._waiting: deque[int] = deque()

    def submit(self, index: int) -> None:
        """Queue operation `index` behind those already handed in."""
        self._waiting.append(index)

    def start_next(self) -> list[int]:
        """Move waiting copies onto free engines, in order; return those that start now."""
        started = []
        while self._waiting and len(self._active) < self._num_engines:
            started.append(self._waiting.popleft())
            self._active.append(started[-1])
        return started

    def finish(self, index: int) -> None:
        """Free the engine that served operation `index`."""
        self._active.remove(index)
