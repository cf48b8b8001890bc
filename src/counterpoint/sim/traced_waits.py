"""Divides the times of a traced step's collectives into transfer, contention and waits for other ranks, by simulation.

A trace says how long a collective took, but not why. Beside its transfer it may have been slowed by computation, it may
have found no room on some SMs, or it waited for ranks that came later. The simulator knows the first two. So the step is
simulated without controls, first with the waits that the reader of the trace supposed, which are the longest possible.
Then each wait is corrected by how much later its collective ended in the trace, counted from the end of what it had to
follow. The waits with which the simulation comes nearest to the trace are kept.

Who came first of a collective and a kernel behind a fill is chance, so the trace decides that, too.

The shortest traced time of like collectives may still hold contention and waits. Their bytes say how long they take alone,
unless the trace contradicts that: a collective was faster, or took so long that its links must be slower than described.

Two kernels that run side by side slow each other down. The reader of the trace takes their traced times for their lone
times, so these are corrected in the same rounds, by the ratio of traced to simulated times.
"""

import math
from collections import Counter

from msgspec.structs import replace

from counterpoint.machine import Machine
from counterpoint.plan import LEAVE_IT
from counterpoint.sim.calibrated_range import is_collective_measured
from counterpoint.sim.calibration import load_calibration
from counterpoint.sim.costs import CostModel
from counterpoint.sim.nodes import beyond_node
from counterpoint.sim.replay import compare_replay
from counterpoint.sim.simulator import Simulator
from counterpoint.step import Collective, Copy, Kernel, Operation, Step, is_fill, predecessors
from counterpoint.timeline import NO_OPERATION, Interval, Timeline
from counterpoint.traces.lone_times import UNTOUCHED_OVERLAP

LONGEST_BY_BYTES = 2.0
"""A traced collective is at most this many times as long as its bytes say, or they do not count. In the traces of 2 and 4
GPUs those of 4 MiB or more take 0.8 to 1.7 times as long."""
RESOLUTION_US = 0.01  # of traced times
ROUNDS = 3
CORRECTED = 0.7
"""The part of an operation's difference that a round corrects. One to six rounds with 0.5 to 1 give mean errors within 0.1
points of each other (traces of the validation set, 2 and 4 H200s and 2 H100s)."""

LEAST_KEPT = 0.9
"""A kernel whose lone time is a smaller share of its traced time stays as it is: the reader found that it began at another
one's tail. What the profiler costs a kernel is less than a tenth."""


def with_waits(step: Step, traced: Timeline, machine: Machine) -> Step:
    """Return a traced step with the lone times and waits of its collectives, and the lone times of kernels that ran beside
    each other, with which its simulation is nearest to its timeline, `traced`.

    `tune`, `simulate` and `analyze` simulate such steps. Raises as `Simulator.run` does.
    """
    step = _with_races(step, traced)
    whole = _whole(step, traced)
    waiting = {
        number: each for number, each in _with_times_by_bytes(step, machine).items() if each.peer_wait_us and number in whole
    }
    slowed = _slowed_by_kernels(step, traced, whole)
    if not waiting and not slowed:
        return step
    traced_us = _response_times_us(step, traced)
    waits_us = {number: each.peer_wait_us for number, each in waiting.items()}
    lone_us = dict(slowed)
    tried: list[tuple[float, Step]] = []
    for _ in range(1 + ROUNDS):
        candidate = _with_times(step, waiting, waits_us, lone_us)
        simulated = Simulator().run(candidate, machine, LEAVE_IT)
        tried.append((compare_replay(traced, simulated).share_of_limits, candidate))
        simulated_us = _response_times_us(step, simulated)
        for number, each in waiting.items():
            wait_us = waits_us[number] + CORRECTED * (traced_us[number] - simulated_us[number])
            waits_us[number] = min(each.peer_wait_us, max(0.0, wait_us))
        for ran in simulated.intervals:
            if ran.operation in slowed:
                longest_us = slowed[ran.operation]
                time_us = lone_us[ran.operation] * (1 + CORRECTED * (longest_us / ran.duration_us - 1))
                lone_us[ran.operation] = min(longest_us, time_us)
    return min(tried, key=lambda each: each[0])[1]


def _with_times(step: Step, waiting: dict[int, Collective], waits_us: dict[int, float], lone_us: dict[int, float]) -> Step:
    """Return the step with these collectives and their waits, and these lone times of kernels."""
    operations: list[Operation] = list(step.operations)
    for number, wait_us in waits_us.items():
        operations[number] = replace(waiting[number], peer_wait_us=wait_us)
    for number, time_us in lone_us.items():
        operations[number] = replace(operations[number], lone_us=time_us)
    return replace(step, operations=tuple(operations))


