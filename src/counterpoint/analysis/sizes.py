"""Collectives by kind, size, group and transport: their count, time and bus bandwidth."""

from collections.abc import Iterable, Iterator, Sequence

from counterpoint.analysis.values import CollectiveSize, RankAnalysis, TracedCollective, spread_of
from counterpoint.analysis.waits import Arrival
from counterpoint.sim.reach import wire_bytes
from counterpoint.units import US_PER_S
from counterpoint.value import Value


class TimedCollective(Value, frozen=True, kw_only=True):
    """One collective, counted once however many ranks ran it: one rank's entry, its mean size and its time."""

    entry: TracedCollective
    num_bytes: int
    time_us: float
    imbalance: float
    is_latency: bool


def collective_sizes(ranks: Sequence[RankAnalysis], met: Sequence[Arrival]) -> tuple[CollectiveSize, ...]:
    """Return one row per kind, size, group and transport, by total time."""
    rows: dict[tuple[object, ...], list[TimedCollective]] = {}
    for run in _runs(ranks, met):
        entry = run.entry
        key = (entry.collective, entry.transport, entry.process_group, run.num_bytes, entry.group_size)
        rows.setdefault(key, []).append(run)
    sizes = [_size(runs) for runs in rows.values()]
    return tuple(sorted(sizes, key=lambda s: (-s.count * s.mean_us, s.collective, s.num_bytes, s.process_group or "")))


def _runs(ranks: Sequence[RankAnalysis], met: Sequence[Arrival]) -> Iterator[TimedCollective]:
    seen = {(member.rank, member.number) for arrival in met for member in arrival.members}
    for arrival in met:
        yield TimedCollective(
            entry=arrival.members[0],
            num_bytes=arrival.num_bytes,
            time_us=arrival.latency_us,
            imbalance=arrival.imbalance,
            is_latency=True,
        )
    for entry in _entries(ranks):
        if (entry.rank, entry.number) not in seen:
            yield TimedCollective(
                entry=entry,
                num_bytes=entry.num_bytes,
                time_us=entry.end_us - entry.start_us,
                imbalance=entry.imbalance,
                is_latency=False,
            )


def _entries(ranks: Sequence[RankAnalysis]) -> Iterable[TracedCollective]:
    return (collective for analysis in ranks for collective in analysis.collectives)


def _size(runs: Sequence[TimedCollective]) -> CollectiveSize:
    entry, times = runs[0].entry, [run.time_us for run in runs]
    timed = [run for run in runs if run.time_us > 0]  # logs hold entries without a time
    latencies = [run.time_us for run in timed if run.is_latency]
    typical_us = sum(latencies) / len(latencies) if latencies else min((run.time_us for run in timed), default=0.0)
    on_wire = wire_bytes(entry.collective, runs[0].num_bytes, max(1, entry.group_size))
    return CollectiveSize(
        collective=entry.collective,
        transport=entry.transport,
        process_group=entry.process_group,
        num_bytes=runs[0].num_bytes,
        group_size=entry.group_size,
        count=len(runs),
        mean_us=sum(times) / len(times),
        least_us=min(times),
        most_us=max(times),
        bus_bytes_per_s=on_wire / typical_us * US_PER_S if on_wire and typical_us > 0 else None,
        imbalance=max(run.imbalance for run in runs),
        spread_us=spread_of(times),
    )
