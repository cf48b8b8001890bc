"""The waits of a traced step's collectives are those with which it is simulated as it ran."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from counterpoint.machine import load_machine
from counterpoint.metrics import measure
from counterpoint.plan import LEAVE_IT
from counterpoint.planner import tune
from counterpoint.sim import Simulator
from counterpoint.sim.replay import compare_replay
from counterpoint.sim.traced_waits import with_waits
from counterpoint.step import Collective, CollectiveKind, Copy, Dependency, Footprint, Kernel, Step
from counterpoint.traces import read_trace
from counterpoint.units import MIB
from helpers.command import TRACES

H200 = load_machine("h200")
HBM_BYTES = 1_500_000_000  # about all that the memory moves in 400 us
RECORDED = Path(__file__).parents[1] / "data" / "recovered_time"
ALONE_US = Simulator().lone_times_us(
    Step(
        name="alone",
        num_ranks=2,
        operations=(Collective(name="nccl", stream=1, collective="all_reduce", num_bytes=128 * MIB, group_size=2),),
    ),
    H200,
)[0]


def traced(
    *collectives: tuple[float, float], kind: CollectiveKind = "all_reduce", num_ranks: int = 2, library: str = "nccl"
) -> Step:
    """Kernels, each with a collective behind it on another stream, of these lone times and waits."""
    footprint = Footprint(num_ctas=1320, threads_per_cta=128, registers_per_thread=64)
    operations: list[Kernel | Collective] = []
    for lone_us, wait_us in collectives:
        operations.append(
            Kernel(name="multiply", stream=0, footprint=footprint, character="streaming", hbm_bytes=HBM_BYTES, lone_us=400.0)
        )
        operations.append(
            Collective(
                name="ncclDevKernel",
                stream=1,
                collective=kind,
                num_bytes=128 * MIB,
                group_size=num_ranks,
                library=library,
                lone_us=lone_us,
                peer_wait_us=wait_us,
                waits_for=(Dependency(operation=len(operations) - 1),),
            )
        )
    return Step(name="traced", num_ranks=num_ranks, operations=tuple(operations), device_name="NVIDIA H200")


def waits_us(step: Step) -> list[float]:
    return [each.peer_wait_us for each in step.collectives().values()]


def test_what_was_supposed_to_be_a_wait_and_is_contention_is_corrected() -> None:
    truth = traced((ALONE_US, 0.0), (ALONE_US, 150.0), (ALONE_US, 40.0))
    timeline = Simulator().run(truth, H200, LEAVE_IT)
    lasted_us = [each.end_us - each.start_us for each in timeline.intervals if each.kind == "communication"]
    supposed = traced(*((ALONE_US, each - ALONE_US) for each in lasted_us))
    assert sum(waits_us(supposed)) > 190 + 60
    found = with_waits(supposed, timeline, H200)
    assert waits_us(found) == pytest.approx([0.0, 150.0, 40.0], abs=15)
    before, after = (compare_replay(timeline, Simulator().run(step, H200, LEAVE_IT)) for step in (supposed, found))
    assert abs(before.makespan_error) > 0.025
    assert abs(after.makespan_error) < 0.01


def test_waits_that_agree_with_the_trace_stay() -> None:
    step = traced((ALONE_US, 0.0), (ALONE_US, 150.0))
    found = with_waits(step, Simulator().run(step, H200, LEAVE_IT), H200)
    assert waits_us(found) == pytest.approx([0.0, 150.0], abs=0.01)


@pytest.mark.parametrize(("times", "is_taken"), [(0.8, False), (1.5, True), (2.5, False)])
def test_bytes_say_the_time_alone_unless_the_trace_contradicts_them(times: float, is_taken: bool) -> None:
    step = traced((times * ALONE_US, 10.0))
    found = with_waits(step, Simulator().run(step, H200, LEAVE_IT), H200).collective(1)
    assert found.lone_us == pytest.approx(ALONE_US if is_taken else times * ALONE_US)
    assert (found.lone_us or 0.0) + found.peer_wait_us <= times * ALONE_US + 10.0 + 1e-6


@pytest.mark.parametrize(
    ("step", "machine"),
    [
        (traced((1.5 * ALONE_US, 10.0), library="counterpoint"), "h200"),
        (traced((1.5 * ALONE_US, 10.0), kind="send_recv", num_ranks=4), "h200"),
        (traced((1.5 * ALONE_US, 10.0), num_ranks=16), "h200"),
        (traced((1.5 * ALONE_US, 10.0)), "a100"),
    ],
    ids=["another library", "a peer of several", "several nodes", "a GPU that was not measured"],
)
def test_bytes_say_nothing_about_what_was_not_measured(step: Step, machine: str) -> None:
    on = load_machine(machine)
    found = with_waits(step, Simulator().run(step, on, LEAVE_IT), on)
    assert found.collective(1).lone_us == 1.5 * ALONE_US


def test_a_collective_that_the_timeline_lacks_cuts_or_holds_twice_keeps_its_wait() -> None:
    step = traced((ALONE_US, 100.0), (0.0, 100.0), (ALONE_US, 100.0), (ALONE_US, 100.0))
    whole = Simulator().run(step, H200, LEAVE_IT)
    ran = {each.operation: each for each in whole.intervals}
    cut = replace(ran[5], end_us=ran[5].start_us + ALONE_US)
    kept = [each for number, each in ran.items() if number not in (3, 5)]
    intervals = (*kept, cut, replace(ran[7], start_us=0.0, end_us=10.0))
    found = with_waits(step, replace(whole, intervals=intervals), H200)
    assert waits_us(found)[1:] == [100.0] * 3


def side_by_side(*lone_us: float) -> Step:
    """Kernels that the memory limits, each on a stream of its own; two of them fit the GPU together."""
    footprint = Footprint(num_ctas=264, threads_per_cta=256, registers_per_thread=64)
    kernels = [
        Kernel(name="add", stream=stream, footprint=footprint, character="streaming", hbm_bytes=HBM_BYTES, lone_us=each)
        for stream, each in enumerate(lone_us)
    ]
    return Step(name="beside", num_ranks=1, operations=tuple(kernels), device_name="NVIDIA H200")


def test_kernels_that_slowed_each_other_down_get_the_times_that_they_take_alone() -> None:
    timeline = Simulator().run(side_by_side(400.0, 500.0), H200, LEAVE_IT)
    lasted_us = [each.duration_us for each in timeline.intervals]
    assert min(lasted_us) > 500
    supposed = side_by_side(*lasted_us)
    found = with_waits(supposed, timeline, H200)
    assert [each.lone_us for each in found.operations] == pytest.approx([400.0, 500.0], rel=0.05)
    before, after = (compare_replay(timeline, Simulator().run(step, H200, LEAVE_IT)) for step in (supposed, found))
    assert before.makespan_error > 0.2
    assert abs(after.makespan_error) < 0.01


def test_a_kernel_whose_traced_time_the_reader_explained_otherwise_keeps_its_time() -> None:
    timeline = Simulator().run(side_by_side(400.0, 500.0), H200, LEAVE_IT)
    step = side_by_side(*(0.85 * each.duration_us for each in timeline.intervals))
    assert with_waits(step, timeline, H200) == step


@pytest.mark.parametrize("path", [*sorted(TRACES.glob("*.gz")), *sorted(RECORDED.glob("*.gz"))], ids=lambda path: path.name)
def test_no_trace_replays_worse(path: Path) -> None:
    """A difference counts as a share of the limit above which a replay is not used."""
    read = read_trace(path)
    steps = (read.step, with_waits(read.step, read.timeline, H200))
    shares = [compare_replay(read.timeline, Simulator().run(step, H200, LEAVE_IT)).share_of_limits for step in steps]
    assert shares[1] <= shares[0] + 0.05
    assert shares[1] < 1


def test_tune_takes_a_traced_step_and_the_waits_of_its_timeline() -> None:
    read = read_trace(TRACES / "starved.rank0.json.gz")
    tuning = tune(read, H200)
    replayed = Simulator().run(with_waits(read.step, read.timeline, H200), H200, LEAVE_IT)
    assert measure(tuning.baseline) == measure(replayed)
    assert tuning.plan.verdict == "GAIN"


def test_who_was_first_in_the_trace_is_first_behind_a_fill_only() -> None:
    """A gather, then a scatter of its stream and a matmul that waits for the gather, with a fill before it or without."""
    footprint = Footprint(num_ctas=264, threads_per_cta=384, registers_per_thread=168, dynamic_shared_bytes=100_000)
    matmul = Kernel(name="multiply", stream=0, footprint=footprint, character="matmul", lone_us=400.0)
    gather, scatter = traced((ALONE_US, 0.0), (ALONE_US, 0.0)).collectives().values()
    gather, scatter = replace(gather, waits_for=()), replace(scatter, waits_for=())
    for fills, is_marked in (
        ([Copy(name="Memset", stream=0, direction="set", num_bytes=4, lone_us=0.8)], True),
        ([], False),
    ):
        first, *others = [*fills, matmul]
        operations = (gather, scatter, replace(first, waits_for=(Dependency(operation=0),)), *others)
        step = Step(name="race", num_ranks=2, operations=operations, device_name="NVIDIA H200")
        simulated = Simulator().run(step, H200, LEAVE_IT)
        starts = {each.operation: each.start_us for each in simulated.intervals}
        assert starts[1] > starts[len(operations) - 1]
        end_us = next(each.end_us for each in simulated.intervals if each.operation == 0)
        moved = [
            replace(each, start_us=end_us + 2.0, end_us=max(each.end_us, end_us + 3.0)) if each.operation == 1 else each
            for each in simulated.intervals
        ]
        found = with_waits(step, replace(simulated, intervals=tuple(moved)), H200)
        assert [each.begins_first for each in found.collectives().values()] == [False, is_marked]
        again = {each.operation: each.start_us for each in Simulator().run(found, H200, LEAVE_IT).intervals}
        assert (again[1] < again[len(operations) - 1]) == is_marked


def test_a_trace_of_tensor_parallelism_whose_races_went_both_ways_is_replayed() -> None:
    """Megatron-LM's core with TransformerEngine on 2 H200s. Its operators were measured to take 4 % off a step."""
    found = read_trace(RECORDED.parent / "traces" / "megatron_tp.rank0.json.gz")
    step = with_waits(found.step, found.timeline, H200)
    assert sum(each.begins_first for each in step.collectives().values()) >= 2
    tuning = tune(step, H200, Simulator(), traced=found.timeline)
    replay = compare_replay(found.timeline, tuning.baseline)
    assert abs(replay.makespan_error) < 0.01
    assert abs(replay.overlap_difference or 0.0) < 0.05
    assert tuning.plan.verdict == "GAIN"
