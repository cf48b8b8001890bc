"""The layout of the rows of one call of experts, at their sources and at the ranks that hold their experts, in pieces that
are copied and multiplied together.

The layout follows from one matrix, which every rank knows. At their source, rows are in the order of experts, as the tokens
are; at the experts' rank, in the order of experts, and within an expert of sources. So each expert's rows from all sources
are contiguous, their weight is read once, and no kernel has to sort rows: each block of rows, of one source and one expert,
is copied straight to its place. A piece is a group of consecutive experts: the blocks of all sources for it. The first and
the last group have half as many rows as the others, because nothing hides the first one's way there, and the last one's
back. An expert with very many rows is cut. The rows of first groups may be given, where they were chosen before the counts
were known; then they cut any expert.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from counterpoint.schedule.routing import Routing

Counts = npt.NDArray[np.int64]
# An expert with so many rows may be in two groups, which reads its weight twice. It is cut at a multiple of rows, so that
# no tile of a matmul is cut. Both chosen, not measured.
LEAST_CUT_ROWS, CUT_MULTIPLE = 4096, 256
Pairs = list[list[int]]


class Block(NamedTuple):
    """Rows of one source for one expert: the first one at the source, the first one at the experts' rank, and how many."""

    sent: int
    placed: int
    num_rows: int


class ExpertRange(NamedTuple):
    """Consecutive local experts, and rows in the order of experts; `is_cut`: not all rows of these experts."""

    number: int
    experts: slice
    rows: slice
    is_cut: bool = False


