"""Indexes the host's launches, event records and waits, and finds the record that each wait is for.

Older profilers state only the number of the event a stream waits for. The record is found in this order:

1. If one stream waits for an event number again and again, the event is re-recorded each time: the record is the thread's
   last one before the wait, after the stream's wait before, that no later wait for another number takes.
2. Other numbers are given out in ascending order as events are first recorded (PyTorch creates events lazily), so the
   record of a lower number comes before that of a higher one; each wait gets the latest record that this allows.
3. If the numbers do not ascend (because they come from a cache), k waits in a row get the latest k records, first in, first
   out.

Two kinds of records are ignored. NCCL makes its own by the plain record call, whereas PyTorch uses the one with flags.
PyTorch's pinned-memory allocator makes others directly after a copy between host and device, and no stream waits for them.
The module does not know what an operation does, except whether it communicates.
"""

from bisect import bisect_left
from collections import Counter

from counterpoint.traces.activity import ActivityTrace, GpuOperation, HostCall
from counterpoint.traces.classify import is_communication
from counterpoint.value import Value

MOST_UNPLACED = 0.1
"""Event numbers count as ascending if at most this share finds no record, because it was made before the trace began."""
FARTHEST_LOOK = 2000
"""A producer is looked for this many calls back; a step of the shipped traces has 400 launches."""


class HostOrder(Value, frozen=True, kw_only=True):
    """Calls in time order, with positions by thread and by stream; every list of positions ascends.

    `places` are each call's place among those of its thread, `streams` the stream of each operation.
    """

    operations: tuple[GpuOperation, ...]
    calls: tuple[HostCall, ...]
    is_communication: tuple[bool, ...]
    streams: tuple[int, ...]
    by_thread: dict[str, list[int]]
    places: list[int]
    launches: list[int]
    launches_of_stream: dict[int, list[int]]
    by_correlation: dict[int, int]
    flags_tell_records_apart: bool

    def neighbor(self, position: int, distance: int) -> int | None:
        """Return the call `distance` places after this one (before it, if negative) on the same thread."""
        line = self.by_thread[self.calls[position].thread]
        place = self.places[position] + distance
        return line[place] if 0 <= place < len(line) else None

    def last_launch_before(self, position: int, other_than: int) -> int | None:
        """Return the last operation launched before this call and not on stream `other_than`, preferably by its thread."""
        for line in (self.by_thread[self.calls[position].thread], self.launches):
            place = bisect_left(line, position)
            for candidate in range(place - 1, max(0, place - FARTHEST_LOOK) - 1, -1):
                operation = self.calls[line[candidate]].operation
                if operation >= 0 and self.streams[operation] != other_than:
                    return operation
        return None

    def last_on_stream(self, position: int, stream: int) -> int | None:
        """Return the operation that the host launched last onto `stream` before this call."""
        line = self.launches_of_stream.get(stream, [])
        place = bisect_left(line, position) - 1
        return self.calls[line[place]].operation if place >= 0 else None

    def next_on_stream(self, position: int, stream: int) -> int | None:
        """Return the operation that the host launched next onto `stream` after this call."""
        line = self.launches_of_stream.get(stream, [])
        place = bisect_left(line, position)
        return self.calls[line[place]].operation if place < len(line) else None

    def previous_of_communicator(self, operation: int) -> int | None:
        """Return the collective before this one on the same communicator (process group), on any stream."""
        group = self.operations[operation].arguments.group_name
        for candidate in range(operation - 1, max(-1, operation - FARTHEST_LOOK), -1):
            if self.is_communication[candidate] and self.operations[candidate].arguments.group_name == group:
                return candidate
        return None

    def is_communicators_own(self, position: int) -> bool:
        """Return whether a wait is NCCL's own: a plain record, the wait and a collective's launch onto its stream.

        The three follow each other directly. NCCL uses them to order the collectives of one communicator (NCCL
        src/enqueue.cc and src/misc/strongstream.cc).
        """
        before, after, sync = self.neighbor(position, -1), self.neighbor(position, 1), self.calls[position].sync
        if before is None or after is None or sync is None or not self.flags_tell_records_apart:
            return False
        launched = self.calls[after].operation
        return (
            self.calls[before].name.endswith("EventRecord")
            and launched >= 0
            and self.is_communication[launched]
            and self.streams[launched] == sync.stream
        )


