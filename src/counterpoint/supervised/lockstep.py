"""Ranks that may not run past what rank 0 has announced, for as long as they switch paths together.

A rule of the launch filter is a rank's own matter, so a rank that hears of it late does no harm. A path is not: a collective
that one rank hands to copy engines and another to the library never ends. So rank 0 publishes a horizon: whatever holds from
a step before it has been announced. A rank that comes to the horizon waits for a later one. As rank 0 keeps the horizon some
steps ahead of itself, nobody waits who is not that far ahead of rank 0; and nobody waits for the GPU.
"""

from typing import final

from counterpoint.ranks import Exchange

LEAD_STEPS = 6  # by which the horizon is ahead of rank 0
FOREVER = 1 << 62
HORIZON_TOPIC, FAILED_TOPIC = "horizon", "failed"


@final
class Lockstep:
    """One rank's part. Until it has begun, and once it has ended, nobody is held."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._horizon = FOREVER

    @property
    def is_on(self) -> bool:
        """Whether ranks are kept together."""
        return self._horizon < FOREVER

    @property
    def earliest_start(self) -> int:
        """On rank 0: the first step from which an announcement may hold that has not been made yet."""
        return self._horizon if self.is_on else 0

    def begin(self, step: int) -> None:
        """All ranks, at the same step."""
        self._horizon = step + LEAD_STEPS

    def is_held(self, step: int) -> bool:
        """Whether this rank, after `step` steps, has to wait before the next; ask again. Rank 0 moves the horizon on."""
        if not self.is_on:
            return False
        if self._exchange.rank == 0:
            self.extend(step + LEAD_STEPS)
            return False
        if step >= self._horizon:
            self._horizon = int(self._exchange.heard(HORIZON_TOPIC) or self._horizon)
        return step >= self._horizon

    def extend(self, step: int) -> None:
        """On rank 0: say that all is announced that holds from a step before this one."""
        if self.is_on and step > self._horizon:
            self._horizon = step
            self._exchange.announce(HORIZON_TOPIC, str(step))

    def end(self) -> None:
        """On rank 0: nothing more will be announced; on another rank: it no longer takes part."""
        if self._exchange.rank == 0:
            self.extend(FOREVER)
        self._horizon = FOREVER

    def tell_failure(self, reason: str) -> None:
        """Let rank 0 know that this rank can no longer measure, so that it ends the tuning for all."""
        self._exchange.announce(FAILED_TOPIC, f"rank {self._exchange.rank}: {reason}")

    def failure(self) -> str:
        """On rank 0: why some rank can no longer measure, or nothing."""
        return (self._exchange.heard(FAILED_TOPIC) or "") if self.is_on else ""
