"""The buffers that FSDP2's gathered parameters lie in, in turn, each a lane of its own.

Whether FSDP is done with a buffer is told by the life of the tensor that it was given: while that lives, so does the use,
and when it ends FSDP's streams have been told to wait. All ranks run the same steps, so they find the same.
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
from counterpoint.integrations.lane_collectives import Lanes, Tally
from counterpoint.ops.lane import AbstractLane
from counterpoint.value import require

MAX_BUFFERS = 16
FIRST_BUFFERS = 3


@final
class GatherBuffers:
    """The buffers of one group of ranks: `num_buffers`, or where that is None three and as many more as turn out to be
    needed."""

    def __init__(self, place: tuple[dist.ProcessGroup, torch.device, str], num_buffers: int | None, tally: Tally) -> None:
        group, device, purpose = place
        self._lanes = Lanes(group, device, purpose, num_buffers or FIRST_BUFFERS)
        self._num_ranks = group.size()
        self._can_grow = num_buffers is None
        self._holders: dict[AbstractLane, weakref.ref[torch.Tensor]] = {}
        self.tally = tally

    @property
    def num_buffers(self) -> int:
        """Gathered groups at once, so far."""
        return len(self._lanes)

    def take(self, size: Sequence[int | torch.SymInt], dtype: torch.dtype, obstacle: str) -> torch.Tensor | None:
        """A buffer for what is gathered, or None where the library is to gather, for `obstacle` or else."""
        num_elements = math.prod(int(length) for length in size)
        part_bytes = num_elements * dtype.itemsize // self._num_ranks
        if self.tally.is_librarys(part_bytes, obstacle or self._lanes.obstacle):
            return None
        try:
            self._make_free()
            self._lanes.present().reserve(part_bytes)
        except RefusedTogetherError as refusal:
            self._lanes.give_up(refusal)
            self.tally.count_library(self._lanes.obstacle)
            return None
        lane = self._lanes.next()
        output = lane.gathered(num_elements, dtype).view(*size)
        self._holders[lane] = weakref.ref(output)
        self.tally.count_copies((self._num_ranks - 1) * part_bytes)
        return output

    def _make_free(self) -> None:
        """Have a lane in turn whose buffer is not in use: add one, or raise `IntegrationError` where a number was set."""
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
            else f"FSDP holds more than {MAX_BUFFERS} gathered groups at once, the most there are buffers for. "
            "Let it prefetch fewer modules.",
        )
        self._lanes.grow()

    def lane_of(self, output: torch.Tensor) -> AbstractLane | None:
        """The lane whose memory this is. Were it another tensor on the same memory, its life would tell nothing."""
        for lane, holder in self._holders.items():
            held = holder()
            if held is output:
                return lane
            require(
                held is None or held.data_ptr() != output.data_ptr(),
                IntegrationError,
                f"torch {torch.__version__} hands FSDP's gathered tensor on as another one, so its end cannot be seen. "
                "Use NCCL, or torch 2.11 to 2.13.",
            )
        return None


@cache
def _claims() -> dict[tuple[str, str], set[int]]:
    """The numbers in use, by group and purpose: of models that live at the same time in this process."""
    return {}


def claim(group_name: str, purpose: str) -> int:
    """A number that no other has for this group and purpose. Ranks claim in the same order, so they find the same."""
    taken = _claims().setdefault((group_name, purpose), set())
    number = next(number for number in count(1) if number not in taken)
    taken.add(number)
    return number


def give_back(group_name: str, purpose: str, number: int) -> None:
    """The number, and the lanes that are named by it, are another's to claim."""
    _claims()[group_name, purpose].discard(number)
