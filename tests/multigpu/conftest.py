"""Tests that need two GPUs or more. Each starts its own ranks with torchrun and has a limit on its time. On a machine with
one GPU, two ranks share it, and tests of times are skipped.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

JOBS = Path(__file__).parent / "jobs"
SHARE = Path(__file__).parents[1] / "helpers" / "share_gpu.py"
Start = Callable[..., subprocess.CompletedProcess[str]]


def num_gpus() -> int:
    """GPUs that torch sees; 0 without torch."""
    try:
        import torch  # noqa: PLC0415  a machine without torch skips
    except ImportError:
        return 0
    return torch.cuda.device_count()


def sharing() -> tuple[str, ...]:
    """What torchrun starts before a job: nothing where each of two ranks has a GPU. Skips without a GPU."""
    found = num_gpus()
    if found == 0:
        pytest.skip("needs a GPU, found none")
    return (str(SHARE),) if found == 1 else ()


@pytest.fixture
def four_ranks() -> tuple[str, ...]:
    """Options of torchrun for four ranks, with a GPU each or all on one. Skips with two or three GPUs."""
    if num_gpus() in (2, 3):
        pytest.skip(f"needs 4 GPUs, or one that ranks share, found {num_gpus()}")
    return ("--nproc-per-node", "4")


@pytest.fixture(scope="session")
def own_gpus() -> None:
    """Skip where ranks would share a GPU: a test of times, of one rank's want of memory, or of NCCL's kernel, beside which a
    host node of its network would stand in captures.
    """
    if num_gpus() < 2:
        pytest.skip(f"needs 2 GPUs, found {num_gpus()}")


@pytest.fixture(scope="session")
def start_ranks_once() -> Start:
    """As `start_ranks`, for fixtures that several tests share."""
    shared = sharing()

    def start(
        name: str, *arguments: str, limit_s: float = 150, torchrun: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            *torchrun,
            *shared,
            str(JOBS / f"{name}.py"),
            *arguments,
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)

    return start


@pytest.fixture
def start_ranks(start_ranks_once: Start) -> Start:
    """Runs `jobs/NAME.py` on two ranks, with these options of torchrun, and returns what it printed."""
    return start_ranks_once
