"""Estimates the cost of a collective that runs together with its matmuls as one operator of `counterpoint.ops`.

The estimate of `schedule/` gives the time that the operator takes beyond the matmul alone: that time stays exposed; the rest
of the copies runs beside the matmul. The exposed time is never less than the one measured on short matmuls, because the
schedule's estimate only serves to rank schedules. Sizes come from the step; if it has none, from bytes and times: elements
of 2 bytes, a gathered matrix of twice as many rows as columns (an assumption that hardly affects the estimate), and the
other size from the matmul's time. Like the schedule's estimate, this one leaves out the host and clocks under a power limit.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

from counterpoint.machine import ELEMENT_BYTES, Machine
from counterpoint.measurement.values import LEAST_ESTIMATED_GAIN
from counterpoint.schedule.actions import Problem
from counterpoint.schedule.costs import DEFAULT_COSTS
from counterpoint.schedule.description import ScheduleDescription
from counterpoint.schedule.estimate import computation_us, estimate
from counterpoint.schedule.generate import make_schedule
from counterpoint.schedule.heuristic import pick_schedule
from counterpoint.schedule.operations import scheduled_pass
from counterpoint.sim.calibration import Calibration
from counterpoint.sim.costs import CostModel
from counterpoint.sim.matmul_pairs import FED_COLLECTIVES, OPERATOR_OF, MatmulPair
from counterpoint.sim.matmul_rates import USUAL_ELEMENT_TYPE
from counterpoint.step import Collective, Kernel, Step
from counterpoint.units import US_PER_S, format_us

USUAL_ELEMENT_BYTES = 2
LEAST_MATMUL_SHARE = 0.25  # of the collective's time; assumed: below, copies alone gain as much as the operator
SIZE_STEP = 64  # inferred sizes are multiples of it


class OverlapModel:
    """Estimates the pairs of one step on one machine."""

    def __init__(self, step: Step, machine: Machine, calibration: Calibration) -> None:
        self._step, self._machine, self._calibration = step, machine, calibration
        self._costs = CostModel(machine, calibration)
        self._least_bytes = 1 if "fp8" in machine.gpu.matmul_rates() else USUAL_ELEMENT_BYTES

    def estimate(self, pair: MatmulPair, schedule: ScheduleDescription | None = None) -> float | str:
        """Return the time of the pair's collective that the matmuls do not hide, in microseconds, or why the operator would
        not pay. `schedule` is the heuristic's choice by default.
        """
        collective = self._step.collective(pair.collective)
        matmuls_us = sum(self._costs.lone_us(self._step.operations[number]) for number in pair.matmuls)
        alone_us = self._costs.lone_us(collective)
        if schedule is None and matmuls_us < LEAST_MATMUL_SHARE * alone_us:
            return (
                f"its matmul of {format_us(matmuls_us)} is much shorter than its data's {format_us(alone_us)}, "
                "so there is little to hide the data behind"
            )
        problem = self._problem(collective, [self._step.kernel(number) for number in pair.matmuls])
        exposed_us = self._exposed_us(problem, schedule)
        if isinstance(exposed_us, str) or schedule is not None:
            return exposed_us
        if alone_us - exposed_us < LEAST_ESTIMATED_GAIN * (alone_us + matmuls_us):
            return (
                f"beside its matmul of {format_us(matmuls_us)}, copies would leave "
                f"{format_us(exposed_us)} exposed; the library's collective takes {format_us(alone_us)} "
                "in total"
            )
        return exposed_us

    def _exposed_us(self, problem: Problem, schedule: ScheduleDescription | None) -> float | str:
        beyond_us = _beyond_matmul(problem, schedule, self._machine)
        if isinstance(beyond_us, str):
            return beyond_us
        is_reduction = scheduled_pass(problem.operation, "forward").is_reduction
        least = self._calibration.reduction_exposed_us if is_reduction else self._calibration.gather_exposed_us
        return max(least.value, beyond_us)

    def _problem(self, collective: Collective, matmuls: Sequence[Kernel]) -> Problem:
        """Return the operator's sizes; several matmuls that read one gathered matrix count as one with more columns."""
        is_fed = collective.collective in FED_COLLECTIVES
        sizes = matmuls[0].matmul_sizes
        element_type = matmuls[0].element_type
        num_elements = collective.num_bytes // (ELEMENT_BYTES[element_type] if element_type else USUAL_ELEMENT_BYTES)
        multiplied = sum(self._multiplications(each) for each in matmuls)
        if sizes is not None and is_fed:
            rows, inner, columns = sizes
        elif sizes is not None:
            # in a weight's gradient the gathered matrix is the right operand, and its rows are the inner size
            rows, inner = sizes[:2] if collective.num_bytes % (sizes[0] * sizes[1]) == 0 else sizes[1:]
            columns = _round(multiplied / (rows * inner))
        elif is_fed:
            columns = _round(math.sqrt(num_elements / 2))
            rows = max(1, num_elements // columns)
            inner = _round(multiplied / num_elements)
        else:
            inner = _round(math.sqrt(num_elements / 2))
            rows = max(1, num_elements // inner)
            columns = _round(multiplied / num_elements)
        moved = rows * columns if is_fed else rows * inner
        return Problem(
            operation=OPERATOR_OF[collective.collective],
            num_ranks=collective.group_size,
            num_rows=rows,
            num_inner=inner,
            num_columns=columns,
            element_bytes=max(self._least_bytes, round(collective.num_bytes / moved)),
        )

    def _multiplications(self, matmul: Kernel) -> float:
        """Return the matmul's multiply-adds, from its sizes, its operations, or its time at the usual rate."""
        if matmul.matmul_sizes is not None:
            return float(math.prod(matmul.matmul_sizes))
        if matmul.flops is not None:
            return matmul.flops / 2
        rates = self._machine.gpu.matmul_rates()
        peak = rates.get(matmul.element_type or USUAL_ELEMENT_TYPE, rates[USUAL_ELEMENT_TYPE])
        rate = DEFAULT_COSTS.matmul_efficiency * peak
        return self._costs.lone_us(matmul) / US_PER_S * rate / 2


@lru_cache(maxsize=1024)  # a planner simulates the same matmuls under many plans, a sweep in many passes
def _beyond_matmul(problem: Problem, schedule: ScheduleDescription | None, machine: Machine) -> float | str:
    """Return what the schedule, by default the heuristic's, takes beyond the matmul; or why the heuristic picks none."""
    if schedule is None:
        pick = pick_schedule(problem, machine)
        if pick.description.is_sequential:
            return pick.reason
        schedule = pick.description
    taken_us = estimate(make_schedule(problem, schedule), problem, machine).makespan_us
    return taken_us - computation_us(problem, machine)


def _round(size: float) -> int:
    return max(1, round(size / SIZE_STEP)) * SIZE_STEP
