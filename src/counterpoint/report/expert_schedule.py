"""Prints `counterpoint schedule experts`: the schedule of an operator for experts with its figures and its picture.

All times are estimates by arithmetic (`schedule/expert_estimate.py`). Nothing here has been measured or run, and the
output says so.
"""

from rich.console import Console
from rich.text import Text

from counterpoint.errors import ScheduleError
from counterpoint.machine import Machine
from counterpoint.report.schedule import LEGEND, Traffic, print_lanes, traffic_of
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
from counterpoint.schedule.expert_schedules import ExpertProblem, make_expert_schedule
from counterpoint.schedule.heuristic import RankedSchedule
from counterpoint.sim.nodes import check_ranks
from counterpoint.units import format_bytes, format_change, format_count, format_us
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
        num_ranks = self.problem.routing.num_ranks
        check_ranks(num_ranks, self.machine)
        require(
            0 <= self.rank < num_ranks,
            ScheduleError,
            f"The rank to draw must be from 0 to {num_ranks - 1}; found {self.rank}. Name one of these.",
        )


class ExpertSummary(Value, frozen=True, kw_only=True):
    """A schedule with its estimate, for programs. Times are estimated, in microseconds."""

    problem: ExpertProblem
    machine: str
    rank: int
    description: ScheduleDescription
    pick: ExchangeChoice
    estimated_us: float
    sequential_us: float
    communication_us: float
    computation_us: float
    ideal_us: float
    candidates: tuple[RankedSchedule, ...]
    traffic: Traffic
    checks: tuple[str, ...]
    lanes: tuple[StreamLane, ...]
    sequential_lanes: tuple[StreamLane, ...]
    schedule: CopySchedule


def summarize_experts(question: ExpertQuestion) -> ExpertSummary:
    """Make the schedule, check it, and estimate it and its alternatives. Raises `ScheduleError`."""
    problem, machine = question.problem, question.machine
    pick = pick_exchange(problem.routing, problem.num_inner * problem.element_bytes)
    candidates = rank_expert_schedules(problem, machine)
    description = question.description or (candidates[0] if pick.description.is_sequential else pick).description
    schedule = make_expert_schedule(problem, description)
    check_schedule(schedule)
    estimated = estimate_experts(schedule, problem, machine)
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
        traffic=traffic_of(schedule, question.rank, problem.element_bytes),
        checks=tuple(name for name, _ in CHECKS if name != "ports"),
        lanes=lanes_of(schedule, estimated, question.rank),
        sequential_lanes=_sequential_lanes(problem, machine),
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
    console.print(_times(found))
    console.print()
    console.print(_rows(found))
    console.print()
    pictures = [("sequential", found.sequential_lanes), (f"{found.description.label()}, rank {found.rank}", found.lanes)]
    print_lanes(console, pictures, max(found.sequential_us, found.estimated_us))
    console.print()
    for line in _remarks(found):
        console.print(Text(line))
    console.print(Text("Estimated by arithmetic, not measured: no GPU was used.", style="dim"))


def _times(found: ExpertSummary) -> object:
    table = new_table("estimated", "time", "change", "")
    table.columns[-1].justify = "left"

    def add(name: str, time_us: float, remark: str, style: str = "") -> None:
        change = format_change(time_us / found.sequential_us - 1) if time_us != found.sequential_us else ""
        table.add_row(Text(name, style=style), format_us(time_us), change, Text(remark, style="dim"))

    add("sequential", found.sequential_us, "all-to-alls, reordering and matmuls of the slowest rank")
    shown = RankedSchedule(description=found.description, estimated_us=found.estimated_us)
    rivals = [each for each in found.candidates if each.description != found.description]
    for row in sorted([shown, *rivals], key=lambda each: each.estimated_us):
        is_shown = row.description == found.description
        add(row.description.label(), row.estimated_us, "drawn below" if is_shown else "", "bold" if is_shown else "")
    add("ideal", found.ideal_us, "the longer of the two, each alone")
    return table


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
    traffic = found.traffic
    used = "a light kernel" if found.pick.is_light else found.pick.description.label()
    return [
        LEGEND,
        f"Rank {found.rank} issues {format_count(traffic.num_copies, 'copy', 'copies')} of "
        f"{format_bytes(traffic.num_sent_bytes)} in all, {format_count(traffic.num_matmuls, 'grouped matmul')}; "
        f"{format_bytes(traffic.symmetric_bytes)} of symmetric memory on each rank.",
        f"Checked: {', '.join(found.checks)}.",
        f"For these sizes, a call uses {used}: {found.pick.reason}.",
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
