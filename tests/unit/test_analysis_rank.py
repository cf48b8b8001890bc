"""`analyze_rank` on tiny traces: what it reports besides causes, and what it says of traces that do not tell everything."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from counterpoint.analysis.combine import combine
from counterpoint.analysis.lanes import draw_lanes
from counterpoint.analysis.rank import analyze_rank
from counterpoint.analysis.roles import find_roles
from counterpoint.analysis.timed import time_trace
from counterpoint.analysis.values import RankAnalysis
from counterpoint.kernel_names import short_name
from counterpoint.traces.formats import read_activity
from counterpoint.traces.steady import steady_steps
from helpers.trace_builder import ELEMENTWISE, MATMUL, TraceBuilder, small_trace

BARRIER = "c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)"
PEER = "Memcpy PtoP (Device -> Device)"
LOCAL = "Memcpy DtoD (Device -> Device)"


def analyze(trace: TraceBuilder, folder: Path) -> RankAnalysis:
    return analyze_rank(read_activity(trace.write(folder)))


def test_a_trace_without_communication_says_so(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 1000)
    trace.kernel(MATMUL, 100, 50)
    analysis = analyze(trace, tmp_path)
    assert "The trace holds no communication." in analysis.notes
    assert (analysis.collectives, analysis.exposed) == ((), ())
    assert analysis.steps[0].overlap_ratio is None


def test_a_trace_of_communication_alone_is_all_tail_or_waiting(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.collective(100, 50)
    analysis = analyze(trace, tmp_path)
    assert [interval.cause for interval in analysis.exposed] == ["tail"]
    assert analysis.steps[0].exposed_us == 50


def test_a_step_annotation_that_holds_nothing_is_a_problem_not_an_error(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(50_000, 51_000)
    trace.kernel(MATMUL, 100, 50)
    trace.collective(120, 60)
    analysis = analyze(trace, tmp_path)
    assert any("whole trace counts as one step" in problem for problem in analysis.problems)
    assert analysis.steps[0].communication_us == 60
    assert analysis.steps[0].exposed_us == 30


@pytest.mark.parametrize(("change", "words"), [("launch", "no launch in the trace"), ("early", "before the launch")])
def test_lost_and_impossible_launches_are_named_and_change_no_union(change: str, words: str, tmp_path: Path) -> None:
    whole, broken = small_trace(), small_trace()
    if change == "launch":
        broken.events[:] = [event for event in broken.events if event["name"] != "cudaLaunchKernel"]
    else:
        for event in broken.events:
            event["ts"] += 400 if event["name"] == "cudaLaunchKernel" else 0
    (tmp_path / "whole").mkdir()
    sound, found = analyze(whole, tmp_path / "whole"), analyze(broken, tmp_path)
    assert any(words in problem for problem in found.problems)
    assert not any(words in problem for problem in sound.problems)
    total = [sum(step.exposed_us for step in each.steps) for each in (sound, found)]
    assert total[0] == pytest.approx(total[1])
    assert sum(interval.duration_us for interval in found.exposed) == pytest.approx(total[1])


def test_kernels_without_a_grid_leave_unknown_what_waited_for_sms(tmp_path: Path) -> None:
    trace = small_trace()
    assert not any("no grid" in problem for problem in analyze(trace, tmp_path).problems)
    for event in trace.events:
        event.get("args", {}).pop("grid", None)
    assert any("no grid in the trace" in problem for problem in analyze(trace, tmp_path).problems)


def test_copies_sums_and_signals_on_a_stream_that_computes_carry_one_collective(tmp_path: Path) -> None:
    """An all-gather in two pieces with a matmul between them, a barrier before and after; the GELU after it is no part."""
    trace = TraceBuilder()
    trace.step(0, 5000)
    trace.kernel(MATMUL, 100, 200, host=1)
    trace.copy(LOCAL, 302, 20, num_bytes=1 << 20, host=2)
    trace.kernel(BARRIER, 324, 6, host=3)
    trace.copy(PEER, 332, 100, num_bytes=1 << 20, host=4)
    trace.kernel(MATMUL, 434, 200, host=5)
    trace.copy(PEER, 636, 100, num_bytes=1 << 20, host=6)
    trace.copy(PEER, 738, 100, num_bytes=1 << 20, host=7)
    trace.kernel(BARRIER, 840, 6, host=8)
    trace.kernel(ELEMENTWISE, 850, 100, host=9)
    trace.copy(LOCAL, 952, 20, num_bytes=1 << 20, host=10)
    analysis = analyze(trace, tmp_path)
    assert len(analysis.collectives) == 1
    gather = analysis.collectives[0]
    assert (gather.collective, gather.transport, gather.num_bytes) == ("all_gather", "copy_engine", 4 << 20)
    assert (gather.start_us, gather.end_us, gather.waiting_us, gather.paused_us) == (202, 746, 12, 212)
    step = analysis.steps[0]
    assert (step.communication_us, step.waiting_us, step.exposed_us) == (332, 12, 332)
    assert step.copy_us == 20
    assert {row.communication_us for row in combine([analysis]).breakdowns} == {332}, "without the pauses between pieces"


def test_operations_that_overlap_on_a_stream_are_a_problem(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 1000)
    trace.kernel(MATMUL, 100, 200, host=1)
    trace.kernel(MATMUL, 250, 200, host=2)
    problems = analyze(trace, tmp_path).problems
    assert any("1 operation overlaps its predecessor on a stream, which is impossible" in problem for problem in problems)


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("counterpoint::expert_ffn", "all_to_all"),
        ("ExpertFfnBackward", "all_to_all"),
        ("counterpoint::matmul_reduce_scatter", "reduce_scatter"),
        ("aten::copy_", "all_gather"),
    ],
)
def test_copies_are_named_after_the_operator_that_issued_them(operator: str, kind: str, tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 1000)
    trace._add("cpu_op", operator, 0, 4, tid=1, args={"External id": 77})
    trace.kernel(MATMUL, 100, 200, host=1)
    trace.copy(PEER, 310, 100, num_bytes=1 << 20, host=2, args={"External id": 77})
    analysis = analyze(trace, tmp_path)
    assert [(each.collective, each.name) for each in analysis.collectives] == [(kind, f"{kind} by copies")]


def test_an_uneven_all_to_all_has_its_imbalance(tmp_path: Path) -> None:
    trace = TraceBuilder()
    splits = {"Collective name": "all_to_allv", "In split size": "[100, 300]", "Out split size": "[200, 200]"}
    trace.collective(100, 50, name="ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", args=splits)
    assert analyze(trace, tmp_path).collectives[0].imbalance == 1.5


def test_kernels_slowed_by_communication_are_compared_with_their_like_alone(tmp_path: Path) -> None:
    def build(trace: TraceBuilder, begin: float) -> None:
        trace.kernel(MATMUL, begin + 100, 100, host=begin + 1)
        trace.collective(begin + 205, 130, host=begin + 2)
        trace.kernel(MATMUL, begin + 205, 130, host=begin + 3)

    trace = TraceBuilder()
    for number in range(3):
        trace.step(1000.0 * number, 1000.0 * number + 990)
        build(trace, 1000.0 * number)
    slow = analyze(trace, tmp_path).slowdowns
    assert [(row.count, row.alone_us, row.beside_us, row.lost_us, row.by) for row in slow] == [(1, 100, 130, 30, "SMs")]


def test_operators_idle_time_and_the_path_of_the_small_trace(tmp_path: Path) -> None:
    analysis = analyze(small_trace(), tmp_path)
    assert [step.is_steady for step in analysis.steps] == [False, True, True]
    rows = {row.kernel: row for row in analysis.operators}
    assert (rows[MATMUL].count, rows[MATMUL].total_us) == (2, 220)
    path = {row.cause: row.time_us for row in analysis.critical_path}
    assert path["communication"] > 200
    assert analysis.shown_step in {1, 2}
    assert {lane.role for lane in analysis.lanes} == {"computation", "communication", "copy"}
    assert all("of the" in each.before for each in analysis.collectives)


def test_lanes_join_the_closest_neighbours_where_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = TraceBuilder()
    for number in range(50):
        trace.kernel(MATMUL, 100 + 10 * number, 5 if number % 2 else 9)
    timed = time_trace(read_activity(trace.write(tmp_path)))
    monkeypatch.setattr("counterpoint.analysis.lanes.MOST_INTERVALS", 10)
    lanes, names = draw_lanes(timed, find_roles(timed), (0, timed.sorted_ends[-1]))
    assert 1 <= len(lanes) <= 10
    assert (lanes[0].start_us, lanes[-1].end_us) == (0, 495)
    assert any("operations" in name for name in names)


@pytest.mark.parametrize(
    ("makespans", "steady"),
    [
        ([5, 5], {0, 1}),
        ([90, 50, 51, 50], {1, 2, 3}),
        ([50, 50, 50, 51, 200, 50], {1, 2, 3, 5}),
        ([7], {0}),
        ([50, 40, 50, 60, 75, 76, 130, 50], {1, 2, 3, 4, 5, 7}),  # one spread is 22.2, so 5 are more than half of 60
        ([50, 50, 51, 52, 150, 250, 350], {1, 2, 3}),  # of six the shorter one in the middle, 52, is the median
    ],
)
def test_outliers_and_a_first_step_are_not_steady(makespans: list[int], steady: set[int]) -> None:
    assert steady_steps(makespans, range(len(makespans))) == steady


@pytest.mark.parametrize(("stall", "says"), [(700, True), (40, False)])
def test_a_note_says_by_how_much_steps_that_stall_lengthen_the_mean(stall: float, says: bool, tmp_path: Path) -> None:
    trace, begin = TraceBuilder(), 0.0
    for number in range(8):
        trace.step(begin, begin + 99)
        trace.kernel(MATMUL, begin + 10, 90, host=begin + 1)
        begin += 100 + (stall if number in (2, 5) else 0)
    analysis = analyze(trace, tmp_path)
    assert [step.step for step in analysis.steps if step.is_steady] == [1, 3, 4, 6, 7]
    note = (
        "2 of 7 steps are far from the median and were left out. The steady ones take 100 us on average, all of them 300 us."
    )
    assert (note in analysis.notes) == says


@pytest.mark.parametrize(("num_others", "steady"), [(1, [1]), (2, [1]), (3, [1, 2, 3, 4])])
def test_steps_with_other_operations_are_not_steady_where_half_of_all_are_alike(
    num_others: int, steady: list[int], tmp_path: Path
) -> None:
    trace = TraceBuilder()
    for number in range(2 + num_others):
        trace.step(1000 * number, 1000 * number + 900)
        trace.kernel(MATMUL if number < 2 else f"{MATMUL}_{number}", 1000 * number + 100, 100)
    analysis = analyze(trace, tmp_path)
    assert [step.step for step in analysis.steps if step.is_steady] == steady
    assert ("left out" in " ".join(analysis.notes)) == (len(steady) == 1)


@pytest.mark.parametrize(("num_steps", "steady"), [(3, [0, 1, 2]), (6, [1, 2, 3, 4])])
def test_communication_that_runs_a_step_ahead_counts_as_often_as_steps_launch_it(
    tmp_path: Path, num_steps: int, steady: list[int]
) -> None:
    """The first window holds two steps' communication, and the last one none."""
    trace = TraceBuilder()
    for number in range(num_steps):
        trace.step(10.0 * number, 10.0 * number + 10)
    for number in range(num_steps):
        trace.collective(100.0 * number - 85 if number else 1, 60 if number else 4, host=10.0 * number + 1)
        trace.kernel(MATMUL, 100.0 * number + 5, 90, host=10.0 * number + 2)
    analysis = analyze(trace, tmp_path)
    assert [step.step for step in analysis.steps if step.is_steady] == steady
    total_us = sum(each.end_us - each.start_us for each in analysis.collectives)
    mean_us = combine([analysis]).communication_us
    assert mean_us == pytest.approx(60 if num_steps == 6 else total_us / num_steps)
    assert any(note.startswith("Communication runs ahead of the computation: 2 of") for note in analysis.notes)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("_ZN7cutlass13device_kernelIN2at4cuda6detail25enable_3xEEvNT_6ParamsE", "cutlass::device_kernel"),
        ("_Z3foo", "foo"),
        ("void at::native::(anonymous namespace)::softmax_warp_forward<float, 7>(float*, int)", "softmax_warp_forward"),
        (ELEMENTWISE, "vectorized_elementwise_kernel (CUDAFunctor_add)"),
        ("_Z", "_Z"),
        ("x" * 70, "x" * 57 + "..."),
    ],
)
def test_kernels_have_short_names(name: str, short: str) -> None:
    assert short_name(name) == short


def test_an_analysis_is_a_value_that_survives_json(tmp_path: Path) -> None:
    analysis = analyze(small_trace(), tmp_path)
    text: dict[str, Any] = json.loads(msgspec.json.encode(analysis))
    assert msgspec.convert(text, RankAnalysis) == analysis
