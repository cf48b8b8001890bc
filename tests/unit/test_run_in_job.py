"""The start-up hook inside a job: it chains to the next one, tells of optimizer steps, and never breaks what it is in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from counterpoint.supervised.agent import RANK_PROCESS_VARIABLE
from counterpoint.supervised.environment import IN_JOB
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


def test_a_process_that_is_no_rank_is_left_alone(tmp_path: Path) -> None:
    write_settings(tmp_path, LiveSettings(is_tuning=True))
    ended = python(STEP, tmp_path)
    assert (ended.stdout, ended.stderr) == ("done\n", "")


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


def test_marking_a_step_by_hand_outside_of_a_job_does_nothing() -> None:
    ended = python("import counterpoint; print(counterpoint.step())", None)
    assert (ended.stdout, ended.stderr) == ("None\n", "")


def test_the_module_of_the_same_name_as_the_mark_can_still_be_imported() -> None:
    code = "from counterpoint.step import Step\nimport counterpoint\nprint(callable(counterpoint.step), Step.__name__)"
    ended = python(code, None)
    assert ended.stdout == "True Step\n"
