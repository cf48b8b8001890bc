"""What the make targets would run, without running it."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def commands(target: str) -> str:
    return subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_plain_make_prints_what_each_target_does() -> None:
    printed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    makefile = (ROOT / "Makefile").read_text()
    described = re.findall(r"^make ([a-z-]+) ", printed, re.MULTILINE)
    assert {"test", "demo", "wheel"} <= set(described)
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in described)
    assert "PHONY" not in printed


def test_gpu_tests_that_are_skipped_say_why() -> None:
    assert "pytest -rs " in commands("test-gpu")
