"""Small traces built for one question each: steps, dependencies, lone times, issue times, other vendors."""

from pathlib import Path

import msgspec
import pytest

from counterpoint import Simulator, load_machine
from counterpoint.analysis.rank import analyze_rank
from counterpoint.errors import TraceError
from counterpoint.metrics import critical_path_us, sequential_us
from counterpoint.plan import LEAVE_IT
from counterpoint.step import Collective, Copy, Kernel, Step
from counterpoint.traces import TracedStep, read_trace
from counterpoint.traces.formats import read_activity
from counterpoint.traces.lone_times import least_usual
from counterpoint.traces.steady import find_repetition
from helpers.trace_builder import ELEMENTWISE, MATMUL, NCCL, TraceBuilder, small_trace


def waits(result: TracedStep) -> dict[int, list[tuple[int, str]]]:
    """What each operation that waits waits for, with the origin."""
    return {
        index: [(dependency.operation, dependency.origin) for dependency in operation.waits_for]
        for index, operation in enumerate(result.step.operations)
        if operation.waits_for
    }


def test_a_small_trace_reads_as_written(tmp_path: Path) -> None:
    result = read_trace(small_trace().write(tmp_path))
    kinds = [type(operation) for operation in result.step.operations]
    assert kinds == [Copy, Kernel, Collective, Copy, Kernel, Kernel]
    assert (result.step.name, result.step.num_ranks, result.num_steps) == ("small", 4, 3)
    # Makespans are 450, 451 and 452 us; the median is the second.
    assert result.step_makespans_us == pytest.approx((450, 451, 452))
    assert max(interval.end_us for interval in result.timeline.intervals) == pytest.approx(451)


def test_compressed_and_plain_traces_give_the_same_step(tmp_path: Path) -> None:
    plain, packed = small_trace().write(tmp_path), small_trace().write(tmp_path, "small.json.gz")
    assert read_trace(plain) == read_trace(packed)


def test_waits_are_inferred_from_the_records_before_them(tmp_path: Path) -> None:
    result = read_trace(small_trace().write(tmp_path))
    assert waits(result) == {2: [(1, "inferred")], 5: [(2, "inferred")]}
    assert "Dependencies between streams: 0 exact, 2 inferred from host order." in result.notes


def test_a_stated_record_and_stream_make_a_dependency_exact(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 1000)
    trace.kernel(MATMUL, 10, 50, host=1)
    record = trace.record(2)
    trace.kernel(ELEMENTWISE, 61, 20, host=3)
    trace.wait(4, stream=19, event=9, on_stream=7, record=record)
    trace.collective(70, 100, host=5)
    # The second kernel was launched after the record, so the collective does not wait for it.
    assert waits(read_trace(trace.write(tmp_path))) == {2: [(0, "exact")]}


def test_collectives_of_one_communicator_are_ordered_across_streams_by_its_own_event(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 1000)
    trace.record(1)
    trace.collective(10, 100, host=2, stream=19)
    trace.kernel(MATMUL, 10, 60, host=3)
    trace.record(4, name="cudaEventRecord")
    trace.wait(5, stream=28, event=4)
    trace.collective(120, 100, host=6, stream=28)
    assert waits(read_trace(trace.write(tmp_path))) == {2: [(0, "inferred")]}


def test_a_producer_that_had_not_ended_is_replaced_by_an_earlier_one(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 1000)
    trace.kernel(MATMUL, 10, 50, host=1)
    trace.kernel(ELEMENTWISE, 61, 200, host=2)
    trace.record(3)
    trace.wait(4, stream=19, event=9)
    trace.collective(70, 100, host=5)
    result = read_trace(trace.write(tmp_path))
    assert waits(result) == {2: [(0, "inferred")]}
    assert any("corrected 1" in note for note in result.notes)


