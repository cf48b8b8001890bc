"""Counts what a rank exchanges in calls of experts on CPUs."""

from collections import Counter

from counterpoint.ops.expert_library import ExpertLibrary
from counterpoint.ops.expert_messages import ExpertMessages


class Sent:
    """Counts what this rank exchanges: counts of rows, and rows in one direction, by messages or all-to-alls."""

    def __init__(self) -> None:
        self._found = Counter[str]()
        self._count(ExpertLibrary, "gather", "counts")  # messages exchange their counts by it, too
        for exchange in (ExpertMessages, ExpertLibrary):
            for name in ("dispatch", "combine"):
                self._count(exchange, name, "rows")

    def _count(self, exchange: type, name: str, kind: str) -> None:
        method = getattr(exchange, name)

        def call(*arguments: object, **named: object) -> object:
            self._found[kind] += 1
            return method(*arguments, **named)

        setattr(exchange, name, call)

    def taken(self) -> tuple[int, int]:
        """The number of exchanges of counts, and of rows in one direction, since the last time."""
        found = self._found["counts"], self._found["rows"]
        self._found.clear()
        return found
