"""Combines all ranks' logs of NCCL Inspector: collectives by size and group, and which ranks waited in them.

Logs state how long each collective ran on each rank, but no start. A collective ends on all ranks at nearly the same time,
so the rank with the shortest time came last, and the extra time on other ranks was waiting. Broadcasts and reductions to
one rank may end on the root before other ranks come: they show no waits, and count with their longest time.
"""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from counterpoint.analysis.coincidence import ends_together
from counterpoint.analysis.membership import belonging, describe_missing, missing_ranks
from counterpoint.analysis.sizes import collective_sizes
from counterpoint.analysis.values import Analysis, CollectiveSize, Headline, RankAnalysis, TracedCollective, label_of
from counterpoint.analysis.waits import Arrival, rank_waits, skew_of
from counterpoint.errors import AnalysisError
from counterpoint.units import format_count, format_numbered, format_percent, format_rate, format_us

RESOLUTION_US = 1.0  # logs state whole microseconds
MOST_RANGES = 3
ORDERED = (
    "The logs share no communicator of all ranks. Ranks are numbered in the order of the files, which may "
    "differ from the job's."
)
NEXT = "Record a profiler trace of the same job as well; it shows what is exposed, and why."


def is_logged(ranks: Iterable[RankAnalysis]) -> bool:
    """Return whether any rank is from a log, which holds no steps."""
    return any(analysis.source == "inspector" for analysis in ranks)


def combine_logs(ranks: Sequence[RankAnalysis]) -> Analysis:
    """Analyze logs of one job together; one is enough. Raises `AnalysisError` if there are traces among them."""
    trace = next((analysis for analysis in ranks if analysis.source != "inspector"), None)
    if trace is not None:
        log = next(analysis for analysis in ranks if analysis.source == "inspector")
        raise AnalysisError(
            f"{log.path} is a log of NCCL Inspector, {trace.path} a profiler trace. Give one kind at a time."
        )
    kept, strangers = belonging(_numbered(ranks))
    is_ordered = _has_one_world(ranks)
    missing = missing_ranks(kept) if is_ordered else ()
    met = match_logged(kept)
    waiting = [arrival for arrival in met if ends_together(arrival.members[0])]
    analysis = Analysis(
        ranks=kept,
        headline=Headline(verdict="", why=(), next=()),
        step_us=0.0,
        communication_us=0.0,
        exposed_us=0.0,
        sizes=collective_sizes(kept, met),
        waits=rank_waits(waiting),
        skews=tuple(skew_of(arrival) for arrival in waiting),
        missing_ranks=missing,
        notes=() if is_ordered else (ORDERED,),
        problems=(*strangers, *describe_missing(kept, missing)),
    )
    return replace(analysis, headline=_headline(analysis))


def _main(analysis: RankAnalysis) -> str:
    """Return the largest communicator of a log; the log's rank is counted in that."""
    return min(((-each.group_size, each.communicator) for each in analysis.collectives), default=(0, ""))[1]


def _has_one_world(ranks: Sequence[RankAnalysis]) -> bool:
    return len({_main(analysis) for analysis in ranks}) <= 1


def _numbered(ranks: Sequence[RankAnalysis]) -> list[RankAnalysis]:
    """Keep the numbers of ranks that share one communicator; otherwise number them in the order of the files."""
    if _has_one_world(ranks):
        return list(ranks)
    return [replace(analysis, rank=place) for place, analysis in enumerate(ranks)]


def match_logged(ranks: Sequence[RankAnalysis]) -> tuple[Arrival, ...]:
    """Match what several ranks ran by communicator, function and sequence number; sends and receives are left out."""
    shared: dict[tuple[str, str, int], list[TracedCollective]] = {}
    for analysis in ranks:
        for each in analysis.collectives:
            if each.collective != "send_recv" and each.end_us > 0:
                shared.setdefault((each.communicator, each.name, each.group_number), []).append(each)
    return tuple(_arrival(tuple(members)) for members in shared.values() if len(members) > 1)


def _arrival(members: tuple[TracedCollective, ...]) -> Arrival:
    by_time = sorted(members, key=lambda member: (member.end_us, member.rank))
    is_together = ends_together(members[0])
    last, first = (by_time[0], by_time[-1]) if is_together else (by_time[-1], by_time[0])
    return Arrival(
        members=members,
        waits_us=tuple(max(0.0, member.end_us - last.end_us) for member in members),
        first=first,
        last=last,
        skew_us=abs(first.end_us - last.end_us),
        error_us=RESOLUTION_US,
    )


def _headline(analysis: Analysis) -> Headline:
    count = format_count(sum(size.count for size in analysis.sizes), "collective")
    groups = format_count(len({each.communicator for rank in analysis.ranks for each in rank.collectives}), "communicator")
    numbers = [rank.rank for rank in analysis.ranks]
    whose = f"log of rank {numbers[0]}" if len(numbers) == 1 else f"logs of {len(numbers)} ranks"
    asked = [NEXT]
    if analysis.missing_ranks:
        missing = format_numbered("rank", analysis.missing_ranks, MOST_RANGES)
        asked.append(f"Add the logs of {missing}; they show which rank the others wait for.")
    return Headline(
        verdict=f"NCCL Inspector's {whose}: {count} in {groups}; exposed time is unknown.",
        why=(*_largest(analysis.sizes), *_slowest(analysis)),
        next=tuple(asked),
    )


def _largest(sizes: Sequence[CollectiveSize]) -> list[str]:
    """Return the size that took most of the logged time."""
    total_us = sum(size.count * size.mean_us for size in sizes)
    if total_us <= 0:
        return []
    most = max(sizes, key=lambda size: size.count * size.mean_us)
    time_us = most.count * most.mean_us
    rate = "" if most.bus_bytes_per_s is None else f", at {format_rate(most.bus_bytes_per_s)} of bus bandwidth"
    share = f"{format_percent(time_us / total_us)} of the logged time ({format_us(time_us)} of {format_us(total_us)})"
    return [f"{label_of(most)} in '{most.process_group}' took {share}{rate}."]


def _slowest(analysis: Analysis) -> list[str]:
    """Return the rank that others waited for most, if waits are above the logs' resolution."""
    waits = sorted(analysis.waits, key=lambda each: each.mean_us)
    if len(waits) < 2 or waits[-1].mean_us - waits[0].mean_us <= RESOLUTION_US:
        return []
    least, most = waits[0], waits[-1]
    return [
        (
            f"Rank {least.rank} waited least, {format_us(least.mean_us)} per collective; rank {most.rank} waited "
            f"most, {format_us(most.mean_us)}. The ranks that wait least are those that the others wait for."
        )
    ]
