"""Dependencies where the profiler shows waits, but not of which streams: orders of calls as jobs have them, and shipped
traces without their synchronization events.
"""

from functools import cache
from pathlib import Path

import pytest

from counterpoint import Simulator, load_machine, tune
from counterpoint.metrics import measure
from counterpoint.sim.replay import compare_replay
from counterpoint.traces import read_trace
from counterpoint.traces.activity import ActivityTrace
from counterpoint.traces.dependencies import Dependencies, find_dependencies
from counterpoint.traces.formats import read_activity
from helpers.trace_builder import ELEMENTWISE, MATMUL, TraceBuilder, without

EXAMPLES = Path(__file__).parents[2] / "examples" / "traces"
DATA = Path(__file__).parents[1] / "data" / "traces"
WAIT, PLAIN = "cudaStreamWaitEvent", "cudaEventRecord"


def trace_of() -> TraceBuilder:
    trace = TraceBuilder()
    trace.step(0, 5000)
    trace.kernel(MATMUL, 10, 100, host=1)
    trace.record(2)
    return trace


def edges(trace: TraceBuilder, folder: Path) -> list[tuple[int, int]]:
    found = find_dependencies(read_activity(trace.write(folder)))
    assert not found.are_from_times
    assert {each.origin for each in found.edges} <= {"inferred"}
    return [(each.consumer, each.producer) for each in found.edges]


def test_streams_that_part_wait_for_what_came_before_and_are_waited_for_where_they_meet(tmp_path: Path) -> None:
    trace = trace_of()
    for number in range(2):
        trace.call(WAIT, 3 + number)
    for number in range(4):
        trace.kernel(MATMUL, 112 + 50 * number, 45, host=10 + number, stream=20 + number % 2)
    for number in range(2):
        trace.record(20 + number)
    for number in range(2):
        trace.call(WAIT, 30 + number)
    trace.kernel(ELEMENTWISE, 320, 10, host=40)
    assert edges(trace, tmp_path) == [(1, 0), (2, 0), (5, 3), (5, 4)]


@pytest.mark.parametrize("are_plain", [False, True])
def test_a_collective_waits_for_its_input_and_computation_that_goes_on_for_nothing(tmp_path: Path, are_plain: bool) -> None:
    """Also where all records are plain, as in traces of earlier releases of torch."""
    trace = trace_of()
    trace.call(WAIT, 3)
    for host, name in ((4.0, PLAIN), (5.0, WAIT)):  # NCCL's own
        trace.call(name, host)
    trace.collective(112, 30, host=6)
    for host, name in ((7.0, PLAIN), (8.0, WAIT)):  # NCCL's own
        trace.call(name, host)
    trace.record(9)
    trace.kernel(MATMUL, 200, 100, host=11)
    trace.record(12)
    trace.kernel(ELEMENTWISE, 310, 10, host=13)
    trace.call(WAIT, 14)
    trace.kernel(ELEMENTWISE, 330, 10, host=15)
    for each in trace.events if are_plain else ():
        each["name"] = each["name"].removesuffix("WithFlags")
    assert edges(trace, tmp_path) == [(1, 0), (4, 1)]


def test_of_earlier_operations_the_one_that_ended_last_is_waited_for(tmp_path: Path) -> None:
    trace = trace_of()
    for number, stream in enumerate((19, 20, 21)):
        trace.call(WAIT, 20 + 10 * number)
        trace.collective((112, 160, 400)[number], 40, host=21 + 10 * number, stream=stream)
        trace.record(22 + 10 * number)
        trace.kernel(MATMUL, 112 + 50 * number, 45, host=23 + 10 * number)
    for number in range(3):
        trace.call(WAIT, 70 + 10 * number)
        trace.kernel(ELEMENTWISE, (262, 300, 445)[number], 10, host=71 + 10 * number)
    assert edges(trace, tmp_path) == [(1, 0), (3, 2), (5, 4), (8, 3), (9, 5)]  # the third was not over when 7 and 8 began


def test_a_wait_directly_after_its_record_is_for_another_stream(tmp_path: Path) -> None:
    trace = trace_of()
    trace.call(WAIT, 3)
    trace.kernel(ELEMENTWISE, 112, 10, host=4)
    trace.kernel(MATMUL, 130, 50, host=5, stream=23)
    trace.kernel(ELEMENTWISE, 140, 10, host=6)
    assert edges(trace, tmp_path) == [(2, 0)]


def test_times_decide_where_launches_are_lost(tmp_path: Path) -> None:
    trace = trace_of()
    trace.call(WAIT, 3)
    trace.collective(112, 30, host=6)
    trace.kernel(MATMUL, 200, 100, host=11)
    launch = next(each for each in trace.events if each["cat"] == "cuda_runtime")
    trace.events.remove(launch)
    assert find_dependencies(read_activity(trace.write(tmp_path))).are_from_times


