"""`counterpoint run` on 2 or 3 nodes of 1 or 2 ranks: on one host, but with an agent, a run, a folder and a rendezvous each.

The nodes share nothing but the network: each `counterpoint run` starts its own torchrun, as Slurm or Kubernetes would do it.
Each process that imports torch costs three seconds of a core, and a rank that takes steps six, so a job serves several
assertions, and where torchrun is not what is tested, a script forks the ranks.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from counterpoint.controls import Priority
from counterpoint.plan import Directive, Match, Plan, load_plan, save_plan
from helpers.command import COUNTERPOINT
from helpers.ranks_of_node import free_port, ranks_of_node

JOB = Path(__file__).parents[1] / "helpers" / "jobs" / "launches.py"
TORCHRUN = Path(sys.executable).with_name("torchrun")
NUM_NODES = 3
LIMIT_S = 240
pytestmark = pytest.mark.xdist_group("nodes")  # a few ranks at a time are enough for the host


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["COUNTERPOINT_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))


def priority_plan(folder: Path) -> Path:
    directive = Directive(match=Match(kind="communication"), controls=(Priority(priority=-5),), reason="test")
    save_plan(Plan(verdict="GAIN", directives=(directive,)), folder / "plan.toml")
    return folder / "plan.toml"


def torchrun(num_nodes: int, num_ranks: int, *options: str) -> list[str]:
    """What starts one node's ranks with an agent of torch."""
    return [str(TORCHRUN), "--nnodes", str(num_nodes), "--nproc-per-node", str(num_ranks), *options]


