"""How large the regions of an expert exchange are: as large as the rank that gets most needs, the same on all ranks.

They grow by need, with room to spare, because routings differ from step to step and getting more makes all ranks wait.
"""

from collections.abc import Sequence
from typing import final

import torch

from counterpoint.ops.expert_exchange import ExpertRegion, RowFormat, Rows
from counterpoint.ops.lane import aligned

SPARE = 1.25  # times what is needed, where more is needed than there is; chosen, not measured


@final
class RegionSizes:
    """Bytes of each region; they lie one behind the other."""

    def __init__(self, sizes: dict[ExpertRegion, int] | None = None) -> None:
        self._sizes = {region: (sizes or {}).get(region, 0) for region in ExpertRegion}

    @property
    def num_bytes(self) -> int:
        """Bytes of all regions."""
        return sum(self._sizes.values())

    def start(self, region: ExpertRegion) -> int:
        """First byte of a region."""
        return sum(size for each, size in self._sizes.items() if each < region)

    def view(self, memory: torch.Tensor, region: ExpertRegion, rows: RowFormat, num_rows: int) -> torch.Tensor:
        """The first rows of a region in `memory`, which is bytes."""
        start = self.start(region)
        return memory[start : start + num_rows * rows.num_bytes].view(rows.dtype).view(num_rows, rows.num_columns)

    def holds(self, needed: dict[ExpertRegion, int]) -> bool:
        """Whether the regions are large enough."""
        return all(num_bytes <= self._sizes[region] for region, num_bytes in needed.items())

    def grown(self, needed: dict[ExpertRegion, int]) -> "RegionSizes":
        """Regions that are large enough, none smaller than now."""
        return RegionSizes(
            {
                region: aligned(int(needed[region] * SPARE)) if needed.get(region, 0) > size else size
                for region, size in self._sizes.items()
            }
        )


def needed_bytes(rows: Rows, regions: Sequence[ExpertRegion]) -> dict[ExpertRegion, int]:
    """Bytes that the rank that gets most needs of each region."""
    layout = rows.layout
    return {
        region: (layout.most_returned if region == ExpertRegion.COMBINE else layout.most_grouped) * rows.format.num_bytes
        for region in regions
    }
