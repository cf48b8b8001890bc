"""The launch filter's host time on a GPU: rounds of 2,000 launches with and without it, in alternating processes."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.conditions import store
from counterpoint.launch_filter.control_block import INITIAL_BLOCK, ControlBlock, FilterRule, block_paths
from counterpoint.launch_filter.library import filter_library

LAUNCHES, ROUNDS, PAIRS = 2000, 40, 5
RULES = {
    "no rule names the kernel": (),
    "a cap": (FilterRule(pattern="*elementwise*", dynamic_shared_bytes=20_000, carveout_percent=100),),
    "a priority": (FilterRule(pattern="*elementwise*", priority=-1),),
}
JOB = f"""
import json, time, torch
x = torch.zeros(32, device="cuda")
times = []
for _ in range({ROUNDS} + 3):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range({LAUNCHES}):
        x.add_(1)
    times.append((time.perf_counter() - start) / {LAUNCHES} * 1e9)
torch.cuda.synchronize()
print(json.dumps({{"gpu": torch.cuda.get_device_name(), "ns": times[3:], "sum": x.sum().item()}}))
"""


def run(folder: Path | None, rules: tuple[FilterRule, ...]) -> dict[str, object]:
    """One process: nanoseconds per launch of each round, and the result of its arithmetic."""
    variables = dict(os.environ)
    if folder is not None:
        folder.mkdir()
        ControlBlock.write_initial(folder / INITIAL_BLOCK, rules)
        variables |= {"LD_PRELOAD": str(filter_library()), "COUNTERPOINT_FILTER_DIRECTORY": str(folder)}
    ended = subprocess.run([sys.executable, "-c", JOB], env=variables, capture_output=True, text=True, check=True)
    if folder is not None:
        check_counts(folder, rules)
    found: dict[str, object] = json.loads(ended.stdout)
    return found


def check_counts(folder: Path, rules: tuple[FilterRule, ...]) -> None:
    """The filter counted the launches that were timed, and changed what it was told to."""
    (path,) = block_paths(folder)
    block = ControlBlock.open(path)
    state = block.state()
    block.close()
    assert state.num_launches >= (ROUNDS + 3) * LAUNCHES, state
    for counters in state.counters:
        assert counters.num_capped + counters.num_prioritized >= (ROUNDS + 3) * LAUNCHES, counters
    assert len(state.counters) == len(rules)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="store the result under benchmarks/results/")
    result: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        for what, rules in RULES.items():
            times: dict[str, list[float]] = {"without": [], "with": []}
            for number in range(PAIRS):
                plain, filtered = run(None, ()), run(Path(name) / f"{what}-{number}", rules)
                assert plain["sum"] == filtered["sum"]
                times["without"] += plain["ns"]  # type: ignore[arg-type]
                times["with"] += filtered["ns"]  # type: ignore[arg-type]
                result["gpu"] = plain["gpu"]
            rows = {how: [round(figure, 1) for figure in statistics.quantiles(found, n=4)] for how, found in times.items()}
            result[what] = rows
            print(
                f"{what:26} "
                + "   ".join(f"{how} {row[1]:.0f} ns ({row[0]:.0f} to {row[2]:.0f})" for how, row in rows.items())
            )
    if parser.parse_args().write:
        print(f"written to {store('filter_on_gpu', result)}")


if __name__ == "__main__":
    main()
