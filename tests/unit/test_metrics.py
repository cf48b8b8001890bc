"""Metrics against their definitions: a brute-force count on a time grid, a longest-path search, and known cases."""

import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import StepError
from counterpoint.metrics import critical_path_us, ideal_us, interference, measure, sequential_us, share_of_ideal
from counterpoint.step import Copy, Dependency, Footprint, Kernel, Operation, OperationKind, Step
from counterpoint.timeline import Interval, Timeline

FOOTPRINT = Footprint(num_ctas=1, threads_per_cta=128, registers_per_thread=32)
KINDS: tuple[OperationKind, ...] = ("computation", "communication", "copy")
GRID_US = 40


def interval(kind: OperationKind, start_us: float, end_us: float, *, rank: int = 0, operation: int = 0) -> Interval:
    return Interval(
        rank=rank, stream=KINDS.index(kind), operation=operation, name=kind, kind=kind, start_us=start_us, end_us=end_us
    )


def timeline(*intervals: Interval) -> Timeline:
    return Timeline(step_name="step", origin="simulated", intervals=intervals)


@st.composite
def grid_timelines(draw: st.DrawFn) -> Timeline:
    spans = st.tuples(
        st.sampled_from(KINDS),
        st.integers(0, GRID_US - 1),
        st.integers(1, GRID_US),
        st.integers(0, 2),
        st.integers(0, 3),
    )
    return timeline(
        *(
            interval(kind, float(start), float(min(start + length, GRID_US)), rank=rank, operation=operation)
            for kind, start, length, rank, operation in draw(st.lists(spans, min_size=1, max_size=25))
        )
    )


@st.composite
def any_timelines(draw: st.DrawFn) -> Timeline:
    times = st.floats(0, 1e6, allow_nan=False)
    spans = st.tuples(st.sampled_from(KINDS), times, times, st.integers(0, 2))
    return timeline(
        *(
            interval(kind, min(first, second), max(first, second), rank=rank)
            for kind, first, second, rank in draw(st.lists(spans, min_size=1, max_size=30))
        )
    )


@st.composite
def steps_with_times(draw: st.DrawFn) -> tuple[Step, list[float]]:
    operations: list[Operation] = []
    for index in range(draw(st.integers(1, 12))):
        waits = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        waits_for = tuple(Dependency(operation=number) for number in sorted(waits))
        stream = draw(st.integers(0, 2))
        issued_us = draw(st.one_of(st.none(), st.floats(0, 50)))
        if draw(st.booleans()):
            operations.append(
                Kernel(
                    name="kernel", stream=stream, footprint=FOOTPRINT, lone_us=1.0, waits_for=waits_for, issued_us=issued_us
                )
            )
        else:
            direction = draw(st.sampled_from(("peer_to_peer", "host_to_device")))
            operations.append(
                Copy(name="copy", stream=stream, direction=direction, num_bytes=1, waits_for=waits_for, issued_us=issued_us)
            )
    times = draw(st.lists(st.floats(0, 1e3), min_size=len(operations), max_size=len(operations)))
    return Step(name="step", num_ranks=1, operations=tuple(operations)), times


def covered_cells(intervals: list[Interval], *kinds: str) -> set[int]:
    return {cell for entry in intervals if entry.kind in kinds for cell in range(round(entry.start_us), round(entry.end_us))}


@given(grid_timelines())
def test_each_rank_agrees_with_counting_cells_of_a_time_grid(drawn: Timeline) -> None:
    metrics = measure(drawn)
    assert [rank.rank for rank in metrics.ranks] == drawn.ranks()
    for rank in metrics.ranks:
        own = list(drawn.of_rank(rank.rank))
        computation = covered_cells(own, "computation")
        communication = covered_cells(own, "communication")
        makespan = max(entry.end_us for entry in own) - min(entry.start_us for entry in own)
        assert rank.makespan_us == makespan
        assert rank.computation_us == len(computation)
        assert rank.communication_us == len(communication)
        assert rank.copy_us == len(covered_cells(own, "copy"))
        assert rank.overlapped_us == len(communication & computation)
        assert rank.exposed_us == len(communication - computation)
        assert rank.idle_us == makespan - len(covered_cells(own, *KINDS))
        assert rank.overlap_ratio == (len(communication & computation) / len(communication) if communication else None)


@given(grid_timelines())
def test_the_whole_is_the_worst_rank_and_the_ratio_weighs_ranks_by_their_communication(drawn: Timeline) -> None:
    metrics = measure(drawn)
    assert metrics.makespan_us == max(rank.makespan_us for rank in metrics.ranks)
    assert metrics.exposed_us == max(rank.exposed_us for rank in metrics.ranks)
    communication = sum(rank.communication_us for rank in metrics.ranks)
    if communication:
        assert metrics.overlap_ratio == sum(rank.overlapped_us for rank in metrics.ranks) / communication
    else:
        assert metrics.overlap_ratio is None


@given(any_timelines())
def test_exposed_never_exceeds_communication_and_the_ratio_stays_between_0_and_1(drawn: Timeline) -> None:
    metrics = measure(drawn)
    for rank in metrics.ranks:
        assert 0 <= rank.exposed_us <= rank.communication_us <= rank.makespan_us
        assert rank.overlap_ratio is None or 0 <= rank.overlap_ratio <= 1
    assert metrics.overlap_ratio is None or 0 <= metrics.overlap_ratio <= 1


@given(any_timelines())
def test_the_makespan_is_never_below_an_interval(drawn: Timeline) -> None:
    rounding_us = 1e-6
    longest_us = max(entry.duration_us for entry in drawn.intervals)
    assert measure(drawn).makespan_us >= longest_us - rounding_us


