"""The event loop: readiness, dispatch, progress. Deterministic; time is in whole picoseconds.

The cost grows with operations and with changes of state, not with CTAs: SMs in the same state form one group. While only the
same kernel could refill a slot, the slot gets its next CTAs at once (`_hand_out`), and they are taken back (`_recall`) when
anything changes. CTAs that differ in length are simulated SM by SM, in batches if there are many.
"""

import heapq
import math
from collections.abc import Hashable, Sequence

from counterpoint.machine import Machine
from counterpoint.sim.dispatch import DispatchQueue
from counterpoint.sim.rates import RateModel
from counterpoint.sim.sm import SmArray, length_shift
from counterpoint.sim.task import DONE, Cohort, CopyQueue, CopyTask, SmTask, Task
from counterpoint.step import Footprint
from counterpoint.value import Value

# Limits for kernels whose CTAs differ in length (`cta_time_spread`):
MAX_FOLLOWED_CTAS = 1024  # up to this many CTAs in a step are simulated one by one; with more, the limits below apply
BATCH = 1 / 64  # CTAs that end within this part of a CTA's time, and a quarter of the spread, end together
FOLLOWED_WAVES = 2  # last waves of a kernel that are simulated, so that its end and its neighbors' starts are right
LEAST_HANDED_WAVES = 2  # fewer CTAs are not handed out ahead
NOBODY: tuple[int, Hashable] = (-1, None)


class Launch(Value, frozen=True, kw_only=True):
    """When an operation may start: which operations it waits for, how long after each, and not before `earliest_ps`.

    `hold_ps` is a head start: the time for which its stream is held once the operation could have started.
    """

    waits_for: tuple[tuple[int, int], ...]
    earliest_ps: int = 0
    hold_ps: int = 0


