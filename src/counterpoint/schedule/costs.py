"""The cost of each action of a schedule on a machine: the constants, and the arithmetic of one action.

A matmul is cut into tiles of the shape that ends first; cuBLAS chooses among about as many shapes. Every constant is
measured, fitted or assumed, as its comment says. `estimate.py` handles how actions wait for each other, and
`wave_model.py` how they share SMs.
"""

import itertools
import math
from collections.abc import Sequence

import msgspec

from counterpoint.machine import Machine, usual_element_type
from counterpoint.schedule.actions import Problem, Region
from counterpoint.schedule.wave_model import Piece
from counterpoint.units import MIB, US_PER_S
from counterpoint.value import Value

# Tiles of a CTA in cuBLAS's bf16 kernels on sm_90, by names of kernels in traces of training on H200s (2026-11-21: such as
# nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN), each along rows and along columns
SEEN_TILES = ((128, 256), (128, 320), (192, 192), (128, 192), (128, 128), (64, 128), (64, 192), (64, 448))
TILES = tuple(sorted({tile for one, other in SEEN_TILES for tile in ((one, other), (other, one))}))
USUAL_TILE = (128, 256)


class Costs(Value, frozen=True, kw_only=True):
    """Constants of the model.

    Fitted, 2026-11-23 (benchmarks/heuristic_fit.py): those of matmul pieces to lone matmuls and to matmuls in pieces
    (benchmarks/results/ops_losses_2x_h200.json); those of schedules to the times of 5 schedules and sequential on each of 17
    shapes, all-gather + matmul and matmul + reduce-scatter, on 2 H200s (ops_grid_2x_h200.json there).
    """

    # fitted to 16 grouped matmuls of experts on H200s, 2026-11-23 (torch 2.11): the share of the HBM's bandwidth that
    # reading the weights of all experts reaches
    grouped_weights_efficiency: float = 0.47
    # from lone matmuls of less than 4 ms on H200s; one of 8192^3 alone reaches 790 of 989 TFLOP/s
    matmul_efficiency: float = 0.81
    # fitted to pieces: a tile's time grows with its edge, which determines loads, over its area, which determines
    # multiplications
    tile_edge: float = 7.73
    # fitted to schedules on 4 H200s (ops_seeded_4x_h200.json; from 0.1 to 0.2 the picks are the same): how much longer a
    # tile of fewer than 128 rows or columns multiplies, beyond its edge
    narrow_tile: float = 0.15
    # fitted to pieces: filling and draining the pipeline of a tile
    tile_us: float = 1.6
    # fitted to pieces: from a kernel's end to the start of work that waits for it, also on its own stream; SMs do not wait
    # for it
    kernel_us: float = 3.42
    # fitted to schedules: the share of a wave that a piece loses if it starts while SMs still run another piece's tiles
    stagger_waves: float = 0.0841
    # from lone matmuls: up to the first length a call runs at full clock, and from the second the power limit sets its speed
    full_clock_us: float = 2000.0
    power_limited_us: float = 6000.0
    # from 207 lone matmuls of more than 3 ms on 2 and 4 H200s: how much longer their multiplications take if the power limit
    # sets the speed; assumed for other GPUs of NVIDIA, and left out for AMD's. fp32 is not slowed; fp64 was not measured
    power_slowdown: float = 0.14
    # fitted to schedules: the share of idle SMs' loss that returns as clock speed if the power limit sets the
    # speed
    power_returned: float = 0.287
    # measured on 2 H200s: how much longer matmuls take while the GPU constantly sends and receives, at full clock and at
    # the power limit; copies take no longer beside matmuls
    beside_copies: float = 0.064
    beside_copies_limited: float = 0.012
    # measured: large copies alone run at 359 to 392 of 450 GB/s
    copy_efficiency: float = 0.84
    # measured on 2 H200s, 2026-11-23: a copy of 64 KiB to a peer
    copy_us: float = 12.0
    # fitted to three copy streams against one on 4 H200s: the share of a port behind a switch that copies sharing it reach
    shared_port_efficiency: float = 0.92
    # fitted to one_peer/2 beside rings in two runs on 4 H200s (ops_grid_4x_h200.json, ops_grid_first_4x_h200.json; from 0.84
    # to 0.92 the picks are the same): the share of its rate that a copy of a reduction on more than two ranks reaches where
    # nothing keeps ranks in step, in divided blocks of `unpaced_block_mib` and more. Blocks of 32 MiB and less lose nothing
    # there, those of 42 MiB and more do (ops_seeded_4x_h200.json)
    unpaced_efficiency: float = 0.88
    unpaced_block_mib: float = 40.0
    # measured on 2 H200s, 2026-11-23: the flag, from a copy's end to the start of work that waits for it on another GPU
    signal_us: float = 8.5
    # measured on 2 H200s, 2026-11-27: a wait for a flag that is set, alone; beside a copy 3.8. From the end of the last
    # action that a matmul waits for to its start, if it waits for more than its stream. In calls that reset each flag behind
    # its wait it was 4.26, fitted; with that, or with 1, calls of today are picked less well
    wait_us: float = 1.9
    # fitted to schedules: the time of a call besides its actions, such as begin and end and their flags
    call_us: float = 4.69
    # measured, of the HBM's bandwidth: the sum of two matrices (100 MB in 23 us), and of four (168 MB in 45.5 us)
    memory_efficiency: float = 0.9
    strided_efficiency: float = 0.77
    # fitted to schedules, of the HBM's bandwidth: a copy within a GPU, beside a matmul; measured alone: 0.87
    place_efficiency: float = 0.533
    # assumed: passes over the rows that a matmul adds its product to
    add_passes: float = 1.0
    # measured, of the link: NCCL's all-gather and reduce-scatter of 32 MiB to 1 GiB on 2 and on 4 H200s; assumed for 3 ranks
    # and for more than 4
    collective_efficiency_of_two: float = 0.545
    collective_efficiency: float = 0.69
    # measured on 2 H200s, 2026-11-23: NCCL's all-to-all of 32 to 128 MiB received, 281 to 295 GB/s; and, 2026-11-27, 284 to
    # 296 of 180 MiB, and 303 to 339 of 256 MiB to 1.8 GiB; in between a mixture; assumed for more ranks
    exchange_efficiency: float = 0.65
    small_exchange_mib: float = 192.0
    large_exchange_efficiency: float = 0.72
    large_exchange_mib: float = 256.0
    collective_us: float = 20.0


