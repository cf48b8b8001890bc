"""The state that a group of ranks keeps between calls of expert layers: exchanges, and what all ranks have agreed on."""

import logging
from typing import final

import torch

from counterpoint.ops.agreement import CallNotice
from counterpoint.ops.collectives import Ranks
from counterpoint.ops.expert_exchange import AbstractExpertExchange
from counterpoint.ops.expert_library import ExpertLibrary
from counterpoint.ops.expert_messages import ExpertMessages
from counterpoint.units import format_bytes

MAX_AGREED = 1024  # most shapes of calls that are cached; a model has a few
LOGGER = logging.getLogger("counterpoint")


@final
class ExpertGroup:
    """The exchanges of one group on one kind of device. `obstacle`: why rows cannot go by copies, or nothing.

    `refused_bytes`: symmetric memory of this size or more was not available. `num_refused`: calls that therefore ran by
    the library.
    """

    def __init__(self, ranks: Ranks, device: torch.device, obstacle: str) -> None:
        self._ranks, self._device, self.obstacle = ranks, device, obstacle
        self.library = ExpertLibrary(ranks)
        self.copies = None if obstacle else self._open_copies()
        self.refused_bytes = self.num_refused = 0
        self._agreed: set[str] = set()

    def _open_copies(self) -> AbstractExpertExchange:
        if self._device.type == "cpu":
            return ExpertMessages(self._ranks)
        from counterpoint.ops.expert_copies import ExpertCopies  # noqa: PLC0415  needs cuda-bindings

        return ExpertCopies(self._ranks.group, self._device, self._ranks.agreement)

    def agree(self, words: str) -> None:
        """Compare a call with the other ranks' the first time. Raises `OperatorError` if they call something else."""
        if words in self._agreed:
            return
        self._ranks.agreement.compare(CallNotice(request=words))
        if len(self._agreed) >= MAX_AGREED:
            self._agreed.clear()
        self._agreed.add(words)

    def refuse_memory(self, num_bytes: int, reason: str) -> None:
        """Record that this much symmetric memory is not available; all ranks know."""
        if not self.refused_bytes:
            LOGGER.warning(
                "Expert calls that need %s of symmetric memory or more use the library's all-to-all: %s",
                format_bytes(num_bytes),
                reason,
            )
        self.refused_bytes = num_bytes

    def num_symmetric_bytes(self) -> int:
        """Bytes of symmetric memory held on this rank."""
        return self.copies.num_symmetric_bytes() if self.copies else 0

    def close(self) -> None:
        """Free all memory."""
        if self.copies is not None:
            self.copies.close()
