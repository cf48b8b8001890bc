"""A copy schedule as a value: which rank copies which rows where, which matmul pieces wait for what, and in which order
everything is issued.

Rows are the unit: every buffer is a matrix whose rows are copied whole. A schedule holds the actions of all ranks in one
order in which they can be issued; each rank issues its own in that order. A schedule has no tensors, addresses or
times.

A rank's actions on one stream run one after the other. Dependencies across streams or ranks are listed in `after`. Calls
follow each other: `begin` of a rank waits for `end` of every rank in the previous call, because from then on no rank reads
what `begin`'s rank overwrites.
"""

import itertools
from functools import lru_cache
from typing import Literal

from counterpoint.errors import ScheduleError
from counterpoint.schedule.description import ScheduleDescription
from counterpoint.schedule.routing import MAX_RANKS, Routing
from counterpoint.value import Value, require

ExpertOperation = Literal["dispatch_grouped_matmul", "grouped_matmul_combine", "expert_ffn"]  # uneven blocks, by a routing
Operation = Literal[
    "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "column_parallel_matmul", "all_to_all_matmul"
]
Pass = Literal["forward", "backward"]
DataType = Literal["fp8", "bf16", "fp16", "fp32", "fp64"]
# begin, end: see above. copy: to another rank, by a copy engine. place: a copy within a rank. matmul: writes rows @ weight;
# add_matmul: adds them to what it reads last. activate: a function of every element. sum: adds up what it reads.
# weight_gradient: transposed left @ right, all rows.
Kind = Literal["begin", "copy", "place", "matmul", "add_matmul", "activate", "sum", "weight_gradient", "end"]
# given: the caller's. symmetric: one part on every rank, which the others write. local: a rank's own. result: returned.
Home = Literal["given", "symmetric", "local", "result"]
TILE_ROWS = 128  # rows of cuBLAS's usual tiles
LEAST_TILES_PER_PART = 4
MAX_SIZE = 1 << 40  # most rows or columns of a matrix: a larger number is a typing error
FIRST_COMPUTE = "compute 0"  # the stream that a call is issued on
# kinds of actions that the SMs run one after the other
SM_KINDS = frozenset({"matmul", "add_matmul", "activate", "weight_gradient"})
COMPUTATION_KINDS = SM_KINDS | {"sum"}


class Buffer(Value, frozen=True, kw_only=True):
    """A matrix of which each rank has one.

    With several slices, a caller's matrix counts as that many matrices of equal columns, side by side, whose rows are
    numbered one below the other. `rank_rows` are the rows of each rank, if they differ; `num_rows` is the largest
    number.
    """

    name: str
    home: Home
    num_rows: int
    num_columns: int
    num_slices: int = 1
    rank_rows: tuple[int, ...] = ()

    def rows_of(self, rank: int) -> int:
        """Return how many rows `rank` has."""
        return self.rank_rows[rank] if self.rank_rows else self.num_rows


class Region(Value, frozen=True, kw_only=True):
    """Rows `start` to `stop` of one rank's buffer."""

    rank: int
    buffer: str
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start

    def overlaps(self, other: "Region") -> bool:
        """Return whether a row is in both."""
        same = self.rank == other.rank and self.buffer == other.buffer
        return same and self.start < other.stop and other.start < self.stop


class Action(Value, frozen=True, kw_only=True):
    """One operation that one rank issues on one of its streams; the rank that has the rows issues a copy.

    A copy or placement of several regions copies each to the one at the same index in `writes`. `after` holds positions
    of earlier actions, of this rank on other streams or of other ranks. A matmul uses all of the weight, or only its
    `weight_rows` or `weight_columns`. A grouped matmul uses a weight for each expert: `expert_rows` are the rows of
    each, in order, and `layer` says whether the weights are those of the experts' first or second matmul.
    """

    kind: Kind
    rank: int
    stream: str
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    after: tuple[int, ...] = ()
    weight_rows: tuple[int, int] | None = None
    weight_columns: tuple[int, int] | None = None
    expert_rows: tuple[int, ...] = ()
    layer: int = 0


class CopySchedule(Value, frozen=True, kw_only=True):
    """All actions of one call on all ranks, in issue order. `num_rows` counts the rows of the undivided matrix.

    `routing` says how many rows go where, if blocks are uneven.
    """

    operation: Operation | ExpertOperation
    direction: Pass = "forward"
    description: ScheduleDescription
    num_ranks: int
    num_rows: int
    buffers: tuple[Buffer, ...]
    actions: tuple[Action, ...]
    routing: Routing | None = None

    def buffer(self, name: str) -> Buffer:
        """Return the buffer of that name."""
        return next(buffer for buffer in self.buffers if buffer.name == name)

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the positions of the actions that `rank` issues, in order."""
        return tuple(position for position, action in enumerate(self.actions) if action.rank == rank)


class Problem(Value, frozen=True, kw_only=True):
    """The sizes of one operator call: (num_rows, num_inner) @ (num_inner, num_columns) over `num_ranks`.

    `num_rows` is the M of the undivided matrix: all ranks' shards together, or the rows of each rank's activation.
    """

    operation: Operation
    num_ranks: int
    num_rows: int
    num_inner: int
    num_columns: int
    element_bytes: int = 2

    def __post_init__(self) -> None:
        require(
            1 <= self.num_ranks <= MAX_RANKS,
            ScheduleError,
            f"A schedule must have 1 to {MAX_RANKS} ranks; found {self.num_ranks}. Name the ranks of one node.",
        )
        for name in ("num_rows", "num_inner", "num_columns", "element_bytes"):
            number = getattr(self, name)
            require(
                0 < number <= MAX_SIZE,
                ScheduleError,
                f"{name} must be from 1 to {MAX_SIZE:,}; found {number:,}. Give the sizes of the whole matrix.",
            )


def split(num_rows: int, num_parts: int) -> tuple[tuple[int, int], ...]:
    """Split rows as `torch.tensor_split` does: the first `num_rows % num_parts` parts have one row more."""
    least, longer = divmod(num_rows, num_parts)
    starts = [part * least + min(part, longer) for part in range(num_parts + 1)]
    return tuple(itertools.pairwise(starts))


@lru_cache(maxsize=64)  # generators cut each block of a call alike
def graded(num_rows: int, num_parts: int, growth: float) -> tuple[tuple[int, int], ...]:
    """Split rows into parts, each with `growth` times as many rows as the previous one; for growth 1 as `split` does.

    With many rows, parts begin at multiples of `TILE_ROWS`, so that only the last has a partial tile.
    """
    if growth == 1:
        return split(num_rows, num_parts)
    step = TILE_ROWS if num_rows >= LEAST_TILES_PER_PART * TILE_ROWS * num_parts else 1
    weights = [growth**part for part in range(num_parts)]
    shares = [sum(weights[:part]) / sum(weights) for part in range(num_parts)]
    starts = [step * min(num_rows // step, round(num_rows * share / step)) for share in shares]
    return tuple(itertools.pairwise([*starts, num_rows]))
