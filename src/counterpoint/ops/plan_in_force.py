"""The plan that operators use: the schedule that it names for a request, and its controls that are not for operators.

A process has one current plan, for all groups: a request's name holds the operator, its sizes and the number of ranks.
Requests for a schedule come here first; ranks compare fingerprints before they run what a plan names.
"""

import hashlib
from functools import cache
from typing import final

from counterpoint.controls import Control, ScheduleChoice
from counterpoint.plan import LEAVE_IT, Directive, Match, Plan, Refusal
from counterpoint.schedule import ScheduleDescription
from counterpoint.value import Value, all_fields

BY_NAME_ONLY = "operators are matched only by name; leave everything else out of the match"


class Choice(Value, frozen=True, kw_only=True):
    """What one directive says: the schedule for requests of such names, and why. `number` is its index in the plan."""

    number: int
    match: Match
    schedule: ScheduleDescription
    reason: str


@final
class PlanInForce:
    """The part of a plan that is for operators."""

    def __init__(self, plan: Plan) -> None:
        self.machine = plan.machine
        self._choices: list[Choice] = []
        refusals: list[Refusal] = []
        for number, directive in enumerate(plan.directives):
            for control in directive.controls:
                problem = _why_not(directive, control)
                if problem:
                    refusals.append(Refusal(control=control.tag, target=directive.match.name, reason=problem))
                elif isinstance(control, ScheduleChoice):
                    self._choices.append(
                        Choice(
                            number=number,
                            match=directive.match,
                            schedule=control.schedule,
                            reason=directive.reason or "planned",
                        )
                    )
        self.refusals = tuple(refusals)
        self.fingerprint = self._fingerprint()

    def choice(self, name: str) -> Choice | None:
        """Return what the plan names for a request; of several directives the last one, as everywhere a plan is applied."""
        return next((choice for choice in reversed(self._choices) if choice.match.accepts_name(name)), None)

    def problem_on(self, machine: str) -> str:
        """Return why a plan is not for GPUs of that machine, in one line, or nothing. CPUs accept any plan, because they
        only serve to try it.
        """
        if not (self._choices and self.machine and machine) or self.machine == machine:
            return ""
        return (
            f"the current plan was measured on '{self.machine}', but this GPU belongs to '{machine}'. Measure "
            "here, or remove the line 'machine' from the plan."
        )

    def _fingerprint(self) -> str:
        """Return a fingerprint, equal for plans that name the same schedules; empty if a plan names none."""
        named = tuple((choice.match.name, choice.schedule) for choice in self._choices)
        return hashlib.sha256(repr(all_fields(named)).encode()).hexdigest()[:12] if named else ""


def _why_not(directive: Directive, control: Control) -> str:
    """Return why a control of a directive is not for operators; empty if it is."""
    if "operators" in control.refused_by:
        return control.refused_by["operators"]
    return "" if directive.match == Match(name=directive.match.name) else BY_NAME_ONLY


@cache
def _holder() -> list[PlanInForce]:
    """Return the one plan of this process."""
    return [PlanInForce(LEAVE_IT)]


def plan_in_force() -> PlanInForce:
    """Return the plan that operators of this process use; one that names nothing until another was set."""
    return _holder()[0]


def put_in_force(plan: Plan) -> PlanInForce:
    """Use this plan from now on."""
    _holder()[0] = PlanInForce(plan)
    return plan_in_force()
