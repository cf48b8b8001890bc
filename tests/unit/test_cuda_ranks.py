"""How a command that several ranks run ends this process, whatever happened."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(2)", 2, ""),
        ("sys.exit('no')", 1, ""),
        ("raise DeviceError('No GPU. Get one.')", 2, "counterpoint: No GPU. Get one."),
        ("raise ValueError('ours')", 1, "ValueError: ours"),
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
