"""Prints `counterpoint schedule show`: a schedule's figures, its picture, and what the heuristic would choose. What other
reports of schedules have in common stands here, too.

All times are estimates by arithmetic (`schedule/estimate.py`). Nothing here has been measured or run, and the output
says so.
"""

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from counterpoint.errors import ScheduleError
from counterpoint.machine import Machine
from counterpoint.report.schedule_lanes import LaneSpan, StreamLane, draw_lane, lanes_of, tell_order
from counterpoint.report.text import new_table
from counterpoint.schedule import CopySchedule, Problem, ScheduleDescription, backward_description, make_schedule
from counterpoint.schedule.actions import DataType, Pass
from counterpoint.schedule.checks import CHECKS, check_schedule
from counterpoint.schedule.estimate import (
    communication_us,
    computation_us,
    estimate,
    estimate_ideal,
    estimate_sequential,
)
from counterpoint.schedule.heuristic import Pick, RankedSchedule, pick_schedule, rank_candidates
from counterpoint.schedule.operations import scheduled_pass
from counterpoint.schedule.program import make_program
from counterpoint.sim.nodes import check_ranks
from counterpoint.units import format_bytes, format_change, format_count, format_span, format_us
from counterpoint.validation.bounds import ErrorBounds, bounds_for
from counterpoint.value import Value, require

SHOWN_CANDIDATES = 6
LABEL_WIDTH = 11
MAX_DRAWN_COLUMNS = 130


LEGEND = (
    "Letters are arriving pieces: a matmul [a] needs piece a, [own] needs none, [>2] goes to rank 2. Short "
    "pieces lack brackets; [], [-] and | are too short for a label."
)


class Question(Value, frozen=True, kw_only=True):
    """What to show: an operator call on a machine, seen from one rank. Without a description it is the heuristic's pick."""

    problem: Problem
    dtype: DataType
    machine: Machine
    direction: Pass = "forward"
    description: ScheduleDescription | None = None
    rank: int = 0

    def __post_init__(self) -> None:
        check_rank_to_draw(self.rank, self.problem.num_ranks, self.machine)


def check_rank_to_draw(rank: int, num_ranks: int, machine: Machine) -> None:
    """Raise a `CounterpointError` for a rank that is not there, or more ranks than the machine has."""
    check_ranks(num_ranks, machine)
    require(
        0 <= rank < num_ranks,
        ScheduleError,
        f"The rank to draw must be from 0 to {num_ranks - 1}; found {rank}. Name one of these.",
    )


class Traffic(Value, frozen=True, kw_only=True):
    """What one rank issues, and the schedule's memory on each rank; a collective counts as nothing."""

    num_copies: int = 0
    num_sent_bytes: int = 0
    num_matmuls: int = 0
    num_sums: int = 0
    num_flags: int = 0
    symmetric_bytes: int = 0


class EstimatedSchedule(Value, frozen=True, kw_only=True):
    """A schedule as one rank sees it, with its estimate and its alternatives. Times are estimated, in microseconds.

    `checks` are the checks that the schedule passed. `bounds` are those of every time. `obstacle` says why the machine
    cannot run the schedule; it is empty if it can.
    """

    machine: str
    rank: int
    description: ScheduleDescription
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
    bounds: ErrorBounds
    obstacle: str = ""


class ScheduleSummary(EstimatedSchedule, frozen=True, kw_only=True):
    """The figures of `schedule show`, for programs. `schedule` is None if the description is `sequential`."""

    problem: Problem
    dtype: DataType
    direction: Pass
    pick: Pick
    schedule: CopySchedule | None = None


