"""Applies a plan to a captured step: replays launch the rewritten graph, a guard checks it, and the plan can be reverted.

The guard costs no extra step: from time to time it lets ordinary replays alternate between the original and the planned
graph, and compares their times over all ranks. A plan that is proven slower is removed, and tried again much later.
"""

from contextlib import ExitStack, closing

import torch

from counterpoint.cuda.capture import Captured
from counterpoint.cuda.graph import AbstractExecutable
from counterpoint.cuda.graph_rewriting import rewrite
from counterpoint.cuda.guarded_replays import GuardedReplays
from counterpoint.engagement import Engagement, require_engaged
from counterpoint.errors import DeviceError
from counterpoint.measurement.orders import draw_seed
from counterpoint.plan import Plan

Events = tuple[torch.cuda.Event, torch.cuda.Event]


class Applied:
    """Replays of a captured step under a plan, until `close`. Made by `apply`."""

    def __init__(self, captured: Captured, plan: Plan, guard_every: int, *, is_strict: bool, is_owner: bool) -> None:
        captured.require_repeatable()
        self._replays = GuardedReplays(guard_every, int(captured.agree(str(draw_seed()))))
        rewritten = rewrite(captured.graph, captured.read, plan)
        self.plan = plan
        self.remarks = plan.remarks_on(captured.read.step)  # empty unless the plan was made for another step
        self.engagements: tuple[Engagement, ...] = rewritten.engagements
        self._captured = captured
        with ExitStack() as opened, closing(rewritten.graph):
            if is_owner:
                opened.callback(captured.close)
            if is_strict:
                require_engaged(self.engagements)
            self._original: AbstractExecutable = captured.graph.instantiate()
            opened.callback(self._original.close)
            self._planned: AbstractExecutable = rewritten.graph.instantiate()
            opened.callback(self._planned.close)
            self._opened = opened.pop_all()
        self._is_open = True
        self._events: list[Events] = []  # events of the timed replays of a check
        self._is_reverted = not plan.directives

    @property
    def is_active(self) -> bool:
        """Whether the plan is applied: it holds a control, was not reverted, and its guard has not removed it."""
        return not self._is_reverted and self._replays.is_in_force

    def replay(self) -> None:
        """Run the step once on the current stream; call it on every rank. Raises `DeviceError` after `close`."""
        if not self._is_open:
            raise DeviceError("The plan is closed, so its step cannot be replayed. Apply it again.")
        stream = torch.cuda.current_stream()
        if self._is_reverted:
            self._original.launch(stream.cuda_stream)
            return
        replay = self._replays.next()
        executable = self._planned if replay.is_planned else self._original
        if not replay.is_timed:
            executable.launch(stream.cuda_stream)
            return
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(stream)
        executable.launch(stream.cuda_stream)
        end.record(stream)
        self._events.append((start, end))
        if self._replays.is_due():
            self._judge()

    def revert(self) -> None:
        """Return to the captured graph for good; `is_active` is False from then on."""
        self._is_reverted = True

    def close(self) -> None:
        """Free both graphs and what they use; a running replay ends as usual. A second call does nothing."""
        self._is_open = False
        self._opened.close()

    def _judge(self) -> None:
        """Judge the timed replays of a check; every rank comes to the same answer."""
        torch.cuda.synchronize()
        times_us = [1000.0 * start.elapsed_time(end) for start, end in self._events]
        self._events.clear()
        self._replays.judge(times_us, self._captured.rendezvous.slowest_of)


def apply(
    captured: Captured, plan: Plan, *, guard_every: int = 1000, is_strict: bool = False, is_owner: bool = False
) -> Applied:
    """Apply `plan` to a captured step.

    `guard_every`: replays between two checks of the guard, 0 for none, else at least 48. With `is_strict`, raises
    `EngagementError` if a control did not take effect; otherwise `engagements` report it. With `is_owner`, the captured
    step is closed together with the plan. Raises `DeviceError` for a step that draws random numbers.
    """
    return Applied(captured, plan, guard_every, is_strict=is_strict, is_owner=is_owner)
