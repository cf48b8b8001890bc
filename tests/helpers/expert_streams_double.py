"""Doubles of the streams of several ranks, for expert exchanges: operations run in any order that the driver allows."""

import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch

OWN_COUNTS = -1  # the address of this rank's counts


class Streams:
    """The streams of all ranks: operations of one stream run in order, all else in any order; or one stream of a rank also
    waits for the others, as where they share a hardware queue. An event holds what was recorded when a wait was issued."""

    def __init__(self, num_ranks: int, *, is_one_queue: bool) -> None:
        self.queues: dict[Any, deque[Callable[[], bool]]] = defaultdict(deque)
        self.flags: dict[tuple[int, int, int], int] = defaultdict(int)  # (owner, flag, raiser)
        self.memory: dict[Any, Any] = {}
        self.num_ranks, self._is_one_queue = num_ranks, is_one_queue

    def issue(self, rank: int, stream: str, act: Callable[[], Any]) -> None:
        """Queue an operation; one that returns False is tried again."""
        self.queues[rank, "all" if self._is_one_queue else stream].append(lambda: act() is not False)

    def run(self, chance: random.Random) -> None:
        """Run all that is queued."""
        while ready := [queue for queue in self.queues.values() if queue]:
            chance.shuffle(ready)
            done = next((queue for queue in ready if queue[0]()), None)
            assert done is not None, "every stream waits for ever"
            done.popleft()


