"""Sizes of the regions of an expert exchange: as large as the rank with the largest need requires, equal on all ranks.

They grow on demand, with slack, because routings differ from step to step and growing makes all ranks wait. Rows from
their sources land in one memory. Results have another one, which torch's allocator lends out (`symmetric.py`).
"""

import itertools
from collections.abc import Sequence
from typing import final

import torch

from counterpoint.ops.expert_exchange import ExpertRegion, Needed, RowFormat, Rows
from counterpoint.ops.lane import aligned
from counterpoint.ops.symmetric import LEAST_LENT, LENT_MULTIPLE
from counterpoint.schedule.description import MAX_CHUNKS
from counterpoint.schedule.expert_layout import ExpertRange

SPARE = 1.25  # growth as a multiple of the need; chosen, not measured
SPARE_TO_LEND = LEAST_LENT + MAX_CHUNKS * LENT_MULTIPLE  # groups of results are rounded up, and all is large enough to lend


@final
class RegionSizes:
    """Bytes of each region; those where rows land are consecutive."""

    def __init__(self, sizes: dict[ExpertRegion, int] | None = None) -> None:
        self._sizes = {region: (sizes or {}).get(region, 0) for region in ExpertRegion}
        self._views: dict[tuple[ExpertRegion, RowFormat], torch.Tensor] = {}  # whole regions of the memory, as rows

    @property
    def num_landing_bytes(self) -> int:
        """Bytes of the regions where rows land."""
        return sum(self._sizes.values()) - self.num_result_bytes

    @property
    def num_result_bytes(self) -> int:
        """Bytes of the region of results, without `SPARE_TO_LEND`."""
        return self._sizes[ExpertRegion.COMBINE]

    def start(self, region: ExpertRegion) -> int:
        """Return the first byte of a region in its memory."""
        if region == ExpertRegion.COMBINE:
            return 0
        return sum(size for each, size in self._sizes.items() if each < region)

    def view(self, memory: torch.Tensor, region: ExpertRegion, rows: RowFormat, num_rows: int) -> torch.Tensor:
        """Return the first rows of a region in `memory`, which is bytes."""
        return self.whole(memory, region, rows)[:num_rows]

    def whole(self, memory: torch.Tensor, region: ExpertRegion, rows: RowFormat) -> torch.Tensor:
        """Return all rows for which a region has room. The memory is the same in every call."""
        found = self._views.get((region, rows))
        if found is None:
            start, num_rows = self.start(region), self._sizes[region] // max(1, rows.num_bytes)
            with torch.inference_mode(mode=False):  # later calls write to it in any mode
                found = memory[start : start + num_rows * rows.num_bytes].view(rows.dtype).view(num_rows, rows.num_columns)
            self._views[region, rows] = found
        return found

    def holds(self, needed: Needed) -> bool:
        """Return whether the regions are large enough."""
        return all(num_bytes <= self._sizes[region] for region, num_bytes in needed.items())

    def grown(self, needed: Needed) -> "RegionSizes":
        """Return regions that are large enough, none smaller than now."""
        return RegionSizes(
            {
                region: aligned(int(needed[region] * SPARE)) if needed.get(region, 0) > size else size
                for region, size in self._sizes.items()
            }
        )


def needed_bytes(rows: Rows, regions: Sequence[ExpertRegion]) -> Needed:
    """Return the bytes that the rank with the most rows needs of each region."""
    layout = rows.layout
    return dict.fromkeys(regions, layout.most_grouped * rows.format.num_bytes)


def result_starts(groups: Sequence[ExpertRange], row_bytes: int) -> list[int]:
    """Return where the results of each of a rank's groups begin in its memory, as torch's allocator gives it out."""
    rounded = (-(-_num_bytes(group, row_bytes) // LENT_MULTIPLE) * LENT_MULTIPLE for group in groups)
    return list(itertools.accumulate(rounded, initial=0))[:-1]


def can_be_lent(groups: Sequence[ExpertRange], row_bytes: int) -> bool:
    """Return whether torch's allocator gives these results their places."""
    return all(_num_bytes(group, row_bytes) >= LEAST_LENT for group in groups)


def _num_bytes(group: ExpertRange, row_bytes: int) -> int:
    start, stop = int(group.rows.start), int(group.rows.stop)
    return (stop - start) * row_bytes
