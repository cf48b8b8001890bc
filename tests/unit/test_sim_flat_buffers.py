"""The copies of FSDP2 and DDP into and out of flat buffers, which copies in place make unnecessary."""

import msgspec
import pytest

from counterpoint.controls import Transport
from counterpoint.plan import LEAVE_IT
from counterpoint.planner.movements import propose_transports
from counterpoint.sim import Simulator
from counterpoint.sim.flat_buffers import FlatBuffers
from counterpoint.step import Collective, CollectiveKind, Copy, Dependency, Operation, Step
from counterpoint.traces import read_trace
from helpers.command import TRACES
from helpers.toy_steps import H200, kernel, plan_of, step_of

OUT = "at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel"
IN = "void at::native::detail::chunk_cat_cuda_kernel<char, char>(char**)"
WIDER = "void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>(float**)"
BY_COPIES = Transport(transport="copy_engine")
MIB = 1 << 20


def collective(kind: CollectiveKind, *waits: int, stream: int = 0) -> Collective:
    waits_for = tuple(Dependency(operation=number) for number in waits)
    return Collective(
        name=kind, stream=stream, collective=kind, num_bytes=256 * MIB, group_size=4, waits_for=waits_for, lone_us=900.0
    )


def named(name: str, *waits: int) -> Operation:
    waits_for = tuple(Dependency(operation=number) for number in waits)
    return msgspec.structs.replace(kernel(132, 100.0), name=name, cta_us=None, lone_us=100.0, waits_for=waits_for)


def test_each_collective_of_a_trace_has_its_kernel() -> None:
    step = read_trace(TRACES / "fsdp2.rank0.json.gz").step
    operations, buffers = step.operations, FlatBuffers(step)
    kinds = [each.collective for number in buffers.copies_of if isinstance(each := operations[number], Collective)]
    assert sorted(kinds) == ["all_gather"] * 12 + ["reduce_scatter"] * 6
    assert len(set(buffers.copies_of.values())) == 18
    for number, (of_buffer,) in buffers.copies_of.items():
        is_gather = "split_with_sizes" in operations[of_buffer].name
        assert is_gather == (number < of_buffer)
    assert not buffers.widened


def test_gathers_of_others_have_no_kernel() -> None:
    """Two gathers of tensor parallelism on another stream, for one of FSDP's."""
    operations = [
        collective("all_gather", stream=2),
        collective("all_gather"),
        named(OUT, 1),
        collective("all_gather", stream=2),
    ]
    assert FlatBuffers(step_of(*operations)).copies_of == {1: (2,)}
    assert not FlatBuffers(step_of(*operations[:2], *operations[3:])).copies_of


def test_a_kernel_at_the_start_belongs_to_the_step_before() -> None:
    operations = [named(OUT), collective("all_gather"), named(OUT, 1), collective("all_gather")]
    assert FlatBuffers(step_of(*operations)).copies_of == {1: (2,)}


@pytest.mark.parametrize("name", [IN, WIDER])
def test_gradients_are_sent_in_their_own_type(name: str) -> None:
    step = step_of(named(name), collective("reduce_scatter", 0))
    plan = plan_of({1: BY_COPIES})
    timeline = Simulator().run(step, H200, plan)
    copied_in, reduced = sorted(timeline.intervals, key=lambda each: each.operation)
    assert copied_in.end_us - copied_in.start_us < 0.1
    flat = Simulator().run(step_of(collective("reduce_scatter")), H200, plan_of({0: BY_COPIES})).intervals[0]
    share = (reduced.end_us - reduced.start_us) / (flat.end_us - flat.start_us)
    assert (0.5 < share < 0.6) if name == WIDER else share == pytest.approx(1, abs=0.01)


MULTIPLIED = (
    "elementwise_kernel<8, at::native::AUnaryFunctor<c10::BFloat16, at::native::binary_internal::MulFunctor<float> > >"
)


def bucket(*waits: int, num_bytes: int = 64 * MIB) -> Operation:
    return msgspec.structs.replace(collective("all_reduce", *waits, stream=1), num_bytes=num_bytes)


def copy_back(num_bytes: int) -> Operation:
    return Copy(name="Memcpy DtoD", stream=0, direction="device_to_device", num_bytes=num_bytes, lone_us=50.0)


