"""Starts a job on several ranks of this machine's CPU, as torchrun would, and waits for them with a limit."""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

HELPERS = Path(__file__).parent
JOBS = HELPERS / "jobs"
TESTS = HELPERS.parent
NUM_SERVERS = 2  # even and odd ranks have one each


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

    def ended(self, deadline: float) -> list[Ended]:
        """What the ranks left behind. Raises `TimeoutError` if one has not ended by then."""
        ready, _, _ = select.select([self._process.stdout], [], [], max(0.1, deadline - time.monotonic()))
        files = [(Path(each["output"]), Path(each["errors"])) for each in self._asked]
        if not ready:
            raise TimeoutError(f"a rank has not ended, or has not begun: {files}")
        statuses = json.loads(self._process.stdout.readline())
        return [
            Ended(status, *(path.read_text(encoding="utf-8") for path in pair))
            for status, pair in zip(statuses, files, strict=True)
        ]

    def close(self) -> None:
        """End the server, and the ranks that it runs."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


server = cache(RankServer)


def run_ranks(job: str, num_ranks: int, *arguments: str, folder: Path, limit_s: float = 200.0) -> list[Ended]:
    """Run `jobs/JOB.py` on `num_ranks` ranks that meet through a file in `folder`; ranks left at the limit are killed."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "WORLD_SIZE": str(num_ranks),
        "MEETING_FILE": str(folder / "meeting"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    asked = [
        {
            "job": str(JOBS / f"{job}.py"),
            "arguments": arguments,
            "environment": {**environment, "RANK": str(rank)},
            "output": str(folder / f"output of rank {rank}"),
            "errors": str(folder / f"errors of rank {rank}"),
        }
        for rank in range(num_ranks)
    ]
    servers = [server(number) for number in range(min(num_ranks, NUM_SERVERS))]
    for each in servers:
        each.wait_until_ready()
    for number, each in enumerate(servers):
        each.start(asked[number::NUM_SERVERS])
    deadline = time.monotonic() + limit_s
    ended: dict[int, Ended] = {}
    try:
        for number, each in enumerate(servers):
            ended.update(zip(range(number, num_ranks, NUM_SERVERS), each.ended(deadline), strict=True))
    except BaseException:
        for each in servers:
            each.close()
        server.cache_clear()
        raise
    return [ended[rank] for rank in range(num_ranks)]


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
