"""A fork server for the command: it imports what commands import once, and each command is a fork of it.

Importing takes a command a third of a second of processor time, more than most commands run. A fork has the arguments, the
environment, the folder and the streams that it is asked to have, runs the entry point that pip installs, and ends as any
Python process does. It has its server's hash seed.
"""

import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # of Linux' prctl
MOST_BYTES = 1 << 17  # of one message; a socket's buffer holds more
PRELOADED = (
    "counterpoint.cli.main",
    "counterpoint.planner",
    "counterpoint.report.summary",
    "counterpoint.report.text",
    "counterpoint.validation.bounds",
    "rich.table",
    "tomllib",
)


class CommandServer:
    """The server, as the tests see it."""

    def __init__(self) -> None:
        self._own, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(others.fileno())],
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
                status = int(self._own.recv(MOST_BYTES))
            except BaseException:
                self.close()
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


def accept_commands(connection: socket.socket) -> None:
    """Fork for each request and tell the fork's status as `subprocess` counts it; returns in the fork, ready to run it."""
    while True:
        request, streams, _, _ = socket.recv_fds(connection, MOST_BYTES, 2)
        if not request:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            connection.close()
            _become(json.loads(request), streams)
            return
        for stream in streams:
            os.close(stream)
        connection.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _become(asked: dict[str, Any], streams: list[int]) -> None:
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["cwd"])
    sys.argv = asked["words"]


if __name__ == "__main__":
    sys.path[0] = str(Path(sys.executable).parent)  # the folder of the installed command
    gc.disable()  # imports make much and drop little
    for name in PRELOADED:
        import_module(name)
    gc.enable()
    gc.freeze()
    accept_commands(socket.socket(fileno=int(sys.argv[1])))
    import_module("counterpoint_command").main()
