"""Jobs with and without `counterpoint run`, on the GPUs at hand: ms per step, losses and what was decided, as JSON.

    python -m benchmarks.supervised_jobs --ranks 2 --jobs starved ddp fsdp2 tp -o results.json

Each job runs bare, under --tune and, if that found one, under its plan; then bare again, so that drift of the cards shows.
A job's figure is its own: the median over the second half of its steps, which the tuning of the first 200 is not in.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from counterpoint.plan import load_plan

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS = {"starved": 440, "ddp": 440, "fsdp2": 440, "tp": 440}
LIMIT_S = 300


def command(job: str, num_ranks: int) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    if job == "starved":
        return [*torchrun, str(EXAMPLES / "starved.py"), "--steps", str(STEPS[job])]
    return [*torchrun, str(EXAMPLES / "stock_jobs.py"), job, "--steps", str(STEPS[job])]


def run(job: str, num_ranks: int, *options: str) -> dict[str, Any]:
    """One run; `options` are those of `counterpoint run`, none for the bare job."""
    prefix = [sys.executable, "-m", "counterpoint", "run", *options, "--"] if options else []
    ended = subprocess.run([*prefix, *command(job, num_ranks)], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    found = re.search(r"last half: ([\d.]+) ms", ended.stdout)
    ours = ("counterpoint:", "priority", "head_start", "residency_cap")
    said = [line for line in ended.stderr.splitlines() if line.startswith(ours)]
    return {
        "options": [Path(option).name for option in options],
        "exit_status": ended.returncode,
        "ms_per_step": float(found[1]) if found else None,
        "losses": re.findall(r"loss (?:after 50 steps )?([-\d.e]+)", ended.stdout),
        "said": said,
        "errors": "" if ended.returncode == 0 else ended.stderr[-3000:],
    }


def compare(job: str, num_ranks: int, folder: Path) -> list[dict[str, Any]]:
    plan = folder / f"{job}.toml"
    runs = [run(job, num_ranks), run(job, num_ranks, "--tune", "-o", str(plan))]
    if plan.exists() and load_plan(plan).directives:
        runs.append(run(job, num_ranks, "--strict", "--plan", str(plan)))
        runs[-1]["plan"] = plan.read_text()
    runs.append(run(job, num_ranks))
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--jobs", nargs="+", choices=tuple(STEPS), default=list(STEPS))
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for job in options.jobs:
            results[job] = compare(job, options.ranks, Path(folder))
            for entry in results[job]:
                print(job, entry["options"], entry["ms_per_step"], "ms per step", *entry["said"], sep="  ", flush=True)
            bare, *others = results[job]
            same = all(entry["losses"] == bare["losses"] for entry in others)
            print(job, "losses are bit-identical" if same else "LOSSES DIFFER", flush=True)
            if options.output is not None:
                options.output.write_text(json.dumps({"ranks": options.ranks, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
