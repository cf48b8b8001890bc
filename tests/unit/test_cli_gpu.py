"""The command line's part for GPUs, as far as it goes without one: recognition, refusals, the simulated grid, the cache."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from counterpoint.cli.tune import _load_function
from counterpoint.cuda.plan_cache import Conditions, find_plan, keep_plan, plan_path
from counterpoint.errors import PlanError, StepError
from counterpoint.files import cache_folder
from counterpoint.machine import load_machine, machine_names
from counterpoint.paper.values import PLAIN, SEQUENTIAL, PaperResult
from counterpoint.plan import Plan
from counterpoint.workloads import load_workload
from helpers.command import counterpoint, refusal

HERE = Conditions(
    device_name="NVIDIA H200", driver_version="13.0", nccl_version="2.28.9", torch_version="2.11.0", num_ranks=4
)


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize(
    ("command", "without"),
    [
        ("tune train:make_step", "counterpoint tune TRACE"),
        ("bench paper", "counterpoint bench paper --simulate MACHINE"),
        ("schedule tune all_gather_matmul --rows 8 --inner 8 --columns 8", "counterpoint schedule show estimates"),
    ],
)
def test_where_torch_sees_no_gpu_that_is_said_and_nothing_is_to_be_installed(command: str, without: str) -> None:
    done = counterpoint(*command.split(), CUDA_VISIBLE_DEVICES="", WORLD_SIZE="2", LOCAL_RANK="0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("counterpoint: No GPU is visible, so nothing can be measured. Without GPUs, ")
    assert done.stderr.endswith(f"{without}.\n")
    assert "pip install" not in done.stderr


def test_a_misspelt_function_or_module_is_told_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_training.py").write_text("def make_step(): ...\nlayers = 4\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def refused(step: str) -> str:
        with pytest.raises(StepError) as caught:
            _load_function(step)
        return str(caught.value)

    assert "cannot be found. Did you mean 'my_training'? Run the command where" in refused("my_trainig:make_step")
    assert "has no function 'make_stp'. Did you mean 'make_step'? Name one" in refused("my_training:make_stp")
    assert "has no function 'layers'. Name one" in refused("my_training:layers")
    assert "'absent', which cannot be found. Run the command where" in refused("absent:make_step")


def test_a_function_cannot_be_simulated_and_the_line_says_what_can() -> None:
    message = refusal("simulate", "train.jobs:make_step")
    assert message.startswith("'train.jobs:make_step' names a function")
    assert "Give a trace of it" in message
    assert message.endswith("counterpoint tune train.jobs:make_step.")


def test_a_timeline_of_a_function_is_refused_rather_than_not_written() -> None:
    message = refusal("tune", "train:make_step", "--timeline", "lanes.json")
    assert message == "--timeline is for what is simulated, and 'train:make_step' is measured. Leave it out."


@pytest.mark.parametrize("command", ["tune", "simulate"])
@pytest.mark.parametrize("step", ["jobs..train:make_step", "train:1", "a:b:c"])
def test_what_only_looks_like_a_function_is_none_for_any_command(command: str, step: str) -> None:
    message = refusal(command, step)
    assert message.startswith(f"'{step}' does not exist; a function is named as Python imports it")
    assert "as in jobs.train:make_step. Shipped workloads: cb_a2a_opt1, " in message


@pytest.mark.parametrize("command", ["tune", "simulate"])
def test_a_file_that_is_named_like_a_function_is_a_file_for_any_command(command: str, tmp_path: Path) -> None:
    (tmp_path / "rank0:trace").write_text("no trace")
    message = refusal(command, "rank0:trace", cwd=tmp_path)
    assert message.startswith(
        "'rank0:trace' is neither a trace (.json, .json.gz, .sqlite) nor a workload file (.toml). Shipped"
    )


def test_the_papers_grid_is_simulated_for_a_machine(tmp_path: Path) -> None:
    output = tmp_path / "paper.json"
    done = counterpoint("bench", "paper", "cb_ar_opt2", "--simulate", "h200", "-o", str(output))
    assert done.returncode == 0, done.stderr
    stored = json.loads(output.read_text())
    assert stored["conditions"] == {"gpus": "none used, simulated"}
    (result,) = msgspec.convert(stored["result"], list[PaperResult])
    labels = [row.label for row in result.rows]
    assert labels[:2] == [SEQUENTIAL, PLAIN]
    assert {"priority", "head start 5 us", "priority + head start 5 us"} <= set(labels)
    assert [label for label in labels if label.startswith("cap ")], "caps with their bytes"
    assert all(row.measured_us is None for row in result.rows), "nothing was measured, and nothing says so"
    assert result.choice.verdict == "GAIN"
    assert "planner's choice (simulated)" in done.stdout


@pytest.mark.parametrize("workload", ["cb_a2a_opt2", "cb_ar_opt2"])
def test_copy_engines_are_in_the_grid_of_collectives_that_move_data_and_of_those_that_sum(workload: str) -> None:
    said = counterpoint("bench", "paper", workload, "--simulate", "h200").stdout
    times = {line.split("  ")[0]: line.split()[-2] for line in said.splitlines() if line.endswith(" ms")}
    assert float(times["copy engines"]) < float(times["plain overlap"])


@pytest.mark.parametrize("machine", machine_names(variants=False))
def test_the_grid_runs_for_every_machine_and_holds_priority_only_where_it_is_heeded(machine: str) -> None:
    done = counterpoint("bench", "paper", "cb_ar_opt2", "--simulate", machine)
    assert done.returncode == 0, done.stderr
    assert ("\npriority " in done.stdout) == load_machine(machine).gpu.priority_is_effective


def test_an_unknown_workload_or_machine_of_the_grid_is_one_line() -> None:
    assert "Unknown workload" in refusal("bench", "paper", "nothing", "--simulate", "h200")
    assert "Unknown machine" in refusal("bench", "paper", "cb_ar_opt2", "--simulate", "nothing")


@pytest.mark.parametrize("rest", [(), ("--simulate", "h200")])
def test_results_that_cannot_be_saved_are_refused_before_any_work(tmp_path: Path, rest: tuple[str, ...]) -> None:
    assert "does not exist" in refusal("bench", "paper", *rest, "-o", str(tmp_path / "nowhere" / "paper.json"))


def test_a_kept_plan_is_found_again_and_only_under_the_same_conditions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COUNTERPOINT_CACHE_DIR", str(tmp_path / "plans"))
    step = load_workload("cb_ar_opt2")
    plan = Plan(step_name=step.name, step_fingerprint=step.fingerprint(), machine="h200", summary="kept")
    assert find_plan(step, HERE) is None
    assert keep_plan(plan, step, HERE).parent == cache_folder() == tmp_path / "plans"
    assert find_plan(step, HERE) == plan
    for change in ({"num_ranks": 2}, {"torch_version": "2.12.0"}, {"nccl_version": "2.29.0"}, {"driver_version": "13.1"}):
        assert find_plan(step, msgspec.structs.replace(HERE, **change)) is None
    assert find_plan(load_workload("cb_ar_opt1"), HERE) is None


def test_a_plan_that_cannot_be_kept_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COUNTERPOINT_CACHE_DIR", str(tmp_path / "file" / "plans"))
    with pytest.raises(PlanError, match=r"^Cannot create the folder .*: Not a directory\.$"):
        keep_plan(Plan(), load_workload("cb_ar_opt2"), HERE)


def test_a_damaged_kept_plan_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COUNTERPOINT_CACHE_DIR", str(tmp_path))
    step = load_workload("cb_ar_opt2")
    plan_path(step, HERE).write_text("step_name = [")
    with pytest.raises(PlanError, match="is not TOML"):
        find_plan(step, HERE)


@pytest.mark.parametrize("name", ["paper_2x_h200", "paper_4x_h200"])
def test_the_results_of_the_grid_on_gpus_are_stored_with_their_conditions(name: str) -> None:
    stored = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / f"{name}.json").read_text())
    assert {"date", "gpus", "driver", "cuda", "torch", "nccl"} <= set(stored["conditions"])
    results = msgspec.convert(stored["result"], list[PaperResult])
    assert all(row.is_engaged and row.is_identical for result in results for row in result.rows)
