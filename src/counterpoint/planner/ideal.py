"""The limits of what overlap can reach on a step: the sequential time and two ideals.

With today's dependencies, a kernel waits for the whole of a collective that it needs. Operators and separate streams
remove such waits: a collective that is cut into pieces delays nobody. Copy engines can be faster than the kernels they
replace, so both ideals take the faster of the two for each collective that copy engines may move. What operations share
is busy for the time that their work takes. The ideals depend on the step and the machine, not on the plan. Neither is
above the traced time: if lone times or inferred dependencies say so, they are inexact.
"""

from collections.abc import Iterable

from counterpoint.controls import OverlapMatmul, OwnStream
from counterpoint.machine import Machine
from counterpoint.metrics import ideal_in_pieces_us, ideal_us, sequential_us
from counterpoint.plan import LEAVE_IT, Plan
from counterpoint.planner.movements import propose_transports
from counterpoint.sim import Simulator
from counterpoint.step import Step
from counterpoint.value import Value


class Scale(Value, frozen=True, kw_only=True):
    """`sequential_us` counts every collective as the step has it; the ideals count each by the faster transport.

    `ideal_us` assumes today's dependencies, `in_pieces_us` collectives that are cut into pieces. `inexact_us` is the
    value computed for the first, if that is above the traced time. `start_us` is where the possible gain begins: at the
    traced time, or at the sequential time of a step that was not traced.
    """

    sequential_us: float
    ideal_us: float
    in_pieces_us: float
    start_us: float
    inexact_us: float | None = None

    def ideal_of(self, plan: Plan) -> float:
        """Return the ideal that a plan can reach: the one in pieces if the plan changes which operation waits for which."""
        controls = (control for directive in plan.directives for control in directive.controls)
        return self.in_pieces_us if any(isinstance(each, OverlapMatmul | OwnStream) for each in controls) else self.ideal_us


def scale_of(
    step: Step,
    machine: Machine,
    plans: Iterable[Plan] = (),
    traced_us: float | None = None,
) -> Scale:
    """Return the scale of a step by the simulator's lone times. `traced_us` is the measured makespan, if there is one.

    `plans` are the plans shown beside the scale. What they move by copy engines counts even if the planner would not
    move it. The sequential time is that at the clock that the power limit allows the step without a plan. The ideals have
    the clock of lone times, since another plan may allow a higher one.
    """
    simulator = Simulator()
    lone_us = simulator.lone_times_us(step, machine)
    moving = [Plan(directives=candidate.directives) for candidate in propose_transports(step, machine).candidates]
    times_us = [lone_us, *(simulator.lone_times_us(step, machine, plan) for plan in (*moving, *plans))]
    least_us = [min(of_operation) for of_operation in zip(*times_us, strict=True)]
    busy_us = simulator.least_busy_us(step, machine, least_us)
    found_us = ideal_us(step, least_us, busy_us)
    most_us = found_us if traced_us is None else min(found_us, traced_us)
    limited = Simulator(clock_share=simulator.clock_of_turns(step, machine, [LEAVE_IT]))
    in_turn_us = sequential_us(step, limited.lone_times_us(step, machine))
    return Scale(
        sequential_us=in_turn_us,
        ideal_us=most_us,
        in_pieces_us=min(most_us, ideal_in_pieces_us(step, least_us, busy_us)),
        start_us=in_turn_us if traced_us is None else traced_us,
        inexact_us=found_us if found_us > most_us else None,
    )
