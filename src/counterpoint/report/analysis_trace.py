"""Writes the representative steps of all ranks as one trace for Perfetto: a process per rank, with the causes as first
track.

Ranks share one clock if their clocks are known to agree; otherwise each step starts at zero, as on the page.
"""

from collections.abc import Iterator
from pathlib import Path

from counterpoint.analysis.logged import is_logged
from counterpoint.analysis.values import Analysis, ExposedInterval, RankAnalysis
from counterpoint.errors import AnalysisError
from counterpoint.report.analysis_timeline import shown_intervals, step_origins
from counterpoint.report.analysis_words import CAUSES
from counterpoint.traces.chrome import Event, complete_event, name_events, write_events


def write_analysis_trace(path: Path | str, analysis: Analysis) -> None:
    """Write all ranks to a `.json` or `.json.gz` file. Raises `TraceError` for another suffix, or if the file cannot be
    written.

    Raises `AnalysisError` for logs, which hold nothing to draw.
    """
    if is_logged(analysis.ranks):
        raise AnalysisError(
            "--merge needs profiler traces, because NCCL Inspector's logs hold no start times; found "
            f"{analysis.ranks[0].path}. Give traces, or leave --merge out."
        )
    origins = _origins(analysis)
    offsets = dict(analysis.clock_offsets_us)
    events: list[Event] = []
    for rank in analysis.ranks:
        streams = sorted({lane.stream for lane in rank.lanes})
        causes_thread = streams[-1] + 1 if streams else 0  # no stream has this number
        tracks = {causes_thread: "exposed, by cause"} | {stream: f"stream {stream}" for stream in streams}
        events += name_events(rank.rank, f"rank {rank.rank}, step {rank.shown_step}", tracks)
        events += _operations(rank, offsets.get(rank.rank, 0.0) - origins[rank.rank])
        names = {each.number: each.name for each in rank.collectives}
        for each in shown_intervals(analysis, rank):
            events.append(_exposed(each, (rank.rank, causes_thread), origins[rank.rank], names.get(each.collective)))
    write_events(path, events)


def _origins(analysis: Analysis) -> dict[int, float]:
    """Return origins as on the page, but never below zero: an operation may have begun before its step."""
    origins, offsets = step_origins(analysis), dict(analysis.clock_offsets_us)
    first_us = min(
        (lane.start_us + offsets.get(rank.rank, 0.0) - origins[rank.rank] for rank in analysis.ranks for lane in rank.lanes),
        default=0.0,
    )
    return {rank: origin_us + min(0.0, first_us) for rank, origin_us in origins.items()}


def _operations(rank: RankAnalysis, shift_us: float) -> Iterator[Event]:
    for lane in rank.lanes:
        times_us = (lane.start_us + shift_us, lane.end_us + shift_us)
        yield complete_event((rank.rank, lane.stream), rank.names[lane.name], lane.role, times_us, {})


def _exposed(interval: ExposedInterval, place: tuple[int, int], origin_us: float, collective: str | None) -> Event:
    """Return an exposed interval, named by its cause, with the page's details."""
    name, meaning = CAUSES[interval.cause]
    found = {
        "meaning": meaning,
        "evidence": interval.evidence,
        "collective": collective,
        "waited for rank": interval.other_rank,
    }
    arguments = {key: value for key, value in found.items() if value is not None}
    times_us = (interval.start_us - origin_us, interval.end_us - origin_us)
    return complete_event(place, name, "exposed", times_us, arguments)
