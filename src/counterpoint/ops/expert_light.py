"""Sends experts' rows by one light kernel (`light.cu`) instead of copy engines: for exchanges that are too small to pay for
a copy of each block, or for the library's all-to-all and a kernel that sorts rows.

The kernel awaits and sets the same flags as copy engines do, so a rank does not see what its peers use. It also places a
rank's own rows. Two ranks that shared one H200 got the library's bits; it was never timed.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, final

import numpy as np
import torch
from cuda.bindings import driver as cu

from counterpoint.cuda.driver import check
from counterpoint.ops.expert_exchange import ExpertRegion
from counterpoint.ops.light_kernels import VECTOR_BYTES, RowMoves, RowSignals, launch_rows
from counterpoint.schedule.expert_choice import LIGHT
from counterpoint.schedule.expert_layout import Counts

Blocks: TypeAlias = tuple[Counts, Counts, Counts]  # first rows in the source and in the target, and numbers of rows
Exchange: TypeAlias = Any  # an `ExpertCopies`, whose module imports this one
STREAM = "light"


def row_table(blocks: Iterable[tuple[int, int, Blocks]], row_bytes: int) -> tuple[Counts, int]:
    """Return the kernel's table, and the number of rows.

    A block is the address of its first buffer, that of its second, and arrays of the first rows in both and of numbers of
    rows. The table has for each: where it begins, where it goes, and the rows of the blocks before it.
    """
    parts = [
        np.stack([first * row_bytes + source, placed * row_bytes + target, number], 1)
        for source, target, (first, placed, number) in blocks
    ]
    table: Counts = np.concatenate(parts) if parts else np.empty((0, 3), dtype=np.int64)
    ends = table[:, 2].cumsum()
    table[:, 2] = ends - table[:, 2]
    return table, int(ends[-1]) if len(ends) else 0


@final
class LightOutbox:
    """What this rank sends in one direction of a call, by one launch; used like the `Outbox` of copies."""

    def __init__(self, exchange: Exchange, region: ExpertRegion, row_bytes: int) -> None:
        self._exchange, self._region, self._row_bytes = exchange, region, row_bytes
        self._blocks: list[tuple[int, int, Blocks]] = []
        self._peers: list[tuple[int, int]] = []  # with the number of the piece
        self._source: torch.Tensor | None = None  # kept until the kernel is joined
        self._table: torch.Tensor | None = None
        self.num_bytes = 0

    def ready(self, rows: torch.Tensor) -> None:
        """Declare these rows ready on the current stream."""
        self._source = rows if rows.data_ptr() % VECTOR_BYTES == 0 else rows.clone()
        check("Readying rows", cu.cuEventRecord(self._exchange.ready, self._exchange.current()))

    def send(self, peer: int, number: int, blocks: Blocks) -> None:
        """Add blocks for a peer; see `Outbox.send`."""
        self._add(self._exchange.address(self._region, peer), blocks)
        self._peers.append((peer, number))
        self.num_bytes += int(blocks[2].sum()) * self._row_bytes

    def place(self, num_rows: int, blocks: Callable[[], Blocks], target: torch.Tensor) -> bool:
        """Add this rank's own blocks, which go to rows of `target`, unless they are too many for few CTAs. Return whether
        they were added.
        """
        is_taken = num_rows * self._row_bytes < LIGHT.below_pair_bytes
        if is_taken:
            self._add(target.data_ptr(), blocks())
        return is_taken

    def _add(self, target: int, blocks: Blocks) -> None:
        assert self._source is not None, "ready() comes first"
        self._blocks.append((self._source.data_ptr(), target, blocks))

    def post(self) -> None:
        """Launch the kernel on a stream of high priority, after the ready rows."""
        exchange = self._exchange
        table, num_rows = row_table(self._blocks, self._row_bytes)
        if not num_rows:
            return
        stream = exchange.copy_stream(STREAM)
        check("Waiting for rows", cu.cuStreamWaitEvent(stream, exchange.ready, 0))
        with torch.cuda.stream(exchange.torch_stream(STREAM)):
            self._table = torch.from_numpy(table).pin_memory().to(exchange.device, non_blocking=True)
        vectors = self._row_bytes // VECTOR_BYTES
        moves = RowMoves(table=self._table.data_ptr(), num_blocks=len(table), num_rows=num_rows, row_vectors=vectors)
        flags = exchange.flags
        signals = RowSignals(
            free=tuple(flags.own(int(self._region), peer) for peer, _ in self._peers),
            arrived=tuple(flags.of_peer(exchange.arrived_flag(self._region, number), peer) for peer, number in self._peers),
            done=exchange.light_counter.data_ptr(),
        )
        launch_rows(moves, signals, LIGHT.num_ctas, stream)

    def settle(self) -> None:
        """Let the current stream wait until this rank's own rows are in their places."""
        if self._table is not None:
            self._exchange.join([STREAM])

    def join(self) -> None:
        """Let the current stream wait until all is sent."""
        self.settle()
        self._source = self._table = None
