"""Computes the progress rates of resident CTAs: interference follows from residency and bandwidth.

Three limits act on a CTA. (1) Its SM: resident CTAs share the SM's throughput. Together they use what they can keep in
flight, smoothly limited by the SM's peak, so on a saturated SM fewer CTAs run faster each. Where L2 limits a matmul, its
CTAs slow each other down if they keep more in flight than L2 delivers, and what collectives and copies move slows them.
(2) The GPU's memory: what the resident CTAs of a kernel can keep in flight, smoothly limited by its max-min share of the HBM
bandwidth. (3) For communication the link, shared max-min. A collective's CTA waits for memory latency, so what it can keep
in flight falls as others load the memory. The constants and their sources are in `calibrations/*.toml`.

Shares of bandwidth are max-min fair: a flow can get more only if another flow with no larger share gets less. Two limits
(what the resident CTAs can keep in flight, what the memory or link delivers) combine by a smooth minimum with exponent 4.
It fits streaming kernels at reduced residency, and how all-reduce time falls with CTAs (docs/simulator.md).
"""

import math
from collections.abc import Hashable, Iterable, Sequence

import msgspec

from counterpoint.machine import Gpu
from counterpoint.sim.sm import SmGroup
from counterpoint.sim.task import CopyTask, SmTask, SmWork, Task, Work
from counterpoint.value import Value

EXPONENT = 4
SM_EXPONENT = 6  # of an SM: its pipes take instructions in turn, and saturate more sharply than memory and links
LOAD_EXPONENT = 8  # from the streaming kernel's times at 6 to 12 CTAs on an SM of an H200
MOST_GROUPS_OF_KNOWN = 8  # a state of more groups, which CTAs of different lengths cause, hardly comes again
MOST_KNOWN = 100_000  # about 100 MB
# What runs where: the kind of each task, and for each group its SMs, carveout and cohorts, as a task's place and its CTAs
State = tuple[tuple[int, ...], tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]]
# How fast each task's CTAs are relative to the reference state, their number weighted by shares, and each cohort's share
Relative = tuple[list[float], list[float], list[float]]