def index_host(trace: ActivityTrace) -> HostOrder:
    """Index a trace's host calls."""
    operations, calls = trace.operations, trace.host_calls
    streams = tuple([operation.arguments.stream for operation in operations])
    by_thread: dict[str, list[int]] = {}
    places: list[int] = []
    launches: list[int] = []
    of_stream: dict[int, list[int]] = {stream: [] for stream in set(streams)}
    for position, call in enumerate(calls):
        line = by_thread.setdefault(call.thread, [])
        places.append(len(line))
        line.append(position)
        if call.kind == "launch":
            launches.append(position)
            of_stream[streams[call.operation]].append(position)
    return HostOrder(
        operations=operations,
        calls=calls,
        is_communication=tuple([is_communication(item.category, item.name) for item in operations]),
        streams=streams,
        by_thread=by_thread,
        places=places,
        launches=launches,
        launches_of_stream=of_stream,
        by_correlation={call.correlation: position for position, call in enumerate(calls)},
        flags_tell_records_apart=any(name.endswith("RecordWithFlags") for name in {call.name for call in calls}),
    )


def records_of_waits(host: HostOrder, waits: list[int]) -> dict[int, int]:
    """Return the record that each wait is for, as positions among the host's calls; waits without a record are left out."""
    records = [position for position, call in enumerate(host.calls) if call.kind == "record" and _takes_part(host, position)]
    records_of_thread: dict[str, list[int]] = {}
    for position in records:
        records_of_thread.setdefault(host.calls[position].thread, []).append(position)
    times_waited = Counter(_waited(host, position) for position in waits)
    fresh = [position for position in waits if times_waited[_waited(host, position)] == 1]
    repeated = [position for position in waits if times_waited[_waited(host, position)] > 1]
    found = _match_recorded_again(host, repeated, records_of_thread)
    free = sorted(set(records) - set(found.values()))
    ascending = _match_ascending(host, fresh, free)
    return found | (_match_latest(host, fresh, free) if ascending is None else ascending)


def _match_recorded_again(host: HostOrder, waits: list[int], records_of_thread: dict[str, list[int]]) -> dict[int, int]:
    """Return the record of each wait for a number that its stream waits for more than once."""
    before: list[int] = []  # for each wait, its stream's wait for the same number before it
    latest: dict[tuple[int, int], int] = {}
    for position in waits:
        before.append(latest.get(_waited(host, position), -1))
        latest[_waited(host, position)] = position
    found: dict[int, int] = {}
    taken: dict[int, int] = {}  # by record, the number that it records
    for position, former in zip(reversed(waits), reversed(before), strict=True):
        line, event = records_of_thread.get(host.calls[position].thread, []), _waited(host, position)[1]
        place = bisect_left(line, position)
        if place:
            since = reversed(line[bisect_left(line, former) : place])
            found[position] = next((record for record in since if taken.get(record, event) == event), line[place - 1])
            taken.setdefault(found[position], event)
    return found


def _waited(host: HostOrder, position: int) -> tuple[int, int]:
    sync = host.calls[position].sync
    return (-1, -1) if sync is None else (sync.stream, sync.event)


def _takes_part(host: HostOrder, position: int) -> bool:
    """Return whether a stream may wait for this record."""
    if host.flags_tell_records_apart and host.calls[position].name.endswith("EventRecord"):
        return False
    before = host.neighbor(position, -1)
    operation = -1 if before is None else host.calls[before].operation
    if operation < 0 or host.operations[operation].category != "memcpy":
        return True
    return not any(direction in host.operations[operation].name for direction in ("HtoD", "DtoH"))


def _match_ascending(host: HostOrder, waits: list[int], records: list[int]) -> dict[int, int] | None:
    """Return the latest record for each wait such that records ascend with event numbers, or None if that is impossible."""
    waits_of_event: dict[int, list[int]] = {}
    for position in waits:
        waits_of_event.setdefault(_waited(host, position)[1], []).append(position)
    found: dict[int, int] = {}
    limit, num_unplaced = len(records), 0
    for event in sorted(waits_of_event, reverse=True):
        positions = waits_of_event[event]
        place = min(bisect_left(records, positions[0]), limit) - 1
        if place < 0:
            num_unplaced += 1
            continue
        limit = place
        found.update(dict.fromkeys(positions, records[place]))
    return found if num_unplaced <= MOST_UNPLACED * len(waits_of_event) else None


def _match_latest(host: HostOrder, waits: list[int], records: list[int]) -> dict[int, int]:
    """Return the latest records before each row of waits, in order."""
    found: dict[int, int] = {}
    rows: list[list[int]] = []
    for position in waits:
        if rows and host.neighbor(position, -1) == rows[-1][-1]:
            rows[-1].append(position)
        else:
            rows.append([position])
    for row in rows:
        end = bisect_left(records, row[0])
        for position, record in zip(reversed(row), reversed(records[max(0, end - len(row)) : end]), strict=False):
            found[position] = record
    return found
