"""Steps as the GPU ran them: their windows, which one is steady, and what ran in it."""

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from counterpoint import Simulator, load_machine
from counterpoint.metrics import measure
from counterpoint.plan import LEAVE_IT
from counterpoint.traces import read_trace
from counterpoint.traces.formats import read_activity
from counterpoint.traces.steady import divide_into_steps
from helpers.trace_builder import MATMUL, NCCL, TraceBuilder


def running_ahead() -> TraceBuilder:
    """Four steps of two matmuls of 40 us; each step's collective waits for nothing and runs a step ahead of its matmuls."""
    trace = TraceBuilder()
    for number in range(4):
        trace.step(10.0 * number, 10.0 * number + 10)
    for number in range(4):
        trace.collective(100.0 * number - 85 if number else 1, 60 if number else 3, host=10.0 * number + 1)
        for place in range(2):
            trace.kernel(MATMUL, 100.0 * number + 5 + 45 * place, 40, host=10.0 * number + 2 + place)
    return trace


def test_windows_follow_the_computation_when_the_host_and_a_side_stream_run_ahead(tmp_path: Path) -> None:
    trace = read_activity(running_ahead().write(tmp_path))
    windows = divide_into_steps(trace).windows
    assert windows == ((1, 105), (105, 205), (205, 305), (305, 405))  # the GPU is idle for 15 us before each new step


def test_what_runs_in_a_step_counts_whichever_step_launched_it(tmp_path: Path) -> None:
    result = read_trace(running_ahead().write(tmp_path))
    # The window from 105 to 205 holds the next step's collective from 115 to 175, of which 145 to 150 is exposed.
    rank = measure(result.timeline).ranks[0]
    assert (rank.makespan_us, rank.communication_us, rank.exposed_us) == (85, 60, 5)
    assert any("Streams run ahead of each other: 1 of the step's 3 operations" in note for note in result.notes)


def test_without_any_launch_steps_are_those_that_repeat_on_the_gpu(tmp_path: Path) -> None:
    """The annotations are the host's, which issued all steps before the GPU was done with the first."""
    trace = TraceBuilder()
    for number in range(4):
        trace.step(10.0 * number, 10.0 * number + 10)
        trace.kernel(MATMUL, 100.0 * number + 5, 40, host=10.0 * number + 2)
        trace.collective(100.0 * number + 50, 40, host=10.0 * number + 3)
    trace.events[:] = [event for event in trace.events if event["cat"] != "cuda_runtime"]
    found = divide_into_steps(read_activity(trace.write(tmp_path)))
    assert [len(step) for step in found.steps] == [2, 2, 2, 2]
    assert found.notes == ("The trace has no launches. Its steps are the 4 repetitions of a sequence of 2 operations.",)


@pytest.mark.parametrize("lost", ["second matmul", "collective"])
def test_an_operation_without_a_launch_keeps_its_place_on_its_stream_and_its_step(tmp_path: Path, lost: str) -> None:
    """The host issued all steps before the GPU was done with the first, so the time on the GPU tells no step."""
    trace = TraceBuilder()
    for number in range(4):
        trace.step(10.0 * number, 10.0 * number + 10)
        trace.kernel(MATMUL, 100.0 * number + 5, 40, host=10.0 * number + 2)
        trace.kernel("second", 100.0 * number + 50, 20, host=10.0 * number + 3)
        trace.collective(100.0 * number + 60, 20, host=10.0 * number + 4)
        trace.kernel("third", 100.0 * number + 82, 5, host=10.0 * number + 5)
    place = {"second matmul": 1, "collective": 2}[lost]
    calls = [event for event in trace.events if event["cat"] == "cuda_runtime"]
    for call in calls[place::4]:
        trace.events.remove(call)
    found = read_activity(trace.write(tmp_path))
    steps = divide_into_steps(found)
    names = [[found.operations[index].name[:5] for index in step] for step in steps.steps]
    assert names == [[MATMUL[:5], "secon", "ncclD", "third"]] * 4
    assert steps.notes == ("4 operations have no launch in the trace and were placed by their GPU order.",)


@pytest.mark.parametrize("num_steps", [2, 3])
def test_steps_are_alike_when_buckets_rotate_over_streams(tmp_path: Path, num_steps: int) -> None:
    trace = TraceBuilder()
    for number in range(num_steps):
        trace.step(1000.0 * number, 1000.0 * number + 900)
        trace.kernel(MATMUL, 1000.0 * number + 10, 50 + 5 * number, host=1000.0 * number + 1)
        trace.collective(1000.0 * number + 70, 20, host=1000.0 * number + 2, stream=19 + number)
    found = divide_into_steps(read_activity(trace.write(tmp_path)))
    # The first step of two finds the GPU idle, so the second is the steady one; of three the one with the median makespan.
    assert (len(found.steps), found.steady, found.notes) == (num_steps, 1, ())