def test_event_numbers_that_ascend_find_their_records_past_later_ones(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 1000)
    trace.kernel(ELEMENTWISE, 10, 10, host=1)
    trace.record(2)  # event 100
    trace.kernel(MATMUL, 21, 10, host=3)
    trace.collective(22, 30, host=4, stream=24)
    trace.record(5)  # event 101, on stream 24
    trace.wait(6, stream=20, event=100)
    trace.kernel(ELEMENTWISE, 60, 10, host=7, stream=20)
    trace.wait(8, stream=7, event=101)
    trace.kernel(MATMUL, 80, 10, host=9)
    assert waits(read_trace(trace.write(tmp_path))) == {3: [(0, "inferred")], 4: [(2, "inferred")]}


def test_rows_of_cached_event_numbers_are_consumed_first_in_first_out(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 1000)
    for number in range(3):
        trace.collective(10 + 20 * number, 15, host=1 + 2 * number, stream=19 + number)
        trace.record(2 + 2 * number)
    for number, event in enumerate((40, 7, 3)):
        trace.wait(10 + number, stream=7, event=event)
    trace.kernel(MATMUL, 100, 10, host=20)
    assert waits(read_trace(trace.write(tmp_path))) == {3: [(0, "inferred"), (1, "inferred"), (2, "inferred")]}


def test_prefetched_collectives_are_told_apart_where_event_numbers_repeat(tmp_path: Path) -> None:
    trace = TraceBuilder()
    for step in range(2):
        begin = 1000 * step
        trace.step(begin, begin + 990)
        for number in range(3):
            trace.collective(begin + 20 + 30 * number, 20, host=begin + 1 + 10 * number)
            trace.record(begin + 2 + 10 * number)
            if number:  # the matmul before needs the collective before, and this one is ahead of it
                trace.wait(begin + 3 + 10 * number, stream=7, event=40 + number)
                trace.kernel(MATMUL, begin + 100 + 50 * number, 40, host=begin + 4 + 10 * number)
        trace.wait(begin + 40, stream=7, event=43)
        trace.kernel(MATMUL, begin + 300, 40, host=begin + 41)
    assert waits(read_trace(trace.write(tmp_path))) == {
        2: [(0, "inferred")],
        4: [(1, "inferred")],
        5: [(3, "inferred")],
    }


def test_within_a_cuda_graph_dependencies_come_from_times_beside_waits_of_the_host(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 2000)
    first = trace.kernel(MATMUL, 10, 100, host=5, call="cudaGraphLaunch")
    trace.collective(112, 300, args={"correlation": first})
    trace.kernel(MATMUL, 415, 100, args={"correlation": first})
    trace.record(6)
    trace.wait(7, stream=30, event=9)
    trace.copy("Memcpy DtoH (Device -> Pinned)", 520, 10, num_bytes=4, host=8, stream=30)
    assert waits(read_trace(trace.write(tmp_path))) == {
        1: [(0, "inferred")],
        2: [(1, "inferred")],
        3: [(2, "inferred")],
    }


def test_without_stream_waits_dependencies_come_from_times(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 2000)
    trace.kernel(MATMUL, 10, 100, host=1)
    trace.collective(112, 300, host=2)
    trace.kernel(MATMUL, 112, 100, host=3)
    trace.kernel(ELEMENTWISE, 415, 50, host=4)
    result = read_trace(trace.write(tmp_path))
    assert waits(result) == {1: [(0, "inferred")], 3: [(1, "inferred")]}
    assert any("from times alone" in note for note in result.notes)


def test_an_operation_belongs_to_the_step_that_launched_it(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 100)
    trace.step(100, 200)
    trace.kernel(MATMUL, 500, 50, host=90)
    trace.kernel(MATMUL, 560, 60, host=110)
    result = read_trace(trace.write(tmp_path))
    assert result.step_makespans_us == pytest.approx((50, 60))


