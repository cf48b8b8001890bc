"""Reference allocations: the dynamic shared memory per CTA that sets each residency, what it leaves, and its effect.

They cover every shipped GPU and the paper's tiles, as Triton compiles the tiles for that GPU. Any number of bytes within a
range sets the same residency; the neighboring residencies begin at the ends of the range, so the rows of a tile show the
sensitivity to the bytes. The figures of occupancy are exact rules; the times are simulated.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from counterpoint.controls import Priority, ResidencyCap
from counterpoint.errors import OccupancyError
from counterpoint.footprints import communication_footprint
from counterpoint.machine import Gpu, Machine
from counterpoint.measurement.values import LEAST_SIMULATED_GAIN
from counterpoint.metrics import measure
from counterpoint.occupancy import cap_shared_bytes, residency, room_for, shared_bytes_per_cta, sm_load
from counterpoint.paper.cases import COLLECTIVES, SIZES, paper_description
from counterpoint.paper.grid import Parts, plan_of
from counterpoint.paper.launches import compiled_for
from counterpoint.plan import Match
from counterpoint.sim import Simulator
from counterpoint.step import Footprint, Kernel, Step
from counterpoint.value import Value
from counterpoint.workloads import build_step

SHAPED_TILES = ("opt1", "opt2")
CASES = tuple(f"{size}_{collective}" for size in SIZES for collective in COLLECTIVES)
# A CTA of the light kernels that can replace a collective in captured steps (`controls.LightKernel`).
LIGHT = Footprint(num_ctas=1, threads_per_cta=128, registers_per_thread=32)


class Allocation(Value, frozen=True, kw_only=True):
    """One residency of one tile on one GPU: the range of bytes that sets it, and what is left of an SM.

    `free_shared_bytes` is what the SM's largest carveout leaves, `free_registers` what the fullest sub-partition does.
    `fits_library`: whether one CTA of the collectives' library fits beside; `num_light`: how many CTAs of `LIGHT` fit.
    `changes` holds, by workload, the simulated time over that without the cap, both with priority if the driver heeds it.
    """

    tile: str
    ctas_per_sm: int
    is_capped: bool
    from_bytes: int
    to_bytes: int
    free_shared_bytes: int
    free_registers: int
    fits_library: bool
    num_light: int
    changes: dict[str, float]


class MachineAllocations(Value, frozen=True, kw_only=True):
    """All residencies on one machine, the largest of each tile first; `library` is a CTA of its collectives."""

    machine: str
    title: str
    library: Footprint
    matmuls: dict[str, Footprint]
    rows: tuple[Allocation, ...]

    def reference(self, case: str, tile: str) -> tuple[Allocation, float] | None:
        """Return the cap of the shortest simulated time and its change; None if no cap saves what a simulation can tell."""
        capped = [row for row in self.rows if row.tile == tile and row.is_capped]
        best = min(capped, key=lambda row: row.changes[case], default=None)
        if best is None or best.changes[case] > -LEAST_SIMULATED_GAIN:
            return None
        return best, best.changes[case]


def allocations_of(machine: Machine) -> MachineAllocations:
    """Return every residency of both tiles on a machine, with the simulated changes."""
    library = communication_footprint(machine.gpu, "nccl")
    steps = {tile: {case: _step(case, tile, machine) for case in CASES} for tile in SHAPED_TILES}
    matmuls = {tile: _matmul(of_tile[CASES[0]]) for tile, of_tile in steps.items()}
    rows = tuple(row for tile in SHAPED_TILES for row in _rows(tile, matmuls[tile], machine, library, steps[tile]))
    return MachineAllocations(machine=machine.name, title=machine.title, library=library, matmuls=matmuls, rows=rows)


def _step(case: str, tile: str, machine: Machine) -> Step:
    return build_step(compiled_for(paper_description(f"{case}_{tile}"), machine.gpu))


def _matmul(step: Step) -> Footprint:
    return next(operation.footprint for operation in step.operations if isinstance(operation, Kernel))


def _rows(
    tile: str, footprint: Footprint, machine: Machine, library: Footprint, steps: dict[str, Step]
) -> Iterator[Allocation]:
    gpu = machine.gpu
    usual = residency(gpu, footprint).ctas_per_sm
    uncapped_us = {case: _time_us(step, machine, None) for case, step in steps.items()}
    starts = {usual: footprint.dynamic_shared_bytes} | _cap_bytes(gpu, footprint, usual)
    for ctas_per_sm, from_bytes in starts.items():
        cap = None if ctas_per_sm == usual else ResidencyCap(ctas_per_sm=ctas_per_sm, dynamic_shared_bytes=from_bytes)
        held = ((_with_bytes(footprint, from_bytes), ctas_per_sm),)
        allocated = shared_bytes_per_cta(gpu, held[0][0])
        most = gpu.max_shared_bytes_per_cta - footprint.static_shared_bytes
        yield Allocation(
            tile=tile,
            ctas_per_sm=ctas_per_sm,
            is_capped=cap is not None,
            from_bytes=from_bytes,
            to_bytes=min((each - 1 for each in starts.values() if each > from_bytes), default=most),
            free_shared_bytes=gpu.shared_bytes_per_sm - ctas_per_sm * allocated,
            free_registers=gpu.registers_per_sub_partition - max(sm_load(gpu, held).registers),
            fits_library=room_for(gpu, held, gpu.shared_bytes_per_sm, library) > 0,
            num_light=room_for(gpu, held, gpu.shared_bytes_per_sm, LIGHT),
            changes={case: _time_us(step, machine, cap) / uncapped_us[case] - 1 for case, step in steps.items()},
        )


def _cap_bytes(gpu: Gpu, footprint: Footprint, usual: int) -> dict[int, int]:
    """Return, by residency below the usual one, the fewest bytes that set it, if a CTA may have that many."""
    found = {}
    for ctas_per_sm in range(usual - 1, 0, -1):
        try:
            found[ctas_per_sm] = cap_shared_bytes(gpu, footprint, ctas_per_sm)
        except OccupancyError:
            break
    return found


def _with_bytes(footprint: Footprint, dynamic_bytes: int) -> Footprint:
    return replace(footprint, dynamic_shared_bytes=dynamic_bytes)


def _time_us(step: Step, machine: Machine, cap: ResidencyCap | None) -> float:
    """Return the simulated makespan with a cap on all matmuls and, if the driver heeds it, priority of the collectives."""
    parts: Parts = []
    if machine.gpu.priority_is_effective:
        parts.append((Match(kind="communication"), Priority(priority=machine.gpu.greatest_priority)))
    if cap is not None:
        parts.append((Match(kind="computation"), cap))
    return measure(Simulator().run(step, machine, plan_of(parts))).makespan_us
