"""Proof that controls took effect: what was asked, what was applied, and what the driver confirmed when it was asked
again.

Every applier of a plan returns these values, and every report prints them with the same wording.
"""

from collections.abc import Iterable
from typing import Literal

from counterpoint.errors import EngagementError
from counterpoint.kernel_names import readable
from counterpoint.value import Value

State = Literal["verified", "refused", "failed"]


class Engagement(Value, frozen=True, kw_only=True):
    """One control on one target. `asked` and `found` are figures in words; `reason` says why it is not verified."""

    control: str
    target: str
    state: State
    asked: str
    found: str = ""
    reason: str = ""


class EngagementRow(Value, frozen=True, kw_only=True):
    """Equal engagements of several launches of one kernel, with their count."""

    engagement: Engagement
    count: int


def summarize_engagements(engagements: Iterable[Engagement]) -> tuple[EngagementRow, ...]:
    """Return equal engagements once each, with their count, in the order in which they first appear."""
    counts: dict[Engagement, int] = {}
    for engagement in engagements:
        counts[engagement] = counts.get(engagement, 0) + 1
    return tuple(EngagementRow(engagement=engagement, count=count) for engagement, count in counts.items())


def require_engaged(engagements: Iterable[Engagement]) -> None:
    """Raise `EngagementError` unless every control is verified; this is what `strict` does."""
    for engagement in engagements:
        if engagement.state != "verified":
            raise EngagementError(
                f"{engagement.control} on '{readable(engagement.target)}' is {engagement.state}: asked {engagement.asked}, "
                f"found {engagement.found or 'nothing'}; {engagement.reason}."
            )
