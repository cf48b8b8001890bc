"""Who wins the race of an eager collective and a kernel: launch attribute, process-group option, head start, or two of them.

torchrun --nproc-per-node 2 -m benchmarks.eager_race -o race.json
torchrun --nproc-per-node 2 -m benchmarks.eager_race --parts pairs -o pairs.json

Each rank starts itself again with the launch filter preloaded, and swaps the filter's table from variant to variant. Two
process groups live side by side, one with `is_high_priority_stream=True`. Parts: `pairs` (a collective and a kernel that are
ready at the same moment, `race_pairs.py`) and `steps` (training steps, `race_steps.py`). All variants run in every round, in
an order of its own; the first repetition after a swap is not timed. The filter's counters show that each control engaged. A
part that runs out of its seconds prints what it has, from fewer rounds; 60 s beyond both, everything ends.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from counterpoint.launch_filter.control_block import INITIAL_BLOCK, ControlBlock
from counterpoint.launch_filter.library import filter_library
from counterpoint.plan import LEAVE_IT
from counterpoint.supervised.environment import job_environment
from counterpoint.supervised.settings import DIRECTORY_VARIABLE

START_S = 60
PARTS = ("pairs", "steps")


def start_under_the_filter() -> Path:
    """The folder with this process's control block; a process without the filter starts itself again with it."""
    folder = os.environ.get(DIRECTORY_VARIABLE)
    if folder:
        return Path(folder)
    directory = Path(tempfile.mkdtemp(prefix="counterpoint-race-"))
    ControlBlock.write_initial(directory / INITIAL_BLOCK, ())
    environment = job_environment(os.environ, directory, filter_library(), LEAVE_IT, has_agent=False)
    os.execve(sys.executable, [sys.executable, "-u", "-m", "benchmarks.eager_race", *sys.argv[1:]], environment)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--priority", type=int, default=-5, help="of the launch attribute; a lower number is greater")
    parser.add_argument("--pair-seconds", type=float, default=40)
    parser.add_argument("--step-seconds", type=float, default=60)
    parser.add_argument("-o", "--output", type=Path)
    return parser.parse_args()


def race(directory: Path, options: argparse.Namespace) -> None:
    from benchmarks.on_gpus import join, log, save  # noqa: PLC0415  torch only in the process that has the filter
    from benchmarks.race_pairs import run_pairs  # noqa: PLC0415
    from benchmarks.race_steps import run_steps  # noqa: PLC0415
    from benchmarks.race_tables import print_part  # noqa: PLC0415
    from benchmarks.race_variants import Race  # noqa: PLC0415

    join(int(START_S + options.pair_seconds + options.step_seconds))
    runs = {"pairs": (run_pairs, options.pair_seconds), "steps": (run_steps, options.step_seconds)}
    course = Race(directory / f"{os.getpid()}.block", options.rounds, options.priority)
    results: list[dict[str, object]] = []
    for part in options.parts:
        run, seconds = runs[part]
        course.start_part(seconds)
        cases = run(course)
        results.append({"part": part, "cases": [case.as_dict() for case in cases], "controls": course.counts_as_dict()})
        save(options.output, results, rounds=options.rounds, priority=options.priority)
        log("\n".join(print_part(part, cases, course)))


def main() -> None:
    options = parse()
    directory = start_under_the_filter()

    def run() -> None:
        try:
            race(directory, options)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    from benchmarks.on_gpus import run_and_leave  # noqa: PLC0415

    run_and_leave(run)


if __name__ == "__main__":
    main()
