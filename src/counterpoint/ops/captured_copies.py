"""Collectives of a captured step by copy engines: for each, a small graph that takes its node's place.

A captured step keeps its addresses, so blocks go from where one rank has them straight to where the other wants them; what
is reduced goes to rows of the receiving rank and is summed there, on SMs. Ranks open each other's memory once, before
anything is replayed.

Flags, for each collective and peer: ENTERED, my memory may be written; ARRIVED, your blocks are there; RETURNED, so are
your sums. All rest at 0. No flag is raised before it was lowered, at whatever distance ranks replay: a rank raises ENTERED
when the replay before has ended on it, which took the peer's ARRIVED, which the peer raised after it had lowered ENTERED.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any, final

import msgspec
import torch
from cuda.bindings import driver as cu

from counterpoint.cuda.capture import Captured
from counterpoint.cuda.driver import check
from counterpoint.cuda.issued_collectives import IssuedCollective
from counterpoint.errors import CounterpointError, DeviceError
from counterpoint.ops.copy_lane import copy_bytes
from counterpoint.ops.peer_memory import PeerMemory, Whereabouts, whereabouts_of
from counterpoint.ops.runtime import runtime_of
from counterpoint.ops.signals import Flags, Signals
from counterpoint.value import Value

Handle = Any  # cuda-bindings has no types
ENTERED, ARRIVED, RETURNED = range(3)
NUM_FLAGS = 3  # of each collective
NON_BLOCKING = int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
RELAXED = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


class Landing(Value, frozen=True, kw_only=True):
    """Where the blocks of the other ranks go on one rank, by sender in bytes from `place`, and its tensor for sums.

    `obstacle` says why there is none.
    """

    obstacle: str = ""
    place: Whereabouts | None = None
    offsets: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    sums: Whereabouts | None = None


class StandIn(msgspec.Struct, frozen=True, kw_only=True):
    """What takes a collective's place: its graph, and how many bytes its copies bring to other GPUs."""

    graph: Handle
    num_copies: int
    num_bytes: int


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """One collective cut into blocks: where this rank's block for each rank begins and ends, in bytes, and where that of
    each rank goes, from the beginning of `rows` where blocks are to be summed, else of what this rank gets."""

    issued: IssuedCollective
    given: tuple[tuple[int, int], ...]
    got: tuple[tuple[int, int], ...]
    rows: torch.Tensor | None = None