def test_of_steps_that_all_differ_the_median_is_read_with_a_note(tmp_path: Path) -> None:
    trace = TraceBuilder()
    for number in range(3):
        trace.step(1000.0 * number, 1000.0 * number + 900)
        trace.kernel(f"step_{number}", 1000.0 * number + 10, (50, 300, 100)[number], host=1000.0 * number + 1)
    found = divide_into_steps(read_activity(trace.write(tmp_path)))
    assert (found.steady, found.notes) == (2, ("All 3 steps run different operations; the median one was read.",))


def with_idle_time(num_steps: int) -> TraceBuilder:
    """Steps of a matmul of 300 us and an all-reduce of 100 us, then 600 us without work, as where a data loader is slow."""
    trace = TraceBuilder()
    for number in range(num_steps):
        trace.step(1000.0 * number, 1000.0 * number + 990)
        trace.kernel(MATMUL, 1000.0 * number + 100, 300, host=1000.0 * number + 1)
        trace.collective(1000.0 * number + 400, 100, host=1000.0 * number + 2)
    return trace


@pytest.mark.parametrize(("num_steps", "last_us"), [(3, 1000), (2, 1000), (1, 400)])
def test_the_last_step_has_the_idle_time_that_the_others_have_at_their_end(
    tmp_path: Path, num_steps: int, last_us: float
) -> None:
    path = with_idle_time(num_steps).write(tmp_path)
    assert [end - start for start, end in divide_into_steps(read_activity(path)).windows][-1] == last_us
    notes = " ".join(read_trace(path).notes)
    assert ("A step takes 1 ms. Makespans leave out the last 600 us of it" in notes) == (num_steps > 1)


def test_idle_time_after_the_last_step_ends_with_the_next_operation(tmp_path: Path) -> None:
    trace = with_idle_time(3)
    trace.kernel("afterwards", 2550, 10, host=2995)
    assert divide_into_steps(read_activity(trace.write(tmp_path))).windows[-1] == (2100, 2550)


def accumulating(pattern: str, collectives: dict[str, int]) -> TraceBuilder:
    """A profiled step of a matmul of 100 us for each letter, with as many all-reduces of 50 us, all on one clock."""
    trace = TraceBuilder()
    begin = 0.0
    for letter in pattern:
        trace.step(begin, begin + 99)
        trace.kernel(MATMUL, begin + 10, 100, host=begin + 1)
        for place in range(collectives[letter]):
            trace.collective(begin + 110 + 50 * place, 50, host=begin + 2 + place)
        begin += 110 + 50 * collectives[letter]
    return trace


@pytest.mark.parametrize(
    ("pattern", "collectives", "joined"),
    [
        ("aaabaaab", {"a": 0, "b": 1}, ["aaab", "aaab"]),
        ("abaaabaaab", {"a": 0, "b": 1}, ["aaab", "aaab"]),
        ("abaaabaa", {"a": 0, "b": 1}, ["abaa", "abaa"]),
        ("baaab", {"a": 0, "b": 1}, ["aaab"]),
        ("aaaba", {"a": 0, "b": 1}, ["aaab"]),
        ("ab", {"a": 0, "b": 1}, ["ab"]),
        ("abab", {"a": 2, "b": 3}, ["ab", "ab"]),
        ("aba", {"a": 2, "b": 3}, ["a", "b", "a"]),
        ("a" * 9 + "b" + "a" * 9 + "b", {"a": 6, "b": 7}, ["a"] * 9 + ["b"] + ["a"] * 9 + ["b"]),
        ("aaaaa", {"a": 2}, ["a"] * 5),
    ],
)
def test_micro_batches_count_as_one_step_where_only_some_communicate(
    tmp_path: Path, pattern: str, collectives: dict[str, int], joined: list[str]
) -> None:
    found = read_activity(accumulating(pattern, collectives).write(tmp_path))
    steps = divide_into_steps(found)
    counts = [Counter(found.operations[index].name for index in step) for step in steps.steps]
    assert [(count[MATMUL], count[NCCL]) for count in counts] == [
        (len(letters), sum(collectives[letter] for letter in letters)) for letters in joined
    ]
    assert any("count as one step" in note for note in steps.notes) == (max(map(len, joined)) > 1)


@pytest.mark.parametrize(("head", "num_steps"), [("head", 1), ("layer", 8)])
def test_what_repeats_is_a_layer_and_no_step_where_other_computation_follows(
    tmp_path: Path, head: str, num_steps: int
) -> None:
    trace = TraceBuilder()
    for place, name in enumerate(["embedding", *(["attention", "layer"] * 8), head]):
        trace.kernel(name, 10 + 10.0 * place, 8)
    steps = divide_into_steps(read_activity(trace.write(tmp_path)))
    assert len(steps.steps) == num_steps
    assert any("so it may be a layer" in note for note in steps.notes) == (num_steps == 1)


