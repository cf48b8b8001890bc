"""FSDP2's copies into and out of flat buffers, which copies in place make unnecessary."""

import msgspec
import pytest

from counterpoint.controls import Transport
from counterpoint.plan import LEAVE_IT
from counterpoint.sim import Simulator
from counterpoint.sim.flat_buffers import FlatBuffers
from counterpoint.step import Collective, CollectiveKind, Dependency, Operation
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
    return msgspec.structs.replace(kernel(132, 100.0), name=name, waits_for=waits_for)


def test_each_collective_of_a_trace_has_its_kernel() -> None:
    step = read_trace(TRACES / "fsdp2.rank0.json.gz").step
    operations, buffers = step.operations, FlatBuffers(step)
    kinds = [each.collective for number in buffers.kernel_of if isinstance(each := operations[number], Collective)]
    assert sorted(kinds) == ["all_gather"] * 12 + ["reduce_scatter"] * 6
    assert len(set(buffers.kernel_of.values())) == 18
    for number, of_buffer in buffers.kernel_of.items():
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
    assert FlatBuffers(step_of(*operations)).kernel_of == {1: 2}
    assert not FlatBuffers(step_of(*operations[:2], *operations[3:])).kernel_of


def test_a_kernel_at_the_start_belongs_to_the_step_before() -> None:
    operations = [named(OUT), collective("all_gather"), named(OUT, 1), collective("all_gather")]
    assert FlatBuffers(step_of(*operations)).kernel_of == {1: 2}


@pytest.mark.parametrize("name", [IN, WIDER])
def test_gradients_are_sent_in_their_own_type(name: str) -> None:
    step = step_of(named(name), collective("reduce_scatter", 0))
    plan = plan_of({1: BY_COPIES})
    timeline = Simulator().run(step, H200, plan)
    copied_in, reduced = sorted(timeline.intervals, key=lambda each: each.operation)
    assert copied_in.end_us - copied_in.start_us < 0.1
    flat = Simulator().run(step_of(collective("reduce_scatter")), H200, plan_of({0: BY_COPIES})).intervals[0]
    share = (reduced.end_us - reduced.start_us) / (flat.end_us - flat.start_us)
    assert (0.5 < share < 0.6) if name == WIDER else (1 < share < 1.1)


def test_what_the_job_itself_moved_by_copies_keeps_its_kernel() -> None:
    moved = msgspec.structs.replace(collective("all_gather"), transport="copy_engine")
    timeline = Simulator().run(step_of(moved, named(OUT, 0)), H200, LEAVE_IT)
    assert timeline.intervals[1].end_us - timeline.intervals[1].start_us == pytest.approx(100, rel=0.05)
