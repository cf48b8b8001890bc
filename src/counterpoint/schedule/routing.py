"""How many rows each rank sends to each expert, as a matrix of counts that every rank knows.

`expert_layout.py` determines how rows are cut and sent. The examples are those of benchmarks: equally many rows for each
expert, shares that fall as 1 over the expert's place (Zipf's law), or all rows for one expert.
"""

import itertools
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

from counterpoint.errors import ScheduleError, shown_path
from counterpoint.files import read_limited
from counterpoint.value import Value, decode_json, require

MAX_RANKS = 64  # of any schedule
MAX_ROWS = 1 << 40  # a larger number is a typing error
MAX_EXPERTS = 1 << 16
RoutingKind = Literal["balanced", "zipf", "one-hot"]
SCATTER = 7919  # a prime: experts in order of their shares are spread over the ranks


class Routing(Value, frozen=True, kw_only=True, dict=True):
    """How many rows each source sends to each expert: `counts[source][expert]`, zero allowed.

    Experts are numbered over all ranks, equally many on each: rank r holds experts r * E to r * E + E - 1. A row is a
    token's copy for one of its experts, so a source with T tokens and top k has T * k rows.
    """

    counts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        num_ranks = len(self.counts)
        require(
            1 <= num_ranks <= MAX_RANKS,
            ScheduleError,
            f"A routing must have 1 to {MAX_RANKS} ranks; found {num_ranks}. Give one row of counts for each rank.",
        )
        num_experts = len(self.counts[0])
        for source, row in enumerate(self.counts):
            require(
                len(row) == num_experts and num_experts > 0 and num_experts % num_ranks == 0,
                ScheduleError,
                f"Each rank must count its rows for all experts, of which each of {num_ranks} ranks holds "
                f"equally many; found {len(row)} counts of rank {source}. Give every rank a count for every "
                "expert, 0 if it gets nothing.",
            )
            require(
                0 <= min(row) <= max(row) <= MAX_ROWS,
                ScheduleError,
                f"Counts of rows must be from 0 to {MAX_ROWS:,}; found {min(row) if min(row) < 0 else max(row):,} of rank "
                f"{source}. Correct it.",
            )

    @property
    def num_ranks(self) -> int:
        """Number of ranks that exchange rows."""
        return len(self.counts)

    @property
    def num_local_experts(self) -> int:
        """Number of experts that each rank holds."""
        return len(self.counts[0]) // len(self.counts)

    @cached_property
    def pairs(self) -> tuple[tuple[int, ...], ...]:
        """Rows from each source to each destination: `pairs[source][destination]`."""
        return tuple(
            tuple(sum(self.of_pair(source, each)) for each in range(self.num_ranks)) for source in range(self.num_ranks)
        )

    @cached_property
    def most_rows(self) -> int:
        """Most rows that any rank sends to another one."""
        return most_of_pairs(self.pairs)

    @cached_property
    def sent_before(self) -> tuple[tuple[int, ...], ...]:
        """First row of each block at its source: `sent_before[source][expert]`."""
        return tuple(tuple(itertools.accumulate(row[:-1], initial=0)) for row in self.counts)

    @cached_property
    def placed_before(self) -> tuple[tuple[int, ...], ...]:
        """First row of each block at its expert's rank, by source and expert: in the order of experts, then of sources."""
        by_expert: list[tuple[int, ...]] = []
        for expert, column in enumerate(zip(*self.counts, strict=True)):
            start = 0 if expert % self.num_local_experts == 0 else by_expert[-1][-1]
            by_expert.append(tuple(itertools.accumulate(column, initial=start)))  # and where its last block ends
        return tuple(zip(*by_expert, strict=True))

    def of_pair(self, source: int, destination: int) -> tuple[int, ...]:
        """Return the rows from `source` to each of the experts that `destination` holds."""
        number = self.num_local_experts
        return self.counts[source][destination * number : (destination + 1) * number]

    def expert_rows(self, rank: int) -> tuple[int, ...]:
        """Return the rows of all sources for each of the experts that a rank holds."""
        return tuple(map(sum, zip(*(self.of_pair(source, rank) for source in range(self.num_ranks)), strict=True)))

    def num_sent(self, rank: int) -> int:
        """Return the rows that a rank has before dispatch and gets back from combine, its own experts' rows included."""
        return sum(self.pairs[rank])

    def num_grouped(self, rank: int) -> int:
        """Return the rows that a rank's experts compute, including its own tokens."""
        return sum(row[rank] for row in self.pairs)

    def num_landing(self, rank: int) -> int:
        """Return the rows that other ranks write into this rank's memory in dispatch."""
        return self.num_grouped(rank) - self.pairs[rank][rank]

    def num_returning(self, rank: int) -> int:
        """Return the rows that other ranks write into this rank's memory in combine."""
        return self.num_sent(rank) - self.pairs[rank][rank]


def most_of_pairs(pairs: Sequence[Sequence[int]]) -> int:
    """Return the most rows that one rank has for another: `pairs[source][destination]`."""
    return max(max((*row[:rank], *row[rank + 1 :]), default=0) for rank, row in enumerate(pairs))


def example_routing(kind: RoutingKind, num_ranks: int, num_rows: int, num_experts: int) -> Routing:
    """Return a routing of `num_rows` rows per rank for `num_experts` experts over all ranks. Raises `ScheduleError`."""
    require(
        1 <= num_ranks <= MAX_RANKS and 1 <= num_experts <= MAX_EXPERTS and num_experts % num_ranks == 0,
        ScheduleError,
        f"There must be at most {MAX_EXPERTS:,} experts, equally many on each of 1 to {MAX_RANKS} ranks; found "
        f"{num_experts:,} on {num_ranks}. Name a multiple of the number of ranks.",
    )
    require(
        0 <= num_rows <= MAX_ROWS,
        ScheduleError,
        f"num_rows must be from 0 to {MAX_ROWS:,}; found {num_rows:,}. Give the rows of each rank.",
    )
    if kind == "one-hot":
        weights = [1.0] + [0.0] * (num_experts - 1)
    else:
        weights = [1.0 / (place + 1) if kind == "zipf" else 1.0 for place in range(num_experts)]
        order = sorted(range(num_experts), key=lambda expert: expert * SCATTER % num_experts)
        weights = [weights[place] for place in order]
    return Routing(counts=(_shared_out(num_rows, weights),) * num_ranks)


def read_routing(path: Path | str) -> Routing:
    """Read the routing in a JSON file: a list for each rank, with a count for each expert. Raises `ScheduleError`."""
    content = bytes(read_limited(path, ScheduleError, "give a JSON file with a list of counts for each rank"))
    what, remedy = f"{shown_path(path)} is not a routing", "Give a list of whole numbers for each rank."
    counts = decode_json(content, tuple[tuple[int, ...], ...], ScheduleError, what, remedy)
    try:
        return Routing(counts=counts)
    except ScheduleError as problem:
        raise ScheduleError(f"{shown_path(path)}: {problem}") from problem


def _shared_out(num_rows: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Split rows by weight into whole numbers that add up: each part starts where the previous weights' sum ends."""
    total = sum(weights)
    edges = [round(num_rows * part / total) for part in itertools.accumulate(weights, initial=0.0)]
    return tuple(stop - start for start, stop in itertools.pairwise(edges))
