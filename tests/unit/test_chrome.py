"""The written trace against the Trace Event Format's requirements."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from counterpoint.errors import TraceError
from counterpoint.timeline import Interval, Timeline
from counterpoint.traces import read_trace
from counterpoint.traces.chrome import write_chrome_trace
from helpers.trace_builder import small_trace


def timeline(*, origin: str = "measured", ranks: tuple[int, ...] = (0, 1)) -> Timeline:
    intervals = [
        Interval(rank=rank, stream=7 + i, operation=i, name=f"op{i}", kind=kind, start_us=10.0 * i, end_us=10.0 * i + 25)
        for rank in ranks
        for i, kind in enumerate(("computation", "communication", "copy"))
    ]
    return Timeline(step_name="step", origin=origin, intervals=tuple(intervals))


def events(path: Path) -> list[dict[str, Any]]:
    raw = path.read_bytes()
    document = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    found: list[dict[str, Any]] = document["traceEvents"]
    return found


def test_every_interval_becomes_one_complete_event(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_chrome_trace(path, {"as it is": timeline()})
    complete = [event for event in events(path) if event["ph"] == "X"]
    assert [(e["name"], e["cat"], e["tid"], e["ts"], e["dur"]) for e in complete[:3]] == [
        ("op0", "computation", 7, 0, 25),
        ("op1", "communication", 8, 10, 25),
        ("op2", "copy", 9, 20, 25),
    ]
    assert len(complete) == 6


def test_each_timeline_and_rank_is_a_process_of_its_own_with_a_name(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_chrome_trace(path, {"as it is": timeline(), "planned": timeline(origin="simulated", ranks=(3,))})
    names = {e["pid"]: e["args"]["name"] for e in events(path) if e["name"] == "process_name"}
    assert names == {0: "as it is, rank 0 (measured)", 1: "as it is, rank 1 (measured)", 2: "planned, rank 3 (simulated)"}
    assert {e["pid"] for e in events(path)} == {0, 1, 2}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events(path) if e["name"] == "thread_name"}
    assert threads[2, 9] == "stream 9"


def test_a_compressed_trace_holds_the_same_and_is_reproducible(tmp_path: Path) -> None:
    plain, packed, again = tmp_path / "a.json", tmp_path / "a.json.gz", tmp_path / "b.json.gz"
    for path in (plain, packed, again):
        write_chrome_trace(path, {"x": timeline()})
    assert events(plain) == events(packed)
    assert packed.read_bytes() == again.read_bytes()


def test_a_read_trace_can_be_written(tmp_path: Path) -> None:
    result = read_trace(small_trace().write(tmp_path))
    write_chrome_trace(tmp_path / "out.json", {"small": result.timeline})
    assert sum(event["ph"] == "X" for event in events(tmp_path / "out.json")) == 6


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    for path, timelines in [
        (tmp_path / "out.txt", {"x": timeline()}),
        (tmp_path / "out.json", {}),
        (tmp_path / "none" / "out.json", {"x": timeline()}),
    ]:
        with pytest.raises(TraceError) as caught:
            write_chrome_trace(path, timelines)
        assert "\n" not in str(caught.value)
