"""Estimates how long a schedule takes on a machine, by arithmetic: its actions run from event to event, each with a cost
(`costs.py`).

Four losses decide between schedules. Decomposition: a matmul piece runs in waves of tiles over the SMs, and part of its
last wave is lost unless the next piece, on another stream, fills it (`wave_model.py`). Latency: every copy takes
microseconds before its first byte, and its flag takes some more. Bandwidth: concurrent copies share ports behind a switch
and the wires of a pair on direct links (`transfers.py`). Memory: adding inside a matmul reads rows once more; sums and
copies within a rank access memory while matmuls use the SMs. The model serves to rank schedules; it is not a measurement.
`sim/` models SMs in far more detail, but has no chunks.
"""

import heapq
from collections import deque
from collections.abc import Sequence

from counterpoint.machine import Machine
from counterpoint.schedule.actions import SM_KINDS, Action, CopySchedule, Pass, Problem, Region
from counterpoint.schedule.costs import DEFAULT_COSTS, Clock, Costs, kernels_of
from counterpoint.schedule.operations import OPERATORS, most_block_bytes, num_sent_columns, only_reduces
from counterpoint.schedule.transfers import Transfers
from counterpoint.schedule.wave_model import Sms
from counterpoint.units import MIB
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
    """Return the times of all actions: matmuls use a rank's SMs in issue order, copies of several streams share the
    link.
    """
    return _Run(schedule, problem, machine, costs).estimate()


