"""The happens-before relation of actions, over several calls: by streams, dependencies, and from call to call."""

from collections.abc import Sequence

from counterpoint.schedule.actions import CopySchedule


class HappensBefore:
    """For each action of `num_calls` calls, the set of actions that have ended when it starts.

    Actions are numbered across calls: action `position` of call `call` is `call * len(actions) + position`.
    """

    def __init__(self, schedule: CopySchedule, num_calls: int) -> None:
        self._size = len(schedule.actions)
        self._before: list[int] = []
        self._num_ranks = schedule.num_ranks
        for call in range(num_calls):
            self._add_call(schedule, call)

    def is_before(self, earlier: int, later: int) -> bool:
        """Return whether `earlier` has ended when `later` starts, in every order that the hardware may choose."""
        return bool(self._before[later] >> earlier & 1)

    def are_ordered(self, one: int, other: int) -> bool:
        """Return whether one of two actions has always ended when the other starts."""
        return self.is_before(one, other) or self.is_before(other, one)

    def _add_call(self, schedule: CopySchedule, call: int) -> None:
        last_on_stream: dict[tuple[int, str], int] = {}
        offset = call * self._size
        ends = [self._end(schedule, call - 1, rank) for rank in range(self._num_ranks)] if call else []
        for action in schedule.actions:
            before = [offset + position for position in action.after]
            key = (action.rank, action.stream)
            if key in last_on_stream:
                before.append(last_on_stream[key])
            if ends:
                before += ends if action.kind == "begin" else [ends[action.rank]]
            last_on_stream[key] = len(self._before)
            self._before.append(self._closure(before))

    def _closure(self, before: Sequence[int]) -> int:
        found = 0
        for number in before:
            found |= self._before[number] | 1 << number
        return found

    def _end(self, schedule: CopySchedule, call: int, rank: int) -> int:
        positions = [
            number for number, action in enumerate(schedule.actions) if action.kind == "end" and action.rank == rank
        ]
        return call * self._size + positions[-1]
