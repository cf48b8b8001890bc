"""Doubles of the streams of several ranks, for expert exchanges: operations run in any order that the driver allows."""

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch

OWN_COUNTS = -1  # the address of this rank's counts
ROW_BYTES = 512
# the region of results, the place to which a rank fetches those of its tokens, and the first of the places of what it sends
RESULTS, RETURNED, GIVEN = 2, 3, 4


def begin_of(rank: int, region: int) -> int:
    """Return an address that stands for the beginning of a rank's region."""
    return (rank << 40) + (region << 32)


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
        """Run all that is queued. Some streams are slow, so that others get far ahead of them."""
        hurries = {key: chance.random() for key in self.queues}
        while ready := [key for key, queue in self.queues.items() if queue]:
            ready.sort(key=lambda key: chance.random() * hurries[key], reverse=True)
            done = next((key for key in ready if self.queues[key][0]()), None)
            assert done is not None, "every stream waits for ever"
            self.queues[done].popleft()


class ModelledRank:
    """One rank's real `ExpertCopies`, dispatches and combines, whose driver queues operations in `Streams`."""

    def __init__(self, copies: Any, streams: Streams, rank: int) -> None:
        made = self.copier = object.__new__(copies.ExpertCopies)
        self.copies, self.streams, self.rank = copies, streams, rank
        peers = tuple((rank + turn) % streams.num_ranks for turn in range(1, streams.num_ranks))
        values = {"rank": rank, "_num_ranks": streams.num_ranks, "peers": peers, "device": torch.device("cpu")}
        doubles = {name: MagicMock() for name in ("_order", "_watch", "_pool")}
        state = {"_placed": None, "_is_open": False, "_is_ahead": False, "_have_met": False, "awaits_peers": False}
        counts = {"_counts_place": 0, "_counts_row_bytes": 16, "_counts_address": 0}
        counts["_counts_on_host"] = np.zeros(2 * streams.num_ranks)
        events = {name: [None] for name in ("ready", "counted")}
        made.__dict__.update(values | doubles | state | counts | events, signals=self, blocks=self, streams=self)
        self.ends, made._vectors = {"by kernel": [None]}, {(): None}
        made._results = copies.results_module.ExpertResults(MagicMock(), self, self, peers)
        made._results.blocks = self
        made._results.pool.memory.addresses = [begin_of(peer, RESULTS) for peer in range(streams.num_ranks)]
        made._counts_pool = MagicMock()
        made._counts_pool.memory.addresses = [1000 * peer for peer in range(streams.num_ranks)]
        made.address = lambda region, peer: begin_of(peer, int(region))
        made.region = lambda *_: torch.empty(0)
        made._ends_of = lambda _: None
        made.addresses = dict.fromkeys(copies.ExpertRegion)
        empty = lambda _: SimpleNamespace(data_ptr=lambda: begin_of(rank, RETURNED))  # noqa: E731
        self.format = SimpleNamespace(num_bytes=ROW_BYTES, empty=empty)
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
        """Copy rows to a peer, or results from one."""
        pairs = [
            (target + row, source + row)
            for target, source, num_bytes in zip(*(each.tolist() for each in blocks), strict=True)
            for row in range(0, num_bytes, ROW_BYTES)
        ]
        call = self.call

        def act() -> None:
            for target, source in pairs:
                self.check(source, call)
                self.streams.memory[target] = call

        for _ in range(2):  # a copy takes a while
            self.streams.issue(self.rank, stream, act)

    def copy_counts(self, target: int, source: int, num_bytes: int, stream: str) -> None:
        memory, call, rank = self.streams.memory, self.call, self.rank
        if source == OWN_COUNTS:  # this rank's counts, to a peer
            self.streams.issue(rank, stream, lambda: memory.update({("counts", target): call}))
        else:  # the counts of all ranks are read

            def read() -> None:
                found = [memory.get(("counts", source + 8 * each)) for each in range(2 * self.streams.num_ranks)]
                assert found == [call, 1000 + call] * self.streams.num_ranks, "counts were not read yet, or not in time"

            self.streams.issue(rank, stream, read)

    def copy_results(self, target: int, _source: int, num_bytes: int, stream: str) -> None:
        """Put results that were computed elsewhere where others fetch them."""
        self.write(range(target, target + num_bytes, ROW_BYTES), self.call, stream)

    def send_rows(self, *_: object, part: str = "all") -> None:
        """What a kernel does that sends rows ahead: all, or those of first groups, or the rest."""
        layout = self.layout
        for peer in layout.peers():
            numbers = range(len(layout.ranges[peer]))
            for number in {"all": numbers, "first": numbers[:1], "rest": numbers[1:]}[part]:
                blocks = layout.blocks(self.rank, peer, number)
                rows = (each.placed + row for each in blocks for row in range(each.num_rows))
                self.write([begin_of(peer, 0) + row * ROW_BYTES for row in rows], self.call, "by kernel")

    def write(self, addresses: Iterable[int], value: object, stream: str) -> None:
        written = dict.fromkeys(addresses, value)
        self.streams.issue(self.rank, stream, lambda: self.streams.memory.update(written))

    def read(self, addresses: Iterable[int]) -> None:
        """Read what the present call has brought, or computed."""
        call = self.call
        for address in addresses:
            self.streams.issue(self.rank, "compute", lambda address=address: self.check(address, call))

    def check(self, address: int, call: int) -> None:
        place = address >> 40, address >> 32 & 7, (address & 0xFFFFFFFF) // ROW_BYTES
        found = self.streams.memory.get(address)
        assert found == call, f"(rank, region, row) {place} is of call {found} when call {call} reads it"

    # calls

    def gather(self, call: int, layout: Any, *, is_ahead: bool) -> None:
        self.call, self.layout = call, layout
        counts = MagicMock(nbytes=8, itemsize=8, shape=(1,))
        counts.data_ptr.return_value = OWN_COUNTS
        self.write(self.given(0), call, "compute")
        self.copier.gather(counts, 1000, self.send_ahead if is_ahead else lambda _: None)

    def place(self) -> None:
        """Put own rows where those of other calls lie, and leave the call to the library."""
        self.write([begin_of(self.rank, 0) + row * ROW_BYTES for row in range(40)], "own rows", "compute")
        self.copier.drop_placed()

    def send_ahead(self, gathered: object) -> None:
        first = MagicMock(numbers=(), sends_rest=self.layout.num_sent_parts == 2) if self.layout.firsts else None
        self.copier.send_ahead(None, None, gathered, first)
        for part in range(self.layout.num_sent_parts):
            self.copier.await_ahead(part)
        self.read_ahead()

    def read_ahead(self) -> None:
        groups = self.layout.groups
        for group in groups[:1] if self.layout.firsts and self.layout.num_sent_parts == 1 else groups:
            self.read_group(0, group)

    def read_group(self, region: int, group: Any) -> None:
        self.read(begin_of(self.rank, region) + row * ROW_BYTES for row in range(group.rows.start, group.rows.stop))

    def run_pass(self, call: int, layout: Any, regions: list[int], ahead: str) -> None:
        """One pass, in the order of `expert_passes.py`; all that arrives and all results are read once more at its end."""
        self.call, self.layout = call, layout
        rows = self.copies.Rows(layout, self.format, MagicMock())
        self.copier.begin()
        firsts = {region: int(ahead == "first" and not region) for region in regions if region < RESULTS}
        sent = {region: self.dispatch(region, rows, first) for region, first in firsts.items()}
        is_combined = RESULTS in regions
        if is_combined:
            returned = [begin_of(self.rank, RETURNED) + row * ROW_BYTES for row in range(layout.num_tokens)]
            self.write(returned, "another tensor", "compute")
            combine = self.copier.combine(rows)
        for group in layout.groups:
            for region in list(sent)[:1]:
                self.receive(sent[region], region, group, firsts[region])
            if is_combined:
                combine.add(group.number, torch.empty(group.rows.stop - group.rows.start, ROW_BYTES, dtype=torch.uint8))
        for region in list(sent)[1:]:
            for group in layout.groups:
                self.receive(sent[region], region, group, firsts[region])
        if is_combined:
            combine.results()
            self.read(returned)
            combine.join()
        for region, each in sent.items():
            for group in layout.groups[firsts[region] :]:
                self.read_group(region, group)
            each.join()
            self.write(self.given(region), "another tensor", "compute")
        if ahead in ("first", "both"):
            self.read_ahead()
            self.copier.end_ahead()
        self.copier.end()

    def dispatch(self, region: int, rows: Any, first: int) -> Any:
        if not first:
            self.write(self.given(region), self.call, "compute")
        source = SimpleNamespace(data_ptr=lambda: begin_of(self.rank, GIVEN + region))
        return self.copier.dispatch(self.copies.ExpertRegion(region), rows, source, were_ready=first > 0, first=first)

    def given(self, region: int) -> list[int]:
        """The addresses of the rows that this rank sends to a region."""
        return [begin_of(self.rank, GIVEN + region) + row * ROW_BYTES for row in range(self.layout.num_tokens)]

    def receive(self, sent: Any, region: int, group: Any, first: int) -> None:
        """Read a group's rows; then the rest is sent, as `AheadDispatch.send_rest` does."""
        if group.number >= first:
            sent.group(group.number)
            self.read_group(region, group)
        if group.number == first or len(self.layout.groups) == 1:
            sent.send_rest()
