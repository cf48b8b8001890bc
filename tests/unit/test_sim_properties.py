"""What must hold for any step: order, conservation of work, and a cost that grows with operations and not with CTAs."""

from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.controls import Priority
from counterpoint.machine import Machine, load_machine, machine_names
from counterpoint.metrics import critical_path_us, ideal_us, sequential_us
from counterpoint.plan import LEAVE_IT, Plan
from counterpoint.sim import Simulator, step_run
from counterpoint.sim.engine import Engine
from counterpoint.sim.rates import RateModel
from counterpoint.step import (
    Character,
    Collective,
    CollectiveKind,
    Copy,
    CopyDirection,
    Dependency,
    Footprint,
    Kernel,
    Operation,
    Step,
)
from counterpoint.timeline import Interval
from helpers.toy_steps import DEPENDENCY_LATENCY_US, H200, kernel, plan_of, step_of

MACHINES = [load_machine(name) for name in machine_names(variants=False)]
# Every change of state is rounded up to a whole picosecond.
ROUNDING_US = 0.01
# Stated lone times leave out that the last, partial wave of a kernel has the memory to itself.
LAST_WAVE = 2e-3
CHARACTERS: tuple[Character, ...] = ("matmul", "attention", "streaming", "other")
COLLECTIVES: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
DIRECTIONS: tuple[CopyDirection, ...] = ("device_to_device", "host_to_device", "device_to_host", "peer_to_peer", "set")
TIMES_US = st.floats(1.0, 500.0)


@st.composite
def footprints(draw: st.DrawFn) -> Footprint:
    """Launches that fit an SM of every shipped NVIDIA machine."""
    threads = draw(st.sampled_from([32, 64, 128, 256, 384, 512, 1024]))
    return Footprint(
        num_ctas=draw(st.one_of(st.integers(1, 300), st.integers(1, 20_000))),
        threads_per_cta=threads,
        registers_per_thread=draw(st.sampled_from([16, 32, 64, 96, 128, 168])) if threads <= 384 else 32,
        dynamic_shared_bytes=draw(st.sampled_from([0, 4096, 16_384, 32_768, 65_536, 90_000])),
        carveout_percent=draw(st.sampled_from([-1, 100])),
    )


@st.composite
def kernels(draw: st.DrawFn, stream: int = 0) -> Kernel:
    """Kernels of every character that say in one of four ways how long they take."""
    how = draw(st.sampled_from(["lone", "cta", "work", "bytes"]))
    return Kernel(
        name=f"kernel, {how}",
        stream=stream,
        footprint=draw(footprints()),
        character=draw(st.sampled_from(CHARACTERS)),
        lone_us=draw(TIMES_US) if how == "lone" else None,
        cta_us=draw(st.floats(1.0, 20.0)) if how == "cta" else None,
        flops=draw(st.floats(1e8, 1e11)) if how == "work" else None,
        hbm_bytes=draw(st.floats(1e6, 1e9)) if how in ("work", "bytes") else None,
        is_work_sharing=draw(st.booleans()),
        issued_us=draw(st.none() | st.floats(0, 300)),
    )


def collectives(stream: int = 1) -> st.SearchStrategy[Collective]:
    return st.builds(
        Collective,
        name=st.just("collective"),
        stream=st.just(stream),
        collective=st.sampled_from(COLLECTIVES),
        num_bytes=st.integers(1, 1 << 28),
        group_size=st.integers(2, 4),
        lone_us=st.none() | TIMES_US,
        peer_wait_us=st.sampled_from([0.0, 0.0, 30.0]),
        issued_us=st.none() | st.floats(0, 300),
    )


def copies(stream: int = 2) -> st.SearchStrategy[Copy]:
    return st.builds(
        Copy,
        name=st.just("copy"),
        stream=st.just(stream),
        direction=st.sampled_from(DIRECTIONS),
        num_bytes=st.integers(1, 1 << 26),
        lone_us=st.none() | TIMES_US,
        issued_us=st.none() | st.floats(0, 300),
    )


@st.composite
def steps(draw: st.DrawFn, num_streams: int = 4, max_operations: int = 8) -> Step:
    """Operations on any stream, each waiting for any earlier ones."""
    operations: list[Operation] = []
    for index in range(draw(st.integers(1, max_operations))):
        stream = draw(st.integers(0, num_streams - 1))
        operation: Operation = draw(st.one_of(kernels(stream), collectives(stream), copies(stream)))
        earlier = draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else set()
        waits = tuple(Dependency(operation=number) for number in sorted(earlier))
        operations.append(msgspec.structs.replace(operation, waits_for=waits))
    gap_us = draw(st.none() | st.floats(0, 5))
    return Step(name="random", num_ranks=4, operations=tuple(operations), launch_gap_us=gap_us)


