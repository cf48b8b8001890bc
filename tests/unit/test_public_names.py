"""The public names: frozen here so that a change of them is a decision, all of them there, and light to import."""

import subprocess
import sys

import pytest

import counterpoint

PUBLIC = [
    "AbstractExecutor",
    "Collective",
    "CommunicationCtas",
    "Copy",
    "CounterpointError",
    "Dependency",
    "DeviceError",
    "Directive",
    "EngagementError",
    "Footprint",
    "Gpu",
    "HeadStart",
    "Interval",
    "Kernel",
    "LEAVE_IT",
    "Link",
    "Machine",
    "MachineError",
    "Match",
    "Metrics",
    "OccupancyError",
    "Operation",
    "Plan",
    "PlanError",
    "Priority",
    "RankMetrics",
    "ResidencyCap",
    "ScheduleChoice",
    "Simulator",
    "Step",
    "StepError",
    "Timeline",
    "TraceError",
    "TracedStep",
    "Transport",
    "Tuning",
    "WorkloadError",
    "apply",
    "capture",
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
    "workload_names",
]

NEED_A_GPU_LIBRARY = {"apply", "capture"}
LIST_MODULES = "import sys; import counterpoint; print(*sys.modules)"


def test_the_public_names_are_these() -> None:
    assert sorted(counterpoint.__all__) == sorted(PUBLIC)
    assert dir(counterpoint) == sorted(PUBLIC)


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in NEED_A_GPU_LIBRARY])
def test_each_public_name_is_there_and_comes_from_this_package(name: str) -> None:
    assert getattr(counterpoint, name) is not None
    module = getattr(getattr(counterpoint, name), "__module__", "counterpoint")
    assert module.startswith(("counterpoint", "types"))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = counterpoint.nothing


def test_the_import_loads_neither_numpy_nor_a_device_library_nor_the_command_line() -> None:
    command = [sys.executable, "-c", LIST_MODULES]
    modules = set(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split())
    assert not modules & {"numpy", "torch", "cuda", "cupy", "triton", "rich", "typer", "counterpoint.sim"}


def test_a_name_whose_packages_are_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith("counterpoint.cuda.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(counterpoint.DeviceError, match=r"counterpoint\.capture needs 'torch', .* 'cuda-bindings>=13,<14'"):
        _ = counterpoint.capture
    monkeypatch.delitem(sys.modules, "counterpoint.planner.on_gpu", raising=False)
    with pytest.raises(counterpoint.DeviceError, match=r"Tuning a function needs 'torch', .* 'cuda-bindings>=13,<14'"):
        counterpoint.tune(lambda: None)
