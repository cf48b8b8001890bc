"""An expert exchange by the library's all-to-all: all rows of a direction at once, sorted by a kernel.

It is the baseline for copies, runs if all-to-alls are faster, and is the fallback if GPUs cannot access each other's
memory or symmetric memory runs out.
"""

from collections.abc import Callable
from typing import final

import torch

from counterpoint.ops.collectives import Ranks, library_all_gather, library_all_to_all
from counterpoint.ops.expert_exchange import AbstractCombine, AbstractDispatch, AbstractExpertExchange, ExpertRegion, Rows
from counterpoint.schedule.expert_layout import Counts


@final
class ExpertLibrary(AbstractExpertExchange):
    """All-to-alls of one group's backend."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def gather(self, counts: torch.Tensor, last: int, beside: Callable[[torch.Tensor], None]) -> tuple[Counts, torch.Tensor]:
        """See `AbstractExpertExchange.gather`."""
        row = torch.constant_pad_nd(counts, (0, 1), last)
        gathered = row.new_empty(self._ranks.group.size(), row.shape[0])
        self.together(library_all_gather, gathered.flatten(), row)
        if gathered.is_cpu:
            beside(gathered)
            return gathered.numpy(), gathered
        on_host = torch.empty(gathered.shape, dtype=gathered.dtype, device="cpu", pin_memory=True)
        on_host.copy_(gathered, non_blocking=True)
        counted = torch.cuda.Event()
        counted.record()
        beside(gathered)
        counted.synchronize()
        return on_host.numpy(), gathered

    def begin(self) -> None:
        """See `AbstractExpertExchange.begin`."""

    def dispatch(
        self, region: ExpertRegion, rows: Rows, source: torch.Tensor, *, were_ready: bool = False, first: int = 0
    ) -> AbstractDispatch:
        """See `AbstractExpertExchange.dispatch`."""
        layout = rows.layout
        arrived = rows.format.empty(layout.num_rows)
        self.together(library_all_to_all, arrived, source, layout.received_rows, layout.sent_rows)
        return LibraryDispatch(rows, arrived.index_select(0, rows.sorting.places.order))

    def combine(self, rows: Rows) -> AbstractCombine:
        """See `AbstractExpertExchange.combine`."""
        return LibraryCombine(self, rows)

    def end(self) -> None:
        """See `AbstractExpertExchange.end`."""

    def together(self, collective: Callable[..., object], result: torch.Tensor, *others: object) -> None:
        """Run a collective of the library; on CPUs, a missing rank becomes a one-line error."""
        self._ranks.together("exchange the rows of its experts", collective, result, *others)

    def num_symmetric_bytes(self) -> int:
        """None."""
        return 0

    def close(self) -> None:
        """See `AbstractExpertExchange.close`."""


@final
class LibraryDispatch(AbstractDispatch):
    """Rows that have arrived and are sorted."""

    def __init__(self, rows: Rows, arrived: torch.Tensor) -> None:
        self._layout, self._arrived = rows.layout, arrived

    def group(self, number: int) -> torch.Tensor:
        """See `AbstractDispatch.group`."""
        return self._arrived if self._layout.num_groups == 1 else self._arrived[self._layout.groups[number].rows]

    def all_rows(self) -> torch.Tensor:
        """See `AbstractDispatch.all_rows`."""
        return self._arrived

    def kept_rows(self) -> torch.Tensor:
        """See `AbstractDispatch.kept_rows`. They lie in memory of their own."""
        return self._arrived

    def join(self) -> None:
        """See `AbstractDispatch.join`."""


@final
class LibraryCombine(AbstractCombine):
    """One all-to-all, when all groups are there."""

    def __init__(self, library: ExpertLibrary, rows: Rows) -> None:
        self._library, self._rows = library, rows
        self._groups: list[torch.Tensor] = []

    def add(self, number: int, rows: torch.Tensor) -> None:
        """See `AbstractCombine.add`."""
        self._groups.append(rows)

    def results(self) -> torch.Tensor:
        """See `AbstractCombine.results`."""
        layout, groups = self._rows.layout, self._groups
        found = self._rows.format.empty(layout.num_tokens)
        computed = groups[0] if len(groups) == 1 else torch.cat(groups)
        back = computed.index_select(0, self._rows.sorting.places.order_back)
        self._library.together(library_all_to_all, found, back, layout.sent_rows, layout.received_rows)
        groups.clear()
        return found

    def join(self) -> None:
        """See `AbstractCombine.join`."""