def test_steps_without_annotations_are_found_by_repetition(tmp_path: Path) -> None:
    trace = TraceBuilder()
    clock = 0.0
    for name in ["warm_up", *(["embedding", "layer", "layer", "layer", "loss"] * 4), "embedding"]:
        trace.kernel(name, clock + 10, 8)
        clock += 10
    result = read_trace(trace.write(tmp_path))
    assert result.num_steps == 4
    assert [operation.name for operation in result.step.operations] == ["embedding", "layer", "layer", "layer", "loss"]
    assert (
        "The trace has no step annotations. Its steps are the 4 repetitions of a sequence of 5 operations." in result.notes
    )


def test_a_trace_without_annotations_or_repetition_is_one_step(tmp_path: Path) -> None:
    trace = TraceBuilder()
    for number, name in enumerate("abcdef"):
        trace.kernel(name, 10.0 + 10 * number, 8)
    result = read_trace(trace.write(tmp_path))
    assert (result.num_steps, len(result.step.operations)) == (1, 6)
    assert any("counts as one step" in note for note in result.notes)


@pytest.mark.parametrize("repeats", [2, 3, 7])
def test_a_repetition_is_found_between_what_does_not_repeat(repeats: int) -> None:
    names = ["start", *(["a", "b", "b", "c"] * repeats), "end"]
    assert find_repetition(names) == (1, 4, repeats)


def test_a_step_that_runs_other_operations_is_left_out(tmp_path: Path) -> None:
    trace = small_trace()
    trace.step(40_000, 41_000)
    trace.kernel("evaluation", 40_100, 5)
    result = read_trace(trace.write(tmp_path))
    assert result.num_steps == 4
    assert len(result.step.operations) == 6
    assert any("other operations than the rest" in note for note in result.notes)


def test_a_contended_kernel_takes_the_longest_untouched_time_of_its_like(tmp_path: Path) -> None:
    result = read_trace(small_trace().write(tmp_path))
    # The second matmul took 120 us beside the all-reduce; the first, alike, took 100 us alone.
    assert [operation.lone_us for operation in result.step.operations if operation.name == MATMUL] == [100, 100]


def test_a_contended_kernel_without_like_gives_back_the_sms_that_communication_held(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 1000)
    trace.collective(10, 200, host=1)
    trace.kernel(MATMUL, 110, 200, host=2, args={"grid": [2, 66, 1]})
    result = read_trace(trace.write(tmp_path))
    # Half of the matmul ran beside 24 CTAs on 132 SMs.
    assert result.step.operations[1].lone_us == pytest.approx(200 * (1 - 0.5 * 24 / 132))
    assert any("1 of the 1 kernels" in note for note in result.notes)


def test_a_late_peer_shows_as_peer_wait(tmp_path: Path) -> None:
    trace = TraceBuilder()
    for number, duration in enumerate((900, 100, 104, 160, 102)):
        trace.step(10_000 * number, 10_000 * number + 5000)
        trace.collective(10_000 * number + 10, duration, host=10_000 * number + 1)
        trace.kernel(MATMUL, 10_000 * number + 1000, 10, host=10_000 * number + 2)
    result = read_trace(trace.write(tmp_path))
    (collective,) = [item for item in result.step.operations if isinstance(item, Collective)]
    # All makespans are equal, so the third step is the steady one; the least time that another one confirms is 100.
    assert (collective.lone_us, collective.peer_wait_us) == (100, 4)


@pytest.mark.parametrize(
    ("times_us", "least_us"),
    [
        ([1390, 1470, 4770, 4220, 3460, 1560, 1510, 6970, 6940], 1390),  # all-gathers that waited for a peer
        ([100, 1000, 1100, 5000], 1000),  # the first is an outlier
        ([100, 300, 900], 100),
        ([100], 100),
    ],
)
def test_a_lone_time_of_a_collective_is_the_least_that_is_no_outlier(times_us: list[float], least_us: float) -> None:
    assert least_usual(times_us) == least_us


