"""The interface of an expert exchange, which moves the rows of experts between the ranks of a group, in uneven blocks.

In a dispatch, rows go from their sources to the rank that holds their experts; in a combine, results go back.
`schedule/expert_layout.py` has the memory layout. Implementations: copy engines on symmetric memory
(`expert_copies.py`), messages between CPUs (`expert_messages.py`), and the library's all-to-all, the sequential form of
both (`expert_library.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple, final

import torch

from counterpoint.schedule.expert_layout import ExpertLayout


class ExpertRegion(IntEnum):
    """The purpose of a part of the memory.

    `DISPATCH` and `AGAIN` hold rows from their sources: tokens, or gradients and, beside them, tokens that are sent
    again for the gradients of weights. `COMBINE` holds returning rows.
    """

    DISPATCH = 0
    AGAIN = 1
    COMBINE = 2


class RowFormat(NamedTuple):
    """The length, type and device of a row."""

    num_columns: int
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Bytes of one row."""
        return self.num_columns * int(self.dtype.itemsize)

    @classmethod
    def of(cls, rows: torch.Tensor) -> "RowFormat":
        """Return the format of a matrix's rows."""
        return cls(rows.shape[1], rows.dtype, rows.device)

    def empty(self, num_rows: int) -> torch.Tensor:
        """Return an empty matrix of such rows."""
        return torch.empty((num_rows, self.num_columns), dtype=self.dtype, device=self.device)


@final
class Sorting:
    """How a kernel sorts the rows of one call; computed on the device.

    What needs only the device's counts is computed while the host waits for them, the rest when first read.
    """

    layout: ExpertLayout

    def __init__(self, rank: int, num_experts: int) -> None:
        self._rank, self._own = rank, slice(rank * num_experts, (rank + 1) * num_experts)

    def prepare(self, gathered: torch.Tensor) -> None:
        """Compute `ends`, where the rows of each of this rank's experts end (int32), from the counts on the device,
        `gathered[source, expert]`."""
        counts = gathered[:, self._own]
        self._by_source, by_expert = counts.flatten(), counts.t().flatten()
        self._by_expert = by_expert
        # first rows by expert and then source, as (expert, source), and by source and then expert, as (source, expert)
        placed = by_expert.cumsum(0) - by_expert
        self._placed = placed.view(counts.t().shape)
        self._arrived = (self._by_source.cumsum(0) - self._by_source).view(counts.shape)
        self._own_counts = counts[self._rank]
        self._own_shift = self._placed[:, self._rank] - (self._own_counts.cumsum(0) - self._own_counts)
        self.ends = counts.sum(0).cumsum(0, dtype=torch.int32)

    @cached_property
    def own_places(self) -> torch.Tensor:
        """The places of this rank's own rows, in the order of its tokens, among all rows that its experts compute."""
        return _shifted(self._own_shift, self._own_counts, self.layout.num_own)

    @cached_property
    def order(self) -> torch.Tensor:
        """The order that turns rows by source and expert, as an all-to-all gives them, into the order of experts and
        sources.
        """
        shift = (self._arrived.t() - self._placed).flatten()
        return _shifted(shift, self._by_expert, self.layout.num_rows)

    @cached_property
    def order_back(self) -> torch.Tensor:
        """The inverse order."""
        shift = (self._placed.t() - self._arrived).flatten()
        return _shifted(shift, self._by_source, self.layout.num_rows)


class Rows(NamedTuple):
    """The rows of one pass of a call."""

    layout: ExpertLayout
    format: RowFormat
    sorting: Sorting


def _shifted(shift: torch.Tensor, counts: torch.Tensor, number: int) -> torch.Tensor:
    """Return, for each of `number` rows, its number plus the shift of its run; `counts` are the lengths of the runs."""
    return torch.repeat_interleave(shift, counts, output_size=number) + torch.arange(number, device=shift.device)


class AbstractDispatch(ABC):
    """Rows in transit to their experts. Everything is issued on the current stream or after it.

    `num_sent_bytes`: bytes that this rank has sent to others by copies; 0 if the library moves rows.
    """

    num_sent_bytes = 0

    @abstractmethod
    def group(self, number: int) -> torch.Tensor:
        """Return the rows of a group of this rank's experts; the current stream may read them from here on."""

    @abstractmethod
    def all_rows(self) -> torch.Tensor:
        """Return the rows of all groups, each of which was read before."""

    def kept_rows(self) -> torch.Tensor:
        """Return the rows of all groups in memory that no later call reuses."""
        return self.all_rows().clone()

    @abstractmethod
    def release(self) -> None:
        """Declare all rows read on the current stream; others may send again."""

    @abstractmethod
    def join(self) -> None:
        """Make later work on the current stream follow this rank's sends, too."""


class AbstractCombine(ABC):
    """Results in transit back to their sources."""

    num_sent_bytes = 0

    @abstractmethod
    def add(self, number: int, rows: torch.Tensor) -> None:
        """Send back the results of a group, which are contiguous and ready on the current stream."""

    @abstractmethod
    def results(self) -> torch.Tensor:
        """Return the results of this rank's rows, in the order of its tokens, when all groups were added."""

    @abstractmethod
    def join(self) -> None:
        """Make later work on the current stream follow this rank's sends, too."""


class AbstractExpertExchange(ABC):
    """Moves the rows of experts between the ranks of one group."""

    @abstractmethod
    def gather(self, row: torch.Tensor, beside: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Return every rank's row of integers (int64), in the order of ranks, on the host, which waits.

        `beside` is called first, with the rows on the device.
        """

    @abstractmethod
    def reserve(self, rows: Rows, regions: Sequence[ExpertRegion]) -> None:
        """Reserve memory for these rows in these regions, all ranks together. Raises `RefusedTogetherError` on every
        rank if one has no room.
        """

    @abstractmethod
    def begin(self) -> None:
        """Begin a call after the last one. Raises `OperatorError` if an earlier call was given up."""

    @abstractmethod
    def dispatch(self, region: ExpertRegion, rows: Rows, source: torch.Tensor) -> AbstractDispatch:
        """Send this rank's rows, which are contiguous and in the order of its tokens, within the current call."""

    @abstractmethod
    def combine(self, rows: Rows) -> AbstractCombine:
        """Send back results within the current call."""

    @abstractmethod
    def end(self) -> None:
        """End the current call, when all of it is issued and its sends are joined."""

    @abstractmethod
    def num_symmetric_bytes(self) -> int:
        """Bytes of symmetric memory held on this rank."""

    @abstractmethod
    def close(self) -> None:
        """Free all memory."""
