"""Decides which kernel's CTAs are placed next: strict priority, and within a priority the leftover policy.

No CTA of a later kernel starts until every earlier kernel of the same or a greater priority has placed all its CTAs, even
if there is room for it (measured on H200: one-thread kernels wait). Priority never preempts: it only decides which kernel
refills a free slot. `sm.py` decides what fits into a slot.
"""

from counterpoint.sim.sm import SmArray
from counterpoint.sim.task import SmTask


class DispatchQueue:
    """Tasks that still have CTAs to place, highest priority first, then in order of arrival."""

    def __init__(self) -> None:
        self._tasks: list[SmTask] = []
        self._arrivals = 0

    def add(self, task: SmTask) -> None:
        """Add `task` to those that compete for SMs."""
        self._arrivals += 1
        task.arrival = self._arrivals
        self._tasks.append(task)
        self._tasks.sort(key=lambda waiting: (waiting.priority, waiting.arrival))

    def remove(self, task: SmTask) -> None:
        """Remove `task`, whose shared work ended before all its CTAs found an SM."""
        if task in self._tasks:
            self._tasks.remove(task)

    def place(self, sms: SmArray) -> list[SmTask]:
        """Place CTAs in order until a task cannot place all of its CTAs; the tasks after it wait.

        Returns the tasks that got CTAs.
        """
        placed = []
        while self._tasks:
            task = self._tasks[0]
            if sms.place(task):
                placed.append(task)
            if task.num_unplaced:
                task.found_no_room = not task.num_resident
                break
            self._tasks.pop(0)
        return placed

    def head(self) -> SmTask | None:
        """Return the task whose CTAs are placed next, or None."""
        return self._tasks[0] if self._tasks else None
