"""What `expert_parallel.overlap` and `run --tune` make of torchtitan's DeepSeek-V3 job, on the GPUs at hand; as JSON.

    python -m benchmarks.torchtitan_experts --torchtitan DIR --ranks 2 -o torchtitan_moe_2x_h200.json

In this order: bare, with the two lines of `expert_parallel`, both ways in turns in one process, under `run --tune`, under
the plan if it found one, and bare again. The last three have `--tune-steps`, since the routing changes, and with it a step's
time. A run's figure is the median over its second half; slower or faster means by more than the spread, as in
`benchmarks.supervised_jobs`. Losses are compared with the distance of the two bare runs. `--only` picks some of them.
"""

import argparse
import json
import re
import statistics
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.supervised_jobs import finish, gpus, is_found

WAYS = ("bare", "overlap", "switched", "tune", "plan", "bare again")
LONG = ("tune", "plan", "bare again")
COLORS = re.compile(r"\x1b\[[0-9;]*m")
TABLE_LINES = 12
COMPARED_STEPS = (1, 2, 5, 10, 20, 30, 40)


def run(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """One run of the job."""
    of_job = "bare" if way in LONG else way
    steps = options.tune_steps if way in LONG else options.steps
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    job = ["-m", "benchmarks.torchtitan_job", "--torchtitan", str(options.torchtitan.resolve()), "--way", of_job]
    ours = {
        "tune": ["--tune", "--budget", str(options.budget), "-o", str(plan_of(options))],
        "plan": ["--strict", "--plan", str(plan_of(options)), "--guard", "0"],
    }
    prefix = [sys.executable, "-m", "counterpoint", "run", *ours[way], "--"] if way in ours else []
    started = time.monotonic()
    status, output, errors = finish([*prefix, *torchrun, *job, "--steps", str(steps)], options.limit)
    text = COLORS.sub("", output + errors)
    last = next((line for line in reversed(output.splitlines()) if line.startswith('{"way"')), None)
    return {
        "way": way,
        "exit_status": status,
        "seconds": round(time.monotonic() - started, 1),
        **({**json.loads(last), "way": way} if last else {}),
        "said": said(text) if way in ours else [],
        "errors": "" if status == 0 else text[-6000:],
    }


def plan_of(options: argparse.Namespace) -> Path:
    """The file of the plan that tuning finds."""
    return Path(options.output.with_suffix(".plan.toml"))


def said(text: str) -> list[str]:
    """What `counterpoint run` said: its lines, the candidates' times, and the proof."""
    lines, tables = text.splitlines(), ("candidate (measured)", "control  ")
    starts = [number for number, line in enumerate(lines) if line.startswith(tables)]
    shown = [line for line in lines if line.startswith("counterpoint:")]
    return shown + [line for start in starts for line in lines[start : start + TABLE_LINES]]


def figure(times: list[float]) -> dict[str, float]:
    """Median and quartiles, ms."""
    low, middle, high = statistics.quantiles(times, n=4)
    return {"median_ms": round(middle, 2), "low_ms": round(low, 2), "high_ms": round(high, 2), "num_steps": len(times)}


def summarize(runs: list[dict[str, Any]]) -> list[str]:
    """A line for each run: ms per step, and losses."""
    lines = []
    for entry in runs:
        found = entry.get("ms", {})
        for name, times in found.items():
            half = times if entry["way"] == "switched" else times[len(times) // 2 :]
            if len(half) > 1:
                entry.setdefault("figures", {})[name] = figure(half)
        shown = "  ".join(
            f"{name} {each['median_ms']:.2f} ms ({each['low_ms']:.2f} to {each['high_ms']:.2f})"
            for name, each in entry.get("figures", {}).items()
        )
        peak = f"  peak {entry['peak_bytes'] / 2**30:.1f} GiB" if "peak_bytes" in entry else ""
        found_losses = list(enumerate(entry.get("losses", []), start=1))
        losses = " ".join(f"{step}:{loss:.4f}" for step, loss in found_losses if step in COMPARED_STEPS)
        state = "" if entry["exit_status"] == 0 else f" FAILED with {entry['exit_status']}"
        lines.append(f"{entry['way']:10}{state} {shown}{peak}  losses {losses}")
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchtitan", type=Path, required=True, metavar="DIR", help="sources of torchtitan v0.2.2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="of the first three")
    parser.add_argument("--tune-steps", type=int, default=260, help="of the last three")
    parser.add_argument("--budget", type=int, default=200, help="steps that --tune may use")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--limit", type=float, default=120, help="seconds that one run may take")
    parser.add_argument("-o", "--output", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    options = parse()
    where: dict[str, object] = {"date": date.today().isoformat(), "gpus": gpus(), "torch": version("torch")}
    asked = {"ranks": options.ranks, "steps": options.steps, "tune_steps": options.tune_steps, "budget": options.budget}
    runs: list[dict[str, Any]] = []
    for way in options.only:
        if way == "plan" and not is_found(plan_of(options)):
            continue
        runs.append(run(way, options))
        print(f"{way}: {runs[-1]['seconds']} s", *runs[-1].get("counted", []), runs[-1]["errors"], flush=True)
        summary = summarize(runs)
        stored = {"conditions": where | asked, "result": runs, "summary": summary}
        options.output.write_text(json.dumps(stored, indent=2) + "\n")
    print("\n".join(summary), flush=True)


if __name__ == "__main__":
    main()
