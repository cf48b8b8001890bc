"""How long the parts that a user waits for take: one candidate, `tune`, the import and `--help`."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.conditions import ROOT, asks_to_write, store
from counterpoint.job import load_job
from counterpoint.plan import LEAVE_IT
from counterpoint.sim import Simulator

REPETITIONS = 7
COMMAND = str(Path(sys.executable).parent / "counterpoint")


def seconds(action: Callable[[], object], repetitions: int = REPETITIONS) -> float:
    """Median wall time of `action`, after one call that is not counted."""
    action()
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _run(*command: str) -> Callable[[], object]:
    return lambda: subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def main() -> None:
    is_stored = asks_to_write(__doc__)
    trace = str(ROOT / "examples" / "traces" / "ddp.rank0.json.gz")
    job = load_job(trace).to_simulate(None)
    interpreter_s = seconds(_run(sys.executable, "-c", "pass"))
    asked_and_found = {
        "one candidate of the ddp step": (0.3, seconds(lambda: Simulator().run(job.step, job.machine, LEAVE_IT))),
        "counterpoint tune on the ddp trace": (20.0, seconds(_run(COMMAND, "tune", trace), 3)),
        "import counterpoint (interpreter's own start subtracted)": (
            0.1,
            seconds(_run(sys.executable, "-c", "import counterpoint")) - interpreter_s,
        ),
        "counterpoint bench paper --simulate all --sweep ctas": (
            60.0,
            seconds(_run(COMMAND, "bench", "paper", "--simulate", "all", "--sweep", "ctas"), 1),
        ),
        "counterpoint --help": (0.3, seconds(_run(COMMAND, "--help"))),
    }
    for name, (asked, found) in asked_and_found.items():
        print(f"{name:58} {found:7.3f} s   asked: {asked:g} s")
    if is_stored:
        result = {name: {"seconds": round(found, 4), "asked": asked} for name, (asked, found) in asked_and_found.items()}
        print(f"written to {store('speed', result)}")


if __name__ == "__main__":
    main()
