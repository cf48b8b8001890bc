"""The executor that needs no GPU: it turns a step, a machine and a plan into a simulated timeline of one rank.

All ranks are assumed to be identical and synchronized. A control has the same effect as on a GPU. A residency cap raises
dynamic shared memory and carveout. A priority reorders dispatch. A head start delays one kernel. A transport moves a
collective to the copy engines, with a sum on SMs if it reduces. An overlap moves a collective beside its matmul.
"""

import math
from collections.abc import Sequence

from counterpoint.errors import ArgumentError, PlanError, require_kind, shown
from counterpoint.machine import Machine
from counterpoint.plan import LEAVE_IT, Plan
from counterpoint.sim.calibration import Calibration, load_calibration
from counterpoint.sim.costs import CostModel
from counterpoint.sim.effects import EffectReader
from counterpoint.sim.nodes import check_nodes
from counterpoint.sim.step_run import StepRun, clock_share, least_busy_us
from counterpoint.step import Collective, Step
from counterpoint.timeline import AbstractExecutor, Interval, Timeline
from counterpoint.units import ps_to_us
from counterpoint.value import require


class Simulator(AbstractExecutor):
    """Simulates steps with one set of calibration constants; without one, with those of the machine's GPU.

    `clock_share`: the clock as a share of that of the lone times. None: the clock that the power limit allows each plan
    (`power.py`).
    """

    def __init__(self, calibration: Calibration | None = None, *, clock_share: float | None = None) -> None:
        what = "Simulator takes a calibration"
        require_kind(calibration, (Calibration, type(None)), what, "Leave it out for the machine's own constants.")
        require(
            clock_share is None or 0 < clock_share < math.inf,
            ArgumentError,
            f"clock_share must be greater than 0; found {clock_share}. Leave it out for the clock under the power limit.",
        )
        self._calibration, self._clock_share = calibration, clock_share
        self._as_is: StepRun | None = None  # of the latest step

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'with constants of its own' if self._calibration else ''})"

    def run(self, step: Step, machine: Machine, plan: Plan) -> Timeline:
        """Simulate one iteration; see `AbstractExecutor.run`.

        Raises `StepError` if a launch does not fit the machine, `PlanError` if a control cannot apply, and
        `MachineError` if the step has more ranks than a node has GPUs and does not state how long its communication
        takes.
        """
        require_kind(step, Step, "run takes a Step", "Pass what load_workload returns, or read_trace(...).step.")
        require_kind(machine, Machine, "run takes a Machine", "Pass what load_machine returns.")
        require_kind(plan, Plan, "run takes a Plan", "Pass what load_plan returns, or LEAVE_IT.")
        plan.check_step(step)
        if plan.machine and plan.machine != machine.name:
            raise PlanError(
                f"The plan was made for machine '{shown(plan.machine)}', not for '{machine.name}'. Run "
                f"`counterpoint tune` for "
                f"'{machine.name}'."
            )
        check_nodes(step, machine)
        launched = self._run(step, machine, plan)
        if self._clock_share is not None:
            spans = launched.simulated(self._clock_share)
        else:
            spans = launched.spans(clock_share([launched], self._run(step, machine, LEAVE_IT)))
        streams = _streams(launched)
        intervals = [
            Interval(
                rank=0,
                stream=streams[index],
                operation=index,
                name=operation.name,
                kind=operation.kind,
                start_us=ps_to_us(start),
                end_us=ps_to_us(end),
            )
            for index, (operation, (start, end)) in enumerate(zip(step.operations, spans, strict=True))
        ]
        intervals.sort(key=lambda interval: (interval.start_us, interval.operation))
        return Timeline(step_name=step.name, origin="simulated", intervals=tuple(intervals))

    def clock_of_turns(self, step: Step, machine: Machine, plans: Sequence[Plan]) -> float:
        """Return the clock that the power limit allows a step whose plans take turns, as a share of its lone times' clock.

        Turns shorter than the limit's window of some tens of milliseconds share one clock. Raises as `run` does.
        """
        check_nodes(step, machine)
        runs = [self._run(step, machine, plan) for plan in plans]
        return clock_share(runs, self._run(step, machine, LEAVE_IT))

    def lone_times_us(self, step: Step, machine: Machine, plan: Plan = LEAVE_IT) -> list[float]:
        """Return each operation's time alone on `machine`, in microseconds, in the order of the step; at the simulator's own
        clock, if it has one.

        Of a plan's controls, only those that move a collective by copies count: the collective then takes the copies' time,
        without the time of the sum if it reduces. Raises as `run` does.
        """
        check_nodes(step, machine)
        return self._run(step, machine, plan).lone_us(self._clock_share or 1.0)

    def least_busy_us(self, step: Step, machine: Machine, least_us: Sequence[float]) -> float:
        """Return the least time, in microseconds, for which the operations keep busy what they share: SMs, memory or link.

        An operation counts for at most its `least_us`, its time alone. Raises as `run` does.
        """
        check_nodes(step, machine)
        costs = CostModel(machine, self._calibration or load_calibration(machine), self._clock_share or 1.0)
        return least_busy_us(step, costs, least_us)

    def _run(self, step: Step, machine: Machine, plan: Plan) -> StepRun:
        """Return the step under a plan; without directives, the same one as long as the step is the same."""
        calibration = self._calibration or load_calibration(machine)
        latest = self._as_is
        is_same = latest is not None and (latest.step, latest.machine, latest.calibration) == (step, machine, calibration)
        if latest is not None and is_same and not plan.directives:
            return latest
        found = StepRun(step, EffectReader(step, machine, plan, calibration).effects(), machine, calibration)
        if not plan.directives:
            self._as_is = found
        return found


def _streams(launched: StepRun) -> list[int]:
    """Return each operation's stream; each process group has one for its collectives that a plan moves to a separate one."""
    operations = launched.step.operations
    first = 1 + max(operation.stream for operation in operations)
    own: dict[str | None, int] = {}
    return [
        own.setdefault(operation.process_group, first + len(own))
        if effect.has_own_stream and isinstance(operation, Collective)
        else operation.stream
        for operation, effect in zip(operations, launched.effects, strict=True)
    ]
