"""Schedules for property tests: all operators, sizes, ranks and descriptions, and what each defines, row by row."""

from collections import Counter

from hypothesis import assume
from hypothesis import strategies as st

from counterpoint.errors import ScheduleError
from counterpoint.schedule import (
    CopySchedule,
    Problem,
    Region,
    ScheduleDescription,
    backward_description,
    make_schedule,
    split,
)
from counterpoint.schedule.actions import Pass
from counterpoint.schedule.operations import OPERATORS as DEFINITIONS
from helpers.stream_double import Row

OPERATIONS = tuple(DEFINITIONS)
descriptions = st.builds(
    ScheduleDescription,
    pattern=st.sampled_from(["ring", "one_peer", "all_peers"]),
    chunks=st.integers(1, 5),
    matmul=st.sampled_from(["chunk", "peer", "fused", "rest"]),
    local=st.sampled_from(["first", "last"]),
    num_copy_streams=st.integers(1, 3),
    num_compute_streams=st.integers(1, 2),
    chunk_growth=st.sampled_from([1.0, 2.0, 0.5]),
)


def made(
    operation: str, ranks_and_rows: tuple[int, int], description: ScheduleDescription, direction: str
) -> CopySchedule | None:
    """The schedule, or None where the description does not fit the operation."""
    num_ranks, num_rows = ranks_and_rows
    problem = Problem(operation=operation, num_ranks=num_ranks, num_rows=num_rows, num_inner=3, num_columns=2)
    try:
        if direction == "backward":
            description = backward_description(operation, description)
        return make_schedule(problem, description, direction)
    except ScheduleError:
        return None


def first_pass(operation: str) -> Pass:
    """The first pass of an operation that copies something: of most, forward."""
    return DEFINITIONS[operation].passes()[0]


def given_rows(number: int) -> object:
    """The caller's rows in the call of that number: each is itself, once."""

    def content(region: Region) -> list[Row]:
        rows = range(region.start, region.stop)
        return [Counter({(region.buffer, region.rank, row, number): 1}) for row in rows]

    return content


def expected(schedule: CopySchedule, rank: int, number: int) -> list[Row]:
    """The product's rows by the operator's definition."""
    num_ranks, blocks = schedule.num_ranks, split(schedule.num_rows, schedule.num_ranks)
    own = range(*blocks[rank])

    def summed(buffer: str, rows: range) -> list[Row]:
        return [Counter({("times", each, buffer, each, row, number): 1 for each in range(num_ranks)}) for row in rows]

    operation, is_forward = schedule.operation, schedule.direction == "forward"
    if operation in ("matmul_all_reduce", "column_parallel_matmul"):
        return summed("activation", range(schedule.num_rows))
    if (operation == "matmul_reduce_scatter") == is_forward and operation != "all_to_all_matmul":
        return summed("activation", own)
    if operation != "all_to_all_matmul":
        return [
            Counter({("times", rank, "shard", owner, row, number): 1})
            for owner, (start, stop) in enumerate(blocks)
            for row in range(stop - start)
        ]
    if is_forward:
        return [Counter({("times", rank, "shard", owner, row, number): 1}) for owner in range(num_ranks) for row in own]
    lengths = [stop - start for start, stop in blocks]
    return [
        Counter({("times", owner, "activation", owner, rank * lengths[owner] + row, number): 1})
        for owner in range(num_ranks)
        for row in range(lengths[owner])
    ]


@st.composite
def schedules(draw: st.DrawFn, least_ranks: int = 1, most_rows: int = 40) -> CopySchedule:
    """A schedule of any operator in any direction that its description fits."""
    asked = (
        draw(st.sampled_from(OPERATIONS)),
        (draw(st.integers(least_ranks, 5)), draw(st.integers(1, most_rows))),
        draw(descriptions),
        draw(st.sampled_from(["forward", "backward"])),
    )
    schedule = made(*asked)
    assume(schedule is not None)
    assert schedule is not None
    return schedule
