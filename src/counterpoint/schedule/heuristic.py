"""Picks a schedule from the static sizes of the operator: estimates every candidate, and takes the best.

It knows the sizes and the machine, not the libraries that run on it. A schedule whose estimated gain over the library's
collective is below `LEAST_ESTIMATED_GAIN` is not taken: the result is then `sequential`. docs/heuristic.md explains the
model; the planner can choose by measurement instead.
"""

from counterpoint.machine import Machine
from counterpoint.measurement.values import LEAST_ESTIMATED_GAIN, NEAR_TIE
from counterpoint.schedule.actions import Pass, Problem
from counterpoint.schedule.costs import DEFAULT_COSTS, Clock, Costs
from counterpoint.schedule.description import MAX_COPY_STREAMS, SEQUENTIAL, ScheduleDescription
from counterpoint.schedule.estimate import estimate, estimate_sequential, is_reduction_of_many, only_reduces
from counterpoint.schedule.generate import backward_description, make_schedule
from counterpoint.schedule.operations import most_block_bytes
from counterpoint.units import MIB, format_bytes, format_percent, format_us
from counterpoint.value import Value

LEAST_BLOCK_BYTES = 2 * MIB  # assumption: below this, chunks take only latency and host time
# Behind a switch. Measured on 2 and 4 H200s (benchmarks/ops_grid.py, which also times those that did not win on the fitted
# shapes). Of near ties the first is taken: few pieces where rows are gathered, many in rings of two ranks, and eight in
# rings of four, as under the power limit they were faster than estimated. Reductions of more than two ranks leave
# `all_peers` out: nothing keeps its copies in step, so they meet at the ports, and took up to 30 % longer than rings on 4
# H200s.
GATHERING = (
    ScheduleDescription(pattern="one_peer", chunks=1),
    ScheduleDescription(pattern="one_peer", chunks=1, num_compute_streams=1),
    ScheduleDescription(pattern="one_peer", chunks=2),
    ScheduleDescription(pattern="one_peer", chunks=4),
    ScheduleDescription(pattern="one_peer", chunks=1, matmul="rest"),
)
REDUCING = (
    ScheduleDescription(pattern="ring", chunks=4),
    ScheduleDescription(pattern="ring", chunks=2),
    ScheduleDescription(pattern="ring", chunks=2, num_compute_streams=1),
    ScheduleDescription(pattern="all_peers", chunks=2),
    ScheduleDescription(pattern="one_peer", chunks=2),
)
# One piece for each rank, as in PyTorch's fused operator
UNDIVIDED = ScheduleDescription(pattern="one_peer", chunks=1, num_compute_streams=1)
REDUCING_FOR_MANY = (
    ScheduleDescription(pattern="ring", chunks=2),
    ScheduleDescription(pattern="ring", chunks=4),
    ScheduleDescription(pattern="ring", chunks=2, num_compute_streams=1),
    ScheduleDescription(pattern="one_peer", chunks=2),
    UNDIVIDED,
)
# If half a block is larger, rings of more than two ranks cut a block into four pieces even if the estimate is up to that
# much longer. On three machines with 4 H200s and one with 4 H100s it took 8 % less to 3 % more, 2.4 % less in the mean,
# where 0.3 to 0.8 % more were estimated. The reason is not known.
LARGE_PIECE_BYTES = 64 * MIB
LARGE_PIECE_TIE = 0.01
SMALL_PIECES = REDUCING_FOR_MANY[1]
# If a matmul's multiplications take less than `UNDIVIDED_US` at full clock, blocks stay undivided even if the estimate is
# up to `UNDIVIDED_TIE` longer. In such calls of matmul + reduce-scatter on 4 H200s, estimates of divided blocks were up to
# 17 % too short (`ring/4`), and those of undivided ones 6 % (66 cases, ops_seeded_4x_h200.json and
# ops_grid_again_4x_h200.json). Picks are as good from 3 to 4 ms and from 1.5 to 2 %. Assumed for other operators and other
# numbers of ranks
UNDIVIDED_US = 3000.0
UNDIVIDED_TIE = 0.02
DIRECT_CHUNKS = (1, 2, 4)  # on direct links, and one W-th of a shard on W ranks; never measured there


class Pick(Value, frozen=True, kw_only=True):
    """The description that was picked, and the reason in words."""

    description: ScheduleDescription
    reason: str


class RankedSchedule(Value, frozen=True, kw_only=True):
    """A description with its estimated time."""

    description: ScheduleDescription
    estimated_us: float


