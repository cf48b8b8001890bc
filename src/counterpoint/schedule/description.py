"""Describes a schedule by a few choices, from which `generate.py` builds it for any sizes.

The design space is that of arXiv 2512.10236 (communication one level finer than the shard, matmul granularity chosen
independently) and beyond: ring accumulation inside the matmul, and matmul pieces alternating between two streams, so
that the last wave of one piece shares the SMs with the first of the next.
"""

from typing import Literal, get_args

from counterpoint.errors import ScheduleError
from counterpoint.value import Value, require

Pattern = Literal["sequential", "ring", "one_peer", "all_peers"]
MatmulGranularity = Literal["chunk", "peer", "fused", "rest"]
Local = Literal["first", "last"]
Along = Literal["rows", "columns", "inner", "experts"]
MAX_CHUNKS = 64
MAX_COPY_STREAMS = 8
LEAST_GROWTH, MOST_GROWTH = 0.25, 4.0


class ScheduleDescription(Value, frozen=True, kw_only=True):
    """The choices that define a schedule.

    `pattern`: `sequential` is the library's collective, then one matmul, and all other choices are ignored; `ring`
    passes blocks on from neighbor to neighbor; `one_peer` finishes one peer's block before the next peer's;
    `all_peers` sends chunk by chunk to every peer in turn. `chunks` is how many pieces a rank's block travels in.
    `matmul`: one for each `chunk`, for each `peer`'s block, for the same chunk of all peers (`fused`), or for all
    that comes from peers (`rest`). `local`: whether the matmul of a rank's own rows comes first or last; in reductions it
    is always last. `chunk_growth`: the rows of each chunk relative to the previous chunk; above 1 the first chunks are
    small, so that matmuls start early; below 1 the last are, so that little is left after the last copy. `along`:
    whether chunks are rows, slices of the product's columns (matmul + reduce-scatter), or slices of the inner size, whose
    products are added up (all-gather + matmul; each slice rounds once more), or rows up to where an expert's end (uneven
    blocks).
    """

    pattern: Pattern = "one_peer"
    chunks: int = 1
    matmul: MatmulGranularity = "chunk"
    local: Local = "first"
    num_copy_streams: int = 1
    num_compute_streams: int = 2
    chunk_growth: float = 1.0
    along: Along = "rows"

    def __post_init__(self) -> None:
        for name, names in (("pattern", Pattern), ("matmul", MatmulGranularity), ("local", Local), ("along", Along)):
            found, allowed = getattr(self, name), get_args(names)
            require(
                found in allowed,
                ScheduleError,
                f"{name} of a schedule must be {', '.join(allowed[:-1])} or {allowed[-1]}; found {found!r}. Change it.",
            )
        for name, most in (("chunks", MAX_CHUNKS), ("num_copy_streams", MAX_COPY_STREAMS), ("num_compute_streams", 2)):
            number = getattr(self, name)
            require(
                isinstance(number, int) and 1 <= number <= most,
                ScheduleError,
                f"{name} of a schedule must be from 1 to {most}; found {number!r}. Change it.",
            )

        require(
            LEAST_GROWTH <= self.chunk_growth <= MOST_GROWTH,
            ScheduleError,
            f"chunk_growth of a schedule must be from {LEAST_GROWTH:g} to {MOST_GROWTH:g}; found {self.chunk_growth!r}. "
            "Change it.",
        )

    @property
    def is_sequential(self) -> bool:
        """Whether the whole collective runs before the matmul, or the whole matmul before the collective."""
        return self.pattern == "sequential"

    def label(self) -> str:
        """Return a short name: `one_peer/2 chunk 1+2` is pattern/chunks, matmul granularity, copy + compute streams; `/3x2`
        are chunks that each have twice the rows of the previous one, `/4 columns` and `/4 inner` are slices."""
        if self.is_sequential:
            return "sequential"
        local = "" if self.local == "first" else " local last"
        streams = f"{self.num_copy_streams}+{self.num_compute_streams}"
        growth = "" if self.chunk_growth == 1 else f"x{self.chunk_growth:g}"
        along = "" if self.along == "rows" else f" {self.along}"
        return f"{self.pattern}/{self.chunks}{growth}{along} {self.matmul}{local} {streams}"


SEQUENTIAL = ScheduleDescription(pattern="sequential")
