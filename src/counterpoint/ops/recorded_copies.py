"""One collective of a captured step, recorded as a small graph of copies, flags and a sum.

Flags, for each collective and peer: ENTERED, my memory may be written; ARRIVED, your blocks are there; RETURNED, so are
your sums. All are 0 between replays. No flag is set before it was reset, however far apart ranks replay: a rank sets
ENTERED when its previous replay has ended, which took the peer's ARRIVED, which the peer set after it had reset ENTERED.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import msgspec
import torch
from cuda.bindings import driver as cu

from counterpoint.cuda.block_sums import Arrived, sum_arrived, warm_up
from counterpoint.cuda.collective_blocks import Blocks, IssuedCollective
from counterpoint.cuda.driver import Handle, check
from counterpoint.cuda.driver_graph import CopyGraph
from counterpoint.ops.copy_lane import copy_bytes
from counterpoint.ops.signals import Signals
from counterpoint.value import Value

ENTERED, ARRIVED, RETURNED = range(3)
NUM_FLAGS = 3  # of each collective
NON_BLOCKING = int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
RELAXED = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """A collective of this rank, how it is cut, and the rows that it sums, if any: one for each rank, of its data's
    type.
    """

    issued: IssuedCollective
    blocks: Blocks
    rows: torch.Tensor | None = None


class Destinations(Value, frozen=True, kw_only=True):
    """Where one rank's blocks and sums go on each peer: addresses of that memory in this process."""

    blocks: Mapping[int, int]
    sums: Mapping[int, int]


class Recorder:
    """Records one collective's copies, flags and sum as a graph, for one rank."""

    def __init__(self, rank: int, peers: tuple[int, ...], signals: Signals, first_flag: int) -> None:
        self._rank, self._peers, self._signals, self._first_flag = rank, peers, signals, first_flag

    def record(self, parts: Parts, destinations: Destinations) -> CopyGraph:
        """Record it. Raises `DeviceError`."""
        issued, blocks, rows = parts.issued, parts.blocks, parts.rows
        start, end = blocks.given[self._rank]
        own_sums = issued.got.address + (start if destinations.sums else 0)
        if rows is not None:
            arrived = Arrived(rows, (tensor_at(issued.given.address + start, rows[0]),), self._rank)
            sums, divisor = tensor_at(own_sums, rows[0]), len(rows) if issued.reduction == "mean" else 1
            warm_up(arrived, sums)

        def issue(stream: Handle, side: Handle) -> None:
            self._raise(ENTERED, stream)
            with _beside(stream, side):
                if rows is None:
                    self._own_copy(parts, side)
                self._take(ENTERED, stream)
                for peer in self._peers:
                    first, last = blocks.given[peer]
                    copy_bytes(destinations.blocks[peer], issued.given.address + first, last - first, stream)
                self._raise(ARRIVED, stream)
                self._take(ARRIVED, stream)
            if rows is not None:
                with torch.cuda.stream(torch.cuda.ExternalStream(int(stream), rows.device)):
                    sum_arrived(arrived, sums, divisor)
            for target in destinations.sums.values():
                copy_bytes(target, own_sums, end - start, stream)
            if destinations.sums:
                self._raise(RETURNED, stream)
                self._take(RETURNED, stream)

        targets = frozenset((*destinations.blocks.values(), *destinations.sums.values()))
        return CopyGraph(graph=recorded(issue), targets=targets)

    def _own_copy(self, parts: Parts, stream: Handle) -> None:
        start, end = parts.blocks.given[self._rank]
        target, source = parts.issued.got.address + parts.blocks.got[self._rank][0], parts.issued.given.address + start
        if target != source:
            copy_bytes(target, source, end - start, stream)

    def _raise(self, flag: int, stream: Handle) -> None:
        self._signals.raise_to(self._first_flag + flag, self._peers, stream)

    def _take(self, flag: int, stream: Handle) -> None:
        self._signals.take(self._first_flag + flag, self._peers, stream)


def tensor_at(address: int, like: torch.Tensor) -> torch.Tensor:
    """Return the memory at an address as a tensor of that shape, type and device; its owner keeps it alive."""
    storage = torch._C._construct_storage_from_data_pointer(address, like.device, like.nbytes)
    return torch.empty(0, dtype=like.dtype, device=like.device).set_(storage, 0, like.shape)


@contextmanager
def _beside(stream: Handle, side: Handle) -> Iterator[None]:
    """Order `side` after the work on `stream` so far, and afterwards `stream` after `side`."""
    _follow(side, stream)
    yield
    _follow(stream, side)


def _follow(later: Handle, earlier: Handle) -> None:
    event = check("Making an event", cu.cuEventCreate(int(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)))
    check("Recording an event", cu.cuEventRecord(event, earlier))
    check("Ordering streams", cu.cuStreamWaitEvent(later, event, 0))
    check("Freeing an event", cu.cuEventDestroy(event))


def recorded(issue: Callable[[Handle, Handle], None]) -> Handle:
    """Record what `issue` puts on two streams, the second forked from the first, as a graph. Nothing runs."""
    _, greatest = check("Asking for the range of priorities", cu.cuCtxGetStreamPriorityRange())
    with ExitStack() as opened:
        streams = []
        for _ in range(2):
            streams.append(check("Making a stream", cu.cuStreamCreateWithPriority(NON_BLOCKING, greatest)))
            opened.callback(cu.cuStreamDestroy, streams[-1])
        check("Beginning to record a collective", cu.cuStreamBeginCapture(streams[0], RELAXED))
        try:
            issue(*streams)
        except BaseException:
            cu.cuStreamEndCapture(streams[0])
            raise
        return check("Recording a collective", cu.cuStreamEndCapture(streams[0]))
