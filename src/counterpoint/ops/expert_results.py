"""Results of experts on GPUs: computed in symmetric memory, and fetched from there by copy engines of their sources.

torch's grouped matmul allocates its result by itself, so torch's allocator lends it the memory (`symmetric.py`). A result
that was not lent its place is copied there.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
from cuda.bindings import driver as cu

from counterpoint.cuda.block_sums import has_triton
from counterpoint.cuda.driver import check
from counterpoint.ops.block_copies import BlockAddresses, BlockCopies, requests
from counterpoint.ops.copy_lane import copy_bytes
from counterpoint.ops.expert_exchange import AbstractCombine, ExpertRegion, Rows
from counterpoint.ops.expert_memory import can_be_lent, result_starts
from counterpoint.ops.expert_streams import BEGUN, FETCHING, ExpertStreams, arrived_flag, new_event
from counterpoint.ops.signals import NumberedSignals
from counterpoint.ops.symmetric import LENT_MULTIPLE, SymmetricMemory, SymmetricPool

ANNOUNCED = "announced"  # the stream on which results are announced
LATE = 1.25  # rows of a rank as a multiple of the mean, from which on its results are fetched behind others'; simulated


@final
class ExpertResults:
    """The memory for results of one group on one GPU, and what moves them."""

    def __init__(
        self, pool: SymmetricPool, streams: ExpertStreams, signals: NumberedSignals, peers: tuple[int, ...]
    ) -> None:
        self.pool, self.streams, self.signals, self._peers = pool, streams, signals, peers
        self.are_fetched = True  # whether all ranks have met since results were last announced
        self.blocks = BlockCopies()
        self.ready, self.prepared = new_event(), new_event()

    def begin(self) -> SymmetricMemory | None:
        """Return the memory, which the current stream may write from here on."""
        current = self.streams.current()
        if not self.are_fetched:
            self.signals.wait(BEGUN, self._peers, current)
        self.are_fetched = False
        check("Marking a place", cu.cuEventRecord(self.prepared, current))
        return self.pool.memory

    def announce(self, number: int, peers: tuple[int, ...]) -> None:
        """Let these peers fetch the results of a group, which the current stream computes."""
        if peers:
            check("Readying results", cu.cuEventRecord(self.ready, self.streams.current()))
            self.streams.follow(ANNOUNCED, self.ready)
            self.signals.raise_to(arrived_flag(ExpertRegion.COMBINE, number), peers, self.streams.named(ANNOUNCED))

    def close(self) -> None:
        """Free all memory."""
        self.pool.close()
        for event in (self.ready, self.prepared):
            check("Destroying an event", cu.cuEventDestroy(event))


@final
class CopyCombine(AbstractCombine):
    """Announces each group's results to their sources, and fetches those of this rank's rows.

    This rank's own results are copied by SMs, which the matmuls keep until they end. So they follow all matmuls: the last
    group's results are in transit then, and hide them.
    """

    def __init__(self, shared: ExpertResults, rows: Rows, computed: torch.Tensor) -> None:
        """`computed`: this rank's memory for all groups' results, one after the other."""
        self._shared, self._rows, self._computed, layout = shared, rows, computed, rows.layout
        self._results = rows.format.empty(layout.num_tokens)
        self._memory = shared.begin()
        size = rows.format.num_bytes
        self._starts = [result_starts(groups, size) for groups in layout.ranges]
        self._is_lent = self._memory is not None and self._memory.is_lent_here() and can_be_lent(layout.groups, size)
        self._added: dict[int, torch.Tensor] = {}  # by group
        self._has_fetched = False
        num_rows = layout.grouped_rows
        self._is_late = [number * layout.num_ranks > LATE * sum(num_rows) for number in num_rows]  # by rank
        self.num_sent_bytes = (layout.num_rows - layout.num_own) * size

    def memory(self) -> AbstractContextManager[None]:
        """See `AbstractCombine.memory`."""
        return self._memory.lending() if self._memory is not None and self._is_lent else nullcontext()

    def add(self, number: int, rows: torch.Tensor) -> None:
        """See `AbstractCombine.add`."""
        layout = self._rows.layout
        if self._memory is not None and rows.shape[0]:
            place = self._memory.addresses[layout.rank] + self._starts[layout.rank][number]
            if rows.data_ptr() != place:
                if self._is_lent:  # no later group may be lent what this one is given now, and torch would do it again
                    rows, self._is_lent, self._memory.is_lent = rows.clone(), False, False
                copy_bytes(place, rows.data_ptr(), rows.nbytes, self._shared.streams.current())
        self._added[number] = rows
        self._shared.announce(number, tuple(layout.sources(number)))
        self._fetch(number, number + 1)

    def _fetch(self, first: int, last: int | None = None) -> None:
        """Fetch the results of groups `first` to `last` - 1 of every peer when they are announced."""
        for number, peers in self._rows.layout.receivers(first, last):
            self._fetch_group(number, sorted(peers, key=self._is_late.__getitem__))

    def _fetch_group(self, number: int, peers: Sequence[int]) -> None:
        shared, layout, size = self._shared, self._rows.layout, self._rows.format.num_bytes
        handle = shared.streams.named(FETCHING)
        if not self._has_fetched:
            shared.streams.follow(FETCHING, shared.prepared)
            self._has_fetched = True
        assert self._memory is not None, "there are rows"
        blocks, target = {}, self._results.data_ptr()
        for peer in peers:
            sent, placed, num_rows = layout.block_arrays(layout.rank, peer, number)
            start = self._starts[peer][number] - layout.ranges[peer][number].rows.start * size
            source = self._memory.addresses[peer] + start
            blocks[peer] = BlockAddresses(sent * size + target, placed * size + source, num_rows * size)
        for announced, copied in requests(blocks):
            shared.signals.wait(arrived_flag(ExpertRegion.COMBINE, number), announced, handle)
            shared.blocks.copy(copied, handle)

    def results(self) -> torch.Tensor:
        """See `AbstractCombine.results`."""
        self._fetch(len(self._added))  # the groups of peers that have more
        layout = self._rows.layout
        if self._rows.format.num_bytes % LENT_MULTIPLE == 0:  # no group's place is rounded up
            self._take_own(self._computed, 0, layout.own)
        else:
            for number, rows in self._added.items():
                own = layout.sent(layout.rank, layout.rank, number)
                self._take_own(rows, layout.groups[number].rows.start, own)
        self._shared.streams.join([FETCHING] * self._has_fetched)
        self._added.clear()
        return self._results

    def _take_own(self, rows: torch.Tensor, start: int, own: slice) -> None:
        """Copy results of this rank's own experts for these of its tokens; `rows` are results from row `start` on."""
        if own.stop == own.start:
            return
        places, first = self._rows.sorting.places.own, own.start - self._rows.layout.own.start
        if has_triton():
            from counterpoint.ops.expert_kernels import take_rows  # noqa: PLC0415  needs Triton

            take_rows(rows, places, (first, start), self._results, own)
        else:
            there = places[first : first + own.stop - own.start] - start
            torch.index_select(rows, 0, there, out=self._results[own])

    def join(self) -> None:
        """See `AbstractCombine.join`. The other ranks fetch this rank's results."""
