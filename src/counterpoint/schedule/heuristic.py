"""Picks a schedule from the static sizes of the operator: estimates every candidate, and takes the best.

It knows the sizes and the machine, not the libraries that run on it. A schedule whose estimated gain over the library's
collective is below `LEAST_ESTIMATED_GAIN` is not taken: the result is then `sequential`. docs/heuristic.md explains the
model; the planner can choose by measurement instead.
"""

import math
from functools import lru_cache

from counterpoint.links import Link
from counterpoint.machine import Machine
from counterpoint.measurement.values import LEAST_ESTIMATED_GAIN, NEAR_TIE
from counterpoint.schedule.actions import Pass, Problem
from counterpoint.schedule.costs import DEFAULT_COSTS, Clock, Costs
from counterpoint.schedule.description import MAX_COPY_STREAMS, SEQUENTIAL, ScheduleDescription
from counterpoint.schedule.estimate import estimate, estimate_sequential
from counterpoint.schedule.generate import backward_description, make_schedule
from counterpoint.schedule.operations import most_block_bytes, only_reduces
from counterpoint.units import MIB, format_bytes, format_percent, format_us
from counterpoint.value import Value

LEAST_BLOCK_BYTES = 2 * MIB  # assumption: below this, chunks take only latency and host time
# Behind a switch. Measured on 2 and 4 H200s (benchmarks/ops_grid.py, which also times those that did not win on the fitted
# shapes). Of near ties the first is taken: few pieces where rows are gathered; many in rings of two ranks, which were faster
# than estimated under the power limit; and eight in rings of four. Reductions of more than two ranks leave `all_peers` out:
# nothing keeps its copies in step, so they meet at the ports, and took up to 30 % longer than rings on 4 H200s.
GATHERING = (
    ScheduleDescription(pattern="one_peer", chunks=1),
    ScheduleDescription(pattern="one_peer", chunks=1, num_compute_streams=1),
    ScheduleDescription(pattern="one_peer", chunks=2),
    ScheduleDescription(pattern="one_peer", chunks=4),
    ScheduleDescription(pattern="one_peer", chunks=1, matmul="rest"),
)
RING_OF_HALVES = ScheduleDescription(pattern="ring", chunks=2)
RING_OF_HALVES_IN_TURN = ScheduleDescription(pattern="ring", chunks=2, num_compute_streams=1)
RING_OF_QUARTERS = ScheduleDescription(pattern="ring", chunks=4)
SENT_HALVES = ScheduleDescription(pattern="one_peer", chunks=2)
# One piece for each rank, as in PyTorch's fused operator
UNDIVIDED = ScheduleDescription(pattern="one_peer", chunks=1, num_compute_streams=1)
REDUCING = (
    RING_OF_QUARTERS,
    RING_OF_HALVES,
    RING_OF_HALVES_IN_TURN,
    ScheduleDescription(pattern="all_peers", chunks=2),
    SENT_HALVES,
)
REDUCING_FOR_MANY = (RING_OF_HALVES, RING_OF_QUARTERS, RING_OF_HALVES_IN_TURN, SENT_HALVES, UNDIVIDED)
# If half a block is larger, rings of more than two ranks cut a block into four pieces even if the estimate is up to that
# much longer. On three machines with 4 H200s and one with 4 H100s it took 8 % less to 3 % more, 2.4 % less in the mean,
# where 0.3 to 0.8 % more were estimated. The reason is not known.
LARGE_PIECE_BYTES = 64 * MIB
LARGE_PIECE_TIE = 0.01
# Calls are short if their matmul's multiplications take less at full clock: then the power limit does not act
SHORT_CALL_US = 3000.0
# In short calls two ranks cut blocks into halves if the estimate is a near tie. Of 166 stored reductions on 2 GPUs that
# changes six picks, by -7.9 to +0.3 %
HALVES = (RING_OF_HALVES, SENT_HALVES)
# In column_parallel_matmul's backward pass, blocks that are sent in halves take 3 to 6 % longer than rings of halves on 2
# H200s (5 shapes), and 4 to 15 % on 4 (4 shapes), where up to 1.3 % less is estimated. The reason is not known, so they are
# no candidates. There two ranks take rings of halves even if the estimate is up to that much longer: it is 0.6 % longer
# than that of the same ring in turn, in a shape where the ring takes 3 % less
HALVES_TIE = 0.01
# In short calls more than two ranks leave blocks undivided even if the estimate is up to that much longer. In such calls of
# matmul + reduce-scatter on 4 H200s, estimates of divided blocks were up to 17 % too short (`ring/4`), and those of
# undivided ones 6 % (66 cases, ops_seeded_4x_h200.json and ops_grid_again_4x_h200.json). Picks are as good from 3 to 4 ms
# and from 1.5 to 2 %. Assumed for other operators and other numbers of ranks
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
    if problem.operation == "column_parallel_matmul":
        behind_a_switch = tuple(each for each in behind_a_switch if each.pattern == "ring" or each == UNDIVIDED)
    if direction == "backward":  # some of them are equal in backward
        behind_a_switch = tuple(dict.fromkeys(backward_description(problem.operation, each) for each in behind_a_switch))
    if machine.link.topology == "switch" or problem.num_ranks == 2:
        return behind_a_switch
    num_streams = num_copy_streams_on(machine.link, problem.num_ranks)
    to_all = tuple(
        ScheduleDescription(pattern="all_peers", chunks=chunks, matmul=matmul, num_copy_streams=num_streams)
        for chunks in sorted({*DIRECT_CHUNKS, problem.num_ranks})
        for matmul in ("chunk", "fused")
    )
    return (*to_all, behind_a_switch[0])


