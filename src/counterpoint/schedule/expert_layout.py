"""Where the rows of one call of experts lie, at their sources and at the ranks that hold their experts, in pieces that are
copied and multiplied together.

All is derived from one matrix, which every rank knows. At its source a row lies by expert, as its tokens do; at its
experts' rank it lies by expert, and within an expert by source. So each expert's rows of all sources are one run, whose
weight is read once, and no row has to be sorted by a kernel: each block of rows, of one source and one expert, is copied
straight to its place. A piece is a group of consecutive experts: the blocks of all sources for it.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from counterpoint.schedule.routing import Routing

Counts = npt.NDArray[np.int64]


class Block(NamedTuple):
    """Rows of one source for one expert: the first one at the source, the first one at the experts' rank, and how many."""

    sent: int
    placed: int
    num_rows: int


class ExpertRange(NamedTuple):
    """Consecutive local experts, and their rows in the order of experts."""

    number: int
    experts: slice
    rows: slice


@final
class ExpertLayout:
    """The layout of `counts[source, destination, local expert]`, each rank's experts in at most `num_groups` groups that
    have about equally many rows."""

    def __init__(self, counts: Counts, rank: int, num_groups: int) -> None:
        self.counts, self.rank = counts, rank
        self.num_ranks, _, self.num_experts = counts.shape
        self.pairs = counts.sum(2)
        totals = counts.sum(0)
        self._ends = totals.cumsum(1)
        self._placed = (self._ends - totals)[None] + counts.cumsum(0) - counts
        flat = counts.reshape(self.num_ranks, -1)
        self._sent = (flat.cumsum(1) - flat).reshape(counts.shape)
        self.num_tokens = int(self.pairs[rank].sum())  # of this rank
        self.num_rows = int(self.pairs[:, rank].sum())  # rows that this rank's experts compute
        self.num_own = int(self.pairs[rank, rank])
        self.own = self._run(rank, rank, 0, self.num_experts)  # rows of this rank's tokens for its own experts
        self.bounds = [self._bounds(destination, num_groups) for destination in range(self.num_ranks)]
        self.groups = [
            ExpertRange(number, slice(first, last), slice(self._start(first), int(self._ends[rank, last - 1])))
            for number, (first, last) in enumerate(self.bounds[rank])
        ]

    def _bounds(self, destination: int, num_groups: int) -> list[tuple[int, int]]:
        """Return the experts of each group of a rank, without groups that have no rows, unless there is only one."""
        ends = self._ends[destination]
        if not ends[-1]:
            return [(0, self.num_experts)]
        parts = np.arange(1, num_groups) * ends[-1] // num_groups
        edges = [0, *(np.searchsorted(ends, parts, side="left") + 1).tolist(), self.num_experts]
        return [
            (first, last)
            for first, last in itertools.pairwise(edges)
            if first < last and ends[last - 1] > (ends[first - 1] if first else 0)
        ]

    def _start(self, expert: int) -> int:
        return int(self._ends[self.rank, expert - 1]) if expert else 0

    def _run(self, source: int, destination: int, first: int, last: int) -> slice:
        start = int(self._sent[source, destination, first])
        return slice(start, start + int(self.counts[source, destination, first:last].sum()))

    def sent(self, source: int, destination: int, number: int) -> slice:
        """Return the rows of a source's tokens that go to a group of a destination's experts."""
        return self._run(source, destination, *self.bounds[destination][number])

    def blocks(self, source: int, destination: int, number: int) -> Iterator[Block]:
        """Return the blocks of a source for a group of a destination's experts, without empty ones."""
        part = source, destination, slice(*self.bounds[destination][number])
        found = zip(self._sent[part].tolist(), self._placed[part].tolist(), self.counts[part].tolist(), strict=True)
        return (Block(*each) for each in found if each[2])

    def peers(self) -> list[int]:
        """The other ranks, the nearest below first, so that every port is in use once per turn."""
        return [(self.rank - turn) % self.num_ranks for turn in range(1, self.num_ranks)]

    def outgoing(self) -> Iterator[tuple[int, int]]:
        """Return (receiver, group) of the pieces that this rank dispatches, the first group of every peer first."""
        for number in range(max(map(len, self.bounds))):
            for peer in self.peers():
                if number < len(self.bounds[peer]) and self.has_rows(self.rank, peer, number):
                    yield peer, number

    def has_rows(self, source: int, destination: int, number: int) -> bool:
        """Return whether a source has rows for a group of a destination's experts."""
        return bool(self.counts[source, destination, slice(*self.bounds[destination][number])].any())

    def sources(self, number: int) -> list[int]:
        """Return the other ranks that have rows for a group of this rank's experts."""
        return [peer for peer in self.peers() if self.has_rows(peer, self.rank, number)]

    def returned(self, source: int, destination: int, number: int) -> int:
        """Return where results of a group begin at their source, in memory that others write, which lacks the source's
        own rows.
        """
        own = int(self.pairs[source, source]) if destination > source else 0
        start: int = self.sent(source, destination, number).start
        return start - own

    @property
    def most_grouped(self) -> int:
        """Rows of the rank that computes most."""
        return int(self.pairs.sum(0).max())

    @property
    def most_returned(self) -> int:
        """Rows of the rank to which most come back from others."""
        return int((self.pairs.sum(1) - self.pairs.diagonal()).max())


def counts_of(routing: Routing) -> Counts:
    """A routing's counts by source, destination and local expert."""
    shape = routing.num_ranks, routing.num_ranks, routing.num_local_experts
    return np.array(routing.counts, dtype=np.int64).reshape(shape)
