"""What benchmarks on several GPUs share: ranks that meet and leave at once, one that prints, and the conditions.

A rank that fails shows why and ends, because the others may wait in its collectives; a hang shows all stacks and ends, too.
"""

import argparse
import faulthandler
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from counterpoint.cuda import ranks
from counterpoint.measurement.orders import Rounds, draw_seed
from counterpoint.validation.records import MeasuredSet, save_measured


def join(limit_s: int) -> None:
    """Take this rank's GPU and join the others; everything must be over within the limit."""
    faulthandler.dump_traceback_later(limit_s, exit=True)
    ranks.join_ranks()


def join_with_options(parser: argparse.ArgumentParser, *, limit_s: int, rounds: int | None = None) -> argparse.Namespace:
    """Parse a benchmark's own options and those that all have (`--rounds` if it has a default), then `join`."""
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--limit-s", type=int, default=limit_s)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    join(options.limit_s)
    return options


def is_first() -> bool:
    """Whether this is the first rank, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def log(*words: object) -> None:
    """Print on the first rank."""
    if is_first():
        print(*words, flush=True)


def conditions(**more: object) -> dict[str, object]:
    """Date, GPUs, versions, and what else the benchmark wants to be known."""
    from counterpoint.cuda.conditions import measuring_conditions  # noqa: PLC0415  --help needs no cuda-bindings

    return measuring_conditions(**more)


def save(output: Path | None, result: Sequence[object], **more: object) -> None:
    """Write what there is so far, on the first rank."""
    if output is not None and is_first():
        output.write_text(json.dumps({"conditions": conditions(**more), "result": result}, indent=1) + "\n")


def saving(output: Path | None) -> Callable[[MeasuredSet], None]:
    """What to call after each case: it prints the case's times and saves all measurements, on the first rank."""

    def save_case(measured: MeasuredSet) -> None:
        found = measured.cases[-1]
        log(f"{found.name}: " + ", ".join(f"{row.label} {row.measured_us:.0f}" for row in found.rows))
        if output is not None and is_first():
            save_measured(measured, output)

    return save_case


def stored(output: Path | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The results that a file holds, of as many GPUs as these, and what its conditions say beyond ours; nothing without one.

    Every rank reads it before one of them writes.
    """
    if output is None or not output.exists():
        return [], {}
    found, ours = json.loads(output.read_text()), conditions()
    known = found["conditions"]
    if known.get("gpus") != ours["gpus"]:
        raise SystemExit(f"{output} was measured on {known.get('gpus')}, and these are {ours['gpus']}. Name another file.")
    return list(found["result"]), {name: value for name, value in known.items() if name not in ours}


def largest(values: Sequence[Any]) -> Any:
    """Each number's largest over the ranks; numbers in a list, or in lists of equal length."""
    shared = torch.tensor(values, device="cuda", dtype=torch.float64)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return shared.tolist()


def shared_rounds(num_variants: int) -> Rounds:
    """Balanced orders of turns, drawn anew for each run and the same on all ranks."""
    return Rounds(int(largest([float(draw_seed())])[0]), num_variants)


def run_and_leave(main: Callable[[], None]) -> None:
    """Run the benchmark and end this process at once, however it went; what fails on the GPU only now counts, too."""

    def complete() -> None:
        main()
        torch.cuda.synchronize()

    ranks.run_and_leave(complete)
