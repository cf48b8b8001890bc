"""How fast, and in how much memory, a large trace is read: a shipped trace repeated to the size wanted, in a fresh process.

    python -m benchmarks.trace_reading [--megabytes 200] [--write]

Prints seconds (best and all of the runs) and peak resident memory, plain and compressed, and with --write stores them with
the conditions in benchmarks/results/trace_reading.json. The target: 200 MB within 6 s and 1.5 GB on 2 cores. Linux only: the
peak is VmHWM of the reading process (getrusage's would include what this process held when it forked).
"""

import argparse
import datetime
import gzip
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "examples" / "traces" / "ddp.rank0.json.gz"
RESULT = ROOT / "benchmarks" / "results" / "trace_reading.json"
NUM_RUNS = 3
READER = r"""
import json, re, sys, time
from pathlib import Path
from counterpoint.traces import read_trace
begin = time.perf_counter()
result = read_trace(sys.argv[1])
seconds = time.perf_counter() - begin
peak = 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])
print(json.dumps({"seconds": seconds, "peak_bytes": peak, "num_steps": result.num_steps}))
"""


def large_trace(megabytes: int) -> bytes:
    """The shipped trace again and again, each time later and with correlations of its own, to at least this size."""
    document: dict[str, Any] = json.loads(gzip.decompress(SOURCE.read_bytes()))
    events = document["traceEvents"]
    span_us = 2 * max(event.get("dur", 0) for event in events)
    repeats = -(-megabytes * 1_000_000 // len(json.dumps(events)))
    document["traceEvents"] = [repeated(event, number, span_us) for number in range(repeats) for event in events]
    return json.dumps(document).encode()


def repeated(event: dict[str, Any], number: int, span_us: float) -> dict[str, Any]:
    """One event moved to repetition `number`."""
    arguments = event.get("args", {})
    if "correlation" in arguments:
        arguments = arguments | {"correlation": arguments["correlation"] + number * 10_000_000}
    return event | {"ts": event["ts"] + number * span_us, "args": arguments}


def measure(path: Path) -> dict[str, Any]:
    """Read `path` in fresh processes; the best time, all times and the highest peak."""
    runs = []
    for _ in range(NUM_RUNS):
        output = subprocess.run([sys.executable, "-c", READER, str(path)], check=True, capture_output=True, text=True).stdout
        runs.append(json.loads(output))
    return {
        "file_bytes": path.stat().st_size,
        "num_steps": runs[0]["num_steps"],
        "best_seconds": round(min(run["seconds"] for run in runs), 3),
        "all_seconds": [round(run["seconds"], 3) for run in runs],
        "peak_bytes": max(run["peak_bytes"] for run in runs),
    }


def conditions() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": processor_name(),
        "num_cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "msgspec": version("msgspec"),
        "counterpoint": version("counterpoint"),
    }


def processor_name() -> str:
    """The CPU's name, from the system where it says so."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--write", action="store_true", help="store the figures in benchmarks/results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plain, packed = Path(folder) / "large.json", Path(folder) / "large.json.gz"
        text = large_trace(arguments.megabytes)
        plain.write_bytes(text)
        packed.write_bytes(gzip.compress(text, 6))
        del text
        figures = {"plain": measure(plain), "compressed": measure(packed)}
    for name, figure in figures.items():
        print(
            f"{name}: {figure['file_bytes'] / 1e6:.1f} MB, {figure['num_steps']} steps, best {figure['best_seconds']:.2f} s "
            f"of {figure['all_seconds']}, peak {figure['peak_bytes'] / 1e9:.2f} GB"
        )
    if arguments.write:
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(json.dumps({"source": SOURCE.name, "conditions": conditions(), **figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
