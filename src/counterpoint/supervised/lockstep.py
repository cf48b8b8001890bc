"""Keeps ranks from running ahead of rank 0's announcements while they switch paths together.

A rule of the launch filter concerns one rank only, so a rank that reads of it late does no harm. A path concerns all
ranks: if one rank gives a collective to copy engines and another to the library, the collective never ends. So rank 0
publishes a horizon: everything that takes effect before that step has been announced. A rank that reaches the horizon
waits for a later one. Rank 0 keeps the horizon some steps ahead of itself, so only a rank that is that far ahead of rank
0 ever waits.
"""

from typing import final

from counterpoint.ranks import Exchange

LEAD_STEPS = 6  # steps by which the horizon is ahead of rank 0
FOREVER = 1 << 62
HORIZON_TOPIC, FAILED_TOPIC = "horizon", "failed"


@final
class Lockstep:
    """One rank's part. Before it begins and after it ends, no rank is held."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._horizon = FOREVER

    @property
    def is_on(self) -> bool:
        """Whether ranks are kept together."""
        return self._horizon < FOREVER

    @property
    def earliest_start(self) -> int:
        """On rank 0: return the first step from which a new announcement may take effect."""
        return self._horizon if self.is_on else 0

    def begin(self, step: int) -> None:
        """Begin, on all ranks at the same step."""
        self._horizon = step + LEAD_STEPS

    def is_held(self, step: int) -> bool:
        """Return whether this rank, after `step` steps, has to wait before the next; call again. Rank 0 moves the
        horizon on.
        """
        if not self.is_on:
            return False
        if self._exchange.rank == 0:
            self.extend(step + LEAD_STEPS)
            return False
        if step >= self._horizon:
            self._horizon = int(self._exchange.heard(HORIZON_TOPIC) or self._horizon)
        return step >= self._horizon

    def extend(self, step: int) -> None:
        """On rank 0: declare that everything that takes effect before this step is announced."""
        if self.is_on and step > self._horizon:
            self._horizon = step
            self._exchange.announce(HORIZON_TOPIC, str(step))

    def end(self) -> None:
        """End: rank 0 announces nothing more; another rank no longer takes part."""
        if self._exchange.rank == 0:
            self.extend(FOREVER)
        self._horizon = FOREVER

    def tell_failure(self, reason: str) -> None:
        """Tell rank 0 that this rank can no longer measure, so that it ends the tuning for all."""
        self._exchange.announce(FAILED_TOPIC, f"rank {self._exchange.rank}: {reason}")

    def failure(self) -> str:
        """On rank 0: return why some rank can no longer measure, or nothing."""
        return (self._exchange.heard(FAILED_TOPIC) or "") if self.is_on else ""
