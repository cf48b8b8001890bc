"""The buffers that hold FSDP2's gathered parameters in turn; each is its own lane.

A buffer is in use as long as the tensor that FSDP was given is alive; when that tensor ends, FSDP's streams have been
told to wait. All ranks run the same steps, so they reach the same result.
"""

import math
import weakref
from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import Any, final

import torch
import torch.distributed as dist

from counterpoint.errors import IntegrationError, RefusedTogetherError
from counterpoint.integrations.lane_collectives import CollectiveCounts
from counterpoint.integrations.lanes import AcrossHosts, Lanes
from counterpoint.ops.host_levels import HostLevels
from counterpoint.ops.lane import AbstractLane
from counterpoint.ops.tested_torch import USE_TESTED_TORCH
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
        tally: CollectiveCounts,
    ) -> None:
        num_buffers, across_hosts = choices
        self._lanes = Lanes(place, num_buffers or FIRST_BUFFERS, across_hosts)
        group, device, purpose = place
        self._shards = Lanes((group, device, f"{purpose} in place"), FIRST_BUFFERS, is_shared_only=True)
        self._num_ranks = place[0].size()
        self._can_grow = num_buffers is None
        self._holders: dict[AbstractLane, weakref.ref[torch.Tensor]] = {}
        self._reads: dict[AbstractLane, Any] = {}  # the last read of a lane's shared part by this rank itself
        self.tally = tally

    @property
    def num_buffers(self) -> int:
        """The number of flat buffers so far; none before the first is taken."""
        return len(self._lanes) if self._holders else 0

    def take(self, size: Sequence[int | torch.SymInt], dtype: torch.dtype, obstacle: str) -> torch.Tensor | None:
        """Return a buffer for a gather, or None if the library is to gather, because of `obstacle` or another reason."""
        num_elements = math.prod(int(length) for length in size)
        lane = self._next_lane(self._lanes, num_elements * dtype.itemsize, obstacle)
        if lane is None:
            return None
        output = lane.shared(num_elements, dtype).view(*size)
        self._holders[lane] = weakref.ref(output)
        return output

    def take_lane(self, num_bytes: int, obstacle: str) -> AbstractLane | None:
        """Return a lane for a gather in place of so many bytes, or None if the library is to gather. The current stream
        follows this rank's own reads of the lane's shared part; the lane's flags tell of the others' only.
        """
        lane = self._next_lane(self._shards, num_bytes, obstacle)
        if lane is not None and lane in self._reads:
            torch.cuda.current_stream(self._shards.device).wait_event(self._reads[lane])
        return lane

    def note_read(self, lane: AbstractLane) -> None:
        """Note that this rank reads the lane's shared part in the work issued so far on the current stream."""
        if self._shards.device.type == "cuda":
            self._reads[lane] = torch.cuda.current_stream(self._shards.device).record_event()

    def _next_lane(self, lanes: Lanes, num_bytes: int, obstacle: str) -> AbstractLane | None:
        obstacle = obstacle or lanes.obstacle_to("all_gather", num_bytes)
        num_hosts = 1 if obstacle else lanes.num_hosts
        part_bytes = num_bytes // self._num_ranks * num_hosts  # that ranks of a host send each other
        if lanes.leave_to_library(self.tally, part_bytes, obstacle):
            return None
        try:
            if lanes is self._lanes:
                self._make_free()
            lanes.reserve(part_bytes, 1)
        except RefusedTogetherError as refusal:
            lanes.give_up(refusal)
            self.tally.count_library(lanes.obstacle)
            return None
        lane = lanes.next()
        self.tally.count_copies((lane.num_ranks - 1) * part_bytes, num_hosts, is_in_place=lanes is self._shards)
        return lane

    @property
    def is_on_one_host(self) -> bool:
        """Whether parameters can be gathered in place, without the library between hosts."""
        return self._lanes.num_hosts == 1

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
                f"cannot be detected. Use NCCL, or: {USE_TESTED_TORCH}",
            )
        return None


@cache
def _claims() -> dict[tuple[str, str], set[int]]:
    """Return the numbers in use, by group and purpose, of models that are alive at the same time in this process."""
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