def test_each_bucket_of_a_trace_has_the_kernels_that_fill_it() -> None:
    step = read_trace(TRACES / "ddp.rank0.json.gz").step
    buffers = FlatBuffers(step)
    found = [copy for copies in buffers.copies_of.values() for copy in copies]
    assert len(buffers.copies_of) == 18  # of 19; the last one holds two small gradients
    assert len(found) == len(set(found)) == 59
    assert all("MulFunctor" in step.operations[number].name for number in found)


def test_buckets_are_copied_back_after_the_last_one_if_all_sizes_fit() -> None:
    before = [named(MULTIPLIED), named("other"), named(MULTIPLIED), bucket(2), named("other"), named(MULTIPLIED), bucket(5)]
    back = [copy_back(16 * MIB), copy_back(48 * MIB), copy_back(64 * MIB)]
    assert FlatBuffers(step_of(*before, *back)).copies_of == {3: (0, 2, 7, 8), 6: (5, 9)}
    assert FlatBuffers(step_of(*before, *back[1:])).copies_of == {3: (0, 2), 6: (5,)}
    own = [named(MULTIPLIED) for _ in range(4)]  # the job's own, before the second bucket's
    with_own = [*before[:5], *own, named(MULTIPLIED), bucket(9)]
    assert FlatBuffers(step_of(*with_own)).copies_of == {3: (0, 2)}


def test_only_the_first_of_several_all_reduces_after_one_kernel_has_a_bucket() -> None:
    """The others send something else, such as a loss; each waits for the kernel that was issued last."""
    filled = [named("other"), named(MULTIPLIED)]
    step = step_of(*filled, bucket(1), bucket(1), bucket(1), *filled, bucket(6))
    assert FlatBuffers(step).copies_of == {2: (1,), 7: (6,)}


def test_a_job_that_only_multiplies_has_no_buckets() -> None:
    """The gradients of a bucket come from other kernels."""
    step = step_of(*[named(MULTIPLIED)] * 3, bucket(2), *[named(MULTIPLIED)] * 3, bucket(6))
    assert not FlatBuffers(step).copies_of


def test_without_buckets_gradients_are_averaged_where_they_are() -> None:
    step = step_of(named("other"), named(MULTIPLIED), bucket(1), copy_back(64 * MIB))
    timeline = Simulator().run(step, H200, plan_of({2: BY_COPIES}))
    times_us = {each.operation: each.end_us - each.start_us for each in timeline.intervals}
    assert times_us[1] < 0.1
    assert times_us[3] < 0.1
    kept = {each.operation: each for each in Simulator().run(step, H200, LEAVE_IT).intervals}
    assert kept[1].end_us - kept[1].start_us == pytest.approx(100, rel=0.05)


def test_what_the_job_itself_moved_by_copies_keeps_its_kernel() -> None:
    moved = msgspec.structs.replace(collective("all_gather"), transport="copy_engine")
    timeline = Simulator().run(step_of(moved, named(OUT, 0)), H200, LEAVE_IT)
    assert timeline.intervals[1].end_us - timeline.intervals[1].start_us == pytest.approx(100, rel=0.05)


def test_small_buckets_are_joined_until_copies_pay() -> None:
    """DDP's default buckets on 8 GPUs have 3 MiB from each rank; those of a model of two of them stay with the library."""

    def of_buckets(number: int) -> Step:
        filled = (
            each
            for index in range(number)
            for each in (named("other"), named(MULTIPLIED), bucket(3 * index + 1, num_bytes=25 * MIB))
        )
        operations = [
            msgspec.structs.replace(each, group_size=8) if isinstance(each, Collective) else each for each in filled
        ]
        return step_of(*operations)

    (candidate,) = propose_transports(of_buckets(4), H200).candidates
    assert candidate.directives[0].match.operations == (2, 5, 8, 11)
    found = propose_transports(of_buckets(1), H200)
    assert not found.candidates
    assert "it sums less than 4 MiB from each rank" in found.refusals[0].reason


def test_a_captured_graph_keeps_its_kernels_when_copies_move_a_collective() -> None:
    buffered = step_of(named(IN), collective("reduce_scatter", 0, stream=1))
    for captured in (False, True):
        step = msgspec.structs.replace(buffered, is_timed_in_bursts=captured)
        first = Simulator().run(step, H200, plan_of({1: BY_COPIES})).intervals[0]
        assert (first.end_us - first.start_us > 90) == captured
