"""Measurements on GPUs as single commands: what they take, what they refuse, and how they go on where a file ends."""

import json
import re
import sys
import time
from importlib import import_module
from pathlib import Path

import msgspec
import pytest

from counterpoint.cuda.probes import PROBES
from counterpoint.errors import CounterpointError
from counterpoint.machine import load_machine
from counterpoint.paper.grid import simulate_paper
from counterpoint.paper.stored import StoredGrid, read_grid
from counterpoint.workloads import load_workload
from helpers.command import refusal

ROOT = Path(__file__).parents[2]
GPU_PACKAGES = ("cuda", "torch", "triton")  # which a machine without GPUs may lack
HERE = {"date": "2026-11-24", "gpus": "4 x NVIDIA H200", "driver": "580", "cuda": "13.0", "torch": "2.11", "nccl": "2.28.9"}
STEPS = {name: load_workload(name) for name in ("cb_ar_opt1", "cb_ar_opt2")}


def grid(*names: str) -> StoredGrid:
    found = StoredGrid(conditions=HERE)
    for name in names:
        result = msgspec.structs.replace(simulate_paper(STEPS[name], load_machine("h200")), rows=())
        found = found.with_result(result, STEPS[name], HERE)
    return found


def test_a_grid_goes_on_where_its_file_ends_and_keeps_both_dates(tmp_path: Path) -> None:
    path = tmp_path / "paper.json"
    grid("cb_ar_opt1").save(path)
    later = HERE | {"date": "2026-11-25", "rounds": 9}
    found = read_grid(path, later, 4)
    assert found.measured(4) == {"cb_ar_opt1"}
    assert not found.measured(2)
    (result,) = grid("cb_ar_opt2").result
    both = found.with_result(result, STEPS["cb_ar_opt2"], later)
    assert [each.workload for each in both.result] == ["cb_ar_opt1", "cb_ar_opt2"]
    assert both.conditions["date"] == "2026-11-24; cb_ar_opt2: 2026-11-25"
    assert both.steps == STEPS
    both.save(path)
    assert read_grid(path, later, 4) == both
    assert both.with_result(result, STEPS["cb_ar_opt2"], later).measured(4) == both.measured(4)


@pytest.mark.parametrize(
    ("changes", "num_ranks", "words"),
    [
        ({"driver": "590"}, 4, "was measured with driver 580, and now it is 590"),
        ({}, 2, "was measured on 4 ranks, and these are 2"),
    ],
)
def test_a_grid_of_other_conditions_is_refused(changes: dict[str, str], num_ranks: int, words: str, tmp_path: Path) -> None:
    path = tmp_path / "paper.json"
    grid("cb_ar_opt1").save(path)
    with pytest.raises(CounterpointError, match=words):
        read_grid(path, HERE | changes, num_ranks)


@pytest.mark.parametrize(("num_ranks", "num_workloads", "num_steps"), [(2, 12, 12), (4, 12, 12)])
def test_a_stored_grid_can_be_gone_on_with(num_ranks: int, num_workloads: int, num_steps: int) -> None:
    path = ROOT / "benchmarks" / "results" / f"paper_{num_ranks}x_h200.json"
    found = read_grid(path, json.loads(path.read_text())["conditions"], num_ranks)
    assert (len(found.measured(num_ranks)), len(found.steps)) == (num_workloads, num_steps)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "paper.json"
    path.write_text('{"conditions": 3}')
    with pytest.raises(CounterpointError, match="holds no grid of the paper"):
        read_grid(path, HERE, 4)
    assert read_grid(tmp_path / "none.json", HERE, 4) == read_grid(None, HERE, 4) == StoredGrid(conditions=HERE)


def test_again_is_refused_where_nothing_is_gone_on_with() -> None:
    assert "--again is for grids on GPUs" in refusal("bench", "paper", "cb_ar_opt2", "--simulate", "h200", "--again")


