"""Starts a job on several ranks of this machine's CPU, as torchrun would, and waits for them with a limit."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

JOBS = Path(__file__).parent / "jobs"
TESTS = JOBS.parents[1]


class Ended(NamedTuple):
    """What one rank left behind."""

    status: int
    output: str
    errors: str


def run_ranks(job: str, num_ranks: int, *arguments: str, folder: Path, limit_s: float = 200.0) -> list[Ended]:
    """Run `jobs/JOB.py` on `num_ranks` ranks that meet through a file in `folder`; ranks left at the limit are killed."""
    command = [sys.executable, str(JOBS / f"{job}.py"), *arguments]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    ranks = []
    for rank in range(num_ranks):
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "MEETING_FILE": str(folder / "meeting"),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        ranks.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")
        )
    deadline = time.monotonic() + limit_s
    try:
        return [_ended(rank, deadline) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.communicate()


def lines_of(ended: list[Ended]) -> list[list[str]]:
    """What each rank printed; every rank must have ended well."""
    for rank, each in enumerate(ended):
        assert each.status == 0, f"rank {rank} ended with {each.status}: {each.output[-1000:]}{each.errors[-3000:]}"
    return [each.output.splitlines() for each in ended]


def said(lines: list[str]) -> dict[str, str]:
    """Sections' lines by what stands before the colon."""
    return dict(line.split(": ", 1) for line in lines)


def _ended(rank: subprocess.Popen[str], deadline: float) -> Ended:
    output, errors = rank.communicate(timeout=max(0.1, deadline - time.monotonic()))
    return Ended(rank.returncode, output, errors)
