"""Builds a schedule from a description and sizes, for all operators, forward and backward.

`operations.py` defines the operators. Nothing here depends on a machine. All copies are pushes: the rank that has rows
writes them into the other's symmetric buffer, so the input needs no copy of its own, and one flag written after the rows
signals their arrival.
"""

import msgspec

from counterpoint.errors import ScheduleError
from counterpoint.schedule.actions import CopySchedule, Operation, Pass, Problem
from counterpoint.schedule.builder import Builder
from counterpoint.schedule.description import ScheduleDescription
from counterpoint.schedule.operations import OPERATORS, scheduled_pass
from counterpoint.schedule.slices import sliced_builder
from counterpoint.value import require


def backward_description(operation: Operation, description: ScheduleDescription) -> ScheduleDescription:
    """Return the description of the backward pass for a forward description.

    All-gather becomes reduce-scatter there, whose pieces cannot wait for all peers (`rest`), and in a ring are always
    chunks. Slices become chunks of rows.
    """
    backward = OPERATORS[operation].backward
    if description.along != "rows":
        description = msgspec.structs.replace(description, along="rows")
    if description.is_sequential or (backward is not None and not backward.is_reduction):
        return description
    if description.pattern == "ring":
        return msgspec.structs.replace(description, matmul="chunk")
    return msgspec.structs.replace(description, matmul="peer") if description.matmul == "rest" else description


def make_schedule(problem: Problem, description: ScheduleDescription, direction: Pass = "forward") -> CopySchedule:
    """Return the schedule of `description` for these sizes.

    `problem` is the forward operator's in both directions. Raises `ScheduleError` for `sequential`, which has no
    chunks to schedule, for choices that a pattern does not use, and for a backward pass that copies nothing.
    """
    require(
        not description.is_sequential,
        ScheduleError,
        "The pattern 'sequential' runs the library's collective and has no copies. Choose ring, one_peer or all_peers.",
    )
    require(
        description.along != "experts",
        ScheduleError,
        "Only tokens for experts can be cut along experts; found 'experts' for equal blocks. Cut rows.",
    )
    definition = scheduled_pass(problem.operation, direction)
    if description.along != "rows":
        require(
            direction == "forward",
            ScheduleError,
            f"Slices along {description.along} are for forward passes; found the backward pass. Cut rows there.",
        )
        return sliced_builder(problem, description).finish(direction, problem.num_rows)
    builder = Builder(problem, description)
    longest = max(stop - start for start, stop in builder.blocks)
    for buffer in definition.buffers:
        builder.buffer(buffer.name, buffer.home, *buffer.shape(problem, longest))
    definition.generate(builder)
    return builder.finish(direction, problem.num_rows)
