"""The start-up hook inside a job: it chains to the next one, tells of optimizer steps, and never breaks what it is in."""

import gc
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from counterpoint.doctor.rules.queues import NAME as CONNECTIONS
from counterpoint.integrations import job_paths
from counterpoint.ranks import RANK_VARIABLES
from counterpoint.supervised.agent import RANK_PROCESS_VARIABLE, SUCCEEDS_AFTER, JobAgent
from counterpoint.supervised.environment import IN_JOB, QUEUES_VARIABLE
from counterpoint.supervised.settings import DIRECTORY_VARIABLE, LiveSettings, read_record, write_settings

STEP = (
    "import torch\n"
    "model = torch.nn.Linear(2, 2)\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "for _ in range(3):\n"
    "    model(torch.ones(1, 2)).sum().backward()\n"
    "    optimizer.step()\n"
    "print('done')\n"
)

TELLING_AGENT = """
import os
class Agent:
    is_retired = False
    def optimizer_made(self): pass
    def optimizer_stepped(self, optimizer):
        os.getpid()  # which torch.compile cannot trace
        print(type(optimizer).__name__, end=" ")
agent = Agent()
def agent_of_job(): return agent
"""


def python(code: str, directory: Path | None, *behind: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A Python with the hook in front of its path, and other folders behind it."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RANK", DIRECTORY_VARIABLE)}
    if directory is not None:
        inherited[DIRECTORY_VARIABLE] = str(directory)
    inherited["PYTHONPATH"] = os.pathsep.join(map(str, (IN_JOB, *behind)))
    return subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | {"OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def hook_in(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(text)
    return folder


def test_the_next_start_up_hook_runs_and_is_the_one_that_is_imported(tmp_path: Path) -> None:
    other = hook_in(tmp_path / "other", "NAME = 'other'\nprint('other ran')\n")
    ended = python("import sys, sitecustomize; print(sitecustomize.NAME)", tmp_path, other)
    assert ended.stdout == "other ran\nother\n", ended.stderr


def test_an_error_in_the_next_hook_is_reported_as_python_does(tmp_path: Path) -> None:
    other = hook_in(tmp_path / "other", "raise ValueError('theirs')\n")
    ended = python("print('went on')", tmp_path, other)
    bare = subprocess.run(
        [sys.executable, "-c", "print('went on')"],
        env=os.environ | {"PYTHONPATH": str(other)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ended.stdout, ended.returncode) == (bare.stdout, bare.returncode) == ("went on\n", 0)
    assert "theirs" in ended.stderr
    assert "theirs" in bare.stderr


def test_the_hooks_folder_is_gone_from_the_search_path(tmp_path: Path) -> None:
    ended = python(f"import sys; print({str(IN_JOB)!r} in sys.path)", tmp_path)
    assert ended.stdout == "False\n"


def test_nothing_is_watched_outside_of_a_supervised_job() -> None:
    ended = python("import sys; print([type(each).__name__ for each in sys.meta_path])", None)
    assert "AwaitedImport" not in ended.stdout


def test_the_module_that_was_awaited_is_as_without_us(tmp_path: Path) -> None:
    code = (
        "import sys, inspect, torch\n"
        "import torch.optim.optimizer as found\n"
        "print(type(found.__spec__.loader).__name__, 'exec_module' in vars(found.__spec__.loader))\n"
        "print('class Optimizer' in inspect.getsource(found))\n"
        "print([type(each).__name__ for each in sys.meta_path].count('AwaitedImport'))\n"
    )
    ended = python(code, tmp_path)
    assert ended.stdout == "SourceFileLoader False\nTrue\n0\n", ended.stderr


def test_a_finder_without_find_spec_is_treated_as_python_treats_it(tmp_path: Path) -> None:
    finder = "class Old:\n    def find_module(self, name, path=None): pass\n"
    other = hook_in(tmp_path / "other", f"import sys\n{finder}sys.meta_path.insert(0, Old())\n")
    write_settings(tmp_path, LiveSettings(is_tuning=True))
    ended = python(STEP, tmp_path, other, RANK="0")
    assert (ended.stdout, ended.stderr) == ("done\n", "")
    assert read_record(tmp_path) is not None, "the agent was told of a step"


def test_a_process_that_is_no_rank_is_left_alone(tmp_path: Path) -> None:
    write_settings(tmp_path, LiveSettings(is_tuning=True))
    ended = python(STEP, tmp_path)
    assert (ended.stdout, ended.stderr) == ("done\n", "")


@pytest.mark.parametrize(
    ("variables", "of_cuda"),
    [({}, "1"), ({QUEUES_VARIABLE: "8"}, "1"), *[({QUEUES_VARIABLE: "8", each: "0"}, "8") for each in RANK_VARIABLES]],
)
def test_cuda_reads_the_queues_that_were_asked_for_a_rank_and_the_job_its_own(
    variables: dict[str, str], of_cuda: str, tmp_path: Path
) -> None:
    code = (
        "import ctypes, os\n"
        "read = ctypes.CDLL(None).getenv\n"
        "read.restype = ctypes.c_char_p\n"
        f"print(os.environ[{CONNECTIONS!r}], read({CONNECTIONS.encode()!r}).decode())"
    )
    ended = python(code, tmp_path, **{CONNECTIONS: "1", **variables})
    assert ended.stdout == f"1 {of_cuda}\n", ended.stderr
    assert python(code, None, **{CONNECTIONS: "1", **variables}).stdout == "1 1\n", "outside of a supervised job"


def test_a_job_that_sets_the_variable_itself_changes_what_it_finds_and_not_what_cuda_reads(tmp_path: Path) -> None:
    code = (
        "import ctypes, os\n"
        "read = ctypes.CDLL(None).getenv\n"
        "read.restype = ctypes.c_char_p\n"
        f"os.environ[{CONNECTIONS!r}] = '1'; os.environ['OTHER'] = 'x'\n"
        f"print(os.environ[{CONNECTIONS!r}], read({CONNECTIONS.encode()!r}), read(b'OTHER'))\n"
        f"del os.environ[{CONNECTIONS!r}], os.environ['OTHER']\n"
        f"print({CONNECTIONS!r} in os.environ, read({CONNECTIONS.encode()!r}), read(b'OTHER'))"
    )
    ended = python(code, tmp_path, RANK="0", **{QUEUES_VARIABLE: "8"})
    assert ended.stdout == "1 b'8' b'x'\nFalse b'8' None\n", ended.stderr


def test_a_rank_without_a_gpu_goes_on_and_leaves_it_to_the_supervisor_to_say_so(tmp_path: Path) -> None:
    write_settings(tmp_path, LiveSettings(is_tuning=True))
    ended = python(STEP, tmp_path, RANK="0")
    assert (ended.stdout, ended.stderr) == ("done\n", "")
    record = read_record(tmp_path)
    assert record is not None
    assert record.stage == "stopped"
    assert "launched no GPU kernel" in record.notes[0]


def test_a_process_that_a_rank_starts_is_no_rank(tmp_path: Path) -> None:
    write_settings(tmp_path, LiveSettings(is_tuning=True))
    of_rank = {"RANK": "0", "WORLD_SIZE": "2"}
    started = python(STEP, tmp_path, **of_rank, **{RANK_PROCESS_VARIABLE: str(os.getpid())})
    assert (started.stdout, started.stderr) == ("done\n", "")
    noted = python(
        STEP + f"import os\nprint(os.environ[{RANK_PROCESS_VARIABLE!r}] == str(os.getpid()))", tmp_path, **of_rank
    )
    assert noted.stdout == "done\nTrue\n"
    assert "rank 0 does not tune or guard" in noted.stderr, "it is a rank, without a process group"


def test_a_rank_whose_standard_error_is_closed_goes_on(tmp_path: Path) -> None:
    write_settings(tmp_path, LiveSettings(is_tuning=True))
    ended = python(f"import sys\nsys.stderr.close()\n{STEP}", tmp_path, RANK="0")
    assert (ended.returncode, ended.stdout) == (0, "done\n")


@pytest.mark.parametrize("broken", ["import os\nraise ImportError('no counterpoint here')\n", "raise RuntimeError('odd')\n"])
def test_a_python_that_cannot_import_us_says_so_in_one_line_and_goes_on(tmp_path: Path, broken: str) -> None:
    package = tmp_path / "other" / "counterpoint"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(broken)
    ended = python(STEP, tmp_path, package.parent, RANK="0")
    assert ended.stdout == "done\n"
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert "the job runs without it" in ended.stderr


def test_a_compiled_optimizer_step_still_compiles(tmp_path: Path) -> None:
    code = STEP.replace("for _", "stepped = torch.compile(optimizer.step, backend='eager')\nfor _").replace(
        "    optimizer.step()", "    stepped()"
    )
    ended = python(code, tmp_path, RANK="0")
    assert ended.stdout == "done\n", ended.stderr


def told_steps(tmp_path: Path, code: str) -> str:
    """What an agent is told of the steps of `code`, which knows torch, `parameter` and two classes of optimizers."""
    package = tmp_path / "other" / "counterpoint" / "supervised"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "agent.py").write_text(TELLING_AGENT)
    made = (
        "import torch\n"
        "parameter = torch.nn.Parameter(torch.ones(2))\n"
        "parameter.grad = torch.ones(2)\n"
        "class Derived(torch.optim.SGD):\n"
        "    def step(self, closure=None):\n"
        "        return super().step(closure)\n"
        "class Own(torch.optim.Optimizer):\n"
        "    def __init__(self, parameters):\n"
        "        super().__init__(parameters, {})\n"
        "    @torch.no_grad()\n"
        "    def step(self, closure=None):\n"
        "        parameter.add_(parameter.grad)\n"
    )
    ended = python(made + code, tmp_path, tmp_path / "other", RANK="0", TORCH_LOGS="graph_breaks")
    assert ended.returncode == 0, ended.stderr
    assert "agent.py" not in ended.stderr, "torch.compile traced it"
    return ended.stdout.strip()


def test_a_step_that_calls_the_one_it_overrides_is_told_once(tmp_path: Path) -> None:
    plain = "torch.optim.SGD([parameter], lr=0.1).step()\n"  # from now on torch calls hooks for SGD's own step, too
    failed = "try: derived.step(lambda: 1 / 0)\nexcept ZeroDivisionError: pass\n"
    code = f"{plain}derived = Derived([parameter], lr=0.1)\nderived.step()\n{failed}derived.step()\n"
    assert told_steps(tmp_path, code) == "SGD Derived Derived"


def test_a_compiled_step_is_told_and_our_code_is_not_compiled(tmp_path: Path) -> None:
    code = "step = torch.compile(torch.optim.SGD([parameter], lr=0.1).step, backend='eager')\nfor _ in range(3): step()\n"
    assert told_steps(tmp_path, code) == "SGD SGD SGD"


def test_an_optimizer_that_is_compiled_as_one_graph_still_is(tmp_path: Path) -> None:
    code = "step = torch.compile(Own([parameter]).step, backend='eager', fullgraph=True)\nstep()\nstep()\n"
    assert told_steps(tmp_path, f"{code}print(parameter.tolist())\n") == "[3.0, 3.0]"


class Optimizer:
    """All that the agent knows of one."""


@dataclass
class OptimizerOfValues:
    """Like one, but compared by its values."""

    rate: float = 0.1


def counting_agent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[JobAgent, list[object]]:
    counted: list[object] = []
    agent = JobAgent(folder)
    monkeypatch.setattr(agent, "_step_ended", lambda: counted.append(None))
    return agent, counted


@pytest.mark.parametrize("is_collected", [True, False])
def test_another_optimizer_succeeds_at_the_same_step_whenever_the_first_is_collected(
    is_collected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a rank that collects it earlier counts more steps, and takes other paths than the others."""
    agent, counted = counting_agent(tmp_path, monkeypatch)
    first, second = Optimizer(), Optimizer()
    for optimizer in (first, first, second, first):
        agent.optimizer_stepped(optimizer)
    assert len(counted) == 3
    if is_collected:
        del first, optimizer
        gc.collect()
    for _ in range(SUCCEEDS_AFTER + 2):
        agent.optimizer_stepped(second)
    assert len(counted) == 6


def test_optimizers_that_take_turns_do_not_succeed_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, counted = counting_agent(tmp_path, monkeypatch)
    optimizers = [Optimizer() for _ in range(8)]
    for _ in range(5):
        for optimizer in (*optimizers, optimizers[-1]):
            agent.optimizer_stepped(optimizer)
    assert len(counted) == 5


def test_optimizers_that_cannot_be_hashed_mark_and_succeed_as_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data class that compares by value has no hash, and two of them are equal."""
    agent, counted = counting_agent(tmp_path, monkeypatch)
    first, second, third = (OptimizerOfValues() for _ in range(3))
    for optimizer in (first, second, third, second, third):
        agent.optimizer_stepped(optimizer)
    assert len(counted) == 1
    agent.optimizer_stepped(second)
    assert len(counted) == 2


def test_an_optimizer_is_looked_at_only_if_it_would_mark_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for its model takes long, and a job may have an optimizer for each parameter."""
    agent, counted = counting_agent(tmp_path, monkeypatch)
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(8)]
    agent.optimizer_stepped(optimizers[0])
    monkeypatch.setattr(agent, "_tuner", SimpleNamespace(is_step_of_job=job_paths.TorchJobPaths().trains))
    monkeypatch.setattr(job_paths, "modules_of_process", lambda: pytest.fail("looked for models"))
    for _ in range(5):
        for optimizer in optimizers:
            agent.optimizer_stepped(optimizer)
    assert len(counted) == 6


def test_the_first_step_is_one_of_an_optimizer_of_a_parallel_model_if_there_is_any() -> None:
    """Optimizers of a model's copies in another precision mark the steps of such a job, but an inner loop's do not."""
    code = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from counterpoint.integrations.job_paths import TorchJobPaths
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model, paths = DistributedDataParallel(torch.nn.Linear(2, 2)), TorchJobPaths()
copies = torch.optim.SGD([each.detach().clone() for each in model.parameters()], lr=0.1)
found = [paths.may_begin(copies)]
trained = torch.optim.SGD(model.parameters(), lr=0.1)
paths.prepare()
found += [paths.may_begin(copies), paths.may_begin(trained)]
print(found, flush=True)
os._exit(0)
"""
    ended = python(code, None, IN_JOB.parents[2], GLOO_SOCKET_IFNAME="lo")
    assert ended.stdout == "[True, False, True]\n", ended.stderr


def test_marking_a_step_by_hand_outside_of_a_job_does_nothing() -> None:
    ended = python("import counterpoint; print(counterpoint.step())", None)
    assert (ended.stdout, ended.stderr) == ("None\n", "")


@pytest.mark.parametrize("before", ["", "import sys; sys.modules['torch'] = None\n"])
def test_a_mark_never_fails_in_the_job(before: str, tmp_path: Path) -> None:
    """Here `run` left no settings; and a job that marks its steps may have no torch."""
    code = f"{before}import counterpoint\nfor _ in range(2): counterpoint.step()\nprint('done')\n"
    ended = python(code, tmp_path, IN_JOB.parents[2], RANK="0", WORLD_SIZE="1")
    assert ended.stdout == "done\n", ended.stderr
    assert ended.stderr.count("counterpoint: rank 0 does not tune or guard (") == 1
    assert ended.stderr.rstrip().endswith("the job runs unchanged")


def test_the_first_mark_prepares_paths_only_if_no_optimizer_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the ranks have agreed, `prepare` would wrap the library's functions once more, for the rest of the job."""
    for tuner, num_prepared in ((None, 1), (SimpleNamespace(), 0)):
        agent, counted = counting_agent(tmp_path, monkeypatch)
        prepared: list[object] = []
        monkeypatch.setattr(agent, "_must_count_alike", lambda: True)
        monkeypatch.setattr(agent, "_paths", SimpleNamespace(prepare=lambda found=prepared: found.append(None)))
        monkeypatch.setattr(agent, "_tuner", tuner)
        for _ in range(3):
            agent.mark_step()
        assert (len(prepared), len(counted)) == (num_prepared, 2)


def test_the_module_of_the_same_name_as_the_mark_can_still_be_imported() -> None:
    code = "from counterpoint.step import Step\nimport counterpoint\nprint(callable(counterpoint.step), Step.__name__)"
    ended = python(code, None)
    assert ended.stdout == "True Step\n"


@pytest.mark.parametrize(("is_full", "outcome"), [(False, "collectives keep their present path"), (True, "stays active")])
def test_a_rank_whose_store_has_ended_reverts_its_launches_and_leaves_its_paths(
    is_full: bool, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class WithoutStore:
        def fail(self, reason: str) -> bool:
            raise ConnectionError(reason)

        def empty_table(self) -> None:
            if is_full:
                raise OSError

    agent = JobAgent(tmp_path)
    monkeypatch.setattr(agent, "_tuner", WithoutStore())
    agent._retire(ConnectionError("Broken pipe"))
    assert agent.is_retired
    said = capsys.readouterr().err
    assert "rank 0 does not tune or guard (ConnectionError: Broken pipe)" in said
    assert outcome in said
