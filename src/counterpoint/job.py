"""A job: a step together with the machine it is planned for, read from what a user names.

The source is a profiler trace (`traces/formats.py` knows which files are), a workload file (.toml) or the name of a shipped
workload. A traced step carries times of one GPU, so it can be planned only for that GPU; a workload for any machine.
"""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from counterpoint.errors import StepError, shown, shown_path
from counterpoint.machine import Machine, load_machine, machine_for_device
from counterpoint.sim.calibration import load_calibration
from counterpoint.step import Step
from counterpoint.traces import TracedStep, read_trace
from counterpoint.traces.formats import SUFFIXES_IN_WORDS, is_trace
from counterpoint.value import Value
from counterpoint.workloads import load_workload, workload_names

DEFAULT_MACHINE = "h200"


class Job(Value, frozen=True, kw_only=True):
    """`traced` is None for a workload."""

    step: Step
    machine: Machine
    traced: TracedStep | None = None

    def calibrated(self, path: Path | None) -> "Job":
        """The job with the simulator's constants from a file; None: with those of its GPU. Raises `MachineError`."""
        if path is None:
            return self
        machine = msgspec.structs.replace(self.machine, calibration=str(path))
        load_calibration(machine)
        return msgspec.structs.replace(self, machine=machine)


def load_job(source: str, machine_name: str | None = None, on_progress: Callable[[int, int], None] | None = None) -> Job:
    """Read a trace or a workload, and the machine: the one named, else the traced one, else an H200 node.

    `on_progress` is told the bytes read of a trace and its size, 0 for a pipe.
    Raises `TraceError`, `WorkloadError`, `MachineError`, or `StepError` where the machine is not the traced GPU.
    """
    _check_text(source)
    if "://" in source:
        raise StepError(f"'{shown_path(source)}' is an address, and only files are read. Download it, and name the file.")
    is_workload = source.lower().endswith(".toml") or source.lower() in workload_names()
    if not is_workload and is_trace(source):
        return job_of(read_trace(source, on_progress=on_progress), machine_name)
    if not is_workload:
        raise StepError(_why_no_job(source))
    return Job(step=load_workload(source), machine=load_machine(DEFAULT_MACHINE if machine_name is None else machine_name))


def names_function(source: str) -> bool:
    """Whether this is `module:function`, written as Python imports it. A file that has the name is a file."""
    module, _, function = source.partition(":")
    is_written_so = all(part.isidentifier() for part in (*module.split("."), function))
    return is_written_so and not os.path.exists(source)  # unlike Path.exists, no error for a name too long for a file


def _why_no_job(source: str) -> str:
    """What to say of a name that is neither a file to read nor a workload. Functions run on GPUs, and here nothing runs."""
    if names_function(source):
        return (
            f"'{shown_path(source)}' names a function, and this simulates without running any. Give a trace of it "
            f"({SUFFIXES_IN_WORDS}), or measure it on GPUs: counterpoint tune {shown_path(source)}."
        )
    if not source.strip():
        what = f"is no name; STEP is a trace ({SUFFIXES_IN_WORDS}), a workload file (.toml) or a workload's name"
    elif os.path.exists(source):
        what = f"is neither a trace ({SUFFIXES_IN_WORDS}) nor a workload file (.toml)"
    elif ":" in source:
        what = "does not exist, and functions are named as Python imports them, as in jobs.train:make_step"
    else:
        what = "does not exist"
    return f"'{shown_path(source)}' {what}. Shipped workloads: {', '.join(workload_names())}."


def _check_text(source: str) -> None:
    """A step is named after its file, and names are written as UTF-8."""
    try:
        source.encode()
    except UnicodeEncodeError as problem:
        raise StepError(
            f"The file name {source!a} is not UTF-8 from character {problem.start} on. Rename the file."
        ) from problem


def job_of(traced: TracedStep, machine_name: str | None = None) -> Job:
    """The job of a step that was traced; machine and errors as in `load_job`."""
    device = traced.step.device_name
    if machine_name is not None:
        machine: Machine | None = load_machine(machine_name)
    else:
        machine = machine_for_device(device) if device else None
    if machine is None:
        known = f"on '{shown(device)}', which no shipped machine describes" if device else "on a GPU that it does not name"
        raise StepError(f"The trace was recorded {known}. Name the machine, or a file that describes it, with --machine.")
    if device and device not in machine.device_names:
        raise StepError(
            f"The trace holds times of '{shown(device)}', which are no guide to '{machine.name}' "
            f"({shown(', '.join(machine.device_names), 200) or 'no device_names'}). Leave --machine out, add "
            f"'{shown(device)}' to the "
            "device_names of your machine file, or describe the step as a workload."
        )
    return Job(step=traced.step, machine=machine, traced=traced)
