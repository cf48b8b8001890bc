"""Prepares a trace for analysis: times in whole nanoseconds, operations by stream and by time, and their dependencies.

Times count from the first GPU operation. This module does not know what an operation does.
"""

from bisect import bisect_right
from collections.abc import Sequence

from counterpoint.traces.activity import ActivityTrace, HostOperator
from counterpoint.traces.dependencies import Dependencies, find_dependencies
from counterpoint.units import NS_PER_US, format_us
from counterpoint.value import Value


class TimedTrace(Value, frozen=True, kw_only=True):
    """The operations of a trace, numbered as in the trace; every tuple of times is in that order.

    A value of `launches` is None if the trace holds no launch. `by_start` and `by_end` hold all operations in order of time,
    `streams` those of each stream by start, and `places` each operation's place on its stream. `producers` are the
    operations of other streams that an operation waits for, as `dependencies` has them.
    """

    trace: ActivityTrace
    origin_us: float
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    launches: tuple[int | None, ...]
    by_start: tuple[int, ...]
    by_end: tuple[int, ...]
    sorted_starts: tuple[int, ...]
    sorted_ends: tuple[int, ...]
    streams: dict[int, tuple[int, ...]]
    places: tuple[int, ...]
    dependencies: Dependencies
    producers: dict[int, tuple[int, ...]]
    host_waits: tuple[tuple[int, int], ...]

    def to_ns(self, time_us: float) -> int:
        """Convert a time of the trace's own clock to nanoseconds."""
        return round((time_us - self.origin_us) * NS_PER_US)

    def stream_of(self, index: int) -> int:
        """Return the stream that an operation ran on."""
        return self.trace.operations[index].arguments.stream

    def operator_of(self, index: int) -> HostOperator | None:
        """Return the host operator that launched an operation, if the trace states it."""
        number = self.trace.operations[index].operator
        return None if number is None else self.trace.operators[number]

    def before_on_stream(self, index: int) -> int | None:
        """Return the operation before this one on its stream."""
        place = self.places[index]
        return self.streams[self.stream_of(index)][place - 1] if place else None

    def held_by(self, index: int) -> list[int]:
        """Return what an operation waits for: its predecessor on the stream, and its producers on others."""
        before = self.before_on_stream(index)
        others = self.producers.get(index, ())
        return [*others] if before is None else [before, *others]

    def last_ended(self, time: int) -> int | None:
        """Return the operation that ended last at or before a time."""
        place = bisect_right(self.sorted_ends, time) - 1
        return self.by_end[place] if place >= 0 else None

    def waited_host(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the host's last wait for the GPU that touches a span, if there is one."""
        place = bisect_right(self.host_waits, (end, 0)) - 1
        return self.host_waits[place] if place >= 0 and self.host_waits[place][1] > start else None


def time_trace(trace: ActivityTrace) -> TimedTrace:
    """Index a trace for analysis."""
    operations = trace.operations
    origin = min(operation.start_us for operation in operations)
    starts = tuple([round((operation.start_us - origin) * NS_PER_US) for operation in operations])
    ends = tuple([round((operation.end_us - origin) * NS_PER_US) for operation in operations])
    launches = tuple(
        [
            None if operation.launched_us is None else round((operation.launched_us - origin) * NS_PER_US)
            for operation in operations
        ]
    )
    by_start = sorted(sorted(range(len(operations)), key=ends.__getitem__), key=starts.__getitem__)
    by_end = sorted(by_start, key=ends.__getitem__)
    streams: dict[int, list[int]] = {}
    places = [0] * len(operations)
    for index in by_start:
        line = streams.setdefault(operations[index].arguments.stream, [])
        places[index] = len(line)
        line.append(index)
    producers: dict[int, tuple[int, ...]] = {}
    dependencies = find_dependencies(trace)
    for edge in dependencies.edges:
        producers[edge.consumer] = (*producers.get(edge.consumer, ()), edge.producer)
    return TimedTrace(
        trace=trace,
        origin_us=origin,
        starts=starts,
        ends=ends,
        launches=launches,
        by_start=tuple(by_start),
        by_end=tuple(by_end),
        sorted_starts=tuple(map(starts.__getitem__, by_start)),
        sorted_ends=tuple(map(ends.__getitem__, by_end)),
        streams={stream: tuple(line) for stream, line in streams.items()},
        places=tuple(places),
        dependencies=dependencies,
        producers=producers,
        host_waits=_in_ns(trace.host_waits, origin),
    )


def _in_ns(waits: Sequence[tuple[float, float]], origin_us: float) -> tuple[tuple[int, int], ...]:
    return tuple((round((start - origin_us) * NS_PER_US), round((end - origin_us) * NS_PER_US)) for start, end in waits)


def format_ns(time: int) -> str:
    """Print whole nanoseconds as `format_us` does."""
    return format_us(ns_to_us(time))


def ns_to_us(time: int) -> float:
    """Convert whole nanoseconds to microseconds."""
    return time / NS_PER_US
