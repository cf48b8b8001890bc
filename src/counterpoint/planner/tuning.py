"""One verb for both ways of planning: a described step by an executor, a step function by measurement on GPUs."""

from collections.abc import Callable
from typing import TYPE_CHECKING, overload

from counterpoint.errors import DeviceError, PlanError
from counterpoint.machine import Machine
from counterpoint.planner.search import Trial, Tuning
from counterpoint.planner.search import tune as tune_by_executor
from counterpoint.step import Step
from counterpoint.timeline import AbstractExecutor

if TYPE_CHECKING:
    from counterpoint.cuda.applied import Applied


@overload
def tune(
    step: Step, machine: Machine, executor: AbstractExecutor, on_trial: Callable[[Trial], None] | None = None
) -> Tuning: ...


@overload
def tune(step: Callable[[], object], machine: Machine | None = None) -> "Applied": ...


def tune(
    step: Step | Callable[[], object],
    machine: Machine | None = None,
    executor: AbstractExecutor | None = None,
    on_trial: Callable[[Trial], None] | None = None,
) -> "Tuning | Applied":
    """Find the plan that hides the most communication of `step`, or the verdict that none pays.

    A `Step` is tried on `executor` for `machine`, and the `Tuning` holds the plan. A function without arguments is captured
    on the GPUs at hand, tuned by measurement, and comes back with its plan in force; all ranks call this
    together. Raises `PlanError` where a step comes without a machine or an executor, and what `planner.on_gpu` raises.
    """
    if not isinstance(step, Step):
        try:
            from counterpoint.planner.on_gpu import tune_step_function  # noqa: PLC0415  needs torch
        except ModuleNotFoundError as problem:
            raise DeviceError.of_missing("Tuning a function", problem) from problem
        return tune_step_function(step, machine)
    if machine is None or executor is None:
        raise PlanError("A described step needs a machine and an executor: tune(step, load_machine('h200'), Simulator()).")
    return tune_by_executor(step, machine, executor, on_trial)
