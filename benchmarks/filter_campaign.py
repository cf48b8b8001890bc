"""Randomized launches before a double of the driver: none may fail under the filter that would have succeeded without it.

A program (`filter_campaign.c`) launches from several threads, sets, reads and lowers limits, unloads and loads modules,
forks, and opens libraries whose constructors launch, while tables of random rules are swapped from outside. It knows which
of its launches must succeed and counts those that fail: 0 is required. A shorter part runs under AddressSanitizer with
UndefinedBehaviorSanitizer, and one under ThreadSanitizer (without forks, which it does not follow). No GPU is used.
"""

import argparse
import json
import os
import random
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tests.helpers.build_filter import SANITIZERS, Built, build_preloaded, build_sanitized, compile_c, environment

from benchmarks.conditions import store
from counterpoint.errors import LaunchFilterError
from counterpoint.launch_filter.control_block import INITIAL_BLOCK, ControlBlock
from counterpoint.launch_filter.rules import FilterRule

SOURCE = Path(__file__).with_name("filter_campaign.c")
LAUNCHES, SANITIZED_LAUNCHES = 10_000_000, 1_500_000
THREADS, FORKS, SANITIZED_FORKS = 4, 200, 10
SWAP_EVERY_S = 0.004
LIMIT_S = 900
PATTERNS = ("capped*", "*", "gemm", "nccl*", "void add<*", "_Z*", "elementwise", "*attention*")
CAPS = (20_000, 60_000, 80_000, 100_000, 200_000, 300_000)


@dataclass(frozen=True)
class Part:
    """One run of the program."""

    name: str
    launches: int
    forks: int
    sanitizer: str | None = None


PARTS = (
    Part("as shipped", LAUNCHES, FORKS),
    Part("address, undefined behavior", SANITIZED_LAUNCHES, SANITIZED_FORKS, "address"),
    Part("thread", SANITIZED_LAUNCHES, 0, "thread"),
)


def random_table(chosen: random.Random) -> tuple[FilterRule, ...]:
    """Up to ten rules; none at times, as when a plan is taken back."""
    return tuple(
        FilterRule(
            pattern=chosen.choice(PATTERNS),
            kind=chosen.choice((None, None, "computation", "communication")),
            dynamic_shared_bytes=chosen.choice((None, *CAPS)),
            carveout_percent=chosen.choice((None, -1, 50, 100)),
            priority=chosen.choice((None, -1, -5, -6)),
            hold_us=chosen.choice((None, None, 5.0)),
            is_collective=chosen.random() < 0.2,
        )
        for _ in range(chosen.choice((0, 0, 1, 2, 4, 10)))
    )


def build(folder: Path, sanitizer: str | None) -> tuple[Built, Path]:
    """The program with the filter, and the library that it opens."""
    built = (
        build_preloaded(folder, client=SOURCE) if sanitizer is None else build_sanitized(folder, sanitizer, client=SOURCE)
    )
    flags = SANITIZERS[sanitizer] if sanitizer else ()
    compile_c(
        folder, *flags, "-DPLUGIN", "-shared", "-fPIC", "-o", "plugin.so", str(SOURCE), "-L.", "-lcuda", "-Wl,-rpath,$ORIGIN"
    )
    return built, folder / "plugin.so"


def swap_until_it_ends(program: "subprocess.Popen[str]", directory: Path, chosen: random.Random) -> int:
    """Swap tables in the program's own block; blocks of forked children are removed. Returns how many swaps there were."""
    own, num_swaps, deadline = directory / f"{program.pid}.block", 0, time.monotonic() + LIMIT_S
    block: ControlBlock | None = None
    while program.poll() is None and time.monotonic() < deadline:
        time.sleep(SWAP_EVERY_S)
        with suppress(LaunchFilterError):  # it is being made
            block = block or ControlBlock(own)
        if block is not None:
            block.swap(random_table(chosen))
            num_swaps += 1
        for path in directory.glob("*.block"):
            if path not in (own, directory / INITIAL_BLOCK):
                path.unlink(missing_ok=True)
    if block is not None:
        block.close()
    program.kill()
    return num_swaps


def run(part: Part, seed: int) -> dict[str, object]:
    """One part; `failed` must be 0 and `reports` empty."""
    with tempfile.TemporaryDirectory() as name:
        built, plugin = build(Path(name), part.sanitizer)
        directory = Path(name) / "run"
        directory.mkdir()
        chosen = random.Random(seed)
        ControlBlock.write_initial(directory / INITIAL_BLOCK, random_table(chosen))
        behind = () if part.sanitizer else (Path("libstdc++.so.6"),)
        program = subprocess.Popen(
            [str(built.client), str(seed), str(THREADS), str(part.launches), str(part.forks), str(plugin)],
            env=environment(built, directory, behind=behind),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        num_swaps = swap_until_it_ends(program, directory, chosen)
        printed, said = program.communicate()
    counts = json.loads(printed) if program.returncode == 0 else {"failed": -1}
    return {**counts, "swaps": num_swaps, "threads": THREADS, "exit_status": program.returncode, "reports": said[-2000:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="store the result under benchmarks/results/")
    parser.add_argument("--launches", type=int, default=LAUNCHES, help="of the part without sanitizers")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    result: dict[str, dict[str, object]] = {}
    print(f"{'part':30} {'launches':>10} {'swaps':>7} {'unloads':>8} {'forks':>6} {'failed':>7}  reports")
    for part in (replace(PARTS[0], launches=given.launches), *PARTS[1:]):
        found = result[part.name] = run(part, given.seed)
        figures = [found.get(name, 0) for name in ("launches", "swaps", "unloads", "forks", "failed")]
        print(
            "{:30} {:>10,} {:>7,} {:>8,} {:>6,} {:>7}  {}".format(part.name, *figures, found["reports"] or "none"),
            flush=True,
        )
    is_clean = all(found["failed"] == 0 and not found["reports"] for found in result.values())
    if given.write:
        machine = f"{os.cpu_count()} cores, no GPU"
        store("filter_campaign", {"machine": machine, "seed": given.seed, "is_clean": is_clean, "parts": result})
    raise SystemExit(0 if is_clean else 1)


if __name__ == "__main__":
    main()
