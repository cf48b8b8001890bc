"""What each action of a schedule costs on a machine: the constants, and the arithmetic of one action.

A matmul is cut into tiles, of the shape that ends first; cuBLAS chooses among about as many shapes. Source of every
constant: measured, fitted or assumed, as its comment says. Knows nothing of how actions wait for each other
(`estimate.py`) and share SMs (`wave_model.py`).
"""

import itertools
import math
from collections.abc import Sequence

import msgspec

from counterpoint.machine import Machine, usual_element_type
from counterpoint.schedule.actions import Problem, Region
from counterpoint.schedule.wave_model import Piece
from counterpoint.units import US_PER_S
from counterpoint.value import Value

# Sides of a CTA's tile in cuBLAS's bf16 kernels on sm_90 (names of kernels in traces: 128x256, 256x128, 320x128)
TILE_SIDES = (64, 128, 192, 256, 320)
LARGEST_TILE = 320 * 128
TILES = tuple(
    (rows, columns)
    for rows in TILE_SIDES
    for columns in TILE_SIDES
    if rows * columns <= LARGEST_TILE and (rows % 128 == 0 or columns % 128 == 0)
)
USUAL_TILE = (128, 256)


class Costs(Value, frozen=True, kw_only=True):
    """Constants of the model.

    Fitted: to the times of 5 schedules of each of 17 shapes, all-gather + matmul and matmul + reduce-scatter, on 4 H200s
    (benchmarks/results/ops_grid_4x_h200.json) and on 2 (earlier runs of ops_grid_2x_h200.json, on the same day, 2026-11-21);
    7 more shapes were held out.
    """

    # from lone matmuls of less than 4 ms on H200s; one of 8192^3 alone reaches 790 of 989 TFLOP/s
    matmul_efficiency: float = 0.81
    # fitted: a tile's time grows with its edge, by which operands come, over its area, by which they are multiplied
    tile_edge: float = 5.75
    # assumed: filling and draining the pipeline of a tile
    tile_us: float = 2.0
    # fitted: from a kernel's end to the start of what waits for it, the next on its stream included; SMs do not wait for it
    kernel_us: float = 4.0
    # fitted: the share of a wave that each piece loses, because its tiles do not start and end together
    ramp_waves: float = 0.087
    # from lone matmuls: up to so long a call runs at full clock, and from so long on the power limit sets its speed
    full_clock_us: float = 2000.0
    power_limited_us: float = 6000.0
    # fitted: of what idle SMs lose, the share that comes back as clock speed where the power limit sets the speed
    power_returned: float = 0.379
    # measured on 2 H200s: how much longer matmuls take while the GPU sends and receives all the time, at full clock and at
    # the power limit; copies take no longer beside matmuls
    beside_copies: float = 0.064
    beside_copies_limited: float = 0.012
    # measured: large copies alone run at 359 to 392 of 450 GB/s
    copy_efficiency: float = 0.84
    # fitted; a copy of 1 MiB takes 17 us, flag included
    copy_us: float = 17.4
    # fitted to three copy streams against one on 4 H200s: what copies that share a port behind a switch reach of the port
    shared_port_efficiency: float = 0.92
    # assumed: the flag, from a copy's end to the start of what waits for it on another GPU
    signal_us: float = 5.0
    # measured, of the HBM's bandwidth: the sum of two matrices (100 MB in 23 us); assumed: that of more, over strided rows
    memory_efficiency: float = 0.9
    strided_efficiency: float = 0.6
    # assumed: passes over the rows that a matmul adds its product to
    add_passes: float = 1.0
    # measured: NCCL all-gather from 128 MiB on at 280 to 312 GB/s on 4, at 216 to 244 on 2 H200s
    collective_efficiency: float = 0.65
    collective_us: float = 20.0


DEFAULT_COSTS = Costs()


