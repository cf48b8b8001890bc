"""The layout of the rows of one call of experts, at their sources and at the ranks that hold their experts, in pieces that
are copied and multiplied together.

The layout follows from one matrix, which every rank knows. At their source, rows are in the order of experts, as the tokens
are; at the experts' rank, in the order of experts, and within an expert of sources. So each expert's rows from all sources
are contiguous, their weight is read once, and no kernel has to sort rows: each block of rows, of one source and one expert,
is copied straight to its place. A piece is a group of consecutive experts: the blocks of all sources for it.
"""

import itertools
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from counterpoint.schedule.routing import Routing

Counts = npt.NDArray[np.int64]
Pairs = list[list[int]]


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

    def __init__(self, counts: Counts, rank: int, num_groups: int, pairs: Pairs | None = None) -> None:
        """`pairs`: the result of `pair_rows` for the counts, if it is known."""
        self.counts, self.rank = counts, rank
        self.num_ranks, _, self.num_experts = counts.shape
        self.num_groups = num_groups
        self.pairs = pairs or pair_rows(counts)
        self.sent_rows = self.pairs[rank]  # by receiver
        self.received_rows = [row[rank] for row in self.pairs]  # by source
        self.num_tokens = sum(self.sent_rows)  # rows of this rank
        self.num_rows = sum(self.received_rows)  # rows that this rank's experts compute
        self.num_own = self.sent_rows[rank]

    # The rest is computed on first use, because an all-to-all of the library needs none of it. With one group for each
    # rank, sums of whole pairs are enough.

    @cached_property
    def _totals(self) -> Counts:
        found: Counts = self.counts.sum(0)
        return found

    @cached_property
    def _ends(self) -> Counts:
        return self._totals.cumsum(1)

    @cached_property
    def _placed(self) -> Counts:
        found: Counts = (self._ends - self._totals)[None] + self.counts.cumsum(0) - self.counts
        return found

    @cached_property
    def _sent(self) -> Counts:
        flat = self.counts.reshape(self.num_ranks, -1)
        return (flat.cumsum(1) - flat).reshape(self.counts.shape)

    @cached_property
    def own(self) -> slice:
        """Return the rows of this rank's tokens for its own experts."""
        start = sum(self.sent_rows[: self.rank])
        return slice(start, start + self.num_own)

    @cached_property
    def bounds(self) -> list[list[tuple[int, int]]]:
        """Return, by rank, the experts of each of its groups."""
        if self.num_groups == 1:
            return [[(0, self.num_experts)]] * self.num_ranks
        return [self._bounds(destination) for destination in range(self.num_ranks)]

    @cached_property
    def groups(self) -> list[ExpertRange]:
        """Return this rank's groups."""
        if self.num_groups == 1:
            return [ExpertRange(0, slice(0, self.num_experts), slice(0, self.num_rows))]
        return [
            ExpertRange(number, slice(first, last), slice(self._start(first), int(self._ends[self.rank, last - 1])))
            for number, (first, last) in enumerate(self.bounds[self.rank])
        ]

    def _bounds(self, destination: int) -> list[tuple[int, int]]:
        """Return the experts of each group of a rank, without groups that have no rows, unless there is only one."""
        ends = self._ends[destination]
        if not ends[-1]:
            return [(0, self.num_experts)]
        parts = np.arange(1, self.num_groups) * ends[-1] // self.num_groups
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
        if self.num_groups == 1:
            start = sum(self.pairs[source][:destination])
            return slice(start, start + self.pairs[source][destination])
        return self._run(source, destination, *self.bounds[destination][number])

    def blocks(self, source: int, destination: int, number: int) -> Iterator[Block]:
        """Return the blocks of a source for a group of a destination's experts, without empty ones."""
        part = source, destination, slice(*self.bounds[destination][number])
        found = zip(self._sent[part].tolist(), self._placed[part].tolist(), self.counts[part].tolist(), strict=True)
        return (Block(*each) for each in found if each[2])

    def block_arrays(self, source: int, destination: int, number: int) -> tuple[Counts, Counts, Counts]:
        """Return these blocks as arrays: the first rows at the source, those at the experts' rank, and numbers of rows."""
        part = source, destination, slice(*self.bounds[destination][number])
        counts = self.counts[part]
        used = counts.nonzero()
        return self._sent[part][used], self._placed[part][used], counts[used]

    def peers(self) -> list[int]:
        """Return the other ranks, the nearest below first, so that every port is used once per turn."""
        return [(self.rank - turn) % self.num_ranks for turn in range(1, self.num_ranks)]

    def outgoing(self) -> Iterator[tuple[int, int]]:
        """Return (receiver, group) of the pieces that this rank dispatches, the first group of every peer first."""
        for number in range(max(map(len, self.bounds))):
            for peer in self.peers():
                if number < len(self.bounds[peer]) and self.has_rows(self.rank, peer, number):
                    yield peer, number

    def has_rows(self, source: int, destination: int, number: int) -> bool:
        """Return whether a source has rows for a group of a destination's experts."""
        if self.num_groups == 1:
            return self.pairs[source][destination] > 0
        return bool(self.counts[source, destination, slice(*self.bounds[destination][number])].any())

    def sources(self, number: int) -> list[int]:
        """Return the other ranks that have rows for a group of this rank's experts."""
        return [peer for peer in self.peers() if self.has_rows(peer, self.rank, number)]

    def returned(self, source: int, destination: int, number: int) -> int:
        """Return where results of a group begin at their source, in memory that others write, which lacks the source's
        own rows.
        """
        own = self.pairs[source][source] if destination > source else 0
        start: int = self.sent(source, destination, number).start
        return start - own

    @property
    def most_grouped(self) -> int:
        """Number of rows of the rank that computes most."""
        return max(map(sum, zip(*self.pairs, strict=True)))

    @property
    def most_returned(self) -> int:
        """Number of rows of the rank to which the other ranks return most."""
        return max(sum(row) - row[rank] for rank, row in enumerate(self.pairs))


def pair_rows(counts: Counts) -> Pairs:
    """Return the rows from each source to each destination, as Python numbers, which for so few are faster than arrays."""
    found: Pairs = counts.sum(2).tolist()
    return found


def counts_of(routing: Routing) -> Counts:
    """Return a routing's counts by source, destination and local expert."""
    shape = routing.num_ranks, routing.num_ranks, routing.num_local_experts
    return np.array(routing.counts, dtype=np.int64).reshape(shape)
