"""Finds which of the given traces belong to one job, and which ranks of the job are missing.

Each rank counts once: of two traces of the same rank the first is kept. Ranks that state a world size other than the most
common one are of another job. Both are left out of the analysis and named.
"""

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from counterpoint.analysis.values import RankAnalysis
from counterpoint.units import format_numbered

MOST_RANGES = 8  # of missing ranks' numbers, in a sentence


def belonging(ranks: Sequence[RankAnalysis]) -> tuple[tuple[RankAnalysis, ...], tuple[str, ...]]:
    """Return the ranks of one job, ascending, and one sentence for each trace that was left out."""
    problems: list[str] = []
    kept: dict[int, RankAnalysis] = {}
    world_size = _usual_world_size(ranks)
    for analysis in ranks:
        if analysis.world_size not in (None, world_size):
            problems.append(
                f"{analysis.path} comes from a job of {analysis.world_size} ranks, the others from one of "
                f"{world_size}, so it is left out. Give the traces of one job."
            )
        elif analysis.rank in kept:
            problems.append(
                f"{kept[analysis.rank].path} and {analysis.path} are both of rank {analysis.rank}, so the "
                "second is left out. Give each rank once."
            )
        else:
            kept[analysis.rank] = analysis
    return tuple(_numbered_alike(kept[rank]) for rank in sorted(kept)), tuple(problems)


def _numbered_alike(analysis: RankAnalysis) -> RankAnalysis:
    """Set the rank's number in all that the analysis holds: a trace that states no rank gets its number later."""
    parts = ("steps", "collectives", "exposed", "idle", "critical_path", "slowdowns")
    strange = {
        name: getattr(analysis, name) for name in parts if any(e.rank != analysis.rank for e in getattr(analysis, name))
    }
    return replace(analysis, **{name: tuple(replace(e, rank=analysis.rank) for e in held) for name, held in strange.items()})


def _usual_world_size(ranks: Sequence[RankAnalysis]) -> int | None:
    """Return the world size that most traces state; among equally common ones, the first."""
    stated = Counter(analysis.world_size for analysis in ranks if analysis.world_size is not None)
    return stated.most_common(1)[0][0] if stated else None


def missing_ranks(ranks: Sequence[RankAnalysis]) -> tuple[int, ...]:
    """Return the job's ranks without traces, from the world size, else from the ranks and sizes of process groups."""
    present = {analysis.rank for analysis in ranks}
    expected: set[int] = set()
    for analysis in ranks:
        expected.update(range(analysis.world_size or 0))
        if analysis.world_size is None:
            for collective in analysis.collectives:
                expected.update(collective.group_ranks or range(collective.group_size))
    return tuple(sorted(expected - present))


def describe_missing(ranks: Sequence[RankAnalysis], missing: Sequence[int]) -> tuple[str, ...]:
    """Return what is unknown because ranks are missing: at most one sentence."""
    if not missing or not any(analysis.collectives for analysis in ranks):
        return ()
    total = len(ranks) + len(missing)
    known = (
        f"Waits, skews and means are those of the {len(ranks)} of {total} ranks that were given"
        if len(ranks) > 1
        else f"Only rank {ranks[0].rank} of {total} was given"
    )
    named = format_numbered("rank", missing, MOST_RANGES)
    return (f"{known}. Time spent waiting for {named} cannot be told from transfer time.",)
