"""An expert exchange between CPUs: the same pieces in the same order as messages, so that tests run the logic on real
tensors without GPUs.

Sends are posted when their rows are ready, and a rank receives a piece when it needs it, so no rank waits forever.
Nothing overlaps here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist

from counterpoint.ops.collectives import Ranks
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
from counterpoint.ops.expert_library import ExpertLibrary
from counterpoint.ops.expert_memory import RegionSizes
from counterpoint.ops.expert_sorting import Sorting
from counterpoint.ops.symmetric import host_memory
from counterpoint.schedule.description import MAX_CHUNKS
from counterpoint.schedule.expert_layout import Counts, ExpertLayout


@final
class ExpertMessages(AbstractExpertCopies):
    """Messages of one group; the symmetric memory for rows that arrive is ordinary, and counted as a GPU's would be."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._library = ExpertLibrary(ranks)
        self._sizes = RegionSizes()
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._ahead: MessageDispatch | None = None

    def gather(self, counts: torch.Tensor, last: int, beside: Callable[[torch.Tensor], None]) -> tuple[Counts, torch.Tensor]:
        """See `AbstractExpertExchange.gather`."""
        return self._library.gather(counts, last, beside)

    def holds(self, needed: Needed) -> bool:
        """See `AbstractExpertCopies.holds`."""
        return self._sizes.holds(needed)

    def reserve(self, needed: Needed) -> None:
        """See `AbstractExpertCopies.reserve`."""
        if self.holds(needed):
            return
        sizes = self._sizes.grown(needed)
        self.close()
        self._memory = host_memory(sizes.num_landing_bytes, "experts", self._ranks.agreement)
        self._sizes = sizes

    def begin(self) -> None:
        """See `AbstractExpertExchange.begin`."""

    def region(self, region: ExpertRegion, rows: RowFormat, num_rows: int) -> torch.Tensor:
        """See `AbstractExpertCopies.region`."""
        return self._sizes.view(self._memory, region, rows, num_rows)

    def place_ahead(self, tokens: torch.Tensor, gathered: torch.Tensor) -> None:
        """See `AbstractExpertCopies.place_ahead`. A dispatch places them here."""

    def drop_placed(self) -> None:
        """See `AbstractExpertCopies.drop_placed`."""

    def can_send_ahead(self, rows: RowFormat) -> bool:
        """See `AbstractExpertCopies.can_send_ahead`."""
        return True

    def can_send_rest(self, rows: RowFormat) -> bool:
        """See `AbstractExpertCopies.can_send_rest`. Nothing overlaps here, but tests see the order."""
        return True

    def send_ahead(
        self, tokens: torch.Tensor, landed: torch.Tensor, gathered: torch.Tensor, first: FirstRows | None = None
    ) -> torch.Tensor:
        """See `AbstractExpertCopies.send_ahead`. The counts are on the host here; on a GPU, a kernel reads them."""
        num_ranks, sums = gathered.shape[0], gathered[:, -1] // 2
        counts = gathered[:, :-1].reshape(num_ranks, num_ranks, -1)
        layout = ExpertLayout(
            counts.numpy(), int(self._ranks.group.rank()), 2 if first else 1, firsts=first.numbers if first else ()
        )
        is_small = int(counts.min()) >= 0 and int(counts.max()) <= int(sums.max())  # so that sums cannot wrap around
        is_sound = is_small and torch.equal(counts.sum((1, 2)), sums)
        if not is_sound or layout.most_grouped > landed.shape[0]:
            return torch.zeros(layout.num_experts, dtype=torch.int32, device="cpu")
        rows = Rows(layout, RowFormat.of(tokens), Sorting(layout, gathered))
        last = 1 if first is None or not first.sends_rest else None
        self._ahead = MessageDispatch(Mail(self._ranks, ExpertRegion.DISPATCH), rows, tokens, landed, last=last)
        return rows.sorting.ends

    def await_ahead(self, part: int = 0) -> None:
        """See `AbstractExpertCopies.await_ahead`."""
        if self._ahead is not None and part < self._ahead.num_groups:
            self._ahead.group(part)

    def end_ahead(self) -> None:
        """See `AbstractExpertCopies.end_ahead`."""
        if self._ahead is not None:
            self._ahead.join()
            self._ahead = None

    def dispatch(
        self, region: ExpertRegion, rows: Rows, source: torch.Tensor, *, were_ready: bool = False, first: int = 0
    ) -> AbstractDispatch:
        """See `AbstractExpertExchange.dispatch`."""
        landed = self.region(region, rows.format, rows.layout.num_rows)
        return MessageDispatch(Mail(self._ranks, region), rows, source, landed, first=first)

    def combine(self, rows: Rows) -> AbstractCombine:
        """See `AbstractExpertExchange.combine`."""
        return MessageCombine(Mail(self._ranks, ExpertRegion.COMBINE), rows)

    def end(self) -> None:
        """See `AbstractExpertExchange.end`."""

    def num_symmetric_bytes(self) -> int:
        """See `AbstractExpertExchange.num_symmetric_bytes`."""
        return int(self._memory.numel())

    def close(self) -> None:
        """See `AbstractExpertExchange.close`."""
        self._sizes, self._memory = RegionSizes(), torch.empty(0, dtype=torch.uint8, device="cpu")