@st.composite
def steps_of_three_streams(draw: st.DrawFn) -> Step:
    """One stream each for computation, communication and copies, as in most jobs: nothing overlaps its own kind."""
    step = draw(steps(num_streams=3))
    return msgspec.structs.replace(
        step,
        operations=tuple(
            msgspec.structs.replace(operation, stream=("computation", "communication", "copy").index(operation.kind))
            for operation in step.operations
        ),
    )


@st.composite
def plans(draw: st.DrawFn, step: Step) -> Plan:
    """Priorities on any of the step's kernels and collectives."""
    chosen = {}
    for index, operation in enumerate(step.operations):
        if not isinstance(operation, Copy):
            chosen[index] = Priority(priority=draw(st.integers(-5, 0)))
    return plan_of({**chosen}) if chosen else LEAVE_IT


def intervals_of(step: Step, machine: Machine = H200, plan: Plan = LEAVE_IT, **options: float) -> list[Interval]:
    """In the order of the step's operations."""
    timeline = Simulator(**options).run(step, machine, plan)
    return sorted(timeline.intervals, key=lambda interval: interval.operation)


def makespan_us(step: Step, machine: Machine = H200, **options: float) -> float:
    """From the start of the step, not from the first operation's."""
    return max(interval.end_us for interval in intervals_of(step, machine, **options))


def alone(operation: Operation, machine: Machine = H200) -> tuple[float, float]:
    """Simulated and stated lone time of one operation, at the clock of a burst."""
    step = Step(name="alone", num_ranks=4, operations=(msgspec.structs.replace(operation, waits_for=(), issued_us=None),))
    return makespan_us(step, machine, clock_share=1.0), Simulator().lone_times_us(step, machine)[0]


# Order


@given(steps(), st.data())
def test_the_same_input_gives_the_same_timeline(step: Step, data: st.DataObject) -> None:
    plan, used = data.draw(plans(step)), Simulator()
    as_is = used.run(step, H200, LEAVE_IT)
    assert used.run(step, H200, plan) == Simulator().run(step, H200, plan) == used.run(step, H200, plan)
    assert used.run(step, H200, LEAVE_IT) == as_is


@given(steps())
def test_tasks_that_run_alone_take_the_time_of_any_event(step: Step) -> None:
    with patch.object(Engine, "_has_passed", lambda _: False):
        slowly = intervals_of(step)
    assert intervals_of(step) == intervals_of(step) == slowly


def test_ctas_simulated_one_by_one_leave_no_times_for_steps_with_more_of_them() -> None:
    uneven = [msgspec.structs.replace(kernel(num_ctas, 10.0), cta_time_spread=2.0) for num_ctas in (1000, 5000)]
    step_run._shared_models.cache_clear()
    fresh = intervals_of(step_of(*uneven))
    step_run._shared_models.cache_clear()
    intervals_of(step_of(uneven[0]))
    assert intervals_of(step_of(*uneven)) == fresh


def test_models_of_past_steps_do_not_pile_up() -> None:
    step = step_of(kernel(1, 10.0))
    kept = intervals_of(step)
    with patch("counterpoint.sim.rates.MOST_KNOWN", -1):
        assert intervals_of(step) == kept
        assert step_run._shared_models.cache_info().currsize == 0


@given(steps(), st.data())
def test_every_operation_runs_once_and_after_all_it_waits_for(step: Step, data: st.DataObject) -> None:
    intervals = intervals_of(step, plan=data.draw(plans(step)))
    assert [interval.operation for interval in intervals] == list(range(len(step.operations)))
    last_of_stream: dict[int, Interval] = {}
    gap_us = 1.6 if step.launch_gap_us is None else step.launch_gap_us
    for operation, interval in zip(step.operations, intervals, strict=True):
        assert (interval.stream, interval.name, interval.kind) == (operation.stream, operation.name, operation.kind)
        assert interval.start_us >= (operation.issued_us or 0.0) - 1e-6
        for dependency in operation.waits_for:
            # A dependency within the stream costs no more than the gap.
            same_stream = step.operations[dependency.operation].stream == operation.stream
            latency_us = 0.0 if same_stream else DEPENDENCY_LATENCY_US
            assert interval.start_us >= intervals[dependency.operation].end_us + latency_us - 1e-5
        if operation.stream in last_of_stream:
            assert interval.start_us >= last_of_stream[operation.stream].end_us + gap_us - 1e-5
        last_of_stream[operation.stream] = interval


