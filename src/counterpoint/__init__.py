"""Counterpoint hides the communication of multi-GPU PyTorch jobs behind their computation.

A step on a machine under a plan gives a timeline. Metrics read timelines, a planner compares timelines to choose a plan,
and a report prints them. Only the names listed here are public. Values are loaded at once; the parts that work on them
are loaded on first use, so that `import counterpoint` stays fast.
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from counterpoint import controls
from counterpoint.controls import *  # noqa: F403  every control is public, so that a new one is named in one place
from counterpoint.errors import (
    ArgumentError,
    CounterpointError,
    DeviceError,
    EngagementError,
    MachineError,
    MissingPackageError,
    OccupancyError,
    PlanError,
    StepError,
    TraceError,
    WorkloadError,
)
from counterpoint.links import Link
from counterpoint.machine import Gpu, Machine, load_machine, machine_for_device, machine_names
from counterpoint.metrics import Metrics, RankMetrics, ideal_us, interference, measure, sequential_us, share_of_ideal
from counterpoint.plan import LEAVE_IT, Directive, Match, Plan, load_plan, save_plan
from counterpoint.step import Collective, Copy, Dependency, Footprint, Kernel, Operation, Step
from counterpoint.timeline import AbstractExecutor, Interval, Timeline

# last, because importing the module of this name would otherwise replace the function
from counterpoint.supervised import step  # isort: skip

if TYPE_CHECKING:
    from counterpoint.cuda.applied import apply as apply  # "as" marks them as public, because `__all__` leaves them out
    from counterpoint.cuda.capture import capture as capture
    from counterpoint.planner import Tuning, tune
    from counterpoint.sim import Simulator
    from counterpoint.sim.traced_waits import with_waits
    from counterpoint.traces import TracedStep, read_trace
    from counterpoint.workloads import load_workload, workload_names

__all__ = [  # names that need a GPU package are left out, so that `import *` always works
    "LEAVE_IT",
    "AbstractExecutor",
    "ArgumentError",
    "Collective",
    "Copy",
    "CounterpointError",
    "Dependency",
    "DeviceError",
    "Directive",
    "EngagementError",
    "Footprint",
    "Gpu",
    "Interval",
    "Kernel",
    "Link",
    "Machine",
    "MachineError",
    "Match",
    "Metrics",
    "OccupancyError",
    "Operation",
    "Plan",
    "PlanError",
    "RankMetrics",
    "Simulator",
    "Step",
    "StepError",
    "Timeline",
    "TraceError",
    "TracedStep",
    "Tuning",
    "WorkloadError",
    "ideal_us",
    "interference",
    "load_machine",
    "load_plan",
    "load_workload",
    "machine_for_device",
    "machine_names",
    "measure",
    "read_trace",
    "save_plan",
    "sequential_us",
    "share_of_ideal",
    "step",
    "tune",
    "with_waits",
    "workload_names",
]
__all__ += controls.__all__

_LAZY = MappingProxyType(
    {
        "Simulator": "counterpoint.sim",
        "TracedStep": "counterpoint.traces",
        "Tuning": "counterpoint.planner",
        "apply": "counterpoint.cuda.applied",
        "capture": "counterpoint.cuda.capture",
        "load_workload": "counterpoint.workloads",
        "read_trace": "counterpoint.traces",
        "tune": "counterpoint.planner",
        "with_waits": "counterpoint.sim.traced_waits",
        "workload_names": "counterpoint.workloads",
    }
)
_PARTS = ("integrations", "ops")  # packages with public names of their own


def __getattr__(name: str) -> object:
    """Load the part that defines a lazy public name (PEP 562)."""
    if name == "__version__":
        return import_module("counterpoint.errors").package_version()
    if name not in _LAZY and name not in _PARTS:
        raise AttributeError(f"module 'counterpoint' has no attribute '{name}'")
    try:
        return import_module(f"counterpoint.{name}") if name in _PARTS else getattr(import_module(_LAZY[name]), name)
    except ModuleNotFoundError as problem:
        raise MissingPackageError.of_missing(f"counterpoint.{name}", problem) from problem


def __dir__() -> list[str]:
    return sorted([*__all__, *_LAZY.keys() - __all__, *_PARTS, "__version__"])