class Engine:
    """Runs tasks to the end. `launches[i]` says when `tasks[i]` is ready; a run consumes both."""

    def __init__(
        self,
        machine: Machine,
        rates: RateModel,
        tasks: Sequence[Task],
        launches: Sequence[Launch],
        fits_beside: frozenset[tuple[Footprint, Footprint]],
    ) -> None:
        self._rates = rates
        self._tasks = tasks
        for task in tasks:
            task.kind = rates.kind(task.work)
        self._launches = launches
        self._sms = SmArray(machine.gpu, fits_beside)
        self._queue = DispatchQueue()
        self._copies = CopyQueue(machine.gpu.num_copy_engines)
        self._running: dict[int, Task] = {}
        self._timers: list[tuple[int, int]] = []
        uneven = [task.num_unplaced for task in tasks if isinstance(task, SmTask) and task.work.cta_time_spread]
        self._has_spread = bool(uneven)
        self._is_exact = self._sms.is_exact = 0 < sum(uneven) <= MAX_FOLLOWED_CTAS
        self._batch: list[Cohort] = []
        self._cohorts: list[Cohort] = []  # of all SMs
        self._starts = [-1] * len(tasks)
        self._ends = [-1] * len(tasks)
        self._now = 0
        self._alone = NOBODY  # the task that has been alone since nothing ran, and its work
        self._missing = [len(launch.waits_for) for launch in launches]
        self._ready_ps = [launch.earliest_ps for launch in launches]
        self._followers: list[list[tuple[int, int]]] = [[] for _ in tasks]
        for index, launch in enumerate(launches):
            for earlier, delay_ps in launch.waits_for:
                self._followers[earlier].append((index, delay_ps))

    def run(self) -> list[tuple[int, int]]:
        """Return start and end of every operation, in picoseconds from the start of the step."""
        for index, missing in enumerate(self._missing):
            if missing == 0:
                self._schedule(index)
        while self._timers or self._running:
            if not self._running and not self._is_exact and self._has_passed():
                continue
            self._advance_to(self._next_event())
            self._recall()
            has_ended = self._finish_done()
            while self._timers and self._timers[0][0] <= self._now:
                self._make_ready(heapq.heappop(self._timers)[1])
            if self._start(self._queue.place(self._sms)) or has_ended:  # or all goes on at the same rates
                if not self._has_spread or not (self._is_exact or self._runs_uneven()):
                    self._sms.merge()
                self._cohorts = [cohort for group in self._sms.groups for cohort in group.cohorts]
                self._rates.update(self._sms.groups, self._running.values())
            self._hand_out()
        return list(zip(self._starts, self._ends, strict=True))

    def _has_passed(self) -> bool:
        """While nothing runs: run the next task to its end if nothing else starts before, and return whether it did.

        This needs a task of the same work that ran alone before, in any simulation. Most kernels of most steps run alone.
        """
        begin_ps, index = self._timers[0]
        self._alone = index, _work_alone(self._tasks[index])
        lasts_ps = self._rates.alone_ps.get(self._alone[1])
        if lasts_ps is None:
            return False
        if len(self._timers) > 1 and min(self._timers[1:3])[0] < begin_ps + lasts_ps:
            return False
        heapq.heappop(self._timers)
        self._starts[index], self._now = begin_ps, begin_ps + lasts_ps
        self._finish(index)
        return True

    def _schedule(self, index: int) -> None:
        heapq.heappush(self._timers, (self._ready_ps[index] + self._launches[index].hold_ps, index))

    def _make_ready(self, index: int) -> None:
        if index != self._alone[0]:
            self._alone = NOBODY
        task = self._tasks[index]
        if isinstance(task, CopyTask):
            self._copies.submit(index)
        else:
            self._queue.add(task)

    def _start(self, placed: Sequence[SmTask]) -> bool:
        """Record that the copies which get a copy engine now and the tasks which just got their first CTA are running.

        Returns whether any copy or CTA starts.
        """
        copies = self._copies.start_next()
        for index in (*copies, *[task.index for task in placed if not task.has_started]):
            self._starts[index] = self._now
            self._running[index] = self._tasks[index]
        for task in placed:
            task.has_started = True
        return bool(copies or placed)

    def _next_event(self) -> int:
        """Return the next time at which anything can change: a timer, the end of CTAs, of shared work or of a copy."""
        soonest = self._timers[0][0] if self._timers else None
        waits = [wait for wait in map(_time_left, self._running.values()) if wait is not None]
        uneven: list[Cohort] = []  # `ends` holds their ends; a list of pairs would burden the garbage collector
        ends: list[float] = []
        for cohort in self._cohorts:
            work = cohort.task.work
            if work.is_work_sharing:
                continue
            if work.cta_time_spread:
                uneven.append(cohort)
                ends.append(cohort.remaining / cohort.rate)
                continue
            # a slot with several CTAs matters only when it begins the last one, if then
            is_early = cohort.ahead and not cohort.runs_through and cohort.remaining > 1 + DONE
            waits.append((cohort.remaining - 1 if is_early else cohort.remaining) / cohort.rate)
        if uneven:
            waits.append(self._batch_end(uneven, ends))
        if waits:
            end = self._now + max(1, math.ceil(min(waits)))
            soonest = end if soonest is None else min(soonest, end)
        assert soonest is not None, "running tasks always have a next event"
        if uneven and soonest < self._now + waits[-1]:
            self._batch = []
        return soonest

    def _batch_end(self, uneven: Sequence[Cohort], ends: Sequence[float]) -> float:
        """Return when the next CTAs of different lengths end; if there are few, each ends at its own time.

        CTAs that end within a small part of a CTA's time end together: at the mean of their times if other CTAs follow, so
        that no time is gained or lost; otherwise at the last of their times, because that is the end of their kernel.
        """
        first = min(ends)
        if self._is_exact:
            return first
        earliest = uneven[ends.index(first)]
        last = first + min(BATCH, earliest.task.work.cta_time_spread / 4) / earliest.rate
        places = [place for place, end in enumerate(ends) if end <= last]
        self._batch = [uneven[place] for place in places]
        together = [ends[place] for place in places]
        return sum(together) / len(together) if earliest.task.num_unplaced else max(together)

    def _runs_uneven(self) -> bool:
        return any(isinstance(task, SmTask) and task.work.cta_time_spread for task in self._running.values())

    def _advance_to(self, time_ps: int) -> None:
        elapsed = time_ps - self._now
        self._now = time_ps
        for cohort in self._cohorts:
            cohort.remaining -= cohort.rate * elapsed
        for cohort in self._batch:
            cohort.remaining = 0.0
        self._batch = []
        for task in self._running.values():
            if isinstance(task, CopyTask):
                task.remaining -= task.rate * elapsed
            else:
                task.shared_work -= task.rate * elapsed

    def _finish_done(self) -> bool:
        """Let CTAs end or take their next tile, and operations end; return whether any did."""
        num_running, has_done = len(self._running), any(cohort.remaining <= DONE for cohort in self._cohorts)
        if has_done:
            self._sms.renew()
        for task in list(self._running.values()):
            if isinstance(task, CopyTask):
                if task.remaining <= DONE:
                    self._copies.finish(task.index)
                    self._finish(task.index)
            elif task.work.is_work_sharing and task.shared_work <= DONE:
                # CTAs that are not placed yet have no work left
                self._sms.retire(task)
                self._queue.remove(task)
                task.num_unplaced = 0
                self._finish(task.index)
            elif task.work.num_tiles and not task.tiles_left:
                # CTAs that are not placed yet have no tile left
                task.num_unplaced = 0
                self._queue.remove(task)
        for task in self._sms.retire() if has_done else ():
            if task.num_resident == 0 and task.num_unplaced == 0:
                self._finish(task.index)
        has_ended = has_done or len(self._running) < num_running
        if has_ended and all(isinstance(task, CopyTask) for task in self._running.values()):
            self._sms.rest()
        return has_ended

    def _finish(self, index: int) -> None:
        self._ends[index] = self._now
        if self._running.pop(index, None) is not None and index == self._alone[0]:
            self._rates.alone_ps[self._alone[1]] = self._now - self._starts[index]
        for follower, delay_ps in self._followers[index]:
            self._ready_ps[follower] = max(self._ready_ps[follower], self._now + delay_ps)
            self._missing[follower] -= 1
            if self._missing[follower] == 0:
                self._schedule(follower)

    def _recall(self) -> None:
        """Take back the CTAs and tiles that were given to slots ahead of time."""
        for group in self._sms.groups:
            for cohort in group.cohorts:
                if cohort.ahead and (ahead := cohort.recall()):
                    number = ahead * cohort.count * group.num_sms()
                    if cohort.task.work.num_tiles:
                        cohort.task.tiles_left += number
                    else:
                        cohort.task.num_unplaced += number

    def _hand_out(self) -> None:
        """Give the slots of the first waiting task its next CTAs, and slots of kernels with tiles their next tiles."""
        head = self._queue.head()
        if head is not None and not (self._is_exact or head.work.is_work_sharing or head.work.num_tiles):
            head.num_unplaced = self._handed(head, head.num_unplaced)
        for task in self._running.values():
            if isinstance(task, SmTask) and task.tiles_left:
                task.tiles_left = self._handed(task, task.tiles_left)

    def _handed(self, task: SmTask, number: int) -> int:
        """Give slots their part of `number` in proportion to their speed, in whole waves; return what is left.

        If CTAs differ in length, the last waves are simulated, and the CTAs handed out shift each slot by the deviation of
        their total length, up to half a CTA.
        """
        if task.work.cta_time_spread and number < task.num_resident:
            return number  # the last waves are simulated
        cohorts, ctas = [], []
        speed = 0.0
        for group in self._sms.groups:
            num_sms = group.num_sms()
            for cohort in group.cohorts:
                if cohort.task is task:
                    cohorts.append(cohort)
                    ctas.append(cohort.count * num_sms)
                    speed += ctas[-1] * cohort.rate
        if speed == 0:
            return number
        duration = number / speed
        for cohort, num_ctas in zip(cohorts, ctas, strict=True):
            ahead = math.floor(duration * cohort.rate + DONE)
            length = 1.0
            if task.work.cta_time_spread:
                ahead -= FOLLOWED_WAVES
                if ahead < LEAST_HANDED_WAVES:
                    continue
                length += length_shift(task, ahead) / ahead
            cohort.hand(ahead, length)
            number -= ahead * num_ctas
        # if the only slots cannot share the rest, nothing changes before they end
        cohorts[0].runs_through = len(cohorts) == 1 and number > 0 and not task.work.cta_time_spread
        return number


def _work_alone(task: Task) -> Hashable:
    """Return what decides how long a task takes alone."""
    if isinstance(task, CopyTask):
        return task.kind, task.work.lone_ps
    launched = task.footprint, task.carveout_bytes, task.num_unplaced
    return task.kind, task.work.cta_ps, task.shared_work, task.tiles_left, launched


def _time_left(task: Task) -> float | None:
    """Return the picoseconds until a copy or shared work ends at the current rate; None if single CTAs decide."""
    if isinstance(task, CopyTask):
        return task.remaining / task.rate
    return task.shared_work / task.rate if task.work.is_work_sharing else None