class _Run:
    """The state of one estimate: which actions have known times, and which copies are in flight.

    An action's times are known once those of all its dependencies are; a copy's only when it ends, as others may slow it.
    """

    def __init__(self, schedule: CopySchedule, problem: Problem, machine: Machine, costs: Costs) -> None:
        self._schedule, self._actions = schedule, schedule.actions
        num_elements, count = _communicated(problem, schedule.direction)
        self._clock = Clock(problem, machine, costs, count * num_elements)
        self._columns = {buffer.name: buffer.num_columns for buffer in schedule.buffers}
        self._sms = [Sms(machine.gpu.num_sms) for _ in range(schedule.num_ranks)]
        unpaced = costs.unpaced_efficiency if _is_unpaced(schedule, problem, machine, costs) else 1.0
        self._transfers = Transfers(machine.link, unpaced * costs.copy_efficiency, costs.shared_port_efficiency)
        self._free_engines = [machine.gpu.num_copy_engines] * schedule.num_ranks
        self._waiting: list[deque[int]] = [deque() for _ in range(schedule.num_ranks)]  # copies without an engine
        self._spans: list[Span | None] = [None] * len(self._actions)
        self._ready_us = [0.0] * len(self._actions)
        self._events: list[tuple[float, int, bool]] = []  # (time, copy, whether its latency is over)
        self._now_us = 0.0
        self._link_up()

    def _link_up(self) -> None:
        """Record what each action waits for (its dependencies, and the previous action on its stream), and each rank's
        matmuls in issue order.
        """
        self._later: list[list[int]] = [[] for _ in self._actions]
        self._num_awaited = [0] * len(self._actions)
        self._matmuls: list[deque[int]] = [deque() for _ in range(self._schedule.num_ranks)]
        last: dict[tuple[int, str], int] = {}
        for position, action in enumerate(self._actions):
            stream = (action.rank, action.stream)
            awaited = {*action.after, last[stream]} if stream in last else set(action.after)
            self._num_awaited[position] = len(awaited)
            for before in awaited:
                self._later[before].append(position)
            last[stream] = position
            if action.kind in SM_KINDS:
                self._matmuls[action.rank].append(position)

    def estimate(self) -> Estimate:
        """Run all actions to the end."""
        for position in [number for number, awaited in enumerate(self._num_awaited) if not awaited]:
            self._become_ready(position)
        while (time_us := self._next_us()) is not None:
            self._now_us = time_us
            for position in self._transfers.advance(time_us):
                self._finish_copy(position)
            while self._events and self._events[0][0] <= time_us:
                _, position, is_moving = heapq.heappop(self._events)
                if is_moving:
                    self._move(position)
                else:
                    self._ask_for_engine(position)
        spans = tuple(span for span in self._spans if span is not None)
        assert len(spans) == len(self._actions), "a schedule in issue order ends"
        return Estimate(spans=spans, makespan_us=max((span.end_us for span in spans), default=0.0))

    def _next_us(self) -> float | None:
        times_us = [self._events[0][0]] if self._events else []
        end_us = self._transfers.next_end_us()
        return min([*times_us, end_us] if end_us is not None else times_us, default=None)

    def _become_ready(self, position: int) -> None:
        """Handle an action whose dependencies all have known ends."""
        action, ready_us = self._actions[position], self._ready_us[position]
        if action.kind in SM_KINDS:
            self._compute_next(action.rank)
        elif action.kind == "copy":
            heapq.heappush(self._events, (max(ready_us, self._now_us), position, False))
        else:
            self._know(position, ready_us, ready_us + _beside_us(action, self._clock, self._columns))

    def _compute_next(self, rank: int) -> None:
        """Let the SMs run ready matmuls and activations in issue order."""
        matmuls = self._matmuls[rank]
        while matmuls and not self._num_awaited[matmuls[0]]:
            position = matmuls.popleft()
            ready_us, sms = self._ready_us[position], self._sms[rank]
            start_us = max(ready_us, sms.first_free_us())
            end_us = _compute(self._actions[position], self._clock, self._columns, (sms, ready_us))
            self._know(position, start_us, end_us)

    def _ask_for_engine(self, position: int) -> None:
        """Handle a ready copy; a rank's copy engines serve copies first come, first served."""
        rank = self._actions[position].rank
        if not self._free_engines[rank]:
            self._waiting[rank].append(position)
            return
        self._free_engines[rank] -= 1
        self._ready_us[position] = self._now_us  # from here on, the time at which it started
        heapq.heappush(self._events, (self._now_us + self._clock.copy_latency_us, position, True))

    def _move(self, position: int) -> None:
        """Handle the end of a copy's latency."""
        action = self._actions[position]
        num_bytes = self._clock.num_bytes(_num_elements(action.reads, self._columns))
        self._transfers.add(position, (action.rank, action.writes[0].rank), num_bytes)

    def _finish_copy(self, position: int) -> None:
        rank = self._actions[position].rank
        self._free_engines[rank] += 1
        self._know(position, self._ready_us[position], self._now_us)
        if self._waiting[rank]:
            self._ask_for_engine(self._waiting[rank].popleft())

    def _know(self, position: int, start_us: float, end_us: float) -> None:
        """Record an action's times; actions that waited for it may be ready."""
        self._spans[position] = Span(start_us=start_us, end_us=end_us)
        for later in self._later[position]:
            self._ready_us[later] = max(self._ready_us[later], end_us + self._told_us(position, later))
            self._num_awaited[later] -= 1
            if not self._num_awaited[later]:
                self._become_ready(later)

    def _told_us(self, position: int, later: int) -> float:
        """Return the time from an action's end to the earliest start of one that waits for it."""
        action, waiting = self._actions[position], self._actions[later]
        if action.rank != waiting.rank:
            return self._clock.signal_us
        return self._clock.wait_us if waiting.after and waiting.kind in SM_KINDS else 0.0


def estimate_sequential(
    problem: Problem, machine: Machine, costs: Costs = DEFAULT_COSTS, *, direction: Pass = "forward"
) -> float:
    """Return the time of the library's collectives and the matmuls, one after the other, in microseconds."""
    communicated_us = communication_us(problem, machine, costs, direction=direction)
    return communicated_us + computation_us(problem, machine, costs, direction=direction)