def summarize_schedule(question: Question) -> ScheduleSummary:
    """Make the schedule, check it, and estimate it and its alternatives. Raises `ScheduleError`."""
    problem, machine, direction = question.problem, question.machine, question.direction
    scheduled_pass(problem.operation, direction)  # otherwise there is nothing to show
    pick = pick_schedule(problem, machine, direction)
    description = question.description or pick.description
    if direction == "backward":
        description = backward_description(problem.operation, description)
    sequential_us = estimate_sequential(problem, machine, direction=direction)
    sequential_lanes = _sequential_lanes(question)
    schedule, traffic, estimated_us, lanes = None, Traffic(), sequential_us, sequential_lanes
    if not description.is_sequential:
        schedule = make_schedule(problem, description, direction)
        check_schedule(schedule)
        traffic = traffic_of(schedule, question.rank, problem.element_bytes)
        estimated = estimate(schedule, problem, machine)
        estimated_us, lanes = estimated.makespan_us, lanes_of(schedule, estimated, question.rank)
    return ScheduleSummary(
        problem=problem,
        dtype=question.dtype,
        direction=direction,
        machine=machine.name,
        rank=question.rank,
        description=description,
        pick=pick,
        estimated_us=estimated_us,
        sequential_us=sequential_us,
        communication_us=communication_us(problem, machine, direction=direction),
        computation_us=computation_us(problem, machine, direction=direction),
        ideal_us=estimate_ideal(problem, machine, direction=direction),
        candidates=rank_candidates(problem, machine, direction),
        traffic=traffic,
        checks=tuple(name for name, _ in CHECKS) if schedule else (),
        lanes=lanes,
        sequential_lanes=sequential_lanes,
        bounds=bounds_for(machine, problem.num_ranks, "copy schedules"),
        obstacle=obstacle_on(machine, traffic),
        schedule=schedule,
    )


def print_schedule(console: Console, found: ScheduleSummary) -> None:
    """Print the figures as a table, the picture, what moves, and what the heuristic picks."""
    problem = found.problem
    sizes = f"({problem.num_rows}, {problem.num_inner}) @ ({problem.num_inner}, {problem.num_columns})"
    passes = "" if found.direction == "forward" else " backward"
    where = f"{found.dtype}, {format_count(problem.num_ranks, 'rank')}, machine {found.machine}"
    console.print(Text.assemble((f"{problem.operation}{passes}", "bold"), f" of {sizes}, {where}"))
    console.print()
    console.print(times_table(found, "one after the other"))
    console.print()
    pictures = [("sequential", found.sequential_lanes)]
    if found.schedule is not None:
        pictures.append((f"{found.description.label()}, rank {found.rank}", found.lanes))
    print_lanes(console, pictures, max(found.sequential_us, found.estimated_us))
    console.print()
    print_remarks(console, found, _remarks(found))


def print_remarks(console: Console, found: EstimatedSchedule, remarks: Sequence[str]) -> None:
    """Print what prevents the schedule, the remarks, that all times are estimates, and on which machines estimates were
    never compared.
    """
    if found.obstacle:
        console.print(Text(found.obstacle, style="bold"))
    for line in remarks:
        console.print(Text(line))
    console.print(Text("Estimated by arithmetic, not measured: no GPU was used.", style="dim"))
    if not found.bounds.is_compared:
        console.print(Text(found.bounds.note, style="dim"))


def times_table(found: EstimatedSchedule, sequential: str) -> Table:
    """Return the times of sequential, this schedule, its alternatives, and the ideal; `sequential` says what that is."""
    bounds = None if found.bounds.is_compared else found.bounds
    table = new_table("estimated", "time", *(["expected"] if bounds else []), "change", "")
    table.columns[-1].justify = "left"

    def add(name: str, time_us: float, remark: str, style: str = "") -> None:
        change = "" if found.sequential_us in (0, time_us) else format_change(time_us / found.sequential_us - 1)
        between = [format_span(*bounds.around(time_us))] if bounds else []
        table.add_row(Text(name, style=style), format_us(time_us), *between, change, Text(remark, style="dim"))

    add("sequential", found.sequential_us, sequential, "bold" if found.description.is_sequential else "")
    shown = RankedSchedule(description=found.description, estimated_us=found.estimated_us)
    rivals = [each for each in found.candidates if each.description != found.description][: SHOWN_CANDIDATES - 1]
    rows = rivals if found.description.is_sequential else sorted([shown, *rivals], key=lambda each: each.estimated_us)
    for row in rows:
        is_shown = row.description == found.description
        add(row.description.label(), row.estimated_us, "drawn below" if is_shown else "", "bold" if is_shown else "")
    # without the collective drawn below, where copies alone are faster
    compared = "the two" if found.ideal_us >= found.communication_us else "copies and matmul"
    add("ideal", found.ideal_us, f"the longer of {compared}, each alone")
    return table


