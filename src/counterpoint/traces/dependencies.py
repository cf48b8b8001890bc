"""Finds which operation waits for which operation on another stream.

The order within a stream is implicit and is never listed. If the profiler states the record of an event, the dependency is
exact. Otherwise the producer is inferred from the host's calls: a wait on NCCL's own event is for the communicator's
previous collective. Any other record marks the last operation that its thread launched before it on a stream other than
the waiting one (`host_order.py` finds the record). Where the profiler states no stream for any wait, the host's order says
who waits for whom (`unstated_waits.py`). Without waits, and within a CUDA graph, whose operations the host launches at once,
dependencies are inferred from times alone.

Every inference is checked against GPU times: a producer must have ended when its consumer starts. If it has not, it is
replaced by the latest earlier operation of its stream that had ended, or by none.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from counterpoint.step import DependencyOrigin
from counterpoint.traces.activity import ActivityTrace, SyncArguments
from counterpoint.traces.host_order import FARTHEST_LOOK, HostOrder, index_host, records_of_waits
from counterpoint.traces.unstated_waits import can_pair, find_pairs
from counterpoint.value import Value

TIME_TOLERANCE_US = 0.5
HELD_BACK_US = 10.0
"""Without events, a longer gap on the computation stream is a wait. Launch gaps are 1 to 4 us in the shipped traces."""


class Edge(Value, frozen=True, kw_only=True):
    """`consumer` waits for `producer`; both number operations of the trace."""

    consumer: int
    producer: int
    origin: DependencyOrigin


class Dependencies(Value, frozen=True, kw_only=True):
    """The edges across streams, and how many inferences the GPU times corrected or contradicted."""

    edges: tuple[Edge, ...]
    num_corrected: int = 0
    num_dropped: int = 0
    are_from_times: bool = False


def find_dependencies(trace: ActivityTrace) -> Dependencies:
    """Return all waits across streams in a trace; those that the profiler states are exact."""
    host = index_host(trace)
    waits = [position for position, call in enumerate(trace.host_calls) if call.kind == "wait" and call.sync is not None]
    if not waits and not can_pair(host):
        everything = range(len(trace.operations))
        return Dependencies(edges=tuple(_edges_from_times(host, everything)), are_from_times=True)
    edges: dict[tuple[int, int], DependencyOrigin] = {
        (edge.consumer, edge.producer): edge.origin for graph in _graphs(trace) for edge in _edges_from_times(host, graph)
    }
    num_corrected = num_dropped = 0
    for consumer, producer, origin in _stated_pairs(host, waits) if waits else find_pairs(host):
        judged = producer if origin == "exact" else _judge(host, consumer, producer)
        num_corrected += judged is not None and judged != producer
        num_dropped += judged is None
        if judged is not None and edges.get((consumer, judged)) != "exact":
            edges[consumer, judged] = origin
    return Dependencies(
        edges=tuple(Edge(consumer=c, producer=p, origin=origin) for (c, p), origin in sorted(edges.items()) if p < c),
        num_corrected=num_corrected,
        num_dropped=num_dropped,
    )


def _stated_pairs(host: HostOrder, waits: list[int]) -> Iterator[tuple[int, int, DependencyOrigin]]:
    """Yield a consumer and a producer for each wait whose stream the profiler states."""
    own = {position for position in waits if host.is_communicators_own(position)}
    records = records_of_waits(host, [position for position in waits if position not in own])
    for position in waits:
        sync = host.calls[position].sync or SyncArguments()
        consumer = host.next_on_stream(position, sync.stream)
        producer, origin = _producer(host, position, sync, records.get(position), is_own=position in own)
        if consumer is not None and producer is not None and host.streams[producer] != sync.stream:
            yield consumer, producer, origin


def _producer(
    host: HostOrder, position: int, sync: SyncArguments, record: int | None, *, is_own: bool
) -> tuple[int | None, DependencyOrigin]:
    """Return the operation that a wait is for, as the profiler states it, else as inferred."""
    stated = host.by_correlation.get(sync.record_correlation) if sync.record_correlation > 0 else None
    if sync.producer_stream >= 0:
        return host.last_on_stream(position if stated is None else stated, sync.producer_stream), (
            "inferred" if stated is None else "exact"
        )
    if stated is not None:
        return host.last_launch_before(stated, sync.stream), "inferred"
    if is_own:
        consumer = host.next_on_stream(position, sync.stream)
        return (None if consumer is None else host.previous_of_communicator(consumer)), "inferred"
    return (None if record is None else host.last_launch_before(record, sync.stream)), "inferred"


def _judge(host: HostOrder, consumer: int, producer: int) -> int | None:
    """Return the producer if it had ended when the consumer started, else the latest earlier one of its stream that had."""
    latest_us = host.operations[consumer].start_us + TIME_TOLERANCE_US
    stream = host.streams[producer]
    for candidate in range(producer, max(-1, producer - FARTHEST_LOOK), -1):
        if host.streams[candidate] == stream and host.operations[candidate].end_us <= latest_us:
            return candidate
    return None


def _graphs(trace: ActivityTrace) -> Iterable[list[int]]:
    """Return the operations of each launch of a CUDA graph."""
    found: dict[int, list[int]] = {}
    for index, operation in enumerate(trace.operations):
        if operation.graph_launch is not None:
            found.setdefault(operation.graph_launch, []).append(index)
    return found.values()


def _edges_from_times(host: HostOrder, indices: Iterable[int]) -> list[Edge]:
    """Without events: communication waits for the computation issued before it; late computation waits for it."""
    busy_us: Counter[int] = Counter()
    operations = [(index, host.operations[index]) for index in indices]
    for index, operation in operations:
        busy_us[operation.stream] += 0 if host.is_communication[index] else round(operation.duration_us * 1000) + 1
    main = busy_us.most_common(1)[0][0]
    edges: list[Edge] = []
    before: int | None = None
    pending: list[int] = []
    for index, operation in operations:
        if operation.stream != main:
            producer = None if before is None or not host.is_communication[index] else _judge(host, index, before)
            if producer is not None:
                edges.append(Edge(consumer=index, producer=producer, origin="inferred"))
            if host.is_communication[index]:
                pending.append(index)
            continue
        if before is not None:
            pending = [other for other in pending if host.operations[other].end_us > host.operations[before].end_us]
            holder = _holder(host, index, before, pending)
            if holder is not None:
                edges.append(Edge(consumer=index, producer=holder, origin="inferred"))
        before = index
    return edges


def _holder(host: HostOrder, index: int, before: int, pending: list[int]) -> int | None:
    """Return the communication that held operation `index` back: the last to end in the gap before it, after its launch."""
    operation, previous = host.operations[index], host.operations[before]
    if operation.start_us - previous.end_us <= HELD_BACK_US:
        return None
    issued_us = previous.end_us if operation.launched_us is None else max(operation.launched_us, previous.end_us)
    ended = [
        (host.operations[other].end_us, other)
        for other in pending
        if issued_us < host.operations[other].end_us <= operation.start_us + TIME_TOLERANCE_US
    ]
    return max(ended)[1] if ended else None
