"""What controls do beside a real all-reduce on two GPUs, and how ranks fail together."""

import re
import subprocess
from collections.abc import Callable

import pytest

Start = Callable[..., subprocess.CompletedProcess[str]]
SURVIVES_S = 60
"""How long torchrun does not look for dead ranks: by default it would end the other after 0.1 s, which has its own 15 s."""


def figures(output: str, name: str) -> dict[str, float]:
    line = next(line for line in output.splitlines() if line.startswith(f"{name}:"))
    return {key: float(value) for key, value in re.findall(r"(\w+)=([\d.]+)", line)}


@pytest.mark.usefixtures("own_gpus")
def test_a_capped_kernel_and_an_all_reduce_run_side_by_side(start_ranks: Start) -> None:
    done = start_ranks("overlap")
    print(done.stdout, done.stderr[-2000:])
    assert done.returncode == 0
    lone, capped, bare = (figures(done.stdout, name) for name in ("lone", "cap", "cap without carveout"))
    assert capped["waits"] + capped["collective"] < 1.5 * lone["collective"]
    assert bare["waits"] > 500, "without the carveout the collective waits for a CTA of 1 ms to retire"
    assert "states=verified" in done.stdout


@pytest.mark.parametrize("fault", ["different steps", "a rank dies"])
def test_ranks_that_cannot_go_on_say_so_in_one_line_and_do_not_hang(start_ranks: Start, fault: str) -> None:
    options = ("--monitor-interval", str(SURVIVES_S)) if fault == "a rank dies" else ()
    done = start_ranks("faults", fault, limit_s=SURVIVES_S + 60, torchrun=options)
    lines = [line for line in done.stdout.splitlines() if line.startswith("counterpoint:")]
    assert lines, done.stdout + done.stderr[-3000:]
    expected = "captured different steps" if fault == "different steps" else "Rank 1 did not reach the choice of a plan"
    assert all(expected in line or "did not end" in line for line in lines), lines
