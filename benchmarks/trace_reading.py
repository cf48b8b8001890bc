"""How fast, and in how much memory, a large trace is read: a shipped trace repeated to the size wanted, in a fresh process.

The text is as the profiler wrote it, each repetition later and with correlations and operators of its own. Reading is
`read_activity`: from the file to all GPU operations with their launches and operators, on one core.

    python -m benchmarks.trace_reading [--megabytes 200] [--write]

Prints seconds (best and all of the runs), seconds of processor time and peak resident memory, plain and compressed, and
with --write stores them with the conditions in benchmarks/results/trace_reading.json. The target: 150 MB/s on one core
and 500 MB. Where the load average is above the number of CPUs, processor time counts: the other times hold what others
ran. Linux only: the peak is VmHWM of the reading process (getrusage's would include what this process held at the fork).
"""

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.conditions import RESULTS, ROOT, conditions

SOURCE = ROOT / "examples" / "traces" / "ddp.rank0.json.gz"
RESULT = RESULTS / "trace_reading.json"
EVENTS = b'"traceEvents": ['
NUMBERS = re.compile(rb'("ts": |"correlation": |"External id": )(\d+)')
SPAN_US = 400_000  # longer than the shipped trace
OPERATIONS = 10_000_000  # more than its largest correlation
NUM_RUNS = 3
READER = r"""
import json, re, sys, time
from pathlib import Path
from counterpoint.traces.formats import read_activity
begin, cpu_begin = time.perf_counter(), time.process_time()
result = read_activity(Path(sys.argv[1]))
seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
peak = 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])
found = {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_bytes": peak, "num_steps": len(result.step_windows)}
print(json.dumps(found))
"""


def large_trace(megabytes: int) -> bytes:
    """The shipped trace again and again, each time later and with numbers of its own, to at least this size."""
    text = gzip.decompress(SOURCE.read_bytes())
    begin = text.index(EVENTS) + len(EVENTS)
    end = text.rindex(b"]")
    parts = NUMBERS.split(text[begin:end].strip())
    repeats = -(-megabytes * 1_000_000 // (end - begin))
    return text[:begin] + b",\n  ".join(repeated(parts, number) for number in range(repeats)) + text[end:]


def repeated(parts: list[bytes], number: int) -> bytes:
    """The events of one repetition: `parts` are text, the name of a number and the number in turn."""
    fresh = parts[:]
    for place in range(1, len(parts), 3):
        shift = number * (SPAN_US if parts[place] == b'"ts": ' else OPERATIONS)
        fresh[place + 1] = b"%d" % (int(parts[place + 1]) + shift)
    return b"".join(fresh)


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
        "best_cpu_seconds": round(min(run["cpu_seconds"] for run in runs), 3),
        "all_seconds": [round(run["seconds"], 3) for run in runs],
        "peak_bytes": max(run["peak_bytes"] for run in runs),
    }


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
            f"({figure['best_cpu_seconds']:.2f} s of processor time) of {figure['all_seconds']}, "
            f"peak {figure['peak_bytes'] / 1e9:.2f} GB"
        )
    if arguments.write:
        known = conditions() | {"load_average": round(os.getloadavg()[0], 1)}
        RESULT.write_text(json.dumps({"source": SOURCE.name, "conditions": known, **figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
