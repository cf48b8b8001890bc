"""Examples as a reader starts them, on CPUs: those for several ranks one after the other in one pair of processes."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from counterpoint.machine import load_machine
from helpers.ranks_of_node import free_ports

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FOLDERS = sorted(path.parent for path in EXAMPLES.glob("*/README.md"))
TRACES = EXAMPLES / "traces"
MOST_LINES = 70
LIMIT_S = 300
HUGGING_FACE = ("transformers", "accelerate")
INSTALLED = {
    "huggingface": HUGGING_FACE,
    "huggingface_tp": HUGGING_FACE,
    "lightning": ("lightning",),
    "torchtitan": ("torchtitan",),
}
RUNS = {  # scripts of several ranks with their arguments, and what rank 0 prints
    "ddp_fsdp2/train.py ddp --copies --width 1536 --steps 2": r"a gradient bucket: [1-9]\d* times by copies",
    "ddp_fsdp2/train.py fsdp2 --copies --width 1536 --steps 2": r"a reduction of gradients: [1-9]\d* times by copies",
    "ddp_fsdp2/train.py ddp --width 1536 --steps 2": r"^loss [\d.]+$",
    "tensor_parallel/train.py": r"overlap: on for 6 linears",
    "experts/layer.py": r"equal within rounding: True",
    "operators/operators.py": r"all_gather_matmul, as asked: equal to torch's within rounding: True",
    "huggingface/train.py": r"a gradient bucket: [1-9]\d* times by copies",
    "huggingface_tp/train.py": r"overlap: on for 15 linears",
}
DRIVER = """
import faulthandler, os, runpy, sys
faulthandler.dump_traceback_later(240, exit=True)  # before LIMIT_S, so that a rank that waits says where
for port, words in (run.split(" ", 1) for run in sys.argv[1:]):
    os.environ["MASTER_PORT"], sys.argv = port, words.split()
    print("== " + words.partition("examples/")[2], flush=True)
    runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
os._exit(0)  # torch 2.13 aborts now and then when a process with gloo threads ends by itself
"""
REFUSED = """
import runpy, sys
for words in sys.argv[1:]:
    sys.argv = words.split()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as refused:
        print(refused)
"""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MASTER_ADDR": "127.0.0.1"}
pytestmark = pytest.mark.xdist_group("examples")  # one worker, for many of these read what one job printed
BARE = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}


def finished(command: list[str | Path], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = BARE | ENVIRONMENT
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def not_printed(folder: str, output: str) -> list[str]:
    """The lines that an example's page shows and its output lacks; "..." stands for more."""
    shown = (EXAMPLES / folder / "README.md").read_text().split("```text\n")[1].split("```")[0]
    lines = [" ".join(line.split()).removesuffix("...").rstrip(" ;") for line in shown.splitlines()]
    return [line for line in lines if line not in " ".join(output.split())]


def is_installed(folder: str) -> bool:
    return all(find_spec(name) for name in INSTALLED.get(folder, ()))


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What rank 0 printed in each run."""
    runs = [run for run in RUNS if is_installed(run.split("/")[0])]
    words = [f"{port} {EXAMPLES}/{run}" for port, run in zip(free_ports(len(runs)), runs, strict=True)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", DRIVER, *words],
            env=BARE | ENVIRONMENT | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [process.communicate(timeout=LIMIT_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors[-2000:] for _, errors in ended)
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in ended[0][0].split("== ")[1:]}


@pytest.mark.parametrize("run", RUNS)
def test_a_script_of_several_ranks_runs_and_says_what_it_did(run: str, printed: dict[str, str]) -> None:
    if not is_installed(run.split("/", maxsplit=1)[0]):
        pytest.skip(f"{' and '.join(INSTALLED[run.split('/', maxsplit=1)[0]])} are not installed")
    assert re.search(RUNS[run], printed[run], re.MULTILINE), printed[run]


@pytest.mark.parametrize("run", ["tensor_parallel/train.py", "experts/layer.py", "operators/operators.py"])
def test_a_page_shows_what_its_script_prints(run: str, printed: dict[str, str]) -> None:
    assert not [line for line in not_printed(run.split("/", maxsplit=1)[0], printed[run]) if not line.startswith("loss")]


def test_copies_change_the_loss_by_rounding_at_most(printed: dict[str, str]) -> None:
    losses = [re.findall(r"^loss ([\d.]+)", printed[run], re.MULTILINE) for run in RUNS if run.startswith("ddp_fsdp2")]
    assert len(losses) == 3
    assert [float(found[0]) for found in losses] == pytest.approx([float(losses[-1][0])] * 3, abs=2e-6)


def test_operators_say_why_a_schedule_was_picked(printed: dict[str, str]) -> None:
    lines = printed["operators/operators.py"].splitlines()
    picked = [line.split(": ")[1].split(",")[0] for line in lines if ", because " in line]
    assert picked == ["sequential"] * 2 + ["all_peers/2 chunk 1+2"] * 2
    assert sum(line.endswith("within rounding: True") for line in lines) == 4


def test_scripts_that_cannot_start_say_why_in_one_line() -> None:
    """Without torchrun, or where their packages are missing."""
    folders = ["ddp_fsdp2", "tensor_parallel", "experts", "operators", "huggingface", "huggingface_tp", "torchtitan"]
    folders += [] if is_installed("lightning") else ["lightning"]  # Lightning starts its ranks itself
    scripts = [f"{next((EXAMPLES / folder).glob('*.py'))} {'ddp' if folder == 'ddp_fsdp2' else ''}" for folder in folders]
    ended = finished([sys.executable, "-c", REFUSED, *scripts])
    said = ended.stdout.splitlines()
    assert len(said) == len(folders), ended.stderr  # each a line, and none ran
    for folder, line in zip(folders, said, strict=True):
        assert ("torchrun --nproc" if is_installed(folder) else "pip install") in line


def test_the_machine_of_the_example_has_half_the_links(tmp_path: Path) -> None:
    ended = subprocess.run(
        ["sh", EXAMPLES / "custom_machine" / "plan.sh"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "NVLinks at half the rate" in ended.stdout
    assert not not_printed("custom_machine", ended.stdout)
    machine, whole = load_machine(str(tmp_path / "half_links.toml")), load_machine("h200")
    assert (machine.link.bytes_per_s, machine.network) == (whole.link.bytes_per_s / 2, whole.network)


@pytest.mark.parametrize(("trace", "status"), [("ddp.rank0", 0), ("starved.rank0", 1)])
def test_the_gate_passes_what_is_as_before_and_fails_what_exposes_more(trace: str, status: int, tmp_path: Path) -> None:
    assert finished(["counterpoint", "analyze", TRACES / "ddp.rank0.json.gz", "--no-recover", "-o", "main.json"], tmp_path)
    ended = finished(["sh", EXAMPLES / "ci_gate" / "gate.sh", "main.json", TRACES / f"{trace}.json.gz"], tmp_path)
    assert ended.returncode == status, ended.stderr
    assert (tmp_path / "summary.md").is_file()
    assert (not not_printed("ci_gate", ended.stderr)) == (status == 1)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_each_example_is_small_and_its_page_says_what_has_run(folder: Path) -> None:
    page = (folder / "README.md").read_text()
    assert "**What has run.**" in page
    assert f"({folder.name}/README.md)" in (EXAMPLES / "README.md").read_text()
    scripts = [path for path in folder.iterdir() if path.suffix in (".py", ".sh")]
    assert [path.read_text().count("\n") <= MOST_LINES for path in scripts] == [True]
