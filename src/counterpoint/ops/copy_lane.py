"""A lane on GPUs: copy engines push blocks into, and pull shared parts out of, other GPUs' symmetric memory.

`lane_steps.py` has the order of flags and copies; this module issues it. What repeats at the same addresses is recorded and
replayed (`graph_cache.py`): with two ranks an all-reduce is eleven driver calls and a kernel.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, final

import torch
import torch.distributed as dist
from cuda.bindings import driver as cu
from torch._C import _CUDAGraph as Graph

from counterpoint.cuda.block_sums import Arrived, Pieces
from counterpoint.cuda.driver import SUCCESS, Handle, check
from counterpoint.ops.agreement import Agreement
from counterpoint.ops.graph_cache import Key, Recordings, capture_or_disable, is_capturing, is_possible, refuse_in_capture
from counterpoint.ops.lane import AbstractLane, aligned, arrived_in
from counterpoint.ops.lane_steps import RESTING, LaneStep, lane_moves
from counterpoint.ops.signals import Flags, Signals
from counterpoint.ops.streams import recording_stream_of, stream_of
from counterpoint.ops.symmetric import SymmetricMemory, SymmetricPool
from counterpoint.units import format_bytes

GREATEST_PRIORITY = -5  # the driver's; torch uses the highest that it has
MAX_PITCH = 2**31 - 1  # of a copy of rows: CU_DEVICE_ATTRIBUTE_MAX_PITCH, the same on all GPUs so far
Pitched = tuple[int, int]  # an address, and the bytes from the start of one row there to the start of the next


class PitchedRows(NamedTuple):
    """Rows of memory at equal distances: their number, the bytes of one, and those from one to the next."""

    number: int
    num_bytes: int
    pitch: int


class Recorded(NamedTuple):
    """The recording of what `repeat` was given, and its result."""

    graph: Graph
    result: int


@final
class CopyLane(AbstractLane):
    """Symmetric memory, flags and a stream of one group on one GPU.

    The memory holds a shared part, then a row for every rank; or all of it is the result of `gathered`.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, agreement: Agreement, name: str) -> None:
        self.rank, self.num_ranks = int(group.rank()), int(group.size())
        self._group_name, self._device = group.group_name, device
        self._moves = lane_moves(self.rank, self.num_ranks)
        self._flags = Flags(group, device, agreement, RESTING)
        self._signals = Signals(self._flags)
        self._pool = SymmetricPool(device, group, agreement)
        self._row_bytes = 0
        self._has_captured = False  # whether graphs of users hold the present memory's addresses
        # a sum's CTAs are placed as soon as a matmul's CTA retires: the scheduler checks priority only then
        self.stream = stream_of(group.group_name, device, f"lane {name}", GREATEST_PRIORITY)
        self._recordings: Recordings[Recorded] = Recordings(is_enabled=is_possible())
        self._copied: set[int] | None = None  # addresses of pieces that the call being recorded copies

    @contextmanager
    def issuing(self) -> Iterator[None]:
        """See `AbstractLane.issuing`."""
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.stream):
            yield

    @property
    def block_bytes(self) -> int:
        """See `AbstractLane.block_bytes`."""
        return self._row_bytes

    def reserve(self, num_bytes: int, *, is_shared_only: bool = False) -> None:
        """See `AbstractLane.reserve`."""
        wanted, num_rows = aligned(num_bytes), 1 if is_shared_only else self.num_ranks + 1
        if wanted <= self._row_bytes:
            return
        what = f"A collective with blocks of {format_bytes(num_bytes)}"
        refuse_in_capture(what, self._device)
        self.discard()  # if there is no more memory, the next call of reserve must not count on it
        self._pool.replace(num_rows * wanted, what, has_captured=self._has_captured)
        self._row_bytes, self._has_captured = wanted, False

    def discard(self) -> None:
        """See `AbstractLane.discard`."""
        self._row_bytes = 0
        self._recordings.clear()  # they hold addresses of the memory

    def exchange(self, blocks: Sequence[Pieces]) -> Arrived:
        """See `AbstractLane.exchange`."""
        stream, memory = self._current(), self._reserved()
        row = self._row_bytes * (1 + self.rank)  # of this rank's blocks, on every rank

        def push(peer: int) -> None:
            to = memory.addresses[peer] + row
            for piece in blocks[peer]:
                shape = _rows_of(piece)
                copy_rows((to, shape.num_bytes), (self._address_of(piece), shape.pitch), shape, stream)
                to += piece.nbytes

        self._issue(self._moves.exchange, stream, push)
        self._sample(stream)
        rows = memory.local[self._row_bytes :].view(self.num_ranks, self._row_bytes)
        return arrived_in(rows, blocks[self.rank], self.rank)

    def release(self) -> None:
        """See `AbstractLane.release`."""
        self._issue(self._moves.release, self._current())

    def shared(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """See `AbstractLane.shared`."""
        self._issue(self._moves.share, self._current())
        return self._reserved().local[: num_elements * dtype.itemsize].view(dtype)

    def fetch(self, targets: Sequence[Pieces]) -> None:
        """See `AbstractLane.fetch`."""
        stream, addresses = self._current(), self._reserved().addresses

        def pull(peer: int) -> None:
            origin = addresses[peer]
            for piece in targets[peer]:
                shape = _rows_of(piece)
                copy_rows((self._address_of(piece), shape.pitch), (origin, shape.num_bytes), shape, stream)
                origin += piece.nbytes

        self._issue(self._moves.fetch, stream, pull)
        self._sample(stream)

    def gather(self, parts: Sequence[torch.Tensor]) -> None:
        """See `AbstractLane.gather`."""
        stream, memory = self._current(), self._reserved()

        def pull(peer: int) -> None:
            to, shape = parts[peer].data_ptr(), _rows_of(parts[peer])
            origin = memory.addresses[peer] + to - memory.local.data_ptr()
            copy_rows((to, shape.pitch), (origin, shape.pitch), shape, stream)

        self._issue(self._moves.fetch, stream, pull)
        self._sample(stream)

    def repeat(self, key: Key, issue: Callable[[], int]) -> int:
        """See `AbstractLane.repeat`."""
        if not self._recordings.is_enabled or is_capturing(self._device):
            return issue()
        found = self._recordings.find(key)
        if found is None and self._recordings.is_due(key):
            found = self._record(key, issue)
        if found is None:
            return issue()
        self._flags.watch.require_sound()
        found.graph.replay()
        self._sample(self._current())
        return found.result

    def _record(self, key: Key, issue: Callable[[], int]) -> Recorded | None:
        """Record this; if that fails, return None and record nothing else."""
        stream = recording_stream_of(self._group_name, self._device, "lanes", GREATEST_PRIORITY)
        results: list[int] = []
        copied: set[int] = set()
        self._copied = copied
        try:
            graph = capture_or_disable(self._recordings, stream, lambda: results.append(issue()), "Collectives")
        finally:
            self._copied = None
        if graph is None:
            return None
        recorded = Recorded(graph, results[0])
        self._recordings.keep(key, recorded, copied)
        return recorded

    def _address_of(self, piece: torch.Tensor) -> int:
        address = int(piece.data_ptr())
        if self._copied is not None:
            self._copied.add(address)
        return address

    def _sample(self, stream: Handle) -> None:
        """Let the watchdog watch what was issued; captured work runs later, and a user's unwatched."""
        if self._copied is not None:
            return
        if is_capturing(self._device):
            self._has_captured = True
        else:
            self._flags.watch.sample(stream)

    def _issue(self, steps: Sequence[LaneStep], stream: Handle, copy: Callable[[int], None] | None = None) -> None:
        self._flags.watch.require_sound()
        for step in steps:
            if step.kind == "take":
                self._signals.take(step.flag, step.peers, stream)
            elif step.kind == "raise":
                self._signals.raise_to(step.flag, step.peers, stream)
            else:
                assert copy is not None
                copy(step.peers[0])

    def _current(self) -> Handle:
        return cu.CUstream(torch.cuda.current_stream(self._device).cuda_stream)

    def _reserved(self) -> SymmetricMemory:
        assert self._pool.memory is not None, "call reserve() first"
        return self._pool.memory

    def num_recordings(self) -> int:
        """See `AbstractLane.num_recordings`."""
        return len(self._recordings)

    def num_symmetric_bytes(self) -> int:
        """See `AbstractLane.num_symmetric_bytes`."""
        return self._flags.num_bytes() + self._pool.num_bytes()

    def close(self) -> None:
        """See `AbstractLane.close`."""
        torch.cuda.synchronize(self._device)
        self.discard()
        self._flags.watch.close()
        self._pool.close()


def _rows_of(tensor: torch.Tensor) -> PitchedRows:
    """Return a tensor's bytes as rows: one if they follow one another."""
    if tensor.is_contiguous():
        return PitchedRows(1, int(tensor.nbytes), int(tensor.nbytes))
    num_rows, num_elements = tensor.shape
    return PitchedRows(num_rows, num_elements * tensor.itemsize, tensor.stride(0) * tensor.itemsize)


def copy_rows(target: Pitched, source: Pitched, rows: PitchedRows, stream: Handle) -> None:
    """Copy rows between addresses of any GPUs, after the stream's work."""
    (to, to_pitch), (origin, pitch) = target, source
    if rows.number == 1 or max(to_pitch, pitch) > MAX_PITCH:
        for number in range(rows.number):
            copy_bytes(to + number * to_pitch, origin + number * pitch, rows.num_bytes, stream)
        return
    copy = cu.CUDA_MEMCPY2D()
    copy.srcMemoryType = copy.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_UNIFIED
    copy.srcDevice, copy.srcPitch = cu.CUdeviceptr(origin), pitch
    copy.dstDevice, copy.dstPitch = cu.CUdeviceptr(to), to_pitch
    copy.WidthInBytes, copy.Height = rows.num_bytes, rows.number
    check("Copying rows between GPUs", cu.cuMemcpy2DAsync(copy, stream))


def copy_bytes(target: int, source: int, num_bytes: int, stream: Handle) -> None:
    """Copy between addresses of any GPUs, after the stream's work."""
    if not num_bytes:
        return
    (result,) = cu.cuMemcpyAsync(cu.CUdeviceptr(target), cu.CUdeviceptr(source), num_bytes, stream)
    if result != SUCCESS:
        check("Copying between GPUs", (result,))
