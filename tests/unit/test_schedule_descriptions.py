"""From a description to a schedule: what is refused, what each choice changes, and the flags that both ends number alike."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import ScheduleError
from counterpoint.schedule import (
    SEQUENTIAL,
    Action,
    CopySchedule,
    Problem,
    ScheduleDescription,
    backward_description,
    make_schedule,
    split,
)
from counterpoint.schedule.actions import COMPUTATION_KINDS, graded
from counterpoint.schedule.program import make_program
from helpers.schedules import descriptions, made, schedules


def problem(operation: str = "all_gather_matmul", **sizes: int) -> Problem:
    return Problem(operation=operation, **({"num_ranks": 4, "num_rows": 16, "num_inner": 3, "num_columns": 2} | sizes))


def schedule_of(operation: str, num_rows: int = 16, **choices: object) -> CopySchedule:
    return make_schedule(problem(operation, num_rows=num_rows), ScheduleDescription(**choices))


def of_kind(schedule: CopySchedule, kind: str) -> list[Action]:
    """The actions of that kind of the first rank."""
    return [action for action in schedule.actions if action.kind == kind and action.rank == 0]


@given(schedule=schedules())
def test_of_the_first_pieces_of_two_streams_only_one_waits_for_nothing(schedule: CopySchedule) -> None:
    """Were both ready at once, the hardware could run the second before the first, whose copy is waited for."""
    opened: dict[tuple[int, str], Action] = {}
    for action in schedule.actions:
        if action.kind in COMPUTATION_KINDS:
            opened.setdefault((action.rank, action.stream), action)
    for rank in range(schedule.num_ranks):
        assert sum(not action.after for (owner, _), action in opened.items() if owner == rank) <= 1


@given(st.integers(0, 1000), st.integers(1, 70))
def test_rows_are_divided_as_numpy_divides_an_array(num_rows: int, num_parts: int) -> None:
    parts = np.array_split(np.arange(num_rows), num_parts)
    assert [list(range(*part)) for part in split(num_rows, num_parts)] == [list(part) for part in parts]


@given(st.integers(0, 5000), st.integers(1, 9), st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 4.0]))
def test_graded_parts_follow_each_other_and_grow_or_shrink(num_rows: int, num_parts: int, growth: float) -> None:
    parts = graded(num_rows, num_parts, growth)
    assert [part[0] for part in parts] + [num_rows] == [0, *(part[1] for part in parts)]
    if num_rows >= 4 * 128 * num_parts and growth != 1:
        lengths = [stop - start for start, stop in parts]
        assert all(start % 128 == 0 for start, _ in parts)
        assert max(lengths) == lengths[-1 if growth > 1 else 0]
        assert sum(lengths) == num_rows


def test_a_small_first_chunk_is_sent_and_multiplied_first() -> None:
    schedule = schedule_of("all_gather_matmul", num_rows=4 * 7 * 256, chunks=3, chunk_growth=2.0)
    lengths = [copy.reads[0].num_rows for copy in of_kind(schedule, "copy")][:3]
    assert lengths == [256, 512, 1024]
    assert ScheduleDescription(chunks=3, chunk_growth=2.0).label() == "one_peer/3x2 chunk 1+2"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ScheduleDescription(chunks=0), "chunks of a schedule must be from 1 to 64; found 0"),
        (lambda: ScheduleDescription(chunks=65), "must be from 1 to 64; found 65"),
        (lambda: ScheduleDescription(chunk_growth=5.0), "chunk_growth .* from 0.25 to 4; found 5.0"),
        (lambda: ScheduleDescription(num_copy_streams=9), "num_copy_streams .* from 1 to 8; found 9"),
        (lambda: ScheduleDescription(num_compute_streams=3), "num_compute_streams .* from 1 to 2; found 3"),
        (lambda: ScheduleDescription(chunks="2"), "chunks of a schedule must be from 1 to 64; found '2'"),
        (lambda: ScheduleDescription(num_compute_streams=None), "from 1 to 2; found None"),
        (
            lambda: ScheduleDescription(pattern="star"),
            "pattern of a schedule must be sequential, ring, one_peer or all_peers; found 'star'. Change it.",
        ),
        (lambda: ScheduleDescription(pattern=["ring"]), "one_peer or all_peers; found .'ring'."),
        (lambda: ScheduleDescription(matmul="all"), "matmul .* must be chunk, peer, fused or rest; found 'all'"),
        (lambda: ScheduleDescription(local="middle"), "local .* must be first or last; found 'middle'"),
        (lambda: problem(num_ranks=0), "must have 1 to 64 ranks; found 0"),
        (lambda: problem(num_ranks=65), "must have 1 to 64 ranks; found 65"),
        (lambda: problem(num_rows=0), "num_rows must be from 1 to .*; found 0"),
        (lambda: problem(num_inner=10**400), "num_inner must be from 1 to"),
        (lambda: problem(num_columns=-5), "num_columns .* found -5"),
        (lambda: make_schedule(problem(), SEQUENTIAL), "'sequential' runs the library's collective"),
        (lambda: schedule_of("all_to_all_matmul", pattern="ring"), "takes the pattern one_peer or all_peers; found 'ring'"),
        (lambda: schedule_of("matmul_reduce_scatter", matmul="rest"), "chunk, peer or fused; found 'rest'"),
        (
            lambda: schedule_of("matmul_reduce_scatter", pattern="ring", matmul="fused"),
            "pattern 'ring' takes matmul granularity chunk; found 'fused'",
        ),
        (
            lambda: make_schedule(problem("matmul_all_reduce"), ScheduleDescription(), "backward"),
            "copies nothing in its backward pass",
        ),
    ],
)
def test_what_makes_no_schedule_is_refused_in_one_line(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ScheduleError, match=says) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("chunks", "num_copies"), [(1, 3), (2, 6), (4, 12), (64, 12)])
def test_a_block_travels_in_as_many_chunks_as_asked_for_and_it_has_rows(chunks: int, num_copies: int) -> None:
    for pattern in ("one_peer", "all_peers", "ring"):
        assert len(of_kind(schedule_of("all_gather_matmul", chunks=chunks, pattern=pattern), "copy")) == num_copies


@pytest.mark.parametrize(("matmul", "num_matmuls"), [("chunk", 1 + 3 * 2), ("peer", 1 + 3), ("fused", 1 + 2), ("rest", 2)])
def test_the_granularity_of_the_matmul_is_chosen_apart_from_that_of_the_copies(matmul: str, num_matmuls: int) -> None:
    schedule = schedule_of("all_gather_matmul", chunks=2, matmul=matmul)
    assert len(of_kind(schedule, "matmul")) == num_matmuls
    assert len(of_kind(schedule, "copy")) == 6


def test_patterns_differ_in_who_is_sent_to_when() -> None:
    def receivers(pattern: str) -> list[int]:
        copies = of_kind(schedule_of("all_gather_matmul", chunks=2, pattern=pattern), "copy")
        return [copy.writes[0].rank for copy in copies]

    assert receivers("one_peer") == [3, 3, 2, 2, 1, 1]
    assert receivers("all_peers") == [3, 2, 1, 3, 2, 1]
    assert receivers("ring") == [3] * 6


@pytest.mark.parametrize("local", ["first", "last"])
def test_the_rows_of_the_rank_itself_are_multiplied_first_or_last(local: str) -> None:
    own = [not action.after for action in of_kind(schedule_of("all_gather_matmul", local=local), "matmul")]
    assert own == ([True, False, False, False] if local == "first" else [False, False, False, True])


def test_reductions_do_their_own_block_last_so_that_it_hides_the_last_copies() -> None:
    matmuls = of_kind(schedule_of("matmul_reduce_scatter"), "matmul")
    assert [matmul.reads[0].start for matmul in matmuls] == [12, 8, 4, 0]


@given(descriptions)
def test_every_gather_has_a_backward_pass(description: ScheduleDescription) -> None:
    assert made("all_gather_matmul", (3, 7), description, "backward") is not None


def test_a_sequential_description_is_sequential_backward_too() -> None:
    assert backward_description("all_gather_matmul", SEQUENTIAL) is SEQUENTIAL


@given(schedules(least_ranks=2))
def test_both_ends_of_a_flag_give_it_the_same_number_once(schedule: CopySchedule) -> None:
    programs = [make_program(schedule, rank) for rank in range(schedule.num_ranks)]
    taken, raised = [], []
    for program in programs:
        for step in program.steps:
            taken += [(flag.peer, program.rank, flag.number) for flag in step.takes]
            raised += [(program.rank, flag.peer, flag.number) for flag in (*step.announces, *step.raises)]
            assert all(flag.number < program.num_flags for flag in (*step.announces, *step.takes, *step.raises))
    assert sorted(taken) == sorted(raised)
    assert len(set(taken)) == len(taken)


def test_labels_tell_descriptions_apart() -> None:
    assert ScheduleDescription(chunks=2).label() == "one_peer/2 chunk 1+2"
    assert ScheduleDescription(pattern="ring", local="last", num_copy_streams=3).label() == "ring/1 chunk local last 3+2"
    assert SEQUENTIAL.label() == "sequential"
