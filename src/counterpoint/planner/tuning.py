"""`tune`, for both ways of planning: a described step by an executor, a step function by measurement on GPUs."""

from collections.abc import Callable
from typing import TYPE_CHECKING, overload

from counterpoint.errors import ArgumentError, DeviceError, require_kind, shown
from counterpoint.machine import Machine
from counterpoint.planner.search import Trial, Tuning
from counterpoint.planner.search import tune as tune_by_executor
from counterpoint.step import Step
from counterpoint.timeline import AbstractExecutor, Timeline
from counterpoint.traces import TracedStep
from counterpoint.value import require

if TYPE_CHECKING:
    from counterpoint.cuda.applied import Applied


@overload
def tune(
    step: Step,
    machine: Machine,
    executor: AbstractExecutor | None = None,
    on_trial: Callable[[Trial], None] | None = None,
    *,
    traced: Timeline | None = None,
    num_workers: int = 1,
) -> Tuning: ...


@overload
def tune(
    step: TracedStep,
    machine: Machine,
    executor: AbstractExecutor | None = None,
    on_trial: Callable[[Trial], None] | None = None,
    *,
    num_workers: int = 1,
) -> Tuning: ...


@overload
def tune(step: Callable[[], object], machine: Machine | None = None) -> "Applied": ...


def tune(
    step: Step | TracedStep | Callable[[], object],
    machine: Machine | None = None,
    executor: AbstractExecutor | None = None,
    on_trial: Callable[[Trial], None] | None = None,
    *,
    traced: Timeline | None = None,
    num_workers: int = 1,
) -> "Tuning | Applied":
    """Find the plan that hides the most communication of `step`, or the verdict that none pays.

    A `Step` runs on `executor` for `machine`; the default executor is the simulator, and the result is a `Tuning` that
    holds the plan. `traced`, a traced step's timeline, is used to check the executor: a gain within its error is
    UNKNOWN. A `TracedStep` holds this timeline; from it `tune` also finds how long its collectives waited for other ranks.
    `num_workers` processes simulate candidates at once if the first simulation takes 0.2 s or more; the result is the same.
    A function without arguments is captured on the GPUs at hand, tuned by measurement, and returned with its
    plan applied; all ranks call this together. Raises `ArgumentError` for a step without a machine or for any other
    argument, and what `planner.on_gpu` raises.
    """
    _check_arguments(step, machine, executor)
    if isinstance(step, TracedStep):
        require(traced is None, ArgumentError, "A TracedStep has its own timeline; leave traced out.")
        from counterpoint.sim.traced_waits import with_waits  # noqa: PLC0415  a function is tuned without it

        assert machine is not None, "checked above"
        traced, step = step.timeline, with_waits(step.step, step.timeline, machine)
    if not isinstance(step, Step):
        try:
            from counterpoint.planner.on_gpu import tune_step_function  # noqa: PLC0415  needs torch
        except ModuleNotFoundError as problem:
            raise DeviceError.of_missing("Tuning a function", problem) from problem
        return tune_step_function(step, machine)
    assert machine is not None, "checked above"
    if executor is None:
        from counterpoint.sim import Simulator  # noqa: PLC0415  a function is tuned without it

        executor = Simulator()
    return tune_by_executor(step, machine, executor, on_trial, traced=traced, num_workers=num_workers)


def _check_arguments(step: object, machine: object, executor: object) -> None:
    if isinstance(step, str):
        remedy = "Load it: tune(load_workload(...), load_machine('h200')), or tune(read_trace(...), load_machine('h200'))."
    else:
        remedy = "Pass what load_workload or read_trace returns, or a function that runs a step."
    if not callable(step):
        require_kind(step, (Step, TracedStep), "tune takes a Step, a TracedStep or a function without arguments", remedy)
    if machine is not None or not callable(step):
        name = shown(machine) if isinstance(machine, str) else "h200"
        require_kind(machine, Machine, "tune needs a Machine", f"Load it: tune(step, load_machine('{name}')).")
    if executor is not None:
        require_kind(
            executor,
            AbstractExecutor,
            "the third argument of tune must be an executor",
            "Leave it out, or pass Simulator().",
        )