@final
class ExpertLayout:
    """The layout of `counts[source, destination, local expert]`, each rank's experts in at most `num_groups` groups."""

    def __init__(
        self, counts: Counts, rank: int, num_groups: int, pairs: Pairs | None = None, firsts: Sequence[int] = ()
    ) -> None:
        """`pairs`: the result of `pair_rows` for the counts, if it is known. `firsts`: each rank's rows in its first group,
        if these are given.
        """
        self.counts, self.rank, self.firsts = counts, rank, firsts
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

    # Few numbers are handled one by one: a call of numpy costs the host as much as 50 of them, and the GPU waits for it.

    @cached_property
    def ranges(self) -> list[list[ExpertRange]]:
        """Return the groups of every rank, without groups that have no rows, unless there is only one."""
        if self.num_groups == 1:
            return [[ExpertRange(0, slice(0, self.num_experts), slice(0, rows))] for rows in self.grouped_rows]
        firsts = self.firsts or [0] * self.num_ranks
        return [list(self._ranges(*each)) for each in zip(self._ends.tolist(), firsts, strict=True)]

    def _ranges(self, ends: list[int], num_first: int) -> Iterator[ExpertRange]:
        """Yield the groups of a rank, given where its experts' rows end, and how many its first group has at most, or 0."""
        number = start = origin = first = 0
        begins_cut, num_rows = False, ends[-1]
        part, num_parts = 1, num_parts_of(self.num_groups)
        if 0 < num_first < num_rows:  # the other groups are two parts each, and the last one is one
            last = bisect_left(ends, num_first)
            begins_cut = ends[last] > num_first
            yield ExpertRange(0, slice(0, last + 1), slice(0, num_first), begins_cut)
            number, part, num_parts = 1, 2, num_parts - 1
            start = origin = num_first
            first = last if begins_cut else last + 1
        elif num_first:
            part = num_parts  # all rows are in the first group
        for at in range(part, num_parts, 2):
            stop = origin + at * (num_rows - origin) // num_parts
            last = bisect_left(ends, stop)
            begin = ends[last - 1] if last else 0
            is_cut = ends[last] - begin >= LEAST_CUT_ROWS
            stop = stop - (stop - begin) % CUT_MULTIPLE if is_cut else ends[last]
            if start < stop < num_rows:
                yield ExpertRange(number, slice(first, last + 1), slice(start, stop), begins_cut or is_cut)
                number, start, first, begins_cut = number + 1, stop, last if is_cut else last + 1, is_cut
        yield ExpertRange(number, slice(first, self.num_experts), slice(start, num_rows), begins_cut)

    @property
    def groups(self) -> list[ExpertRange]:
        """Return this rank's groups. Two of them share an expert that is cut."""
        return self.ranges[self.rank]

    @cached_property
    def group_ends(self) -> list[list[int]]:
        """Return, for each of this rank's groups, where the rows of its experts end, from the first row of the group."""
        ends = self._ends[self.rank].tolist()
        return [
            [min(end, rows.stop) - rows.start for end in ends[experts]] for _, experts, rows, _ in self.ranges[self.rank]
        ]

    def sent(self, source: int, destination: int, number: int) -> slice:
        """Return the rows of a source's tokens that go to a group of a destination's experts."""
        if self.num_groups == 1:
            start = sum(self.pairs[source][:destination])
            return slice(start, start + self.pairs[source][destination])
        ranges = self.ranges[destination]
        start = self._begin(source, destination, ranges[number])
        if number + 1 < len(ranges):
            return slice(start, self._begin(source, destination, ranges[number + 1]))
        return slice(start, int(self._sent[source, destination, 0]) + self.pairs[source][destination])

    def _begin(self, source: int, destination: int, group: ExpertRange) -> int:
        """Return the first row of a source's tokens that goes to a group."""
        first = source, destination, group.experts.start
        start = int(self._sent[first])
        if group.is_cut:  # rows of its first expert may be in the group before
            start += min(max(group.rows.start - int(self._placed[first]), 0), int(self.counts[first]))
        return start

    def blocks(self, source: int, destination: int, number: int) -> Iterator[Block]:
        """Return the blocks of a source for a group of a destination's experts, without empty ones."""
        found = zip(*(each.tolist() for each in self.block_arrays(source, destination, number)), strict=True)
        return (Block(*each) for each in found)

    def block_arrays(self, source: int, destination: int, number: int) -> tuple[Counts, Counts, Counts]:
        """Return these blocks as arrays: the first rows at the source, those at the experts' rank, and numbers of rows."""
        _, experts, rows, is_cut = self.ranges[destination][number]
        part = source, destination, experts
        sent, placed, counts = self._sent[part], self._placed[part], self.counts[part]
        if is_cut:
            before = (rows.start - placed).clip(0)  # rows of a cut expert that are in the group before
            sent, placed, counts = sent + before, placed + before, counts.clip(max=rows.stop - placed) - before
        used = (counts > 0).nonzero()
        return sent[used], placed[used], counts[used]

    def peers(self) -> list[int]:
        """Return the other ranks, the nearest below first, so that every port is used once per turn."""
        return [(self.rank - turn) % self.num_ranks for turn in range(1, self.num_ranks)]

    def outgoing(self, first: int = 0, last: int | None = None) -> Iterator[tuple[int, int]]:
        """Return (receiver, group) of the pieces that this rank dispatches, the first group of every peer first; or only
        those of groups `first` to `last` - 1.
        """
        for number, peers in self.receivers(first, last):
            for peer in peers:
                yield peer, number

    def receivers(self, first: int = 0, last: int | None = None) -> Iterator[tuple[int, list[int]]]:
        """Yield the number of each group, from `first` to `last` - 1, and the other ranks that this rank has rows for in it;
        none without such ranks.
        """
        for number in range(max(map(len, self.ranges)))[first:last]:
            peers = (peer for peer in self.peers() if number < len(self.ranges[peer]))
            if found := [peer for peer in peers if self.has_rows(self.rank, peer, number)]:
                yield number, found

    def has_rows(self, source: int, destination: int, number: int) -> bool:
        """Return whether a source has rows for a group of a destination's experts."""
        if self.num_groups == 1:
            return self.pairs[source][destination] > 0
        rows = self.sent(source, destination, number)
        return bool(rows.start < rows.stop)

    def sources(self, number: int) -> list[int]:
        """Return the other ranks that have rows for a group of this rank's experts."""
        return [peer for peer in self.peers() if self.has_rows(peer, self.rank, number)]

    @property
    def grouped_rows(self) -> list[int]:
        """Number of rows that each rank's experts compute."""
        return list(map(sum, zip(*self.pairs, strict=True)))

    @property
    def most_grouped(self) -> int:
        """Number of rows of the rank that computes most."""
        return max(self.grouped_rows)


def num_parts_of(num_groups: int) -> int:
    """Return how many parts of equally many rows so many groups have: the first and the last group are one, others two."""
    return max(1, 2 * num_groups - 2)


def pair_rows(counts: Counts) -> Pairs:
    """Return the rows from each source to each destination, as Python numbers, which for so few are faster than arrays."""
    found: Pairs = counts.sum(2).tolist()
    return found


def counts_of(routing: Routing) -> Counts:
    """Return a routing's counts by source, destination and local expert."""
    shape = routing.num_ranks, routing.num_ranks, routing.num_local_experts
    return np.array(routing.counts, dtype=np.int64).reshape(shape)
