"""Record small traces of steps whose communication is exposed for a known reason, one case per cause.

    torchrun --nproc-per-node 2 -m benchmarks.known_causes -o FOLDER
    torchrun --nproc-per-node 2 -m benchmarks.known_causes -o FOLDER --cases hardware_queue

FOLDER gets `CASE.rankN.json.gz` from torch.profiler and `expected.json`: by case and rank, how long communication is exposed
in a step for which cause, as follows from the parts of the step, which are timed alone with CUDA events (medians, slowest
rank). A later run adds its cases to the file. `hardware_queue` sets CUDA_DEVICE_MAX_CONNECTIONS=1 for its process, so it
runs by itself. A case that fails on all ranks is named, and the others go on; a hang shows all stacks and ends after
30 s, and what was recorded before stays. Multicast (NVLS) is off. With `--device cpu` everything runs at a small size, to
see that it does; the traces then hold no GPU activity.
"""

import argparse
import faulthandler
import functools
import gc
import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks import known_cause_steps as steps
from benchmarks import on_gpus
from benchmarks.known_cause_stage import Known, Stage
from benchmarks.small_traces import record_steps, synchronize
from counterpoint.analysis.values import Cause
from counterpoint.cuda import ranks
from counterpoint.cuda.rendezvous import Rendezvous
from counterpoint.errors import DeviceError

SCHEMA = "counterpoint.known_causes/1"
EXPECTED = "expected.json"
CASE_LIMIT_S = 30
MEETING_LIMIT_S = 20.0
WARM_UP_STEPS = 4  # recordings of our operators begin at the third call of a shape
MAX_BYTES = 60_000  # of a trace that is to be test data; a larger one is kept, and said
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


class Case(NamedTuple):
    """What is recorded under a name: most of what is exposed is so for that cause."""

    cause: Cause
    make: Callable[[Stage], Known]
    needs_gpu: bool = False


