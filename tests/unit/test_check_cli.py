"""`counterpoint check` as a user runs it: exit codes, text, JSON, files."""

import json
import sys
from pathlib import Path

import pytest

from counterpoint.doctor.job_context import FoundGpu, JobContext
from counterpoint.value import write_toml
from helpers.command import counterpoint, refusal

H200 = FoundGpu(name="NVIDIA H200", compute_capability="9.0", num_sms=132, has_multicast=True)
NODE = JobContext(
    vendor="nvidia",
    gpus=(H200, H200),
    blocked_peers=(),
    driver_version="580.159",
    cuda_version="13.0",
    torch_version="2.11.0",
    nccl_version="2.28.9",
)


@pytest.fixture
def node(tmp_path: Path) -> Path:
    file = tmp_path / "node.toml"
    file.write_text(write_toml(NODE))
    return file


def test_nothing_found_is_one_line_with_what_was_looked_at(node: Path) -> None:
    done = counterpoint("check", "--context", node, "--", "torchrun", "--nproc-per-node", "8", "nowhere.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("No setting was found that is known to defeat overlap.\n")
    for part in (
        "2 x NVIDIA H200",
        "driver 580.159",
        "CUDA 13.0",
        "torch 2.11.0",
        "NCCL 2.28.9",
        "torchrun nowhere.py, 1 node",
    ):
        assert part in " ".join(done.stdout.split())
    assert "not checked" in done.stdout


def test_a_setting_that_defeats_overlap_ends_with_1(node: Path) -> None:
    command = ("env", "CUDA_DEVICE_MAX_CONNECTIONS=1", "torchrun", "train.py", "--use-torch-fsdp2")
    done = counterpoint("check", "--context", node, "--", *command)
    assert (done.returncode, done.stderr) == (1, "")
    text = " ".join(done.stdout.split())
    assert "defeats overlap CUDA_DEVICE_MAX_CONNECTIONS: 1 (in the command), with --use-torch-fsdp2" in text
    for label in ("why", "do", "source"):
        assert f"\n  {label} " in done.stdout
    assert "1 setting defeats overlap, 0 may defeat it; 0 notes." in done.stdout


def test_a_setting_that_only_may_defeat_overlap_ends_with_0(node: Path) -> None:
    done = counterpoint("check", "--context", node, "--", "NCCL_MAX_CTAS=4", "python", "train.py")
    assert done.returncode == 0
    assert "may defeat overlap  NCCL_MAX_CTAS" in done.stdout
    assert "No setting defeats overlap, 1 may defeat it; 0 notes." in done.stdout


SCRIPT = "from lightning import Fabric\nfrom parallelism import parallelize\n"


@pytest.mark.parametrize(
    ("words", "line", "where"),
    [
        ("fabric run --accelerator cuda --devices 2 --strategy fsdp train.py", "", "--strategy fsdp"),
        ("python train.py", "fabric = Fabric(devices=2, strategy='fsdp')\n", "train.py:3"),
        ("python train.py", "from lightning.pytorch.strategies import FSDPStrategy\n", "train.py:3"),
        ("accelerate launch train.py --dp-shard-size 2", "FullyShardedDataParallelPlugin(fsdp_version=2)\n", "train.py:3"),
    ],
)
def test_fsdp_of_lightning_and_accelerate_with_one_queue_ends_with_1(
    tmp_path: Path, node: Path, words: str, line: str, where: str
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT + line)
    one_queue = ("env", "CUDA_DEVICE_MAX_CONNECTIONS=1")
    done = counterpoint("check", "--context", node, "--", *one_queue, *words.split(), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    text = " ".join(done.stdout.split())
    assert f"CUDA_DEVICE_MAX_CONNECTIONS: 1 (in the command), with {where}" in text
    assert "not checked what train.py imports: only the script itself was read, not lightning, parallelism." in text


def test_the_shells_variables_count_and_the_command_is_not_run(tmp_path: Path) -> None:
    proof = tmp_path / "ran"
    script = tmp_path / "train.py"
    script.write_text(f"open({str(proof)!r}, 'w')\n")
    done = counterpoint("check", sys.executable, str(script), "--bf16", CUDA_LAUNCH_BLOCKING="1")
    assert done.returncode == 1, done.stderr
    assert "CUDA_LAUNCH_BLOCKING" in done.stdout
    assert not proof.exists()


def test_json_holds_findings_and_what_they_rest_on(node: Path) -> None:
    done = counterpoint("check", "--context", node, "--json", "--", "NCCL_PROTO=LL", "ncu", "python", "train.py")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert [finding["severity"] for finding in found["findings"]] == ["defeats overlap", "note"]
    assert set(found["findings"][0]) == {"severity", "setting", "found", "fact", "source", "remedy"}
    assert found["context"]["gpus"][0]["name"] == "NVIDIA H200"
    assert found["not_looked_at"]


def test_what_is_saved_here_is_checked_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    saved = counterpoint("check", "-o", file, CUDA_LAUNCH_BLOCKING="1")
    assert saved.returncode == 1, saved.stderr
    assert counterpoint("check", "--context", file).returncode == 1
    cleared = counterpoint("check", "--context", file, "--", "env", "-u", "CUDA_LAUNCH_BLOCKING", "python", "train.py")
    assert cleared.returncode == 0, cleared.stdout


@pytest.mark.parametrize("columns", ["40", "80", "110"])
def test_text_stays_within_the_terminal(node: Path, columns: str) -> None:
    command = ("TORCH_NCCL_HIGH_PRIORITY=1", "CUDA_LAUNCH_BLOCKING=1", "NCCL_MAX_CTAS=4", "torchrun", "train.py")
    done = counterpoint("check", "--context", node, "--", *command, COLUMNS=columns)
    assert done.returncode == 1
    assert max(map(len, done.stdout.splitlines())) <= int(columns)


def test_what_a_file_leaves_out_is_said_and_not_taken_for_absent(tmp_path: Path, node: Path) -> None:
    file = tmp_path / "written.toml"
    file.write_text('vendor = "nvidia"\n[environment]\nNCCL_MAX_CTAS = "4"\n')
    found = json.loads(counterpoint("check", "--context", file, "--json").stdout)
    gpus, versions = found["not_looked_at"]
    assert gpus.startswith("GPUs: the file gives none")
    assert gpus.endswith("add a [[gpus]] with name and compute_capability for each")
    assert versions == "versions: the file gives no torch_version and no nccl_version; add what the job has"
    assert json.loads(counterpoint("check", "--context", node, "--json").stdout)["not_looked_at"] == []
    file.write_text('unknown = ["GPUs, driver and peer access: none", "versions: none"]\n')
    assert len(json.loads(counterpoint("check", "--context", file, "--json").stdout)["not_looked_at"]) == 2


def test_blocked_peers_need_gpus(tmp_path: Path) -> None:
    file = tmp_path / "written.toml"
    file.write_text("blocked_peers = [[0, 1]]\n")
    assert "gpus is empty; found [[0, 1]]. Add a [[gpus]] for each" in refusal("check", "--context", file)
    file.write_text('blocked_peers = [[0, 5]]\n[[gpus]]\nname = "NVIDIA H200"\n')
    assert "from 0 to 0; found [[0, 5]]. Correct it." in refusal("check", "--context", file)


@pytest.mark.parametrize("name", ["nosuch", "./nosuch", "script.sh", "./script.sh", "folder", "./folder"])
def test_a_command_that_cannot_start_is_refused_in_the_words_of_run(tmp_path: Path, name: str) -> None:
    (tmp_path / "script.sh").write_text("echo\n")
    (tmp_path / "folder").mkdir()
    words = refusal("run", "--", name, "--lr", "1", cwd=tmp_path)
    said = refusal("check", "--", name, "--lr", "1", cwd=tmp_path)
    elsewhere = "" if (tmp_path / name).exists() else " For a command of another machine, add --context FILE."
    assert said == words + elsewhere
    assert name in said


def test_the_path_of_the_shell_and_of_the_command_are_heeded(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "starts-a-job"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 7\n")
    program.chmod(0o755)
    assert "'starts-a-job' was not found. Check its name and the PATH." in refusal("check", "--", "starts-a-job")
    assert counterpoint("check", "--", "starts-a-job", PATH=str(program.parent)).returncode == 0
    assert counterpoint("check", "--", "env", f"PATH={program.parent}", "starts-a-job").returncode == 0
    assert counterpoint("check", "--", "bin/starts-a-job", cwd=tmp_path).returncode == 0
    assert "in its PATH, '/nowhere'" in refusal("check", "--", "env", "PATH=/nowhere", "python", "train.py")


def test_what_an_interpreter_or_a_shell_does_not_find_is_theirs_to_say(tmp_path: Path) -> None:
    for command, words in (
        ((sys.executable, "nosuch.py"), "the script nosuch.py was not read: there is no such file here"),
        (("sh", "nosuch.sh"), "what sh runs: shell scripts are not read"),
    ):
        done = counterpoint("check", "--", *command, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert words in " ".join(done.stdout.split())


def test_a_command_of_a_described_machine_need_not_be_here(node: Path) -> None:
    assert counterpoint("check", "--context", node, "--", "nosuch", "train.py").returncode == 0


def test_bad_input_is_one_line_and_2(tmp_path: Path, node: Path) -> None:
    assert "names no program" in refusal("check", "--", "A=1")
    assert "names no program" in refusal("check", "--", "")
    assert "'-S' is not supported" in refusal("check", "--", "env", "-S", "python train.py")
    assert "No such file" in refusal("check", "--context", tmp_path / "nowhere.toml")
    assert "-o saves this machine alone" in refusal("check", "-o", tmp_path / "a.toml", "--", "python", "train.py")
    assert "does not exist" in refusal("check", "-o", tmp_path / "nowhere" / "a.toml")
    assert "A context file must end in .toml; found 'a.json'" in refusal("check", "-o", tmp_path / "a.json")
    assert "already uses that file" in refusal("check", "-o", node, "--context", node)
    node.write_text("gpus = 1")
    assert "gpus must be a list; found 1. Correct it." in refusal("check", "--context", node)
