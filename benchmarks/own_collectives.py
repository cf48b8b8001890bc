"""Collectives that a job calls itself, alone and beside a matmul that does not need them: NCCL's, and by copies.

    torchrun --nproc-per-node 2 -m benchmarks.own_collectives -o results.json
    torchrun --nproc-per-node 2 -m benchmarks.own_collectives --mib 1 2 4 8 --calls 40 -o small.json

A rank sends a block of `mib_of_block` MiB to every other rank, and in an all-reduce two. Beside a matmul (8192^3, bf16) the
collective is asynchronous, and the stream waits for it after the matmul. The variants take turns in balanced order. A time
is the GPU's per call on the slowest rank, where `--calls` calls follow each other and the host issues them ahead.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.on_gpus import join_with_options, largest, log, run_and_leave, save, shared_rounds
from counterpoint.integrations import collectives
from counterpoint.ops.call_timer import SPIN_CYCLES
from counterpoint.units import MIB

MIB_OF_BLOCKS = (16, 32, 64, 128, 256)
WIDTH = 8192  # of the matmul
WARM_UP_CALLS = 4  # a call is recorded at the third sighting
Variant = tuple[str, str, bool]  # the kind, where it runs, and whether by copies


def calls_of(mib: int) -> dict[str, Callable[[bool], object]]:
    """Each kind as a function of whether it is asynchronous."""
    num_ranks, options = dist.get_world_size(), {"device": "cuda", "dtype": torch.bfloat16}
    whole, other = (torch.ones(num_ranks * mib * MIB // 2, **options) for _ in range(2))
    part = torch.ones(mib * MIB // 2, **options)
    return {
        "all_to_all": lambda is_async: dist.all_to_all_single(other, whole, async_op=is_async),
        "all_gather": lambda is_async: dist.all_gather_into_tensor(whole, part, async_op=is_async),
        "reduce_scatter": lambda is_async: dist.reduce_scatter_tensor(part, whole, async_op=is_async),
        "all_reduce": lambda is_async: dist.all_reduce(whole, op=dist.ReduceOp.AVG, async_op=is_async),
    }


def beside(call: Callable[[bool], object], multiply: Callable[[], object]) -> None:
    """Begin a collective, multiply, and wait for it."""
    work = call(True)
    multiply()
    work.wait()  # type: ignore[attr-defined]


def time_of(call: Callable[[], object], num_calls: int) -> float:
    """GPU time of one of `num_calls` calls in a row, in us, on this rank."""
    for _ in range(WARM_UP_CALLS):
        call()
    torch.cuda.synchronize()
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(num_calls * SPIN_CYCLES)  # while the host issues them
    begun.record()
    for _ in range(num_calls):
        call()
    ended.record()
    torch.cuda.synchronize()
    return float(begun.elapsed_time(ended)) / num_calls * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=MIB_OF_BLOCKS, metavar="MIB", help="sizes of a block")
    parser.add_argument("--calls", type=int, default=10, help="calls in a row")
    options = join_with_options(parser, limit_s=200, rounds=6)
    multiply = partial(torch.mm, *(torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2)))
    replaced = collectives.replace(is_on=False, least_part_bytes=min(options.mib) * MIB)

    def measured(call: Callable[[], object], *, is_on: bool = False) -> float:
        replaced.use(is_on)
        own_us = time_of(call, options.calls)
        replaced.use(False)
        return float(largest([own_us])[0])

    results: list[object] = []
    for mib in options.mib:
        calls = {
            (kind, place): each
            for kind, call in calls_of(mib).items()
            for place, each in (("alone", partial(call, False)), ("beside", partial(beside, call, multiply)))
        }
        variants = [(kind, place, is_on) for kind, place in calls for is_on in (False, True)]
        found: dict[Variant, list[float]] = {name: [] for name in variants}
        lone_us: list[float] = []
        rounds = shared_rounds(len(variants))
        for number in range(options.rounds):
            for kind, place, is_on in (variants[each] for each in rounds.order(number)):
                found[kind, place, is_on].append(measured(calls[kind, place], is_on=is_on))
            lone_us.append(measured(multiply))
        log(f"{mib} MiB a block, us: NCCL and copies alone, then beside a matmul of {statistics.median(lone_us):.0f}")
        for kind in dict.fromkeys(kind for kind, _ in calls):
            row: dict[str, object] = {"kind": kind, "mib_of_block": mib, "matmul_us": round(statistics.median(lone_us), 1)}
            for _, place, is_on in (each for each in variants if each[0] == kind):
                times = found[kind, place, is_on]
                name = f"{'copies' if is_on else 'nccl'}_{place}"
                row[f"{name}_us"] = round(statistics.median(times), 1)
                row[f"{name}_half_range_us"] = round((max(times) - min(times)) / 2, 1)
            log("   " + "".join(f"{row[name]!s:>16}" for name in row if not name.endswith("range_us")))
            results.append(row)
        save(options.output, results)
    log(str(replaced))


if __name__ == "__main__":
    run_and_leave(main)
