"""What a job could change: steps small enough to work out by hand, and nothing is lost when a step is put together anew."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from counterpoint.plan import LEAVE_IT
from counterpoint.planner.ideal import scale_of
from counterpoint.planner.job_changes import (
    GROUPED,
    LARGER_BUCKETS,
    MOST_CHANGES,
    PREFETCH,
    SMALLER_BUCKETS,
    JobChanges,
    _changed_steps,
    find_job_changes,
)
from counterpoint.planner.movements import propose_own_streams
from counterpoint.sim import Simulator
from counterpoint.step import Collective, Dependency, Kernel, Operation, Step, UnevenParts
from helpers.toy_steps import H200, all_reduce, kernel, step_of


def changes(*operations: Operation) -> JobChanges:
    return find_job_changes(step_of(*operations), H200, Simulator())


def matmul(cta_us: float) -> Kernel:
    return replace(kernel(64, cta_us), character="matmul")


def gather(after: int) -> Collective:
    return replace(all_reduce(90.0, stream=2, after=after), name="gather", collective="all_gather")


def waiting(operation: Kernel, *numbers: int) -> Kernel:
    return replace(operation, waits_for=tuple(Dependency(operation=number) for number in numbers))


def buckets(num: int, lone_us: float, compute_us: float) -> list[Operation]:
    """A backward pass: `num` times two kernels and the bucket that they fill; the optimizer waits for all."""
    operations: list[Operation] = []
    for _ in range(num):
        operations += [matmul(compute_us / 2), matmul(compute_us / 2)]
        operations.append(all_reduce(lone_us, stream=2, after=len(operations) - 1))
    return [*operations, waiting(kernel(1, 1.0), *range(2, len(operations), 3))]


def test_a_collective_between_two_matmuls_of_one_stream_could_run_beside_the_second() -> None:
    found = changes(matmul(100.0), all_reduce(80.0, stream=1), matmul(100.0), matmul(100.0))
    (change,) = found.helpful
    assert "all_reduce on a separate stream" in change.change
    assert change.baseline_us == pytest.approx(380.0, rel=0.01)
    assert change.changed_us == pytest.approx(300.0, rel=0.03)


def test_what_follows_the_next_matmul_still_waits_for_the_collective() -> None:
    found = changes(matmul(100.0), all_reduce(300.0, stream=1), matmul(100.0), matmul(100.0))
    (change,) = found.helpful
    assert change.changed_us == pytest.approx(515.0, rel=0.03)  # not 400: the last matmul needs it


def test_a_barrier_inside_an_operator_is_not_moved() -> None:
    barrier = replace(
        all_reduce(80.0, stream=1),
        name="c10d::symmetric_memory::barrier_kernel(unsigned int**, int)",
        collective="send_recv",
        num_bytes=0,
    )
    assert changes(matmul(100.0), barrier, matmul(100.0), matmul(100.0)) == JobChanges()
    step = step_of(matmul(100.0), barrier, matmul(100.0))
    (refusal,) = propose_own_streams(replace(step, device_name="NVIDIA H200"), H200).refusals
    assert "only waits for other ranks" in refusal.reason


def test_what_a_moved_collective_awaits_of_another_stream_still_delays_the_next_kernel() -> None:
    elsewhere = replace(matmul(300.0), stream=2)
    moved = replace(all_reduce(80.0, stream=1), waits_for=(Dependency(operation=1),))
    operations = (matmul(100.0), elsewhere, moved, matmul(100.0), matmul(100.0))
    in_pieces_us = scale_of(step_of(*operations), H200).in_pieces_us
    assert all(change.changed_us >= in_pieces_us for change in changes(*operations).simulated)


def test_a_last_bucket_half_as_large_leaves_less_behind_the_backward_pass() -> None:
    found = {change.change: change for change in changes(*buckets(3, 60.0, 100.0)).simulated}
    assert found[SMALLER_BUCKETS].changed_us < found[SMALLER_BUCKETS].baseline_us - 25.0
    assert found[LARGER_BUCKETS].changed_us >= found[LARGER_BUCKETS].baseline_us


def test_gathers_of_a_layer_could_be_issued_one_layer_earlier() -> None:
    operations: list[Operation] = [matmul(100.0)]
    for _ in range(4):
        operations.append(gather(after=len(operations) - 1))
        operations.append(waiting(matmul(100.0), len(operations) - 1))
    found = {change.change: change for change in changes(*operations).simulated}
    assert found[PREFETCH].changed_us < 0.75 * found[PREFETCH].baseline_us


def test_reductions_that_are_awaited_at_once_are_no_buckets() -> None:
    operations: list[Operation] = []
    for _ in range(4):
        operations += [matmul(100.0), all_reduce(50.0, stream=2, after=len(operations))]
        operations.append(waiting(kernel(1, 1.0), len(operations) - 1))
    assert changes(*operations) == JobChanges()


def experts(number: int, issue_us: float) -> list[Operation]:
    """A layer whose experts' matmuls the host launches one by one, on two streams, and the next layer's first kernel."""
    parts = UnevenParts(sent_bytes=(4000, 6000), received_bytes=(4000, 3000), group_rank=0)
    back = replace(parts, sent_bytes=parts.received_bytes, received_bytes=parts.sent_bytes)
    sent = replace(all_reduce(5.0, stream=1), collective="all_to_all", num_bytes=10_000, parts=parts)
    first = waiting(replace(matmul(2.0), lone_us=2.0), 0)
    matmuls = [replace(first, stream=3 + each % 2, issued_us=issue_us * each) for each in range(number)]
    end = number * issue_us
    returned = replace(
        sent, parts=back, issued_us=end, waits_for=tuple(Dependency(operation=1 + each) for each in range(number))
    )
    after = replace(waiting(kernel(1, 10.0), number + 1), issued_us=end, stream=1)
    late = replace(kernel(1, 10.0), stream=1, issued_us=30.0, issued_after=number + 2)
    return [sent, *matmuls, returned, after, late]


def test_grouped_matmuls_of_experts_would_spare_the_host_launches() -> None:
    (change,) = changes(*experts(16, 20.0)).helpful
    assert change.change == GROUPED.format(16)
    saved_us = (
        15 * 20.0 - (8 - 1) * 2.0
    )  # of launches; the last matmul of a stream ends later than the one that is issued last
    assert change.baseline_us - change.changed_us == pytest.approx(saved_us, rel=0.1)
    assert not changes(*experts(7, 20.0)).simulated, "so few cost the host little"


def test_a_step_without_communication_has_no_place_for_a_change() -> None:
    assert changes(matmul(10.0), matmul(10.0)) == JobChanges()


def test_what_saves_less_than_a_simulation_can_tell_is_simulated_and_not_told_as_helpful() -> None:
    found = changes(matmul(1000.0), all_reduce(5.0, stream=1), matmul(1000.0), matmul(1000.0))
    assert found.simulated
    assert not found.helpful


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Kernels on stream 1 and collectives on streams 1 to 3 that wait for any earlier operations."""
    operations: list[Operation] = [matmul(10.0)]
    for number in range(1, draw(st.integers(1, 24))):
        waits = tuple(Dependency(operation=wait) for wait in draw(st.sets(st.integers(0, number - 1), max_size=2)))
        stream = draw(st.integers(1, 3))
        each: Operation = draw(st.sampled_from([matmul(10.0), kernel(4, 5.0), all_reduce(20.0), gather(0)]))
        if isinstance(each, Collective):
            each = replace(each, stream=stream)
        operations.append(replace(each, waits_for=waits))
    return step_of(*operations)


