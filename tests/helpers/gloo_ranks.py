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
from typing import NamedTuple

HELPERS = Path(__file__).parent
JOBS = HELPERS / "jobs"
TESTS = HELPERS.parent


class Ended(NamedTuple):
    """What one rank left behind."""

    status: int
    output: str
    errors: str


class RankServer:
    """The process that ranks of one number are forked from (`rank_server.py`)."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
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
        assert self._is_ready, f"the server of rank {self._rank} has ended"

    def start(self, job: str, arguments: tuple[str, ...], environment: dict[str, str], folder: Path) -> None:
        """Begin a job; what it prints goes to files of the folder."""
        self._files = [folder / f"{kind} of rank {self._rank}" for kind in ("output", "errors")]
        output, errors = map(str, self._files)
        asked = {"job": job, "arguments": arguments, "environment": environment, "output": output, "errors": errors}
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")

    def ended(self, deadline: float) -> Ended:
        """What the job left behind. Raises `TimeoutError` if it has not ended by then."""
        ready, _, _ = select.select([self._process.stdout], [], [], max(0.1, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"rank {self._rank} has not ended, or has not begun: {self._files}")
        status = int(self._process.stdout.readline())
        return Ended(status, *(path.read_text(encoding="utf-8") for path in self._files))

    def close(self) -> None:
        """End the server, and the job that it runs."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


server_of_rank = cache(RankServer)


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
    servers = [server_of_rank(rank) for rank in range(num_ranks)]
    for server in servers:
        server.wait_until_ready()
    for rank, server in enumerate(servers):
        server.start(str(JOBS / f"{job}.py"), arguments, {**environment, "RANK": str(rank)}, folder)
    deadline = time.monotonic() + limit_s
    try:
        return [server.ended(deadline) for server in servers]
    except BaseException:
        for server in servers:
            server.close()
        server_of_rank.cache_clear()
        raise


def lines_of(ended: list[Ended]) -> list[list[str]]:
    """What each rank printed; every rank must have ended well."""
    for rank, each in enumerate(ended):
        assert each.status == 0, f"rank {rank} ended with {each.status}: {each.output[-1000:]}{each.errors[-3000:]}"
    return [each.output.splitlines() for each in ended]


def said(lines: list[str]) -> dict[str, str]:
    """Sections' lines by what stands before the colon."""
    return dict(line.split(": ", 1) for line in lines)
