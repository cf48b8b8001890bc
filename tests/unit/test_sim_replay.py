"""A plan counts only as far as the replay is right: verdicts of traced steps by makespan, exposed time and overlap."""

from io import StringIO
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from counterpoint.job import Job, load_job
from counterpoint.machine import load_machine
from counterpoint.measurement.values import LEAST_SIMULATED_GAIN
from counterpoint.metrics import measure
from counterpoint.plan import LEAVE_IT, load_plan, save_plan
from counterpoint.planner import tune
from counterpoint.report.summary import summarize_simulation, summarize_tuning
from counterpoint.report.text import print_step
from counterpoint.sim import Simulator
from counterpoint.sim.replay import ReplayAccuracy, compare_replay
from counterpoint.step import Collective, Dependency, Footprint, Kernel, Step
from counterpoint.timeline import Interval, Timeline

ROOT = Path(__file__).parents[2]
RECORDED = sorted((ROOT / "tests" / "data" / "traces").glob("*.json.gz"))
SHIPPED = sorted((ROOT / "examples" / "traces").glob("*.json.gz"))


def timeline(*spans: tuple[str, float, float], scale: float = 1.0) -> Timeline:
    intervals = [
        Interval(rank=0, stream=place, operation=place, name=kind, kind=kind, start_us=scale * start, end_us=scale * end)
        for place, (kind, start, end) in enumerate(spans)
    ]
    return Timeline(step_name="made up", origin="measured", intervals=tuple(intervals))


def test_a_replay_that_hits_the_makespan_can_miss_what_is_exposed() -> None:
    traced = timeline(("computation", 0, 100), ("communication", 40, 60))
    replayed = timeline(("computation", 0, 80), ("communication", 80, 100))
    found = compare_replay(traced, replayed)
    assert (found.makespan_error, found.exposed_difference, found.overlap_difference) == (0, 0.2, -1)
    assert found.error == 0.2
    assert "exposed +20.0 % of the makespan, overlap -100.0 points" in found.why_unknown(0.5)


@pytest.mark.parametrize(
    ("replay", "gain", "is_unknown"),
    [
        (ReplayAccuracy(makespan_error=0.02, exposed_difference=0.0), 0.03, False),
        (ReplayAccuracy(makespan_error=-0.02, exposed_difference=0.0), 0.015, True),
        (ReplayAccuracy(makespan_error=0.0, exposed_difference=0.02), 0.015, True),
        (ReplayAccuracy(makespan_error=0.02, exposed_difference=0.0), 0.0, False),
        (ReplayAccuracy(makespan_error=0.06, exposed_difference=0.0), 0.2, True),
        (ReplayAccuracy(makespan_error=0.0, exposed_difference=0.0, overlap_difference=-0.2), 0.2, True),
    ],
)
def test_a_gain_counts_where_it_exceeds_the_error_of_a_replay_that_is_right_enough(
    replay: ReplayAccuracy, gain: float, is_unknown: bool
) -> None:
    assert bool(replay.why_unknown(gain)) == is_unknown


@pytest.mark.parametrize(("stretch", "verdict"), [(1.0, "GAIN"), (0.97, "UNKNOWN"), (0.5, "UNKNOWN")])
def test_no_plan_is_a_gain_that_is_slower_than_the_traced_step(tmp_path: Path, stretch: float, verdict: str) -> None:
    job = load_job(str(ROOT / "examples" / "traces" / "moe.rank0.json.gz"))
    simulated = Simulator().run(job.step, job.machine, LEAVE_IT)
    spans = [(each.kind, each.start_us, each.end_us) for each in simulated.intervals]
    traced = timeline(*spans, scale=stretch)
    tuning = tune(job.step, job.machine, traced=traced)
    plan = tuning.plan
    assert plan.verdict == verdict
    assert bool(plan.directives) == (verdict == "GAIN")
    if verdict == "GAIN":
        assert plan.expectation is not None
        assert plan.expectation.planned_us < measure(traced).makespan_us
    else:
        assert "the replay differs from the trace" in plan.summary
        assert "measure the best candidate (overlap with matmuls" in plan.summary
    save_plan(plan, tmp_path / "plan.toml")
    assert load_plan(tmp_path / "plan.toml").verdict == verdict


