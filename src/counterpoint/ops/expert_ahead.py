"""The first half of a forward call of experts, issued before the host knows how many rows arrive.

Otherwise the GPU would wait while the host reads the counts, finds the places of rows, and issues what sends and multiplies
them, which takes as long as the matmul of a few thousand tokens. With a bound on the rows of a rank, all of it can be
issued before the wait: a kernel reads the counts on the GPU and sends the tokens, and torch's grouped matmul reads on the
GPU where each expert's rows end. Of large calls only the first rows of each rank begin so. Their matmul hides what the host
does, and copy engines bring the other groups' rows beside it.

The bound follows from earlier calls, and is the same on all ranks. If a rank's rows are more, no rank sends it any and its
matmuls have none; all ranks see that in the counts, and begin again in the usual way.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, final

import torch

from counterpoint.ops.expert_exchange import (
    AbstractDispatch,
    AbstractExpertCopies,
    AbstractExpertExchange,
    ExpertRegion,
    RowFormat,
    Rows,
)
from counterpoint.ops.grouped_matmul import multiply_grouped
from counterpoint.schedule.expert_layout import ExpertLayout

WINDOW = 64  # calls after which larger ones are forgotten; chosen, not measured
SPARE = 1.125  # the bound as a multiple of the most rows seen; chosen, not measured
FIRST_RANGE = 0.5, 2.0  # first groups stay as they were while calls would choose from this to that many times as many rows
MOST_SPARE = 0.25  # a product with more rows to spare than this times the rank's is copied, so that backward keeps less
MAX_KINDS = 1024  # kinds of calls that are remembered; a model has a few


class Expected(NamedTuple):
    """What is expected of a call: a bound on the rows of every rank's experts; and, if only first groups are sent ahead,
    each rank's rows in them, and in how many groups the call is computed.
    """

    most_rows: int
    firsts: tuple[int, ...] = ()
    num_groups: int = 0


@final
class ExpectedRows:
    """For each kind of call, what is expected of the next one, from the calls before it."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int, int]] = {}  # most rows in this window and the last one, and calls in this one
        self._firsts: dict[str, tuple[tuple[int, ...], int]] = {}  # with the number of groups

    def next(self, kind: str) -> Expected | None:
        """Return what is expected of the next call; None if nothing is."""
        if kind not in self._seen:
            return None
        recent, before, _ = self._seen[kind]
        return Expected(math.ceil(SPARE * max(recent, before)), *self._firsts.get(kind, ((), 0)))

    def learn(self, kind: str, layout: ExpertLayout, firsts: tuple[int, ...] = ()) -> None:
        """Remember a call. `firsts`: each rank's rows in its first group, if only these are to be sent ahead."""
        recent, before, num_calls = self._seen.get(kind, (0, 0, 0))
        if num_calls == WINDOW:
            recent, before, num_calls = 0, recent, 0
        if len(self._seen) >= MAX_KINDS:
            self._seen.clear()
            self._firsts.clear()
        self._seen[kind] = max(recent, layout.most_grouped), before, num_calls + 1
        known = self._firsts.pop(kind, None)
        if not firsts:
            return
        least, most = FIRST_RANGE
        is_near = known is not None and all(least * a <= b <= most * a for a, b in zip(known[0], firsts, strict=True))
        if known is not None and is_near and known[1] == layout.num_groups:
            self._firsts[kind] = known  # so that GPUs need no new numbers
        else:
            self._firsts[kind] = firsts, layout.num_groups

    def forget(self, kind: str) -> None:
        """Expect nothing of this kind of call."""
        self._seen.pop(kind, None)
        self._firsts.pop(kind, None)


@final
class AheadDispatch(AbstractDispatch):
    """Tokens that a kernel sends, all or those of first groups, and their products with some weights of (E, N, K).

    The others of a call of which only first groups are sent follow by `send_others`.
    """

    def __init__(
        self,
        exchange: AbstractExpertCopies,
        tokens: torch.Tensor,
        weights: Sequence[torch.Tensor],
        expected: Expected,
        rank: int,
    ) -> None:
        """`tokens` are contiguous. The exchange has memory for the rows that are expected."""
        self._exchange, self._tokens, self.expected = exchange, tokens, expected
        self.format = RowFormat.of(tokens)
        self._landed = exchange.region(ExpertRegion.DISPATCH, self.format, expected.most_rows)
        self._num_first = expected.firsts[rank] if expected.firsts else self._landed.shape[0]
        self._weights = weights
        self._products: list[torch.Tensor | None] = []
        self._others: AbstractDispatch | None = None
        self._reads_others = False  # whether their first group has been asked for
        self._has_ended = False

    def send(self, gathered: torch.Tensor) -> None:
        """Send the tokens after the exchange of counts, whose result on the device is `gathered`."""
        self._ends = self._exchange.send_ahead(self._tokens, self._landed, gathered, self.expected.firsts)

    def multiply(self) -> None:
        """Multiply the rows when they have arrived."""
        self._exchange.await_ahead()
        if self._weights:
            rows, ends = self._landed, self._ends
            if self.expected.firsts:
                rows, ends = rows[: self._num_first], ends.clamp(max=self._num_first)
            self._products = [multiply_grouped(rows, each.mT, ends) for each in self._weights]

    def settle(self, rows: Rows) -> bool:
        """Return whether the rows are there, now that the host knows how many they are; if not, it gives them up."""
        self._rows = rows
        if rows.layout.most_grouped > self._landed.shape[0]:
            self.drop()
            return False
        rows.sorting.ends = self._ends
        layout = rows.layout
        self.num_sent_bytes = (layout.num_tokens - layout.num_own) * self.format.num_bytes  # with the others'
        return True

    def send_others(self, exchange: AbstractExpertExchange) -> None:
        """Send the other groups' rows within the current pass, if there are any."""
        if self.expected.firsts:
            tokens = self._tokens
            self._others = exchange.dispatch(ExpertRegion.DISPATCH, self._rows, tokens, were_ready=True, first=1)

    def drop(self) -> None:
        """Give up the rows, unless they were read."""
        if not self._has_ended:
            self.join()
        self._products.clear()

    def group(self, number: int) -> torch.Tensor:
        """See `AbstractDispatch.group`."""
        if number and self._others is not None:
            self._reads_others = True
            return self._others.group(number)
        return self._landed[self._rows.layout.groups[number].rows]

    def product(self, group: int, number: int) -> torch.Tensor | None:
        """See `AbstractDispatch.product`. It is no view, so that a caller may change it in place."""
        found = self._products[number] if self._products else None
        if found is None or (group and self._others is not None):
            return None
        layout, width = self._rows.layout, found.shape[1]
        rows = layout.groups[group].rows
        if found.shape[0] - (layout.num_rows if self._others is None else rows.stop) > MOST_SPARE * layout.num_rows:
            return found[rows].clone()
        return found.new_empty(0).set_(
            found.untyped_storage(), rows.start * width, (rows.stop - rows.start, width), (width, 1)
        )

    def send_rest(self) -> None:
        """See `AbstractDispatch.send_rest`. The first of the other groups is in transit; its matmul comes next."""
        if self._others is not None and (self._reads_others or len(self._rows.layout.groups) == 1):
            self._others.send_rest()

    def all_rows(self) -> torch.Tensor:
        """See `AbstractDispatch.all_rows`."""
        return self._landed[: self._rows.layout.num_rows]

    def join(self) -> None:
        """See `AbstractDispatch.join`. The current stream has waited for the kernel."""
        if self._others is not None:
            self._others.join()
        self._exchange.end_ahead()
        self._has_ended = True
