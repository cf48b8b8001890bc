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


def test_the_demo_begins_with_the_trace_of_the_readme_and_ends_with_what_to_try_next() -> None:
    run = [line.split("bin/")[1] for line in commands("demo").splitlines() if "bin/counterpoint" in line]
    assert run[0] in (ROOT / "README.md").read_text()  # test_readme.py: its verdict is GAIN
    assert run[1:] == ["counterpoint demo"]  # tests of the command: it ends with what to try next


def test_gpu_tests_that_are_skipped_say_why() -> None:
    assert "pytest -rs " in commands("test-gpu")