def test_a_host_that_is_just_ahead_leaves_issue_times_and_one_far_ahead_none(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 10_000)
    for number in range(10):
        trace.kernel(MATMUL, 100.0 * number + 10, 20, host=100.0 * number)
    result = read_trace(trace.write(tmp_path))
    assert [operation.issued_us for operation in result.step.operations[1:]] == pytest.approx(
        [100.0 * n for n in range(1, 10)]
    )
    assert any(note.startswith("The GPU waits for launches by the CPU during 78.3 %") for note in result.notes)
    trace = TraceBuilder()
    trace.step(0, 10_000)
    for number in range(10):
        trace.kernel(MATMUL, 5000 + 22.0 * number, 20, host=float(number))
    result = read_trace(trace.write(tmp_path))
    assert {operation.issued_us for operation in result.step.operations} == {None}
    assert result.step.launch_gap_us == pytest.approx(2)


@pytest.mark.parametrize(("communicates", "gap_us"), [(True, 2.0), (False, 6.0)])
def test_gaps_that_another_stream_lengthens_are_not_the_launch_gap(
    communicates: bool, gap_us: float, tmp_path: Path
) -> None:
    trace = TraceBuilder()
    trace.step(0, 10_000)
    start_us = 5000.0
    for number, lasting_us in enumerate((6.0, 2.0, 6.0, 7.0, 0.0)):
        trace.kernel(MATMUL, start_us, 20, host=float(number))
        start_us += 20 + lasting_us
    if communicates:
        trace.kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 5020, 90, stream=9, host=5.0)
    assert read_trace(trace.write(tmp_path)).step.launch_gap_us == pytest.approx(gap_us)


def test_a_peer_to_peer_copy_is_communication(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 1000)
    trace.kernel(MATMUL, 10, 50, host=1)
    trace.copy("Memcpy PtoP (Device -> Device)", 20, 40, num_bytes=1 << 20, host=2, stream=24)
    result = read_trace(trace.write(tmp_path))
    copy = result.step.operations[1]
    assert isinstance(copy, Copy)
    assert (copy.direction, copy.kind, copy.num_bytes) == ("peer_to_peer", "communication", 1 << 20)
    assert result.step.operations[0].lone_us == 50  # a copy engine holds no SM


def test_a_copy_between_gpus_belongs_to_the_gpu_that_the_profiler_calls_in_device(tmp_path: Path) -> None:
    trace = TraceBuilder(rank=1)
    for number in range(3):
        trace.kernel(MATMUL, 100.0 * number + 10, 50, args={"device": 1})
        where = {"fromDevice": 0, "inDevice": 1, "toDevice": 1}
        trace.copy("Memcpy PtoP (Device -> Device)", 100.0 * number + 65, 20, num_bytes=1 << 20, stream=24, args=where)
    activity = read_activity(trace.write(tmp_path))
    assert activity.num_devices == 1
    assert [operation.category for operation in activity.operations] == ["kernel", "memcpy"] * 3


