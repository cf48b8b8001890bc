"""A fork server for the command: it imports what commands import once, and each command is a fork of it.

Importing takes a command a third of a second of processor time, more than most commands run. A fork has the arguments, the
environment, the folder and the streams that it is asked to have, runs the entry point that pip installs, and ends as any
Python process does. It has its server's hash seed.
"""

import json
import os
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from forking import end_with_parent, import_for_forks

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


def accept_commands(connection: socket.socket) -> None:
    """Fork for each request and tell the fork's status as `subprocess` counts it; returns in the fork, ready to run it."""
    while True:
        request, streams, _, _ = socket.recv_fds(connection, MOST_BYTES, 2)
        if not request:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            end_with_parent()
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
    import_for_forks(PRELOADED)
    accept_commands(socket.socket(fileno=int(sys.argv[1])))
    import_module("counterpoint_command").main()
