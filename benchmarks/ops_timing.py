"""Times of calls on all ranks of a group: interleaved, started together, the slowest rank counted.

Before each call the GPUs meet in a tiny all-reduce, behind a spinning kernel that gives the host time to issue
everything, so what is timed is the GPUs' work and not the host's; the host's time to issue a call is measured beside
it.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.on_gpus import largest, shared_rounds
from counterpoint.ops.call_timer import SPIN_CYCLES, WARM_UP_ROUNDS


class Timed:
    """Median and spread of one candidate."""

    def __init__(self, times_us: list[float], host_us: list[float]) -> None:
        self.median_us = statistics.median(times_us)
        self.least_us = min(times_us)
        quarters = statistics.quantiles(times_us, n=4) if len(times_us) > 3 else [min(times_us), 0, max(times_us)]
        self.spread = (quarters[2] - quarters[0]) / 2 / self.median_us
        self.host_us = statistics.median(host_us)

    def as_dict(self) -> dict[str, float]:
        return {
            "median_us": round(self.median_us, 2),
            "least_us": round(self.least_us, 2),
            "spread": round(self.spread, 4),
            "host_us": round(self.host_us, 1),
        }


def time_interleaved(
    calls: dict[str, Callable[[], object]], num_rounds: int, num_warm_ups: int = WARM_UP_ROUNDS, in_a_row: int = 1
) -> dict[str, Timed]:
    """Every call once per round, or `in_a_row` times, in an order of its own, the same on all ranks."""
    names = list(calls)
    token = torch.ones(1, device="cuda")
    events = {name: [] for name in names}
    host: dict[str, list[float]] = {name: [] for name in names}
    rounds = shared_rounds(len(names))
    for number in range(num_warm_ups + num_rounds):
        for name in (names[place] for place in rounds.order(number)):
            torch.cuda._sleep(SPIN_CYCLES)
            dist.all_reduce(token)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            began = time.perf_counter()
            for _ in range(in_a_row):
                calls[name]()
            took_us = (time.perf_counter() - began) * 1e6 / in_a_row
            end.record()
            if number >= num_warm_ups:
                events[name].append((start, end))
                host[name].append(took_us)
        torch.cuda.synchronize()
    times_us = largest([[1000 * a.elapsed_time(b) / in_a_row for a, b in events[name]] for name in names])
    return {name: Timed(row, host[name]) for name, row in zip(names, times_us, strict=True)}
