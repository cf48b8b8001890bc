"""Revises the causes of exposed intervals with the other ranks' traces.

The part of an interval in which its collective waited for a later rank is that rank's, except for gaps between kernels
that need nothing of the collective: they stay, however long it takes. Of an uneven all-to-all, the part of its transfer
above what even parts would take is the split's: the largest part sets the time, so evenly split it takes the transfer
over the imbalance or more. That is the most that the split can cost: the CTAs that send also copy what a rank keeps, and
on 2 H200s an even split saved 0.10 ms where this says 0.56. It is taken at the end. The rest keeps the cause found on the
rank. Intervals are cut where causes change, so that each has one cause and the sum stays.
"""

from collections.abc import Sequence
from itertools import pairwise

from msgspec.structs import replace

from counterpoint.analysis.values import Cause, ExposedInterval, RankAnalysis, TracedCollective, label_of
from counterpoint.analysis.waits import Arrival
from counterpoint.units import format_us
from counterpoint.value import Value

KEPT: tuple[Cause, ...] = ("gap",)
LEAST_WAIT_US = 1.0  # less is the collective's own start
LEAST_IMBALANCE = 1.05  # less is as good as even


class Explained(Value, frozen=True, kw_only=True):
    """A stretch of a collective on one rank's own clock whose cause other ranks or the split explain."""

    start_us: float
    end_us: float
    cause: Cause
    evidence: str
    other_rank: int | None = None


def attribute(ranks: Sequence[RankAnalysis], met: Sequence[Arrival]) -> tuple[ExposedInterval, ...]:
    """Exposed intervals of all ranks, each on its own clock, cut by what other ranks explain; sums are unchanged."""
    found = {(member.rank, member.number): arrival for arrival in met for member in arrival.members}
    cut: list[ExposedInterval] = []
    for analysis in ranks:
        collectives = {collective.number: collective for collective in analysis.collectives}
        for interval in analysis.exposed:
            collective = collectives.get(interval.collective)
            parts = _parts(collective, found.get((analysis.rank, interval.collective))) if collective else []
            cut += [interval] if interval.cause in KEPT else _cut(interval, parts)
    return tuple(cut)


def _parts(collective: TracedCollective, arrival: Arrival | None) -> list[Explained]:
    """The wait for a later rank, at the start, and the excess of an uneven split, at the end."""
    parts: list[Explained] = []
    wait_us, imbalance = collective.waiting_us, collective.imbalance
    if arrival is not None:
        wait_us = arrival.waits_us[arrival.members.index(collective)]
        imbalance = arrival.imbalance
        if wait_us > max(LEAST_WAIT_US, arrival.error_us):
            parts.append(_wait(collective, arrival.last, wait_us))
    transfer_us = collective.end_us - collective.start_us - wait_us
    if collective.collective == "all_to_all" and imbalance > LEAST_IMBALANCE and transfer_us > 0:
        parts.append(_excess(collective, transfer_us, imbalance))
    return parts


def _wait(collective: TracedCollective, last: TracedCollective, wait_us: float) -> Explained:
    did = f"; before it, rank {last.rank} {last.before}" if last.before else ""
    return Explained(
        start_us=collective.start_us,
        end_us=collective.start_us + wait_us,
        cause="slow_rank",
        evidence=f"Rank {last.rank} reached {label_of(collective)} {format_us(wait_us)} later than rank "
        f"{collective.rank}{did}.",
        other_rank=last.rank,
    )


def _excess(collective: TracedCollective, transfer_us: float, imbalance: float) -> Explained:
    even_us = transfer_us / imbalance
    return Explained(
        start_us=collective.end_us - (transfer_us - even_us),
        end_us=collective.end_us,
        cause="uneven",
        evidence=f"The largest part of {label_of(collective)} is {imbalance:.3g} times the mean. Once all ranks were "
        f"there, it took {format_us(transfer_us)}; split evenly it would take {format_us(even_us)} or more.",
    )


def _cut(interval: ExposedInterval, parts: Sequence[Explained]) -> list[ExposedInterval]:
    """The interval in pieces without gaps, each with the cause of the part it lies in, else its own."""
    inside = sorted(
        {time for part in parts for time in (part.start_us, part.end_us) if interval.start_us < time < interval.end_us}
    )
    edges = [interval.start_us, *inside, interval.end_us]
    pieces: list[ExposedInterval] = []
    for start_us, end_us in pairwise(edges):
        piece = replace(interval, start_us=start_us, end_us=end_us)
        for part in parts:
            if part.start_us <= start_us and end_us <= part.end_us:
                piece = replace(piece, cause=part.cause, evidence=part.evidence, other_rank=part.other_rank)
                break
        pieces.append(piece)
    return pieces
