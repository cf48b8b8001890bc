"""What host ranges say of collectives whose kernels say nothing: torch's `nccl:` ranges, and NVTX ranges of NCCL itself.

torch 2.1 and older write a collective's name, sizes and type to the range in which they call it, and nothing with the
kernel. NCCL's own ranges, which Nsight Systems records, hold the bytes, the communicator, and with its initialization the
ranks. A kernel belongs to the innermost range in which the host launched it. Without one, NCCL launched it where a group of
calls ended: it belongs to the calls since the kernel before, if all are of one kind.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import msgspec

from counterpoint.step import MAX_RANKS
from counterpoint.traces.activity import GpuOperation, HostCall
from counterpoint.traces.classify import is_communication, known_collective
from counterpoint.traces.event_stream import Event
from counterpoint.traces.host_operators import innermost_ranges
from counterpoint.value import Value

TORCH = "nccl:"
NVTX_NAMES = {  # of functions of NCCL, as torch calls what they do
    "ncclAllReduce": "allreduce",
    "ncclAllGather": "allgather",
    "ncclReduceScatter": "reduce_scatter",
    "ncclBroadcast": "broadcast",
    "ncclBcast": "broadcast",
    "ncclReduce": "reduce",
    "ncclAlltoAll": "all_to_all",
}
BYTE = "Byte"


class Communicator(Value, frozen=True, kw_only=True):
    """A communicator of NCCL: how many ranks it has, and which of them this process is."""

    num_ranks: int
    rank: int


class CollectiveRange(NamedTuple):
    """A host range that calls a collective. `num_elements` are those of the call: what a rank gives, or in a
    reduce-scatter by NCCL's range what it receives; `is_part`: they are one rank's part of a larger tensor.
    """

    event: Event
    called: str
    num_elements: int
    dtype: str
    is_part: bool
    communicator: str | None = None


class _TorchArguments(msgspec.Struct):
    dims: list[object] = msgspec.field(default_factory=list, name="Input Dims")
    types: list[str] = msgspec.field(default_factory=list, name="Input type")


class _NcclArguments(msgspec.Struct):
    communicator: int | None = msgspec.field(default=None, name="NCCL communicator ID")
    num_bytes: int = msgspec.field(default=0, name="Message size [bytes]")
    num_ranks: int | None = msgspec.field(default=None, name="No. of ranks")
    rank: int | None = msgspec.field(default=None, name="Rank")


def by_torch(event: Event) -> CollectiveRange | None:
    """Return what a range that torch recorded around a collective says, or None if it has no known name and sizes."""
    called = event.name.removeprefix(TORCH)
    kind = known_collective(called) if event.name.startswith(TORCH) else None
    if kind is None:
        return None
    try:
        found = msgspec.json.decode(event.args, type=_TorchArguments)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    num_elements = _num_elements(found.dims[0]) if found.dims else None
    if num_elements is None or not found.types:
        return None
    return CollectiveRange(
        event=event, called=called, num_elements=num_elements, dtype=found.types[0], is_part=kind == "all_gather"
    )


def by_nccl(event: Event, payload: str | None) -> tuple[CollectiveRange | None, dict[str, Communicator]]:
    """Return what an NVTX range of NCCL with this payload (JSON) says of a collective, and of a new communicator."""
    try:
        found = msgspec.json.decode(payload or "{}", type=_NcclArguments)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None, {}
    name = None if found.communicator is None else str(found.communicator)
    called = NVTX_NAMES.get(event.name)
    if called is not None and 0 < found.num_bytes < 2**60:
        is_part = called in ("allgather", "reduce_scatter", "all_to_all")
        return CollectiveRange(
            event=event, called=called, num_elements=found.num_bytes, dtype=BYTE, is_part=is_part, communicator=name
        ), {}
    if name is None or found.num_ranks is None or found.rank is None:
        return None, {}
    is_possible = 0 <= found.rank < found.num_ranks <= MAX_RANKS
    return None, {name: Communicator(num_ranks=found.num_ranks, rank=found.rank)} if is_possible else {}


def describe_collectives(
    operations: Sequence[GpuOperation],
    calls: Mapping[int, HostCall],
    ranges: Sequence[CollectiveRange],
    sizes: Mapping[str, Communicator],
    world_size: int | None,
) -> None:
    """Add to collectives' kernels that say nothing what the ranges say, in place.

    `sizes` are the communicators that are known; else a collective counts as one of all `world_size` ranks.
    """
    if not ranges:
        return
    launches = [
        (operation, calls[operation.arguments.correlation])
        for operation in operations
        if operation.arguments.collective_name is None
        and operation.arguments.correlation in calls
        and is_communication(operation.category, operation.name)
    ]
    around = innermost_ranges([each.event for each in ranges], [(call.time_us, call.thread) for _, call in launches])
    before = _Ended(ranges)
    for operation, call in sorted(launches, key=lambda entry: entry[1].time_us):
        place = around.get((call.time_us, call.thread))
        own = before.until(call) if place is None else [ranges[place]]
        before.skip(call)
        if own and len({(each.called, each.communicator) for each in own}) == 1:
            _describe(operation, own, sizes, world_size)


class _Ended:
    """The ranges of each thread by their end, and how many of them earlier kernels have."""

    def __init__(self, ranges: Iterable[CollectiveRange]) -> None:
        self._lines: dict[str, list[CollectiveRange]] = {}
        for each in ranges:
            self._lines.setdefault(str(each.event.tid), []).append(each)
        for line in self._lines.values():
            line.sort(key=_end)
        self._taken = dict.fromkeys(self._lines, 0)

    def until(self, call: HostCall) -> list[CollectiveRange]:
        """Return the ranges of the call's thread that ended before it and that no kernel has yet."""
        line = self._lines.get(call.thread, [])
        return line[self._taken.get(call.thread, 0) : bisect_left(line, call.time_us, key=_end)]

    def skip(self, call: HostCall) -> None:
        """Count all ranges that begin before the call as those of kernels."""
        if call.thread in self._lines:
            self._taken[call.thread] = bisect_left(self._lines[call.thread], call.time_us, key=lambda each: each.event.ts)


def _end(each: CollectiveRange) -> float:
    return each.event.ts + each.event.dur


def _describe(
    operation: GpuOperation, own: Sequence[CollectiveRange], sizes: Mapping[str, Communicator], world_size: int | None
) -> None:
    first, arguments = own[0], operation.arguments
    known = sizes.get(first.communicator or "")
    num_ranks = known.num_ranks if known is not None else world_size
    num_parts = num_ranks if first.is_part and num_ranks else 1
    num_elements = num_parts * sum(each.num_elements for each in own)
    for field, value in (
        ("collective_name", first.called),
        ("in_elements", num_elements),
        ("dtype", first.dtype),
        ("group_name", first.communicator),
        ("group_size", None if known is None else num_ranks),
    ):
        msgspec.structs.force_setattr(arguments, field, value)


def _num_elements(dims: object) -> int | None:
    """Return the elements of a tensor of these sizes, or of a list of tensors; None for what are no sizes."""
    if not isinstance(dims, list):
        return None
    if all(isinstance(size, int) and 0 <= size < 2**40 for size in dims):
        return prod(dims) if dims else None
    parts = [_num_elements(each) for each in dims]
    return None if None in parts else sum(part for part in parts if part is not None)
