"""`counterpoint run` on two GPUs: the job written to starve its collectives, bare, tuned and under the plan found."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from counterpoint.plan import load_plan

EXAMPLE = Path(__file__).parents[2] / "benchmarks" / "jobs" / "starved.py"
LIMIT_S = 300
MOST_LEFT = 0.85  # of a step. A fifth less was the aim; 18 % less is what 2 H200s reached (docs/run.md)


def run(*options: str, steps: int = 440) -> tuple[float, list[str], str]:
    """Ms per step, losses, and what was said."""
    prefix = [sys.executable, "-m", "counterpoint", "run", *options, "--"] if options else []
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*prefix, *torchrun, str(EXAMPLE), "--steps", str(steps)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    print(ended.stdout[-300:], ended.stderr[-4000:])
    assert ended.returncode == 0
    found = re.search(r"last half: ([\d.]+) ms", ended.stdout)
    assert found is not None
    return float(found[1]), re.findall(r"loss (\S+)", ended.stdout), ended.stderr


@pytest.mark.usefixtures("own_gpus")
def test_a_starved_job_is_15_percent_shorter_by_tuning_alone_and_by_the_plan_found(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    bare_ms, losses, _ = run()
    tuned_ms, tuned_losses, _ = run("--tune", "-o", str(plan))
    planned_ms, planned_losses, said = run("--strict", "--plan", str(plan))
    assert load_plan(plan).verdict == "GAIN"
    assert losses == tuned_losses == planned_losses
    assert "verified" in said
    assert max(tuned_ms, planned_ms) < MOST_LEFT * bare_ms
