"""Runs the installed command as a user would, in a process and a folder of its own.

The process is a fork of a server that has imported it already, but where a variable asks for another start of Python.
"""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

COUNTERPOINT = Path(sys.executable).with_name("counterpoint")
TRACES = Path(__file__).parents[2] / "examples" / "traces"
SERVER = Path(__file__).with_name("command_server.py")
LIMIT_S = 300
MOST_STATUS_BYTES = 16  # of a status in digits
READ_AT_THE_START = ("PYTHON", "LD_", "LC_", "LANG")  # by Python itself, or by the loader


class CommandServer:
    """The process that commands are forked from (`command_server.py`)."""

    def __init__(self) -> None:
        self._own, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER), str(others.fileno())],
            pass_fds=[others.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        others.close()

    def run(
        self, words: list[str], *, cwd: Path, environment: dict[str, str], limit_s: float
    ) -> subprocess.CompletedProcess[str]:
        """What `subprocess.run` would return for a command, whose first word is the program. Raises `TimeoutError`."""
        asked = {"words": words, "cwd": str(cwd), "environment": environment}
        with (
            tempfile.TemporaryFile("w+", encoding="utf-8") as output,
            tempfile.TemporaryFile("w+", encoding="utf-8") as errors,
        ):
            socket.send_fds(self._own, [json.dumps(asked).encode()], [output.fileno(), errors.fileno()])
            self._own.settimeout(limit_s)
            try:
                status = int(self._own.recv(MOST_STATUS_BYTES))
            except BaseException:
                self.close()
                server.cache_clear()  # the next command gets another one
                raise
            for stream in (output, errors):
                stream.seek(0)
            return subprocess.CompletedProcess(words, status, output.read(), errors.read())

    def close(self) -> None:
        """End the server, and the command that it runs."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._own.close()


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
