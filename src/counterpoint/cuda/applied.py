"""A plan in force on a captured step: replays go to the rewritten graph, with a guard and a way back.

The guard costs no extra step: now and then it lets ordinary replays alternate between the original and the planned graph,
compares their times over all ranks, and goes back to the original for good where the plan has become slower.
"""

from contextlib import ExitStack, closing

import torch

from counterpoint.cuda.capture import Captured
from counterpoint.cuda.graph import AbstractExecutable
from counterpoint.cuda.guard import Guard, Turn, is_slower
from counterpoint.cuda.rewriting import rewrite
from counterpoint.engagement import Engagement, require_engaged
from counterpoint.errors import DeviceError
from counterpoint.plan import Plan

Events = tuple[torch.cuda.Event, torch.cuda.Event]


class Applied:
    """Replays of a captured step under a plan, until `close`. Made by `apply`."""

    def __init__(self, captured: Captured, plan: Plan, guard_every: int, is_strict: bool) -> None:
        captured.require_repeatable()
        self._guard = Guard(guard_every)
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
        self._events: dict[Turn, list[Events]] = {"original": [], "planned": []}
        self.is_active = bool(plan.directives)

    def replay(self) -> None:
        """Run the step once on the current stream, on every rank alike. Raises `DeviceError` after `close`."""
        if not self._is_open:
            raise DeviceError("The plan is closed, so its step cannot be replayed. Apply it again.")
        stream = torch.cuda.current_stream()
        if not self.is_active:
            self._original.launch(stream.cuda_stream)
            return
        turn = self._guard.next_turn()
        if turn == "untimed":
            self._planned.launch(stream.cuda_stream)
            return
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(stream)
        (self._original if turn == "original" else self._planned).launch(stream.cuda_stream)
        end.record(stream)
        self._events[turn].append((start, end))
        if self._guard.is_due():
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
        original, planned = (
            [start.elapsed_time(end) for start, end in self._events[turn]] for turn in ("original", "planned")
        )
        if is_slower(original, planned, self._captured.rendezvous.slowest):
            self.revert()
        for events in self._events.values():
            events.clear()


def apply(captured: Captured, plan: Plan, *, guard_every: int = 1000, is_strict: bool = False) -> Applied:
    """Put `plan` in force on a captured step.

    `guard_every`: replays between two checks of the guard, 0 for none, else at least 2 x 5. With `is_strict`, raises
    `EngagementError` where a control did not take effect; otherwise `engagements` say so. Raises `DeviceError` for a step
    that draws random numbers.
    """
    return Applied(captured, plan, guard_every, is_strict)