def print_lanes(console: Console, pictures: Sequence[tuple[str, tuple[StreamLane, ...]]], total_us: float) -> None:
    """Print pictures with their titles on one scale of `total_us` microseconds."""
    width = max(20, min(console.width - LABEL_WIDTH - 1, MAX_DRAWN_COLUMNS))
    for title, lanes in pictures:
        console.print(Text(title, style="bold"))
        for lane in lanes:
            style = "blue" if lane.name.startswith(("compute", "matmul")) else "green"
            drawn = draw_lane(lane, width, total_us)
            console.print(Text.assemble(f"{lane.name:>{LABEL_WIDTH - 1}} ", (drawn.rstrip(), style)), overflow="crop")
    console.print(Text(f"{'':{LABEL_WIDTH}}0{format_us(total_us):>{width - 1}}", style="dim"))
    orders = [tell_order(lane, width, total_us) for _, lanes in pictures for lane in lanes]
    for order in filter(None, orders):
        console.print(Text(f"in order, {order}"))


def _remarks(found: ScheduleSummary) -> list[str]:
    lines = []
    if found.schedule is not None:
        sums = f", {format_count(found.traffic.num_sums, 'sum')}" if found.traffic.num_sums else ""
        lines += traffic_lines(found, f"{format_count(found.traffic.num_matmuls, 'matmul')}{sums}")
    lines.append(f"The heuristic picks {found.pick.description.label()}: {found.pick.reason}.")
    return lines


def traffic_lines(found: EstimatedSchedule, computation: str) -> list[str]:
    """Return the picture's legend, what the drawn rank issues, and the checks; `computation` is its work in words."""
    traffic = found.traffic
    return [
        LEGEND,
        f"Rank {found.rank} issues {format_count(traffic.num_copies, 'copy', 'copies')} of "
        f"{format_bytes(traffic.num_sent_bytes)} in all, {computation}; "
        f"{format_bytes(traffic.symmetric_bytes)} of symmetric memory on each rank.",
        f"Checked: {', '.join(found.checks)}.",
    ]


def obstacle_on(machine: Machine, traffic: Traffic) -> str:
    """Return that a schedule needs more memory than a GPU of the machine has; empty if it does not."""
    needed, present = traffic.symmetric_bytes, machine.gpu.hbm_bytes
    if needed <= present:
        return ""
    return (
        f"This schedule cannot run: it needs {format_bytes(needed)} of symmetric memory, and a GPU of {machine.name} has "
        f"{format_bytes(present)}. Divide the rows into several calls."
    )


def _sequential_lanes(question: Question) -> tuple[StreamLane, ...]:
    """Return the library's collectives and the matmuls as two lanes; a reduction comes after the matmul."""
    problem, machine, direction = question.problem, question.machine, question.direction
    computed = computation_us(problem, machine, direction=direction)
    communicated = communication_us(problem, machine, direction=direction)
    is_matmul_first = scheduled_pass(problem.operation, direction).is_reduction
    first_us = computed if is_matmul_first else communicated
    total_us = computed + communicated
    spans = [
        LaneSpan(label=format_us(end_us - start_us), start_us=start_us, end_us=end_us)
        for start_us, end_us in ((0.0, first_us), (first_us, total_us))
    ]
    collective, matmul = reversed(spans) if is_matmul_first else spans
    lanes = (StreamLane(name="collective", spans=(collective,)), StreamLane(name="matmul", spans=(matmul,)))
    return lanes if communicated else lanes[1:]


def traffic_of(schedule: CopySchedule, rank: int, element_bytes: int) -> Traffic:
    """Return what `rank` issues."""
    own = [schedule.actions[position] for position in schedule.of_rank(rank)]
    kinds = Counter(action.kind for action in own)
    row_bytes = {each.name: each.num_columns * element_bytes for each in schedule.buffers}
    return Traffic(
        num_copies=kinds["copy"],
        num_sent_bytes=sum(
            region.num_rows * row_bytes[region.buffer] for action in own if action.kind == "copy" for region in action.reads
        ),
        num_matmuls=kinds["matmul"] + kinds["add_matmul"] + kinds["weight_gradient"],
        num_sums=kinds["sum"],
        num_flags=make_program(schedule, rank).num_flags,
        symmetric_bytes=sum(each.num_rows * row_bytes[each.name] for each in schedule.buffers if each.home == "symmetric"),
    )