# Bounds


@given(steps())
def test_nothing_finishes_before_the_critical_path(step: Step) -> None:
    lone_us = Simulator().lone_times_us(step, H200)
    assert makespan_us(step) >= critical_path_us(step, lone_us) * (1 - LAST_WAVE) - ROUNDING_US


@settings(max_examples=200)
@given(steps(), st.sampled_from(MACHINES[:6]))
def test_what_kernels_and_collectives_of_any_streams_share_is_no_longer_busy_than_the_step_lasts(
    step: Step, machine: Machine
) -> None:
    lone_us = Simulator().lone_times_us(step, machine)
    busy_us = Simulator().least_busy_us(step, machine, lone_us)
    assert makespan_us(step, machine) >= busy_us * (1 - LAST_WAVE) - ROUNDING_US


@given(steps_of_three_streams())
def test_the_makespan_is_never_below_the_ideal(step: Step) -> None:
    lone_us = Simulator().lone_times_us(step, H200)
    assert makespan_us(step) >= ideal_us(step, lone_us) * (1 - LAST_WAVE) - ROUNDING_US


@given(steps())
def test_overlap_costs_at_most_a_small_factor(step: Step) -> None:
    """A kernel whose CTAs fit the free SMs in one round takes two beside a collective: at most twice its time."""
    lone_us = Simulator().lone_times_us(step, H200)
    overhead_us = len(step.operations) * (DEPENDENCY_LATENCY_US + (step.launch_gap_us or 1.6))
    waiting_us = sum(operation.peer_wait_us for operation in step.operations if isinstance(operation, Collective))
    assert makespan_us(step) <= 2 * (sequential_us(step, lone_us) + waiting_us) + overhead_us


# Alone


@settings(max_examples=300)
@given(kernels(), st.sampled_from(MACHINES[:6]))
def test_a_kernel_alone_takes_its_lone_time_whatever_its_footprint(kernel: Kernel, machine: Machine) -> None:
    simulated, stated = alone(kernel, machine)
    assert simulated == pytest.approx(stated, rel=LAST_WAVE, abs=ROUNDING_US)


@given(st.one_of(collectives(), copies()), st.sampled_from(MACHINES))
def test_a_transfer_alone_takes_its_lone_time(operation: Collective | Copy, machine: Machine) -> None:
    simulated, stated = alone(operation, machine)
    waiting_us = operation.peer_wait_us if isinstance(operation, Collective) else 0.0
    assert simulated == pytest.approx(stated + waiting_us, rel=1e-5, abs=ROUNDING_US)


def gpu_with_sms(machine: Machine, num_sms: int) -> Machine:
    """The machine with as many SMs of the same kind, all else equal: arithmetic and L2 rates grow with the SMs."""
    gpu = machine.gpu
    share = num_sms / gpu.num_sms
    return msgspec.structs.replace(
        machine,
        gpu=msgspec.structs.replace(
            gpu,
            num_sms=num_sms,
            sms_per_gpc=(num_sms,),
            bf16_flops_per_s=gpu.bf16_flops_per_s * share,
            fp32_flops_per_s=gpu.fp32_flops_per_s * share,
        ),
    )


@given(footprints(), st.sampled_from(CHARACTERS), st.floats(1e8, 1e11), st.booleans(), st.data())
def test_more_sms_never_slow_a_lone_described_kernel(
    footprint: Footprint, character: Character, flops: float, shares: bool, data: st.DataObject
) -> None:
    kernel = Kernel(
        name="described", stream=0, footprint=footprint, character=character, flops=flops, is_work_sharing=shares
    )
    fewer = data.draw(st.integers(1, 200))
    more = data.draw(st.integers(fewer, 200))
    slow, fast = (alone(kernel, gpu_with_sms(H200, number))[0] for number in (fewer, more))
    assert fast <= slow * (1 + LAST_WAVE) + ROUNDING_US


# Cost


def number_of_updates(step: Step) -> int:
    with patch.object(RateModel, "update", autospec=True, side_effect=RateModel.update) as update:
        Simulator().run(step, H200, LEAVE_IT)
    return update.call_count


