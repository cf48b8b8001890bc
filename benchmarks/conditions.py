"""Under what conditions a result was obtained, and where results are kept."""

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable
from datetime import date
from importlib.metadata import version
from pathlib import Path

from counterpoint.errors import CounterpointError
from counterpoint.validation.records import MeasuredSet
from counterpoint.value import decode_json

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def conditions() -> dict[str, object]:
    """Date, commit, processor and versions."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "date": date.today().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("counterpoint", "msgspec", "numpy")},
        "gpu": "none used",
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def asks_to_write(description: str | None) -> bool:
    """Whether the command line holds `--write`, the only option; read before a benchmark begins."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--write", action="store_true", help="store the result under benchmarks/results/")
    return bool(parser.parse_args().write)


def store(name: str, result: object) -> Path:
    """Write a result with its conditions as JSON."""
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"conditions": conditions(), "result": result}, indent=2) + "\n")
    return path


def measured_in(path: Path) -> MeasuredSet:
    """The measurements that a benchmark saved. Raises `CounterpointError` for another file, and `OSError`."""
    return decode_json(path.read_bytes(), MeasuredSet, CounterpointError, str(path), "Name a file of this benchmark.")


def compare_or_measure(
    parser: argparse.ArgumentParser,
    compared: Callable[[argparse.Namespace], Iterable[str]],
    measure: Callable[[argparse.Namespace], None],
) -> None:
    """Print lines about the files that the command line names. Without any, measure on this GPU, or on all ranks' GPUs.

    A file that cannot be read ends the process with one line and exit code 2.
    """
    parser.add_argument("files", nargs="*", type=Path, help="compare these; without any, measure")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if options.files:
        try:
            print("\n".join(compared(options)))
        except (CounterpointError, OSError) as problem:
            parser.error(str(problem))
        return
    from benchmarks.on_gpus import run_and_leave  # noqa: PLC0415  comparing needs no GPU

    run_and_leave(lambda: measure(options))
