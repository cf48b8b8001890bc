"""How long a schedule takes on a machine, by arithmetic: list scheduling of its actions with a cost for each.

Four losses decide between schedules. Decomposition: a matmul piece runs in waves of tiles over the SMs, and a part of
its last wave is lost unless the next piece, on another stream, fills it. Contention: copies take HBM bandwidth and
power from matmuls, sums take SMs. Latency: every copy costs a few microseconds before its first byte. Bandwidth: a
rank's copies share its port. It is a model to rank schedules with, not a measurement; `sim/` models SMs in far more
detail and knows nothing of chunks.
"""

import math
from collections.abc import Sequence

from counterpoint.machine import Machine
from counterpoint.schedule.actions import COMPUTATION_KINDS, Action, CopySchedule, Pass, Problem
from counterpoint.units import US_PER_S
from counterpoint.value import Value


class Costs(Value, frozen=True, kw_only=True):
    """Constants of the model. Source of each: measured, fitted or assumed, as the comment says.

    Fitted: to the times of 7 or 8 schedules of each of 17 shapes, all-gather + matmul and matmul + reduce-scatter, on 4
    H200s (2026-11-21, benchmarks/results/ops_grid_4x_h200.json); 7 more shapes were held out.
    """

    # fitted; a bf16 matmul of 8192^3 alone reaches 790 of 989 TFLOP/s
    matmul_efficiency: float = 0.78
    # assumed: the tile of cuBLAS's large bf16 kernels on sm_90
    tile_rows: int = 128
    tile_columns: int = 256
    # fitted: filling and draining the pipeline of a tile, and the start of a kernel behind another
    tile_us: float = 2.0
    kernel_us: float = 1.0
    # fitted; large copies alone run at 359 to 392 of 450 GB/s, small ones take 17 us
    copy_efficiency: float = 0.84
    copy_us: float = 10.0
    # fitted: a flag's way to another GPU, and the stream's to see it
    signal_us: float = 6.5
    # fitted: what copies beside a matmul cost it; mostly power
    contention: float = 0.033
    # measured: NCCL all-gather at 303 GB/s on 4, 244 GB/s on 2 H200s
    collective_efficiency: float = 0.65
    collective_us: float = 20.0
    # fitted: of the HBM's bandwidth, what a sum over strided rows reaches
    memory_efficiency: float = 0.75


DEFAULT_COSTS = Costs()


class Span(Value, frozen=True, kw_only=True):
    """When an action starts and ends."""

    start_us: float
    end_us: float


class Estimate(Value, frozen=True, kw_only=True):
    """The spans of all actions in their order, and the end of the last."""

    spans: tuple[Span, ...]
    makespan_us: float


class Clock:
    """Costs of actions for one problem on one machine."""

    def __init__(self, problem: Problem, machine: Machine, costs: Costs = DEFAULT_COSTS) -> None:
        self._problem, self._machine, self._costs = problem, machine, costs

    def matmul_us(self, num_rows: int, num_inner: int, num_columns: int, *, is_shared: bool = False) -> float:
        """A matmul; `is_shared`: its last wave is filled by the next piece."""
        if 0 in (num_rows, num_inner, num_columns):
            return 0.0
        costs, gpu = self._costs, self._machine.gpu
        tiles = math.ceil(num_rows / costs.tile_rows) * math.ceil(num_columns / costs.tile_columns)
        waves = tiles / gpu.num_sms
        flops = 2 * costs.tile_rows * costs.tile_columns * num_inner
        peak = gpu.bf16_flops_per_s if self._problem.element_bytes <= 2 else gpu.bf16_flops_per_s / 8
        tile_us = costs.tile_us + flops / (costs.matmul_efficiency * peak / gpu.num_sms) * US_PER_S
        return costs.kernel_us + tile_us * (max(1.0, waves) if is_shared else math.ceil(waves))

    def copy_us(self, num_bytes: int) -> float:
        """A copy to a peer."""
        rate = self._costs.copy_efficiency * self._machine.link.per_peer_bytes_per_s
        return self._costs.copy_us + num_bytes / rate * US_PER_S

    def memory_us(self, num_bytes: int) -> float:
        """A kernel that reads and writes so many bytes."""
        return (
            self._costs.kernel_us
            + num_bytes / (self._costs.memory_efficiency * self._machine.gpu.hbm_bytes_per_s) * US_PER_S
        )

    def collective_us(self, num_bytes: int) -> float:
        """A collective of the library in which every rank receives so many bytes."""
        rate = self._costs.collective_efficiency * self._machine.link.bytes_per_s
        return self._costs.collective_us + num_bytes / rate * US_PER_S


