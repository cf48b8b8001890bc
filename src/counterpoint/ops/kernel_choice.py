"""Chooses the fastest of a product's kernels by timing them, without the host waiting for the GPU.

The pieces of a schedule have sizes for which a library's first kernel is often not its fastest, and at the power limit
the order of kernels changes. Everything is put on the current stream: a first run of every kernel, whose result is compared
with that of the first, and then turns, each timed by events. When the GPU has passed them, `fastest` reads the times. Only a
kernel whose result has the same bits is taken.
"""

import math
import os
import statistics
from collections.abc import Callable, Sequence

import torch

from counterpoint.measurement.orders import Rounds

SWITCH = "COUNTERPOINT_KERNELS"  # 0 leaves every product to the library's first kernel
NUM_ROUNDS, LEAST_ROUNDS = 5, 3
TURN_US = 1000.0  # the least that one turn takes, as launches of the same kernel
MAX_US = 1e6  # the most that all turns of a product take; one that would take longer is not timed
FLOPS_PER_US = 700e6  # about what an H100 reaches in half precision; it sets only how many launches a turn has
LEAD_CYCLES = 4_000_000  # some 2 ms, in which the host issues launches that are shorter than their issuing
LEAST_US = 25.0  # a product that takes less is not timed: what it costs is its launch
LEAST_GAIN = 0.01  # below it the times are alike, and the first stays
Launch = Callable[[torch.Tensor], None]  # of a kernel that writes the product to this matrix


def is_wanted() -> bool:
    """Return whether this process chooses kernels by their times. Deterministic algorithms and torch's own tuning leave no
    choice.
    """
    if os.environ.get(SWITCH) == "0" or torch.are_deterministic_algorithms_enabled():
        return False
    return not torch._C._cuda_tunableop_is_enabled()


class KernelTimes:
    """Times of some kernels for one product, as they come in."""

    def __init__(self, launches: Sequence[Launch], results: Sequence[torch.Tensor], turns: tuple[int, int]) -> None:
        """Issue all turns on the current stream: as many rounds, and launches in a turn, as `turns` says. `results` are two
        matrices to write to.
        """
        first, other = results
        launches[0](first)
        num_wrong = torch.zeros(len(launches), dtype=torch.int64, device=first.device)
        for number, launch in enumerate(launches):
            launch(other)
            num_wrong[number] = torch.count_nonzero(other.view(torch.int16) != first.view(torch.int16))
        self._num_wrong = torch.empty(len(launches), dtype=torch.int64, pin_memory=True)  # read without waiting for a stream
        self._num_wrong.copy_(num_wrong, non_blocking=True)
        (num_rounds, num_launches), rounds = turns, Rounds(0, len(launches))
        self._events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in launches]
        torch.cuda._sleep(LEAD_CYCLES)
        for each in range(num_rounds):
            for number in rounds.order(each):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(num_launches):
                    launches[number](other)
                end.record()
                self._events[number].append((start, end))
        self._last = end

    def is_over(self) -> bool:
        """Return whether the GPU has passed the last turn."""
        return bool(self._last.query())

    def fastest(self) -> int:
        """Return the number of the kernel to use, when the measurement is over."""
        times = [[start.elapsed_time(end) for start, end in turns] for turns in self._events]
        return fastest_alike(times, self._num_wrong.tolist())


def num_turns(num_flops: float, num_kernels: int) -> tuple[int, int] | None:
    """Return how many rounds of turns there are, and launches in a turn; None if the product is too short, or if even few
    rounds would take too long.
    """
    launch_us = num_flops / FLOPS_PER_US
    if launch_us < LEAST_US:
        return None
    num_launches = max(1, math.ceil(TURN_US / launch_us))
    num_rounds = min(NUM_ROUNDS, int(MAX_US / (num_kernels * num_launches * launch_us)))
    return (num_rounds, num_launches) if num_rounds >= LEAST_ROUNDS else None


def fastest_alike(times: Sequence[Sequence[float]], num_wrong: Sequence[int]) -> int:
    """Return the number of the kernel with the least median time among those without a wrong number; the first, unless
    another is faster by `LEAST_GAIN`.
    """
    medians = [statistics.median(turns) for turns in times]
    alike = [number for number, count in enumerate(num_wrong) if not count]
    best = min(alike, key=medians.__getitem__, default=0)
    return best if medians[best] <= (1 - LEAST_GAIN) * medians[0] else 0
