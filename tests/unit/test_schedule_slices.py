"""Schedules in slices of the product's columns and of the inner size: right for any sizes, refused where they do not fit."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import ScheduleError
from counterpoint.machine import load_machine
from counterpoint.schedule import CopySchedule, Problem, ScheduleDescription, make_schedule
from counterpoint.schedule.checks import check_schedule
from counterpoint.schedule.delivery import delivery_faults
from counterpoint.schedule.estimate import estimate

H200 = load_machine("h200")
OPERATION_OF = {"columns": "matmul_reduce_scatter", "inner": "all_gather_matmul"}
along = st.sampled_from(["columns", "inner"])


def problem(slices_along: str, **sizes: int) -> Problem:
    usual = {"num_ranks": 4, "num_rows": 16, "num_inner": 12, "num_columns": 12}
    return Problem(operation=OPERATION_OF[slices_along], **(usual | sizes))


def sliced(slices_along: str, num_rows: int = 16, num_ranks: int = 4, **choices: object) -> CopySchedule:
    description = ScheduleDescription(along=slices_along, **({"chunks": 3} | choices))
    return make_schedule(problem(slices_along, num_rows=num_rows, num_ranks=num_ranks), description)


@given(
    slices_along=along,
    num_ranks=st.integers(1, 5),
    num_rows=st.integers(1, 40),
    pattern=st.sampled_from(["ring", "one_peer", "all_peers"]),
    chunks=st.sampled_from([2, 3, 4, 6]),
    streams=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    local=st.sampled_from(["first", "last"]),
)
def test_slices_pass_every_check(
    slices_along: str, num_ranks: int, num_rows: int, streams: tuple[int, int], **choices
) -> None:
    copy_streams, compute_streams = streams
    counts = {"num_copy_streams": copy_streams, "num_compute_streams": compute_streams}
    check_schedule(sliced(slices_along, num_rows, num_ranks, **counts, **choices))


@given(slices_along=along, data=st.data())
def test_a_matmul_with_another_slice_of_the_weight_is_found(slices_along: str, data: st.DataObject) -> None:
    schedule, field = sliced(slices_along), "weight_columns" if slices_along == "columns" else "weight_rows"
    parts = [number for number, action in enumerate(schedule.actions) if getattr(action, field) is not None]
    number = data.draw(st.sampled_from(parts))
    start, stop = getattr(schedule.actions[number], field)
    wrong = msgspec.structs.replace(schedule.actions[number], **{field: ((start + 4) % 12, (start + 4) % 12 + stop - start)})
    actions = (*schedule.actions[:number], wrong, *schedule.actions[number + 1 :])
    assert list(delivery_faults(msgspec.structs.replace(schedule, actions=actions)))


def test_slices_of_columns_multiply_whole_blocks_and_slices_of_the_inner_size_add_up() -> None:
    of_columns, of_inner = sliced("columns", pattern="all_peers"), sliced("inner")
    pieces = [action for action in of_columns.actions if action.kind == "matmul" and action.rank == 0]
    assert {piece.reads[0].num_rows for piece in pieces} == {4}
    assert {piece.weight_columns for piece in pieces} == {(0, 4), (4, 8), (8, 12)}
    kinds = [action.kind for action in of_inner.actions if action.rank == 0 and action.weight_rows]
    assert sorted(kinds) == ["add_matmul"] * 6 + ["matmul"] * 3
    assert of_inner.description.label() == "one_peer/3 inner chunk 1+2"


def test_slices_of_the_inner_size_are_estimated_to_cost_what_adding_up_costs() -> None:
    asked = problem("inner", num_ranks=2, num_rows=16384, num_inner=8192, num_columns=4096)
    rows, inner = (
        estimate(make_schedule(asked, each), asked, H200).makespan_us
        for each in (ScheduleDescription(chunks=8), ScheduleDescription(chunks=8, along="inner"))
    )
    assert rows < inner < 1.5 * rows


@pytest.mark.parametrize(
    ("asked", "choices", "says"),
    [
        (problem("inner"), {"along": "columns", "chunks": 2}, "along columns are for .* matmul_reduce_scatter; found all_g"),
        (problem("columns"), {"along": "inner", "chunks": 2}, "along inner are for .* all_gather_matmul; found matmul_r"),
        (problem("columns"), {"along": "columns", "chunks": 5}, "2 or more and divide 12; found chunks 5"),
        (problem("inner"), {"along": "inner", "chunks": 1}, "2 or more and divide 12; found chunks 1"),
        (problem("inner"), {"along": "inner", "chunks": 2, "matmul": "fused"}, "granularity chunk; found 'fused'"),
        (problem("inner"), {"along": "inner", "chunks": 2, "chunk_growth": 2.0}, "chunk_growth 2"),
    ],
)
def test_slices_that_do_not_fit_are_refused_in_one_line(asked: Problem, choices: dict[str, object], says: str) -> None:
    with pytest.raises(ScheduleError, match=says) as caught:
        make_schedule(asked, ScheduleDescription(**choices))
    assert "\n" not in str(caught.value)


def test_backward_passes_are_cut_along_rows() -> None:
    with pytest.raises(ScheduleError, match="are for forward passes; found the backward pass"):
        make_schedule(problem("inner"), ScheduleDescription(chunks=2, along="inner"), "backward")
