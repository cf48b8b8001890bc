"""The state that a group of ranks keeps between calls of expert layers: exchanges, and what all ranks have agreed on."""

import logging
from collections.abc import Sequence
from typing import final

import torch

from counterpoint.errors import RefusedTogetherError
from counterpoint.ops.agreement import CallNotice
from counterpoint.ops.collectives import Ranks
from counterpoint.ops.expert_ahead import AheadDispatch, ExpectedRows
from counterpoint.ops.expert_exchange import AbstractExpertCopies, ExpertRegion, Needed, RowFormat
from counterpoint.ops.expert_library import ExpertLibrary
from counterpoint.ops.expert_messages import ExpertMessages
from counterpoint.units import format_bytes

MAX_AGREED = 1024  # most shapes of calls that are cached; a model has a few
LOGGER = logging.getLogger("counterpoint")


@final
class ExpertGroup:
    """The exchanges of one group on one kind of device. `obstacle`: why rows cannot go by copies, or nothing.

    `refused_bytes`: symmetric memory of this size or more was not available. `num_refused`: calls that therefore ran by
    the library. `expected`: the rows of calls that can begin before the host knows the counts.
    """

    def __init__(self, ranks: Ranks, device: torch.device, obstacle: str) -> None:
        self._ranks, self._device, self.obstacle = ranks, device, obstacle
        self.library = ExpertLibrary(ranks)
        self.copies = None if obstacle else self._open_copies()
        self.refused_bytes = self.num_refused = 0
        self._agreed: set[str] = set()
        self.expected = ExpectedRows()
        self._has_room_ahead = True  # whether no rank has refused memory for rows that are sent ahead

    def _open_copies(self) -> AbstractExpertCopies:
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

    def is_refused(self, needed: Needed) -> bool:
        """Return whether so much symmetric memory was not available before."""
        return bool(self.refused_bytes) and sum(needed.values()) >= self.refused_bytes

    def reserve(self, needed: Needed) -> bool:
        """Reserve symmetric memory for copies, all ranks together, and return whether every rank has it."""
        num_bytes = sum(needed.values())
        if self.copies is None or self.is_refused(needed):
            return False
        try:
            self.copies.reserve(needed)
        except RefusedTogetherError as refusal:
            if not self.refused_bytes:
                LOGGER.warning(
                    "Expert calls that need %s of symmetric memory or more use the library's all-to-all: %s",
                    format_bytes(num_bytes),
                    refusal,
                )
            self.refused_bytes = num_bytes
            return False
        return True

    def ahead(self, kind: str, tokens: torch.Tensor, weights: Sequence[torch.Tensor]) -> AheadDispatch | None:
        """Return what begins a call of this kind before the host knows its counts; None if it has to wait for them, the same
        on all ranks.
        """
        expected, rows = self.expected.next(kind), RowFormat.of(tokens)
        if not expected or self.copies is None or not (self._has_room_ahead and self.copies.can_send_ahead(rows)):
            return None
        try:
            num_held = expected.num_held(weights[0].shape[0]) if weights else expected.most_rows
            self.copies.reserve({ExpertRegion.DISPATCH: num_held * rows.num_bytes})
        except RefusedTogetherError:
            self._has_room_ahead = False  # other calls may still have the memory that they need
            return None
        return AheadDispatch(self.copies, tokens, weights, expected, int(self._ranks.group.rank()))

    def num_symmetric_bytes(self) -> int:
        """Bytes of symmetric memory held on this rank."""
        return self.copies.num_symmetric_bytes() if self.copies else 0

    def close(self) -> None:
        """Free all memory."""
        if self.copies is not None:
            self.copies.close()