def estimate(schedule: CopySchedule, problem: Problem, machine: Machine, costs: Costs = DEFAULT_COSTS) -> Estimate:
    """Times of all actions, in issue order on each stream; matmuls share a rank's SMs, copies its port, first come
    first served."""
    clock = Clock(problem, machine, costs)
    columns = {buffer.name: buffer.num_columns for buffer in schedule.buffers}
    stream_ends: dict[tuple[int, str], float] = {}
    engine_ends: dict[tuple[int, str], float] = {}
    spans: list[Span] = []
    is_shared = schedule.description.num_compute_streams > 1
    for action in schedule.actions:
        engine = (action.rank, _engine(action))
        start = max(stream_ends.get((action.rank, action.stream), 0.0), engine_ends.get(engine, 0.0))
        for before in action.after:
            flag_us = costs.signal_us if schedule.actions[before].rank != action.rank else 0.0
            start = max(start, spans[before].end_us + flag_us)
        duration = _duration_us(action, clock, (columns, problem.element_bytes), is_shared)
        if action.kind in COMPUTATION_KINDS:
            duration *= 1 + costs.contention
        spans.append(Span(start_us=start, end_us=start + duration))
        stream_ends[action.rank, action.stream] = engine_ends[engine] = start + duration
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
    num_bytes, count = _communicated(problem, direction)
    alone_us = min(communication_us(problem, machine, costs, direction=direction), clock.copy_us(count * num_bytes))
    return max(alone_us, computation_us(problem, machine, costs, direction=direction))


def communication_us(
    problem: Problem, machine: Machine, costs: Costs = DEFAULT_COSTS, *, direction: Pass = "forward"
) -> float:
    """The library's collectives alone."""
    num_bytes, count = _communicated(problem, direction)
    return count * Clock(problem, machine, costs).collective_us(num_bytes) if num_bytes else 0.0


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
    """Bytes that a rank receives in one collective, and how many collectives there are.

    All-reduce counts twice, as a reduce-scatter and an all-gather. Backward, gathered rows come a second time and their
    gradients go back; the gradient of matmul + reduce-scatter is gathered once, that of matmul + all-reduce is there.
    """
    operation = problem.operation
    is_reduction = operation in ("matmul_reduce_scatter", "matmul_all_reduce")
    width = problem.num_columns if is_reduction else problem.num_inner
    num_bytes = problem.num_rows * width * problem.element_bytes * (problem.num_ranks - 1) // problem.num_ranks
    if operation == "matmul_all_reduce":
        return 2 * num_bytes, 1 if direction == "forward" else 0
    return num_bytes, 1 if direction == "forward" or operation == "matmul_reduce_scatter" else 2


def _engine(action: Action) -> str:
    """What the action occupies on its rank: the SMs, the port, or nothing."""
    if action.kind == "copy":
        return "port"
    return "SMs" if action.kind in COMPUTATION_KINDS else f"none {action.stream}"


def _duration_us(action: Action, clock: Clock, shape: tuple[dict[str, int], int], is_shared: bool) -> float:
    columns, element_bytes = shape

    def num_bytes(regions: Sequence[object]) -> int:
        return sum(each.num_rows * columns[each.buffer] * element_bytes for each in regions)  # type: ignore[attr-defined]

    if action.kind in ("begin", "end"):
        return 0.0
    if action.kind == "copy":
        return clock.copy_us(num_bytes(action.reads))
    if action.kind in ("sum", "place"):
        return clock.memory_us(num_bytes([*action.reads, *action.writes]))
    if action.kind == "weight_gradient":
        left, right = action.reads
        return clock.matmul_us(columns[left.buffer], left.num_rows, columns[right.buffer], is_shared=is_shared)
    rows = sum(region.num_rows for region in action.writes)
    inner = columns[action.reads[0].buffer]
    return clock.matmul_us(rows, inner, columns[action.writes[0].buffer], is_shared=is_shared)
