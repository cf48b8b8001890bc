"""Examples as a reader starts them, on CPUs."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2"]
LIMIT_S = 240


def test_operators_on_two_ranks_equal_torch_and_say_what_was_picked() -> None:
    ended = subprocess.run(
        [*TORCHRUN, ROOT / "examples" / "operators" / "operators.py"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    equal = [line for line in ended.stdout.splitlines() if "equal to torch's within rounding" in line]
    picked = [line for line in ended.stdout.splitlines() if ", because " in line]
    assert [line.rsplit(": ", 1)[1] for line in equal] == ["True"] * 4
    assert [line.split(": ")[1].split(",")[0] for line in picked] == ["sequential"] * 2 + ["all_peers/2 chunk 1+2"] * 2