@cache
def stated_in(path: Path) -> ActivityTrace:
    return read_activity(path)


def without_sync_events(path: Path, folder: Path, *, are_plain: bool = False) -> Path:
    stripped = without(path, folder, lambda event: event.get("cat") == "cuda_sync")
    if are_plain:
        stripped.write_text(stripped.read_text().replace("EventRecordWithFlags", "EventRecord"))
    return stripped


def awaited(trace: ActivityTrace, dependencies: Dependencies) -> list[dict[int, int]]:
    """For each operation and each stream, the last operation that it waits for, directly or not."""
    producers: dict[int, list[int]] = {}
    for each in dependencies.edges:
        producers.setdefault(each.consumer, []).append(each.producer)
    found: list[dict[int, int]] = []
    last: dict[int, int] = {}
    for number, operation in enumerate(trace.operations):
        known: dict[int, int] = {}
        stream = operation.arguments.stream
        for producer in [*([last[stream]] if stream in last else []), *producers.get(number, [])]:
            reached = found[producer] | {trace.operations[producer].arguments.stream: producer}
            known |= {each: max(place, known.get(each, -1)) for each, place in reached.items()}
        found.append(known)
        last[stream] = number
    return found


@pytest.mark.parametrize("are_plain", [False, True])
@pytest.mark.parametrize(
    ("path", "most_missed"),
    [
        (EXAMPLES / "ddp.rank0.json.gz", 0),
        (EXAMPLES / "fsdp2.rank0.json.gz", 30),
        (EXAMPLES / "tp.rank0.json.gz", 0),
        (DATA / "asynctp.rank0.json.gz", 0),
        (DATA / "starve.rank0.json.gz", 0),
    ],
    ids=lambda value: value.name.split(".")[0] if isinstance(value, Path) else None,
)
def test_a_trace_without_synchronization_events_has_the_dependencies_that_they_state(
    tmp_path: Path, path: Path, most_missed: int, are_plain: bool
) -> None:
    stated, inferred = stated_in(path), read_activity(without_sync_events(path, tmp_path, are_plain=are_plain))
    wanted, found = find_dependencies(stated), find_dependencies(inferred)
    assert not found.are_from_times
    streams = [each.arguments.stream for each in stated.operations]
    known, told = awaited(inferred, found), awaited(stated, wanted)
    missed = [each for each in wanted.edges if known[each.consumer].get(streams[each.producer], -1) < each.producer]
    extra = [each for each in found.edges if told[each.consumer].get(streams[each.producer], -1) < each.producer]
    assert len(missed) <= most_missed, missed
    assert len(extra) <= most_missed / 2, extra


def test_fully_sharded_steps_are_replayed_alike_with_and_without_synchronization_events(tmp_path: Path) -> None:
    path = EXAMPLES / "fsdp2.rank0.json.gz"
    machine = load_machine("h200")
    plans = []
    for each in (path, without_sync_events(path, tmp_path)):
        traced = read_trace(each)
        tuning = tune(traced.step, machine, Simulator(), traced=traced.timeline)
        plans.append((tuning.plan.verdict, measure(tuning.baseline).makespan_us, measure(tuning.planned).makespan_us))
        replay = compare_replay(traced.timeline, tuning.baseline)
        assert not replay.why_unusable()
    (verdict, *stated_us), (other_verdict, *inferred_us) = plans
    assert verdict == other_verdict == "GAIN"
    assert inferred_us == pytest.approx(stated_us, rel=0.003)


@pytest.mark.parametrize("rank", [0, 1])
def test_experts_on_four_streams_of_megatron_lms_script_are_replayed_and_planned(rank: int) -> None:
    """Without the script's order of calls, rank 0's replay was 5.7 % short, with 16 points too much overlap. Measured in the
    same job, the operators took 14.6 % off a profiled step, and 8 % off others.
    """
    traced = read_trace(DATA / f"megatron_moe.rank{rank}.json.gz")
    tuning = tune(traced.step, load_machine("h200"), Simulator(), traced=traced.timeline)
    replay = compare_replay(traced.timeline, tuning.baseline)
    assert abs(replay.makespan_error) < 0.03
    assert abs(replay.exposed_difference) < 0.01
    assert tuning.plan.verdict == "GAIN"
    assert {control.tag for each in tuning.plan.directives for control in each.controls} == {"overlap_matmul"}
    gain = 1 - measure(tuning.planned).makespan_us / measure(tuning.baseline).makespan_us
    assert 0.03 < gain < 0.146
