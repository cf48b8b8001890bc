"""A job is read from what a user names: a trace, a workload file or a workload's name, and the machine that fits."""

from pathlib import Path

import pytest

from counterpoint.errors import MachineError, StepError, WorkloadError
from counterpoint.job import load_job, names_function
from counterpoint.machine import DEFAULT_MACHINE, load_machine
from counterpoint.workloads import load_workload
from helpers.trace_builder import DEVICE, small_trace

ROOT = Path(__file__).parents[2]
MOE = str(ROOT / "examples" / "traces" / "moe.rank0.json.gz")
H200 = (ROOT / "src" / "counterpoint" / "machines" / "h200.toml").read_text()


def trace_of(device: dict[str, object] | None, folder: Path) -> str:
    trace = small_trace()
    trace.document["deviceProperties"] = [device] if device else []
    return str(trace.write(folder))


def test_a_workload_is_planned_for_an_h200_node_unless_told_otherwise() -> None:
    assert load_job("cb_ar_opt1").machine == load_machine(DEFAULT_MACHINE) == load_machine("h200")
    assert load_job("cb_ar_opt1", "a100").machine == load_machine("a100")


def test_a_workload_comes_from_its_name_or_its_file() -> None:
    file = ROOT / "src" / "counterpoint" / "workloads" / "cb_ar_opt1.toml"
    job = load_job("cb_ar_opt1")
    assert job.step == load_workload("cb_ar_opt1") == load_job(str(file)).step
    assert job.traced is None


def test_a_trace_brings_its_machine() -> None:
    job = load_job(MOE)
    assert job.machine.name == "h200"
    assert job.traced is not None
    assert job.step == job.traced.step
    assert load_job(MOE, "h200") == job


def test_an_empty_machine_name_is_not_taken_for_none() -> None:
    for source in (MOE, "cb_ar_opt1"):
        with pytest.raises(MachineError, match="Unknown machine ''"):
            load_job(source, "")


def test_a_trace_is_not_planned_for_another_gpu() -> None:
    with pytest.raises(StepError, match="'NVIDIA H200', which do not apply to 'h100'"):
        load_job(MOE, "h100")


def test_a_machine_file_that_names_the_device_is_accepted(tmp_path: Path) -> None:
    source = trace_of(DEVICE | {"name": "NVIDIA H200 NVL"}, tmp_path)
    own = tmp_path / "own.toml"
    own.write_text(H200)
    with pytest.raises(StepError, match="no shipped machine describes"):
        load_job(source)
    with pytest.raises(StepError, match="add 'NVIDIA H200 NVL' to its device_names"):
        load_job(source, str(own))
    own.write_text(H200.replace('device_names = ["NVIDIA H200"]', 'device_names = ["NVIDIA H200 NVL"]'))
    assert load_job(source, str(own)).machine.device_names == ("NVIDIA H200 NVL",)


def test_a_gpu_that_no_shipped_machine_describes_is_to_be_described_and_no_advice_contradicts_this(tmp_path: Path) -> None:
    source = trace_of(DEVICE | {"name": "NVIDIA H200 NVL"}, tmp_path)
    for machine in (None, "h200"):
        with pytest.raises(StepError, match=r"(?i)no shipped machine describes.* machines h100 -o my\.toml") as refused:
            load_job(source, machine)
        assert "Leave --machine out" not in str(refused.value)


def test_a_trace_without_a_device_needs_a_machine_and_takes_any(tmp_path: Path) -> None:
    source = trace_of(None, tmp_path)
    with pytest.raises(StepError, match="--machine"):
        load_job(source)
    assert load_job(source, "h100").machine.name == "h100"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("train:make_step", True),
        ("jobs.train:make_step", True),
        ("schritte.größe:mache_schritt", True),
        ("too_long_for_a_file" * 20 + ":make_step", True),
        ("cb_ar_opt2", False),
        ("trace.json.gz", False),
        ("C:/trace.json", False),
        ("train:", False),
        (":make_step", False),
        ("a:b:c", False),
        ("jobs..train:make_step", False),
        ("train.:make_step", False),
        ("jobs.1st:make_step", False),
        ("train:1", False),
        ("jobs/train.py:make_step", False),
        ("\udcff:make_step", False),
        ("train:\0", False),
    ],
)
def test_a_step_function_is_told_from_files_and_workloads(source: str, expected: bool) -> None:
    assert names_function(source) is expected


def test_a_file_goes_before_the_function_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert names_function("train:make_step")
    Path("train:make_step").touch()
    assert not names_function("train:make_step")


def test_a_function_cannot_be_simulated() -> None:
    with pytest.raises(StepError, match=r"names a function, .*: counterpoint tune train:make_step\.$"):
        load_job("train:make_step")


@pytest.mark.parametrize("source", ["nothing", "", "cb_ar_opt9"])
def test_an_unknown_name_lists_the_shipped_workloads(source: str) -> None:
    with pytest.raises(StepError, match=r"Shipped workloads: cb_a2a_opt1, .*mb_ar_opt2"):
        load_job(source)


def test_a_missing_workload_file_says_so() -> None:
    with pytest.raises(WorkloadError, match=r"Cannot read none\.toml: No such file"):
        load_job("none.toml")
