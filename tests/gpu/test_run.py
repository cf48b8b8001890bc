"""`counterpoint run` on one GPU: PyTorch's own launches reach the filter, are changed as planned, and compute the same."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from counterpoint.controls import Control, ResidencyCap
from counterpoint.plan import Directive, Match, Plan, save_plan

CODE = (
    "import torch\n"
    "x = torch.arange(1 << 22, device='cuda', dtype=torch.float32)\n"
    "y = x\n"
    "for _ in range(50):\n"
    "    y = y * 1.0001 + 1\n"
    "print(y.double().sum().item().hex())\n"
)


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    prefix = [sys.executable, "-m", "counterpoint", "run", *options, "--"] if options else []
    environment = os.environ | {"COUNTERPOINT_CACHE_DIR": str(folder / "cache"), "COLUMNS": "220"}
    return subprocess.run(
        [*prefix, sys.executable, "-c", CODE], capture_output=True, text=True, timeout=240, env=environment, check=False
    )


def saved(folder: Path, name: str, *controls: Control) -> str:
    directive = Directive(match=Match(name=name), controls=controls, reason="test")
    save_plan(Plan(verdict="GAIN", directives=(directive,)), folder / "plan.toml")
    return str(folder / "plan.toml")


@pytest.mark.parametrize("ctas_per_sm", [1, 4])
def test_a_cap_reaches_pytorchs_launches_is_verified_and_changes_no_result(tmp_path: Path, ctas_per_sm: int) -> None:
    dynamic = {1: 115_840, 4: 45_696}[ctas_per_sm]  # tests/data/occupancy_vectors.csv: from here on no more live on an SM
    cap = ResidencyCap(ctas_per_sm=ctas_per_sm, dynamic_shared_bytes=dynamic)
    plan = saved(tmp_path, "*elementwise_kernel*", cap)
    bare, capped = run(tmp_path), run(tmp_path, "--strict", "--plan", plan)
    print(capped.stderr)
    assert capped.returncode == 0, capped.stderr
    assert capped.stdout == bare.stdout != ""
    row = next(line for line in capped.stderr.splitlines() if line.startswith("residency_cap"))
    assert row.rstrip().endswith("verified")
    applied, matched = (int(number) for number in re.findall(r"(\d+) of (\d+)", row)[-1])
    # arange and the conversion to double are kernels of that name, too; how many is torch's business
    assert applied == matched >= 100, "a multiplication and an addition in each of 50 rounds, and all of them capped"


def test_a_plan_for_a_kernel_that_never_runs_fails_only_under_strict(tmp_path: Path) -> None:
    plan = saved(tmp_path, "no_such_kernel", ResidencyCap(ctas_per_sm=1, dynamic_shared_bytes=115_840))
    assert run(tmp_path, "--plan", plan).returncode == 0
    assert run(tmp_path, "--plan", plan, "--strict").returncode == 3
