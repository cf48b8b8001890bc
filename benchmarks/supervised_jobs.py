"""Jobs with and without `counterpoint run`, on the GPUs at hand: ms per step, losses and what was decided, as JSON.

    python -m benchmarks.supervised_jobs --ranks 2 --jobs starved ddp fsdp2 tp -o results.json
    python -m benchmarks.supervised_jobs --ranks 2 --jobs starved --tokens 4096 --steps 240 --budget 120 -o starved.json
    python -m benchmarks.supervised_jobs --ranks 2 --jobs starved --steps 1600 --guard 200 --given slow.toml
    python -m benchmarks.supervised_jobs --ranks 2 --jobs transformers_tp -o jobs.json
    python -m benchmarks.supervised_jobs --ranks 2 --jobs torchtitan_tp --against torchtitan_tp_async --torchtitan DIR
    python -m benchmarks.supervised_jobs --ranks 2 --jobs torchtitan_tp_trained --torchtitan DIR
    python -m benchmarks.supervised_jobs --ranks 2 --jobs megatron_pretrain --megatron DIR
    UB_SKIPMC=1 python -m benchmarks.supervised_jobs --ranks 2 --jobs megatron_tp --against megatron_userbuffers

Each job runs bare, under --tune and, if that found one, under its plan; then bare again, so that drift of the cards shows.
With --against, another job runs bare before and after these, and each is compared with it as well. With --given, a plan of
yours takes the place of tuning, to see what the guard makes of it. Runs that tune nothing have at most --untuned-steps
steps, unless the job changes half-way.
A job's figure is its own: the median over the second half of its steps, which the tuning is not in. Slower or faster means
by more than the spread: the largest half-width of the quartiles of the runs compared, or the distance of the two bare runs.
Losses are compared bit by bit; where the two bare runs differ from each other, the job itself is not deterministic, and the
losses of the others say nothing. Beside each run nvidia-smi reads the clock and the power of the GPUs: medians of the
samples with at least 0.8 of the most power, which are those of steps.

An output file that is there already is gone on with: jobs that it holds are not run again, and it must be of the same
options. torchtitan's sources (v0.2.2), transformers, DeepSpeed, Megatron-LM's core and TransformerEngine are not part of the
project: see docs/measuring.md.
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from counterpoint.plan import load_plan

JOB_FOLDER = Path(__file__).parent / "jobs"
OURS = ("starved", "ddp", "fsdp1", "fsdp2", "tp", "sequence", "unsynchronized", "changing")
ZERO = ("zero1", "zero2", "zero3")  # of stock_jobs.py; they need DeepSpeed
# what `benchmarks.torchtitan_job` is asked for
TORCHTITAN = {
    "torchtitan_tp": ("llama_tp",),
    "torchtitan_tp_compiled": ("llama_tp", "--compile.enable"),
    "torchtitan_tp_trained": ("llama_tp", "--compile.enable", "--metrics.log_freq", "10"),
    "torchtitan_tp_async": ("llama_tp", "--compile.enable", "--parallelism.enable_async_tensor_parallel"),
    "torchtitan_fsdp2": ("llama_fsdp2", "--compile.enable"),
}
EXPERTS = ("--engine", "--width", "2048", "--layers", "4", "--balanced")  # of Qwen3-30B-A3B
# what `benchmarks.megatron_job` is asked for; "{}" is the number of ranks
MEGATRON = {
    "megatron": (),
    "megatron_tp": ("--tensor-parallel", "{}", "--engine"),
    "megatron_experts": (*EXPERTS, "--experts", "32"),
    "megatron_64_experts": (*EXPERTS, "--experts", "128"),  # on each of two GPUs
    "megatron_userbuffers": ("--tensor-parallel", "{}", "--engine", "--way", "userbuffers"),
}
# what Megatron-LM's own script, pretrain_gpt.py, is asked for: the experts of Qwen3-30B-A3B, 32 of them
PRETRAIN = (
    *("--num-layers", "4", "--hidden-size", "2048", "--ffn-hidden-size", "768", "--num-attention-heads", "16"),
    *("--group-query-attention", "--num-query-groups", "4", "--kv-channels", "128", "--seq-length", "4096"),
    *("--max-position-embeddings", "4096", "--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu"),
    *("--disable-bias-linear", "--untie-embeddings-and-output-weights", "--attention-dropout", "0", "--hidden-dropout", "0"),
    *("--num-experts", "32", "--moe-router-topk", "8", "--moe-ffn-hidden-size", "768", "--expert-model-parallel-size", "{}"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm", "--moe-permute-fusion"),
    *("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-2", "--moe-router-force-load-balancing"),
    *("--micro-batch-size", "4", "--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    *("--no-gradient-accumulation-fusion", "--lr", "1e-4", "--min-lr", "1e-5", "--lr-decay-style", "cosine", "--mock-data"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "32000", "--eval-iters", "0", "--eval-interval", "1000000"),
    *("--log-interval", "10"),
)
JOBS = (*OURS, *ZERO, "transformers_tp", *MEGATRON, "megatron_pretrain", *TORCHTITAN)
GRACE_S = 20
MOST_KEPT = 20_000  # characters of what a failed run said
SAMPLED_MS = 200
LAST_HALF = re.compile(r"last half: ([\d.]+) ms per step, quartiles ([\d.]+) to ([\d.]+)")
MEGATRON_LOG = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")  # a mean of --log-interval steps
LOSSES = re.compile(r"(?:lm loss:|loss(?: after 50 steps)?) ([-+]?\d[-+\d.eE]*)")


def command(job: str, options: argparse.Namespace, num_steps: int) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    if job == "megatron_pretrain":
        asked = [each.format(options.ranks) for each in PRETRAIN]
        batch = ["--global-batch-size", str(4 * options.ranks), "--train-iters", str(num_steps)]
        return [*torchrun, str(options.megatron / "pretrain_gpt.py"), *asked, *batch]
    if job in TORCHTITAN:
        sources = str(options.torchtitan.resolve())
        script = ["-m", "benchmarks.torchtitan_job", "--torchtitan", sources, "--way", "bare", "--model", *TORCHTITAN[job]]
    elif job in MEGATRON:
        script = ["-m", "benchmarks.megatron_job", *[each.format(options.ranks) for each in MEGATRON[job]]]
    elif job == "transformers_tp":
        script = ["-m", "benchmarks.transformers_job"]
    elif job in ("unsynchronized", "changing"):
        script = ["-m", "benchmarks.unusual_job", job]
    else:
        script = [str(JOB_FOLDER / "starved.py")] if job == "starved" else [str(JOB_FOLDER / "stock_jobs.py"), job]
    tokens = ["--tokens", str(options.tokens)] if job in ("starved", *MEGATRON) and options.tokens is not None else []
    return [*torchrun, *script, "--steps", str(num_steps), *tokens]


class Clocks:
    """Samples the SM clock and the power of all GPUs while a run lasts; nothing without nvidia-smi."""

    def __enter__(self) -> "Clocks":
        query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", f"-lms={SAMPLED_MS}"]
        self._file = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(query, stdout=self._file) if shutil.which("nvidia-smi") else None
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        self._file.seek(0)
        lines = self._file.read().splitlines()
        self._file.close()
        found = [tuple(map(float, each)) for line in lines if len(each := line.split(",")) == 2 and "[" not in line]
        most_w = max((power for _, power in found), default=0.0)
        busy = [each for each in found if each[1] >= 0.8 * most_w]
        clocks, powers = zip(*busy, strict=True) if busy else ((), ())
        self.found = {"clock_mhz": statistics.median(clocks), "power_w": statistics.median(powers)} if busy else {}


def run(job: str, options: argparse.Namespace, *ours: str) -> dict[str, Any]:
    """One run; `ours` are options of `counterpoint run`, none for the bare job."""
    guard = ["--guard", str(options.guard)] if options.guard is not None else []
    prefix = [sys.executable, "-m", "counterpoint", "run", *ours, *guard, "--"] if ours else []
    is_long = "--tune" in ours or options.given is not None or job == "changing"
    num_steps = options.steps if is_long else min(options.steps, options.untuned_steps)
    started = time.monotonic()
    with Clocks() as clocks:
        status, output, errors = finish([*prefix, *command(job, options, num_steps)], options.limit)
    found = last_half(output)
    shown = ("counterpoint:", "priority", "head_start", "residency_cap", "overlap", "transport")
    words = ("replayed", "issued call by call")  # in a table's second line, and behind a logger's own words
    return {
        "options": [Path(option).name for option in ours],
        "exit_status": status,
        "seconds": round(time.monotonic() - started, 1),
        **clocks.found,
        "ms_per_step": found[0] if found else None,
        "quartiles_ms": list(found[1:]) if found else None,
        "losses": LOSSES.findall(output),
        "said": [line for line in errors.splitlines() if line.startswith(shown) or any(word in line for word in words)],
        "errors": "" if status == 0 else errors[-MOST_KEPT:],
    }


def last_half(output: str) -> tuple[float, float, float] | None:
    """Median and quartiles of ms per step over the second half of the steps, as a job prints them or Megatron-LM's log."""
    if (found := LAST_HALF.search(output)) is not None:
        return float(found[1]), float(found[2]), float(found[3])
    times = [float(each) for each in MEGATRON_LOG.findall(output)]
    if len(times) < 4:
        return None
    low, median, high = statistics.quantiles(times[len(times) // 2 :], n=4, method="inclusive")
    return round(median, 3), round(low, 3), round(high, 3)


def finish(words: list[str], limit_s: float) -> tuple[int, str, str]:
    """The end of a command. One that takes too long gets a SIGTERM, which launchers pass on to their ranks, then SIGKILL."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for seconds, end in ((limit_s, process.terminate), (GRACE_S, process.kill)):
        try:
            output, errors = process.communicate(timeout=seconds)
            return process.returncode, output, errors
        except subprocess.TimeoutExpired:
            end()
    return process.wait(), "", f"It was still there {limit_s:g} + {GRACE_S} s after its start."


def compare(job: str, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The runs of one job, bare ones first and last."""
    if options.given is not None:
        return [run(job, options), run(job, options, "--plan", str(options.given)), run(job, options)]
    plan = folder / f"{job}.toml"
    runs = [run(job, options), run(job, options, "--tune", "--budget", str(options.budget), "-o", str(plan))]
    if is_found(plan):
        runs.append(run(job, options, "--strict", "--plan", str(plan)))
        runs[-1]["plan"] = plan.read_text()
    runs.append(run(job, options))
    return runs


def is_found(plan: Path) -> bool:
    """Whether tuning saved a plan that changes something."""
    return plan.exists() and bool(load_plan(plan).directives)


def verdict(entry: dict[str, Any], bare: list[dict[str, Any]]) -> dict[str, Any]:
    """A run against the bare runs before and after."""
    if any(each["ms_per_step"] is None for each in (entry, *bare)):
        return {"is_comparable": False, "is_slower": None}
    as_it_is = sum(each["ms_per_step"] for each in bare) / len(bare)
    widths = [(high - low) / 2 for low, high in (each["quartiles_ms"] for each in (entry, *bare))]
    spread = max(*widths, abs(bare[0]["ms_per_step"] - bare[-1]["ms_per_step"]))
    change = entry["ms_per_step"] - as_it_is
    return {
        "is_comparable": True,
        "is_slower": change > spread,
        "is_faster": change < -spread,
        "bare_ms": round(as_it_is, 3),
        "spread_ms": round(spread, 3),
        "change": round(change / as_it_is, 4),
    }


def describe(job: str, entry: dict[str, Any]) -> str:
    """One line of the table: a run's figures and what they say."""
    name = next((option for option in ("--tune", "--plan") if option in entry["options"]), "bare")
    if entry["ms_per_step"] is None:
        return f"{job:8} {name:6} FAILED with {entry['exit_status']}"
    low, high = entry["quartiles_ms"]
    said = ""
    for found, whose in ((entry.get("verdict"), "bare"), (entry.get("against"), "the other job's")):
        if found is not None and found["is_comparable"]:
            word = "SLOWER beyond" if found["is_slower"] else "faster beyond" if found["is_faster"] else "within"
            said += f"  {found['change']:+.1%} of {whose} {found['bare_ms']:.3f}: {word} "
            said += f"the spread ({found['spread_ms']:.3f} ms)"
    at = f" at {entry['clock_mhz']:.0f} MHz, {entry['power_w']:.0f} W" if "clock_mhz" in entry else ""
    return f"{job:8} {name:6} {entry['ms_per_step']:9.3f} ms ({low:.3f} to {high:.3f}){at}{said}"


def judge(job: str, runs: list[dict[str, Any]], against: list[dict[str, Any]]) -> str:
    """Add a verdict to each run under `counterpoint run`, and one against another job to each; the line that sums up."""
    bare, others = [runs[0], runs[-1]], runs[1:-1]
    for entry in others:
        entry["verdict"] = verdict(entry, bare)
    for entry in runs if against else ():
        entry["against"] = verdict(entry, against)
    slower = [entry["verdict"]["is_slower"] for entry in others]
    speed = "NOT KNOWN" if None in slower else "NO" if any(slower) else "yes"
    ended = "" if all(entry["exit_status"] == 0 for entry in runs) else ", SOME RUNS FAILED"
    return f"{job}: never slower beyond the spread: {speed}; {compare_losses(bare, others)}{ended}"


def compare_losses(bare: list[dict[str, Any]], others: list[dict[str, Any]]) -> str:
    """What the losses of runs under `counterpoint run` say beside those of the two bare runs."""
    losses = [entry["losses"] for entry in (*bare, *others)]
    if not all(losses):
        return "losses NOT KNOWN: some runs printed none"
    num_common = min(len(found) for found in losses)  # bare runs may be shorter
    losses = [found[:num_common] for found in losses]
    if losses[0] != losses[1]:
        return "losses differ between the two bare runs, too: the job itself is not deterministic"
    return "losses bit-identical" if all(found == losses[0] for found in losses) else "losses DIFFERENT"


def gpus() -> str:
    """What nvidia-smi calls the GPUs; this process itself uses none."""
    if shutil.which("nvidia-smi") is None:
        return "no nvidia-smi"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return "; ".join(subprocess.run(query, capture_output=True, text=True, timeout=60, check=False).stdout.splitlines())


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(OURS))
    parser.add_argument("--torchtitan", type=Path, metavar="DIR", help="sources of torchtitan v0.2.2, for its jobs")
    parser.add_argument("--megatron", type=Path, metavar="DIR", help="sources of Megatron-LM, for megatron_pretrain")
    parser.add_argument("--against", choices=JOBS, help="run this job bare before and after each of --jobs, for comparison")
    parser.add_argument("--steps", type=int, default=440, help="of each run")
    parser.add_argument("--untuned-steps", type=int, default=400, help="of a run that tunes nothing, at most")
    parser.add_argument("--budget", type=int, default=200, help="steps that --tune may use")
    parser.add_argument("--guard", type=int, help="as of `counterpoint run`, for the runs under it")
    parser.add_argument("--given", type=Path, metavar="PLAN", help="run under this plan, and tune nothing")
    parser.add_argument("--tokens", type=int, help="of the jobs starved and megatron*")
    parser.add_argument("--limit", type=float, default=120, help="seconds that one run may take")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    if options.torchtitan is None and {*options.jobs, options.against} & set(TORCHTITAN):
        parser.error("jobs of torchtitan need its sources; give their folder with --torchtitan DIR")
    if options.megatron is None and "megatron_pretrain" in (*options.jobs, options.against):
        parser.error("megatron_pretrain needs Megatron-LM's sources; give their folder with --megatron DIR")
    if options.steps < 2 * options.budget:
        parser.error(
            f"--steps is twice --budget ({options.budget}) or more, so that the second half has no tuning in it; "
            f"found {options.steps}"
        )
    return options


def kept(output: Path | None, asked: dict[str, object]) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """Results and summary of a file that a run with the same options has begun; nothing without one."""
    if output is None or not output.exists():
        return {}, []
    stored = json.loads(output.read_text())
    for name, value in asked.items():
        if stored["conditions"].get(name) != value:
            raise SystemExit(
                f"{output} was measured with {name} {stored['conditions'].get(name)}, not {value}. Name another file."
            )
    return stored["result"], stored["summary"]


def main() -> None:
    options = parse()
    asked = {"ranks": options.ranks, "steps": options.steps, "budget": options.budget}
    asked |= {"guard": options.guard, "tokens": options.tokens, "given": options.given and options.given.read_text()}
    where: dict[str, object] = {"date": date.today().isoformat(), "gpus": gpus(), "torch": version("torch")}
    results, summary = kept(options.output, asked)
    with tempfile.TemporaryDirectory() as folder:
        for job in options.jobs:
            if job in results:
                print(f"{job}: in {options.output} already", flush=True)
                continue
            against = [run(options.against, options)] if options.against else []
            runs = results[job] = compare(job, options, Path(folder))
            if options.against:
                against = results[f"{options.against}, around {job}"] = [*against, run(options.against, options)]
            for entry in [*runs, *against]:
                print(job, entry["options"], *entry["said"], entry["errors"], sep="  ", flush=True)
            last = judge(job, runs, against)
            summary += [describe(job, entry) for entry in runs]
            summary += [*(describe(options.against, entry) for entry in against), last]
            if options.output is not None:
                stored = {"conditions": where | asked, "result": results, "summary": summary}
                options.output.write_text(json.dumps(stored, indent=2) + "\n")
            print("\n" + "\n".join(summary), flush=True)


if __name__ == "__main__":
    main()
