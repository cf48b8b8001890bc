"""The shipped traces of real jobs, against the raw JSON and against a replay that knows nothing but the step."""

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from counterpoint.step import Collective, Copy, Kernel, Step
from counterpoint.traces import TracedStep, read_trace
from helpers.trace_builder import without

FOLDER = Path(__file__).parents[2] / "examples" / "traces"
NAMES = ["ddp.rank0", "ddp.rank1", "fsdp2.rank0", "moe.rank0", "tp.rank0"]


def shipped(name: str) -> Path:
    return FOLDER / f"{name}.json.gz"


@cache
def traced(name: str) -> TracedStep:
    return read_trace(shipped(name))


@cache
def raw_makespans(name: str) -> list[float]:
    """Makespans straight from the JSON: GPU operations grouped by the step in which their launch lies."""
    events: list[dict[str, Any]] = json.loads(gzip.decompress(shipped(name).read_bytes()))["traceEvents"]
    windows = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "user_annotation" and "Step#" in e["name"]]
    launches = {e["args"]["correlation"]: e["ts"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    gpu = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    spans = []
    for begin, end in sorted(windows):
        inside = [(e["ts"], e["ts"] + e["dur"]) for e in gpu if begin <= launches[e["args"]["correlation"]] <= end]
        spans.append(max(stop for _, stop in inside) - min(start for start, _ in inside))
    return spans


def replay_us(result: TracedStep, *, with_dependencies: bool = True, with_issue_times: bool = True) -> float:
    """Each operation as early as its stream, its dependencies and the host allow, for as long as it took in the trace."""
    durations = {interval.operation: interval.duration_us for interval in result.timeline.intervals}
    ends: list[float] = []
    stream_ends: dict[int, float] = {}
    for index, operation in enumerate(result.step.operations):
        start = stream_ends.get(operation.stream, 0.0)
        if with_dependencies:
            start = max([start, *(ends[dependency.operation] for dependency in operation.waits_for)])
        if with_issue_times:
            start = max(start, operation.issued_us or 0.0)
        ends.append(start + durations[index])
        stream_ends[operation.stream] = ends[-1]
    return max(ends)


def makespan_us(result: TracedStep) -> float:
    return max(interval.end_us for interval in result.timeline.intervals)


def producers(step: Step, index: int) -> list[str]:
    return [step.operations[dependency.operation].name for dependency in step.operations[index].waits_for]


@pytest.mark.parametrize("name", NAMES)
def test_the_steady_step_is_the_one_with_the_median_makespan(name: str) -> None:
    result = traced(name)
    assert result.step_makespans_us == pytest.approx(raw_makespans(name))
    assert makespan_us(result) == pytest.approx(sorted(raw_makespans(name))[1])
    assert min(interval.start_us for interval in result.timeline.intervals) == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_replay_of_the_dependencies_reproduces_the_makespan(name: str) -> None:
    result = traced(name)
    assert replay_us(result) == pytest.approx(makespan_us(result), rel=0.03)


def test_the_replay_notices_missing_dependencies_and_missing_issue_times() -> None:
    fsdp, tp = traced("fsdp2.rank0"), traced("tp.rank0")
    assert replay_us(fsdp, with_dependencies=False) < 0.96 * makespan_us(fsdp)
    assert replay_us(tp, with_issue_times=False) < 0.7 * makespan_us(tp)


@pytest.mark.parametrize("name", NAMES)
def test_no_operation_started_before_what_it_waits_for_had_ended(name: str) -> None:
    result = traced(name)
    intervals = {interval.operation: interval for interval in result.timeline.intervals}
    for index, operation in enumerate(result.step.operations):
        for dependency in operation.waits_for:
            assert intervals[dependency.operation].end_us <= intervals[index].start_us + 0.5
            assert result.step.operations[dependency.operation].stream != operation.stream


@pytest.mark.parametrize("name", ["ddp.rank0", "ddp.rank1"])
def test_each_all_reduce_of_ddp_waits_for_the_gradient_before_it(name: str) -> None:
    step = traced(name).step
    places = [i for i, operation in enumerate(step.operations) if isinstance(operation, Collective)]
    assert len(places) == 19
    for place in places:
        (dependency,) = step.operations[place].waits_for
        before = [i for i in range(place) if step.operations[i].stream == 7]
        assert dependency.operation == before[-1]


def test_fsdp_collectives_wait_for_their_copy_in_and_computation_waits_for_its_parameters() -> None:
    step = traced("fsdp2.rank0").step
    for index, operation in enumerate(step.operations):
        if isinstance(operation, Collective) and operation.collective == "reduce_scatter":
            assert any("chunk_cat" in name for name in producers(step, index))
        if isinstance(operation, Collective) and operation.collective == "all_gather":
            copies_in = [i for i in range(index) if step.operations[i].stream == 20]
            assert copies_in[-1] in [dependency.operation for dependency in operation.waits_for]
    copies_out = [i for i, operation in enumerate(step.operations) if "split_with_sizes" in operation.name]
    gathers = [i for i, operation in enumerate(step.operations) if "AllGather" in operation.name]
    assert len(copies_out) == len(gathers) == 12
    for gather, copy_out in zip(gathers, copies_out, strict=True):
        # The wait precedes the small upload of pointers that the copy-out reads.
        assert [dependency.operation for dependency in step.operations[copy_out - 1].waits_for][-1] == gather


def test_tensor_parallel_computation_waits_for_every_all_reduce() -> None:
    step = traced("tp.rank0").step
    waited = {dependency.operation for operation in step.operations for dependency in operation.waits_for}
    places = [i for i, operation in enumerate(step.operations) if isinstance(operation, Collective)]
    assert len(places) == 36
    assert set(places) <= waited
    assert all(len(step.operations[place].waits_for) == 1 for place in places)


def test_only_the_launch_bound_trace_keeps_issue_times() -> None:
    issued = {name: sum(item.issued_us is not None for item in traced(name).step.operations) for name in NAMES}
    assert issued.pop("tp.rank0") > 360
    assert set(issued.values()) == {0}
    (note,) = [note for note in traced("tp.rank0").notes if "launch-bound" in note]
    assert note.startswith("The GPU waits for launches by the CPU during 43.3 % of the step (launch-bound). Without")


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("ddp.rank0", "all_reduce", 19),
        ("fsdp2.rank0", "all_gather", 12),
        ("fsdp2.rank0", "reduce_scatter", 6),
        ("tp.rank0", "all_reduce", 36),
        ("moe.rank0", "all_to_all", 16),
    ],
)
def test_every_collective_is_known_with_its_group_and_cluster(name: str, kind: str, count: int) -> None:
    found = [item for item in traced(name).step.collectives().values() if item.collective == kind]
    assert len(found) == count
    assert {item.group_size for item in found} == {4}
    for footprint in [item.footprint for item in found if item.footprint]:
        assert footprint.ctas_per_cluster == (4 if footprint.num_ctas % 4 == 0 else 1)


