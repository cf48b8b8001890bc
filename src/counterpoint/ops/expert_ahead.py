"""The first half of a forward call of experts, issued before the host knows how many rows arrive.

Otherwise the GPU would wait while the host reads the counts, finds the places of rows, and issues what sends and multiplies
them, which takes as long as the matmul of a few thousand tokens. With a bound on the rows of a rank, all of it can be
issued before the wait: a kernel reads the counts on the GPU and sends the tokens, and torch's grouped matmul reads on the
GPU where each expert's rows end.

The bound follows from earlier calls, and is the same on all ranks. If a rank's rows are more, no rank sends it any and its
matmuls have none; all ranks see that in the counts, and begin again in the usual way.
"""

import math
from collections.abc import Sequence
from typing import final

import torch

from counterpoint.ops.expert_exchange import AbstractDispatch, AbstractExpertCopies, ExpertRegion, RowFormat, Rows
from counterpoint.ops.grouped_matmul import multiply_grouped

WINDOW = 64  # calls after which larger ones are forgotten; chosen, not measured
SPARE = 1.125  # the bound as a multiple of the most rows seen; chosen, not measured
MOST_KEPT = 1.25  # a product with more memory than this times its rows need is copied, so that backward keeps less
MAX_KINDS = 1024  # kinds of calls that are remembered; a model has a few


@final
class ExpectedRows:
    """For each kind of call, a bound on the rows of every rank's experts, from the calls before it."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int, int]] = {}  # most rows in this window and the last one, and calls in this one

    def bound(self, kind: str) -> int:
        """Return the bound; 0 if nothing is expected."""
        recent, before, _ = self._seen.get(kind, (0, 0, 0))
        return math.ceil(SPARE * max(recent, before))

    def learn(self, kind: str, most_rows: int) -> None:
        """Remember a call by the rows of the rank that had most."""
        recent, before, num_calls = self._seen.get(kind, (0, 0, 0))
        if num_calls == WINDOW:
            recent, before, num_calls = 0, recent, 0
        if len(self._seen) >= MAX_KINDS:
            self._seen.clear()
        self._seen[kind] = max(recent, most_rows), before, num_calls + 1

    def forget(self, kind: str) -> None:
        """Expect nothing of this kind of call."""
        self._seen.pop(kind, None)


@final
class AheadDispatch(AbstractDispatch):
    """Tokens that a kernel sends in one piece, and their products with some weights of (E, N, K)."""

    def __init__(
        self, exchange: AbstractExpertCopies, tokens: torch.Tensor, weights: Sequence[torch.Tensor], most_rows: int
    ) -> None:
        """`tokens` are contiguous. `most_rows`: of this rank's experts, for which the exchange has memory."""
        self._exchange, self._tokens, self._weights = exchange, tokens, weights
        self.format = RowFormat.of(tokens)
        self._landed = exchange.region(ExpertRegion.DISPATCH, self.format, most_rows)
        self._products: list[torch.Tensor | None] = []
        self._has_ended = False

    def send(self, gathered: torch.Tensor) -> None:
        """Send the tokens after the exchange of counts, whose result on the device is `gathered`."""
        self._ends = self._exchange.send_ahead(self._tokens, self._landed, gathered)

    def multiply(self) -> None:
        """Multiply the rows when all have arrived."""
        self._exchange.await_ahead()
        self._products = [multiply_grouped(self._landed, each.mT, self._ends) for each in self._weights]

    def settle(self, rows: Rows) -> bool:
        """Return whether the rows are there, now that the host knows how many they are; if not, it gives them up."""
        self._rows, layout = rows, rows.layout
        if layout.most_grouped > self._landed.shape[0]:
            self.drop()
            return False
        rows.sorting.ends = self._ends
        self.num_sent_bytes = (layout.num_tokens - layout.num_own) * rows.format.num_bytes
        return True

    def drop(self) -> None:
        """Give up the rows, unless they were read."""
        if not self._has_ended:
            self.join()
        self._products.clear()

    def group(self, number: int) -> torch.Tensor:
        """See `AbstractDispatch.group`."""
        return self._landed[self._rows.layout.groups[number].rows]

    def product(self, group: int, number: int) -> torch.Tensor | None:
        """See `AbstractDispatch.product`. It is no view, so that a caller may change it in place."""
        found = self._products[number] if self._products else None
        if found is None:
            return None
        layout, width = self._rows.layout, found.shape[1]
        rows = layout.groups[group].rows
        if found.shape[0] > MOST_KEPT * layout.num_rows:
            return found[rows].clone()
        return found.new_empty(0).set_(
            found.untyped_storage(), rows.start * width, (rows.stop - rows.start, width), (width, 1)
        )

    def all_rows(self) -> torch.Tensor:
        """See `AbstractDispatch.all_rows`."""
        return self._landed[: self._rows.layout.num_rows]

    def join(self) -> None:
        """See `AbstractDispatch.join`. The current stream has waited for the kernel."""
        self._exchange.end_ahead()
        self._has_ended = True
