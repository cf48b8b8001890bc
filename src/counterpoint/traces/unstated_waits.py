"""Infers which operations wait for which where a profiler shows that streams wait, but not which ones: torch.profiler, as
most jobs use it, records no synchronization events.

The host's calls say when it made a stream wait, and what it launched before and after. Its waits between two launches are a
row, and the streams to which it launches from there until the next row are the row's targets. The first target waits for
the last operation on every other stream since the row before, for as many streams as there are waits: one, or several that
are joined. If nothing was launched on another stream since, the wait is for an earlier operation. Which one does not show,
so it is taken to be the one that ended last before the target began. But a wait directly after its record is for
what was launched just now, so the stream that waits is then one of the other targets. These wait, as far as there are waits
left, for the operation that was launched last on another stream on which something is computed: a fork.

NCCL's own waits, between its own record and a collective's launch, are left out: they are within one communicator.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from counterpoint.step import DependencyOrigin
from counterpoint.traces.host_order import FARTHEST_LOOK, HostOrder

Pair = tuple[int, int, DependencyOrigin]  # an operation that waits, and one of another stream for which it waits
RECORDS = ("plain record", "record")
MOST_UNLAUNCHED = 0.02  # as a share of the operations; chosen: the calls around a missing launch say something else


def can_pair(host: HostOrder) -> bool:
    """Return whether the host's order says who waits: it has waits, and nearly all launches."""
    launched = {host.calls[position].operation for position in host.launches}
    are_known = len(host.operations) - len(launched) <= MOST_UNLAUNCHED * len(host.operations)
    return are_known and any(call.kind == "wait" for call in host.calls)


def find_pairs(host: HostOrder) -> Iterator[Pair]:
    """Yield pairs, which GPU times have not judged yet."""
    computing = {stream for stream, is_sent in zip(host.streams, host.is_communication, strict=True) if not is_sent}
    before: dict[int, int] = {}  # by stream, the last operation since the row before, the stream used last at the end
    row: list[int] = []
    for position, call in enumerate(host.calls):
        if _is_wait(host, position):
            row.append(position)
        elif call.operation >= 0:
            if row:
                yield from _pairs_of_row(host, row, before, _targets(host, position), computing)
                before, row = {}, []
            before.pop(host.streams[call.operation], None)
            before[host.streams[call.operation]] = call.operation


def _targets(host: HostOrder, start: int) -> list[int]:
    """Return the first operation on each stream from this call on until the next row."""
    found: dict[int, int] = {}
    for position in range(start, len(host.calls)):
        if _is_wait(host, position):
            break
        operation = host.calls[position].operation
        if operation >= 0:
            found.setdefault(host.streams[operation], operation)
    return list(found.values())


def _pairs_of_row(
    host: HostOrder, row: Sequence[int], before: dict[int, int], targets: Sequence[int], computing: set[int]
) -> Iterator[Pair]:
    first, *others = targets
    sources = [each for stream, each in reversed(before.items()) if stream != host.streams[first]][: len(row)]
    if not sources and not (others and _kind_at(host, row[0], -1) in RECORDS):
        sources = _latest_ended(host, row[0], first)
    for source in sources:
        yield first, source, "inferred"
    for target in others[: len(row) - bool(sources)]:
        launched = _last_launched(host, row[0], computing - {host.streams[target]})
        if launched is not None:
            yield target, launched, "inferred"


def _latest_ended(host: HostOrder, position: int, consumer: int) -> list[int]:
    """Return the operation of another stream, launched before this call, that ended last before the consumer began."""
    start_us, own = host.operations[consumer].start_us, host.streams[consumer]
    found = [host.last_on_stream(position, stream) for stream in host.launches_of_stream if stream != own]
    ended = [each for each in found if each is not None and host.operations[each].end_us <= start_us]
    return [max(ended, key=lambda each: host.operations[each].end_us)] if ended else []


def _last_launched(host: HostOrder, position: int, streams: set[int]) -> int | None:
    """Return the operation that was launched last before this call onto one of these streams."""
    place = bisect_left(host.launches, position)
    launched = (host.calls[each].operation for each in reversed(host.launches[max(0, place - FARTHEST_LOOK) : place]))
    return next((operation for operation in launched if host.streams[operation] in streams), None)


def _is_wait(host: HostOrder, position: int) -> bool:
    """Return whether a call is a wait, other than NCCL's between a record of its own and a collective's launch.

    NCCL records plainly, and PyTorch with flags. Where all records are plain, PyTorch's record and wait come before NCCL's,
    and its record of the collective's end comes after them.
    """
    if host.calls[position].kind != "wait":
        return False
    kinds = [_kind_at(host, position, distance) for distance in (-3, -2, -1, 1)]
    before_both, launched_before, record, after = kinds
    if record not in RECORDS:
        return True
    if host.flags_tell_records_apart:
        return record == "record" or "collective" not in (launched_before, after)
    is_leading = after == "collective" and launched_before == "wait" and before_both in RECORDS
    is_trailing = launched_before == "collective" and after == "plain record"
    return not (is_leading or is_trailing)


def _kind_at(host: HostOrder, position: int, distance: int) -> str:
    """Return what the thread did so many calls later, or earlier."""
    there = host.neighbor(position, distance)
    if there is None:
        return ""
    call = host.calls[there]
    if call.operation >= 0:
        return "collective" if host.is_communication[call.operation] else "launch"
    return "plain record" if call.name.endswith("EventRecord") else call.kind
