"""Under what conditions a result was obtained, and where results are kept."""

import argparse
import json
import os
import platform
import subprocess
from datetime import date
from importlib.metadata import version
from pathlib import Path

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
