"""Runs the installed command as a user would, in a process and a folder of its own."""

import os
import subprocess
import sys
from pathlib import Path

COUNTERPOINT = Path(sys.executable).with_name("counterpoint")
TRACES = Path(__file__).parents[2] / "examples" / "traces"


def counterpoint(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """The ended process, with its output as text. `environment` is added to this process's, less its COLUMNS."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR", "NO_COLOR")}
    return subprocess.run(
        [COUNTERPOINT, *arguments],
        cwd=cwd,
        env=inherited | environment,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )


def refusal(*arguments: str | Path, cwd: Path | None = None) -> str:
    """What the command says when it refuses: one line, exit code 2, nothing on standard output."""
    done = counterpoint(*arguments, cwd=cwd)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("counterpoint: ")
    assert done.stderr.endswith(".\n")
    return done.stderr.removeprefix("counterpoint: ").rstrip("\n")