@pytest.mark.parametrize("stretch", [1.0, 1.1])  # to more than the sum of stand-alone times, as where the host is late
def test_the_possible_gain_of_a_traced_job_begins_at_the_traced_time(stretch: float) -> None:
    job = load_job(str(ROOT / "examples" / "traces" / "moe.rank0.json.gz"))
    assert job.traced is not None
    spans = [(each.kind, each.start_us, each.end_us) for each in job.traced.timeline.intervals]
    traced = timeline(*spans, scale=stretch)
    tuning = tune(job.step, job.machine)
    summary = summarize_tuning(replace(job, traced=replace(job.traced, timeline=traced)), tuning)
    rows = {row.name: row.makespan_us for row in summary.step}
    share = (rows["as traced"] - rows["with the plan"]) / (rows["as traced"] - rows["ideal in pieces"])
    planned = next(row for row in summary.step if row.name == "with the plan")
    assert planned.remark == f"{100 * share:.1f} % of the possible gain"


@pytest.mark.parametrize(
    ("waits_for", "remark"),
    [
        ((), " % of the possible gain"),
        ((Dependency(operation=0),), "no share: above sequential, which has no launch gaps"),
    ],
)
def test_a_described_step_has_a_share_only_of_a_gain_that_it_is_within(
    waits_for: tuple[Dependency, ...], remark: str
) -> None:
    footprint = Footprint(num_ctas=132, threads_per_cta=128, registers_per_thread=64)
    operations = (
        Collective(name="c", stream=0, collective="all_reduce", num_bytes=1 << 12, group_size=2, lone_us=40.0),
        Kernel(name="k", stream=1, footprint=footprint, lone_us=40.0, waits_for=waits_for),
    )
    job = Job(step=Step(name="described", num_ranks=2, operations=operations), machine=load_machine("h200"))
    rows = summarize_simulation(job, Simulator().run(job.step, job.machine, LEAVE_IT)).step
    assert next(row.remark for row in rows if row.name == "simulated").endswith(remark)


@pytest.mark.parametrize("path", [*SHIPPED, *RECORDED], ids=lambda path: path.name.split(".json")[0])
def test_replays_are_right_to_five_percent_and_gains_exceed_their_error(path: Path) -> None:
    job: Job = load_job(str(path))
    assert job.traced is not None
    tuning = tune(job.step, job.machine, traced=job.traced.timeline)
    summary = summarize_tuning(job, tuning)
    assert summary.replay is not None
    assert summary.replay.error < 0.05
    if tuning.plan.verdict == "GAIN":
        gain = 1 - tuning.plan.expectation.planned_us / tuning.plan.expectation.baseline_us
        assert gain >= max(LEAST_SIMULATED_GAIN, summary.replay.error)
    ideal = next(row for row in summary.step if row.name == "ideal")
    assert ideal.makespan_us <= measure(job.traced.timeline).makespan_us


@pytest.mark.parametrize(
    ("name", "measured_ms"), [("titan_tp_compile", 117.3 - 109.9), ("transformers_tp_compile", 90.1 - 84.7)]
)
def test_the_gain_of_overlapped_matmuls_is_predicted_within_thirty_percent(name: str, measured_ms: float) -> None:
    """Measured with the two lines and without the profiler (docs/planner.md)."""
    job = load_job(str(ROOT / "tests" / "data" / "traces" / f"{name}.rank0.json.gz"))
    assert job.traced is not None
    expected = tune(job.step, job.machine, traced=job.traced.timeline).plan.expectation
    assert expected is not None
    assert (expected.baseline_us - expected.planned_us) / 1000 == pytest.approx(measured_ms, rel=0.3)


def test_peer_to_peer_copies_are_told_beside_collectives() -> None:
    done = StringIO()
    job = load_job(str(ROOT / "tests" / "data" / "traces" / "ddp_dma.rank0.json.gz"))
    print_step(Console(file=done, width=200), job.step, job.machine)
    assert "114 peer-to-peer copies of 3.375 GiB, 239 copies and fills" in done.getvalue()
