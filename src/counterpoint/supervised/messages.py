"""Messages between the ranks of a tuned job, as values: each rank reports what it saw, rank 0 announces what all do
next.
"""

from typing import Literal

from counterpoint.integrations.paths import LIBRARY, Integration, PathOffer, Paths
from counterpoint.launch_filter.control_block import SeenFunction
from counterpoint.measurement.values import Measurement, Order
from counterpoint.plan import Plan, Refusal
from counterpoint.supervised.candidates import LiveCandidate
from counterpoint.supervised.settings import UNCHANGED, Setting
from counterpoint.supervised.turns import TurnTimes
from counterpoint.value import Value

ControlTarget = tuple[str, str]  # a control's tag, and its target in words


class PathSurvey(Value, frozen=True, kw_only=True):
    """What one rank could take over, or the `problem` that kept it from looking."""

    offers: tuple[PathOffer, ...] = ()
    problem: str = ""


class PathsTaken(Value, frozen=True, kw_only=True):
    """What failed, and why, when one rank prepared its paths."""

    failed: dict[Integration, str]


class KernelReport(Value, frozen=True, kw_only=True):
    """The kernels that one rank has launched."""

    functions: tuple[SeenFunction, ...]


class RoundReport(Value, frozen=True, kw_only=True):
    """One round as a rank saw it: its turns by entrant; by how many steps it read the order too late; which controls
    have taken effect there so far in this tuning, and why others did not.
    """

    turns: tuple[TurnTimes, ...]
    late_steps: int = 0
    engaged: tuple[ControlTarget, ...] = ()
    unengaged: tuple[Refusal, ...] = ()


class Trials(Value, frozen=True, kw_only=True):
    """The candidates that fit the budget, and those left out with the reason."""

    candidates: tuple[LiveCandidate, ...]
    refusals: tuple[Refusal, ...]


class Decision(Value, frozen=True, kw_only=True):
    """The plan that holds from now on, its setting, and the times behind it."""

    plan: Plan
    setting: Setting = UNCHANGED
    measurements: tuple[Measurement, ...] = ()


class GuardCheck(Value, frozen=True, kw_only=True):
    """What the guard found, and why: continue as before, or with more rounds, take the plan out, put it back, or tune
    again.
    """

    verdict: Literal["keep", "go on", "remove", "put back", "reopen"]
    reason: str = ""


class Announcement(Value, frozen=True, kw_only=True):
    """An announcement of rank 0. It holds on every rank when `start_step` steps have ended. A problem ends tuning on all
    ranks.

    `order` are turns that begin at `order_step`. `variant_paths` are the paths of its variants, by number, and
    `rest_paths` those of the resting setting: a rank that can no longer measure can still switch with the others.
    """

    start_step: int
    problem: str = ""
    trials: Trials | None = None
    decision: Decision | None = None
    look: GuardCheck | None = None
    order: Order | None = None
    order_step: int = 0
    variant_paths: tuple[Paths, ...] = ()
    rest_paths: Paths = LIBRARY

    @property
    def is_last(self) -> bool:
        """Whether nothing follows it: the end, or an unguarded decision."""
        return bool(self.problem) or (self.decision is not None and self.order is None)


def report_topic(topic: str, order: Order) -> str:
    """Return the topic under which ranks report the rounds of an order."""
    return f"{topic}/order {order.number}"
