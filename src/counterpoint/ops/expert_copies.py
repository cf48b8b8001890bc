"""An expert exchange on GPUs: copy engines push rows into the symmetric memory of the rank that needs them, and a flag
announces each piece to the stream that reads it. Results are computed in symmetric memory, and a flag announces each group's
to the copy engines that fetch them. Neither uses an SM, and the host waits only for the counts of rows.

If a call is expected to be like earlier ones, a kernel sends its tokens instead, before the host knows the counts
(`expert_ahead.py`). All ranks expect the same.

Flags, per peer, hold numbers of calls: COUNTS_ARRIVED; BEGUN (I read what earlier calls brought, so my rows and your
results may be written); ARRIVED of a region and a piece, of results when they may be fetched. A rank sends when its peer has
begun, which the exchange of counts says too, so that only a pass without one says BEGUN. Counts alternate between two
places: when a rank writes to one again, all others have begun the exchange between. Calls follow each other
(`call_order.py`), and within a call the waits of all ranks have one order, direction by direction, so that streams that
share a hardware queue cannot deadlock.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import numpy as np
import torch
import torch.distributed as dist
from cuda.bindings import driver as cu

from counterpoint.cuda.block_sums import has_triton
from counterpoint.cuda.driver import check
from counterpoint.errors import OperatorError
from counterpoint.ops.agreement import Agreement
from counterpoint.ops.block_copies import BlockAddresses, requests
from counterpoint.ops.call_order import WATCH_PRIORITY, CallOrder
from counterpoint.ops.copy_lane import copy_bytes
from counterpoint.ops.expert_exchange import (
    AbstractCombine,
    AbstractDispatch,
    AbstractExpertCopies,
    ExpertRegion,
    FirstRows,
    Needed,
    RowFormat,
    Rows,
)
from counterpoint.ops.expert_memory import SPARE_TO_LEND, RegionSizes
from counterpoint.ops.expert_results import CopyCombine, ExpertResults
from counterpoint.ops.expert_streams import (
    BEGUN,
    COUNTS_ARRIVED,
    KERNEL,
    NUM_FLAGS,
    SENDING,
    ExpertStreams,
    arrived_flag,
    new_event,
)
from counterpoint.ops.grouped_matmul import GROUPED_TYPE, can_spare_sms
from counterpoint.ops.lane import aligned
from counterpoint.ops.signals import NumberedSignals
from counterpoint.ops.streams import OnStream, stream_of
from counterpoint.ops.symmetric import SymmetricMemory, SymmetricPool
from counterpoint.schedule.expert_layout import Counts
from counterpoint.units import format_bytes

VECTOR_BYTES = 16  # which the kernel that sends rows reads and writes at once
MAX_VECTORS = 64  # vectors of numbers that are kept on the GPU


@final
class ExpertCopies(AbstractExpertCopies):
    """Symmetric memory, flags and copy streams of one group on one GPU."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, agreement: Agreement) -> None:
        self.rank, self._num_ranks = int(group.rank()), int(group.size())
        self.device = device
        self.peers = tuple((self.rank + turn) % self._num_ranks for turn in range(1, self._num_ranks))
        self.signals = NumberedSignals(group, device, agreement, NUM_FLAGS)
        self._watch = self.signals.flags.watch
        found = set(agreement.exchange(bytes([has_triton(), can_spare_sms(device)])))
        self._have_triton, self._spare_sms = (all(each[number] for each in found) for number in range(2))
        self._order = CallOrder(self._watch, stream_of(group.group_name, device, "experts watch", WATCH_PRIORITY))
        self._placed: Placed | None = None  # own rows of the present call
        self._vectors: dict[tuple[int, ...], torch.Tensor] = {}
        self._is_open = self._is_ahead = False  # whether a pass, or what is sent ahead of one, has begun and not ended
        self._have_met = False  # whether all ranks have exchanged counts, and no call has used a region since
        self.awaits_peers = False  # whether what the present pass sends has to wait until its peer has begun
        self._pool = SymmetricPool(device, group, agreement)
        self._counts_pool = SymmetricPool(device, group, agreement)
        self._counts_row_bytes = self._counts_place = self._counts_address = 0
        self._counts_on_host: Counts = np.empty(0, dtype=np.int64)  # pinned, at `_counts_address`
        self._sizes = RegionSizes()
        self.addresses: dict[ExpertRegion, torch.Tensor] = {}  # where a region begins, by rank
        self.streams = ExpertStreams(group.group_name, device)
        self._results = ExpertResults(
            SymmetricPool(device, group, agreement, is_lent=True), self.streams, self.signals, self.peers
        )
        self.blocks = self._results.blocks
        self.ready, self.counted = new_event(), new_event()

    def gather(self, counts: torch.Tensor, last: int, beside: Callable[[torch.Tensor], None]) -> tuple[Counts, torch.Tensor]:
        """See `AbstractExpertExchange.gather`."""
        num_numbers = counts.shape[0] + 1
        num_bytes = num_numbers * counts.itemsize
        memory, stream = self._memory_for_counts(num_bytes), self.streams.current()
        gathered = counts.new_empty(self._num_ranks, num_numbers)
        self._require_ended(is_open=self._is_ahead)
        self._open()
        self._placed = None
        self._counts_place = 1 - self._counts_place
        start = self._counts_place * self._num_ranks * self._counts_row_bytes
        own, row = memory.addresses[self.rank] + start, start + self.rank * num_bytes
        for address in memory.addresses:
            copy_bytes(address + row, counts.data_ptr(), counts.nbytes, stream)
        lasts = tuple(address + row + counts.nbytes for address in memory.addresses)
        self.signals.exchange(COUNTS_ARRIVED, self.peers, stream, lasts, last)
        copy_bytes(gathered.data_ptr(), own, self._num_ranks * num_bytes, stream)
        copy_bytes(self._counts_address, own, self._num_ranks * num_bytes, stream)
        check("Marking the counts", cu.cuEventRecord(self.counted, stream))
        self.end()
        self._have_met = self._results.are_fetched = True
        self._is_open = True  # a call within `beside` would take the memory of these counts
        beside(gathered)
        self._is_open = False
        check("Waiting for the counts", cu.cuEventSynchronize(self.counted))
        self._watch.require_sound()
        return self._counts_on_host[: self._num_ranks * num_numbers].reshape(self._num_ranks, num_numbers), gathered

    def _memory_for_counts(self, num_bytes: int) -> SymmetricMemory:
        """Return symmetric memory for two rows of counts of each rank."""
        if num_bytes > self._counts_row_bytes:
            self._counts_row_bytes = 0
            wanted = aligned(num_bytes)
            self._counts_pool.replace(2 * self._num_ranks * wanted, "An expert layer", has_captured=False)
            on_host = torch.empty(self._num_ranks * wanted // 8, dtype=torch.int64, device="cpu", pin_memory=True)
            self._counts_on_host, self._counts_address = on_host.numpy(), on_host.data_ptr()
            self._counts_row_bytes = wanted
        assert self._counts_pool.memory is not None
        return self._counts_pool.memory

    def holds(self, needed: Needed) -> bool:
        """See `AbstractExpertCopies.holds`."""
        return self._sizes.holds(needed)

    def reserve(self, needed: Needed) -> None:
        """See `AbstractExpertCopies.reserve`."""
        if self.holds(needed):
            return
        held, sizes = (self._sizes.num_landing_bytes, self._sizes.num_result_bytes), self._sizes.grown(needed)
        self._sizes = RegionSizes()  # views of the memory end here, so that it is free before there is more
        landing, results = sizes.num_landing_bytes, sizes.num_result_bytes
        what = f"An expert layer with {format_bytes(landing + results)} of symmetric memory"
        try:
            if landing > held[0]:
                self._placed = None
                self._pool.replace(landing, what, has_captured=False)
            if results > held[1]:
                self._results.pool.replace(results + SPARE_TO_LEND, what, has_captured=False)
        except OperatorError:  # one without the other is of no use
            self._pool.close()
            self._results.pool.close()
            raise
        self._sizes = sizes
        if self._pool.memory is None:
            return
        for region in (ExpertRegion.DISPATCH, ExpertRegion.AGAIN):
            self.addresses[region] = torch.tensor(
                [self.address(region, peer) for peer in range(self._num_ranks)], device=self.device
            )
        torch.cuda.synchronize(self.device)  # other streams read them

    def begin(self) -> None:
        """See `AbstractExpertExchange.begin`."""
        self._open()
        self.awaits_peers, self._have_met = not self._have_met, False
        if self.awaits_peers:
            self.signals.raise_to(BEGUN, self.peers, self.streams.current())
            self._order.watch_wait(lambda stream: self.signals.wait(BEGUN, self.peers, stream))

    def _open(self) -> None:
        self._require_ended(is_open=self._is_open)
        self._order.follow(self.streams.current())
        self.signals.begin_call()
        self._is_open = True

    def _require_ended(self, *, is_open: bool) -> None:
        if is_open:
            raise OperatorError(
                "An error ended an earlier call of experts while rows were on their way. Start all ranks again."
            )

    def dispatch(
        self, region: ExpertRegion, rows: Rows, source: torch.Tensor, *, were_ready: bool = False, first: int = 0
    ) -> AbstractDispatch:
        """See `AbstractExpertExchange.dispatch`."""
        return CopyDispatch(self, region, rows, source, were_ready=were_ready, first=first)

    def place_ahead(self, tokens: torch.Tensor, gathered: torch.Tensor) -> None:
        """See `AbstractExpertCopies.place_ahead`."""
        rows, memory = RowFormat.of(tokens), self._pool.memory
        if memory is None or not self.can_send_ahead(rows):
            return
        from counterpoint.ops.expert_kernels import Sending, send_rows  # noqa: PLC0415  needs Triton

        landed, ends = self._sizes.whole(memory.local, ExpertRegion.DISPATCH, rows), self._ends_of(gathered)
        sending = Sending(self.rank, tokens, landed, self.addresses[ExpertRegion.DISPATCH])
        send_rows(sending, gathered, ends, part="own")
        self._placed = Placed(landed.shape[0], ends)

    def drop_placed(self) -> None:
        """See `AbstractExpertCopies.drop_placed`."""
        self._placed, self._have_met = None, False

    def placed_rows(self, rows: Rows) -> "Placed | None":
        """Return this rank's own rows of the present call, if they were placed and are still there."""
        placed, self._placed = self._placed, None
        return placed if placed and rows.layout.num_rows <= placed.most_rows else None

    def _ends_of(self, gathered: torch.Tensor) -> torch.Tensor:
        """Return a vector for the ends of this rank's experts' rows."""
        return torch.empty((gathered.shape[1] - 1) // self._num_ranks, dtype=torch.int32, device=self.device)

    def combine(self, rows: Rows) -> AbstractCombine:
        """See `AbstractExpertExchange.combine`."""
        return CopyCombine(self._results, rows, self.region(ExpertRegion.COMBINE, rows.format, rows.layout.num_rows))

    def can_send_ahead(self, rows: RowFormat) -> bool:
        """See `AbstractExpertCopies.can_send_ahead`. A kernel sends them, which needs Triton, and rows of whole vectors."""
        return self._have_triton and rows.num_bytes % VECTOR_BYTES == 0

    def can_send_rest(self, rows: RowFormat) -> bool:
        """See `AbstractExpertCopies.can_send_rest`. The matmul is torch's grouped one."""
        return self._spare_sms and rows.dtype == GROUPED_TYPE

    def send_ahead(
        self, tokens: torch.Tensor, landed: torch.Tensor, gathered: torch.Tensor, first: FirstRows | None = None
    ) -> torch.Tensor:
        """See `AbstractExpertCopies.send_ahead`. The kernels have a stream of their own."""
        from counterpoint.ops.expert_kernels import Sending, send_rows  # noqa: PLC0415  needs Triton

        self._is_ahead, handle = True, self.streams.named(KERNEL)
        ends = self._ends_of(gathered)  # on the current stream, which waits for the kernel before it reads them
        self.streams.follow(KERNEL, self.counted)
        with OnStream(self.streams.as_torch(KERNEL)):
            sending = Sending(self.rank, tokens, landed, self.addresses[ExpertRegion.DISPATCH])
            firsts = None if first is None else self._on_gpu(first.numbers)
            send_rows(sending, gathered, ends, firsts, "all" if first is None else "first")
            self.signals.raise_to(arrived_flag(ExpertRegion.DISPATCH, 0), self.peers, handle)
            check("Marking sent rows", cu.cuEventRecord(self.streams.ends[KERNEL], handle))
            if first is not None and first.sends_rest:
                send_rows(sending, gathered, ends, firsts, part="rest")
                self.signals.raise_to(arrived_flag(ExpertRegion.DISPATCH, 1), self.peers, handle)
        return ends

    def _on_gpu(self, numbers: tuple[int, ...]) -> torch.Tensor:
        """Return numbers as a vector (int64) that kernels of any stream may read."""
        if numbers not in self._vectors:
            if len(self._vectors) >= MAX_VECTORS:
                torch.cuda.synchronize(self.device)
                self._vectors.clear()
            self._vectors[numbers] = torch.tensor(numbers, device=self.device)  # the host waits
        return self._vectors[numbers]

    def await_ahead(self, part: int = 0) -> None:
        """See `AbstractExpertCopies.await_ahead`."""
        if part:
            self.streams.join([KERNEL])
        else:
            check("Waiting for sent rows", cu.cuStreamWaitEvent(self.streams.current(), self.streams.ends[KERNEL], 0))
        self.signals.wait(arrived_flag(ExpertRegion.DISPATCH, part), self.peers, self.streams.current())

    def end_ahead(self) -> None:
        """See `AbstractExpertCopies.end_ahead`."""
        self._order.finish(self.streams.current())
        self._is_ahead = self._have_met = False

    def region(self, region: ExpertRegion, rows: RowFormat, num_rows: int) -> torch.Tensor:
        """See `AbstractExpertCopies.region`."""
        memory = (self._results.pool if region == ExpertRegion.COMBINE else self._pool).memory
        if memory is None:  # no rank has rows
            return rows.empty(0)
        return self._sizes.view(memory.local, region, rows, num_rows)

    def address(self, region: ExpertRegion, peer: int) -> int:
        """Return where a region begins on a peer."""
        assert self._pool.memory is not None, "reserve() comes first"
        return self._pool.memory.addresses[peer] + self._sizes.start(region)

    def end(self) -> None:
        """See `AbstractExpertExchange.end`."""
        self._order.finish(self.streams.current())
        self._is_open = False

    def num_symmetric_bytes(self) -> int:
        """See `AbstractExpertExchange.num_symmetric_bytes`."""
        return self.signals.flags.num_bytes() + sum(each.num_bytes() for each in self._pools())

    def _pools(self) -> tuple[SymmetricPool, ...]:
        return self._pool, self._results.pool, self._counts_pool

    def close(self) -> None:
        """See `AbstractExpertExchange.close`."""
        torch.cuda.synchronize(self.device)
        self._watch.close()
        self._pool.close()
        self._counts_pool.close()
        self._results.close()
        self._order.close()
        self.streams.close()
        for event in (self.ready, self.counted):
            check("Destroying an event", cu.cuEventDestroy(event))
        self.addresses.clear()
        self._vectors.clear()
        self._sizes, self._counts_row_bytes = RegionSizes(), 0


class Placed(NamedTuple):
    """Own rows that were placed before the host knew the counts: for how many rows of all ranks there is room, and where
    each expert's rows end.
    """

    most_rows: int
    ends: torch.Tensor


@final
class CopyDispatch(AbstractDispatch):
    """Copies blocks to their places in the peers' memory, a flag behind each piece; a kernel puts this rank's own rows
    there.
    """

    def __init__(
        self,
        exchange: ExpertCopies,
        region: ExpertRegion,
        rows: Rows,
        source: torch.Tensor,
        *,
        were_ready: bool = False,
        first: int = 0,
    ) -> None:
        """`source` is ready on the current stream, or was before the last counts were gathered. `first`: the first group to
        send; if that is not 0, own rows are there. Then, or if own rows were placed, the other groups follow by `send_rest`.
        """
        self._exchange, self._region, self._rows = exchange, region, rows
        self._source: torch.Tensor | None = source  # kept until the copies are joined
        self._has_sent = False
        self._ready = exchange.counted if were_ready else exchange.ready
        if not were_ready:
            check("Readying rows", cu.cuEventRecord(self._ready, exchange.streams.current()))
        placed = exchange.placed_rows(rows) if were_ready else None
        self._landed = exchange.region(region, rows.format, rows.layout.num_rows)
        self._unsent: int | None = first + 1  # the first group that was not sent
        self._send(first, self._unsent)
        if placed is not None:
            rows.sorting.ends = placed.ends
        elif not first:
            self._put_own(source)  # the first pieces are in transit
            self.send_rest()

    def group(self, number: int) -> torch.Tensor:
        """See `AbstractDispatch.group`."""
        layout, exchange = self._rows.layout, self._exchange
        sources = tuple(layout.sources(number))
        if sources:
            exchange.signals.wait(arrived_flag(self._region, number), sources, exchange.streams.current())
        return self._landed[layout.groups[number].rows]

    def all_rows(self) -> torch.Tensor:
        """See `AbstractDispatch.all_rows`."""
        return self._landed

    def join(self) -> None:
        """See `AbstractDispatch.join`."""
        self._exchange.streams.join([SENDING] * self._has_sent)
        self._source = None

    def send_rest(self) -> None:
        """See `AbstractDispatch.send_rest`."""
        if self._unsent is not None:
            self._send(self._unsent, None)
        self._unsent = None

    def _send(self, first: int, last: int | None) -> None:
        for number, peers in self._rows.layout.receivers(first, last):
            self._send_group(number, peers)

    def _send_group(self, number: int, peers: Sequence[int]) -> None:
        exchange, layout, size = self._exchange, self._rows.layout, self._rows.format.num_bytes
        handle = exchange.streams.named(SENDING)
        if not self._has_sent:
            exchange.streams.follow(SENDING, self._ready)
            if exchange.awaits_peers:
                exchange.signals.wait(BEGUN, exchange.peers, handle)
            self._has_sent = True
        assert self._source is not None, "nothing is sent after join()"
        blocks, source = {}, self._source.data_ptr()
        for peer in peers:
            sent, placed, num_rows = layout.block_arrays(layout.rank, peer, number)
            target = exchange.address(self._region, peer)
            blocks[peer] = BlockAddresses(placed * size + target, sent * size + source, num_rows * size)
        for announced, copied in requests(blocks):
            exchange.blocks.copy(copied, handle)
            exchange.signals.raise_to(arrived_flag(self._region, number), announced, handle)
            self.num_sent_bytes += int(copied.num_bytes.sum())

    def _put_own(self, source: torch.Tensor) -> None:
        if not self._rows.layout.num_own:
            return
        own, places = self._rows.layout.own, self._rows.sorting.places.own
        if has_triton():
            from counterpoint.ops.expert_kernels import put_rows  # noqa: PLC0415  needs Triton

            put_rows(source, own, places, self._landed)
        else:
            self._landed.index_copy_(0, places, source[own])
