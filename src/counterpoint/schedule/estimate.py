"""How long a schedule takes on a machine, by arithmetic: list scheduling of its actions with a cost for each (`costs.py`).

Four losses decide between schedules. Decomposition: a matmul piece runs in waves of tiles over the SMs, and a part of
its last wave is lost unless the next piece, on another stream, fills it (`wave_model.py`). Latency: every copy costs
microseconds before its first byte, and its flag some on the way. Bandwidth: a rank's copies share its port. Memory:
sums, and adding inside a matmul, read and write rows once more. It is a model to rank schedules with, not a measurement;
`sim/` models SMs in far more detail and knows nothing of chunks.
"""

from collections.abc import Sequence

from counterpoint.machine import Machine
from counterpoint.schedule.actions import COMPUTATION_KINDS, Action, CopySchedule, Pass, Problem, Region
from counterpoint.schedule.costs import DEFAULT_COSTS, Clock, Costs, kernels_of
from counterpoint.schedule.operations import OPERATORS, num_sent_columns
from counterpoint.schedule.wave_model import Sms
from counterpoint.value import Value


class Span(Value, frozen=True, kw_only=True):
    """When an action starts and ends."""

    start_us: float
    end_us: float


class Estimate(Value, frozen=True, kw_only=True):
    """The spans of all actions in their order, and the end of the last."""

    spans: tuple[Span, ...]
    makespan_us: float


def estimate(schedule: CopySchedule, problem: Problem, machine: Machine, costs: Costs = DEFAULT_COSTS) -> Estimate:
    """Times of all actions, in issue order on each stream; matmuls share a rank's SMs, copies its port, in issue order."""
    clock = Clock(problem, machine, costs)
    columns = {buffer.name: buffer.num_columns for buffer in schedule.buffers}
    stream_ends: dict[tuple[int, str], float] = {}
    port_ends = [0.0] * schedule.num_ranks
    sms = [Sms(machine.gpu.num_sms) for _ in range(schedule.num_ranks)]
    spans: list[Span] = []
    for action in schedule.actions:
        rank, stream = action.rank, (action.rank, action.stream)
        ready_us = stream_ends.get(stream, 0.0)
        for before in action.after:
            is_told = schedule.actions[before].rank != rank
            ready_us = max(ready_us, spans[before].end_us + (clock.signal_us if is_told else 0.0))
        if action.kind in COMPUTATION_KINDS:
            start_us = max(ready_us, sms[rank].first_free_us())
            end_us = _compute(action, clock, columns, (sms[rank], ready_us))
        else:
            start_us = max(ready_us, port_ends[rank]) if action.kind == "copy" else ready_us
            end_us = start_us + _moved_us(action, clock, columns)
            if action.kind == "copy":
                port_ends[rank] = end_us
        spans.append(Span(start_us=start_us, end_us=end_us))
        stream_ends[stream] = end_us
    return Estimate(spans=tuple(spans), makespan_us=max((span.end_us for span in spans), default=0.0))


def estimate_sequential(
    problem: Problem, machine: Machine, costs: Costs = DEFAULT_COSTS, *, direction: Pass = "forward"
) -> float:
    """The library's collectives and the matmuls, one after the other, in microseconds."""
    communicated_us = communication_us(problem, machine, costs, direction=direction)
    return communicated_us + computation_us(problem, machine, costs, direction=direction)


def estimate_ideal(
    problem: Problem, machine: Machine, costs: Costs = DEFAULT_COSTS, *, direction: Pass = "forward"
) -> float:
    """The longer of computation and communication, each alone; communication by whichever is faster, the library's
    collectives or copies without a pause.
    """
    clock = Clock(problem, machine, costs)
    num_elements, count = _communicated(problem, direction)
    alone_us = min(communication_us(problem, machine, costs, direction=direction), clock.copy_us(count * num_elements))
    return max(alone_us, computation_us(problem, machine, costs, direction=direction))


def communication_us(
    problem: Problem, machine: Machine, costs: Costs = DEFAULT_COSTS, *, direction: Pass = "forward"
) -> float:
    """The library's collectives alone."""
    num_elements, count = _communicated(problem, direction)
    return count * Clock(problem, machine, costs).collective_us(num_elements) if num_elements else 0.0


def computation_us(
    problem: Problem, machine: Machine, costs: Costs = DEFAULT_COSTS, *, direction: Pass = "forward"
) -> float:
    """The whole matmul alone; backward those of both gradients."""
    clock, rows = Clock(problem, machine, costs), problem.num_rows
    inner, columns = problem.num_inner, problem.num_columns
    if direction == "forward":
        return clock.matmul_us(rows, inner, columns)
    return clock.matmul_us(rows, columns, inner) + clock.matmul_us(inner, rows, columns)


def _communicated(problem: Problem, direction: Pass) -> tuple[int, int]:
    """Elements that a rank receives in one collective, and how many collectives there are."""
    definition = OPERATORS[problem.operation].of_pass(direction)
    if definition is None:
        return 0, 0
    num_elements = problem.num_rows * num_sent_columns(problem) * (problem.num_ranks - 1) // problem.num_ranks
    return definition.num_crossings * num_elements, definition.num_collectives


def _moved_us(action: Action, clock: Clock, columns: dict[str, int]) -> float:
    """What computes nothing: copies to a peer and within the rank; `begin` and `end` take no time."""
    if action.kind in ("begin", "end"):
        return 0.0
    if action.kind == "copy":
        return clock.copy_us(_num_elements(action.reads, columns))
    return clock.memory_us(_num_elements([*action.reads, *action.writes], columns))


def _compute(action: Action, clock: Clock, columns: dict[str, int], where: tuple[Sms, float]) -> float:
    """Let the SMs do an action that is ready at a time; its end."""
    sms, ready_us = where
    if action.kind == "sum":
        num_elements = _num_elements([*action.reads, *action.writes], columns)
        return sms.fill(ready_us, clock.memory_us(num_elements, is_strided=len(action.reads) > 2))
    if action.kind == "weight_gradient":
        left, right = action.reads
        piece = clock.piece(columns[left.buffer], left.num_rows, columns[right.buffer])
        return sms.run(ready_us, piece, clock.smoothing)
    inner, out = columns[action.reads[0].buffer], columns[action.writes[0].buffer]
    end_us = ready_us
    is_added = action.kind == "add_matmul"
    for count, num_rows in kernels_of(action.reads[:1] if is_added else action.reads):
        piece = clock.piece(num_rows, inner, out, count, is_added=is_added)
        end_us = sms.run(end_us, piece, clock.smoothing)
    return end_us


def _num_elements(regions: Sequence[Region], columns: dict[str, int]) -> int:
    return sum(region.num_rows * columns[region.buffer] for region in regions)
