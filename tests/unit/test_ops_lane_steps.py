"""The flags of a copy lane, on streams of several ranks that run in any order: nothing is read or written too early, no
flag is raised twice, nobody waits for ever; and every wait is needed."""

import random
from collections import deque
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.ops.lane_steps import RESTING, LaneMoves, LaneStep, lane_moves

COLLECTIVES = {"all-reduce": ("exchange", "release", "share", "fetch"), "reduce-scatter": ("exchange", "release")}
COLLECTIVES["all-gather"] = ("share", "fetch")
Operation = Callable[[], bool]  # whether it could be done now


class FaultError(AssertionError):
    """The flags let something happen that must not."""


class Lane:
    """All ranks' rows, shared parts and flags. Copies, sums and fillings take time: they start, and end later."""

    def __init__(self, moves: list[LaneMoves]) -> None:
        self.moves, self.num_ranks = moves, len(moves)
        self.flags = {
            (owner, number, peer): value
            for number, value in enumerate(RESTING)
            for owner in range(self.num_ranks)
            for peer in range(self.num_ranks)
        }
        self.contents: dict[tuple[object, ...], int] = {}
        self.users: dict[tuple[object, ...], list[str]] = {}  # how each cell is used just now
        self.queues: list[deque[Operation]] = [deque() for _ in moves]

    def issue(self, collective: str, number: int) -> None:
        for rank, moves in enumerate(self.moves):
            for name in COLLECTIVES[collective]:
                for step in getattr(moves, name):
                    self._step(rank, step, number)
                if name == "exchange":
                    others = [("row", rank, peer) for peer in range(self.num_ranks) if peer != rank]
                    self._use(rank, others, number, "read")
                if name == "share":
                    self._use(rank, [("shared", rank)], number, "write")

    def _step(self, rank: int, step: LaneStep, number: int) -> None:
        for peer in step.peers:
            if step.kind == "take":
                self.queues[rank].append(lambda key=(rank, step.flag, peer): self._take(key))
            elif step.kind == "raise":
                self.queues[rank].append(lambda key=(peer, step.flag, rank): self._raise(key))
            elif step.kind == "push":
                self._use(rank, [("row", peer, rank)], number, "write")
            else:
                self._use(rank, [("shared", peer)], number, "read")

    def _take(self, key: tuple[int, int, int]) -> bool:
        if not self.flags[key]:
            return False
        self.flags[key] = 0
        return True

    def _raise(self, key: tuple[int, int, int]) -> bool:
        if self.flags[key]:
            raise FaultError(f"flag {key} is raised before it was lowered")
        self.flags[key] = 1
        return True

    def _use(self, rank: int, cells: list[tuple[object, ...]], number: int, how: str) -> None:
        """Start using cells; end it in a later turn of this rank's stream."""

        def start() -> bool:
            for cell in cells:
                users = self.users.setdefault(cell, [])
                if users and "write" in (how, *users):
                    raise FaultError(f"a {how} of {cell} begins during others: {users}")
                if how == "read" and self.contents.get(cell) != number:
                    raise FaultError(f"{cell} is read in collective {number} and holds {self.contents.get(cell)}")
                users.append(how)
            return True

        def end() -> bool:
            for cell in cells:
                self.users[cell].remove(how)
                if how == "write":
                    self.contents[cell] = number
            return True

        self.queues[rank] += [start, end]

    def run(self, chance: random.Random) -> None:
        while any(self.queues):
            ready = [queue for queue in self.queues if queue]
            chance.shuffle(ready)
            if not any(queue[0]() and (queue.popleft(), True)[1] for queue in ready):
                raise FaultError("all that is left waits for ever")


def run(moves: list[LaneMoves], collectives: list[str], seed: int) -> None:
    lane = Lane(moves)
    for number, collective in enumerate(collectives):
        lane.issue(collective, number)
    lane.run(random.Random(seed))
    for (owner, number, peer), value in lane.flags.items():
        assert value == RESTING[number] or owner == peer


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 5), st.lists(st.sampled_from(sorted(COLLECTIVES)), max_size=6), st.integers(0, 10**6))
def test_any_collectives_in_any_order_of_the_ranks(num_ranks: int, collectives: list[str], seed: int) -> None:
    run([lane_moves(rank, num_ranks) for rank in range(num_ranks)], collectives, seed)


def without(moves: LaneMoves, name: str, place: int) -> LaneMoves:
    steps = getattr(moves, name)
    return msgspec.structs.replace(moves, **{name: steps[:place] + steps[place + 1 :]})


FLAG_STEPS = [
    (name, place)
    for name in ("exchange", "release", "share", "fetch")
    for place, step in enumerate(getattr(lane_moves(0, 3), name))
    if step.kind in ("take", "raise")
]


@pytest.mark.parametrize(("name", "place"), FLAG_STEPS)
def test_every_flag_is_needed(name: str, place: int) -> None:
    moves = [without(lane_moves(rank, 3), name, place) for rank in range(3)]
    faults = 0
    for seed in range(200):
        try:
            run(moves, ["all-reduce"] * 3, seed)
        except AssertionError:
            faults += 1
    assert faults
