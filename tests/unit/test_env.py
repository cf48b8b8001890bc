"""`counterpoint env`: what it prints can be pasted, and what cannot work is refused before anything starts."""

import itertools
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from counterpoint.controls import CommunicationCtas, Control, Priority, Transport
from counterpoint.errors import LaunchFilterError
from counterpoint.plan import Directive, Match, Plan, save_plan
from counterpoint.supervised.launchers import LAUNCHERS, check_outer_launcher
from helpers.build_filter import build_double
from helpers.command import TRACES, counterpoint, refusal

IN_A_GROUP = Match(kind="communication", collective="all_gather", process_group="default_pg")
JOB = Path(__file__).parents[1] / "helpers" / "jobs" / "launches.py"


def saved(path: Path, match: Match, control: Control) -> Path:
    save_plan(Plan(verdict="GAIN", directives=(Directive(match=match, controls=(control,), reason="test"),)), path)
    return path


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return saved(tmp_path / "plan.toml", Match(kind="communication"), Priority(priority=-5))


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("has_plan", [True, False])
def test_what_is_printed_is_in_the_launchers_own_language_and_holds_the_job(
    launcher: str, has_plan: bool, plan: Path
) -> None:
    options = ("--plan", plan) if has_plan else ()
    done = counterpoint("env", "--for", launcher, *options, "--", "torchrun", "--nnodes", "2", "train it.py", "--lr", "1")
    assert done.returncode == 0, done.stderr
    assert "counterpoint" in done.stdout
    assert ("run --plan " in done.stdout or '"--plan"' in done.stdout) == has_plan
    if launcher == "ray":
        code = [line for line in done.stdout.splitlines() if line and "import" not in line]
        compile("\n".join(code), "ray", "exec")
    elif launcher == "kubernetes":
        yaml = pytest.importorskip("yaml")
        container = yaml.safe_load(done.stdout)["spec"]["template"]["spec"]["containers"][0]
        assert container["command"][-6:] == ["torchrun", "--nnodes", "2", "train it.py", "--lr", "1"]
    else:
        assert "'train it.py' --lr 1" in done.stdout
        subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True, timeout=60)


@pytest.mark.parametrize(
    ("command", "per_node", "total"),
    [
        (("torchrun", "--nnodes", "3", "--nproc-per-node", "4", "train.py"), "4", "12"),
        (("python", "train.py"), "RANKS_PER_NODE", "RANKS"),
        ((), "8", "32"),
    ],
)
def test_launchers_start_as_many_ranks_as_the_command_states(command: tuple[str, ...], per_node: str, total: str) -> None:
    assert f"#SBATCH --ntasks-per-node={per_node}\n" in counterpoint("env", "--for", "slurm", "--", *command).stdout
    said = counterpoint("env", "--for", "mpi", "--", *command).stdout
    assert f"mpirun -np {total} " in said
    assert f"mpiexec -n {total} " in said


def test_a_plan_that_is_tuned_in_a_container_is_saved_outside_of_it() -> None:
    said = counterpoint("env", "--for", "container").stdout
    assert '-v "$PWD":/counterpoint' in said
    assert said.count("--tune -o /counterpoint/plan.toml") == 2
    pod = counterpoint("env", "--for", "kubernetes").stdout
    assert '- "/counterpoint/plan.toml"' in pod
    assert "mountPath: /counterpoint}" in pod
    assert "persistentVolumeClaim: {claimName: CLAIM}" in pod


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--proof", "x", "--for", "slurm"), "--for has no effect on that. Leave it out."),
        (("--proof", "x", "--", "python", "train.py"), "COMMAND has no effect"),
        ((), "Which launcher starts the job? Give --for with one of slurm, kubernetes, ray, mpi, container"),
        (("--for", "pbs"), "'pbs' is no launcher that is known here"),
        (("--for", "ray", "--folder", "x"), "ray needs none"),
        (("--for", "container", "--folder", "x"), "Add --plan FILE"),
        (("--for", "mpi", "--step", "cb_ar_opt2"), "Add --plan FILE"),
        (("--proof", "/nowhere"), "/nowhere holds no settings.json"),
        (("--for", "mpi", "--plan", "/nowhere.toml"), "Cannot read /nowhere.toml"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], says: str) -> None:
    assert says in refusal("env", *arguments)