class RateModel:
    """Sets the rates of cohorts, shared work and copies from the CTAs that are resident on each SM.

    `gpu` says how SMs divide L1 and shared memory, `hbm_bytes_per_s` is the bandwidth that the memory reaches, `latency` how
    its latency grows with its load, and `l2` what L2 delivers. `is_traced`: kernels were timed in a job, so what its
    collectives took from L2 is in their times. `alone_ps` is for the engine: how long tasks took that ran alone, by work.
    """

    def __init__(
        self, gpu: Gpu, hbm_bytes_per_s: float, latency: "MemoryLatency", l2: "L2Delivery", *, is_traced: bool
    ) -> None:
        steps = gpu.carveout_steps_bytes
        self._least_l1_carveout = steps[-1] if len(steps) > 1 else math.inf
        self._hbm = hbm_bytes_per_s
        self._latency = latency
        self._l2 = l2
        self._is_traced = is_traced
        self._kinds: dict[Work, int] = {}
        self._known: dict[State, Relative] = {}
        self.alone_ps: dict[Hashable, int] = {}

    @property
    def is_full(self) -> bool:
        """Whether it keeps so much of past steps that a new model should take its place."""
        return len(self._known) + len(self.alone_ps) > MOST_KNOWN

    def kind(self, work: Work) -> int:
        """Return a number that works have in common if they use resources alike, however long they take."""
        alike = msgspec.structs.replace(work, **{"cta_ps" if isinstance(work, SmWork) else "lone_ps": 1.0})
        return self._kinds.setdefault(alike, len(self._kinds))

    def update(self, groups: Sequence[SmGroup], running: Iterable[Task]) -> None:
        """Recompute all rates, in work per picosecond, for the CTAs and copies that run now.

        Steps repeat. Relative to the reference state, rates depend only on which kinds of work are where.
        """
        tasks = list(running)
        for place, task in enumerate(tasks):
            task.place = place
        factors, effective, shares = self._known_relative(groups, tasks)
        cta_rates: list[float] = []  # per task, the rate of one CTA whose SM is as in the reference state; unused for copies
        for task, factor, num_ctas in zip(tasks, factors, effective, strict=True):
            if isinstance(task, CopyTask):
                task.rate = factor / task.work.lone_ps
                cta_rates.append(0.0)
            else:
                cta_rates.append(factor / task.work.cta_ps)
                task.rate = cta_rates[-1] * num_ctas if task.work.is_work_sharing else 0.0
        place = 0
        for group in groups:
            for cohort in group.cohorts:
                work_sharing = cohort.task.work.is_work_sharing
                cohort.rate = 0.0 if work_sharing else shares[place] * cta_rates[cohort.task.place]
                place += 1

    def _known_relative(self, groups: Sequence[SmGroup], tasks: list[Task]) -> Relative:
        """Return what `_relative` does, and compute it once for each state."""
        if len(groups) > MOST_GROUPS_OF_KNOWN:
            return self._relative(groups, tasks)
        residents = [
            (sum(group.sms), group.carveout_bytes, tuple([(each.task.place, each.count) for each in group.cohorts]))
            for group in groups
        ]
        state = tuple([task.kind for task in tasks]), tuple(residents)
        found = self._known.get(state)
        if found is None:
            found = self._known[state] = self._relative(groups, tasks)
        return found

    def _relative(self, groups: Sequence[SmGroup], tasks: list[Task]) -> Relative:
        """Return how fast tasks and cohorts are; cohorts are in the order of the groups."""
        shares, effective = _share_sms(groups, len(tasks))
        in_flight = [_hbm_demand(task, ctas) for task, ctas in zip(tasks, effective, strict=True)]
        demands = self._hbm_demands(tasks, in_flight)
        available = [available_to(position, demands, self._hbm) for position in range(len(tasks))]
        loads = [smooth_minimum(demand, share) / self._hbm for demand, share in zip(demands, available, strict=True)]
        link, kept = self._link_rates(groups, tasks, loads)
        moved = sum(load for task, load in zip(tasks, loads, strict=True) if self._takes_from_l2(task))
        if moved and any(isinstance(task, SmTask) and task.work.has_tiles for task in tasks):
            shares, effective = _share_sms(groups, len(tasks), self._l2.latency_per_load * moved)
        by_l2 = self._l2.slowdown(_mean_asked(groups, self._l2.bytes_per_s), moved * self._hbm)
        factors: list[float] = []
        for position, task in enumerate(tasks):
            if isinstance(task, CopyTask):
                share = min(1.0, available[position] / demands[position]) if demands[position] else 1.0
                factors.append(min(share, link[position]))
            else:
                reached = smooth_minimum(demands[position], available[position])
                memory = reached / in_flight[position] / task.work.hbm_reference if reached else 1.0
                if task.work.l2_reference:
                    memory *= task.work.l2_reference / by_l2
                factors.append(memory * link[position])
        return factors, effective, [share * part for share, part in zip(shares, kept, strict=True)]

    def _takes_from_l2(self, task: Task) -> bool:
        """Return whether L2 delivers less to matmuls because of what the task moves."""
        return isinstance(task, CopyTask) or (task.work.link_limit > 0 and not self._is_traced)

    def _link_rates(
        self, groups: Sequence[SmGroup], tasks: list[Task], loads: list[float]
    ) -> tuple[list[float], list[float]]:
        """Return the factor on each task's progress from the link, 1 for tasks that do not use it; and for each cohort, in
        order, the share of this that it keeps on SMs with little L1.
        """
        num_cohorts = sum(len(group.cohorts) for group in groups)
        if not any(task.work.link_limit for task in tasks):
            return [1.0] * len(tasks), [1.0] * num_cohorts
        by_l2 = sum(load for task, load in zip(tasks, loads, strict=True) if isinstance(task, SmTask) and task.work.loads_l2)
        grown = self._latency.growth(sum(loads) - by_l2)
        kept: list[float] = []
        num_ctas = [0.0] * len(tasks)  # weighted by what they keep
        for group in groups:
            for cohort in group.cohorts:
                kept.append(self._kept(group, cohort.task.work, grown))
                num_ctas[cohort.task.place] += kept[-1] * cohort.count * group.num_sms()
        able = []
        for position, (task, load) in enumerate(zip(tasks, loads, strict=True)):
            if isinstance(task, CopyTask):
                able.append(task.work.link_demand)
            elif task.work.link_per_cta:
                weight = task.work.latency_weight
                faster = (1 + weight * self._latency.growth(load)) / (1 + weight * grown + self._latency.per_load * by_l2)
                able.append(num_ctas[position] * task.work.link_per_cta * faster)
            else:
                able.append(0.0)
        shares = [demand / task.work.link_limit if demand else 0.0 for demand, task in zip(able, tasks, strict=True)]
        factors = []
        for position, (task, demand) in enumerate(zip(tasks, able, strict=True)):
            if not demand:
                factors.append(1.0)
                continue
            limit = available_to(position, shares, 1.0) * task.work.link_limit
            if isinstance(task, CopyTask):
                factors.append(min(demand, limit) / demand)
            else:
                factors.append(smooth_minimum(demand, limit) / num_ctas[position] / task.work.link_reference)
        return factors, kept

    def _kept(self, group: SmGroup, work: SmWork, grown: float) -> float:
        """Return the share of its speed that a collective's CTA keeps on these SMs: less where the largest carveout leaves
        the least L1, which holds what its loads bring. `grown`: by how much the memory's latency has grown.
        """
        if not work.least_l1 or group.carveout_bytes < self._least_l1_carveout:
            return 1.0
        waited = 1 + work.latency_weight * grown
        return waited / (waited + work.least_l1 * (1 + grown))

    def _hbm_demands(self, tasks: list[Task], in_flight: list[float]) -> list[float]:
        """Return each task's demand on the memory; kernels that wait for it demand less as its load slows their loads."""
        waiting = [place for place, task in enumerate(tasks) if isinstance(task, SmTask) and task.work.waits_for_memory]
        if not waiting:
            return in_flight
        waited = sum(in_flight[place] for place in waiting)
        slowdown = self._latency.slowdown(waited / self._hbm, (sum(in_flight) - waited) / self._hbm)
        return [demand / slowdown if place in waiting else demand for place, demand in enumerate(in_flight)]


