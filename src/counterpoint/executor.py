"""What the simulator, the GPU runtime and a test double have in common."""

from abc import ABC, abstractmethod

from counterpoint.machine import Machine
from counterpoint.plan import Plan
from counterpoint.step import Step
from counterpoint.timeline import Timeline


class AbstractExecutor(ABC):
    """Turns a step on a machine under a plan into a timeline. Final implementations: one per file, never subclassed."""

    @abstractmethod
    def run(self, step: Step, machine: Machine, plan: Plan) -> Timeline:
        """Execute `step` under `plan` and say what happened when.

        Raises `PlanError` if the plan was made for another step. An operation that no directive of the plan matches runs
        as the step describes it.
        """