CASES = {
    "dependent": Case("dependent", steps.dependent),
    "starved": Case("starved", steps.starved),
    "own_stream": Case("own_stream", steps.own_stream),
    "launched_late": Case("launched_late", steps.launched_late),
    "slow_rank": Case("slow_rank", steps.slow_rank),
    "queued": Case("queued", steps.queued),
    "uneven": Case("uneven", steps.uneven),
    "tail": Case("tail", steps.tail),
    "in_graph": Case("dependent", steps.in_graph, needs_gpu=True),
    "by_copies": Case("dependent", steps.by_copies),
    "fused": Case("dependent", steps.fused, needs_gpu=True),
    "hardware_queue": Case("hardware_queue", steps.hardware_queue, needs_gpu=True),
}
BY_ITSELF = "hardware_queue"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for the traces and expected.json")
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, help=f"left out: all that need no process of their own, {BY_ITSELF}"
    )
    parser.add_argument("--steps", type=int, default=4, help="that are recorded; the first begins on an idle GPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    if options.cases is None:
        runs_here = options.device == "cuda"
        options.cases = [name for name, case in CASES.items() if name != BY_ITSELF and (runs_here or not case.needs_gpu)]
    if BY_ITSELF in options.cases and len(options.cases) > 1:
        parser.error(f"{BY_ITSELF} needs a process of its own; found {len(options.cases)} cases: start it by itself")
    blocked = [name for name in options.cases if CASES[name].needs_gpu and options.device == "cpu"]
    if blocked:
        parser.error(f"{', '.join(blocked)} cannot run with --device cpu: leave it out of --cases, or use a GPU")
    if options.steps < 2:
        parser.error(f"--steps is 2 or more, since the first begins on an idle GPU; found {options.steps}")
    return options


class Recorder:
    """Records cases on this rank; the first rank keeps the file of what is expected."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._folder, self._steps = options.output, options.steps
        self._stage = Stage(options.device)
        self._meeting = Rendezvous(MEETING_LIMIT_S)

    def record(self, name: str) -> bool:
        """Record one case and write it down, or say why it failed; returns whether it did not."""
        faulthandler.dump_traceback_later(CASE_LIMIT_S, exit=True)
        start_s, failure, entry = time.perf_counter(), "", {}
        try:
            entry = self._entry(name, CASES[name].make(self._stage))
        except Exception as problem:  # whatever it is: the other cases do not depend on it
            traceback.print_exc()
            failure = f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"
        failed_elsewhere = self._meeting.slowest(float(bool(failure))) > 0
        if failed_elsewhere and not failure:
            failure = "it failed on another rank"
        if self._stage.rank == 0:
            add_to_expected(self._folder / EXPECTED, name, entry, failure)
        on_gpus.log(f"{name}: {failure or json.dumps(entry['ranks'])} ({time.perf_counter() - start_s:.1f} s)")
        gc.collect()
        return not failure

    def _entry(self, name: str, known: Known) -> dict[str, object]:
        for _ in range(WARM_UP_STEPS):
            known.step()
        synchronize()
        path = self._folder / f"{name}.rank{self._stage.rank}.json.gz"
        size = record_steps(known.step, self._steps, path, self._meeting.meet)
        parts = {part: self._stage.time_us(call) for part, call in known.parts.items()}
        whole = self._stage.time_us(known.step)
        slowest = dict(zip(["bytes", "step", *parts], self._meeting.slowest_of([size, whole, *parts.values()]), strict=True))
        size, step_us = round(slowest.pop("bytes")), slowest.pop("step")
        if size > MAX_BYTES:
            on_gpus.log(f"{name}: a trace has {size:,} bytes, more than {MAX_BYTES:,}: record fewer steps")
        exposed = {
            str(rank): {cause: round(time_us, 1) for cause, time_us in causes.items()}
            for rank, causes in enumerate(known.exposed(slowest))
        }
        return {
            "cause": CASES[name].cause,
            "what": (CASES[name].make.__doc__ or "").split("\n\n")[0].strip(),
            "ranks": exposed,
            "parts_us": {part: round(time_us, 1) for part, time_us in slowest.items()},
            "step_us": round(step_us, 1),
            "steps": self._steps,
            "bytes": size,
            "conditions": self._conditions(),
        }

    def _conditions(self) -> dict[str, object]:
        if not self._stage.on_gpu:
            return {"gpus": "none", "torch": torch.__version__}
        queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "default")
        return on_gpus.conditions(hardware_queues=queues, multicast="off")


def add_to_expected(path: Path, name: str, entry: dict[str, object], failure: str) -> None:
    """Put a case that was recorded, or why it was not, into the file; what it holds of other cases stays."""
    found = json.loads(path.read_text()) if path.exists() else {"schema": SCHEMA, "cases": {}, "failed": {}}
    for kind in ("cases", "failed"):
        found[kind].pop(name, None)
    if failure:
        found["failed"][name] = failure
    else:
        found["cases"][name] = entry
    path.write_text(json.dumps(found, indent=1) + "\n")


def record_all(options: argparse.Namespace) -> None:
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks < 2:
        raise DeviceError(f"2 ranks or more are needed; found {num_ranks}. Start it by torchrun --nproc-per-node 2.")
    if options.device == "cuda":
        on_gpus.join(CASE_LIMIT_S * 2)
    else:
        dist.init_process_group("gloo")
    options.output.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(options)
    done = [recorder.record(name) for name in options.cases]
    faulthandler.cancel_dump_traceback_later()
    on_gpus.log(f"{sum(done)} of {len(done)} cases recorded in {options.output}")
    if not all(done):
        raise SystemExit(1)


def main() -> None:
    options = parse()
    os.environ.update(WITHOUT_MULTICAST | (ONE_QUEUE if BY_ITSELF in options.cases else {}))  # before CUDA starts
    leave = on_gpus.run_and_leave if options.device == "cuda" else ranks.run_and_leave
    leave(functools.partial(record_all, options))


if __name__ == "__main__":
    main()
