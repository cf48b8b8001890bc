"""Tuning on GPUs from start to end: capture a step function, find a plan by measurement or in the cache, apply it."""

from collections.abc import Callable
from contextlib import ExitStack

import msgspec

from counterpoint.controls import LightKernel, Transport
from counterpoint.cuda.applied import Applied, apply
from counterpoint.cuda.capture import Captured, capture
from counterpoint.cuda.plan_cache import find_plan, keep_plan
from counterpoint.errors import CounterpointError, MachineError, say
from counterpoint.machine import Machine, machine_for_device
from counterpoint.ops.captured_copies import offer_copies
from counterpoint.ops.light_collectives import offer_light_kernels
from counterpoint.plan import Plan
from counterpoint.planner.measured import MeasuredTuning, tune_measured


def machine_of(captured: Captured) -> Machine:
    """Return the shipped machine of the GPU that a step was captured on. Raises `MachineError` if there is none."""
    device = captured.read.step.device_name or "an unnamed GPU"
    machine = machine_for_device(device)
    if machine is None:
        raise MachineError(
            f"No shipped machine describes '{device}'. Describe it in a file (counterpoint machines --probe -o "
            "mine.toml) and name that file with --machine."
        )
    return machine


def tune_captured(captured: Captured, machine: Machine | None) -> MeasuredTuning:
    """Find the plan of a captured step by measurement and keep it; rank 0 writes the cache, and says if it cannot."""
    offer_copies(captured)
    offer_light_kernels(captured)
    tuning = tune_measured(captured, machine or machine_of(captured))
    if captured.rendezvous.is_first_rank:
        try:
            keep_plan(tuning.plan, captured.read.step, captured.conditions())
        except CounterpointError as problem:  # the plan took minutes to measure
            say(f"The plan is not kept for the next run: {problem}")
    return tuning


def tune_step_function(step_fn: Callable[[], object], machine: Machine | None) -> Applied:
    """Capture `step_fn`, find its plan, apply it, and return the result: call `replay()` instead of `step_fn`.

    `step_fn` must issue the same work each time, on every rank, and must be repeatable: capture and measurement call and
    replay it many times. A plan measured earlier for the same step, GPU, driver, NCCL, torch and number of ranks is used
    without measuring. Raises `DeviceError` (also for a step that draws random numbers),
    `MachineError`, or `PlanError` if ranks disagree.
    """
    captured = capture(step_fn)
    with ExitStack() as opened:
        opened.callback(captured.close)
        captured.require_repeatable()
        plan = kept_plan(captured)
        if plan is None:
            plan = tune_captured(captured, machine).plan
        else:
            _offer_what_is_planned(captured, plan)
        applied = apply(captured, plan, is_owner=True)
        opened.pop_all()
    return applied


def _offer_what_is_planned(captured: Captured, plan: Plan) -> None:
    """Prepare what replaces collectives under a plan."""
    controls = [control for directive in plan.directives for control in directive.controls]
    if any(isinstance(control, Transport) for control in controls):
        offer_copies(captured)
    if any(isinstance(control, LightKernel) for control in controls):
        offer_light_kernels(captured)


def kept_plan(captured: Captured) -> Plan | None:
    """Return the cached plan of rank 0, on every rank, or None, as for a file that cannot be read."""
    kept = None
    if captured.rendezvous.is_first_rank:
        try:
            kept = find_plan(captured.read.step, captured.conditions())
        except CounterpointError as problem:  # the other ranks wait for this one
            say(f"The kept plan is measured anew: {problem}")
    return msgspec.json.decode(captured.agree(msgspec.json.encode(kept).decode()), type=Plan | None)
