"""How a command that several ranks run ends this process, whatever happened."""

import shlex
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from counterpoint.cuda.ranks import join_ranks
from counterpoint.errors import INSTALL, DeviceError


@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(2)", 2, ""),
        ("sys.exit('no')", 1, ""),
        ("raise DeviceError('No GPU. Get one.')", 2, "counterpoint: No GPU. Get one."),
        ("raise ValueError('ours')", 1, "ValueError: ours"),
        ("raise KeyboardInterrupt", 130, ""),
        ("raise BrokenPipeError", 141, ""),
    ],
)
def test_every_ending_has_its_status_and_no_thread_is_waited_for(ending: str, status: int, said: str) -> None:
    code = (
        "import sys, threading\n"
        "from counterpoint.cuda.ranks import run_and_leave\n"
        "from counterpoint.errors import DeviceError\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        f"def command():\n    {ending}\n"
        "run_and_leave(command)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == status
    assert ended.stderr.strip().splitlines()[-1:] == ([said] if said else [])


def test_a_rank_ends_after_the_others_have_come_to_their_ends(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code = (
        "import sys, time\n"
        "import torch.distributed as dist\n"
        "from counterpoint.cuda.ranks import run_and_leave\n"
        "rank = int(sys.argv[1])\n"
        f"dist.init_process_group('gloo', 'file://{tmp_path}/meeting', rank=rank, world_size=2)\n"
        "run_and_leave(lambda: (time.sleep(2 * rank), print(time.time(), flush=True)))\n"
    )
    ranks = [subprocess.Popen([sys.executable, "-c", code, str(rank)], stdout=subprocess.PIPE, text=True) for rank in (0, 1)]
    assert ranks[0].wait(timeout=60) == 0
    ended = time.time()
    outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert ended > float(outputs[1]) > float(outputs[0]) + 1


def test_what_is_to_be_installed_has_the_bounds_of_the_extra_and_can_be_pasted() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert f"Install it: pip install {shlex.join(project['optional-dependencies']['cuda'])}." == INSTALL


def test_without_torch_it_is_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DeviceError) as problem:
        join_ranks("Estimate.")
    assert str(problem.value) == f"'torch' is needed to run on GPUs and is not installed. {INSTALL} Estimate."


def test_the_bindings_are_asked_for_only_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = pytest.importorskip("torch").cuda
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"^No GPU is visible"):
        join_ranks()
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    with pytest.raises(DeviceError, match=r"^'cuda-bindings' is needed to run on GPUs and is not installed"):
        join_ranks()