def candidate_descriptions(
    problem: Problem, machine: Machine, direction: Pass = "forward"
) -> tuple[ScheduleDescription, ...]:
    """Return the schedules worth estimating for a pass of an operator on a machine's links.

    A pass that gathers uses the schedules of a gather, even if it also reduces; a pass that only reduces uses those of a
    reduction. If every pair of ranks has its own wires, a copy to one peer leaves the other wires idle, so rows go to all
    peers at once, on a stream for each. Behind a switch, one copy at a time saturates a rank's port, and several only share
    it.
    """
    behind_a_switch: tuple[ScheduleDescription, ...] = GATHERING
    if only_reduces(problem, direction):
        behind_a_switch = REDUCING if problem.num_ranks == 2 else REDUCING_FOR_MANY
    if direction == "backward":  # some of them are equal in backward
        behind_a_switch = tuple(dict.fromkeys(backward_description(problem.operation, each) for each in behind_a_switch))
    if machine.link.topology == "switch" or problem.num_ranks == 2:
        return behind_a_switch
    num_streams = min(problem.num_ranks - 1, MAX_COPY_STREAMS)
    to_all = tuple(
        ScheduleDescription(pattern="all_peers", chunks=chunks, matmul=matmul, num_copy_streams=num_streams)
        for chunks in sorted({*DIRECT_CHUNKS, problem.num_ranks})
        for matmul in ("chunk", "fused")
    )
    return (*to_all, behind_a_switch[0])


def rank_candidates(
    problem: Problem, machine: Machine, direction: Pass = "forward", costs: Costs = DEFAULT_COSTS
) -> tuple[RankedSchedule, ...]:
    """Return all candidates with their estimated times, fastest first."""
    candidates = _estimated(problem, machine, direction, costs)
    return tuple(sorted(candidates, key=lambda each: each.estimated_us))


def _estimated(problem: Problem, machine: Machine, direction: Pass, costs: Costs) -> list[RankedSchedule]:
    """Return the candidates in order of preference."""
    found = []
    for description in candidate_descriptions(problem, machine, direction):
        schedule = make_schedule(problem, description, direction)
        estimated_us = estimate(schedule, problem, machine, costs).makespan_us
        found.append(RankedSchedule(description=description, estimated_us=estimated_us))
    return found


def _favored(problem: Problem, machine: Machine, direction: Pass, costs: Costs) -> tuple[ScheduleDescription, float] | None:
    """Return the candidate that is taken although its estimate is longer than the least, and up to which share."""
    if not is_reduction_of_many(problem, machine, direction):
        return None
    if most_block_bytes(problem) > 2 * LARGE_PIECE_BYTES:
        return SMALL_PIECES, LARGE_PIECE_TIE
    is_short = Clock(problem, machine, costs).multiplied_us < UNDIVIDED_US
    return (UNDIVIDED, UNDIVIDED_TIE) if is_short else None


def pick_schedule(problem: Problem, machine: Machine, direction: Pass = "forward", costs: Costs = DEFAULT_COSTS) -> Pick:
    """Return the description to use for these sizes on this machine; it may be `sequential`."""
    if problem.num_ranks == 1:
        return Pick(description=SEQUENTIAL, reason="a single rank exchanges no rows")
    block_bytes = most_block_bytes(problem)
    if block_bytes < LEAST_BLOCK_BYTES:
        least = format_bytes(LEAST_BLOCK_BYTES)
        return Pick(
            description=SEQUENTIAL,
            reason=f"a rank's block is at most {format_bytes(block_bytes)}; below {least}, the host's time for each "
            "chunk, which the estimate leaves out, is assumed to exceed the gain",
        )
    candidates = _estimated(problem, machine, direction, costs)
    least_us = min(each.estimated_us for each in candidates)
    sequential_us = estimate_sequential(problem, machine, costs, direction=direction)
    enough_us = (1 - LEAST_ESTIMATED_GAIN) * sequential_us

    def reason_for(estimated_us: float) -> str:
        return f"estimated {format_us(estimated_us)} against {format_us(sequential_us)} one after the other"

    if least_us > enough_us:
        return Pick(description=SEQUENTIAL, reason=f"no schedule promises enough: {reason_for(least_us)}")

    def is_near(each: RankedSchedule, tie: float) -> bool:
        return each.estimated_us <= min((1 + tie) * least_us, enough_us)

    favored, tie = _favored(problem, machine, direction, costs) or (None, NEAR_TIE)
    taken = next((each for each in candidates if each.description == favored and is_near(each, tie)), None)
    if taken is None:
        taken, tie = next(each for each in candidates if is_near(each, NEAR_TIE)), NEAR_TIE
    preferred = f", preferred to schedules within {format_percent(tie)} of it" if taken.estimated_us > least_us else ""
    return Pick(description=taken.description, reason=reason_for(taken.estimated_us) + preferred)
