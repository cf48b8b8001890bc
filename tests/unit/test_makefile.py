"""What the make targets would run, without running it."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def commands(target: str) -> str:
    return subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_gpu_tests_that_are_skipped_say_why() -> None:
    assert "pytest -rs " in commands("test-gpu")
