"""Runs the installed command as a user would, in a process and a folder of its own.

The process is a fork of a server that has imported it already, but where a variable asks for another start of Python.
"""

import atexit
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from helpers.command_server import CommandServer

COUNTERPOINT = Path(sys.executable).with_name("counterpoint")
TRACES = Path(__file__).parents[2] / "examples" / "traces"
LIMIT_S = 300
READ_AT_THE_START = ("PYTHON", "LD_", "LC_", "LANG")  # by Python itself, or by the loader


@cache
def server() -> CommandServer:
    """The one of this process."""
    started = CommandServer()
    atexit.register(started.close)
    return started


def counterpoint(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """The ended process, with its output as text. `environment` is added to this process's, less its COLUMNS."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR", "NO_COLOR")}
    words, variables = [str(COUNTERPOINT), *map(str, arguments)], inherited | environment
    if not any(name.startswith(READ_AT_THE_START) for name in environment):
        return server().run(words, cwd=cwd or Path.cwd(), environment=variables, limit_s=LIMIT_S)
    return subprocess.run(words, cwd=cwd, env=variables, capture_output=True, encoding="utf-8", timeout=LIMIT_S, check=False)


def refusal(*arguments: str | Path, cwd: Path | None = None) -> str:
    """What the command says when it refuses: one line, exit code 2, nothing on standard output."""
    done = counterpoint(*arguments, cwd=cwd)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("counterpoint: ")
    assert done.stderr.endswith(".\n")
    return done.stderr.removeprefix("counterpoint: ").rstrip("\n")
