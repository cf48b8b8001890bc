"""Streams, flags and memories of several GPUs, without any: programs of all ranks run in whatever order the rules allow.

It follows the rules that the driver promises and no others: operations of one stream run in order; an event holds
what was recorded when the wait was issued; a wait for a flag passes when the word is 1; everything else may happen in
any order, which the caller's random numbers pick. Streams may also share one hardware queue, where an operation
blocks all that was issued behind it. Contents are counted row by row: each row holds how often each product of each
rank is in it.
"""

import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from counterpoint.schedule import Action, CopySchedule, Region
from counterpoint.schedule.program import FREE, Program, make_program

Row = Counter[tuple[Any, ...]]
Given = Callable[[Region], list[Row]]


class DeadlockError(AssertionError):
    """Nothing can go on."""


class Node:
    """All ranks, their memories and flags, and the operations issued on each queue."""

    def __init__(self, num_ranks: int, *, is_one_queue: bool) -> None:
        self.num_ranks = num_ranks
        self.rows: dict[tuple[int, str, int], Row] = {}
        self.flags: dict[tuple[int, int, int], int] = {}  # (owner, number, raiser)
        self.is_one_queue = is_one_queue
        self._num_calls = 0
        self.queues: dict[tuple[int, str], deque[Callable[[], bool]]] = {}

    def issue(self, schedule: CopySchedule, given: Given) -> "Memory":
        """Issue one call on every rank; returns what reads its results once it has run."""
        self._num_calls += 1
        memory = Memory(self.rows, schedule, (given, self._num_calls))
        for rank in range(self.num_ranks):
            self._issue_rank(make_program(schedule, rank), memory)
        return memory

    def run(self, chance: random.Random) -> None:
        """Run all that is issued, in a random order that the rules allow."""
        while any(self.queues.values()):
            ready = [key for key, queue in self.queues.items() if queue]
            chance.shuffle(ready)
            for key in ready:
                if self.queues[key][0]():
                    self.queues[key].popleft()
                    break
            else:
                raise DeadlockError(f"{len(ready)} queues wait for ever")

    def _issue_rank(self, program: Program, memory: "Memory") -> None:
        done: dict[int, dict[str, bool]] = {}
        rank = program.rank
        start = self._marker(rank, "compute 0")
        forked = {"compute 0"}
        for step in program.steps:
            if step.is_incoming:
                continue
            queue = self._queue(rank, step.action.stream)
            if step.action.stream not in forked:
                forked.add(step.action.stream)
                queue.append(lambda start=start: start["passed"])
            for earlier in step.waits:
                queue.append(lambda event=done[earlier]: event["passed"])
            if step.action.kind == "begin":
                queue.append(lambda: self._reset(rank))
            for flag in step.announces:
                queue.append(lambda key=(flag.peer, flag.number, rank): self._raise(key))
            for flag in step.takes:
                queue.append(lambda key=(rank, flag.number, flag.peer): self._take(key))
            queue.append(lambda action=step.action: memory.act(action))
            done[step.position] = self._marker(rank, step.action.stream)
            for flag in step.raises:
                queue.append(lambda key=(flag.peer, flag.number, rank): self._raise(key))

    def _queue(self, rank: int, stream: str) -> deque[Callable[[], bool]]:
        return self.queues.setdefault((rank, "all" if self.is_one_queue else stream), deque())

    def _marker(self, rank: int, stream: str) -> dict[str, bool]:
        event = {"passed": False}

        def pass_it() -> bool:
            event["passed"] = True
            return True

        self._queue(rank, stream).append(pass_it)
        return event

    def _take(self, key: tuple[int, int, int]) -> bool:
        if self.flags.get(key, 0) != 1:
            return False
        if key[1] == FREE:  # the others rest until the next call begins
            self.flags[key] = 0
        return True

    def _reset(self, rank: int) -> bool:
        self.flags.update({key: 0 for key in self.flags if key[0] == rank and key[1] != FREE})
        return True

    def _raise(self, key: tuple[int, int, int]) -> bool:
        assert self.flags.get(key, 0) == 0, f"flag {key} is raised before it was taken"
        self.flags[key] = 1
        return True


class Memory:
    """The memories as one call's schedule lays them out: its symmetric buffers lie where those of other schedules do."""

    def __init__(self, rows: dict[tuple[int, str, int], Row], schedule: CopySchedule, call: tuple[Given, int]) -> None:
        self._rows = rows
        self._given, self._number = call
        self._places: dict[str, int] = {}
        self._homes = {buffer.name: buffer.home for buffer in schedule.buffers}
        end = 0
        for buffer in schedule.buffers:
            if buffer.home == "symmetric":
                self._places[buffer.name] = end
                end += buffer.num_rows

    def act(self, action: Action) -> bool:
        """Do an action."""
        read = [self._given(each) if self._homes[each.buffer] == "given" else self.content(each) for each in action.reads]
        for region, rows in _results(action, read):
            for key, row in zip(self._keys(region), rows, strict=True):
                self._rows[key] = row
        return True

    def content(self, region: Region) -> list[Row]:
        """What is in those rows; nothing in what was never written."""
        return [self._rows.get(key, Counter()) for key in self._keys(region)]

    def _keys(self, region: Region) -> list[tuple[int, str, int]]:
        place = self._places.get(region.buffer)
        name = f"{region.buffer} of call {self._number}" if place is None else "symmetric"
        return [(region.rank, name, (place or 0) + row) for row in range(region.start, region.stop)]


def _results(action: Action, read: list[list[Row]]) -> list[tuple[Region, list[Row]]]:
    """What an action writes, from what it read."""
    if action.kind in ("begin", "end") or not action.writes:
        return []
    if action.kind in ("copy", "place"):
        return [(action.writes[0], read[0])]
    if action.kind == "sum":
        return [(action.writes[0], [sum(rows, Counter()) for rows in zip(*read, strict=True)])]
    if action.kind == "weight_gradient":
        pairs = zip(*read, strict=True)
        whole: Row = Counter(("outer", tuple(left.elements()), tuple(right.elements())) for left, right in pairs)
        return [(region, [whole] * region.num_rows) for region in action.writes]
    products = [[_times_weight(row, action.rank) for row in rows] for rows in read[: len(action.writes)]]
    if action.kind == "add_matmul":
        products = [[row + there for row, there in zip(products[0], read[1], strict=True)]]
    return list(zip(action.writes, products, strict=True))


def _times_weight(row: Row, rank: int) -> Row:
    return Counter({("times", rank, *term): count for term, count in row.items()})
