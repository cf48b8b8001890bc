"""What `counterpoint analyze` says a change recovers, against what it recovers: one trace and both times, in one run.

    torchrun --nproc-per-node 2 -m benchmarks.recovered_time -o FOLDER
    python -m benchmarks.recovered_time --compare FOLDER... [-o RESULTS.json]

Every job is warmed up, timed as it is and changed, in turns, and recorded as both. FOLDER gets `JOB.rankN.json.gz`,
`changed/JOB.rankN.json.gz` and `measured.json`, in which jobs of earlier runs stay. `--compare` needs no GPU: it analyzes
the traces of the jobs as they are and prints both figures. The jobs:

- starved: benchmarks/jobs/starved.py; changed: its all-reduces in a group of high priority.
- serial: the 1.2 B-parameter transformer of `training_models.py`, whose gradients are summed on the computation's stream,
  each as soon as it is there; changed: on the group's own stream, waited for at the end of the step.
- fsdp2, tp8b: as in `training_steps.py`, the latter with twice the tokens, since under the profiler its host is late else;
  changed: our copy engines, and our operators.
"""

import argparse
import gc
import json
import statistics
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.jobs import starved as starved_job
from benchmarks.on_gpus import conditions, join, log, run_and_leave
from benchmarks.small_traces import record_steps
from benchmarks.training_models import GPT_1B, blocks
from benchmarks.training_steps import (
    GPT_BLOCKS,
    TP_TOKENS,
    Step,
    Variant,
    fsdp2_variants,
    time_variants,
    tokens_of_this_rank,
    tp_variants,
)
from counterpoint import ops
from counterpoint.cuda.rendezvous import Rendezvous
from counterpoint.errors import cause_of

ROOT = Path(__file__).parents[1]
SCHEMA = "counterpoint.recovered_time/1"
MEASURED = "measured.json"
CHANGED = "changed"
WARM_UP_STEPS = 4
STEPS_RECORDED = 3
MEETING_LIMIT_S = 20.0


class Pair(NamedTuple):
    """A job's step as it is, and changed; `change` is what the analysis calls it, or begins it with."""

    change: str
    as_it_is: Step
    changed: Step


def starved() -> Pair:
    """The job, with its all-reduces in the default group and in one of high priority."""
    options = starved_job.parse([])
    numbers = range(options.layers + options.frozen)
    every_layer = [starved_job.Layer(options, seed=1000 * dist.get_rank() + number) for number in numbers]
    layers, frozen = every_layer[: options.layers], every_layer[options.layers :]
    rate = 0.5 / options.width / dist.get_world_size()
    optimizer = torch.optim.SGD([layer.weight for layer in layers], lr=rate)
    matmul = starved_job.make_matmul("cuda")
    high = dist.ProcessGroupNCCL.Options()
    high.is_high_priority_stream = True

    def step_in(group: dist.ProcessGroup | None) -> Step:
        def step() -> None:
            starved_job.train_step(layers, frozen, matmul, group)
            optimizer.step()

        return step

    return Pair("priority", step_in(None), step_in(dist.new_group(pg_options=high)))


def serial() -> Pair:
    """Gradients summed on the computation's stream, or on the group's own."""
    model, tokens = blocks(GPT_1B, GPT_BLOCKS, torch.bfloat16), tokens_of_this_rank()
    variant = Variant(model, tokens)
    is_beside = False
    under_way: list[dist.Work] = []

    def sum_up(parameter: torch.Tensor) -> None:
        work = dist.all_reduce(parameter.grad, async_op=is_beside)
        if work is not None:
            under_way.append(work)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(sum_up)

    def step_as(beside: bool) -> Step:
        def step() -> None:
            nonlocal is_beside
            is_beside = beside
            variant.backward()
            while under_way:
                under_way.pop().wait()
            model.zero_grad(set_to_none=True)

        return step

    return Pair("issue each all_reduce on a separate stream", step_as(beside=False), step_as(beside=True))


def fsdp2() -> Pair:
    """FSDP2, with its collectives by NCCL or by copy engines."""
    return _pair("copy engines", fsdp2_variants())


def tp8b() -> Pair:
    """Blocks of Llama 8B, eager and sequence-parallel, as PyTorch does it or with overlapping operators."""
    return _pair("overlap", tp_variants("8B", 2 * TP_TOKENS))


JOBS: dict[str, Callable[[], Pair]] = {"starved": starved, "serial": serial, "fsdp2": fsdp2, "tp8b": tp8b}


def _pair(change: str, builds: dict[str, Callable[[], Variant]]) -> Pair:
    return Pair(change, builds["nccl"]().step, builds["copies"]().step)


