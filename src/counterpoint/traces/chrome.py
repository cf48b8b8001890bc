"""Write timelines as a Chrome trace that Perfetto and chrome://tracing open: one process per timeline and rank.

Threads are streams. Events are complete ("X"), and their category is the operation's kind. The format is Google's "Trace
Event Format"; times are microseconds. The module does not know where a timeline came from.
"""

import gzip
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from counterpoint.errors import TraceError
from counterpoint.files import GZIP_MAGIC
from counterpoint.timeline import Interval, Timeline
from counterpoint.value import OutputKind, check_replaced, check_suffix, write_whole

CHROME_SUFFIXES = (".json", ".json.gz")
Event = dict[str, object]
HEAD = b'{"displayTimeUnit":"ms","traceEvents":['  # profilers begin their traces in other ways


def is_written_here(content: bytes) -> bool:
    """Return whether a file, gzipped or not, is a trace that this module wrote, not one of a profiler."""
    if content.startswith(GZIP_MAGIC):
        try:
            content = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(content, len(HEAD))
        except zlib.error:
            return False
    return content.startswith(HEAD)


CHROME = OutputKind("trace", CHROME_SUFFIXES, is_written_here)


def write_chrome_trace(path: Path | str, timelines: Mapping[str, Timeline]) -> None:
    """Write timelines side by side to a `.json` or `.json.gz` file; each is labeled by its key.

    Raises `TraceError` for another suffix, for no timeline, and if the file cannot be written.
    """
    check_suffix(Path(path), CHROME, TraceError)
    if not timelines:
        raise TraceError(f"There is no timeline to write to {path}; give at least one.")
    write_events(path, chrome_events(timelines))


def write_events(path: Path | str, events: Sequence[Event]) -> None:
    """Write events to a `.json` or `.json.gz` file. Raises `TraceError` for another suffix, if the file holds something
    else, or if writing fails.
    """
    file = Path(path)
    check_suffix(file, CHROME, TraceError)
    text = msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events})
    try:
        check_replaced(file, CHROME, TraceError)
        write_whole(file, gzip.compress(text, mtime=0) if file.suffix.lower() == ".gz" else text)
    except OSError as problem:
        raise TraceError(f"Cannot write {file}: {problem.strerror}.") from problem


def chrome_events(timelines: Mapping[str, Timeline]) -> list[Event]:
    """Return the events of a Chrome trace: names first, then one complete event per interval."""
    events: list[Event] = []
    process = 0
    for label, timeline in timelines.items():
        for rank in timeline.ranks():
            intervals = timeline.of_rank(rank)
            streams = {stream: f"stream {stream}" for stream in sorted({interval.stream for interval in intervals})}
            events += name_events(process, f"{label}, rank {rank} ({timeline.origin})", streams)
            events += [_interval_event(process, interval) for interval in intervals]
            process += 1
    return events


def name_events(process: int, name: str, threads: Mapping[int, str]) -> list[Event]:
    """Return the metadata events that name a process and its threads; viewers show the threads in the order given."""
    events = [
        _metadata(process, 0, "process_name", {"name": name}),
        _metadata(process, 0, "process_sort_index", {"sort_index": process}),
    ]
    for place, (thread, thread_name) in enumerate(threads.items()):
        events.append(_metadata(process, thread, "thread_name", {"name": thread_name}))
        events.append(_metadata(process, thread, "thread_sort_index", {"sort_index": place}))
    return events


def _metadata(process: int, thread: int, name: str, arguments: dict[str, object]) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": name, "args": arguments}


def complete_event(
    place: tuple[int, int], name: str, category: str, times_us: tuple[float, float], arguments: Mapping[str, object]
) -> Event:
    """Return an event with start and end in microseconds, in a process and thread."""
    (process, thread), (start_us, end_us) = place, times_us
    event: Event = {"ph": "X", "pid": process, "tid": thread, "name": name, "cat": category}
    return event | {"ts": start_us, "dur": end_us - start_us, "args": dict(arguments)}


def _interval_event(process: int, interval: Interval) -> Event:
    times_us = (interval.start_us, interval.end_us)
    place = (process, interval.stream)
    return complete_event(place, interval.name, interval.kind, times_us, {"operation": interval.operation})