class Clock:
    """Costs of actions for one problem on one machine."""

    def __init__(
        self, problem: Problem, machine: Machine, costs: Costs = DEFAULT_COSTS, num_copied_elements: int = 0
    ) -> None:
        """`num_copied_elements`: what a rank sends beside its matmuls."""
        self._machine, self._costs = machine, costs
        peak = machine.matmul_flops_per_s(usual_element_type(problem.element_bytes))
        self._flops_per_us = costs.matmul_efficiency * peak / US_PER_S
        self._element_bytes = problem.element_bytes
        self._pieces: dict[tuple[int, int, int, int, bool], Piece] = {}
        self.signal_us, self.copy_latency_us = costs.signal_us, costs.copy_us
        self._group_bytes_per_s = machine.link.group_bytes_per_s(problem.num_ranks)
        alone_us = 2 * problem.num_rows * problem.num_inner * problem.num_columns / self._flops_per_us
        beyond = (alone_us - costs.full_clock_us) / (costs.power_limited_us - costs.full_clock_us)
        limited = min(1.0, max(0.0, beyond))
        self.smoothing = costs.power_returned * limited
        beside = costs.beside_copies + limited * (costs.beside_copies_limited - costs.beside_copies)
        copied_us = self.copies_us(num_copied_elements) if num_copied_elements else 0.0
        self._stretch = 1 + beside * min(1.0, copied_us / alone_us)

    def piece(self, num_rows: int, num_inner: int, num_columns: int, count: int = 1, *, is_added: bool = False) -> Piece:
        """The tiles of a matmul, or of `count` equal ones in one kernel, in the shape that ends first. `is_added`: to rows
        that are there."""
        key = (num_rows, num_inner, num_columns, count, is_added)
        if key not in self._pieces:
            added_us = self._added_us(num_rows, num_columns) if is_added else 0.0
            self._pieces[key] = self._make_piece((num_rows, num_inner, num_columns), count, added_us)
        return self._pieces[key]

    def _make_piece(self, sizes: tuple[int, int, int], count: int, added_us: float) -> Piece:
        num_rows, num_inner, num_columns = sizes
        if 0 in sizes:
            return Piece(num_tiles=0, tile_us=0.0, start_us=0.0)
        costs, num_sms = self._costs, self._machine.gpu.num_sms

        def shaped(rows: int, columns: int) -> Piece:
            edge = 1 / rows + 1 / columns - 1 / USUAL_TILE[0] - 1 / USUAL_TILE[1]
            multiplied_us = 2 * rows * columns * num_inner / (self._flops_per_us / num_sms)
            return Piece(
                num_tiles=count * math.ceil(num_rows / rows) * math.ceil(num_columns / columns),
                tile_us=self._stretch * (costs.tile_us + multiplied_us * (1 + costs.tile_edge * edge)),
                start_us=0.0,
            )

        best = min((shaped(*shape) for shape in TILES), key=lambda each: math.ceil(each.num_tiles / num_sms) * each.tile_us)
        start_us = (1 - self.smoothing) * costs.ramp_waves * best.tile_us + added_us
        return msgspec.structs.replace(best, start_us=start_us, after_us=costs.kernel_us)

    def matmul_us(self, num_rows: int, num_inner: int, num_columns: int) -> float:
        """A matmul that has the SMs for itself."""
        piece, num_sms = self.piece(num_rows, num_inner, num_columns), self._machine.gpu.num_sms
        waves = piece.num_tiles / num_sms
        waves += (1 - self.smoothing) * (math.ceil(waves) - waves)
        return piece.start_us + piece.tile_us * waves + piece.after_us

    def _added_us(self, num_rows: int, num_columns: int) -> float:
        num_bytes = num_rows * num_columns * self._element_bytes
        return self._costs.add_passes * num_bytes / self._machine.gpu.hbm_bytes_per_s * US_PER_S

    def num_bytes(self, num_elements: int) -> float:
        """Bytes of so many elements."""
        return float(num_elements * self._element_bytes)

    def copies_us(self, num_elements: int) -> float:
        """So many elements from every rank, to all others at once and without a pause."""
        rate = self._costs.copy_efficiency * self._group_bytes_per_s
        return self._costs.copy_us + self.num_bytes(num_elements) / rate * US_PER_S

    def memory_us(self, num_elements: int, *, is_strided: bool = False) -> float:
        """A kernel that reads and writes so many elements."""
        num_bytes = num_elements * self._element_bytes
        efficiency = self._costs.strided_efficiency if is_strided else self._costs.memory_efficiency
        rate = efficiency * self._machine.gpu.hbm_bytes_per_s
        return self._costs.kernel_us + num_bytes / rate * US_PER_S

    def collective_us(self, num_elements: int) -> float:
        """A collective of the library in which every rank receives so many elements."""
        num_bytes = num_elements * self._element_bytes
        rate = self._costs.collective_efficiency * self._group_bytes_per_s
        return self._costs.collective_us + num_bytes / rate * US_PER_S


def kernels_of(regions: Sequence[Region]) -> list[tuple[int, int]]:
    """The kernels that multiply these rows: (how many equal matmuls in one, rows of each).

    Regions equally long and equally far apart are one batched matmul, as in ops/computation.py; each other run of them
    is a kernel of its own.
    """
    kernels: list[tuple[int, int]] = []
    run: list[Region] = []
    for region in regions:
        if run and not _is_even([*run, region]):
            kernels.append((len(run), run[0].num_rows))
            run = []
        run.append(region)
    return [*kernels, (len(run), run[0].num_rows)] if run else kernels


def _is_even(regions: Sequence[Region]) -> bool:
    distances = {later.start - earlier.start for earlier, later in itertools.pairwise(regions)}
    return len(distances) == 1 and len({region.num_rows for region in regions}) == 1
