"""Sweeps of the first paper's workloads along one axis, simulated: the same variants at every value of the axis.

If the machine cannot run a point's step, because a CTA does not fit an SM, the point stays in the sweep with the reason.
"""

from collections.abc import Sequence

from counterpoint.errors import MachineError, OccupancyError, StepError, shown
from counterpoint.machine import Machine
from counterpoint.occupancy import residency
from counterpoint.paper.cases import Axis, SweepCase, cases_of, check_memory
from counterpoint.paper.grid import simulated_rows, sweep_plans
from counterpoint.paper.launches import compiled_for
from counterpoint.paper.values import Sweep, SweepPoint
from counterpoint.step import Kernel, Step
from counterpoint.workloads import build_step
from counterpoint.workloads.description import Description


def simulate_sweep(
    description: Description, machine: Machine, axis: Axis, values: Sequence[str], *, is_compiled: bool = True
) -> Sweep:
    """Simulate the workload at each value. Raises `WorkloadError` for a bad value or sizes beyond the GPU's memory.

    If `is_compiled`, the GEMMs are the paper's, with the launch that Triton compiles for the machine's GPU.
    """
    cases = cases_of(description, axis, values, machine)
    for case in cases:
        check_memory(case.description, machine.gpu.hbm_bytes, f"a GPU of '{machine.name}' has")
    points = tuple(_simulate(case, machine, is_compiled) for case in cases)
    return Sweep(workload=description.name, machine=machine.name, axis=axis, points=points)


def _simulate(case: SweepCase, machine: Machine, is_compiled: bool) -> SweepPoint:
    described = case.description
    point = SweepPoint(setting=case.setting, num_ranks=described.num_ranks, iterations=described.iterations)
    try:
        step = build_step(compiled_for(described, machine.gpu) if is_compiled else described)
        _check_launches(step, machine)
        plans = sweep_plans(step, machine)
        scale, rows = simulated_rows(step, machine, plans)
    except (StepError, OccupancyError, MachineError) as problem:
        return point.with_rows((), None, str(problem))
    return point.with_rows(rows, scale.ideal_us)


def _check_launches(step: Step, machine: Machine) -> None:
    """Raise `OccupancyError` for a kernel if not even one of its CTAs fits an SM of the machine."""
    for operation in step.operations:
        if not isinstance(operation, Kernel):
            continue
        fit = residency(machine.gpu, operation.footprint)
        if fit.ctas_per_sm == 0:
            raise OccupancyError(
                f"No CTA of '{shown(operation.name)}' fits an SM of '{machine.name}', limited by {fit.limiter}: "
                f"it has {operation.footprint.shared_bytes:,} bytes of shared memory, "
                f"{operation.footprint.threads_per_cta} threads and {operation.footprint.registers_per_thread} "
                "registers per thread. Choose another tile or type."
            )
