"""Write timelines as a Chrome trace that Perfetto and chrome://tracing open: one process per timeline and rank.

Threads are streams, events are complete ("X") and their category is the operation's kind. The format is Google's "Trace
Event Format"; times are microseconds. The module does not know where a timeline came from.
"""

import gzip
from collections.abc import Mapping
from pathlib import Path

import msgspec

from counterpoint.errors import TraceError
from counterpoint.timeline import Interval, Timeline
from counterpoint.value import write_whole


def write_chrome_trace(path: Path | str, timelines: Mapping[str, Timeline]) -> None:
    """Write timelines side by side to a `.json` or `.json.gz` file; each is labeled by its key.

    Raises `TraceError` for another suffix, for no timeline, and if the file cannot be written.
    """
    file = Path(path)
    check_chrome_path(file)
    if not timelines:
        raise TraceError(f"There is no timeline to write to {file}; give at least one.")
    text = msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": chrome_events(timelines)})
    try:
        write_whole(file, gzip.compress(text, mtime=0) if file.suffix == ".gz" else text)
    except OSError as problem:
        raise TraceError(f"Cannot write {file}: {problem.strerror}.") from problem


def check_chrome_path(path: Path) -> None:
    """Raise `TraceError` if `path` does not end in `.json` or `.json.gz`."""
    if not path.name.endswith((".json", ".json.gz")):
        raise TraceError(f"A Chrome trace is written to .json or .json.gz; found {path}.")


def chrome_events(timelines: Mapping[str, Timeline]) -> list[dict[str, object]]:
    """The events of a Chrome trace: names first, then one complete event per interval."""
    events: list[dict[str, object]] = []
    process = 0
    for label, timeline in timelines.items():
        for rank in timeline.ranks():
            intervals = timeline.of_rank(rank)
            events += _names(process, f"{label}, rank {rank} ({timeline.origin})", intervals)
            events += [_event(process, interval) for interval in intervals]
            process += 1
    return events


def _names(process: int, name: str, intervals: tuple[Interval, ...]) -> list[dict[str, object]]:
    events = [
        _metadata(process, 0, "process_name", {"name": name}),
        _metadata(process, 0, "process_sort_index", {"sort_index": process}),
    ]
    for stream in sorted({interval.stream for interval in intervals}):
        events.append(_metadata(process, stream, "thread_name", {"name": f"stream {stream}"}))
        events.append(_metadata(process, stream, "thread_sort_index", {"sort_index": stream}))
    return events


def _metadata(process: int, thread: int, name: str, arguments: dict[str, object]) -> dict[str, object]:
    return {"ph": "M", "pid": process, "tid": thread, "name": name, "args": arguments}


def _event(process: int, interval: Interval) -> dict[str, object]:
    return {
        "ph": "X",
        "pid": process,
        "tid": interval.stream,
        "name": interval.name,
        "cat": interval.kind,
        "ts": interval.start_us,
        "dur": interval.duration_us,
        "args": {"operation": interval.operation},
    }