DEFAULT_COSTS = Costs()


class Clock:
    """Costs of actions for one problem on one machine."""

    def __init__(
        self, problem: Problem, machine: Machine, costs: Costs = DEFAULT_COSTS, num_copied_elements: int = 0
    ) -> None:
        """`num_copied_elements`: the elements that a rank sends beside its matmuls."""
        self._machine, self._costs = machine, costs
        peak = machine.matmul_flops_per_s(usual_element_type(problem.element_bytes))
        self._flops_per_us = costs.matmul_efficiency * peak / US_PER_S
        self._element_bytes = problem.element_bytes
        self._pieces: dict[tuple[tuple[int, ...], int, int, bool], Piece] = {}
        self.signal_us, self.wait_us, self.call_us = costs.signal_us, costs.wait_us, costs.call_us
        self.copy_latency_us = costs.copy_us
        self._collective_efficiencies = _collective_efficiencies(problem, costs)
        self._group_bytes_per_s = machine.link.group_bytes_per_s(problem.num_ranks)
        # the whole matmul's multiplications at full clock
        self.multiplied_us = 2 * problem.num_rows * problem.num_inner * problem.num_columns / self._flops_per_us
        limited = _share_between(self.multiplied_us, costs.full_clock_us, costs.power_limited_us)
        if machine.gpu.vendor == "nvidia" and problem.element_bytes <= 2:
            self._flops_per_us /= 1 + costs.power_slowdown * limited
        self.smoothing = costs.power_returned * limited
        beside = costs.beside_copies + limited * (costs.beside_copies_limited - costs.beside_copies)
        copied_us = self.copies_us(num_copied_elements) if num_copied_elements else 0.0
        self._stretch = 1 + beside * min(1.0, copied_us / self.multiplied_us)

    def piece(self, num_rows: int, num_inner: int, num_columns: int, count: int = 1, *, is_added: bool = False) -> Piece:
        """Return the tiles of a matmul, or of `count` equal ones in one kernel, in the shape that ends first. `is_added`:
        the product is added to existing rows."""
        return self._piece_of((num_rows,) * count, num_inner, num_columns, is_added=is_added)

    def _piece_of(self, rows: tuple[int, ...], num_inner: int, num_columns: int, *, is_added: bool = False) -> Piece:
        """Return the tiles of matmuls of these rows in one kernel."""
        key = (rows, num_inner, num_columns, is_added)
        if key not in self._pieces:
            added_us = self._added_us(rows[0], num_columns) if is_added else 0.0
            self._pieces[key] = self._make_piece(rows, num_inner, num_columns, added_us)
        return self._pieces[key]

    def _make_piece(self, rows: tuple[int, ...], num_inner: int, num_columns: int, added_us: float) -> Piece:
        if 0 in (sum(rows), num_inner, num_columns):
            return Piece(num_tiles=0, tile_us=0.0, start_us=0.0)
        costs, num_sms = self._costs, self._machine.gpu.num_sms

        def shaped(height: int, width: int) -> Piece:
            edge = 1 / height + 1 / width - 1 / USUAL_TILE[0] - 1 / USUAL_TILE[1]
            narrow = costs.narrow_tile if min(height, width) < USUAL_TILE[0] else 0.0
            multiplied_us = (1 + narrow) * 2 * height * width * num_inner / (self._flops_per_us / num_sms)
            return Piece(
                num_tiles=sum(math.ceil(number / height) for number in rows) * math.ceil(num_columns / width),
                tile_us=self._stretch * (costs.tile_us + multiplied_us * (1 + costs.tile_edge * edge)),
                start_us=0.0,
            )

        best = min((shaped(*shape) for shape in TILES), key=lambda each: math.ceil(each.num_tiles / num_sms) * each.tile_us)
        stagger_us = (1 - self.smoothing) * costs.stagger_waves * best.tile_us
        return msgspec.structs.replace(best, start_us=added_us, stagger_us=stagger_us, after_us=costs.kernel_us)

    def matmul_us(self, num_rows: int, num_inner: int, num_columns: int) -> float:
        """Return the time of a matmul that has all SMs."""
        return self._alone_us(self.piece(num_rows, num_inner, num_columns))

    def _alone_us(self, piece: Piece) -> float:
        num_sms = self._machine.gpu.num_sms
        waves = piece.num_tiles / num_sms
        waves += (1 - self.smoothing) * (math.ceil(waves) - waves)
        return piece.start_us + piece.tile_us * waves + piece.after_us

    def _added_us(self, num_rows: int, num_columns: int) -> float:
        num_bytes = num_rows * num_columns * self._element_bytes
        return self._costs.add_passes * num_bytes / self._machine.gpu.hbm_bytes_per_s * US_PER_S

    def grouped_piece(
        self, expert_rows: Sequence[int], num_inner: int, num_columns: int, *, is_gradient: bool = False
    ) -> Piece:
        """Return the tiles of a grouped matmul: those of each expert's rows. `is_gradient`: the result is the gradient of
        the experts' weights, and the rows, taken as equally many for each expert that has some, are what is added up.

        Experts with few rows wait for their weights; both times add up as squares do, within 13 % of what was measured.
        """
        num_used = sum(1 for rows in expert_rows if rows)
        if not num_used:
            return Piece(num_tiles=0, tile_us=0.0, start_us=0.0)
        if is_gradient:
            piece = self.piece(num_inner, math.ceil(sum(expert_rows) / num_used), num_columns, num_used)
        else:
            piece = self._piece_of(tuple(rows for rows in expert_rows if rows), num_inner, num_columns)
        multiplied_us = piece.num_tiles * piece.tile_us / self._machine.gpu.num_sms
        rate = self._costs.grouped_weights_efficiency * self._machine.gpu.hbm_bytes_per_s
        weights_us = self.num_bytes(num_used * num_inner * num_columns) / rate * US_PER_S
        return msgspec.structs.replace(piece, tile_us=piece.tile_us * math.hypot(1, weights_us / multiplied_us))

    def grouped_us(
        self, expert_rows: Sequence[int], num_inner: int, num_columns: int, *, is_gradient: bool = False
    ) -> float:
        """Return the time of a grouped matmul that has all SMs."""
        return self._alone_us(self.grouped_piece(expert_rows, num_inner, num_columns, is_gradient=is_gradient))

    def activation_us(self, num_elements: int) -> float:
        """Return the time of a kernel that reads and writes this many elements, row by row."""
        return self._memory_us(num_elements, self._costs.memory_efficiency)

    def num_bytes(self, num_elements: int) -> float:
        """Return the bytes of this many elements."""
        return float(num_elements * self._element_bytes)

    def copies_us(self, num_elements: int) -> float:
        """Return the time of copies of this many elements from every rank to all others at once, without a pause."""
        rate = self._costs.copy_efficiency * self._group_bytes_per_s
        return self._costs.copy_us + self.num_bytes(num_elements) / rate * US_PER_S

    def placed_us(self, num_elements: int) -> float:
        """Return the time of a copy within a GPU that reads and writes this many elements, beside matmuls."""
        return self._memory_us(num_elements, self._costs.place_efficiency)

    def sum_us(self, num_elements: int, num_parts: int) -> float:
        """Return the time of a sum of this many parts. At the power limit, SMs that wait for memory leave power to
        others.
        """
        efficiency = self._costs.memory_efficiency if num_parts <= 2 else self._costs.strided_efficiency
        return (1 - self.smoothing) * self._memory_us(num_elements, efficiency)

    def _memory_us(self, num_elements: int, efficiency: float) -> float:
        rate = efficiency * self._machine.gpu.hbm_bytes_per_s
        return self._costs.kernel_us + self.num_bytes(num_elements) / rate * US_PER_S

    def collective_us(self, num_elements: int) -> float:
        """Return the time of a library collective in which every rank receives this many elements."""
        costs, num_bytes = self._costs, self.num_bytes(num_elements)
        small, large = self._collective_efficiencies
        efficiency = small + _share_between(num_bytes / MIB, costs.small_exchange_mib, costs.large_exchange_mib) * (
            large - small
        )
        return costs.collective_us + num_bytes / (efficiency * self._group_bytes_per_s) * US_PER_S


def _collective_efficiencies(problem: Problem, costs: Costs) -> tuple[float, float]:
    """Return the shares of the link that an operator's collective of the library reaches, small ones and large ones."""
    if problem.operation == "all_to_all_matmul":
        return costs.exchange_efficiency, costs.large_exchange_efficiency
    reached = costs.collective_efficiency_of_two if problem.num_ranks == 2 else costs.collective_efficiency
    return reached, reached


def _share_between(value: float, least: float, most: float) -> float:
    """Return where a value lies between two others: 0 up to the first one, 1 from the second one on."""
    return min(1.0, max(0.0, (value - least) / (most - least)))


def kernels_of(regions: Sequence[Region]) -> list[tuple[int, int]]:
    """Return the kernels that multiply these rows: (how many equal matmuls in one, rows of each).

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