@pytest.mark.parametrize(
    ("num_before", "is_forward", "num_steps", "is_noted"),
    [(8, True, 1, False), (7, True, 8, True), (8, False, 8, False), (1, True, 8, False)],
)
def test_what_repeats_is_a_layer_where_another_sequence_repeats_as_often_before_it(
    tmp_path: Path, num_before: int, is_forward: bool, num_steps: int, is_noted: bool
) -> None:
    """Before the repetitions comes a forward pass of other kernels, or a warm-up of their own kernels in another order."""
    before = ["forward attention", "forward layer"] if is_forward else ["layer", "attention"]
    backward = ["loss", "attention", "layer", "weights"]
    trace = TraceBuilder()
    for place, name in enumerate(["embedding", *before * num_before, *backward * 8]):
        trace.kernel(name, 10 + 10.0 * place, 8)
    steps = divide_into_steps(read_activity(trace.write(tmp_path)))
    assert len(steps.steps) == num_steps
    assert any("another one of 2 repeats as often before it, so it may be a layer" in note for note in steps.notes) == (
        num_steps == 1
    )
    note = "Other computation before the repetitions takes 120 us, 31.9 % of all. It may be a warm-up."
    assert any(each.startswith(note) for each in steps.notes) == is_noted


@pytest.mark.parametrize(("busy_us", "steady"), [((120, 100, 99, 101, 300, 400, 500), 1), ((120, 100, 400), 0)])
def test_the_step_to_plan_for_is_a_steady_one_where_there_are_enough(
    tmp_path: Path, busy_us: tuple[float, ...], steady: int
) -> None:
    """The median makespan is that of the first step, which is not steady where there are three or more."""
    trace, begin = TraceBuilder(), 0.0
    for each_us in busy_us:
        trace.step(begin, begin + 99)
        trace.kernel(MATMUL, begin + 10, each_us, host=begin + 1)
        begin += each_us
    assert divide_into_steps(read_activity(trace.write(tmp_path))).steady == steady


def test_what_was_issued_before_recording_began_is_in_no_step(tmp_path: Path) -> None:
    trace = TraceBuilder()
    for number in range(3):  # the host runs so far ahead that the GPU is still busy with an earlier step
        trace.step(100.0 * number, 100.0 * number + 90)
    trace.kernel(MATMUL, 50, 30)
    trace.kernel(MATMUL, 150, 30)
    left_over = {trace.correlation, trace.correlation - 1}
    trace.events[:] = [
        each for each in trace.events if each["cat"] != "cuda_runtime" or each["args"]["correlation"] not in left_over
    ]
    for number in range(3):
        trace.kernel(MATMUL, 1000.0 + 50 * number, 40, host=100.0 * number + 5)
    found = divide_into_steps(read_activity(trace.write(tmp_path)))
    assert [len(step) for step in found.steps] == [1, 1, 1]
    assert found.notes == ("2 operations were issued before recording began and were left out.",)


PERSISTENT = {"grid": [132, 1, 1], "block": [384, 1, 1], "registers per thread": 168, "shared memory": 213188}
BARRIER = {"grid": [1, 1, 1], "block": [32, 1, 1], "registers per thread": 32}


def persistent_pair(barrier_us: float) -> TraceBuilder:
    """Two persistent matmuls on two streams, the second at the tail of the first; a barrier on a third stream."""
    trace = TraceBuilder()
    trace.step(0, 90)
    trace.kernel("spin", 100, 10, host=1)
    trace.kernel(MATMUL, 110, 700, host=2, args=PERSISTENT)
    trace.kernel(MATMUL, 710, 800, host=3, stream=23, args=PERSISTENT)
    trace.kernel("barrier_kernel", barrier_us, 5, host=4, stream=19, args=BARRIER)
    return trace


def test_a_persistent_kernel_at_the_tail_of_another_takes_its_time_from_that_ones_end(tmp_path: Path) -> None:
    step = read_trace(persistent_pair(400).write(tmp_path)).step
    assert [operation.lone_us for operation in step.operations] == [10, 700, 700, 5]


@pytest.mark.parametrize(("barrier_us", "fits"), [(400, True), (1515, False)])
def test_what_started_in_the_middle_of_a_persistent_kernel_fits_beside_it(
    tmp_path: Path, barrier_us: float, fits: bool
) -> None:
    result = read_trace(persistent_pair(barrier_us).write(tmp_path))
    assert result.step.fits_beside == (((1, 3),) if fits else ())
    waiting = msgspec.structs.replace(result.step.operations[3], issued_us=300.0)
    step = msgspec.structs.replace(result.step, operations=(*result.step.operations[:3], waiting))
    replayed = {each.operation: each for each in Simulator().run(step, load_machine("h200"), LEAVE_IT).intervals}
    assert (replayed[3].start_us < replayed[1].end_us) == fits
