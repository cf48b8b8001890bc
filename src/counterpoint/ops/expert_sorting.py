"""How the rows of one call are sorted: between the order in which an all-to-all delivers them, by source and expert, and
the order in which they are computed, by expert and source.

Both are vectors of places on the device of the rows. A Triton kernel computes all of them at once, because a call of an
expert layer waits for the host, and each small operator of torch costs the host 10 to 20 us. Without Triton, the host
computes them.
"""

from functools import cached_property
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch

from counterpoint.cuda.block_sums import has_triton
from counterpoint.schedule.expert_layout import Counts, ExpertLayout


class Places(NamedTuple):
    """Where rows are, as vectors (int64), and `ends` (int32): where the rows of each of this rank's experts end.

    `order` turns rows by source and expert into rows by expert and source; `order_back` is its inverse. `own` has the places
    of this rank's own rows, in the order of its tokens, among all rows that its experts compute.
    """

    order: torch.Tensor
    order_back: torch.Tensor
    own: torch.Tensor
    ends: torch.Tensor


@final
class Sorting:
    """The places of a call's rows, computed when they are first needed."""

    def __init__(self, layout: ExpertLayout, gathered: torch.Tensor) -> None:
        """`gathered[source, expert]`: numbers of rows for the experts of all ranks, on the device of the rows."""
        self._layout, self.gathered = layout, gathered

    @cached_property
    def ends(self) -> torch.Tensor:
        """`Places.ends`; what sends rows ahead of the host finds them, too, and sets them here."""
        return self.places.ends

    @cached_property
    def places(self) -> Places:
        """All of them."""
        if self.gathered.is_cuda and has_triton():
            from counterpoint.ops.expert_kernels import find_places  # noqa: PLC0415  needs Triton

            return Places(*find_places(self.gathered, self._layout))
        counts = self._layout.counts[:, self._layout.rank]
        found = (torch.from_numpy(each).to(self.gathered.device) for each in places_on_host(counts, self._layout.rank))
        return Places(*found)


def places_on_host(counts: Counts, rank: int) -> tuple[npt.NDArray[np.integer], ...]:
    """Compute `Places` from `counts[source, expert]`, the rows for this rank's experts."""
    by_source, by_expert = counts.ravel(), counts.T.ravel()
    placed = (by_expert.cumsum() - by_expert).reshape(counts.T.shape)  # first rows, as [expert, source]
    arrived = (by_source.cumsum() - by_source).reshape(counts.shape)  # first rows, as [source, expert]
    own = counts[rank]
    return (
        _shifted((arrived.T - placed).ravel(), by_expert),
        _shifted((placed.T - arrived).ravel(), by_source),
        _shifted(placed[:, rank] - (own.cumsum() - own), own),
        counts.sum(0).cumsum().astype(np.int32),
    )


def _shifted(shift: Counts, counts: Counts) -> Counts:
    """Return each row's number plus the shift of its run; `counts` are the lengths of the runs."""
    found: Counts = np.repeat(shift, counts)
    found += np.arange(len(found))
    return found