class ModelledRank:
    """One rank's real `ExpertCopies`, whose driver queues operations in `Streams`."""

    def __init__(self, copies: Any, streams: Streams, rank: int) -> None:
        made = self.copier = object.__new__(copies.ExpertCopies)
        self.copies, self.streams, self.rank = copies, streams, rank
        peers = tuple((rank + turn) % streams.num_ranks for turn in range(1, streams.num_ranks))
        values = {"rank": rank, "_num_ranks": streams.num_ranks, "_peers": peers, "device": torch.device("cpu")}
        doubles = {name: MagicMock() for name in ("_order", "_watch", "_pool")}
        state = {"_placed": None, "_is_open": False, "_is_ahead": False, "_have_met": False, "awaits_peers": False}
        counts = {"_counts_place": 0, "_counts_row_bytes": 16, "_counts_on_host": np.zeros(9), "_counts_address": 0}
        events = {name: [None] for name in ("ready", "counted")}
        made.__dict__.update(values | doubles | state | counts | events, signals=self, blocks=self, streams=self)
        self.ends, made._vectors = {"by kernel": [None]}, {(): None}
        made._results = self.results = copies.results_module.ExpertResults(MagicMock(), self, self, peers)
        made._counts_pool = MagicMock()
        made._counts_pool.memory.addresses = [1000 * peer for peer in range(streams.num_ranks)]
        made.address = lambda region, peer: 0
        made._ends_of = lambda _: None
        made.addresses = dict.fromkeys(copies.ExpertRegion)
        self.number, self.call = 0, 0

    # what the driver does

    def record(self, event: list[Any], stream: str) -> None:
        mark = event[0] = {"passed": False}
        self.streams.issue(self.rank, stream, lambda: mark.update(passed=True))

    def await_event(self, stream: str, event: list[Any]) -> None:
        mark = event[0]
        self.streams.issue(self.rank, stream, lambda: mark["passed"])

    def follow(self, name: str, event: list[Any]) -> None:
        self.await_event(name, event)

    def current(self) -> str:
        return "compute"

    def named(self, name: str) -> str:
        return name

    def as_torch(self, _name: str) -> None: ...

    def join(self, names: Any) -> None:
        for name in names:
            event: list[Any] = [None]
            self.record(event, name)
            self.await_event("compute", event)

    # signals

    def begin_call(self) -> None:
        self.number += 1

    def raise_to(self, flag: int, peers: tuple[int, ...], stream: str) -> None:
        keys, number = [(peer, flag, self.rank) for peer in peers], self.number
        self.streams.issue(self.rank, stream, lambda: self.streams.flags.update(dict.fromkeys(keys, number)))

    def wait(self, flag: int, peers: tuple[int, ...], stream: str) -> None:
        keys, number = [(self.rank, flag, peer) for peer in peers], self.number
        self.streams.issue(self.rank, stream, lambda: all(self.streams.flags[key] >= number for key in keys))

    def exchange(self, flag: int, peers: tuple[int, ...], stream: str, words: tuple[int, ...], value: int) -> None:
        said = {("counts", word): value + self.call for word in words}
        self.streams.issue(self.rank, stream, lambda: self.streams.memory.update(said))
        self.raise_to(flag, peers, stream)
        self.wait(flag, peers, stream)

    # copies: what is written is the number of the call

    def copy(self, blocks: Any, stream: str) -> None:
        peer = int(stream.removeprefix("to "))
        place, call = (peer, self.region, self.piece, self.rank), self.call
        self.streams.issue(self.rank, stream, lambda: self.streams.memory.update({place: call}))

    def copy_counts(self, target: int, source: int, num_bytes: int, stream: str) -> None:
        memory, call, rank = self.streams.memory, self.call, self.rank
        if source == OWN_COUNTS:  # this rank's counts, to a peer
            self.streams.issue(rank, stream, lambda: memory.update({("counts", target): call}))
        else:  # the counts of all ranks are read

            def read() -> None:
                found = [memory.get(("counts", source + 8 * each)) for each in range(2 * self.streams.num_ranks)]
                assert found == [call, 1000 + call] * self.streams.num_ranks, "counts were not read yet, or not in time"

            self.streams.issue(rank, stream, read)

    def send_rows(self, *_: object, part: str = "all") -> None:
        """What a kernel does that sends rows ahead: on every other rank, the first or second piece of the first region."""
        others = [rank for rank in range(self.streams.num_ranks) if rank != self.rank]
        places, call = [(peer, 0, int(part == "rest"), self.rank) for peer in others], self.call
        self.streams.issue(self.rank, "by kernel", lambda: self.streams.memory.update(dict.fromkeys(places, call)))

    # calls

    def gather(self, call: int, *, is_ahead: bool, sends_rest: bool) -> None:
        self.call, self.sends_rest = call, sends_rest
        counts = MagicMock(nbytes=8, itemsize=8, shape=(1,))
        counts.data_ptr.return_value = OWN_COUNTS
        self.copier.gather(counts, 1000, self.send_ahead if is_ahead else lambda _: None)

    def place(self) -> None:
        """Put own rows where those of other calls lie, and leave the call to the library."""
        places = [(self.rank, 0, piece, source) for piece in range(3) for source in range(self.streams.num_ranks)]
        memory = self.streams.memory
        self.streams.issue(self.rank, "compute", lambda: memory.update(dict.fromkeys(places, "own rows")))
        self.copier.drop_placed()

    def send_ahead(self, gathered: object) -> None:
        self.copier.send_ahead(None, None, gathered, MagicMock(numbers=(), sends_rest=True) if self.sends_rest else None)
        for part in range(1 + self.sends_rest):
            self.copier.await_ahead(part)
            self.read_ahead(part)

    def read_ahead(self, part: int) -> None:
        call = self.call
        for source in range(self.streams.num_ranks):
            if source != self.rank:
                key = (self.rank, 0, part, source)
                self.streams.issue(self.rank, "compute", lambda key=key: self.check(key, call))

    def send(self, call: int, regions: list[int], routes: Any, pieces: range) -> list[Any]:
        """Begin a pass, and send in all its directions; return what arrives, to be read."""
        self.call = call
        self.copier.begin()
        for self.region in [each for each in regions if each < 2]:
            outbox = self.copies.Outbox(self.copier, self.copies.ExpertRegion(self.region), 1)
            outbox.ready(torch.zeros(1))
            for self.piece in pieces:
                for peer in range(self.streams.num_ranks):
                    if routes[self.rank, peer]:
                        one = np.array([1])
                        outbox.send(peer, self.piece, (one, one, one))
            outbox.join()
        sources = [each for each in range(self.streams.num_ranks) if routes[each, self.rank]]
        if 2 in regions:
            self.combine(pieces, sources, tuple(each for each in range(self.streams.num_ranks) if routes[self.rank, each]))
        return [(region, piece, source) for region in regions if region < 2 for piece in pieces for source in sources]

    def combine(self, pieces: range, sources: list[int], readers: tuple[int, ...]) -> None:
        """Compute results piece by piece, announce them, and fetch those of the sources."""
        memory, call, flag = self.streams.memory, self.call, self.copies.arrived_flag
        self.results.begin()
        names = [f"from {source}" for source in sources]
        for name in names:
            self.follow(name, self.results.prepared)
        for piece in pieces:
            self.streams.issue(self.rank, "compute", lambda piece=piece: memory.update({(self.rank, 2, piece): call}))
            self.results.announce(piece, readers)
            for source, name in zip(sources, names, strict=True):
                self.wait(flag(self.copies.ExpertRegion.COMBINE, piece), (source,), name)
                self.streams.issue(self.rank, name, lambda key=(source, 2, piece): self.check(key, call))
        for source, name in zip(sources, names, strict=True):
            for piece in pieces:
                self.streams.issue(self.rank, name, lambda key=(source, 2, piece): self.check(key, call))
        self.join(names)

    def read(self, call: int, arriving: list[Any], *, is_ahead: bool) -> None:
        """Wait for what arrives, read it now and once more at the end, and end the pass."""
        for region, piece, source in arriving:
            self.wait(self.copies.arrived_flag(self.copies.ExpertRegion(region), piece), (source,), "compute")
            self.streams.issue(self.rank, "compute", lambda key=(self.rank, region, piece, source): self.check(key, call))
        for region, piece, source in arriving:
            self.streams.issue(self.rank, "compute", lambda key=(self.rank, region, piece, source): self.check(key, call))
        if is_ahead:
            for part in range(1 + self.sends_rest):
                self.read_ahead(part)
            self.copier.end_ahead()
        self.copier.end()

    def check(self, key: Any, call: int) -> None:
        assert self.streams.memory.get(key) == call, f"{key} was read after or before the call whose rows it should hold"