@given(step=steps())
def test_a_changed_step_is_a_step_that_moves_the_same_bytes_and_runs_the_same_kernels(step: Step) -> None:
    def totals(each: Step) -> tuple[int, float, int]:
        collectives = [operation for operation in each.operations if isinstance(operation, Collective)]
        lone_us = round(sum(operation.lone_us or 0.0 for operation in collectives), 6)
        return (sum(operation.num_bytes for operation in collectives), lone_us, len(each.operations) - len(collectives))

    for _, changed in _changed_steps(step):
        assert totals(changed) == totals(step)
        assert Simulator().run(changed, H200, LEAVE_IT).intervals
    found = find_job_changes(step, H200, Simulator())
    assert len(found.helpful) <= MOST_CHANGES
    assert all(first.changed_us <= second.changed_us for first, second in pairwise(found.helpful))


def test_a_refusal_for_a_traced_step_counts_the_collectives_on_the_computations_stream() -> None:
    step = replace(step_of(matmul(100.0), all_reduce(80.0, stream=1), matmul(100.0)), device_name="NVIDIA H200")
    (refusal,) = propose_own_streams(step, H200).refusals
    assert refusal.target == "1 collective on the computation's stream"


def test_a_traced_stream_with_few_small_kernels_is_not_the_computations() -> None:
    """Libraries launch small kernels beside their collectives: to count tokens, or to fill a flat buffer."""
    counting = replace(kernel(1, 5.0), stream=3)
    step = step_of(matmul(100.0), counting, all_reduce(80.0, stream=3), matmul(100.0))
    (refusal,) = propose_own_streams(replace(step, device_name="NVIDIA H200"), H200).refusals
    assert refusal.reason == "no collective runs on a computation stream"
    step = replace(step, operations=tuple(replace(each, stream=1) for each in step.operations))
    (refusal,) = propose_own_streams(replace(step, device_name="NVIDIA H200"), H200).refusals
    assert refusal.target == "1 collective on the computation's stream"
