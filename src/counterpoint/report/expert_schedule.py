"""Prints `counterpoint schedule experts`: the schedule of an operator for experts with its figures and its picture.

All times are estimates by arithmetic (`schedule/expert_estimate.py`). Nothing here has been measured or run, and the
output says so.
"""

from rich.console import Console
from rich.text import Text

from counterpoint.errors import ScheduleError
from counterpoint.machine import Machine
from counterpoint.report.schedule import (
    EstimatedSchedule,
    check_rank_to_draw,
    obstacle_on,
    print_lanes,
    print_remarks,
    times_table,
    traffic_lines,
    traffic_of,
)
from counterpoint.report.schedule_lanes import LaneSpan, StreamLane, lanes_of
from counterpoint.report.text import new_table
from counterpoint.schedule import CopySchedule, ScheduleDescription
from counterpoint.schedule.checks import CHECKS, check_schedule
from counterpoint.schedule.expert_choice import ExchangeChoice, pick_exchange, rank_expert_schedules
from counterpoint.schedule.expert_estimate import (
    estimate_experts,
    estimate_experts_ideal,
    estimate_experts_sequential,
    expert_communication_us,
    expert_computation_us,
    expert_ordering_us,
)
from counterpoint.schedule.expert_layout import LEAST_CUT_ROWS
from counterpoint.schedule.expert_schedules import ExpertProblem, make_expert_schedule
from counterpoint.units import format_count, format_us
from counterpoint.validation.bounds import bounds_for
from counterpoint.value import Value, require

MOST_SHOWN_RANKS = 16


class ExpertQuestion(Value, frozen=True, kw_only=True):
    """What to show: an operator call on a machine, seen from one rank. Without a description it is the schedule from the
    table, or the fastest by estimate if the table picks the library.
    """

    problem: ExpertProblem
    machine: Machine
    description: ScheduleDescription | None = None
    rank: int = 0

    def __post_init__(self) -> None:
        routing = self.problem.routing
        check_rank_to_draw(self.rank, routing.num_ranks, self.machine)
        most = max(max(routing.expert_rows(rank)) for rank in range(routing.num_ranks))
        num_groups = 1 if self.description is None else self.description.chunks
        require(
            num_groups <= routing.num_local_experts or most >= LEAST_CUT_ROWS,
            ScheduleError,
            f"chunks must be from 1 to {routing.num_local_experts}, the experts of a rank, because none has the "
            f"{LEAST_CUT_ROWS:,} rows from which an expert is cut; found {num_groups}. Ask for fewer.",
        )


class ExpertSummary(EstimatedSchedule, frozen=True, kw_only=True):
    """The schedule of an operator for experts, for programs."""

    problem: ExpertProblem
    pick: ExchangeChoice
    schedule: CopySchedule


def summarize_experts(question: ExpertQuestion) -> ExpertSummary:
    """Make the schedule, check it, and estimate it and its alternatives. Raises `ScheduleError`."""
    problem, machine = question.problem, question.machine
    pick = pick_exchange(problem.routing, problem.num_inner * problem.element_bytes, machine.link)
    candidates = rank_expert_schedules(problem, machine)
    description = question.description or (candidates[0] if pick.description.is_sequential else pick).description
    schedule = make_expert_schedule(problem, description)
    check_schedule(schedule)
    estimated = estimate_experts(schedule, problem, machine)
    traffic = traffic_of(schedule, question.rank, problem.element_bytes)
    return ExpertSummary(
        problem=problem,
        machine=machine.name,
        rank=question.rank,
        description=description,
        pick=pick,
        estimated_us=estimated.makespan_us,
        sequential_us=estimate_experts_sequential(problem, machine),
        communication_us=expert_communication_us(problem, machine),
        computation_us=expert_computation_us(problem, machine),
        ideal_us=estimate_experts_ideal(problem, machine),
        candidates=candidates,
        traffic=traffic,
        checks=tuple(name for name, _ in CHECKS if name != "ports"),
        lanes=lanes_of(schedule, estimated, question.rank),
        sequential_lanes=_sequential_lanes(problem, machine),
        bounds=bounds_for(machine, problem.routing.num_ranks, "copy schedules"),
        obstacle=obstacle_on(machine, traffic),
        schedule=schedule,
    )


def print_experts(console: Console, found: ExpertSummary) -> None:
    """Print the figures as a table, the rows of each rank, the picture, and in words what moves and what the table
    picks.
    """
    problem, routing = found.problem, found.problem.routing
    name = problem.operation + (" backward" if problem.direction == "backward" else "")
    sizes = f"rows of {problem.num_inner}, hidden size {problem.num_hidden}"
    experts = f"{format_count(routing.num_local_experts, 'expert')} on each of {format_count(routing.num_ranks, 'rank')}"
    console.print(Text.assemble((name, "bold"), f" of {sizes}, {experts}, machine {found.machine}"))
    console.print()
    console.print(times_table(found, "all-to-alls, reordering and matmuls of the slowest rank"))
    console.print()
    console.print(_rows(found))
    console.print()
    pictures = [("sequential", found.sequential_lanes), (f"{found.description.label()}, rank {found.rank}", found.lanes)]
    print_lanes(console, pictures, max(found.sequential_us, found.estimated_us))
    console.print()
    print_remarks(console, found, _remarks(found))


def _rows(found: ExpertSummary) -> object:
    """Return what each rank sends and computes."""
    routing = found.problem.routing
    table = new_table("rank", "rows", "kept", "sent", "received", "computed")
    for rank in range(min(routing.num_ranks, MOST_SHOWN_RANKS)):
        numbers = (
            routing.num_sent(rank),
            routing.pairs[rank][rank],
            routing.num_returning(rank),
            routing.num_landing(rank),
            routing.num_grouped(rank),
        )
        table.add_row(str(rank), *(f"{number:,}" for number in numbers))
    return table


def _remarks(found: ExpertSummary) -> list[str]:
    return [
        *traffic_lines(found, format_count(found.traffic.num_matmuls, "grouped matmul")),
        f"For these sizes, a call with gradients uses {found.pick.description.label()}: {found.pick.reason}.",
    ]


def _sequential_lanes(problem: ExpertProblem, machine: Machine) -> tuple[StreamLane, ...]:
    """Return the library's all-to-alls, and the kernels that reorder and multiply rows, as two lanes."""
    stages = problem.stages
    exchange_us = expert_communication_us(problem, machine) / stages.num_exchanges
    before_us, after_us = expert_ordering_us(problem, machine)
    matmuls_us = expert_computation_us(problem, machine)
    arriving_us = exchange_us * (stages.is_dispatched + stages.is_sent_again)
    parts = [("exchange", arriving_us), ("order", before_us), ("matmul", matmuls_us)]
    parts += [("order", after_us), ("exchange", exchange_us if stages.is_combined else 0.0)]
    exchanges: list[LaneSpan] = []
    kernels: list[LaneSpan] = []
    now_us = 0.0
    for name, lasts_us in parts:
        label = name if name == "order" else format_us(lasts_us)
        line = exchanges if name == "exchange" else kernels
        if lasts_us:
            line.append(LaneSpan(label=label, start_us=now_us, end_us=now_us + lasts_us))
        now_us += lasts_us
    lanes = (StreamLane(name="exchange", spans=tuple(exchanges)), StreamLane(name="matmul", spans=tuple(kernels)))
    return lanes if exchanges else lanes[1:]