def measure(name: str, folder: Path, num_rounds: int, meeting: Rendezvous) -> dict[str, Any]:
    """Record a job as it is, and time it as it is and changed: medians over rounds in milliseconds, the slowest rank's."""
    pair = JOBS[name]()
    steps = {"as it is": pair.as_it_is, "changed": pair.changed}
    for step in steps.values():
        for _ in range(WARM_UP_STEPS):
            step()
    torch.cuda.synchronize()
    times = time_variants(steps, num_rounds)
    path = folder / f"{name}.rank{dist.get_rank()}.json.gz"
    record_steps(pair.as_it_is, STEPS_RECORDED, path, meeting.meet)
    record_steps(pair.changed, STEPS_RECORDED, folder / CHANGED / path.name, meeting.meet)
    saved = [before - after for before, after in zip(times["as it is"], times["changed"], strict=True)]
    low, middle, high = statistics.quantiles(saved, n=4, method="inclusive")
    return {
        "change": pair.change,
        "as_it_is_ms": round(statistics.median(times["as it is"]), 3),
        "changed_ms": round(statistics.median(times["changed"]), 3),
        "recovered_ms": round(middle, 3),
        "quartiles_ms": [round(low, 3), round(high, 3)],
        "rounds": num_rounds,
        "conditions": conditions(nvls="0"),
    }


def measure_all(options: argparse.Namespace) -> None:
    join(options.limit_s)
    (options.output / CHANGED).mkdir(parents=True, exist_ok=True)
    path = options.output / MEASURED
    found = json.loads(path.read_text())["jobs"] if path.exists() else {}
    meeting = Rendezvous(MEETING_LIMIT_S)
    for name in options.jobs:
        try:
            found[name] = measure(name, options.output, options.rounds, meeting)
        except Exception as problem:
            traceback.print_exc()
            found.pop(name, None)
            log(f"{name} left out: {cause_of(problem, 200)}")
        log(f"{name}: {json.dumps(found.get(name))}")
        if dist.get_rank() == 0:
            path.write_text(json.dumps({"schema": SCHEMA, "jobs": found}, indent=1) + "\n")
        ops.release()
        gc.collect()
        torch.cuda.empty_cache()


def compare(folder: Path) -> Iterator[dict[str, Any]]:
    """What was measured of each job of a folder, with what the analysis of its traces promises for the same change."""
    from counterpoint.analysis.combine import combine  # noqa: PLC0415  ranks on GPUs need none of these
    from counterpoint.analysis.rank import analyze_rank  # noqa: PLC0415
    from counterpoint.analysis.recoverable import find_recoverable  # noqa: PLC0415
    from counterpoint.job import load_job  # noqa: PLC0415
    from counterpoint.traces.formats import read_activity  # noqa: PLC0415

    for name, measured in json.loads((folder / MEASURED).read_text())["jobs"].items():
        paths = sorted(folder.glob(f"{name}.rank*.json.gz"))
        analysis = combine([analyze_rank(read_activity(path)) for path in paths])
        first = str(paths[0])
        entries = [each for each in find_recoverable(analysis, load_job(first), first) if measured["change"] in each.what]
        simulated_ms = max((each.recovers_us for each in entries), default=0.0) / 1000
        yield {"job": name, "simulated_ms": round(simulated_ms, 3)} | measured


def compare_all(folders: Sequence[Path], output: Path | None) -> None:
    rows = [row for folder in folders for row in compare(folder)]
    print(f"{'job':9}{'simulated':>11}{'measured':>11}{'quartiles':>18}{'difference':>12}   change")
    for row in rows:
        low, high = row["quartiles_ms"]
        difference = row["simulated_ms"] / row["recovered_ms"] - 1
        print(
            f"{row['job']:9}{row['simulated_ms']:8.2f} ms{row['recovered_ms']:8.2f} ms{low:8.2f} to {high:.2f}"
            f"{difference:+12.0%}   {row['change']}"
        )
    if output is not None:
        output.write_text(json.dumps({"schema": SCHEMA, "rows": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="folder for what is recorded, or file for what is compared")
    parser.add_argument("--compare", nargs="+", type=Path, metavar="FOLDER", help="compare such folders; needs no GPU")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--limit-s", type=int, default=90)
    options = parser.parse_args()
    if options.compare is not None:
        compare_all(options.compare, options.output)
    elif options.output is None:
        parser.error("name a folder with -o, or one to compare with --compare")
    else:
        run_and_leave(lambda: measure_all(options))


if __name__ == "__main__":
    main()