@given(steps(max_operations=5), st.integers(2, 10))
def test_the_number_of_state_changes_does_not_grow_with_ctas(step: Step, factor: int) -> None:
    """Any step, and the same with ten times the CTAs and a few more, so that the last wave is another."""
    more = []
    for operation in step.operations:
        if isinstance(operation, Kernel):
            grid = msgspec.structs.replace(operation.footprint, num_ctas=operation.footprint.num_ctas * 10 + factor)
            operation = msgspec.structs.replace(operation, footprint=grid)  # noqa: PLW2901  the changed one is kept
        more.append(operation)
    enlarged = msgspec.structs.replace(step, operations=tuple(more))
    # An operation becomes ready, starts, begins its last waves and ends; each of these may split what runs beside it.
    limit = 20 * len(step.operations)
    assert number_of_updates(step) <= limit
    assert number_of_updates(enlarged) <= limit


@pytest.mark.parametrize("num_waves", [1, 10, 1000, 100_000])
def test_a_lone_kernel_changes_state_a_fixed_number_of_times(num_waves: int) -> None:
    footprint = Footprint(num_ctas=132 * 16 * num_waves + 77, threads_per_cta=128, registers_per_thread=32)
    kernel = Kernel(name="long", stream=0, footprint=footprint, character="streaming", lone_us=1000.0)
    assert number_of_updates(Step(name="long", num_ranks=1, operations=(kernel,))) <= 4


# CTAs of different lengths


def uneven(num_ctas: int, spread: float) -> Kernel:
    """CTAs of 1 to 1 + spread times 100 us, 8 of them on an SM."""
    footprint = Footprint(num_ctas=num_ctas, threads_per_cta=256, registers_per_thread=10)
    return Kernel(name="uneven", stream=0, footprint=footprint, cta_us=100.0, cta_time_spread=spread)


@settings(max_examples=25)
@given(st.integers(1, 4 * 132 * 8), st.floats(0.01, 2.0))
def test_ctas_of_different_lengths_are_scheduled_greedily(num_ctas: int, spread: float) -> None:
    """Within the bounds of any list schedule: total work over slots, and that plus the longest CTA."""
    end_us = alone(uneven(num_ctas, spread))[0]
    slots = 132 * 8
    mean_us, longest_us = 100 * (1 + spread / 2), 100 * (1 + spread)
    # Lengths are drawn from 64 levels by a hash of the index: a few CTAs may be shorter or longer than the mean.
    assert end_us <= num_ctas / slots * mean_us * 1.01 + longest_us
    assert end_us >= max(100.0, (num_ctas // slots) * mean_us * 0.99)


def test_without_a_spread_all_ctas_end_together() -> None:
    end_us = alone(uneven(3 * 132 * 8, 0.0))[0]
    assert end_us == pytest.approx(300, abs=ROUNDING_US)
    assert alone(uneven(3 * 132 * 8, 1e-6))[0] == pytest.approx(300, abs=ROUNDING_US)


def test_a_neighbor_finds_slots_one_after_the_other_where_ctas_differ_in_length() -> None:
    """As measured: with equal CTAs nothing is free until all of a wave end, with different ones the first soon is."""
    footprint = Footprint(num_ctas=1, threads_per_cta=32, registers_per_thread=10)
    short = Kernel(name="short", stream=1, footprint=footprint, cta_us=1.0, issued_us=5.0)
    starts = []
    for spread in (0.0, 1.0):
        step = Step(name="beside", num_ranks=1, operations=(uneven(4 * 132 * 8, spread), short))
        starts.append(intervals_of(step, plan=plan_of({1: Priority(priority=-5)}))[1].start_us)
    equal, different = starts
    assert equal == pytest.approx(100, abs=ROUNDING_US)
    assert 100 < different < 102


@settings(max_examples=10)
@given(st.floats(0.1, 1.0), st.integers(1, 2 * 132 * 8))
def test_steps_with_uneven_ctas_are_deterministic_too(spread: float, num_ctas: int) -> None:
    collective = Collective(name="sum", stream=1, collective="all_reduce", num_bytes=1 << 24, group_size=2)
    step = Step(name="uneven", num_ranks=2, operations=(uneven(num_ctas, spread), collective))
    plan = plan_of({1: Priority(priority=-5)})
    assert Simulator().run(step, H200, plan) == Simulator().run(step, H200, plan)
