"""SM state: groups of SMs in the same state, and the placement of CTAs and clusters on them.

SMs with the same residents form one group, counted per GPC because all CTAs of a cluster must be in one GPC. The next CTA
goes to the SM with the most room for that kernel, ties in a fixed order. The first kernel placed on an empty SM sets its
split between L1 and shared memory, which cannot change until the SM is empty again.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from counterpoint.machine import Gpu
from counterpoint.occupancy import room_for
from counterpoint.sim.task import DONE, Cohort, SmTask
from counterpoint.step import Footprint

SPREAD_LEVELS = 64  # number of different lengths of one kernel's CTAs; an assumption
HASH_MULTIPLIER = 2654435761  # a prime near 2^32 over the golden ratio (Knuth, TAOCP 6.4): neighbors get lengths far apart
# of a kernel with many CTAs of different lengths:
MOST_GROUPS = 16  # so many groups of SMs hold different ones; the SMs of one are alike
MOST_LENGTHS = 8  # so many of the CTAs on an SM differ; the others are as long as one of these
_NUMBERS = itertools.count()
GroupKey = tuple[int, tuple[tuple[int, int, float], ...]]


@dataclass(slots=True, eq=False)
class SmGroup:
    """SMs in one state. `sms[g]` of them are in GPC g; `carveout_bytes` is 0 while they are empty."""

    sms: list[int]
    carveout_bytes: int
    cohorts: list[Cohort]

    def num_sms(self) -> int:
        """Return the number of SMs in this group, over all GPCs."""
        return sum(self.sms)

    def copied_cohorts(self) -> list[Cohort]:
        """Return copies of its cohorts, for a group that splits off."""
        return [Cohort(each.task, each.count, each.remaining, 0.0, each.ahead, each.ahead_length) for each in self.cohorts]

    def key(self) -> GroupKey:
        """Return a key that is equal for groups that may be merged."""
        cohorts = [(cohort.task.index, cohort.count, round(cohort.remaining, 9)) for cohort in self.cohorts]
        return self.carveout_bytes, tuple(sorted(cohorts))


Offer = tuple[SmGroup, int]  # a group, and how many CTAs each of its SMs has room for
Rooms = tuple[tuple[int, tuple[int, ...]], ...]  # for each offer, the room on each of its SMs, and its SMs in each GPC
Part = tuple[int, int, tuple[int, ...]]  # the index of an offer, CTAs for each of these SMs, SMs in each GPC


def level_after_taking(levels: Sequence[int], multiplicities: Sequence[int], amount: int) -> tuple[int, int]:
    """Take `amount` units, always from a fullest vessel; `multiplicities[i]` vessels hold `levels[i]` units each.

    Returns the level down to which all are drained, and how many units remain to be taken from vessels at that level.
    """
    together: dict[int, int] = {}
    for level, multiplicity in zip(levels, multiplicities, strict=True):
        together[level] = together.get(level, 0) + multiplicity
    ordered = sorted(together.items(), reverse=True)
    width = 0
    for position, (level, multiplicity) in enumerate(ordered):
        width += multiplicity
        following = ordered[position + 1][0] if position + 1 < len(ordered) else 0
        if width * (level - following) > amount:
            return level - amount // width, amount % width
        amount -= width * (level - following)
    return 0, 0


def take_from_fullest(levels: Sequence[int], amount: int) -> list[int]:
    """Return what each vessel gives if `amount` units are taken, always from a fullest one, the first of equal ones."""
    floor, extra = level_after_taking(levels, [1] * len(levels), amount)
    taken = []
    for level in levels:
        one_more = int(extra > 0 and level >= floor > 0)
        extra -= one_more
        taken.append(max(0, level - floor) + one_more)
    return taken


@lru_cache(maxsize=4096)
def _split(offers: Rooms, num_clusters: int, cluster: int, *, has_waited: bool) -> tuple[int, tuple[Part, ...]]:
    """Return how many CTAs of a kernel with `num_clusters` clusters left are placed, and where; cached, as steps repeat.

    CTAs of a kernel that waited for room fill each SM that becomes free before they go to the next.
    """
    num_gpcs = len(offers[0][1])
    most = [sum(sms[gpc] * room for room, sms in offers) // cluster for gpc in range(num_gpcs)]
    wanted = min(num_clusters, sum(most))
    if wanted == 0:
        return 0, ()
    if has_waited and (dense := _dense_parts(offers, wanted, cluster)) is not None:
        return wanted * cluster, dense
    quotas = [number * cluster for number in _clusters_per_gpc(offers, most, wanted, cluster)]
    return wanted * cluster, _parts(offers, quotas)


def _dense_parts(offers: Rooms, wanted: int, cluster: int) -> tuple[Part, ...] | None:
    """Return where `wanted` clusters go if they fill SM after SM; None if a cluster would need SMs of two offers."""
    left = wanted
    parts: list[Part] = []
    for position, (room, sms) in sorted(enumerate(offers), key=lambda offer: -offer[1][0]):
        full, untouched = [0] * len(sms), list(sms)
        for gpc, number in enumerate(sms):
            taken = min(left, room * number // cluster)
            left -= taken
            full[gpc], extra = divmod(taken * cluster, room)
            untouched[gpc] -= full[gpc]
            if extra:
                parts.append((position, extra, tuple(int(each == gpc) for each in range(len(sms)))))
                untouched[gpc] -= 1
        for amount, affected in ((room, full), (0, untouched)):
            if any(affected):
                parts.append((position, amount, tuple(affected)))
    return None if left else tuple(parts)


def _clusters_per_gpc(offers: Rooms, most: list[int], wanted: int, cluster: int) -> list[int]:
    """Return how many of the `wanted` clusters each GPC gets: CTAs go to the SMs with the most room of all GPCs.

    Among equal SMs, those of the GPC with the most of them come first. Clusters that do not fit so go where most is free.
    """
    floor, _ = level_after_taking([room for room, _ in offers], [sum(sms) for _, sms in offers], wanted * cluster)
    sure, equal = [0] * len(most), [0] * len(most)
    for room, sms in offers:
        for gpc, number in enumerate(sms):
            sure[gpc] += max(0, room - floor) * number
            equal[gpc] += number if room >= floor > 0 else 0
    clusters = [number // cluster for number in sure]
    for offered in ([(above % cluster + number) // cluster for above, number in zip(sure, equal, strict=True)], most):
        left = [min(number, limit - given) for number, limit, given in zip(offered, most, clusters, strict=True)]
        taken = take_from_fullest(left, min(wanted - sum(clusters), sum(left)))
        clusters = [given + more for given, more in zip(clusters, taken, strict=True)]
    return clusters


def _parts(offers: Rooms, quotas: Sequence[int]) -> tuple[Part, ...]:
    """Place `quotas[g]` CTAs in GPC g, on the SMs with the most room first; return the SMs that get equally many."""
    taken: dict[tuple[int, int], list[int]] = {}
    for gpc, quota in enumerate(quotas):
        here = [(position, room, sms[gpc]) for position, (room, sms) in enumerate(offers) if sms[gpc]]
        floor, extra = level_after_taking([room for _, room, _ in here], [number for *_, number in here], quota)
        for position, room, number in here:
            take = max(0, room - floor)
            more = min(extra, number) if room >= floor > 0 else 0
            extra -= more
            for amount, affected in ((take + 1, more), (take, number - more)):
                if affected:
                    taken.setdefault((position, amount), [0] * len(quotas))[gpc] = affected
    return tuple((position, amount, tuple(sms)) for (position, amount), sms in taken.items())


@lru_cache(maxsize=4096)
def _shape(_: Footprint) -> int:
    """Return the number of a footprint. Numbers are compared faster than footprints."""
    return next(_NUMBERS)


class SmArray:
    """All SMs of one GPU. `fits_beside`: pairs of launches; the second was seen to fit beside one CTA of the first."""

    def __init__(self, gpu: Gpu, fits_beside: frozenset[tuple[Footprint, Footprint]] = frozenset()) -> None:
        self._gpu = gpu
        self._fits_beside = fits_beside
        self._num_sms = gpu.num_sms
        self.is_exact = False  # whether each CTA that differs in length from others of its kernel has its own length
        self._rooms: dict[tuple[tuple[tuple[int, int], ...], int, int], int] = {}  # by shapes
        self.groups = [SmGroup(list(gpu.sms_per_gpc), 0, [])]

    def room(self, group: SmGroup, task: SmTask) -> int:
        """Return how many more CTAs of `task` fit on each SM of `group`."""
        if group.cohorts and group.carveout_bytes < task.carveout_bytes and task.footprint.shared_bytes:
            return 0
        carveout_bytes = self._carveout_bytes(group, task)
        residents = tuple([(cohort.task.shape, cohort.count) for cohort in group.cohorts])
        key = residents, carveout_bytes, task.shape
        found = self._rooms.get(key)
        if found is None:
            found = self._rooms[key] = self._found_room(group, task.footprint, carveout_bytes)
        return found

    def _found_room(self, group: SmGroup, footprint: Footprint, carveout_bytes: int) -> int:
        counts: dict[Footprint, int] = {}
        for cohort in group.cohorts:
            counts[cohort.task.footprint] = counts.get(cohort.task.footprint, 0) + cohort.count
        room = room_for(self._gpu, tuple(counts.items()), carveout_bytes, footprint)
        is_seen = [(resident, footprint) in self._fits_beside for resident in counts] == [True]
        return max(room, int(is_seen and sum(counts.values()) == 1))

    @staticmethod
    def _carveout_bytes(group: SmGroup, task: SmTask) -> int:
        """Return the carveout of the SMs of a group that take CTAs of the task."""
        return group.carveout_bytes if group.cohorts else max(group.carveout_bytes, task.carveout_bytes)

    def place(self, task: SmTask) -> bool:
        """Place as many of the task's CTAs as fit, whole clusters at a time; return whether any was placed.

        Slots take CTAs ahead of time one by one, so the last few may not fill a cluster; they are placed as a smaller one.
        """
        if not task.num_unplaced:
            return False
        task.shape = _shape(task.footprint)
        rooms = [self.room(group, task) for group in self.groups]
        offers = [(group, room) for group, room in zip(self.groups, rooms, strict=True) if room]
        if not offers:
            return False
        number = task.num_unplaced
        cluster = max(1, min(number, task.footprint.ctas_per_cluster))
        if task.work.num_tiles:
            number = min(number, cluster * math.ceil(task.tiles_left / cluster))
        rooms_of_gpcs = tuple((room, tuple(group.sms)) for group, room in offers)
        has_waited = task.found_no_room and not task.work.cta_time_spread
        placed, parts = _split(rooms_of_gpcs, number // cluster, cluster, has_waited=has_waited)
        if placed == 0:
            return False
        full = [group for group, room in zip(self.groups, rooms, strict=True) if not room]
        self.groups = full + self._filled(task, offers, parts)
        task.num_unplaced -= placed
        task.num_resident += placed
        if task.work.num_tiles:
            task.take_tiles(placed)
            task.num_unplaced = min(task.num_unplaced, task.tiles_left)
        if 0 < task.num_unplaced < cluster:
            self.place(task)
        return True

    def _filled(self, task: SmTask, offers: list[Offer], parts: Sequence[Part]) -> list[SmGroup]:
        """Return the groups of `offers` after placing CTAs on these parts of them."""
        groups = []
        for position, amount, sms in parts:
            group, _ = offers[position]
            split = SmGroup(list(sms), group.carveout_bytes, group.copied_cohorts())
            groups.extend(self._with_ctas(split, task, amount))
        return groups

    def _with_ctas(self, group: SmGroup, task: SmTask, amount: int) -> list[SmGroup]:
        """Return the group with `amount` more CTAs of `task` on each SM; if CTAs differ in length, in several groups."""
        if amount == 0:
            return [group]
        carveout_bytes = self._carveout_bytes(group, task)
        if not task.work.cta_time_spread:
            task.num_placed += amount * group.num_sms()
            return [SmGroup(group.sms, carveout_bytes, [*group.cohorts, Cohort(task, amount, 1.0)])]
        num_alike, size = 1, 1
        if not self.is_exact:
            num_alike = math.ceil(self._num_sms / MOST_GROUPS)
            resident = amount + sum(cohort.count for cohort in group.cohorts if cohort.task is task)
            size = math.ceil(resident / MOST_LENGTHS)
        sizes = [min(size, amount - placed) for placed in range(0, amount, size)]
        separate = []
        while group.num_sms():
            others = _split_off(group, num_alike)
            placed = [Cohort(task, number, relative_length(task)) for number in sizes]
            separate.append(SmGroup(group.sms, carveout_bytes, [*group.copied_cohorts(), *placed]))
            group = others
        return separate

    def renew(self) -> None:
        """Give CTAs that finished a tile the next one while tiles are left; the other CTAs end."""
        for group in list(self.groups):
            for cohort in group.cohorts:
                task = cohort.task
                if cohort.remaining > DONE or not task.tiles_left:
                    continue
                number = math.ceil(task.tiles_left / cohort.count)
                if number < group.num_sms():
                    self.groups.append(_split_off(group, number))
                cohort.remaining = 1.0
                task.take_tiles(cohort.count * group.num_sms())

    def retire(self, task: SmTask | None = None) -> list[SmTask]:
        """Remove finished CTAs, or all CTAs of `task`; return the tasks that lost any, in the order of their operations."""
        touched: dict[int, SmTask] = {}
        for group in self.groups:
            kept = []
            for cohort in group.cohorts:
                is_done = cohort.task is task if task is not None else cohort.remaining <= DONE
                if is_done:
                    cohort.task.num_resident -= cohort.count * group.num_sms()
                    touched[cohort.task.index] = cohort.task
                else:
                    kept.append(cohort)
            group.cohorts = kept
        return [touched[index] for index in sorted(touched)]

    def rest(self) -> None:
        """Let SMs forget their carveouts: no kernel has any CTA left."""
        for group in self.groups:
            group.carveout_bytes = 0

    def merge(self) -> None:
        """Merge groups that have reached the same state."""
        held = {(group.carveout_bytes, *[cohort.task.index for cohort in group.cohorts]) for group in self.groups}
        if len(held) == len(self.groups):
            return
        merged: dict[GroupKey, SmGroup] = {}
        for group in self.groups:
            known = merged.setdefault(group.key(), group)
            if known is not group:
                known.sms = [mine + other for mine, other in zip(known.sms, group.sms, strict=True)]
        self.groups = list(merged.values())


def _split_off(group: SmGroup, number: int) -> SmGroup:
    """Leave the group its first `number` SMs, and return the others as a group in the same state."""
    others = SmGroup(list(group.sms), group.carveout_bytes, group.copied_cohorts())
    for gpc, sms in enumerate(group.sms):
        group.sms[gpc] = min(sms, number)
        number -= group.sms[gpc]
        others.sms[gpc] -= group.sms[gpc]
    return others


def relative_length(task: SmTask) -> float:
    """Return the length of the task's next CTA relative to the mean: 1 to 1 + spread times the shortest, by its hash."""
    level = (task.num_placed * HASH_MULTIPLIER % 2**32) % SPREAD_LEVELS
    task.num_placed += 1
    spread = task.work.cta_time_spread
    return (1 + spread * (level + 0.5) / SPREAD_LEVELS) / (1 + spread / 2)


def length_shift(task: SmTask, number: int) -> float:
    """Return by how much `number` of the task's CTAs in a row are longer than equally many mean ones, hashed by index.

    Their sum varies by the root of their number times the deviation of one. Whole CTAs do not matter: a slot that is late by
    one CTA runs one less. So the shift is at most half a CTA to either side.
    """
    level = (task.num_placed * HASH_MULTIPLIER % 2**32) % SPREAD_LEVELS
    task.num_placed += 1
    spread = task.work.cta_time_spread
    width = min(1.0, math.sqrt(number) * spread / (1 + spread / 2))
    return width * ((level + 0.5) / SPREAD_LEVELS - 0.5)
