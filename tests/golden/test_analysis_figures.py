"""Figures of `analyze_rank` against an independent reading: JSON alone, and a sweep over starts and ends.

Nothing here is shared with the product but the file. Communication is told by a few words in names, so only traces whose
collectives have no sums or staging copies of their own are compared.
"""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from counterpoint.analysis.rank import analyze_rank
from counterpoint.analysis.values import RankAnalysis
from counterpoint.traces.formats import read_activity

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "examples" / "traces").glob("*.json.gz"))
RECORDED = [ROOT / "tests" / "data" / "traces" / f"{name}.rank0.json.gz" for name in ("starve", "titan_tp_compile")]
GPU = ("kernel", "gpu_memcpy", "gpu_memset")
WITHIN = 0.001
PATHS = [*SHIPPED, *RECORDED]


def raw_events(path: Path) -> list[dict[str, Any]]:
    document = json.loads(gzip.decompress(path.read_bytes()))
    return [event for event in document["traceEvents"] if event.get("cat") in GPU]


def sweep(events: list[dict[str, Any]], begin: float, end: float) -> dict[str, float]:
    """Lengths of unions, by counting how many operations of each kind run between any two changes."""
    changes: list[tuple[float, int, str]] = []
    for event in events:
        start, stop = max(event["ts"], begin), min(event["ts"] + event["dur"], end)
        if start < stop:
            communicates = "nccl" in event["name"].lower() or "ptop" in event["name"].lower()
            kind = "communication" if communicates else "computation" if event["cat"] == "kernel" else "copy"
            changes += [(start, 1, kind), (stop, -1, kind)]
    running = dict.fromkeys(("communication", "computation", "copy"), 0)
    totals = dict.fromkeys((*running, "exposed", "busy"), 0.0)
    last = begin
    for time, change, kind in sorted(changes):
        for name, count in running.items():
            totals[name] += (time - last) if count else 0.0
        totals["exposed"] += (time - last) if running["communication"] and not running["computation"] else 0.0
        totals["busy"] += (time - last) if any(running.values()) else 0.0
        running[kind] += change
        last = time
    return totals


@pytest.fixture(scope="module", params=PATHS, ids=lambda path: path.name)
def read(request: pytest.FixtureRequest) -> tuple[RankAnalysis, list[dict[str, Any]], float]:
    events = raw_events(request.param)
    return analyze_rank(read_activity(request.param)), events, min(event["ts"] for event in events)


def test_every_step_is_as_in_the_raw_trace(read: tuple[RankAnalysis, list[dict[str, Any]], float]) -> None:
    analysis, events, origin = read
    assert analysis.steps
    for step in analysis.steps:
        raw = sweep(events, origin + step.start_us, origin + step.end_us)
        for name, found in (
            ("communication", step.communication_us),
            ("computation", step.computation_us),
            ("copy", step.copy_us),
            ("exposed", step.exposed_us),
            ("busy", step.makespan_us - step.idle_us),
        ):
            assert found == pytest.approx(raw[name], rel=WITHIN, abs=0.1), name


def test_the_steps_hold_the_whole_trace(read: tuple[RankAnalysis, list[dict[str, Any]], float]) -> None:
    analysis, events, origin = read
    raw = sweep(events, origin + analysis.steps[0].start_us, max(event["ts"] + event["dur"] for event in events))
    for name, found in (
        ("communication", sum(step.communication_us for step in analysis.steps)),
        ("exposed", sum(step.exposed_us for step in analysis.steps)),
    ):
        assert found == pytest.approx(raw[name], rel=WITHIN, abs=0.1), name


def test_each_exposed_moment_has_one_cause(read: tuple[RankAnalysis, list[dict[str, Any]], float]) -> None:
    analysis, _, _ = read
    for step in analysis.steps:
        intervals = [interval for interval in analysis.exposed if interval.step == step.step]
        assert sum(interval.duration_us for interval in intervals) == pytest.approx(step.exposed_us, abs=1e-6)
        assert all(interval.evidence for interval in intervals)
    ends = [(interval.start_us, interval.end_us) for interval in analysis.exposed]
    assert all(start < end for start, end in ends)
    assert all(before[1] <= after[0] for before, after in pairwise(ends))


def test_tables_add_up_to_the_steps(read: tuple[RankAnalysis, list[dict[str, Any]], float]) -> None:
    """The critical path covers a step, and a stream is idle for no more than it."""
    analysis, _, _ = read
    steady = [step for step in analysis.steps if step.is_steady]
    mean_us = sum(step.makespan_us for step in steady) / len(steady)
    assert sum(row.time_us for row in analysis.critical_path) == pytest.approx(mean_us, abs=1e-3)
    idle_us: dict[int, float] = {}
    for row in analysis.idle:
        idle_us[row.stream] = idle_us.get(row.stream, 0.0) + row.time_us
    assert all(0 < time_us <= mean_us for time_us in idle_us.values())
    assert analysis.operators
    assert {lane.stream for lane in analysis.lanes} <= set(idle_us)


def test_all_to_alls_are_named_on_the_computations_stream() -> None:
    analysis = analyze_rank(read_activity(ROOT / "examples" / "traces" / "moe.rank0.json.gz"))
    assert {each.collective for each in analysis.collectives} == {"all_to_all"}
    assert sum(each.exposed_us for each in analysis.collectives) == pytest.approx(
        sum(step.exposed_us for step in analysis.steps), abs=1e-6
    )
    assert all("stream 7" in interval.evidence for interval in analysis.exposed)


@pytest.mark.parametrize(("name", "kinds"), [("asynctp", {"all_gather", "reduce_scatter"}), ("ddp_dma", {"all_reduce"})])
def test_copies_between_gpus_are_joined_to_the_collective_they_carry(name: str, kinds: set[str]) -> None:
    analysis = analyze_rank(read_activity(ROOT / "tests" / "data" / "traces" / f"{name}.rank0.json.gz"))
    assert {each.transport for each in analysis.collectives} == {"copy_engine"}
    assert {each.collective for each in analysis.collectives} == kinds
    assert len(analysis.collectives) == {"asynctp": 24, "ddp_dma": 38}[name]
