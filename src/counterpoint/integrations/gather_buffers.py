"""The buffers that hold FSDP2's gathered parameters in turn; each is its own lane.

A buffer is in use as long as the tensor that FSDP was given is alive; when that tensor ends, FSDP's streams have been
told to wait. All ranks run the same steps, so they reach the same result.
"""

import math
import weakref
from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import final

import torch
import torch.distributed as dist

from counterpoint.errors import IntegrationError, RefusedTogetherError
from counterpoint.integrations.lane_collectives import Tally
from counterpoint.integrations.lanes import AcrossHosts, Lanes
from counterpoint.ops.host_levels import HostLevels
from counterpoint.ops.lane import AbstractLane
from counterpoint.value import require

MAX_BUFFERS = 16
FIRST_BUFFERS = 3


@final
class GatherBuffers:
    """The buffers of one group of ranks: `num_buffers`, or, if that is None, three and as many more as turn out to be
    needed.
    """

    def __init__(
        self,
        place: tuple[dist.ProcessGroup, torch.device, str],
        choices: tuple[int | None, AcrossHosts],
        tally: Tally,
    ) -> None:
        num_buffers, across_hosts = choices
        self._lanes = Lanes(place, num_buffers or FIRST_BUFFERS, across_hosts)
        self._num_ranks = place[0].size()
        self._can_grow = num_buffers is None
        self._holders: dict[AbstractLane, weakref.ref[torch.Tensor]] = {}
        self.tally = tally

    @property
    def num_buffers(self) -> int:
        """The number of buffers so far."""
        return len(self._lanes)

    def take(self, size: Sequence[int | torch.SymInt], dtype: torch.dtype, obstacle: str) -> torch.Tensor | None:
        """Return a buffer for a gather, or None if the library is to gather, because of `obstacle` or another reason."""
        num_elements = math.prod(int(length) for length in size)
        num_bytes = num_elements * dtype.itemsize
        obstacle = obstacle or self._lanes.obstacle_to("all_gather", num_bytes)
        num_hosts = 1 if obstacle else self._lanes.num_hosts
        part_bytes = num_bytes // self._num_ranks * num_hosts  # that ranks of a host send each other
        is_librarys = self.tally.is_librarys
        if is_librarys(part_bytes, obstacle) or is_librarys(part_bytes, self._lanes.obstacle):
            return None
        try:
            self._make_free()
            self._lanes.reserve(part_bytes, 1)
        except RefusedTogetherError as refusal:
            self._lanes.give_up(refusal)
            self.tally.count_library(self._lanes.obstacle)
            return None
        lane = self._lanes.next()
        output = lane.gathered(num_elements, dtype).view(*size)
        self._holders[lane] = weakref.ref(output)
        self.tally.count_copies((lane.num_ranks - 1) * part_bytes, num_hosts)
        return output

    def _make_free(self) -> None:
        """Make sure that the next lane's buffer is free: add one, or raise `IntegrationError` if their number is fixed."""
        holder = self._holders.get(self._lanes.present())
        if holder is None or holder() is None:
            return
        num_buffers = len(self._lanes)
        require(
            self._can_grow and num_buffers < MAX_BUFFERS,
            IntegrationError,
            f"FSDP holds more than {num_buffers} gathered groups at once, as it does when it prefetches several. "
            f"Call use_copy_engines(model, num_buffers={num_buffers + 1}) or higher."
            if num_buffers < MAX_BUFFERS
            else f"FSDP holds more than {MAX_BUFFERS} gathered groups at once, and there are no more buffers. Let it "
            "prefetch fewer modules.",
        )
        self._lanes.grow()

    @property
    def levels(self) -> HostLevels:
        """The levels that the buffers' lanes serve."""
        return self._lanes.levels

    def lane_of(self, output: torch.Tensor) -> AbstractLane | None:
        """Return the lane that owns this memory. Another tensor on the same memory would tell nothing about its use."""
        for lane, holder in self._holders.items():
            held = holder()
            if held is output:
                return lane
            require(
                held is None or held.data_ptr() != output.data_ptr(),
                IntegrationError,
                f"torch {torch.__version__} passes FSDP's gathered tensor on as another tensor, so its end "
                "cannot be detected. Use NCCL, or torch 2.11 to 2.13.",
            )
        return None


@cache
def _claims() -> dict[tuple[str, str], set[int]]:
    """The numbers in use, by group and purpose, of models that are alive at the same time in this process."""
    return {}


def claim(group_name: str, purpose: str) -> int:
    """Claim a number that no other model has for this group and purpose. Ranks claim in the same order, so they get the
    same one.
    """
    taken = _claims().setdefault((group_name, purpose), set())
    number = next(number for number in count(1) if number not in taken)
    taken.add(number)
    return number


def give_back(group_name: str, purpose: str, number: int) -> None:
    """Release the number and the lanes named by it, for others to claim."""
    _claims()[group_name, purpose].discard(number)