class MemoryLatency(Value, frozen=True, kw_only=True):
    """How the memory's latency grows with its load u, a share of the bandwidth: 1 + at_low_load u + ... u^8 to 1 + per_load.

    Measured with the streaming kernel of `counterpoint calibrate` at each residency: the time of a load is what its CTAs
    keep in flight divided by their bandwidth. It grows slowly up to three quarters of the bandwidth, then steeply.
    """

    at_low_load: float
    per_load: float

    def growth(self, load: float) -> float:
        """Return by how much loads take longer while the memory is under this load, as a share of their idle latency."""
        load = min(max(load, 0.0), 1.0)
        return self.at_low_load * load + (self.per_load - self.at_low_load) * load**LOAD_EXPONENT

    def slowdown(self, in_flight: float, other_load: float) -> float:
        """Return the factor on the time of loads that would use `in_flight` of the bandwidth at idle latency.

        The load u that they cause solves u = other_load + in_flight / (1 + c u); demand above the bandwidth does not affect
        the latency.
        """
        c = self.at_low_load
        if not c:
            return 1.0
        half = 1 - c * other_load
        load = (math.sqrt(half * half + 4 * c * (other_load + in_flight)) - half) / (2 * c)
        return 1 + c * min(load, 1.0)


class L2Delivery(Value, frozen=True, kw_only=True):
    """How L2 delivers tiles of matmuls: `bytes_per_s` to those that it limits, and less as their CTAs keep more in flight.

    `crowding`: by how much longer they take for each further time that their CTAs would saturate the SMs.
    `latency_per_load`: by how much longer any matmul's tiles are on their way while collectives and copies use all of the
    memory's bandwidth, as a share of their time else.
    """

    bytes_per_s: float
    crowding: float
    latency_per_load: float

    def slowdown(self, asked: float, moved_bytes_per_s: float = 0.0) -> float:
        """Return how much longer matmuls that L2 limits take if their CTAs ask for `asked` times what saturates an SM.

        L2 does not deliver to them what collectives and copies move, `moved_bytes_per_s`. Where they ask for less than L2
        has left, that costs them nothing.
        """
        crowded = 1 + self.crowding * max(0.0, asked - 1)
        if not asked or not moved_bytes_per_s:
            return crowded
        left = 1 / (1 + moved_bytes_per_s / self.bytes_per_s)
        return crowded * smooth_minimum(asked, 1.0, SM_EXPONENT) / smooth_minimum(asked, left, SM_EXPONENT)


