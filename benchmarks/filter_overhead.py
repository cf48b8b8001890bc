"""The launch filter's host time per launch, against a test double of the driver: with and without the filter, in pairs."""

import statistics
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.helpers.build_filter import Built, build_preloaded, environment

from benchmarks.conditions import asks_to_write, store
from counterpoint.launch_filter.control_block import INITIAL_BLOCK, ControlBlock, block_paths
from counterpoint.launch_filter.rules import FilterRule

PAIRS = 9
ROUNDS = 15  # as filter_client.c runs them
LAUNCHES = 300_000
ASKED_NS = 50.0
KERNELS = {
    "a kernel that no rule names": ("elementwise", ()),
    "a kernel with a cap": ("capped", (FilterRule(pattern="capped", dynamic_shared_bytes=60_000, carveout_percent=100),)),
    "a collective with a priority": ("nccl", (FilterRule(pattern="nccl", priority=-5),)),
    "a kernel with a head start and nothing to race": ("gemm", (FilterRule(pattern="gemm", hold_us=5.0),)),
}


def nanoseconds(built: Built, directory: Path | None, kernel: str) -> float:
    """One process's quickest round, per launch."""
    commands = f"find proc_of_proc\nmake {kernel} 0 32\nbench {LAUNCHES}\n"
    ended = subprocess.run(
        [str(built.client)], input=commands, env=environment(built, directory), capture_output=True, text=True, check=True
    )
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith("nanoseconds"))
    return float(line.split()[1])


def check_counts(directory: Path, rules: tuple[FilterRule, ...]) -> None:
    """The filter counted every launch that was timed, and changed what it was told to."""
    (path,) = block_paths(directory)
    block = ControlBlock(path)
    state = block.state()
    block.close()
    assert state.num_launches == ROUNDS * LAUNCHES, state
    for rule, counters in zip(rules, state.counters, strict=True):
        assert counters.num_matched == ROUNDS * LAUNCHES
        assert counters.num_capped + counters.num_prioritized == (0 if rule.hold_us else ROUNDS * LAUNCHES)


def added(built: Built, folder: Path, kernel: str, rules: tuple[FilterRule, ...]) -> list[float]:
    """What the filter adds to a launch, once for each pair of processes."""
    differences = []
    for number in range(PAIRS):
        directory = folder / f"{kernel}-{number}"
        directory.mkdir()
        ControlBlock.write_initial(directory / INITIAL_BLOCK, rules)
        filtered = nanoseconds(built, directory, kernel)
        differences.append(filtered - nanoseconds(replace(built, preload=None), None, kernel))
        check_counts(directory, rules)
    return differences


def main() -> None:
    is_stored = asks_to_write(__doc__)
    result = {}
    with tempfile.TemporaryDirectory() as name:
        built = build_preloaded(Path(name))
        for what, (kernel, rules) in KERNELS.items():
            found = sorted(added(built, Path(name), kernel, rules))
            asked = ASKED_NS if not rules else None
            result[what] = {
                "added_ns": round(statistics.median(found), 1),
                "least": round(found[0], 1),
                "most": round(found[-1], 1),
                "asked": asked,
            }
            print(
                f"{what:48} {statistics.median(found):7.1f} ns   ({found[0]:.1f} to {found[-1]:.1f} in {PAIRS} pairs)"
                + (f"   asked: {asked:g} ns" if asked else "")
            )
    if is_stored:
        print(f"written to {store('filter_overhead', result)}")


if __name__ == "__main__":
    main()