def num_copy_streams_on(link: Link, num_ranks: int) -> int:
    """Return on how many streams a rank copies to its peers: on one behind a switch, where several would send to one GPU at
    a time and wait for each other, and on direct links on one for each peer, so that no wires are idle.
    """
    return 1 if link.topology == "switch" else min(max(1, num_ranks - 1), MAX_COPY_STREAMS)


def rank_candidates(
    problem: Problem, machine: Machine, direction: Pass = "forward", costs: Costs = DEFAULT_COSTS
) -> tuple[RankedSchedule, ...]:
    """Return all candidates with their estimated times, fastest first."""
    estimated_us = _estimated_us(problem, machine, direction, costs)
    candidates = (RankedSchedule(description=each, estimated_us=us) for each, us in estimated_us.items())
    return tuple(sorted(candidates, key=lambda each: each.estimated_us))


@lru_cache(maxsize=1)  # who asks for the pick often asks for the other candidates, too
def _estimated_us(problem: Problem, machine: Machine, direction: Pass, costs: Costs) -> dict[ScheduleDescription, float]:
    """Return the estimated time of each candidate, in order of preference."""
    return {
        each: estimate(make_schedule(problem, each, direction), problem, machine, costs).makespan_us
        for each in candidate_descriptions(problem, machine, direction)
    }


def _preferred(
    problem: Problem, machine: Machine, direction: Pass, costs: Costs
) -> tuple[tuple[ScheduleDescription, float], ...]:
    """Return what is taken before other candidates, in order: each if its estimate is at most that share above the least."""
    if not only_reduces(problem, direction):
        return ()
    if problem.operation == "column_parallel_matmul" and problem.num_ranks == 2:
        return ((RING_OF_HALVES, HALVES_TIE),)
    is_short = Clock(problem, machine, costs).multiplied_us < SHORT_CALL_US
    if problem.num_ranks == 2:
        return tuple((each, NEAR_TIE) for each in HALVES) if is_short else ()
    if machine.link.topology != "switch":
        return ()
    if most_block_bytes(problem) > 2 * LARGE_PIECE_BYTES:
        return ((RING_OF_QUARTERS, LARGE_PIECE_TIE),)
    return ((UNDIVIDED, UNDIVIDED_TIE),) if is_short else ()


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
    estimated_us = _estimated_us(problem, machine, direction, costs)
    least_us = min(estimated_us.values())
    sequential_us = estimate_sequential(problem, machine, costs, direction=direction)
    enough_us = (1 - LEAST_ESTIMATED_GAIN) * sequential_us

    def reason_for(us: float) -> str:
        return f"estimated {format_us(us)} against {format_us(sequential_us)} one after the other"

    if least_us > enough_us:
        return Pick(description=SEQUENTIAL, reason=f"no schedule promises enough: {reason_for(least_us)}")
    in_order = *_preferred(problem, machine, direction, costs), *((each, NEAR_TIE) for each in estimated_us)
    taken, tie = next(
        (each, tie) for each, tie in in_order if estimated_us.get(each, math.inf) <= min((1 + tie) * least_us, enough_us)
    )
    preferred = f", preferred to schedules within {format_percent(tie)} of it" if estimated_us[taken] > least_us else ""
    return Pick(description=taken, reason=reason_for(estimated_us[taken]) + preferred)