def test_a_probe_is_named_as_it_is() -> None:
    assert "There is no probe 'row'. Name one of: launches, " in refusal("calibrate", "--only", "row")
    assert "Leave one of them out" in refusal("calibrate", "--only", "rows", "--again")
    source = (ROOT / "src" / "counterpoint" / "cuda" / "probes" / "runner.py").read_text()
    assert tuple(re.findall(r"^        Probe\(\"([a-z ]+)\"", source, re.MULTILINE)) == PROBES


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py")))
def test_every_benchmark_finds_what_it_imports(name: str) -> None:
    try:
        import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as problem:
        if str(problem.name).partition(".")[0] not in GPU_PACKAGES:
            raise
        pytest.skip(f"needs {problem.name}")


def test_jobs_of_others_run_as_modules(tmp_path: Path) -> None:
    from benchmarks.supervised_jobs import OURS, TORCHTITAN, command, parse  # noqa: PLC0415

    assert tuple(parse(["--ranks", "2"]).jobs) == OURS
    options = parse(["--ranks", "2", "--jobs", *TORCHTITAN, "transformers_tp", "--torchtitan", str(tmp_path)])
    words = {job: " ".join(command(job, options, 300)) for job in options.jobs}
    assert "benchmarks.transformers_job --steps 300" in words["transformers_tp"]
    assert "--model llama_tp --compile.enable --steps 300" in words["torchtitan_tp_compiled"]
    assert f"--torchtitan {tmp_path} --way bare --model llama_fsdp2" in words["torchtitan_fsdp2"]
    with pytest.raises(SystemExit):
        parse(["--ranks", "2", "--jobs", "torchtitan_tp"])


def test_jobs_that_a_file_holds_are_not_run_again(tmp_path: Path) -> None:
    from benchmarks.supervised_jobs import kept  # noqa: PLC0415

    path, asked = tmp_path / "jobs.json", {"ranks": 2, "steps": 440}
    assert kept(path, asked) == kept(None, asked) == ({}, [])
    path.write_text(json.dumps({"conditions": asked | {"gpus": "x"}, "result": {"ddp": []}, "summary": ["ddp: yes"]}))
    assert kept(path, asked) == ({"ddp": []}, ["ddp: yes"])
    with pytest.raises(SystemExit, match="was measured with steps 440, not 300"):
        kept(path, asked | {"steps": 300})


def test_clock_and_power_are_those_of_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.supervised_jobs import Clocks  # noqa: PLC0415

    monkeypatch.setenv("PATH", str(tmp_path))
    with Clocks() as without:
        pass
    assert without.found == {}
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\nprintf '345, 70.1\\n1755, 690.5\\n1770, 680.0\\n1740, 699.0\\n[N/A], [N/A]\\n'\nexec /bin/sleep 60\n"
    )
    tool.chmod(0o755)
    with Clocks() as clocks:
        time.sleep(0.5)
    assert clocks.found == {"clock_mhz": 1755.0, "power_w": 690.5}


torch = pytest.importorskip("torch")


def test_torchtitan_is_asked_for_the_models_of_the_documents(tmp_path: Path) -> None:
    from benchmarks.torchtitan_job import parse, words_for  # noqa: PLC0415

    options, others = parse(["--torchtitan", "x", "--model", "llama_tp", "--way", "bare", "--compile.enable"])
    assert (options.model, others) == ("llama_tp", ["--compile.enable"])
    words = " ".join(words_for("llama_tp", tmp_path, 60, 2))
    assert "--parallelism.tensor_parallel_degree 2" in words
    assert "models/llama3/train_configs" in words
    assert "--parallelism.expert_parallel_degree 2" in " ".join(words_for("deepseek", tmp_path, 60, 2))
    rarely = words_for("llama_tp", tmp_path, 60, 2, ["--compile.enable", "--metrics.log_freq", "10"])
    assert rarely[-3:] == ["--compile.enable", "--metrics.log_freq", "10"]
    assert rarely.count("--metrics.log_freq") == 1
    with pytest.raises(SystemExit):
        parse(["--torchtitan", "x", "--model", "llama_fsdp2", "--way", "overlap"])


def test_the_transformers_job_parses_without_transformers() -> None:
    from benchmarks.transformers_job import parse  # noqa: PLC0415

    assert parse(["--steps", "20", "--device", "cpu"]).layers == 6
    assert "transformers" not in sys.modules
    for wrong in (["--steps", "5"], ["--turns", "2"], ["--new-tokens", "4"]):
        with pytest.raises(SystemExit):
            parse(wrong)
