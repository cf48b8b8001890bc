"""The interface of an expert exchange, which moves the rows of experts between the ranks of a group, in uneven blocks.

In a dispatch, rows go from their sources to the rank that holds their experts; in a combine, results go back.
`schedule/expert_layout.py` has the memory layout. Implementations: copy engines on symmetric memory
(`expert_copies.py`), messages between CPUs (`expert_messages.py`), and the library's all-to-all, the sequential form of
both (`expert_library.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import torch

from counterpoint.ops.expert_sorting import Sorting
from counterpoint.schedule.expert_layout import Counts, ExpertLayout

FIRST_RANGE = 0.5, 2.0  # first groups stay as they were while calls would choose from this to that many times as many rows


class ExpertRegion(IntEnum):
    """The purpose of a part of the memory.

    `DISPATCH` and `AGAIN` hold rows from their sources: tokens, or gradients and, beside them, tokens that are sent
    again for the gradients of weights. `COMBINE` holds results, from which their sources fetch them.
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


Needed: TypeAlias = dict[ExpertRegion, int]  # bytes


class Rows(NamedTuple):
    """The rows of one pass of a call."""

    layout: ExpertLayout
    format: RowFormat
    sorting: Sorting


class AbstractDispatch(ABC):
    """Rows in transit to their experts. Everything is issued on the current stream or after it.

    `num_sent_bytes`: bytes that this rank has sent to others by copies; 0 if the library moves rows.
    """

    num_sent_bytes = 0

    @abstractmethod
    def group(self, number: int) -> torch.Tensor:
        """Return the rows of a group of this rank's experts; the current stream may read them from here on."""

    def product(self, group: int, number: int) -> torch.Tensor | None:
        """Return the product of a group's rows with the call's first linear of this number, without its bias, if it was
        issued with the rows.
        """
        return None

    def send_rest(self) -> None:  # noqa: B027  most have sent all
        """Send what was left until a group is being multiplied."""

    @abstractmethod
    def all_rows(self) -> torch.Tensor:
        """Return the rows of all groups, each of which was read before."""

    def kept_rows(self) -> torch.Tensor:
        """Return the rows of all groups in memory that no later call reuses."""
        return self.all_rows().clone()

    @abstractmethod
    def join(self) -> None:
        """Make later work on the current stream follow this rank's sends, too; all rows were read."""


class AbstractCombine(ABC):
    """Results in transit back to their sources."""

    num_sent_bytes = 0

    def memory(self) -> AbstractContextManager[None]:
        """Return a context in which to allocate the results of a group, so that they need not be copied to be sent."""
        return nullcontext()

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
    def gather(self, counts: torch.Tensor, last: int, beside: Callable[[torch.Tensor], None]) -> tuple[Counts, torch.Tensor]:
        """Return every rank's counts (a contiguous vector of int64) and behind them its `last`, 0 or more: one row for each
        rank, on the host, which waits, in memory that the next call may reuse, and on the device.

        `beside` is called before the host waits, with those on the device. What it issues on the current stream runs after
        the exchange, and while the host decides what follows.
        """

    @abstractmethod
    def begin(self) -> None:
        """Begin a call after the last one. Raises `OperatorError` if an earlier call was given up."""

    @abstractmethod
    def dispatch(
        self, region: ExpertRegion, rows: Rows, source: torch.Tensor, *, were_ready: bool = False, first: int = 0
    ) -> AbstractDispatch:
        """Send this rank's rows, which are contiguous and in the order of its tokens, within the current call. Those of
        groups before `first` are there, and then this rank's own are, too.

        `were_ready`: they were ready before the last `gather`, so that they need not wait for what was issued beside it.
        Then the GPU waits for the host, which sends the first group's rows, and the others' by `send_rest`.
        """

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


class FirstRows(NamedTuple):
    """First rows that are sent before the others: each rank's number of them, the number of the call's groups, of which they
    are the first one, and whether a kernel sends the rest, too, before the host knows the counts.
    """

    numbers: tuple[int, ...]
    num_groups: int
    sends_rest: bool = False

    def is_near(self, other: "FirstRows") -> bool:
        """Return whether these can stay for a call that would choose others."""
        least, most = FIRST_RANGE
        are_near = all(least * a <= b <= most * a for a, b in zip(self.numbers, other.numbers, strict=True))
        return are_near and self[1:] == other[1:]


class AbstractExpertCopies(AbstractExpertExchange):
    """An exchange through symmetric memory."""

    @abstractmethod
    def holds(self, needed: Needed) -> bool:
        """Return whether the memory has these bytes in each region."""

    @abstractmethod
    def reserve(self, needed: Needed) -> None:
        """Reserve memory, all ranks together. Raises `RefusedTogetherError` on every rank if one has no room."""

    @abstractmethod
    def region(self, region: ExpertRegion, rows: RowFormat, num_rows: int) -> torch.Tensor:
        """Return this rank's memory for rows of a region."""

    @abstractmethod
    def place_ahead(self, tokens: torch.Tensor, gathered: torch.Tensor) -> None:
        """Put contiguous tokens for this rank's own experts into `ExpertRegion.DISPATCH` before the host knows the counts,
        if it has room and there is a kernel for it. The next `dispatch` of rows that were ready finds them there. If there
        is none, `drop_placed` comes next.
        """

    @abstractmethod
    def drop_placed(self) -> None:
        """Give up what `place_ahead` placed, on all ranks. A rank may place it after others have gone on, so before the next
        pass sends rows to a rank, it waits until that rank has begun the pass.
        """

    # what `expert_ahead.py` needs

    @abstractmethod
    def can_send_ahead(self, rows: RowFormat) -> bool:
        """Return whether such rows can be sent before the host knows the counts; the same on all ranks."""

    @abstractmethod
    def can_send_rest(self, rows: RowFormat) -> bool:
        """Return whether a second kernel can send the rest beside the matmul of first rows; the same on all ranks."""

    @abstractmethod
    def send_ahead(
        self, tokens: torch.Tensor, landed: torch.Tensor, gathered: torch.Tensor, first: FirstRows | None = None
    ) -> torch.Tensor:
        """Send contiguous tokens to their experts, all ranks together, by the counts that the last `gather` put on the
        device, and return `Places.ends`. `landed` is this rank's memory of `ExpertRegion.DISPATCH`. If it lacks room for
        all rows, it gets none, and ends are 0. With `first`, other ranks' rows are those for so many first places of each
        rank; if the rest is sent, too, it follows as a second part.
        """

    @abstractmethod
    def await_ahead(self, part: int = 0) -> None:
        """Let the current stream wait until all ranks have sent their tokens, or this part of them, 0 or 1."""

    @abstractmethod
    def end_ahead(self) -> None:
        """Declare these rows read on the current stream, or given up."""
