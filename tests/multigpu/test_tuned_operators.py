"""Operators' schedules chosen by measurement on two GPUs, from Python and from the command line."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from counterpoint.controls import ScheduleChoice
from counterpoint.plan import load_plan

Start = Callable[..., subprocess.CompletedProcess[str]]


def test_calls_are_measured_as_they_are_replayed_and_the_plan_is_in_force(start_ranks: Start) -> None:
    done = start_ranks("tuned_operators", limit_s=300)
    print(done.stdout[-4000:], done.stderr[-2000:])
    assert done.returncode == 0
    assert "tuned: ok" in done.stdout.splitlines()


@pytest.mark.usefixtures("own_gpus")
def test_the_command_writes_a_plan_for_both_passes(tmp_path: Path) -> None:
    arguments = "schedule tune all_gather_matmul --rows 8192 --inner 4096 --columns 3584 -o schedules.toml"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "counterpoint"]
    done = subprocess.run(
        [*command, *arguments.split()], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    print(done.stdout[-4000:], done.stderr[-2000:])
    assert done.returncode == 0
    directives = load_plan(tmp_path / "schedules.toml").directives
    assert [directive.match.name.split(" of ")[0] for directive in directives] == [
        "all_gather_matmul",
        "all_gather_matmul backward",
    ]
    assert all(isinstance(control, ScheduleChoice) for directive in directives for control in directive.controls)
