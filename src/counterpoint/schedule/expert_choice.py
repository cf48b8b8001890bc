"""Chooses how experts' rows are exchanged: by the library, or by copies, and in how many groups of experts.

Tables give the choice of a call by its size, because sizes change from call to call, and a look-up takes microseconds. All
ranks know all sizes, so they agree without communication. `rank_expert_schedules` estimates schedules instead, which takes
milliseconds.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from counterpoint.links import Link
from counterpoint.machine import Machine
from counterpoint.schedule.description import SEQUENTIAL, ScheduleDescription
from counterpoint.schedule.expert_estimate import estimate_experts
from counterpoint.schedule.expert_schedules import ExpertProblem, make_expert_schedule
from counterpoint.schedule.heuristic import RankedSchedule, num_copy_streams_on
from counterpoint.schedule.routing import Routing, most_of_pairs
from counterpoint.units import MIB, format_bytes
from counterpoint.value import Value

ESTIMATED_GROUPS = (1, 2, 4, 8)


class CallSize(NamedTuple):
    """How much the ranks of a call exchange. `pair_bytes`: the most that one rank sends to another. `port_bytes`: the most
    that one rank sends to, or receives from, all others. With two ranks both are equal.
    """

    pair_bytes: int
    port_bytes: int

    @property
    def middle_bytes(self) -> int:
        """The geometric mean of both, by which tables choose the number of groups. Copies take as long as the busiest port
        needs. What a group costs the host grows with the number of peers, but less than in proportion. Of the choices that
        two ranks need, four H200s needed those of this mean (experts_4x_h200.json).
        """
        return math.isqrt(self.pair_bytes * self.port_bytes)


def size_of(pairs: Sequence[Sequence[int]], row_bytes: int) -> CallSize:
    """Return the size of a call with these rows of each pair of ranks: `pairs[source][destination]`."""
    sent = [sum(row) - row[rank] for rank, row in enumerate(pairs)]
    received = [sum(column) - column[rank] for rank, column in enumerate(zip(*pairs, strict=True))]
    return CallSize(most_of_pairs(pairs) * row_bytes, max(*sent, *received) * row_bytes)


class ExchangeSize(Value, frozen=True, kw_only=True):
    """The measured choice from `least_bytes` on: experts in `num_groups` groups; 0: the library exchanges the rows."""

    least_bytes: int
    num_groups: int
    source: str


MEASURED = "benchmarks/results/experts_2x_h200.json, 2026-11-23"
# By `middle_bytes`; the last one that applies counts. Measured with 2 ranks.
EXCHANGE_SIZES = (
    ExchangeSize(
        least_bytes=0,
        num_groups=0,
        source=f"the library was faster than copies, or within their spread ({MEASURED})",
    ),
    ExchangeSize(
        least_bytes=64 * MIB,
        num_groups=1,
        source=f"each further group cost the host more time than it hid ({MEASURED})",
    ),
    ExchangeSize(
        least_bytes=160 * MIB,
        num_groups=4,
        source=f"several groups gained ({MEASURED})",
    ),
)
MEASURED_FORWARD = "benchmarks/results/experts_2x_h200_numbered.json, 2026-11-27"
# The same for calls without gradients. Backward has twice the matmuls and the host three times the work of a group, so that
# there more groups take longer where the host is the limit; forward alone gains. The library exchanges the rows if the
# busiest pair alone is below the first row: one group of 11 MiB for each pair took 8 % longer than that on 4 H200s.
FORWARD_SIZES = (
    ExchangeSize(
        least_bytes=16 * MIB,
        num_groups=1,
        source=f"copies return results faster; further groups cost the host more time than they hide ({MEASURED_FORWARD})",
    ),
    ExchangeSize(
        least_bytes=40 * MIB,
        num_groups=2,
        source=f"two groups gained ({MEASURED_FORWARD})",
    ),
    ExchangeSize(
        least_bytes=64 * MIB,
        num_groups=4,
        source=f"four groups gained where a group has several experts, two elsewhere ({MEASURED_FORWARD})",
    ),
)
MOST_GROUPS_OF_FEW = 2  # of a rank with few experts: matmuls of one expert each take longer
# A kernel sends the tokens of some forward calls before the host knows their counts. The limits are bytes of the busiest
# port, measured with 2 ranks. Below the first limit it sends all tokens at once
# (benchmarks/results/experts_2x_h100_ahead.json). From the second one on, calls in several groups send them in two parts:
# the rest beside the matmul of the first rows (experts_2x_h200_two_parts.json). Larger calls send the first rows only, if
# there are more than two groups: their matmul hides what the host does then, and the other groups' copies
# (experts_2x_h200_first_rows.json). From the last limit on that loses up to 5 %: the host's part is small, and copy
# engines are faster than the kernel. If a call computes something beside its tokens, copies cost it nothing, and a kernel
# would take its SMs: then only calls that are too small for copies begin so.
AHEAD_BELOW_BYTES = 320 * MIB
PARTS_AHEAD_FROM_BYTES, FIRST_AHEAD_FROM_BYTES, FIRST_AHEAD_BELOW_BYTES = 64 * MIB, 320 * MIB, 1536 * MIB
FIRST_WITHOUT_PARTS_FROM_BYTES = 160 * MIB
Ahead = Literal["all", "parts", "first", "nothing"]
# Of the second kernel and the matmul beside it. Eight CTAs are as fast as more (345 GB/s between two H200s), and six take
# 264 GB/s. The matmul's CTAs are in clusters of two SMs, of which one SM of the kernel's takes both.
FEW_CTAS, NUM_SPARED_SMS = 8, 16
FEW_CTAS_BYTES_PER_S, MATMUL_FLOPS_PER_S = 345e9, 680e12  # measured on 2 H200s
LEAST_FIRST_SHARE = 0.1  # below, tokens in transit cost little, and the results of so small a group hide little on their way
SPARE_FOR_SKEW = 1.15  # 1.3 is faster by 2 to 8 % for Zipf routing, and slower by 0 to 2 % for balanced routing


class ExchangeChoice(Value, frozen=True, kw_only=True):
    """The description (`sequential` for the library's all-to-all), and the reason."""

    description: ScheduleDescription
    reason: str


def size_for(size: CallSize, sizes: Sequence[ExchangeSize] = EXCHANGE_SIZES) -> ExchangeSize:
    """Return the table's row for calls of this size; by default, of calls with gradients."""
    return [each for each in sizes if each.least_bytes <= size.middle_bytes][-1]


def num_groups_for(size: CallSize, num_experts: int, *, has_gradients: bool) -> int:
    """Return in how many groups a rank's experts are computed; 0 if the library exchanges the rows."""
    if has_gradients:
        return size_for(size).num_groups
    if size.pair_bytes < FORWARD_SIZES[0].least_bytes:
        return 0
    num_groups = size_for(size, FORWARD_SIZES).num_groups
    return min(num_groups, max(MOST_GROUPS_OF_FEW, num_experts // 2))


def sent_ahead(size: CallSize, num_groups: int, share: float, *, has_beside: bool) -> Ahead:
    """Return which tokens of calls of this size are sent before the host knows the counts. "parts": all, `first_share` of
    them before the rest; 0 if no kernel can send that beside a matmul. `num_groups`: of experts, 1 if the first one cannot
    be given.
    """
    if has_beside and size_for(size).num_groups:
        return "nothing"
    has_parts = num_groups > 1 and share >= LEAST_FIRST_SHARE
    if has_parts and PARTS_AHEAD_FROM_BYTES <= size.port_bytes < FIRST_AHEAD_FROM_BYTES:
        return "parts"
    least_bytes = FIRST_AHEAD_FROM_BYTES if has_parts else FIRST_WITHOUT_PARTS_FROM_BYTES
    if num_groups > MOST_GROUPS_OF_FEW and least_bytes <= size.port_bytes < FIRST_AHEAD_BELOW_BYTES:
        return "first"
    return "all" if size.port_bytes < AHEAD_BELOW_BYTES else "nothing"


def first_share(num_columns: int, num_ranks: int) -> float:
    """Return the share of rows to send first, so that their matmul with so many columns hides the rest in transit."""
    sent_s = (num_ranks - 1) / num_ranks * 2 / FEW_CTAS_BYTES_PER_S  # of a number in 16 bits
    multiplied_s = 2 * num_columns / MATMUL_FLOPS_PER_S
    return SPARE_FOR_SKEW * sent_s / (SPARE_FOR_SKEW * sent_s + multiplied_s)


def pick_exchange(routing: Routing, row_bytes: int, link: Link) -> ExchangeChoice:
    """Choose how to exchange the rows of a routing, of `row_bytes` each, over a machine's links."""
    if routing.num_ranks == 1:
        return ExchangeChoice(description=SEQUENTIAL, reason="a single rank exchanges no rows")
    size = size_of(routing.pairs, row_bytes)
    obstacle = obstacle_to_exchange(size)
    if obstacle:
        return ExchangeChoice(description=SEQUENTIAL, reason=obstacle)
    return ExchangeChoice(
        description=expert_description(size_for(size).num_groups, num_copy_streams_on(link, routing.num_ranks)),
        reason=f"{_words(size)}, which is enough for copies (measured with 2 ranks)",
    )


def _words(size: CallSize) -> str:
    words = f"the busiest pair of ranks exchanges {format_bytes(size.pair_bytes)}"
    if size.port_bytes == size.pair_bytes:
        return words
    return (
        f"{words} and the busiest rank {format_bytes(size.port_bytes)}, {format_bytes(size.middle_bytes)} in the geometric "
        "mean"
    )


def expert_description(num_groups: int, num_copy_streams: int = 1) -> ScheduleDescription:
    """Return the description that exchanges the rows of so many groups of each rank's experts."""
    return ScheduleDescription(
        pattern="all_peers",
        chunks=num_groups,
        along="experts",
        matmul="fused",
        num_copy_streams=num_copy_streams,
        num_compute_streams=1,
    )


def obstacle_to_exchange(size: CallSize) -> str:
    """Return why copies are not used for a call with gradients of this size, or nothing."""
    if size_for(size).num_groups:
        return ""
    least = min(each.least_bytes for each in EXCHANGE_SIZES if each.num_groups)
    return (
        f"{_words(size)}; below {format_bytes(least)} the library's all-to-all is faster than copies (in forward, "
        "`ops.expert_ffn` may still gain: a kernel sends the tokens before the host knows the counts, which is not "
        "simulated)"
    )


def rank_expert_schedules(problem: ExpertProblem, machine: Machine) -> tuple[RankedSchedule, ...]:
    """Return schedules of `ESTIMATED_GROUPS` groups with their estimated times, fastest first."""
    ranked = []
    for num_groups in ESTIMATED_GROUPS:
        description = expert_description(num_groups, num_copy_streams_on(machine.link, problem.routing.num_ranks))
        estimated = estimate_experts(make_expert_schedule(problem, description), problem, machine)
        ranked.append(RankedSchedule(description=description, estimated_us=estimated.makespan_us))
    return tuple(sorted(ranked, key=lambda each: each.estimated_us))