def test_an_all_gather_counts_its_output_and_a_reduce_scatter_its_input() -> None:
    sizes = {item.collective: item.num_bytes for item in traced("fsdp2.rank0").step.collectives().values()}
    # One layer's 201 million bf16 elements: gathered, and later scattered, as a whole.
    assert sizes["all_gather"] == sizes["reduce_scatter"] == 402_685_952


@pytest.mark.parametrize("name", NAMES)
def test_lone_times_never_exceed_traced_times_and_untouched_kernels_keep_theirs(name: str) -> None:
    result = traced(name)
    durations = {interval.operation: interval.duration_us for interval in result.timeline.intervals}
    for index, operation in enumerate(result.step.operations):
        assert operation.lone_us is not None
        assert durations[index] / 1.71 <= operation.lone_us <= durations[index] + 1e-6 or isinstance(operation, Collective)
        if isinstance(operation, Copy):
            assert operation.lone_us == pytest.approx(durations[index])
        if isinstance(operation, Collective):
            # What computation beside it explains, up to 15 %, is neither
            known_us = operation.lone_us + operation.peer_wait_us
            assert durations[index] / 1.15 - 1e-3 <= known_us <= durations[index] + 1e-3
    alone = sum(item.lone_us or 0 for item in result.step.operations if isinstance(item, Kernel))
    together = sum(durations[i] for i, item in enumerate(result.step.operations) if isinstance(item, Kernel))
    assert alone < 0.96 * together if name[:2] in ("dd", "fs") else alone == pytest.approx(together)


def test_work_sharing_kernels_are_those_whose_tile_counter_was_cleared() -> None:
    kernels = [item for item in traced("tp.rank0").step.operations if isinstance(item, Kernel)]
    matmuls = [item for item in kernels if item.character == "matmul"]
    # In this trace the small matmuls have 128 CTAs for 128 tiles: one wave, no counter.
    assert {item.footprint.num_ctas for item in matmuls if item.is_work_sharing} == {132}
    assert {item.footprint.num_ctas for item in matmuls if not item.is_work_sharing} == {128}
    assert all(item.is_work_sharing for item in kernels if item.character == "attention")


def test_the_launch_gap_is_a_few_microseconds() -> None:
    for name in NAMES:
        gap_us = traced(name).step.launch_gap_us
        assert gap_us is not None
        assert 1 < gap_us < 4


def test_the_trace_says_what_it_was_recorded_on() -> None:
    result = traced("ddp.rank1")
    assert (result.step.device_name, result.nccl_version, result.num_steps) == ("NVIDIA H200", "2.28.9", 3)
    assert (result.step.num_ranks, result.timeline.ranks()) == (4, [1])
    assert read_trace(FOLDER / "ddp.rank1.json.gz", rank=3).timeline.ranks() == [3]


def test_the_same_file_gives_the_same_step() -> None:
    assert read_trace(FOLDER / "moe.rank0.json.gz") == traced("moe.rank0")


@pytest.mark.parametrize("name", NAMES)
def test_without_annotations_the_same_steps_are_found_by_repetition(name: str, tmp_path: Path) -> None:
    result = read_trace(without(shipped(name), tmp_path, lambda event: str(event["name"]).startswith("ProfilerStep#")))
    assert result.step_makespans_us == pytest.approx(traced(name).step_makespans_us)
    assert result.step.fingerprint() == traced(name).step.fingerprint()


@pytest.mark.parametrize("name", NAMES)
def test_without_synchronization_events_the_order_of_calls_reproduces_the_makespan(name: str, tmp_path: Path) -> None:
    result = read_trace(without(shipped(name), tmp_path, lambda event: event.get("cat") == "cuda_sync"))
    assert replay_us(result) == pytest.approx(makespan_us(result), rel=0.03)


@pytest.mark.parametrize("name", NAMES)
def test_without_any_wait_times_alone_still_reproduce_the_makespan(name: str, tmp_path: Path) -> None:
    result = read_trace(
        without(
            shipped(name),
            tmp_path,
            lambda event: event.get("cat") == "cuda_sync" or "StreamWaitEvent" in event["name"],
        )
    )
    assert replay_us(result) == pytest.approx(makespan_us(result), rel=0.03)