def _slowed_by_kernels(step: Step, traced: Timeline, whole: set[int]) -> dict[int, float]:
    """Return the lone times, by number, of kernels that ran beside others, and beside no communication."""
    beside_us = {kind: [0.0] * len(step.operations) for kind in ("computation", "communication")}
    running: list[Interval] = []
    for each in sorted(traced.intervals, key=lambda each: each.start_us):
        running = [other for other in running if other.end_us > each.start_us]
        for other in running:
            together_us = min(each.end_us, other.end_us) - each.start_us
            for one, neighbor in ((each, other), (other, each)):
                if one.operation != NO_OPERATION and neighbor.kind in beside_us:
                    beside_us[neighbor.kind][one.operation] += together_us
        running.append(each)
    lasted_us = {each.operation: each.duration_us for each in traced.intervals}
    found: dict[int, float] = {}
    for number, operation in enumerate(step.operations):
        if number in whole and isinstance(operation, Kernel) and operation.lone_us:
            few_us = UNTOUCHED_OVERLAP * lasted_us[number]
            is_beside = beside_us["computation"][number] > few_us >= beside_us["communication"][number]
            if is_beside and operation.lone_us > LEAST_KEPT * lasted_us[number]:
                found[number] = operation.lone_us
    return found


def _with_races(step: Step, traced: Timeline) -> Step:
    """Return the step with the collectives marked that began before all kernels that wait for the same operation, if all of
    these have a fill before them. Such a kernel comes 4 to 6 us after that operation, so either may be first.
    """
    start_us = {each.operation: each.start_us for each in traced.intervals}
    awaited = predecessors(step)
    after_fill: dict[int, int] = {}  # by fill, the next operation of its stream
    rivals: dict[int, list[int]] = {}  # by what they wait for, kernels and fills
    for number, operation in enumerate(step.operations):
        for each in awaited[number]:
            if is_fill(step.operations[each]) and step.operations[each].stream == operation.stream:
                after_fill.setdefault(each, number)
            if isinstance(operation, Kernel) or is_fill(operation):
                rivals.setdefault(each, []).append(number)
    operations = list(step.operations)
    for number, collective in step.collectives().items():
        racing = {rival for each in awaited[number] for rival in rivals.get(each, ())}
        others = [rival for rival in racing if step.operations[rival].stream != collective.stream]
        kernels = [after_fill.get(rival, rival) for rival in others if is_fill(step.operations[rival])]
        is_first = all(start_us.get(number, math.inf) < start_us.get(kernel, math.inf) for kernel in kernels)
        if kernels and len(kernels) == len(others) and is_first:
            operations[number] = replace(collective, begins_first=True)
    return replace(step, operations=tuple(operations))


def _whole(step: Step, traced: Timeline) -> set[int]:
    """Return the kernels and collectives that the timeline holds once, and not cut by its window."""
    lasted_us = {each.operation: each.duration_us for each in traced.intervals}
    times = Counter(each.operation for each in traced.intervals)
    return {
        number
        for number, each in enumerate(step.operations)
        if not isinstance(each, Copy) and times[number] == 1 and lasted_us[number] >= _least_us(each) - RESOLUTION_US
    }


def _least_us(operation: Kernel | Collective) -> float:
    """Return how long the trace says that an operation took at least."""
    return (operation.lone_us or 0.0) + (operation.peer_wait_us if isinstance(operation, Collective) else 0.0)


def _with_times_by_bytes(step: Step, machine: Machine) -> dict[int, Collective]:
    """Return the collectives by number. Where bytes say a shorter time than the trace, the rest of its time is a wait."""
    costs = CostModel(machine, load_calibration(machine))
    found = step.collectives()
    for number, each in found.items():
        if each.lone_us is None or not _has_size(each, step.num_ranks, machine):
            continue
        size_us = costs.lone_us(replace(each, lone_us=None))
        if size_us < each.lone_us <= LONGEST_BY_BYTES * size_us:
            found[number] = replace(each, lone_us=size_us, peer_wait_us=each.peer_wait_us + each.lone_us - size_us)
    return found


def _has_size(collective: Collective, num_ranks: int, machine: Machine) -> bool:
    """Return whether the calibration says how long a collective of so many bytes takes alone."""
    is_inside = beyond_node(collective, num_ranks, machine) is None
    return is_inside and not collective.has_unknown_parts and is_collective_measured(collective, machine)


def _response_times_us(step: Step, timeline: Timeline) -> dict[int, float]:
    """Return how long each operation took, by number, from the end of what it had to follow.

    A collective that found room on this rank before it did on the others waits for them while it holds SMs. In the
    simulation all ranks are alike, so it starts later and waits less, and ends at the same time.
    """
    ran = {each.operation: each for each in timeline.intervals}
    found: dict[int, float] = {}
    for number, before in enumerate(predecessors(step)):
        if number in ran:
            ends_us = [ran[each].end_us for each in before if each in ran]
            found[number] = ran[number].end_us - min(ran[number].start_us, max(ends_us, default=math.inf))
    return found