def _mean_asked(groups: Sequence[SmGroup], l2_bytes_per_s: float) -> float:
    """Return what the CTAs that L2 limits ask for, and the CTAs of collectives, as a multiple of what saturates an SM: the
    mean over all SMs. 0 without CTAs that L2 limits.
    """
    asked, moved, num_sms = 0.0, 0.0, 0
    for group in groups:
        number = group.num_sms()
        num_sms += number
        for cohort in group.cohorts:
            work = cohort.task.work
            if work.l2_reference:
                asked += cohort.count * work.issue_per_cta * number
            elif work.link_limit:
                moved += cohort.count * work.hbm_per_cta * number
    return asked / num_sms + moved / l2_bytes_per_s if asked else 0.0


def _share_sms(groups: Sequence[SmGroup], num_tasks: int, tile_latency: float = 0.0) -> tuple[list[float], list[float]]:
    """Return each cohort's share of its SM, in order (1 = reference state), and each task's CTAs weighted by the share.

    `tile_latency`: by how much longer the tiles of matmuls are on their way, as a share of their idle latency.
    """
    shares: list[float] = []
    effective = [0.0] * num_tasks
    for group in groups:
        asked = 0.0
        for cohort in group.cohorts:
            asked += cohort.count * cohort.task.work.issue_per_cta / _latency_of(cohort.task, tile_latency)
        crowding, num_sms = 1 + asked**SM_EXPONENT, group.num_sms()
        task, share = None, 0.0
        for cohort in group.cohorts:
            if cohort.task is not task:
                task = cohort.task
                share = ((1 + task.work.issue_reference**SM_EXPONENT) / crowding) ** (1 / SM_EXPONENT)
                share /= _latency_of(task, tile_latency)
            shares.append(share)
            effective[task.place] += share * cohort.count * num_sms
    return shares, effective


def _latency_of(task: SmTask, tile_latency: float) -> float:
    """Return how much longer than alone at a burst's clock the loads of a task's CTAs are on their way."""
    return task.work.clock_latency * (1 + tile_latency) if task.work.has_tiles else task.work.clock_latency


def _hbm_demand(task: Task, effective_ctas: float) -> float:
    if isinstance(task, CopyTask):
        return task.work.hbm_demand
    return task.work.hbm_per_cta * effective_ctas


def available_to(index: int, demands: Sequence[float], capacity: float) -> float:
    """Return how much of `capacity` flow `index` would get if it demanded everything, beside the others' demands."""
    left, sharers = capacity, len(demands)
    if sharers == 2:
        return max(left / 2, left - demands[1 - index])
    for demand in sorted([*demands[:index], *demands[index + 1 :]]):
        if demand * sharers > left:
            break
        left -= demand
        sharers -= 1
    return left / sharers


def smooth_minimum(first: float, second: float, exponent: int = EXPONENT) -> float:
    """Return a smooth minimum of two positive limits: less than the smaller if they are close.

    If they are equal it is 0.84 of either, and 0.89 with an SM's exponent.
    """
    if first <= 0 or second <= 0:
        return 0.0
    ratio = min(first, second) / max(first, second)
    return float(min(first, second) / (1 + ratio**exponent) ** (1 / exponent))