@given(any_timelines(), st.randoms(use_true_random=False))
def test_the_order_of_the_intervals_does_not_matter(drawn: Timeline, shuffler: random.Random) -> None:
    shuffled = list(drawn.intervals)
    shuffler.shuffle(shuffled)
    assert measure(timeline(*shuffled)) == measure(drawn)


def test_makespan_starts_at_the_first_interval_not_at_zero() -> None:
    assert measure(timeline(interval("computation", 100, 110), interval("communication", 105, 130))).makespan_us == 30


def test_a_copy_from_the_host_hides_nothing() -> None:
    metrics = measure(timeline(interval("communication", 0, 10), interval("copy", 0, 10)))
    assert (metrics.exposed_us, metrics.overlap_ratio) == (10, 0)


def test_ratio_is_none_without_communication() -> None:
    assert measure(timeline(interval("computation", 0, 10))).overlap_ratio is None


@given(steps_with_times())
def test_ideal_never_exceeds_sequential(drawn: tuple[Step, list[float]]) -> None:
    step, times = drawn
    assert ideal_us(step, times) <= sequential_us(step, times)


@given(steps_with_times())
def test_critical_path_is_the_longest_chain_of_streams_and_dependencies(drawn: tuple[Step, list[float]]) -> None:
    step, times = drawn

    @cache
    def longest_chain_to(index: int) -> float:
        operation = step.operations[index]
        before = [earlier for earlier in range(index) if step.operations[earlier].stream == operation.stream]
        before += [dependency.operation for dependency in operation.waits_for]
        return max([operation.issued_us or 0.0, *map(longest_chain_to, before)]) + times[index]

    assert critical_path_us(step, times) == max(longest_chain_to(index) for index in range(len(times)))


def kernel(stream: int, *, issued_us: float | None = None) -> Kernel:
    return Kernel(name="kernel", stream=stream, footprint=FOOTPRINT, lone_us=1.0, issued_us=issued_us)


def transfer(stream: int, *, waits_for: tuple[int, ...] = ()) -> Copy:
    waits = tuple(Dependency(operation=number) for number in waits_for)
    return Copy(name="transfer", stream=stream, direction="peer_to_peer", num_bytes=1, waits_for=waits)


def step_of(*operations: Operation) -> Step:
    return Step(name="step", num_ranks=1, operations=operations)


def test_ideal_of_independent_work_is_the_longer_of_the_two() -> None:
    step = step_of(kernel(0), transfer(1))
    assert ideal_us(step, [30.0, 20.0]) == 30
    assert ideal_us(step, [20.0, 30.0]) == 30


def test_ideal_of_dependent_work_is_the_critical_path() -> None:
    assert ideal_us(step_of(kernel(0), transfer(1, waits_for=(0,))), [30.0, 20.0]) == 50


def test_computation_on_two_streams_shares_one_gpu_in_the_ideal() -> None:
    assert ideal_us(step_of(kernel(0), kernel(1)), [30.0, 20.0]) == 50


def test_a_late_host_delays_the_critical_path_and_the_sequential_time() -> None:
    step = step_of(kernel(0), kernel(0, issued_us=100.0))
    assert critical_path_us(step, [10.0, 10.0]) == 110
    assert sequential_us(step, [10.0, 10.0]) == 110


def test_sequential_is_the_sum_where_the_host_is_never_late() -> None:
    assert sequential_us(step_of(kernel(0), transfer(1), kernel(0, issued_us=5.0)), [10.0, 20.0, 30.0]) == 60


@pytest.mark.parametrize("bad", [[1.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_missing_or_absurd_lone_times_are_refused(bad: list[float]) -> None:
    for formula in (sequential_us, ideal_us, critical_path_us):
        with pytest.raises(StepError, match="lone time"):
            formula(step_of(kernel(0), transfer(1)), bad)


def test_share_of_the_ideal_is_0_at_sequential_1_at_ideal_and_negative_when_slower() -> None:
    assert share_of_ideal(100, 100, 60) == 0
    assert share_of_ideal(100, 60, 60) == 1
    assert share_of_ideal(100, 80, 60) == 0.5
    assert share_of_ideal(100, 120, 60) == -0.5


def test_share_of_the_ideal_is_none_where_nothing_can_be_gained() -> None:
    assert share_of_ideal(100, 100, 100) is None
    assert share_of_ideal(0, 0, 0) is None


def test_interference_is_the_slowest_ranks_time_over_the_lone_time() -> None:
    shown = timeline(
        interval("computation", 0, 12, rank=0, operation=0),
        interval("computation", 0, 15, rank=1, operation=0),
        interval("communication", 3, 23, rank=0, operation=1),
    )
    step = step_of(kernel(0), transfer(1), kernel(0))
    assert interference(step, shown, [10.0, 20.0, 5.0]) == (1.5, 1.0, None)


def test_interference_of_an_operation_in_pieces_counts_their_union() -> None:
    shown = timeline(interval("communication", 0, 4), interval("communication", 2, 6), interval("communication", 10, 12))
    assert interference(step_of(transfer(0)), shown, [4.0]) == (2.0,)


def test_interference_without_a_lone_time_is_none() -> None:
    assert interference(step_of(kernel(0)), timeline(interval("computation", 0, 1)), [0.0]) == (None,)


def test_interference_refuses_the_timeline_of_another_step() -> None:
    shown = timeline(interval("computation", 0, 1, operation=7))
    with pytest.raises(StepError, match="operation 7"):
        interference(step_of(kernel(0)), shown, [1.0])
