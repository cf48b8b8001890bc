"""Starts a job on several ranks of this machine's CPU, as torchrun would, and waits for them with a limit."""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from helpers.ranks_of_node import free_port

HELPERS = Path(__file__).parent
JOBS = HELPERS / "jobs"
TESTS = HELPERS.parent
NUM_SERVERS = 2  # even and odd ranks have one each
LAUNCHED_LIMIT_S = 220.0  # before the test that waits for the launcher gives up


class Ended(NamedTuple):
    """What one rank left behind."""

    status: int
    output: str
    errors: str


class RankServer:
    """A process that ranks are forked from (`rank_server.py`)."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._process = subprocess.Popen(
            [sys.executable, str(HELPERS / "rank_server.py")],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # so that close() ends its forks, too
        )
        self._is_ready = False
        atexit.register(self.close)

    def wait_until_ready(self) -> None:
        """It has imported what it imports, so that ranks begin together and come within a job's time-outs."""
        self._is_ready = self._is_ready or self._process.stdout.readline() == b"ready\n"
        assert self._is_ready, f"server {self._number} of ranks has ended"

    def start(self, asked: list[dict[str, Any]]) -> None:
        """Begin the ranks that are asked for, all at once; each names the files of what it prints."""
        self._asked = asked
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")

    def ended(self, deadline: float) -> list[int]:
        """The statuses of the ranks. Raises `TimeoutError` if one has not ended by then."""
        ready, _, _ = select.select([self._process.stdout], [], [], max(0.1, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"a rank has not ended, or has not begun: {[each['errors'] for each in self._asked]}")
        return list(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the server, and the ranks that it runs."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


server = cache(RankServer)


def forked_ranks(num_ranks: int, script: Path, *arguments: str) -> list[str]:
    """A launcher's command, which needs no GPU: forks of the servers become its ranks, and find each other as torchrun's."""
    return [sys.executable, str(JOBS / "forked_ranks.py"), _launcher_socket(), str(num_ranks), str(script), *arguments]


@cache
def _launcher_socket() -> str:
    """The address at which a thread of this process waits for launchers, one at a time."""
    folder = tempfile.TemporaryDirectory(prefix="forked-ranks-")
    atexit.register(folder.cleanup)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path := str(Path(folder.name) / "socket"))
    listening.listen()
    threading.Thread(target=_serve_launchers, args=[listening], daemon=True).start()
    return path


def _serve_launchers(listening: socket.socket) -> None:
    while True:
        connection, _ = listening.accept()
        with connection:
            status = _launch(json.loads(connection.makefile().readline()))
            connection.sendall(f"{status}\n".encode())


def _launch(asked: dict[str, Any]) -> int:
    """Run the ranks of a launcher, with its streams, and return its status."""
    environment = asked["environment"] | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    streams = [[f"/proc/{asked['launcher']}/fd/{number}" for number in (1, 2)]] * asked["num_ranks"]
    try:
        return max(map(abs, _statuses(asked["words"], environment, streams, LAUNCHED_LIMIT_S)))
    except TimeoutError:
        return 1


def run_ranks(job: str, num_ranks: int, *arguments: str, folder: Path, limit_s: float = 200.0) -> list[Ended]:
    """Run `jobs/JOB.py` on `num_ranks` ranks that meet through a file in `folder`; ranks left at the limit are killed."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "MEETING_FILE": str(folder / "meeting"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    files = [[str(folder / f"{name} of rank {rank}") for name in ("output", "errors")] for rank in range(num_ranks)]
    statuses = _statuses([str(JOBS / f"{job}.py"), *arguments], environment, files, limit_s)
    texts = [[Path(each).read_text(encoding="utf-8") for each in pair] for pair in files]
    return [Ended(status, *pair) for status, pair in zip(statuses, texts, strict=True)]


def _statuses(words: list[str], environment: dict[str, str], streams: list[list[str]], limit_s: float) -> list[int]:
    """Run a script and its arguments on a rank for each pair of streams, the files for output and errors. Returns how each
    rank ended. Raises `TimeoutError`, and kills the ranks that have not ended.
    """
    asked = [
        {
            "job": words[0],
            "arguments": words[1:],
            "environment": {**environment, "WORLD_SIZE": str(len(streams)), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            "output": output,
            "errors": errors,
        }
        for rank, (output, errors) in enumerate(streams)
    ]
    servers = [server(number) for number in range(min(len(asked), NUM_SERVERS))]
    for each in servers:
        each.wait_until_ready()
    for number, each in enumerate(servers):
        each.start(asked[number::NUM_SERVERS])
    deadline = time.monotonic() + limit_s
    statuses = [0] * len(asked)
    try:
        for number, each in enumerate(servers):
            statuses[number::NUM_SERVERS] = each.ended(deadline)
    except BaseException:
        for each in servers:
            each.close()
        server.cache_clear()
        raise
    return statuses


def lines_of(ended: list[Ended]) -> list[list[str]]:
    """What each rank printed; every rank must have ended well."""
    failed = [
        f"rank {rank} ended with {each.status}: {each.output[-1000:]}{each.errors[-3000:]}"
        for rank, each in enumerate(ended)
        if each.status
    ]
    assert not failed, "\n".join(failed)
    return [each.output.splitlines() for each in ended]


def said(lines: list[str]) -> dict[str, str]:
    """Sections' lines by what stands before the colon."""
    return dict(line.split(": ", 1) for line in lines)
