"""The guard of a plan in force: when replays alternate between the original and the planned graph, and what their times say.

It costs no extra step: ordinary replays are timed. Needs neither torch nor CUDA.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Literal

from counterpoint.errors import EngagementError

GUARD_PAIRS = 5
TOLERANCE = 0.01  # of the original's time; an assumption

Turn = Literal["original", "planned", "untimed"]


class Guard:
    """Counts replays: of each `every`, the first 2 x 5 are timed, the original and the planned graph in turn; 0 for none."""

    def __init__(self, every: int) -> None:
        if every and every < 2 * GUARD_PAIRS:
            raise EngagementError(f"guard_every must be 0 or at least {2 * GUARD_PAIRS}; found {every}.")
        self._every = every
        self._num_replays = 0

    def next_turn(self) -> Turn:
        """What the next replay is for."""
        place = self._num_replays % self._every if self._every else 2 * GUARD_PAIRS
        self._num_replays += 1
        if place >= 2 * GUARD_PAIRS:
            return "untimed"
        return "planned" if place % 2 else "original"

    def is_due(self) -> bool:
        """Whether the replay that came last completed the timed ones."""
        return bool(self._every) and self._num_replays % self._every == 2 * GUARD_PAIRS % self._every


def is_slower(original: Sequence[float], planned: Sequence[float], slowest: Callable[[float], float]) -> bool:
    """Whether the plan has become slower than the original beyond the tolerance; `slowest` is the greatest over all ranks.

    Medians are compared, so that one disturbed replay does not decide.
    """
    return slowest(statistics.median(planned)) > slowest(statistics.median(original)) * (1 + TOLERANCE)
