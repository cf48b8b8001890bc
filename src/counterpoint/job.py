"""A job: a step together with the machine it is planned for, read from what a user names.

The source is a profiler trace (`traces/formats.py` lists the formats), a workload file (.toml) or the name of a shipped
workload. A traced step carries times of one GPU, so it can be planned for that GPU only; a workload for any machine.
"""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from counterpoint.errors import StepError, shown, shown_path
from counterpoint.machine import DEFAULT_MACHINE, Machine, load_machine, machine_for_device
from counterpoint.sim.calibration import load_calibration
from counterpoint.sim.traced_waits import with_waits
from counterpoint.step import Step
from counterpoint.traces import TracedStep, read_trace
from counterpoint.traces.formats import SUFFIXES_IN_WORDS, is_trace
from counterpoint.value import Value
from counterpoint.workloads import load_workload, workload_names

LEAVE_OUT = "Leave --machine out"
DESCRIBE = (
    "Save the nearest one of `counterpoint machines` (as in counterpoint machines h100 -o my.toml), give it this GPU's "
    "figures and its name in device_names, and add --machine my.toml"
)


class Job(Value, frozen=True, kw_only=True):
    """A step and its machine; `traced` is None for a workload."""

    step: Step
    machine: Machine
    traced: TracedStep | None = None

    def to_simulate(self, calibration: Path | str | None) -> "Job":
        """Return the job as it is simulated: with the simulator's constants from a file, or with those of its GPU. A traced
        step gets the waits of its collectives that `sim.traced_waits` finds.

        Raises `MachineError` for the file, and what `Simulator.run` raises for a traced step.
        """
        machine = self.machine
        if calibration is not None:
            machine = msgspec.structs.replace(machine, calibration=str(calibration))
            load_calibration(machine)
        step = self.step if self.traced is None else with_waits(self.traced.step, self.traced.timeline, machine)
        return msgspec.structs.replace(self, step=step, machine=machine)


def load_job(
    source: str,
    machine_name: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    *,
    instead: str = LEAVE_OUT,
) -> Job:
    """Read a trace or a workload, and its machine: the named one, else the traced one, else an H200 node.

    `on_progress` is called with the bytes read of a trace and its size, 0 for a pipe. `instead` is what to do about a
    machine that is not the traced GPU.
    Raises `TraceError`, `WorkloadError`, `MachineError`, or `StepError` if the machine is not the traced GPU.
    """
    _check_text(source)
    if "://" in source:
        raise StepError(f"'{shown_path(source)}' is an address, but only files can be read. Download it, and name the file.")
    if not names_workload(source) and is_trace(source):
        return job_of(read_trace(source, on_progress=on_progress), machine_name, instead)
    if not names_workload(source):
        raise StepError(_why_no_job(source))
    return Job(step=load_workload(source), machine=load_machine(DEFAULT_MACHINE if machine_name is None else machine_name))


def names_workload(source: str) -> bool:
    """Return whether this is a workload file or the name of a shipped workload."""
    return source.lower().endswith(".toml") or source.lower() in workload_names()


def names_function(source: str) -> bool:
    """Return whether this is `module:function` as Python imports it. If a file has the name, it is a file."""
    module, _, function = source.partition(":")
    is_written_so = all(part.isidentifier() for part in (*module.split("."), function))
    # unlike Path.exists, this raises no error for a name that is too long for a file
    return is_written_so and not os.path.exists(source)


def _why_no_job(source: str) -> str:
    """Return the error for a name that is neither a readable file nor a workload. A function would need GPUs."""
    if names_function(source):
        return (
            f"'{shown_path(source)}' names a function, but a simulation runs none. Give a trace of it "
            f"({SUFFIXES_IN_WORDS}), or measure it on GPUs: counterpoint tune {shown_path(source)}."
        )
    if not source.strip():
        what = f"is empty; STEP must be a trace ({SUFFIXES_IN_WORDS}), a workload file (.toml) or a workload's name"
    elif os.path.isdir(source):
        what = "is a folder; name one trace in it (`tune` and `analyze` take those of several ranks)"
    elif os.path.exists(source):
        what = f"is neither a trace ({SUFFIXES_IN_WORDS}) nor a workload file (.toml)"
    elif ":" in source:
        what = "does not exist; a function is named as Python imports it, as in jobs.train:make_step"
    else:
        what = f"does not exist; name a trace ({SUFFIXES_IN_WORDS}), a workload file (.toml) or a shipped workload"
    return f"'{shown_path(source)}' {what}. Shipped workloads: {', '.join(workload_names())}."


def _check_text(source: str) -> None:
    """Refuse file names that are not UTF-8: a step is named after its file, and names are written as UTF-8."""
    try:
        source.encode()
    except UnicodeEncodeError as problem:
        raise StepError(
            f"The file name {source!a} is not UTF-8 from character {problem.start} on. Rename the file."
        ) from problem


def job_of(traced: TracedStep, machine_name: str | None, instead: str = LEAVE_OUT) -> Job:
    """Return the job of a traced step; machine and errors as in `load_job`."""
    device = traced.step.device_name
    shipped = machine_for_device(device) if device else None
    machine = shipped if machine_name is None else load_machine(machine_name)
    if machine is None:
        raise StepError(
            f"The trace was recorded on '{shown(device)}', which no shipped machine describes. {DESCRIBE}."
            if device
            else "The trace was recorded on a GPU that the trace does not name. Name the machine with --machine, or a file "
            "that describes it."
        )
    if device and device not in machine.device_names:
        names = shown(", ".join(machine.device_names), 200) or "no device_names"
        if shipped is None and instead == LEAVE_OUT:
            instead = f"No shipped machine describes this GPU. {DESCRIBE}"
        raise StepError(
            f"The trace holds times of '{shown(device)}', which do not apply to '{machine.name}' ({names}). {instead}. To "
            f"plan for another GPU, describe the step as a workload. If your machine file describes the same GPU under "
            f"another name, add '{shown(device)}' to its device_names."
        )
    return Job(step=traced.step, machine=machine, traced=traced)
