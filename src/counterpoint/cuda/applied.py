"""A plan in force on a captured step: replays go to the rewritten graph, with a guard and a way back.

The guard costs no extra step: now and then it lets ordinary replays alternate between the original and the planned graph,
compares their times over all ranks, and goes back to the original for good where the plan has become slower.
"""

import statistics
from contextlib import ExitStack, closing

import torch

from counterpoint.cuda.capture import Captured
from counterpoint.cuda.graph import AbstractExecutable
from counterpoint.cuda.rewriting import rewrite
from counterpoint.engagement import Engagement, require_engaged
from counterpoint.errors import DeviceError, EngagementError
from counterpoint.plan import Plan

GUARD_PAIRS = 5
TOLERANCE = 0.01  # of the original's time; an assumption


class Applied:
    """Replays of a captured step under a plan, until `close`. Made by `apply`."""

    def __init__(self, captured: Captured, plan: Plan, guard_every: int, is_strict: bool) -> None:
        rewritten = rewrite(captured.graph, captured.read, plan)
        self.plan = plan
        self.engagements: tuple[Engagement, ...] = rewritten.engagements
        self._captured = captured
        with ExitStack() as opened, closing(rewritten.graph):
            if is_strict:
                require_engaged(self.engagements)
            self._original: AbstractExecutable = captured.graph.instantiate()
            opened.callback(self._original.close)
            self._planned: AbstractExecutable = rewritten.graph.instantiate()
            opened.callback(self._planned.close)
            self._opened = opened.pop_all()
        self._is_open = True
        self._guard_every = guard_every
        self._num_replays = 0
        self._times: tuple[list[tuple[torch.cuda.Event, torch.cuda.Event]], ...] = ([], [])
        self.is_active = bool(plan.directives)

    def replay(self) -> None:
        """Run the step once on the current stream, on every rank alike. Raises `DeviceError` after `close`."""
        if not self._is_open:
            raise DeviceError("The plan is closed, so its step cannot be replayed. Apply it again.")
        place = self._num_replays % self._guard_every if self._guard_every else 2 * GUARD_PAIRS
        self._num_replays += 1
        stream = torch.cuda.current_stream()
        if not self.is_active or place >= 2 * GUARD_PAIRS:
            (self._planned if self.is_active else self._original).launch(stream.cuda_stream)
            return
        executable = (self._original, self._planned)[place % 2]
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(stream)
        executable.launch(stream.cuda_stream)
        end.record(stream)
        self._times[place % 2].append((start, end))
        if place == 2 * GUARD_PAIRS - 1:
            self._judge()

    def revert(self) -> None:
        """Go back to the graph as it was captured; `is_active` is false from then on."""
        self.is_active = False

    def close(self) -> None:
        """Free both graphs; a replay that still runs ends as usual. A second call does nothing."""
        self._is_open = False
        self._opened.close()

    def _judge(self) -> None:
        """Compare the replays that the guard has timed; every rank comes to the same answer."""
        torch.cuda.synchronize()
        original, planned = (statistics.median(start.elapsed_time(end) for start, end in times) for times in self._times)
        rendezvous = self._captured.rendezvous
        if rendezvous.slowest(planned) > rendezvous.slowest(original) * (1 + TOLERANCE):
            self.revert()
        for times in self._times:
            times.clear()


def apply(captured: Captured, plan: Plan, *, guard_every: int = 1000, is_strict: bool = False) -> Applied:
    """Put `plan` in force on a captured step.

    `guard_every`: replays between two checks of the guard, 0 for none, else at least 2 x 5. With `is_strict`, raises
    `EngagementError` where a control did not take effect; otherwise `engagements` say so.
    """
    if guard_every and guard_every < 2 * GUARD_PAIRS:
        raise EngagementError(f"guard_every must be 0 or at least {2 * GUARD_PAIRS}; found {guard_every}.")
    return Applied(captured, plan, guard_every, is_strict)