def test_a_folder_has_all_that_a_job_without_counterpoint_needs_and_is_read_for_proof(tmp_path: Path, plan: Path) -> None:
    folder, driver = tmp_path / "filled", tmp_path / "driver"
    driver.mkdir()
    build_double(driver)
    done = counterpoint("env", "--for", "container", "--plan", plan, "--folder", folder, TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (values,) = [line for line in done.stdout.splitlines() if line.startswith("docker")]
    words = values.split()
    variables = dict(word.split("=", 1) for before, word in itertools.pairwise(words) if before == "-e")
    code = (
        f"import sys\nsys.path.insert(0, {str(JOB.parent)!r})\nimport launches\n"
        f"driver = launches.Driver({str(driver)!r})\nprint([driver.step() for _ in range(3)])\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True, check=True, timeout=120
    )
    assert ended.stdout == "[-5, -5, -5]\n"
    proof = counterpoint("env", "--proof", folder, COLUMNS="160")
    assert "3 of 3" in proof.stdout
    assert "verified" in proof.stdout
    assert "holds files already" in refusal("env", "--for", "container", "--plan", plan, "--folder", folder)


def test_a_plan_that_the_filter_alone_cannot_apply_is_refused(tmp_path: Path) -> None:
    match = Match(kind="communication", collective="all_gather")
    copies = saved(tmp_path / "copies.toml", match, Transport(transport="copy_engine"))
    assert "moves collectives by copies" in refusal("env", "--for", "container", "--plan", copies, "--folder", "new")


def test_no_folder_is_filled_for_a_plan_of_which_nothing_would_take_effect(tmp_path: Path) -> None:
    narrow = saved(tmp_path / "narrow.toml", IN_A_GROUP, Transport(transport="copy_engine"))
    save_plan(Plan(verdict="NO_GAIN"), tmp_path / "empty.toml")
    for plan, says in ((narrow, "can get no control of this plan"), (tmp_path / "empty.toml", "leaves everything as it is")):
        assert says in refusal("env", "--for", "container", "--plan", plan, "--folder", tmp_path / "new")
        assert not (tmp_path / "new").exists()


def test_a_folder_names_the_variables_of_the_plan_and_takes_names_from_the_step(tmp_path: Path) -> None:
    limit = saved(tmp_path / "limit.toml", Match(kind="communication"), CommunicationCtas(max_ctas=8))
    done = counterpoint("env", "--for", "container", "--plan", limit, "--folder", tmp_path / "limited")
    assert "-e NCCL_MAX_CTAS=8" in done.stdout, done.stderr
    by_number = saved(tmp_path / "number.toml", Match(operations=(1,)), Priority(priority=-5))
    options = ("--for", "container", "--plan", by_number, "--folder", tmp_path / "numbered")
    assert "--step TRACE" in refusal("env", *options)
    assert counterpoint("env", *options, "--step", "cb_ar_opt2").returncode == 0
    assert "nothing was changed" in counterpoint("env", "--proof", tmp_path / "numbered").stdout


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_plan_that_needs_its_trace_is_started_with_it(launcher: str, tmp_path: Path) -> None:
    narrow = saved(tmp_path / "narrow.toml", IN_A_GROUP, Transport(transport="copy_engine"))
    assert "add --step TRACE" in refusal("env", "--for", launcher, "--plan", narrow)
    trace = TRACES / "fsdp2.rank0.json.gz"
    done = counterpoint("env", "--for", launcher, "--plan", narrow, "--step", trace)
    assert done.returncode == 0, done.stderr
    is_mounted = launcher in ("container", "kubernetes")
    assert str(trace) in done.stdout
    assert ("/counterpoint/step.json.gz" if is_mounted else f"--step {trace}") in done.stdout


@pytest.mark.parametrize(
    ("command", "environment", "says"),
    [
        ("srun -N 4 python train.py", {}, "counterpoint env --for slurm"),
        ("/usr/bin/docker run image train", {}, "in a container"),
        ("mpirun -np 8 -H a:4,b:4 python train.py", {}, "on other hosts"),
        ("mpiexec --hostfile=hosts python train.py", {}, "counterpoint env --for mpi"),
        ("mpirun -np 8 python train.py", {"SLURM_JOB_NUM_NODES": "2"}, "on other hosts"),
        ("mpirun -np 8 python train.py", {}, ""),
        ("torchrun --nnodes 4 train.py", {"SLURM_JOB_NUM_NODES": "4"}, ""),
        ("apptainer exec image.sif python train.py", {}, ""),
    ],
)
def test_a_launcher_that_starts_ranks_elsewhere_does_not_stand_behind_run(
    command: str, environment: dict[str, str], says: str
) -> None:
    if not says:
        check_outer_launcher(command.split(), environment)
        return
    with pytest.raises(LaunchFilterError, match=says) as raised:
        check_outer_launcher(command.split(), environment)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "hosts", "leaves"),
    [
        ("--hostfile {}", "one slots=8\ntwo slots=8\n", True),
        ("--hostfile={}", "one slots=8\ntwo slots=8\n", True),
        ("--hostfile {} --no_ssh --node_rank 1", "one slots=8\ntwo slots=8\n", False),
        ("--hostfile {} --num_nodes 1", "one slots=8\ntwo slots=8\n", False),
        ("--hostfile {}", "# all of them\none slots=8\n\n", False),
        ("--hostfile {}", None, False),
        ("--num_gpus 8", None, False),
    ],
)
def test_deepspeed_behind_run_may_not_start_ranks_on_other_hosts(
    options: str, hosts: str | None, leaves: bool, tmp_path: Path
) -> None:
    path = tmp_path / "hosts"
    if hosts is not None:
        path.write_text(hosts)
    command = f"deepspeed {options.format(path)} train.py --hostfile none".split()
    with pytest.raises(LaunchFilterError, match="deepspeed --no_ssh") if leaves else nullcontext():
        check_outer_launcher(command, {})
