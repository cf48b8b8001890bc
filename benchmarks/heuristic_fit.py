"""The constants of the heuristic's estimates, fitted to stored times. Needs no GPU.

    python -m benchmarks.heuristic_fit

A search over six constants, one after the other in smaller and smaller steps, from two rough starts, for the least sum of
two losses: of lone matmuls and of matmuls in pieces on one stream (benchmarks/ops_losses.py), where nothing is communicated,
and of the schedules of the 17 fitted shapes on 2 GPUs. It prints what it finds in some minutes; nothing is written.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from benchmarks.heuristic_cases import LONE, MACHINE, Case, stored_cases, stored_entries
from benchmarks.ops_shapes import HELD_OUT
from counterpoint.schedule import CopySchedule, Problem, make_schedule
from counterpoint.schedule.costs import DEFAULT_COSTS, Clock, Costs
from counterpoint.schedule.estimate import estimate, estimate_sequential
from counterpoint.schedule.heuristic import candidate_descriptions
from counterpoint.schedule.wave_model import Sms

# Where the searches start: rough values
PIECES_STARTS = ({"tile_us": 2.0, "tile_edge": 5.0, "kernel_us": 4.0}, {"tile_us": 1.6, "tile_edge": 7.5, "kernel_us": 3.2})
START = {"call_us": 5.0, "power_returned": 0.4, "stagger_waves": 0.06}
STEPS = (1.5, 1.3, 1.15, 1.07, 1.03)  # a constant is multiplied by a step or divided by it
PASSES = 2  # over all constants, with each step
NEAR = 0.04  # schedules that are slower by so much count 1 / e in a fit
CLOSE = 0.006  # the same for estimates, where the fit asks what would be picked
SEQUENTIAL_WEIGHT = 0.3  # at least: whether a schedule pays at all depends on it
LOSSES = "ops_losses_2x_h200.json"
MOST_PIECES = 4  # more are no candidates
AT_FULL_CLOCK_US = DEFAULT_COSTS.full_clock_us
Sizes = tuple[int, int, int]


def search(loss: Callable[[Costs], float], start: Mapping[str, float]) -> Costs:
    """Constants one after the other, in smaller and smaller steps, from `start`, for the least loss."""
    costs = msgspec.structs.replace(DEFAULT_COSTS, **start)
    least = loss(costs)
    for name, step in ((name, step) for step in STEPS for _ in range(PASSES) for name in start):
        for factor in (step, 1 / step):
            other = msgspec.structs.replace(costs, **{name: factor * getattr(costs, name)})
            found = loss(other)
            if found < least:
                costs, least = other, found
                break
    return costs


class Cut(NamedTuple):
    """A matmul in equal pieces along one dimension, one after the other, and its time over that of the whole."""

    sizes: Sizes
    dimension: str
    count: int
    over_whole: float


class PiecesFit:
    """How far estimates of lone matmuls, and of matmuls in pieces over whole ones, are from what was measured."""

    def __init__(self) -> None:
        entries = [entry for entry in stored_entries(LOSSES) if entry["loss"] == "decomposition"]
        self._whole = [(tuple(entry["sizes_m_n_k"]), entry["whole_us"]) for entry in entries]
        self._cuts = [cut for entry in entries for cut in _cuts(tuple(entry["sizes_m_n_k"]), entry["over_whole"])]
        for name in LONE:
            lone = (
                (tuple(entry["sizes_m_n_k"]), entry["candidates"]["matmul"]["median_us"]) for entry in stored_entries(name)
            )
            self._whole += [(sizes, time_us) for sizes, time_us in lone if time_us < AT_FULL_CLOCK_US]

    def loss(self, costs: Costs) -> float:
        """Root mean square of the relative errors; ratios of cut matmuls count twice."""
        whole = [math.log(pieces_us(sizes, "rows", 1, costs) / time_us) for sizes, time_us in self._whole]
        cut = []
        for sizes, dimension, count, over_whole in self._cuts:
            ratio = pieces_us(sizes, dimension, count, costs) / pieces_us(sizes, dimension, 1, costs)
            cut.append(math.log(ratio / over_whole))
        return 2 * _root_mean_square(cut) + _root_mean_square(whole)


def _cuts(sizes: Sizes, over_whole: Mapping[str, float]) -> Iterable[Cut]:
    """Those along rows and columns, on one stream: `rows/4 on 1`."""
    for name, ratio in over_whole.items():
        dimension, rest = name.split("/")
        count, num_streams = rest.split(" on ")
        if dimension != "inner" and num_streams == "1" and int(count) <= MOST_PIECES:
            yield Cut(sizes, dimension, int(count), ratio)


def pieces_us(sizes: Sizes, dimension: str, count: int, costs: Costs) -> float:
    """The estimate of a matmul in pieces, one after the other, without communication."""
    rows, columns, inner = sizes
    whole = {"num_rows": rows, "num_inner": inner, "num_columns": columns}
    clock = Clock(Problem(operation="all_gather_matmul", num_ranks=1, **whole), MACHINE, costs)
    sms, end_us = Sms(MACHINE.gpu.num_sms), 0.0
    piece = whole | {f"num_{dimension}": whole[f"num_{dimension}"] // count}
    for _ in range(count):
        end_us = sms.run(end_us, clock.piece(**piece), clock.smoothing)
    return end_us


class SchedulesFit:
    """How far estimates of schedules are from measured times, most of all those of the fastest, and what the picks lose."""

    def __init__(self, cases: Iterable[Case]) -> None:
        self._cases = list(cases)
        self._schedules = [list(self._made(case)) for case in self._cases]

    def _made(self, case: Case) -> Iterable[tuple[CopySchedule, float]]:
        for description in candidate_descriptions(case.problem, case.machine):
            if description.label() in case.times_us:
                yield make_schedule(case.problem, description), case.times_us[description.label()]

    def loss(self, costs: Costs) -> float:
        """Mean over cases of the estimates' error, each case on its own scale, and of the regret where near estimates share
        the pick; sequential is one of the schedules."""
        total = 0.0
        for case, schedules in zip(self._cases, self._schedules, strict=True):
            estimated = [estimate(schedule, case.problem, case.machine, costs).makespan_us for schedule, _ in schedules]
            estimated.append(estimate_sequential(case.problem, case.machine, costs))
            measured = [*(time_us for _, time_us in schedules), case.times_us["sequential"]]
            total += _error(estimated, measured) + _shared_regret(estimated, measured)
        return total / len(self._cases)


def _error(estimated: list[float], measured: list[float]) -> float:
    ratios = [math.log(time_us / estimated_us) for time_us, estimated_us in zip(measured, estimated, strict=True)]
    fast, near = ([math.exp(-(each / min(times) - 1) / NEAR) for each in times] for times in (measured, estimated))
    fast[-1] = max(fast[-1], SEQUENTIAL_WEIGHT)
    scale = sum(weight * ratio for weight, ratio in zip(fast, ratios, strict=True)) / sum(fast)
    weights = [one + other for one, other in zip(fast, near, strict=True)]
    squares = sum(weight * (ratio - scale) ** 2 for weight, ratio in zip(weights, ratios, strict=True))
    return math.sqrt(squares / sum(weights))


def _shared_regret(estimated: list[float], measured: list[float]) -> float:
    weights = [math.exp(-(each / min(estimated) - 1) / CLOSE) for each in estimated]
    regrets = [time_us / min(measured) - 1 for time_us in measured]
    return sum(weight * regret for weight, regret in zip(weights, regrets, strict=True)) / sum(weights)


def _root_mean_square(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def fitted(costs: Costs, names: Iterable[str]) -> dict[str, float]:
    """Some constants, in three digits."""
    return {name: float(f"{getattr(costs, name):.3g}") for name in names}


def main() -> None:
    pieces = PiecesFit()
    schedules = SchedulesFit(case for case in stored_cases(2) if case.shape not in HELD_OUT)

    def both(costs: Costs) -> float:
        return pieces.loss(costs) + schedules.loss(costs)

    found = [(start, search(both, start)) for start in (each | START for each in PIECES_STARTS)]
    for name, names, costs in (*(("found", *each) for each in found), ("in force", found[0][0], DEFAULT_COSTS)):
        print(f"{name}:", fitted(costs, names), f"pieces {pieces.loss(costs):.4f} schedules {schedules.loss(costs):.4f}")


if __name__ == "__main__":
    main()