def estimate_ideal(problem: Problem, machine: Machine, *, direction: Pass) -> float:
    """Return the longer of computation and communication, each alone; communication by whichever is faster, the
    library's collectives or copies without a pause.
    """
    num_elements, count = _communicated(problem, direction)
    copied_us = Clock(problem, machine).copies_us(count * num_elements)
    alone_us = min(communication_us(problem, machine, direction=direction), copied_us)
    return max(alone_us, computation_us(problem, machine, direction=direction))


def communication_us(problem: Problem, machine: Machine, costs: Costs = DEFAULT_COSTS, *, direction: Pass) -> float:
    """Return the time of the library's collectives alone."""
    num_elements, count = _communicated(problem, direction)
    return count * Clock(problem, machine, costs).collective_us(num_elements) if num_elements else 0.0


def computation_us(
    problem: Problem, machine: Machine, costs: Costs = DEFAULT_COSTS, *, direction: Pass = "forward"
) -> float:
    """Return the time of the whole matmul alone; for backward, of both gradients' matmuls."""
    clock, rows = Clock(problem, machine, costs), problem.num_rows
    inner, columns = problem.num_inner, problem.num_columns
    if direction == "forward":
        return clock.matmul_us(rows, inner, columns)
    return clock.matmul_us(rows, columns, inner) + clock.matmul_us(inner, rows, columns)


def _is_unpaced(schedule: CopySchedule, problem: Problem, machine: Machine, costs: Costs) -> bool:
    """Return whether ranks that drift apart send large blocks to the same port of a switch.

    A rank of a ring waits for its neighbor in each step, and the copies of a gather all start at once. Undivided blocks on
    one computation stream did not meet either, where those of `one_peer/2` did (4 H200s, ops_seeded_4x_h200.json).
    """
    description = schedule.description
    is_undivided = (description.pattern, description.chunks, description.num_compute_streams) == ("one_peer", 1, 1)
    is_paced = description.pattern == "ring" or is_undivided or not only_reduces(problem, schedule.direction)
    if is_paced or problem.num_ranks <= 2 or machine.link.topology != "switch":
        return False
    return most_block_bytes(problem) >= costs.unpaced_block_mib * MIB


def _communicated(problem: Problem, direction: Pass) -> tuple[int, int]:
    """Return the elements that a rank receives in one collective, and the number of collectives."""
    definition = OPERATORS[problem.operation].of_pass(direction)
    if definition is None:
        return 0, 0
    num_elements = problem.num_rows * num_sent_columns(problem) * (problem.num_ranks - 1) // problem.num_ranks
    return definition.num_crossings * num_elements, definition.num_collectives


def _beside_us(action: Action, clock: Clock, columns: dict[str, int]) -> float:
    """Return the duration of actions that leave the SMs to matmuls: sums and copies within a rank. A call's fixed time
    is counted at its `end`.
    """
    if action.kind in ("begin", "end"):
        return clock.call_us if action.kind == "end" else 0.0
    num_elements = _num_elements([*action.reads, *action.writes], columns)
    return clock.placed_us(num_elements) if action.kind == "place" else clock.sum_us(num_elements, len(action.reads))


def _compute(action: Action, clock: Clock, columns: dict[str, int], where: tuple[Sms, float]) -> float:
    """Let the SMs run an action that is ready at a time; return its end."""
    sms, ready_us = where
    if action.kind == "activate":
        return sms.fill(ready_us, clock.activation_us(_num_elements([*action.reads, *action.writes], columns)))
    if action.expert_rows:
        others = action.reads[1:] or action.writes  # the gradient of weights has both operands' columns
        sizes = columns[action.reads[0].buffer], columns[others[0].buffer]
        piece = clock.grouped_piece(action.expert_rows, *sizes, is_gradient=action.kind == "weight_gradient")
        return sms.run(ready_us, piece, clock.smoothing)
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
