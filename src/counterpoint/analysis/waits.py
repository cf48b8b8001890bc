"""Finds when each rank came to each shared collective: waits, first and last arrivals, skew, and the latency after that.

A rank waits from its own start to the last rank's start, on the shared clock, but not beyond its own end. The latency is the
last rank's own duration, which needs no clock. Nothing is known of missing ranks: if one of them came last, the latency
includes the wait for it.
"""

from collections.abc import Mapping, Sequence

from counterpoint.analysis.alignment import RankClock
from counterpoint.analysis.matching import SharedCollective
from counterpoint.analysis.values import CollectiveSkew, RankWaits, TracedCollective, label_of
from counterpoint.value import Value


class Arrival(Value, frozen=True, kw_only=True):
    """When the ranks came to one collective. `waits_us` are in the order of `members`; `error_us` is that of the clocks."""

    members: tuple[TracedCollective, ...]
    waits_us: tuple[float, ...]
    first: TracedCollective
    last: TracedCollective
    skew_us: float
    error_us: float

    @property
    def latency_us(self) -> float:
        """The time from the last arrival to the end on that rank."""
        return self.last.end_us - self.last.start_us

    @property
    def num_bytes(self) -> int:
        """The mean over the ranks, which differ only in uneven all-to-alls."""
        return round(sum(member.num_bytes for member in self.members) / len(self.members))

    @property
    def imbalance(self) -> float:
        """The largest imbalance of the ranks."""
        return max(member.imbalance for member in self.members)


def arrivals(shared: Sequence[SharedCollective], clocks: Mapping[int, RankClock]) -> tuple[Arrival, ...]:
    """Return the arrivals at every collective whose ranks have aligned clocks, in the given order."""
    return tuple(_arrival(c.members, clocks) for c in shared if all(member.rank in clocks for member in c.members))


def _arrival(members: tuple[TracedCollective, ...], clocks: Mapping[int, RankClock]) -> Arrival:
    starts = [clocks[member.rank].shared_us(member.start_us) for member in members]
    last_us = max(starts)
    return Arrival(
        members=members,
        waits_us=tuple(min(last_us - s, m.end_us - m.start_us) for s, m in zip(starts, members, strict=True)),
        first=members[starts.index(min(starts))],
        last=members[starts.index(last_us)],
        skew_us=last_us - min(starts),
        error_us=max(clocks[member.rank].error_us for member in members),
    )


def rank_waits(met: Sequence[Arrival]) -> tuple[RankWaits, ...]:
    """Return waits summed by rank, and how often each rank came last and first."""
    waited: dict[int, list[float]] = {}
    for arrival in met:
        for member, wait_us in zip(arrival.members, arrival.waits_us, strict=True):
            waited.setdefault(member.rank, []).append(wait_us)
    apart = [arrival for arrival in met if arrival.skew_us > 0]  # without skew, no rank came last
    return tuple(
        RankWaits(
            rank=rank,
            waited_us=sum(waits),
            mean_us=sum(waits) / len(waits),
            times_last=sum(arrival.last.rank == rank for arrival in apart),
            times_first=sum(arrival.first.rank == rank for arrival in apart),
            num_collectives=len(waits),
        )
        for rank, waits in sorted(waited.items())
    )


def skew_of(arrival: Arrival) -> CollectiveSkew:
    """Return the skew of one collective for reports."""
    first = arrival.members[0]
    return CollectiveSkew(
        name=label_of(first),
        process_group=first.process_group,
        group_number=first.group_number,
        step=first.step,
        first_rank=arrival.first.rank,
        last_rank=arrival.last.rank,
        skew_us=arrival.skew_us,
        latency_us=arrival.latency_us,
        waits_us=tuple((m.rank, wait) for m, wait in zip(arrival.members, arrival.waits_us, strict=True)),
        group_numbers=tuple((member.rank, member.group_number) for member in arrival.members),
        last_did=arrival.last.before,
    )
