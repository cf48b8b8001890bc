"""The two ends of what overlap can reach on a step, for every report: one after the other, and the ideal.

Copy engines can be faster than the kernels they replace, so the ideal takes each collective by the faster of both, wherever
copy engines may move it. It belongs to the step and the machine: a step has one ideal, whichever plan is looked at.
"""

from collections.abc import Iterable

from counterpoint.machine import Machine
from counterpoint.metrics import ideal_us, sequential_us
from counterpoint.plan import Plan
from counterpoint.planner.candidates import propose_transports
from counterpoint.sim import Simulator
from counterpoint.step import Step
from counterpoint.value import Value


class Scale(Value, frozen=True, kw_only=True):
    """`sequential_us` is with every collective as the step has it, `ideal_us` with each by the faster transport."""

    sequential_us: float
    ideal_us: float


def scale_of(step: Step, machine: Machine, plans: Iterable[Plan] = ()) -> Scale:
    """The scale of a step by the simulator's lone times.

    `plans` are those shown beside it. What they move by copy engines counts even where the planner would not move it.
    """
    simulator = Simulator()
    lone_us = simulator.lone_times_us(step, machine)
    moving = [Plan(directives=candidate.directives) for candidate in propose_transports(step).candidates]
    times_us = [lone_us, *(simulator.lone_times_us(step, machine, plan) for plan in (*moving, *plans))]
    least_us = [min(of_operation) for of_operation in zip(*times_us, strict=True)]
    return Scale(sequential_us=sequential_us(step, lone_us), ideal_us=ideal_us(step, least_us))
