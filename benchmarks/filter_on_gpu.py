"""The launch filter's host time on a GPU: rounds of 2,000 launches in processes with and without it, taking turns.

python -m benchmarks.filter_on_gpu --pairs 4 -o filter.json
python -m benchmarks.filter_on_gpu --write

All processes start at once and then wait; one at a time is told to run a round, so that nothing runs beside it. The process
with the filter swaps the table in its own control block; its partner runs as many rounds without. The order of tables and
partners is drawn anew each round. Sums must be equal, and the filter must have counted and changed what it was told to. It
needs one GPU and ends within 60 s.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.conditions import RESULTS
from counterpoint.launch_filter.control_block import INITIAL_BLOCK, ControlBlock
from counterpoint.launch_filter.library import filter_library
from counterpoint.launch_filter.rules import FilterRule
from counterpoint.measurement.orders import Rounds, draw_seed
from counterpoint.plan import LEAVE_IT
from counterpoint.supervised.environment import job_environment
from counterpoint.supervised.settings import DIRECTORY_VARIABLE

LAUNCHES, LAUNCHES_BEFORE = 2000, 200  # timed, and untimed before them: a process that waited is slow at first
LIMIT_S, ROUNDS_S = 58, 40  # since the start
LEAST_ROUNDS = 3
NO_RULE = "no rule names the kernel"
RULES = {
    NO_RULE: (FilterRule(pattern="no_such_kernel*", priority=-1),),
    "a cap": (FilterRule(pattern="*elementwise*", dynamic_shared_bytes=20_000, carveout_percent=100),),
    "a priority": (FilterRule(pattern="*elementwise*", priority=-1),),
}
ROUND, END = "round", "end"


class Job:
    """Inside a process: rounds of launches under one of the tables, if the filter is there."""

    def __init__(self) -> None:
        import torch  # noqa: PLC0415  the process that conducts needs none

        self._torch = torch
        self._values = torch.zeros(32, device="cuda")
        self._values.add_(1)
        torch.cuda.synchronize()
        folder = os.environ.get(DIRECTORY_VARIABLE)
        self._block = ControlBlock(Path(folder) / f"{os.getpid()}.block") if folder else None
        self._changed = dict.fromkeys(RULES, 0)
        self._num_launches = 1

    def run_round(self, what: str) -> float:
        """Nanoseconds per launch."""
        if self._block is not None:
            self._block.swap(RULES[what])
        self._launch(LAUNCHES_BEFORE)
        self._torch.cuda.synchronize()
        start = time.perf_counter()
        self._launch(LAUNCHES)
        taken = time.perf_counter() - start
        self._torch.cuda.synchronize()
        if self._block is not None:
            (counters,) = self._block.state().counters
            self._changed[what] += counters.num_capped + counters.num_prioritized
        return taken / LAUNCHES * 1e9

    def _launch(self, count: int) -> None:
        for _ in range(count):
            self._values.add_(1)
        self._num_launches += count

    def summary(self) -> dict[str, object]:
        """What proves that the rounds did what they should, and the conditions."""
        from benchmarks.on_gpus import conditions  # noqa: PLC0415

        found: dict[str, object] = {"sum": self._values.sum().item(), "num_launches": self._num_launches}
        if self._block is not None:
            state = self._block.state()
            found |= {"changed": self._changed, "counted": state.num_launches, "problem": state.problem}
        return {**found, "conditions": conditions()}

    def serve(self) -> None:
        """Do what each line of standard input asks for."""
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            verb, what = json.loads(line)
            print(json.dumps(self.run_round(what) if verb == ROUND else self.summary()), flush=True)


class Process:
    """One process that runs rounds when it is told to."""

    def __init__(self, folder: Path | None) -> None:
        variables = dict(os.environ)
        if folder is not None:
            folder.mkdir()
            ControlBlock.write_initial(folder / INITIAL_BLOCK, ())
            variables = job_environment(variables, folder, filter_library(), LEAVE_IT, has_agent=False)
        command = [sys.executable, "-m", "benchmarks.filter_on_gpu", "--job"]
        self.process = subprocess.Popen(
            command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True
        )

    def read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"A process ended before its time, with {self.process.wait()}.")
        return json.loads(line)

    def ask(self, verb: str, what: str = "") -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([verb, what]) + "\n")
        self.process.stdin.flush()
        return self.read()


Times = dict[str, dict[str, list[float]]]
Quartiles = dict[str, dict[str, list[float]]]


def take_turns(pairs: list[dict[str, Process]], num_rounds: int, deadline: float) -> tuple[Times, int]:
    """Times by table, with and without; and how many rounds there was time for."""
    times: Times = {what: {how: [] for how in ("without", "with")} for what in RULES}
    turns = [(pair, what, how) for pair in pairs for what in RULES for how in ("without", "with")]
    for pair, what, how in turns:  # not kept: the first round with a table decides on each kernel, and loads it
        pair[how].ask(ROUND, what)
    rounds = Rounds(draw_seed(), len(turns))
    for number in range(num_rounds):
        if number >= LEAST_ROUNDS and time.monotonic() > deadline:
            return times, number
        taken: dict[int, float] = {}
        for place in rounds.order(number):
            pair, what, how = turns[place]
            taken[place] = pair[how].ask(ROUND, what)
        for place, (_, what, how) in enumerate(turns):
            times[what][how].append(taken[place])
    return times, num_rounds


def check(pairs: list[dict[str, Process]], num_rounds: int) -> dict[str, object]:
    """The filter counted every launch and changed all it should, and results are equal; the conditions."""
    told = (num_rounds + 1) * (LAUNCHES + LAUNCHES_BEFORE)
    for pair in pairs:
        plain, filtered = (pair[how].ask(END) for how in ("without", "with"))
        assert not filtered["problem"], filtered["problem"]
        assert plain["num_launches"] == filtered["num_launches"]
        assert plain["sum"] == filtered["sum"] == 32 * plain["num_launches"], (plain["sum"], filtered["sum"])
        assert filtered["counted"] >= filtered["num_launches"] == 1 + told * len(RULES), filtered
        for what, num_changed in filtered["changed"].items():
            assert (num_changed == 0) if what == NO_RULE else (num_changed >= told), (what, num_changed, told)
    found: dict[str, object] = plain["conditions"]
    return found


def conduct(num_pairs: int, num_rounds: int, started: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        pairs = [{"without": Process(None), "with": Process(Path(name) / f"{number}")} for number in range(num_pairs)]
        processes = [process for pair in pairs for process in pair.values()]
        watch = threading.Timer(LIMIT_S, lambda: [process.process.kill() for process in processes])
        watch.daemon = True
        watch.start()
        try:
            for process in processes:
                assert process.read() == "ready"
            print(f"{len(processes)} processes were ready after {time.monotonic() - started:.1f} s", flush=True)
            times, num_rounds = take_turns(pairs, num_rounds, started + ROUNDS_S)
            conditions = check(pairs, num_rounds)
        finally:
            watch.cancel()
            for process in processes:
                process.process.kill()
    conditions |= {"pairs": num_pairs, "rounds": num_rounds, "launches_per_round": LAUNCHES}
    return {"conditions": conditions, "result": quartiles(times)}


def quartiles(times: Times) -> Quartiles:
    """Lower quartile, median and upper quartile in ns per launch; `more`: of the filter over its partner, turn by turn."""
    rows: Quartiles = {}
    for what, found in times.items():
        more = [with_it - without for without, with_it in zip(found["without"], found["with"], strict=True)]
        parts = {**found, "more": more}
        rows[what] = {how: [round(figure, 1) for figure in statistics.quantiles(part, n=4)] for how, part in parts.items()}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--write", action="store_true", help="store the result under benchmarks/results/")
    parser.add_argument("-o", "--output", type=Path, help="store the result there")
    parser.add_argument("--job", action="store_true", help="what a process started by this benchmark does")
    options = parser.parse_args()
    if options.job:
        Job().serve()
        return
    started = time.monotonic()
    result = conduct(options.pairs, options.rounds, started)
    text = json.dumps(result, indent=1) + "\n"
    for path in (options.output, RESULTS / "filter_on_gpu.json" if options.write else None):
        if path is not None:
            path.write_text(text)
            print(f"written to {path}")
    print(f"ns per launch: median (quartiles); {json.dumps(result['conditions'])}")
    for what, row in result["result"].items():
        cells = (f"{how} {part[1]:,.0f} ({part[0]:,.0f} to {part[2]:,.0f})" for how, part in row.items())
        print(f"{what:26}", "   ".join(cells))


if __name__ == "__main__":
    main()
