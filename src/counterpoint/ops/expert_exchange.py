"""The contract of an expert exchange: what moves the rows of experts between the ranks of a group, in uneven blocks.

In a dispatch rows go from their sources to the rank that holds their experts, in a combine results go back. What lies where
is in `schedule/expert_layout.py`. Implementations: copy engines on symmetric memory (`expert_copies.py`), messages between
CPUs (`expert_messages.py`), and the library's all-to-all, which is the sequential form of both (`expert_library.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple, final

import torch

from counterpoint.schedule.expert_layout import ExpertLayout


class ExpertRegion(IntEnum):
    """What a part of the memory is for.

    `DISPATCH` and `AGAIN` hold rows from their sources: tokens, or gradients and, beside them, tokens that are sent again
    for the gradients of weights. `COMBINE` holds rows that come back.
    """

    DISPATCH = 0
    AGAIN = 1
    COMBINE = 2


class RowFormat(NamedTuple):
    """How many numbers a row has, of which type, and on which device."""

    num_columns: int
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Bytes of one row."""
        return self.num_columns * int(self.dtype.itemsize)

    @classmethod
    def of(cls, rows: torch.Tensor) -> "RowFormat":
        """The format of a matrix's rows."""
        return cls(rows.shape[1], rows.dtype, rows.device)

    def empty(self, num_rows: int) -> torch.Tensor:
        """A matrix of such rows."""
        return torch.empty((num_rows, self.num_columns), dtype=self.dtype, device=self.device)


@final
class Sorting:
    """How the rows of one call are sorted where a kernel has to; made on the device.

    What needs no more than the counts there is made while the host waits for them, the rest when first asked for.
    """

    layout: ExpertLayout

    def __init__(self, rank: int, num_experts: int) -> None:
        self._rank, self._own = rank, slice(rank * num_experts, (rank + 1) * num_experts)

    def prepare(self, gathered: torch.Tensor) -> None:
        """`gathered[source, expert]` are the counts on the device. `ends`: where the rows of each of this rank's experts end
        (int32)."""
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
        """Where this rank's own rows, in the order of its tokens, lie among all that its experts compute."""
        return _shifted(self._own_shift, self._own_counts, self.layout.num_own)

    @cached_property
    def order(self) -> torch.Tensor:
        """Rows by source and expert, as an all-to-all gives them, in the order of experts and sources."""
        shift = (self._arrived.t() - self._placed).flatten()
        return _shifted(shift, self._by_expert, self.layout.num_rows)

    @cached_property
    def order_back(self) -> torch.Tensor:
        """The other way round."""
        shift = (self._placed.t() - self._arrived).flatten()
        return _shifted(shift, self._by_source, self.layout.num_rows)


class Rows(NamedTuple):
    """The rows of one pass of a call."""

    layout: ExpertLayout
    format: RowFormat
    sorting: Sorting


def _shifted(shift: torch.Tensor, counts: torch.Tensor, number: int) -> torch.Tensor:
    """Each of `number` rows' own number and the shift of its run, of which `counts` are the lengths."""
    return torch.repeat_interleave(shift, counts, output_size=number) + torch.arange(number, device=shift.device)


class AbstractDispatch(ABC):
    """Rows on their way to their experts. All is issued on the current stream or behind it.

    `num_sent_bytes`: what this rank has sent to others by copies; 0 where the library moves rows.
    """

    num_sent_bytes = 0

    @abstractmethod
    def group(self, number: int) -> torch.Tensor:
        """The rows of a group of this rank's experts, to be read on the current stream from here on."""

    @abstractmethod
    def all_rows(self) -> torch.Tensor:
        """The rows of all groups, each of which was asked for before."""

    @abstractmethod
    def release(self) -> None:
        """All rows have been read on the current stream; others may send again."""

    @abstractmethod
    def join(self) -> None:
        """What follows on the current stream follows this rank's sends, too."""


class AbstractCombine(ABC):
    """Results on their way back to their sources."""

    num_sent_bytes = 0

    @abstractmethod
    def add(self, number: int, rows: torch.Tensor) -> None:
        """Give back the results of a group; contiguous and ready on the current stream."""

    @abstractmethod
    def results(self) -> torch.Tensor:
        """Results of this rank's rows, in the order of its tokens, when all groups were added."""

    @abstractmethod
    def join(self) -> None:
        """What follows on the current stream follows this rank's sends, too."""


class AbstractExpertExchange(ABC):
    """Moves the rows of experts between the ranks of one group."""

    @abstractmethod
    def gather(self, row: torch.Tensor, beside: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Every rank's row of whole numbers (int64), in the order of ranks, on the host, which waits.

        Before that `beside` is called with the rows on the device.
        """

    @abstractmethod
    def reserve(self, rows: Rows, regions: Sequence[ExpertRegion]) -> None:
        """Have memory for these rows in these regions, all ranks together. Raises `RefusedTogetherError` on every rank where
        one has no room."""

    @abstractmethod
    def begin(self) -> None:
        """A call begins, behind the last one. Raises `OperatorError` where an earlier call was given up."""

    @abstractmethod
    def dispatch(self, region: ExpertRegion, rows: Rows, source: torch.Tensor) -> AbstractDispatch:
        """Send this rank's rows, which are contiguous and in the order of its tokens, within the present call."""

    @abstractmethod
    def combine(self, rows: Rows) -> AbstractCombine:
        """Give back results within the present call."""

    @abstractmethod
    def end(self) -> None:
        """All of the present call is issued, and what it sent is joined."""

    @abstractmethod
    def num_symmetric_bytes(self) -> int:
        """Bytes of symmetric memory held on this rank."""

    @abstractmethod
    def close(self) -> None:
        """Give back all memory."""
