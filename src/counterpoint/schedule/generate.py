"""From a description and sizes to a schedule: one front door for all operators, forward and backward.

What each phase does is in `gathering.py` (blocks come to the matmul) and `reducing.py` (blocks leave the matmul).
Nothing here is particular to a machine. All copies are pushes: the rank that has rows writes them into the other's
symmetric buffer, so the input needs no copy of its own, and an arrival is one flag written behind the rows.
"""

import msgspec

from counterpoint.errors import ScheduleError
from counterpoint.schedule.actions import CopySchedule, Operation, Pass, Problem
from counterpoint.schedule.builder import Builder
from counterpoint.schedule.description import ScheduleDescription
from counterpoint.schedule.gather_schedules import (
    all_gather_matmul,
    all_to_all_matmul,
    matmul_reduce_scatter_backward,
)
from counterpoint.schedule.reduce_schedules import (
    all_gather_matmul_backward,
    all_to_all_matmul_backward,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from counterpoint.value import require


def backward_description(operation: Operation, description: ScheduleDescription) -> ScheduleDescription:
    """What a forward description means for the backward pass.

    All-gather becomes reduce-scatter there, whose pieces cannot wait for all peers (`rest`), and in a ring only go
    chunk by chunk.
    """
    if operation == "matmul_reduce_scatter" or description.is_sequential:
        return description
    if description.pattern == "ring":
        return msgspec.structs.replace(description, matmul="chunk")
    return msgspec.structs.replace(description, matmul="peer") if description.matmul == "rest" else description


def make_schedule(problem: Problem, description: ScheduleDescription, direction: Pass = "forward") -> CopySchedule:
    """The schedule that `description` means for these sizes.

    `problem` is the forward operator's in both directions. Raises `ScheduleError` for `sequential`, which has no
    chunks to schedule, for choices that a pattern has no use for, and for the backward pass of `matmul_all_reduce`,
    which copies nothing.
    """
    require(
        not description.is_sequential,
        ScheduleError,
        "The pattern 'sequential' runs the library's collective and has no copies. Choose ring, one_peer or all_peers.",
    )
    generators = {
        ("all_gather_matmul", "forward"): all_gather_matmul,
        ("all_to_all_matmul", "forward"): all_to_all_matmul,
        ("matmul_reduce_scatter", "forward"): matmul_reduce_scatter,
        ("matmul_all_reduce", "forward"): matmul_all_reduce,
        ("all_gather_matmul", "backward"): all_gather_matmul_backward,
        ("all_to_all_matmul", "backward"): all_to_all_matmul_backward,
        ("matmul_reduce_scatter", "backward"): matmul_reduce_scatter_backward,
    }
    require(
        (problem.operation, direction) in generators,
        ScheduleError,
        f"{problem.operation} copies nothing in its {direction} pass, so it has no schedule. Take the forward pass.",
    )
    builder = Builder(problem, description)
    generators[problem.operation, direction](builder)
    return builder.finish(direction)