@final
class Mail:
    """The messages of one direction of a call."""

    def __init__(self, ranks: Ranks, region: ExpertRegion) -> None:
        self._group, self._agreement, self._watchdog = ranks
        self.region, self._first_tag = region, int(region) * MAX_CHUNKS
        self._sends: list[tuple[Any, torch.Tensor]] = []
        self.num_bytes = 0

    def send(self, peer: int, number: int, rows: torch.Tensor) -> None:
        """Post a piece."""
        as_bytes = rows.contiguous().view(torch.uint8)
        self._sends.append((self._post(dist.isend, peer, number, as_bytes), as_bytes))
        self.num_bytes += as_bytes.nbytes

    def receive(self, peer: int, number: int, rows: torch.Tensor) -> None:
        """Wait for a piece."""
        self._wait(self._post(dist.irecv, peer, number, rows.view(torch.uint8)))

    def join(self) -> None:
        """Wait until all that was posted has been sent."""
        for work, _ in self._sends:
            self._wait(work)
        self._sends.clear()

    def _post(self, act: Callable[..., Any], peer: int, number: int, as_bytes: torch.Tensor) -> Any:
        with self._noticing():
            return act(as_bytes, dist.get_global_rank(self._group, peer), self._group, self._first_tag + number)

    def _wait(self, work: Any) -> None:
        with self._noticing(), self._watchdog.waiting():
            work.wait()

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        """Turn a lost connection into one line."""
        try:
            yield
        except RuntimeError as problem:
            what = "a rank of the group did not exchange the rows of its experts in time, or ended"
            raise self._agreement.give_up(what) from problem


@final
class MessageDispatch(AbstractDispatch):
    """One message for each peer and group; the receiver puts its blocks in their places."""

    def __init__(
        self,
        mail: Mail,
        rows: Rows,
        source: torch.Tensor,
        landed: torch.Tensor,
        *,
        first: int = 0,
        last: int | None = None,
    ) -> None:
        """Send the groups `first` to `last` - 1; with the first one, place this rank's own rows."""
        self._mail, self._rows, self._landed = mail, rows, landed
        layout = rows.layout
        self.num_groups = len(layout.groups)
        if not first:
            landed.index_copy_(0, rows.sorting.places.own, source[layout.own])
        for peer, number in layout.outgoing(first, last):
            mail.send(peer, number, source[layout.sent(layout.rank, peer, number)])
        self.num_sent_bytes = mail.num_bytes

    def group(self, number: int) -> torch.Tensor:
        """See `AbstractDispatch.group`."""
        layout = self._rows.layout
        for peer in layout.sources(number):
            sent = layout.sent(peer, layout.rank, number)
            arrived = self._rows.format.empty(sent.stop - sent.start)
            self._mail.receive(peer, number, arrived)
            for first, placed, num_rows in layout.blocks(peer, layout.rank, number):
                at = first - sent.start
                self._landed[placed : placed + num_rows] = arrived[at : at + num_rows]
        return self._landed[layout.groups[number].rows]

    def all_rows(self) -> torch.Tensor:
        """See `AbstractDispatch.all_rows`."""
        return self._landed

    def join(self) -> None:
        """See `AbstractDispatch.join`."""
        self._mail.join()


@final
class MessageCombine(AbstractCombine):
    """One message for each peer and group, of blocks in the order of the peer's tokens."""

    def __init__(self, mail: Mail, rows: Rows) -> None:
        self._mail, self._rows = mail, rows
        self._results = rows.format.empty(rows.layout.num_tokens)

    def add(self, number: int, rows: torch.Tensor) -> None:
        """See `AbstractCombine.add`."""
        layout = self._rows.layout
        start, rank = layout.groups[number].rows.start, layout.rank
        for source in (rank, *layout.sources(number)):
            blocks = list(layout.blocks(source, rank, number))
            if blocks:
                piece = torch.cat([rows[each.placed - start : each.placed - start + each.num_rows] for each in blocks])
                if source == rank:
                    self._results[layout.sent(rank, rank, number)] = piece
                else:
                    self._mail.send(source, number, piece)
        self.num_sent_bytes = self._mail.num_bytes

    def results(self) -> torch.Tensor:
        """See `AbstractCombine.results`."""
        layout = self._rows.layout
        for peer, number in layout.outgoing():
            self._mail.receive(peer, number, self._results[layout.sent(layout.rank, peer, number)])
        return self._results

    def join(self) -> None:
        """See `AbstractCombine.join`."""
        self._mail.join()
