"""The first half of a forward call of experts, issued before the host knows how many rows arrive.

Otherwise the GPU would wait while the host reads the counts, finds the places of rows, and issues what sends and multiplies
them, which takes as long as the matmul of a few thousand tokens. With a bound on the rows of a rank, all of it can be
issued before the wait: a kernel reads the counts on the GPU and sends the tokens, and torch's grouped matmul reads on the
GPU where each expert's rows end. Where it pays, the first rows of each rank go first, and a second kernel, of few CTAs,
sends the rest beside their matmul, which leaves it some SMs. Of large calls only the first rows begin so. Their matmul hides
what the host does, and copy engines bring the other groups' rows beside it.

The bound follows from earlier calls, and is the same on all ranks. If a rank's rows are more, no rank sends it any and its
matmuls have none; all ranks see that in the counts, and begin again in the usual way.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple, final

import torch

from counterpoint.ops.expert_exchange import (
    AbstractDispatch,
    AbstractExpertCopies,
    AbstractExpertExchange,
    ExpertRegion,
    FirstRows,
    RowFormat,
    Rows,
)
from counterpoint.ops.grouped_matmul import fewer_sms, multiply_grouped
from counterpoint.schedule.expert_choice import NUM_SPARED_SMS

WINDOW = 64  # calls after which larger ones are forgotten; chosen, not measured
SPARE = 1.125  # the bound as a multiple of the most rows seen; chosen, not measured
LARGE_TILE_ROWS = 129  # of an expert in the mean, from which on torch's grouped matmul takes its larger tiles
MOST_SPARE = 0.25  # a product with more rows to spare than this times the rank's is copied, so that backward keeps less
MAX_KINDS = 1024  # kinds of calls that are remembered; a model has a few


class Expected(NamedTuple):
    """What is expected of a call: a bound on the rows of every rank's experts, and first rows; None if all go at once."""

    most_rows: int
    first: FirstRows | None = None

    def num_held(self, num_experts: int) -> int:
        """Return how many rows the memory has to hold, with those that `padded` adds; the same on all ranks."""
        last_first = 0 if self.first is None else max(self.first.numbers)
        return max(self.most_rows, last_first + self.padded(0, num_experts))

    def padded(self, num_rows: int, num_experts: int) -> int:
        """Return how many rows a matmul of some of the rows is given, so that torch takes the tiles that it takes for all of
        them: it goes by the mean of all experts, also where few of them have rows.
        """
        least = LARGE_TILE_ROWS * num_experts
        return max(num_rows, least) if self.first is not None and self.most_rows >= least else num_rows


@final
class ExpectedRows:
    """For each kind of call, what is expected of the next one, from the calls before it."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int, int]] = {}  # most rows in this window and the last one, and calls in this one
        self._firsts: dict[str, FirstRows] = {}

    def next(self, kind: str) -> Expected | None:
        """Return what is expected of the next call; None if nothing is, or no rows: there may be no memory for any then."""
        recent, before, _ = self._seen.get(kind, (0, 0, 0))
        most_rows = math.ceil(SPARE * max(recent, before))
        return Expected(most_rows, self._firsts.get(kind)) if most_rows else None

    def learn(self, kind: str, most_rows: int, first: FirstRows | None = None) -> None:
        """Remember a call: the rows of the rank that had most, and the first rows, if they are to be sent before others."""
        recent, before, num_calls = self._seen.get(kind, (0, 0, 0))
        if num_calls == WINDOW:
            recent, before, num_calls = 0, recent, 0
        if len(self._seen) >= MAX_KINDS:
            self._seen.clear()
            self._firsts.clear()
        self._seen[kind] = max(recent, most_rows), before, num_calls + 1
        known = self._firsts.pop(kind, None)
        if first is not None:  # those that are known stay if they can, so that GPUs need no new numbers
            self._firsts[kind] = known if known is not None and known.is_near(first) else first

    def forget(self, kind: str) -> None:
        """Expect nothing of this kind of call."""
        self._seen.pop(kind, None)
        self._firsts.pop(kind, None)


@final
class AheadDispatch(AbstractDispatch):
    """Tokens that kernels send, all or those of first groups, and their products with some weights of (E, N, K).

    The others of a call of which only first groups are sent ahead follow by `send_others`.
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
        self._exchange, self._tokens, self._expected, self.first = exchange, tokens, expected, expected.first
        self.format = RowFormat.of(tokens)
        self._landed = exchange.region(ExpertRegion.DISPATCH, self.format, expected.most_rows)
        self._num_first = self._landed.shape[0] if self.first is None else self.first.numbers[rank]
        self._weights = weights
        self._products: list[list[torch.Tensor | None]] = []  # of each part that was multiplied
        self._others: AbstractDispatch | None = None
        self._reads_others = False  # whether their first group has been asked for
        self._has_ended = False

    def send(self, gathered: torch.Tensor) -> None:
        """Send the tokens after the exchange of counts, whose result on the device is `gathered`."""
        self._ends = self._exchange.send_ahead(self._tokens, self._landed, gathered, self.first)

    def multiply(self) -> None:
        """Multiply the rows when they have arrived."""
        self._exchange.await_ahead()
        number, ends = self._num_first, self._ends
        if self.first is None:
            self._multiply(0, self._landed.shape[0], ends)
            return
        with fewer_sms(NUM_SPARED_SMS) if self.first.sends_rest and ends.is_cuda else nullcontext():
            self._multiply(0, number, ends.clamp(max=number))
        if self.first.sends_rest:
            self._exchange.await_ahead(1)
            self._multiply(number, self._landed.shape[0], (ends - number).clamp(min=0))

    def _multiply(self, start: int, stop: int, ends: torch.Tensor) -> None:
        """Multiply these rows; `ends` count from the first of them."""
        if self._weights:
            stop = start + self._expected.padded(stop - start, ends.shape[0])
            rows = self._exchange.region(ExpertRegion.DISPATCH, self.format, stop)[start:]
            self._products.append([_multiplied(rows, each, ends) for each in self._weights])

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
        """Send the other groups' rows within the current pass, if they were not sent ahead."""
        if self.first is not None and not self.first.sends_rest:
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
        part = int(self.first is not None and group > 0)
        found = self._products[part][number] if part < len(self._products) else None
        if found is None:
            return None
        layout, width = self._rows.layout, found.shape[1]
        rows = layout.groups[group].rows
        origin = self._num_first if part else 0
        num_used = (layout.num_rows if part or self.first is None else rows.stop) - origin
        if found.shape[0] - num_used > MOST_SPARE * layout.num_rows:
            return found[rows.start - origin : rows.stop - origin].clone()
        return found.new_empty(0).set_(
            found.untyped_storage(), (rows.start - origin) * width, (rows.stop - rows.start, width), (width, 1)
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


def _multiplied(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor | None:
    """Return the product if there is memory for it: it has rows to spare, and groups that are multiplied later have none."""
    try:
        return multiply_grouped(rows, weights.mT, ends)
    except torch.OutOfMemoryError:
        return None