def test_an_amd_trace_reads_like_any_other(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.document["deviceProperties"] = [{"id": 0, "name": "AMD Instinct MI300X", "computeMajor": 9, "numSms": 304}]
    trace.step(0, 1000)
    trace.kernel("Cijk_Ailk_Bljk_BBS_BH_MT256x256x64", 10, 50, host=1, call="hipExtModuleLaunchKernel")
    without_names = {"Collective name": None, "In msg nelems": None, "dtype": None, "Group size": None}
    trace.collective(61, 50, name="ncclKernel_Generic(ncclDevComm*)", host=2, call="hipLaunchKernel", args=without_names)
    trace.copy("Memcpy PtoP (Device -> Device)", 120, 10, num_bytes=64, host=3)
    result = read_trace(trace.write(tmp_path))
    kernel, collective, copy = result.step.operations
    assert (result.step.device_name, kernel.kind, collective.kind, copy.kind) == (
        "AMD Instinct MI300X",
        "computation",
        "communication",
        "communication",
    )
    assert isinstance(collective, Collective)
    assert (collective.collective, collective.num_bytes, collective.group_size) == ("send_recv", 0, 4)
    for said in ("without an element count", "all 4 ranks of the job are assumed", "counted as a send and receive"):
        assert any(said in note for note in result.notes)
        assert any(said in problem for problem in analyze_rank(read_activity(trace.write(tmp_path))).problems)


def test_an_unknown_collective_is_a_send_and_receive_with_a_note(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 1000)
    trace.collective(10, 50, host=1, args={"Collective name": "teleport"})
    result = read_trace(trace.write(tmp_path))
    assert [item.collective for item in result.step.operations if isinstance(item, Collective)] == ["send_recv"]
    assert any("'teleport'" in note for note in result.notes)


def test_a_missing_world_size_is_the_largest_group(tmp_path: Path) -> None:
    trace = TraceBuilder(world_size=None)
    trace.step(0, 1000)
    trace.collective(10, 50, host=1, args={"Group size": 8})
    assert read_trace(trace.write(tmp_path)).step.num_ranks == 8


def test_all_kernels_of_a_graph_share_its_launch(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 1000)
    trace.kernel(MATMUL, 10, 50, host=1, call="cudaGraphLaunch")
    graph = trace.correlation
    trace.kernel(ELEMENTWISE, 61, 20, host=900, args={"correlation": graph})
    result = read_trace(trace.write(tmp_path))
    assert [operation.name for operation in result.step.operations] == [MATMUL, ELEMENTWISE]


def test_of_several_devices_the_one_that_computes_longest_is_read_and_launches_on_the_others_are_not_lost(
    tmp_path: Path,
) -> None:
    trace = TraceBuilder()
    for number in range(3):
        trace.step(1000.0 * number, 1000.0 * number + 900)
        for place in range(6):
            trace.kernel("little", 1000.0 * number + 100 + 10 * place, 5, host=1000.0 * number + place)
        trace.collective(1000.0 * number + 200, 500, host=1000.0 * number + 6)
        trace.kernel(MATMUL, 1000.0 * number + 100, 200, host=1000.0 * number + 7, args={"device": 1})
    result = read_trace(trace.write(tmp_path))
    assert [operation.name for operation in result.step.operations] == [MATMUL]
    assert "The trace holds 2 devices; only the busiest, device 1, was read." in result.notes
    assert not any("have no kernel in the trace" in note for note in result.notes)


def test_an_operation_without_launch_is_placed_by_its_gpu_time(tmp_path: Path) -> None:
    trace = small_trace()
    trace.kernel(NCCL, 10_700, 5, host=1, args={"correlation": 999_999})
    result = read_trace(trace.write(tmp_path))
    assert any("1 operations have no launch" in note for note in result.notes)


def test_a_trace_of_one_stream_says_that_nothing_overlaps(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 1000)
    trace.collective(10, 50, host=1, stream=7)
    assert any("one stream" in note for note in read_trace(trace.write(tmp_path)).notes)


def test_dependent_launches_may_overlap_but_plain_ones_may_not(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 1000)
    trace.kernel(MATMUL, 10, 50, host=1)
    trace.kernel(MATMUL, 55, 50, host=2, call="cuLaunchKernelEx")
    assert any("dependent launch" in note for note in read_trace(trace.write(tmp_path)).notes)
    trace.kernel(ELEMENTWISE, 90, 50, host=3)
    with pytest.raises(TraceError, match=r"1 operations overlap.*stream 7, 15\.000 us before"):
        read_trace(trace.write(tmp_path))


@pytest.mark.parametrize(("call", "is_dependent"), [("cuLaunchKernelEx", True), ("cudaLaunchKernel", False)])
def test_an_early_kernel_whose_launch_was_lost_counts_as_launched_like_others_of_its_name(
    call: str, is_dependent: bool, tmp_path: Path
) -> None:
    trace = TraceBuilder()
    trace.step(0, 1000)
    trace.kernel(MATMUL, 10, 50, host=1)
    trace.kernel("second", 55, 50, host=2)
    trace.kernel("second", 200, 50, host=3, call=call)
    lost = next(event for event in trace.events if event["cat"] == "cuda_runtime" and event["ts"] == 2)
    trace.events.remove(lost)
    if is_dependent:
        assert any("lacks the launches of 1 of them" in note for note in read_trace(trace.write(tmp_path)).notes)
    else:
        with pytest.raises(TraceError, match="1 operations overlap"):
            read_trace(trace.write(tmp_path))


@pytest.mark.parametrize("kind", ["copies", "kernels"])
def test_one_call_may_start_several_copies_but_only_one_kernel(kind: str, tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 1000)
    trace.kernel(MATMUL, 10, 50, host=1)
    for start in (70, 130):
        if kind == "copies":
            trace.copy("Memcpy PtoP (Device -> Device)", start, 50, num_bytes=1 << 20, host=2, stream=30)
        else:
            trace.kernel("second", start, 50, host=2, stream=30)
        trace.events[-1]["args"]["correlation"] = 2
    if kind == "copies":
        assert len(read_trace(trace.write(tmp_path)).step.operations) == 3
    else:
        with pytest.raises(TraceError, match="correlation 2 names two GPU operations"):
            read_trace(trace.write(tmp_path))


def test_what_the_host_issued_after_it_waited_for_the_gpu_counts_from_the_end_of_what_it_waited_for(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 10_000)
    trace.kernel(MATMUL, 10, 800, host=0)
    trace._add("cuda_runtime", "cudaStreamSynchronize", 20, 800, tid=1, args={"correlation": 900_000})
    trace.kernel(MATMUL, 860, 20, host=850)
    first, second = read_trace(trace.write(tmp_path)).step.operations
    assert (first.issued_after, second.issued_after) == (None, 0)
    assert second.issued_us == pytest.approx(860 - 810)
    earlier = Step(name="faster", num_ranks=1, operations=(msgspec.structs.replace(first, lone_us=100.0), second))
    assert critical_path_us(earlier, [100.0, 20.0]) == pytest.approx(100 + 50 + 20)
    assert sequential_us(earlier, [100.0, 20.0]) == pytest.approx(100 + 50 + 20)
    end_us = max(each.end_us for each in Simulator().run(earlier, load_machine("h200"), LEAVE_IT).intervals)
    assert end_us == pytest.approx(170, abs=1)


def test_a_short_wait_of_the_host_ties_nothing(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 10_000)
    trace.kernel(MATMUL, 10, 800, host=0)
    trace._add("cuda_runtime", "cudaStreamSynchronize", 805, 10, tid=1, args={"correlation": 900_000})
    trace.kernel(MATMUL, 860, 20, host=850)
    operations = read_trace(trace.write(tmp_path)).step.operations
    assert [operation.issued_after for operation in operations] == [None, None]


@pytest.mark.parametrize(
    ("name", "dims", "sizes"),
    [
        ("aten::mm", [[8192, 4096], [4096, 512], [8192, 512]], (8192, 4096, 512)),
        ("aten::addmm", [[512], [8192, 4096], [4096, 512]], (8192, 4096, 512)),
        ("aten::mm", [[8192, 4096], [512, 4096]], None),
        ("aten::mm", [[], "no list"], None),
        ("aten::add", [[8192, 4096], [4096, 512]], None),
    ],
)
def test_a_matmul_has_the_sizes_that_the_profiler_recorded(
    name: str, dims: list[object], sizes: tuple[int, int, int] | None, tmp_path: Path
) -> None:
    trace = TraceBuilder()
    trace.step(0, 10_000)
    trace._add("cpu_op", name, 0, 4, tid=1, args={"External id": 77, "Input Dims": dims})
    trace.kernel(MATMUL, 10, 800, host=1, args={"External id": 77})
    trace.kernel(ELEMENTWISE, 900, 8, host=3, args={"External id": 77})
    matmul, other = read_trace(trace.write(tmp_path)).step.operations
    assert (matmul.matmul_sizes, other.matmul_sizes) == (sizes, None)
