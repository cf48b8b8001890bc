"""The contract of what times one operator call on this rank: GPUs by events, a double by a script."""

from abc import ABC, abstractmethod
from collections.abc import Callable


class AbstractCallTimer(ABC):
    """Times single calls. All ranks of a group time the same calls in the same order."""

    @property
    @abstractmethod
    def num_warm_up_rounds(self) -> int:
        """How often a call must have come before it runs as it will from then on."""

    @abstractmethod
    def time_us(self, label: str, call: Callable[[], None]) -> float:
        """Make a call once, started together with the other ranks; microseconds that it took this rank.

        `label` says in words what the call is.
        """
