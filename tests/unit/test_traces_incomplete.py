"""Traces as profilers leave them: without kernels that they lost, with times in whole microseconds, without a GPU's name."""

from pathlib import Path
from typing import Any

import pytest

from counterpoint.analysis.rank import analyze_rank
from counterpoint.errors import TraceError
from counterpoint.job import load_job
from counterpoint.plan import Plan
from counterpoint.sim.simulator import Simulator
from counterpoint.traces.formats import read_activity
from counterpoint.traces.traced_step import read_trace
from helpers.trace_builder import MATMUL, TraceBuilder

MI300X = {
    "name": "AMD Instinct MI300X",
    "computeMajor": 9,
    "numSms": 304,
    "warpSize": 64,
    "totalGlobalMem": 206_141_652_992,
}


def test_idle_time_before_an_operation_that_was_launched_long_before_is_kept(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 30_000)
    trace.kernel(MATMUL, 1000, 1000, host=1)
    trace.kernel(MATMUL, 2002, 1000, host=2)
    trace.kernel(MATMUL, 13_002, 1000, host=3)  # after 10 ms of which the trace holds nothing
    path = trace.write(tmp_path)
    traced = read_trace(path)
    assert [(each.issued_us, each.issued_after) for each in traced.step.operations] == [(None, None)] * 2 + [(10_000, 1)]
    (note,) = [note for note in traced.notes if "seems to lack" in note]
    assert note.startswith("The GPU is idle for 10 ms before 1 operation that was launched long before")
    job = load_job(str(path))
    timeline = Simulator().run(job.step, job.machine, Plan())
    assert max(interval.end_us for interval in timeline.intervals) == pytest.approx(13_002, abs=5)


def test_idle_time_in_which_another_step_runs_is_not_missing(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 100)
    trace.kernel(MATMUL, 1000, 1000, host=1)
    trace.kernel(MATMUL, 13_002, 1000, host=2)
    trace.step(100, 200)
    trace.kernel(MATMUL, 2002, 10_990, host=101, stream=9)
    trace.kernel(MATMUL, 14_002, 1000, host=102)
    assert not any("seems to lack" in note for note in read_trace(trace.write(tmp_path)).notes)


def test_few_long_collectives_do_not_tell_the_launch_gap(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 40_000)
    for number in range(40):
        trace.kernel(MATMUL, 5000 + 22.0 * number, 20, host=float(number))
    for number in range(3):
        trace.collective(5010 + 1017.0 * number, 1000, host=41.0 + number)
    assert read_trace(trace.write(tmp_path)).step.launch_gap_us == pytest.approx(2)


def test_a_trace_with_few_contradictions_is_read_and_says_so(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 100_000)
    for number in range(1500):
        early_us = 2.0 if number == 700 else 0.0
        trace.kernel(MATMUL, 5000 + 22.0 * number - early_us, 22 - early_us, host=float(number))
    path = trace.write(tmp_path)
    said = "1 operation starts before the predecessor on the stream has ended, by 2 us at most"
    assert any(note.startswith(said) for note in read_trace(path).notes)
    analysis = analyze_rank(read_activity(path))
    assert not analysis.untrusted
    assert any(note.startswith(said) for note in analysis.notes)
    for number in (800, 900):
        kernel = [event for event in trace.events if event["cat"] == "kernel"][number]
        kernel["ts"] -= 2
    with pytest.raises(TraceError, match="3 operations overlap their predecessor"):
        read_trace(trace.write(tmp_path))


@pytest.mark.parametrize(
    ("devices", "name"),
    [
        ([MI300X | {"id": 0}], "AMD Instinct MI300X"),  # the profiler also numbers processors
        ([MI300X | {"id": number, "name": ""} for number in range(8)], "AMD Instinct MI300X"),
        ([MI300X | {"id": 2, "name": "", "numSms": 64}], None),
        ([MI300X | {"id": 2, "name": "", "totalGlobalMem": None}], None),
        ([MI300X | {"id": 0}, MI300X | {"id": 1, "name": "AMD Instinct MI210"}], None),
        ([MI300X | {"id": 2, "name": "AMD Instinct MI300X VF"}], "AMD Instinct MI300X VF"),
    ],
)
def test_the_gpu_of_an_amd_trace_is_found(devices: list[dict[str, Any]], name: str | None, tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.document["deviceProperties"] = devices
    trace.step(0, 1000)
    trace.kernel("Cijk_Ailk_Bljk_BBS_BH_MT256x256x64", 10, 50, host=1, call="hipLaunchKernel", args={"device": 2})
    path = trace.write(tmp_path)
    assert read_trace(path).step.device_name == name
    if name:
        assert load_job(str(path)).machine.name == "mi300x"