def by_c10d(port: int) -> tuple[str, ...]:
    return ("--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"127.0.0.1:{port}")


def static(node: int, port: int) -> tuple[str, ...]:
    return ("--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port))


class Nodes:
    """The processes of all nodes, each with a temporary folder of its own; leaving ends them."""

    def __init__(self, folder: Path, commands: Sequence[Sequence[object]], **environment: str) -> None:
        inherited = {name: text for name, text in os.environ.items() if name not in ("LD_PRELOAD", "RANK", "WORLD_SIZE")}
        self.processes = []
        for node, command in enumerate(commands):
            own = folder / f"node{node}"
            own.mkdir()
            variables = {"COLUMNS": "200", "OMP_NUM_THREADS": "1", "TMPDIR": str(own)}
            process = subprocess.Popen(
                [str(word) for word in command],
                env=inherited | variables | environment,
                cwd=own,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self.processes.append(process)

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(LIMIT_S)
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()

    def end(self) -> tuple[list[int], list[str]]:
        """Exit statuses and standard errors, by node."""
        errors = [process.communicate(timeout=LIMIT_S)[1] for process in self.processes]
        return [process.returncode for process in self.processes], errors


def supervised(options: Sequence[object], commands: Sequence[Sequence[object]]) -> list[list[object]]:
    return [[COUNTERPOINT, "run", *options, "--", *command] for command in commands]


def descendants(pid: int) -> list[int]:
    """A process and all that it started, itself first."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(child): int(parent) for child, parent in map(str.split, listed.splitlines())}
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


def kill_with_descendants(pid: int) -> None:
    """They are stopped first, so that none starts another one, which would keep connections open."""
    stopped: set[int] = set()
    while found := set(descendants(pid)) - stopped:
        for each in found:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGSTOP)
        stopped |= found
    for each in stopped:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def own_lines(errors: Sequence[str]) -> list[str]:
    """What was said, once each: `run` repeats at the end why tuning stopped, which may be far up by then."""
    found = [line for text in errors for line in text.splitlines() if line.startswith("counterpoint:")]
    return list(dict.fromkeys(found))


def test_tuning_finds_a_plan_for_all_nodes_and_rank_0s_saves_it(driver: Path, tmp_path: Path) -> None:
    """Under c10d rendezvous."""
    port, found = free_port(), tmp_path / "found.toml"
    commands = [[*torchrun(2, 1, *by_c10d(port)), JOB, driver, "--steps", "150"]] * 2
    with Nodes(tmp_path, supervised(("--tune", "--budget", "120", "-o", found), commands)) as nodes:
        statuses, errors = nodes.end()
    assert statuses == [0, 0], errors
    assert sum("GAIN after" in line for line in own_lines(errors)) == 1, errors
    assert sum("plan saved to" in line for line in own_lines(errors)) == 1, errors
    assert load_plan(found).verdict == "GAIN"


def test_ranks_of_two_nodes_that_elastic_agents_start_again_get_the_plan_again(driver: Path, tmp_path: Path) -> None:
    """Each attempt has a store of its own: torch's shared one (2.13) gives gloo the addresses of the former ranks."""
    port = free_port()
    agent = torchrun(2, 1, "--max-restarts", "2", *by_c10d(port))
    job = [JOB, driver, "--steps", "40", "--fails-once", tmp_path / "failed"]
    run = supervised(("--plan", priority_plan(tmp_path)), [[*agent, *job]] * 2)
    with Nodes(tmp_path, run, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") as nodes:
        statuses, errors = nodes.end()
    assert (tmp_path / "failed").exists()
    assert statuses == [0, 0], errors
    for text in errors:
        rows = [line for line in text.splitlines() if line.startswith("priority")]
        assert rows, errors
        assert all(row.rstrip().endswith("verified") for row in rows), rows
    assert not any("no filter" in line for line in own_lines(errors)), errors


def test_a_run_for_each_rank_as_mpirun_and_srun_start_them(driver: Path, tmp_path: Path) -> None:
    """Rank 0 has Open MPI's variables, rank 1 Slurm's; the job tells torch, as jobs under these launchers do."""
    names = [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")]
    tasks = []
    for rank, (rank_name, size_name) in enumerate(names):
        told = f"import os, runpy; os.environ.update(RANK=os.environ[{rank_name!r}], WORLD_SIZE=os.environ[{size_name!r}]); "
        ran = f"import sys; sys.argv = sys.argv[1:]; runpy.run_path({str(JOB)!r}, run_name='__main__')"
        job = [sys.executable, "-c", told + ran, JOB, driver, "--steps", "20"]
        run = supervised(("--strict", "--plan", priority_plan(tmp_path)), [job])[0]
        tasks.append(["env", f"{rank_name}={rank}", f"{size_name}=2", *run])
    with Nodes(tmp_path, tasks, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())) as nodes:
        statuses, errors = nodes.end()
    assert statuses == [0, 0], errors
    rows = [next(line.split() for line in text.splitlines() if line.startswith("priority")) for text in errors]
    assert [row[-1] for row in rows] == ["verified", "verified"]
    assert all(str(rank) in row for rank, row in enumerate(rows)), rows


def test_a_node_without_the_filter_is_named_with_the_reason_and_the_job_runs_as_it_was(driver: Path, tmp_path: Path) -> None:
    """Its `counterpoint run` started it, but a wrapper there drops LD_PRELOAD."""
    port = free_port()
    commands = [[*ranks_of_node(node=node, num_nodes=2, port=port), JOB, driver, "--steps", "20"] for node in range(2)]
    commands[1] = ["env", "-u", "LD_PRELOAD", *commands[1]]
    with Nodes(tmp_path, supervised(("--strict", "--plan", priority_plan(tmp_path)), commands)) as nodes:
        statuses, errors = nodes.end()
    (line,) = [line for line in own_lines(errors) if "no filter" in line and "strict" not in line]
    host = socket.gethostname()
    assert f"ranks 2-3 (host {host}): no filter, because LD_PRELOAD does not name it there" in line
    assert "Keep LD_PRELOAD" in line
    assert "the job runs unchanged" in line
    assert max(statuses) == 3, "with --strict that is an error"


def test_a_node_that_nobody_supervises_is_named_as_well(driver: Path, tmp_path: Path) -> None:
    port = free_port()
    job = [JOB, driver, "--steps", "10", "--absence-s", "6"]
    commands = [[*ranks_of_node(node=node, num_nodes=2, port=port), *job] for node in range(2)]
    started = [*supervised(("--plan", priority_plan(tmp_path)), commands[:1]), commands[1]]
    with Nodes(tmp_path, started) as nodes:
        statuses, errors = nodes.end()
    assert statuses == [0, 0], errors
    (line,) = [line for line in own_lines(errors) if "no filter" in line]
    assert "ranks 2-3: no filter and no agent reported within 6 s of rank 0" in line
    assert "Start `counterpoint run` on each node" in line


@pytest.mark.parametrize(
    ("per_node", "lost", "left"),
    [(1, "rank 2", ("0", "1")), pytest.param(2, "ranks 4-5", ("0-1", "2-3"), marks=pytest.mark.slow)],
)
def test_a_plan_reaches_all_nodes_and_a_lost_one_is_named_in_one_line(
    per_node: int, lost: str, left: tuple[str, ...], driver: Path, tmp_path: Path
) -> None:
    """Under static rendezvous; nobody hangs, and the nodes that are left prove what took effect on them."""
    port = free_port()
    job = [JOB, driver, "--steps", "1000000", "--began", tmp_path / "rank"]
    commands = [[*torchrun(NUM_NODES, per_node, *static(node, port)), *job] for node in range(NUM_NODES)]
    everyone = range(NUM_NODES * per_node)
    with Nodes(tmp_path, supervised(("--plan", priority_plan(tmp_path)), commands)) as nodes:
        deadline = time.monotonic() + LIMIT_S
        while not all((tmp_path / f"rank{rank}").exists() for rank in everyone):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        kill_with_descendants(nodes.processes[-1].pid)
        statuses, errors = nodes.end()
    assert all(statuses[:-1]), "torchrun says that ranks failed"
    (line,) = [line for line in own_lines(errors[:-1]) if "heard of" in line]
    assert f"{lost} (host " in line
    assert "lost, or ended without a word" in line
    assert [(tmp_path / f"rank{rank}").read_text() for rank in everyone] == ["-5"] * len(everyone), "as the driver got it"
    rows = [line.split() for text in errors[:-1] for line in text.splitlines() if line.startswith("priority")]
    assert sorted((row[3], row[-1]) for row in rows) == [(ranks, "verified") for ranks in left], errors
