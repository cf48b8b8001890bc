"""Timeline data for the page: the representative step of each rank as columns of numbers, small enough for one file.

Times are nanoseconds from the step's start; each start is stored as the difference from the one before. Ranks share one
clock if they show the same step and their clocks are known to agree; otherwise each starts at zero. This module does not
know how the data is drawn.
"""

from collections.abc import Iterable, Sequence
from typing import get_args

from counterpoint.analysis.logged import is_logged
from counterpoint.analysis.values import Analysis, ExposedInterval, LaneInterval, RankAnalysis, Role
from counterpoint.display import cut
from counterpoint.errors import printable
from counterpoint.report.analysis_words import CAUSES
from counterpoint.units import NS_PER_US, format_count, format_us
from counterpoint.value import Value

ROLES: tuple[Role, ...] = get_args(Role)
MOST_NAME = 300  # most letters of a kernel's name


class Limits(Value, frozen=True, kw_only=True):
    """Limits of a whole page: operations drawn, sentences of evidence, and rows of each table."""

    num_operations: int = 200_000
    num_evidence: int = 4_000
    num_rows: int = 500

    def halved(self) -> "Limits":
        """Return half of each limit."""
        return Limits(
            num_operations=self.num_operations // 2,
            num_evidence=self.num_evidence // 2,
            num_rows=max(10, self.num_rows // 2),
        )


class Names:
    """Texts numbered in order of arrival, made safe to show, and cut if they are very long."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """Return the number of a text, new or known."""
        return self._numbers.setdefault(safe_text(text), len(self._numbers))

    def texts(self) -> list[str]:
        """Return all texts in the order of their numbers."""
        return list(self._numbers)


def safe_text(text: str, most: int = MOST_NAME) -> str:
    """Return a text without control characters, cut if it is very long."""
    return printable(cut(text, most))


def timeline_data(analysis: Analysis, limits: Limits) -> dict[str, object]:
    """Return everything that the page draws, ready for JSON."""
    names, evidence = Names(), Names()
    origins = step_origins(analysis)
    offsets = dict(analysis.clock_offsets_us)
    told = _told(analysis, limits.num_evidence)
    ranks, room = [], limits.num_operations
    for rank in analysis.ranks:
        origin_us = origins[rank.rank]
        is_drawn = len(rank.lanes) <= room
        room -= len(rank.lanes) if is_drawn else 0
        shift_us = offsets.get(rank.rank, 0.0) - origin_us
        lanes = _lanes(rank, shift_us, names) if is_drawn else []
        entry = {
            "rank": rank.rank,
            "step": rank.shown_step,
            "origin": origin_us,
            "duration": _shown_us(rank),
            "lanes": lanes,
        }
        title = f"rank {rank.rank}, step {rank.shown_step}" + ("" if is_drawn else " (operations left out: too many)")
        exposed = _exposed(analysis, rank, origin_us, names, (evidence, told))
        ranks.append(entry | {"title": title, "exposed": exposed})
    return {
        "ranks": ranks,
        "names": names.texts(),
        "evidence": evidence.texts(),
        "roles": ROLES,
        "causes": list(CAUSES.values()),
    }


def shown_intervals(analysis: Analysis, rank: RankAnalysis) -> list[ExposedInterval]:
    """Return the exposed intervals of a rank's drawn step, by start."""
    found = [each for each in analysis.exposed if each.rank == rank.rank and each.step == rank.shown_step]
    return sorted(found, key=lambda each: each.start_us)


def is_one_clock(analysis: Analysis) -> bool:
    """Return whether the drawn steps of all ranks can stand on one clock."""
    offsets = dict(analysis.clock_offsets_us)
    is_known = len(analysis.ranks) == 1 or is_logged(analysis.ranks) or all(rank.rank in offsets for rank in analysis.ranks)
    return is_known and len({rank.shown_step for rank in analysis.ranks}) <= 1


def step_origins(analysis: Analysis) -> dict[int, float]:
    """Return, by rank, when the drawn step begins on the clock of the first rank; if clocks agree, the earliest start
    for all.
    """
    offsets = dict(analysis.clock_offsets_us)
    starts = {rank.rank: _start_us(rank) + offsets.get(rank.rank, 0.0) for rank in analysis.ranks}
    return dict.fromkeys(starts, min(starts.values(), default=0.0)) if is_one_clock(analysis) else starts


def describe_timeline(analysis: Analysis) -> list[str]:
    """Describe the drawing in one sentence for each rank, for readers who cannot see it."""
    lines = []
    for rank in (each for each in analysis.ranks if each.source == "trace"):
        exposed = shown_intervals(analysis, rank)
        streams = len({lane.stream for lane in rank.lanes})
        by_cause: dict[str, float] = {}
        for each in exposed:
            by_cause[CAUSES[each.cause][0]] = by_cause.get(CAUSES[each.cause][0], 0.0) + each.duration_us
        causes = ", ".join(f"{name} {format_us(us)}" for name, us in sorted(by_cause.items(), key=lambda item: -item[1]))
        lines.append(
            f"Rank {rank.rank}, step {rank.shown_step}: {format_us(_shown_us(rank))}, "
            f"{format_count(len(rank.lanes), 'operation')} on {format_count(streams, 'stream')}, "
            f"{format_us(sum(by_cause.values()))} exposed in {format_count(len(exposed), 'interval')}"
            + (f": {causes}." if causes else ".")
        )
    return lines


def _start_us(rank: RankAnalysis) -> float:
    of_step = [step.start_us for step in rank.steps if step.step == rank.shown_step]
    return of_step[0] if of_step else min((lane.start_us for lane in rank.lanes), default=0.0)


def _shown_us(rank: RankAnalysis) -> float:
    of_step = [step.makespan_us for step in rank.steps if step.step == rank.shown_step]
    if of_step:
        return of_step[0]
    return max((lane.end_us for lane in rank.lanes), default=0.0) - _start_us(rank)


def _told(analysis: Analysis, most: int) -> set[tuple[int, float]]:
    """Return rank and start of the intervals whose evidence the page holds: the longest."""
    shown = [each for rank in analysis.ranks for each in shown_intervals(analysis, rank)]
    shown.sort(key=lambda each: -each.duration_us)
    return {(each.rank, each.start_us) for each in shown[:most]}


def _columns(times: Sequence[tuple[float, float]]) -> dict[str, list[int]]:
    """Return starts, as differences, and durations of intervals that are sorted by start."""
    starts = [round(start_us * NS_PER_US) for start_us, _ in times]
    before = [0, *starts][: len(starts)]
    return {
        "t": [start - last for start, last in zip(starts, before, strict=True)],
        "d": [max(0, round(end_us * NS_PER_US) - start) for start, (_, end_us) in zip(starts, times, strict=True)],
    }


def _lanes(rank: RankAnalysis, shift_us: float, names: Names) -> list[dict[str, object]]:
    streams: dict[int, list[LaneInterval]] = {}
    for lane in sorted(rank.lanes, key=lambda lane: lane.start_us):
        streams.setdefault(lane.stream, []).append(lane)
    numbers = [names.number(name) for name in rank.names]
    return [
        {
            "s": stream,
            **_columns([(lane.start_us + shift_us, lane.end_us + shift_us) for lane in lanes]),
            "n": [numbers[lane.name] for lane in lanes],
            "r": _digits(ROLES.index(lane.role) for lane in lanes),
        }
        for stream, lanes in sorted(streams.items())
    ]


def _exposed(
    analysis: Analysis, rank: RankAnalysis, origin_us: float, names: Names, told: tuple[Names, set[tuple[int, float]]]
) -> dict[str, object]:
    """Return causes, collectives (k), other ranks (o) and evidence (e) of exposed intervals; -1 stands for none."""
    sentences, kept = told
    shown = shown_intervals(analysis, rank)
    collectives = {each.number: each.name for each in rank.collectives}
    numbers = list(CAUSES)
    return {
        **_columns([(each.start_us - origin_us, each.end_us - origin_us) for each in shown]),
        "c": _digits(numbers.index(each.cause) for each in shown),
        "k": [names.number(collectives[each.collective]) if each.collective in collectives else -1 for each in shown],
        "o": [-1 if each.other_rank is None else each.other_rank for each in shown],
        "e": [sentences.number(each.evidence) if (each.rank, each.start_us) in kept else -1 for each in shown],
    }


def _digits(numbers: Iterable[int]) -> str:
    return "".join(map(str, numbers))
