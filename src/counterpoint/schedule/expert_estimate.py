"""Estimates an operator for experts by arithmetic: with its schedule, sequentially, and ideally.

Every rank waits for the slowest: the library's all-to-all takes as long as one of equal parts that are as large as the
largest (its kernels use equally many CTAs for every peer, and also copy what a rank keeps), and the rank with most tokens
determines the time of the matmuls. The sequential form needs a kernel that puts rows in the order of experts, once in each
direction. A grouped matmul has the tiles of each expert's rows. docs/schedules.md has the estimates beside measurements.
"""

from counterpoint.machine import Machine
from counterpoint.schedule.actions import CopySchedule, Problem
from counterpoint.schedule.costs import Clock
from counterpoint.schedule.estimate import Estimate, estimate
from counterpoint.schedule.expert_schedules import ExpertProblem
from counterpoint.schedule.routing import Routing

ORDERING_PASSES = (
    2  # of rows by expert before the matmuls: measured 1.9 to 2.6, on H200s with torch 2.11; after them about 1
)


def estimate_experts(schedule: CopySchedule, problem: ExpertProblem, machine: Machine) -> Estimate:
    """Return the times of all actions of a schedule."""
    return estimate(schedule, _as_equal(problem), machine)


def expert_communication_us(problem: ExpertProblem, machine: Machine) -> float:
    """Return the time of the library's all-to-alls alone."""
    routing, clock = problem.routing, Clock(_as_equal(problem), machine)
    if not any(routing.num_landing(rank) for rank in range(routing.num_ranks)):
        return 0.0
    share = (routing.num_ranks - 1) / routing.num_ranks
    return problem.stages.num_exchanges * clock.collective_us(round(_slowest_rows(routing) * problem.num_inner * share))


def expert_computation_us(problem: ExpertProblem, machine: Machine) -> float:
    """Return the time of the matmuls and the activation of the rank that computes most, alone."""
    clock = Clock(_as_equal(problem), machine)
    return max(_computed_us(problem, clock, rank) for rank in range(problem.routing.num_ranks))


def estimate_experts_sequential(problem: ExpertProblem, machine: Machine) -> float:
    """Return the time of the library's all-to-alls, the kernels that reorder rows, and the matmuls, one after the other."""
    ordered_us = sum(expert_ordering_us(problem, machine))
    return expert_communication_us(problem, machine) + ordered_us + expert_computation_us(problem, machine)


def expert_ordering_us(problem: ExpertProblem, machine: Machine) -> tuple[float, float]:
    """Return the time for reordering rows by expert after the library's all-to-all, and back before the next one."""
    routing, clock = problem.routing, Clock(_as_equal(problem), machine)
    most = max(routing.num_grouped(rank) for rank in range(routing.num_ranks))
    pass_us = clock.activation_us(2 * most * problem.num_inner) if most else 0.0
    stages = problem.stages
    num_arrivals = stages.is_dispatched + stages.is_sent_again
    return ORDERING_PASSES * pass_us * num_arrivals, pass_us * stages.is_combined


def estimate_experts_ideal(problem: ExpertProblem, machine: Machine) -> float:
    """Return the longer of computation and communication, each alone; communication by whichever is faster, the library's
    all-to-alls or copies without a pause. Copies to the experts and back run at the same time, so the rank that sends or
    receives most of both together counts."""
    most, clock = _most_crossing_rows(problem), Clock(_as_equal(problem), machine)
    copied_us = clock.copies_us(most * problem.num_inner) if most else 0.0
    alone_us = min(copied_us, expert_communication_us(problem, machine))
    return max(alone_us, expert_computation_us(problem, machine))


def _most_crossing_rows(problem: ExpertProblem) -> int:
    """Return the rows that the busiest rank sends, or receives, in all exchanges of the pass together."""
    routing, stages = problem.routing, problem.stages
    there, back = stages.is_dispatched + stages.is_sent_again, int(stages.is_combined)
    # rows that land on a rank leave it in combine, and those that return to it left it in dispatch
    ways = [(routing.num_landing(rank), routing.num_returning(rank)) for rank in range(routing.num_ranks)]
    return max(max(there * landing + back * returning, there * returning + back * landing) for landing, returning in ways)


def _slowest_rows(routing: Routing) -> int:
    """Return the rows of a buffer of equal parts for which the library takes as long."""
    ranks = range(routing.num_ranks)
    largest = max(max(routing.num_sent(rank), routing.num_grouped(rank)) for rank in ranks)
    return max(largest, routing.num_ranks * routing.most_rows)


def _computed_us(problem: ExpertProblem, clock: Clock, rank: int) -> float:
    stages, rows = problem.stages, problem.routing.expert_rows(rank)
    if not any(rows):
        return 0.0
    taken_us = 0.0
    if stages.is_dispatched:
        taken_us += clock.grouped_us(rows, problem.num_inner, problem.num_made_columns)
    if stages.is_dispatched and stages.is_combined:
        num_columns = problem.num_first_columns + problem.num_hidden
        taken_us += clock.activation_us(sum(rows) * num_columns * (1 if problem.direction == "forward" else 2))
    if stages.is_combined:
        taken_us += clock.grouped_us(rows, problem.num_taken_columns, problem.num_inner)
    for *_, name in stages.gradients:
        is_first = name == "first_gradient"
        left, right = (problem.num_first_columns, problem.num_inner) if is_first else (problem.num_inner, problem.num_hidden)
        taken_us += clock.grouped_us(rows, left, right, is_gradient=True)
    return taken_us


def _as_equal(problem: ExpertProblem) -> Problem:
    """Return a problem of equal blocks with the average rank's rows and multiplications."""
    routing, stages = problem.routing, problem.stages
    num_rows = sum(routing.num_sent(rank) for rank in range(routing.num_ranks)) // routing.num_ranks
    columns = problem.num_first_columns * (0 in stages.layers) + problem.num_hidden * (1 in stages.layers)
    return Problem(
        operation="all_to_all_matmul",
        num_ranks=routing.num_ranks,
        num_rows=max(1, num_rows),
        num_inner=problem.num_inner,
        num_columns=columns,
        element_bytes=problem.element_bytes,
    )