def cut(issued: IssuedCollective, rank: int, device: torch.device) -> Parts:
    """Cut a collective into blocks, for one of its ranks; allocates the rows."""
    num_ranks, dtype = int(issued.group.size()), issued.given.dtype
    size = dtype.itemsize
    even_given = _even(issued.given.num_elements, num_ranks, size)
    if issued.reduction:
        start, end = even_given[rank]
        own = end - start
        rows = torch.empty(num_ranks, own // size, dtype=dtype, device=device)
        got = tuple((own * peer, own * (peer + 1)) for peer in range(num_ranks))
        return Parts(issued=issued, given=even_given, got=got, rows=rows)
    got = _spans(issued.lengths_got, size) or _even(issued.got.num_elements, num_ranks, size)
    if issued.collective == "all_gather":
        return Parts(issued=issued, given=((0, issued.given.num_bytes),) * num_ranks, got=got)
    return Parts(issued=issued, given=_spans(issued.lengths_given, size) or even_given, got=got)


def _even(num_elements: int, num_ranks: int, size: int) -> tuple[tuple[int, int], ...]:
    """Equal parts, the last ones shorter where they do not come out even."""
    length = -(-num_elements // num_ranks)
    return tuple(
        (size * min(length * rank, num_elements), size * min(length * (rank + 1), num_elements)) for rank in range(num_ranks)
    )


def _spans(lengths: Sequence[int], size: int) -> tuple[tuple[int, int], ...]:
    ends = list(accumulate(lengths))
    return tuple((size * (end - length), size * end) for length, end in zip(lengths, ends, strict=True))


def obstacle_of(issued: IssuedCollective, num_ranks: int) -> str:
    """Why a collective cannot be done by copies on this rank, or nothing."""
    if len(issued.nodes) != 1:
        return f"it became {len(issued.nodes)} nodes of the graph, and only one can be replaced"
    if issued.reduction == "other":
        return "it reduces, and neither by a sum nor by a mean"
    if not (issued.given.is_contiguous and issued.got.is_contiguous):
        return "its tensors are not contiguous"
    if issued.given.dtype != issued.got.dtype:
        return f"it turns {issued.given.dtype} into {issued.got.dtype}"
    return "it has one rank and moves nothing" if num_ranks == 1 else ""


@final
class DirectCopies:
    """The stand-ins of one group's collectives; all ranks make it together, for the same collectives in the same order.

    `stand_ins` holds for each collective what takes its place, or why nothing can.
    """

    def __init__(self, collectives: Sequence[IssuedCollective], device: torch.device) -> None:
        group = collectives[0].group
        self._device, self._runtime = device, runtime_of(group.group_name, device)
        self._rank, self._num_ranks = int(group.rank()), int(group.size())
        self._peers = tuple((self._rank + turn) % self._num_ranks for turn in range(1, self._num_ranks))
        self._memory = PeerMemory()
        self._kept: list[Parts] = []
        self._flags: Flags | None = None
        self.stand_ins: list[StandIn | str] = self._make(collectives)

    def _make(self, collectives: Sequence[IssuedCollective]) -> list[StandIn | str]:
        if self._runtime.obstacle:
            return [self._runtime.obstacle] * len(collectives)
        own = [self._landing(issued) for issued in collectives]
        everyone = [msgspec.json.decode(text, type=list[Landing]) for text in self._exchange(own)]
        flags = Flags(self._runtime.group, self._device, self._runtime.agreement, (0,) * (NUM_FLAGS * len(collectives)))
        self._flags = flags
        made = [self._stand_in(number, Signals(flags), [each[number] for each in everyone]) for number in range(len(own))]
        problems = [msgspec.json.decode(text, type=list[str]) for text in self._exchange([_problem(each) for each in made])]
        return [
            next((problem for problem in found if problem), each)
            for each, found in zip(made, zip(*problems, strict=True), strict=True)
        ]

    def _exchange(self, content: object) -> list[bytes]:
        return self._runtime.agreement.exchange(msgspec.json.encode(content))

    def _landing(self, issued: IssuedCollective) -> Landing:
        """What the others need to know to bring this rank its blocks; what was cut is kept for the stand-in."""
        obstacle = obstacle_of(issued, self._num_ranks)
        parts = cut(issued, self._rank, self._device)
        self._kept.append(parts)
        if obstacle:
            return Landing(obstacle=obstacle)
        is_summed = parts.rows is not None
        try:
            place = whereabouts_of(issued.got.address if parts.rows is None else parts.rows.data_ptr())
            sums = whereabouts_of(issued.got.address) if is_summed and issued.collective == "all_reduce" else None
        except DeviceError as problem:
            return Landing(obstacle=str(problem).rstrip("."))
        return Landing(
            place=place,
            offsets=tuple(start for start, _ in parts.got),
            lengths=tuple(end - start for start, end in parts.got),
            sums=sums,
        )

    def _stand_in(self, number: int, signals: Signals, landings: Sequence[Landing]) -> StandIn | str:
        obstacle = next((f"on rank {rank}: {each.obstacle}" for rank, each in enumerate(landings) if each.obstacle), "")
        if obstacle:
            return obstacle
        try:
            return _Recorder(self._rank, self._peers, signals, NUM_FLAGS * number).record(
                self._kept[number], landings, self._memory, self._device
            )
        except DeviceError as problem:
            return str(problem).rstrip(".")

    def close(self) -> None:
        """Give back all memory; no graph that holds a stand-in may run any more."""
        torch.cuda.synchronize(self._device)
        for each in self.stand_ins:
            if isinstance(each, StandIn):
                check("Freeing a recorded collective", cu.cuGraphDestroy(each.graph))
        self._memory.close()
        if self._flags is not None:
            self._flags.watch.close()


def _problem(made: StandIn | str) -> str:
    return made if isinstance(made, str) else ""


class _Recorder:
    """Records one collective's copies, flags and sum as a graph."""

    def __init__(self, rank: int, peers: tuple[int, ...], signals: Signals, first_flag: int) -> None:
        self._rank, self._peers, self._signals, self._first_flag = rank, peers, signals, first_flag
        self._num_copies = self._num_bytes = 0

    def record(self, parts: Parts, landings: Sequence[Landing], memory: PeerMemory, device: torch.device) -> StandIn:
        """Record it. Raises `DeviceError` where a peer's memory cannot be opened."""
        issued, (start, end) = parts.issued, parts.given[self._rank]
        targets: dict[int, int] = {}
        sums: dict[int, int] = {}
        for peer in self._peers:
            landing = landings[peer]
            assert landing.place is not None, "obstacles are asked for first"
            targets[peer] = memory.address_of(landing.place) + landing.offsets[self._rank]
            if landing.sums is not None:
                sums[peer] = memory.address_of(landing.sums) + start
        own_sums = issued.got.address + (start if sums else 0)

        def issue(stream: Handle, side: Handle) -> None:
            self._raise(ENTERED, stream)
            with _beside(stream, side):
                self._own_copy(parts, side)
                self._take(ENTERED, stream)
                for peer in self._peers:
                    first, last = parts.given[peer]
                    self._copy(targets[peer], issued.given.address + first, last - first, stream)
                self._raise(ARRIVED, stream)
                self._take(ARRIVED, stream)
            if parts.rows is not None:
                with torch.cuda.stream(torch.cuda.ExternalStream(int(stream), device)):
                    reduce_rows(parts.rows, tensor_at(own_sums, parts.rows[0]), issued.reduction)
            for target in sums.values():
                self._copy(target, own_sums, end - start, stream)
            if sums:
                self._raise(RETURNED, stream)
                self._take(RETURNED, stream)

        return StandIn(graph=recorded(issue), num_copies=self._num_copies, num_bytes=self._num_bytes)

    def _own_copy(self, parts: Parts, stream: Handle) -> None:
        start, end = parts.given[self._rank]
        target = parts.issued.got.address if parts.rows is None else parts.rows.data_ptr()
        target += parts.got[self._rank][0]
        source = parts.issued.given.address + start
        if target != source:
            copy_bytes(target, source, end - start, stream)

    def _copy(self, target: int, source: int, num_bytes: int, stream: Handle) -> None:
        copy_bytes(target, source, num_bytes, stream)
        self._num_copies += num_bytes > 0
        self._num_bytes += num_bytes

    def _raise(self, flag: int, stream: Handle) -> None:
        self._signals.raise_to(self._first_flag + flag, self._peers, stream)

    def _take(self, flag: int, stream: Handle) -> None:
        self._signals.take(self._first_flag + flag, self._peers, stream)


def tensor_at(address: int, like: torch.Tensor) -> torch.Tensor:
    """The memory at an address as a tensor of that shape, type and device; whose memory it is keeps it."""
    storage = torch._C._construct_storage_from_data_pointer(address, like.device, like.nbytes)
    return torch.empty(0, dtype=like.dtype, device=like.device).set_(storage, 0, like.shape)


def reduce_rows(rows: torch.Tensor, out: torch.Tensor, reduction: str) -> None:
    """Sum or mean of the rows, added up in float32 where they are shorter, and rounded once."""
    if reduction == "mean":
        torch.mean(rows, 0, out=out)
    else:
        torch.sum(rows, 0, dtype=out.dtype, out=out)


@contextmanager
def _beside(stream: Handle, side: Handle) -> Iterator[None]:
    """`side` follows what is on `stream` so far; afterwards `stream` follows `side`."""
    _follow(side, stream)
    yield
    _follow(stream, side)


def _follow(later: Handle, earlier: Handle) -> None:
    event = check("Making an event", cu.cuEventCreate(int(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)))
    check("Recording an event", cu.cuEventRecord(event, earlier))
    check("Ordering streams", cu.cuStreamWaitEvent(later, event, 0))
    check("Freeing an event", cu.cuEventDestroy(event))


def recorded(issue: Callable[[Handle, Handle], None]) -> Handle:
    """What `issue` puts on two streams, the second forked from the first, as a graph. Nothing runs."""
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


def offer_copies(captured: Captured) -> None:
    """Prepare copies in place of the step's collectives, so that plans may move them; the graph says why where it cannot be.

    All ranks call it together, before they tune or apply. Raises `PlanError` where they captured different steps.
    """
    captured.agree("")
    by_group: dict[str, list[int]] = {}
    for number, issued in enumerate(captured.collectives):
        by_group.setdefault(issued.group.group_name, []).append(number)
    stand_ins: dict[int, Handle | str] = {}
    device = torch.device("cuda", torch.cuda.current_device())
    for numbers in by_group.values():
        found: list[StandIn | str]
        try:
            copies = DirectCopies([captured.collectives[number] for number in numbers], device)
            captured.keep(copies)
            found = copies.stand_ins
        except CounterpointError as problem:  # which every rank of the group sees
            found = [str(problem).rstrip(".")] * len(numbers)
        for number, made in zip(numbers, found, strict=True):
            nodes = [captured.graph.number_of(handle) for handle in captured.collectives[number].nodes]
            stand_ins |= {node: made if isinstance(made, str) else made.graph for node in nodes if node is not None}
    captured.graph.offer_copies(stand_ins)
