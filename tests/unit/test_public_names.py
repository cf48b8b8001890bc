"""The public names: frozen here so that a change of them is a decision, all of them there, and light to import."""

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version

import pytest

import counterpoint
from helpers.command import TRACES

PUBLIC = [
    "AbstractExecutor",
    "ArgumentError",
    "Collective",
    "Carveout",
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
    "LightKernel",
    "Link",
    "Machine",
    "MachineError",
    "Match",
    "Metrics",
    "OccupancyError",
    "Operation",
    "OverlapMatmul",
    "OwnStream",
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
    "with_waits",
    "workload_names",
]

NEED_A_GPU_LIBRARY = {"apply", "capture"}
LIST_MODULES = "import sys; import counterpoint; print(*sys.modules)"


def test_the_public_names_are_these() -> None:
    assert sorted(counterpoint.__all__) == sorted(set(PUBLIC) - NEED_A_GPU_LIBRARY)
    assert dir(counterpoint) == sorted([*PUBLIC, "__version__", "integrations", "ops"])


def test_the_version_is_that_of_the_package() -> None:
    assert counterpoint.__version__ == version("counterpoint")


WITHOUT_GPU_PACKAGES = """
import sys
sys.modules["torch"] = sys.modules["cuda"] = None
import inspect, pydoc
import counterpoint
from counterpoint import *
assert not hasattr(counterpoint, "apply") and not hasattr(counterpoint, "capture")
assert getattr(counterpoint, "apply", None) is None
assert "tune" in dict(inspect.getmembers(counterpoint))
assert "load_plan" in pydoc.plain(pydoc.render_doc(counterpoint))
print(tune, load_plan)
"""


def test_without_packages_for_gpus_the_module_can_be_looked_through() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_GPU_PACKAGES], check=True, capture_output=True, timeout=60)


STEP = counterpoint.load_workload("cb_ar_opt2")
H200 = counterpoint.load_machine("h200")
TRACED = counterpoint.read_trace(TRACES / "moe.rank0.json.gz")
WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: counterpoint.tune("cb_ar_opt2"), "found 'cb_ar_opt2'. Load it: tune(load_workload"),
    (lambda: counterpoint.tune(TRACED), "tune needs a Machine; found None"),
    (
        lambda: counterpoint.tune(TRACED, H200, traced=TRACED.timeline),
        "A TracedStep has its own timeline; leave traced out.",
    ),
    (lambda: counterpoint.tune(None), "found None. Pass what load_workload or read_trace"),
    (lambda: counterpoint.tune(STEP), "tune needs a Machine; found None. Load it: tune(step, load_machine('h200'))."),
    (lambda: counterpoint.tune(STEP, "mi300x"), "found 'mi300x'. Load it: tune(step, load_machine('mi300x'))."),
    (lambda: counterpoint.tune(STEP, H200, counterpoint.Simulator), "an executor; found a value of type ABCMeta."),
    (lambda: counterpoint.measure(None), "measure takes a Timeline; found None."),
    (lambda: counterpoint.Simulator().run(STEP, H200, None), "run takes a Plan; found None."),
    (lambda: counterpoint.Simulator().run(STEP, "h200", counterpoint.LEAVE_IT), "run takes a Machine; found 'h200'."),
    (lambda: counterpoint.Simulator(5), "Simulator takes a calibration; found a value of type int."),
    (lambda: counterpoint.Simulator(clock_share=-1), "clock_share must be greater than 0; found -1."),
    (lambda: counterpoint.load_workload("cb_ar_opt2", num_ctas="3"), "num_ctas must be a whole number; found '3'."),
    (lambda: counterpoint.load_workload(None), "load_workload takes a name or a path; found None. Known: cb_a2a_opt1"),
    (lambda: counterpoint.load_machine(H200), "load_machine takes a name or a path; found a value of type Machine."),
    (lambda: counterpoint.read_trace(7), "read_trace takes a path; found a value of type int."),
    (lambda: counterpoint.load_plan(None), "load_plan takes a path; found None."),
    (
        lambda: counterpoint.save_plan("plan.toml", counterpoint.LEAVE_IT),
        "the first argument of save_plan must be a Plan; found 'plan.toml'.",
    ),
]


@pytest.mark.parametrize(("call", "says"), WRONG)
def test_a_natural_mistake_gives_one_line(call: Callable[[], object], says: str) -> None:
    with pytest.raises(counterpoint.ArgumentError) as caught:
        call()
    assert says in str(caught.value)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, counterpoint.CounterpointError)


def test_a_described_step_is_simulated_where_no_executor_is_named() -> None:
    assert counterpoint.tune(STEP, H200).plan == counterpoint.tune(STEP, H200, counterpoint.Simulator()).plan


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in NEED_A_GPU_LIBRARY])
def test_each_public_name_is_there_and_comes_from_this_package(name: str) -> None:
    assert getattr(counterpoint, name) is not None
    module = getattr(getattr(counterpoint, name), "__module__", "counterpoint")
    assert module.startswith(("counterpoint", "types", "typing"))  # of unions: Python 3.14 has them in typing


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = counterpoint.nothing


def test_the_import_loads_neither_numpy_nor_a_device_library_nor_the_command_line() -> None:
    command = [sys.executable, "-c", LIST_MODULES]
    modules = set(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split())
    assert not modules & {"numpy", "torch", "cuda", "cupy", "triton", "rich", "click", "counterpoint.sim"}


def test_a_name_whose_packages_are_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith("counterpoint.cuda.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(counterpoint.DeviceError, match=r"counterpoint\.capture needs 'torch', .* 'cuda-bindings>=13,<14'"):
        _ = counterpoint.capture
    monkeypatch.delitem(sys.modules, "counterpoint.planner.on_gpu", raising=False)
    with pytest.raises(counterpoint.DeviceError, match=r"Tuning a function needs 'torch', .* 'cuda-bindings>=13,<14'"):
        counterpoint.tune(lambda: None)
