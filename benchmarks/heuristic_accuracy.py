"""How often the heuristic picks the best measured schedule, from the stored times of the operators' benchmark.

    python -m benchmarks.heuristic_accuracy [--leave-one-out] [--write]

Needs no GPU. A pick counts as the best within 0.5 % and within 1 % of the fastest schedule that was measured, sequential
included; and within the spread, where the two measured intervals (median +- half the interquartile range) meet. Regret is
how much longer the pick takes than the fastest. `peer / picked` is the geometric mean of the time of PyTorch's fused
operator over that of the pick; `slower than peer` counts the picks for which that is below 1.

--leave-one-out fits the constants once for each of the 24 shapes, without it, from the same rough start, and picks for it
with those. It takes a minute or two on 2 cores. `fit` is the search that it uses.
"""

import argparse
import concurrent.futures
import json
import math
import random
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from benchmarks.conditions import RESULTS, store
from benchmarks.ops_shapes import HELD_OUT, SHAPES
from counterpoint.machine import load_machine
from counterpoint.schedule import CopySchedule, Problem, make_schedule
from counterpoint.schedule.costs import DEFAULT_COSTS, Costs
from counterpoint.schedule.estimate import estimate
from counterpoint.schedule.heuristic import candidate_descriptions, pick_schedule

MACHINE = load_machine("h200")
OPERATIONS = {"ag_mm": "all_gather_matmul", "mm_rs": "matmul_reduce_scatter"}
# Calls of 2 GPUs were replayed as CUDA graphs, as repeated calls are; those of 4 GPUs were issued one by one.
ROUNDS = {2: 20, 4: 5}  # of which the stored times are medians
STORED = {2: "ops_grid_2x_h200.json", 4: "ops_grid_4x_h200.json"}
UNSEEN = {"GEMMs": "ops_gemms_2x_h200.json"}  # on 2 GPUs; no part of any fit
# Where a fit starts, and by what factors it steps: rough values, none of them fitted
START = {"tile_edge": 5.0, "ramp_waves": 0.05, "power_returned": 0.5, "copy_us": 10.0, "kernel_us": 4.0}
STEPS = ((2.0, 0.5), (1.5, 0.67), (1.3, 0.77), (1.15, 0.87))
# Of normally distributed times: a median's error over a mean's, and the deviation over half the interquartile range
MEDIAN_OVER_MEAN, SIGMA_OVER_QUARTILES = math.sqrt(math.pi / 2), 1.4826
NUM_DRAWS = 400
NEAR = 0.04  # schedules that are slower by so much count 1 / e in a fit
CLOSE = 0.006  # the same for estimates, where the fit asks what would be picked


class Case(NamedTuple):
    """One operator on one shape and number of GPUs, and the measured times of its schedules, sequential included."""

    num_gpus: int
    op: str
    shape: str
    problem: Problem
    times_us: dict[str, float]
    spreads: dict[str, float]
    peer_us: float


class Choice(NamedTuple):
    """What the heuristic picks for a case."""

    case: Case
    label: str

    @property
    def regret(self) -> float:
        """How much longer the pick takes than the fastest, as a share."""
        times_us = self.case.times_us
        return times_us[self.label] / min(times_us.values()) - 1

    @property
    def is_within_spread(self) -> bool:
        """Whether the intervals of the pick and of the fastest meet."""
        times_us, spreads = self.case.times_us, self.case.spreads
        fastest = min(times_us, key=lambda label: times_us[label])
        least, most = (times_us[label] * (1 + sign * spreads[label]) for label, sign in ((self.label, -1), (fastest, 1)))
        return least <= most


def stored_cases(num_gpus: int, name: str = "") -> list[Case]:
    """The cases of a stored result, of the layers unless it is named."""
    cases = []
    for entry in json.loads((RESULTS / (name or STORED[num_gpus])).read_text())["result"]:
        num_rows, num_columns, num_inner = entry["sizes_m_n_k"]
        sizes = {"num_rows": num_rows, "num_columns": num_columns, "num_inner": num_inner}
        timed = {label: each for label, each in entry["candidates"].items() if "/" in label or label == "sequential"}
        cases.append(
            Case(
                num_gpus=num_gpus,
                op=entry["op"],
                shape=entry["shape"]["name"],
                problem=Problem(operation=OPERATIONS[entry["op"]], num_ranks=num_gpus, **sizes),
                times_us={label: each["median_us"] for label, each in timed.items()},
                spreads={label: each["spread"] for label, each in timed.items()},
                peer_us=entry["candidates"]["peer"]["median_us"],
            )
        )
    return cases


def all_cases() -> list[Case]:
    """The cases of all stored results."""
    return [case for num_gpus in STORED for case in stored_cases(num_gpus)]


def choices(cases: Iterable[Case], costs: Costs = DEFAULT_COSTS) -> list[Choice]:
    """The pick for each case."""
    return [Choice(case, pick_schedule(case.problem, MACHINE, "forward", costs).description.label()) for case in cases]


def figures(chosen: list[Choice]) -> dict[str, float]:
    """How good these picks are."""
    regrets = [choice.regret for choice in chosen]
    gains = [math.log(choice.case.peer_us / choice.case.times_us[choice.label]) for choice in chosen]
    return {
        "cases": len(chosen),
        "within_half_percent": sum(regret <= 0.005 for regret in regrets),
        "within_one_percent": sum(regret <= 0.01 for regret in regrets),
        "within_spread": sum(choice.is_within_spread for choice in chosen),
        "mean_regret": round(sum(regrets) / len(regrets), 4),
        "worst_regret": round(max(regrets), 4),
        "peer_over_picked": round(math.exp(sum(gains) / len(gains)), 4),
        "slower_than_peer": sum(gain < 0 for gain in gains),
    }


def grouped(chosen: list[Choice]) -> dict[str, dict[str, float]]:
    """Figures for each operator and number of GPUs, and for all, of fitted and held-out shapes apart."""
    found = {}
    for part, is_held_out in (("fitted", False), ("held out", True)):
        of_part = [choice for choice in chosen if (choice.case.shape in HELD_OUT) == is_held_out]
        found |= {f"{part}, {name}": figures(group) for name, group in {**by_group(of_part), "all": of_part}.items()}
    return found


def by_group(chosen: list[Choice]) -> dict[str, list[Choice]]:
    """The picks of each operator on each number of GPUs."""
    return {
        f"{num_gpus} GPUs, {op}": [each for each in chosen if (each.case.num_gpus, each.case.op) == (num_gpus, op)]
        for num_gpus in STORED
        for op in OPERATIONS
    }


def found_again(cases: Iterable[Case]) -> float:
    """The share of cases in which the fastest schedule would be within 1 % of the fastest again, if all were measured
    anew: times are drawn around the stored ones, as wide as a median of so many rounds with the stored spread is."""
    draw = random.Random(17)
    shares = []
    for case in cases:
        fastest = min(case.times_us, key=lambda label: case.times_us[label])
        width = MEDIAN_OVER_MEAN * SIGMA_OVER_QUARTILES / math.sqrt(ROUNDS[case.num_gpus])
        widths = {label: width * spread for label, spread in case.spreads.items()}
        hits = 0
        for _ in range(NUM_DRAWS):
            again = {label: time_us * (1 + draw.gauss(0, widths[label])) for label, time_us in case.times_us.items()}
            hits += again[fastest] <= 1.01 * min(again.values())
        shares.append(hits / NUM_DRAWS)
    return round(sum(shares) / len(shares), 2)


def evaluation() -> dict[str, object]:
    """The result without leave-one-out."""
    chosen = choices(all_cases())
    unseen = {part: choices(stored_cases(2, name)) for part, name in UNSEEN.items()}
    of_unseen = {
        f"{part}, {group}": figures(of_group)
        for part, picks in unseen.items()
        for group, of_group in {**by_group(picks), "all": picks}.items()
        if of_group
    }
    return {
        "figures": grouped(chosen) | of_unseen,
        "found_again": {name: found_again(each.case for each in group) for name, group in by_group(chosen).items()},
        "picks": {f"{each.case.num_gpus} GPUs, {each.case.op}, {each.case.shape}": each.label for each in chosen},
    }


class Fit:
    """A search for the constants that explain the times of some cases, most of all those of the fastest schedules."""

    def __init__(self, cases: Iterable[Case]) -> None:
        self._cases = list(cases)
        self._schedules = [list(self._made(case)) for case in self._cases]

    def _made(self, case: Case) -> Iterable[tuple[CopySchedule, float]]:
        for description in candidate_descriptions(case.problem, MACHINE):
            if description.label() in case.times_us:
                yield make_schedule(case.problem, description), case.times_us[description.label()]

    def loss(self, costs: Costs) -> float:
        """Mean over cases of the estimates' error, each case on its own scale, and of the regret where near estimates share
        the pick."""
        total = 0.0
        for case, schedules in zip(self._cases, self._schedules, strict=True):
            estimated = [estimate(schedule, case.problem, MACHINE, costs).makespan_us for schedule, _ in schedules]
            measured = [time_us for _, time_us in schedules]
            total += _error(estimated, measured) + _shared_regret(estimated, measured)
        return total / len(self._cases)

    def search(self) -> Costs:
        """Constants one after the other, in smaller and smaller steps, from `START`."""
        costs = msgspec.structs.replace(DEFAULT_COSTS, **START)
        least = self.loss(costs)
        for factors in STEPS:
            for name in START:
                for factor in factors:
                    other = msgspec.structs.replace(costs, **{name: factor * getattr(costs, name)})
                    loss = self.loss(other)
                    if loss < least:
                        costs, least = other, loss
                        break
        return costs


def _error(estimated: list[float], measured: list[float]) -> float:
    ratios = [math.log(time_us / estimated_us) for time_us, estimated_us in zip(measured, estimated, strict=True)]
    fast, near = ([math.exp(-(each / min(times) - 1) / NEAR) for each in times] for times in (measured, estimated))
    scale = sum(weight * ratio for weight, ratio in zip(fast, ratios, strict=True)) / sum(fast)
    weights = [one + other for one, other in zip(fast, near, strict=True)]
    squares = sum(weight * (ratio - scale) ** 2 for weight, ratio in zip(weights, ratios, strict=True))
    return math.sqrt(squares / sum(weights))


def _shared_regret(estimated: list[float], measured: list[float]) -> float:
    weights = [math.exp(-(each / min(estimated) - 1) / CLOSE) for each in estimated]
    regrets = [time_us / min(measured) - 1 for time_us in measured]
    return sum(weight * regret for weight, regret in zip(weights, regrets, strict=True)) / sum(weights)


def without(shape: str) -> tuple[dict[str, float], list[str]]:
    """The constants fitted without a shape, and the picks for it by those, in the order of the stored cases."""
    cases = all_cases()
    costs = Fit(case for case in cases if case.shape != shape).search()
    fitted = {name: round(getattr(costs, name), 4) for name in START}
    return fitted, [choice.label for choice in choices((case for case in cases if case.shape == shape), costs)]


def leave_one_out() -> dict[str, object]:
    """Figures over all shapes, each by constants fitted without it."""
    cases = all_cases()
    names = [shape.name for shape in SHAPES]
    with concurrent.futures.ProcessPoolExecutor() as pool:
        found = dict(zip(names, pool.map(without, names), strict=True))
    chosen = []
    for name, (_, labels) in found.items():
        of_shape = [case for case in cases if case.shape == name]
        chosen += [Choice(case, label) for case, label in zip(of_shape, labels, strict=True)]
    return {
        "figures": {name: figures(group) for name, group in {**by_group(chosen), "all": chosen}.items()},
        "constants": {name: fitted for name, (fitted, _) in found.items()},
    }


def _print(name: str, found: dict[str, float]) -> None:
    print(
        f"{name:28} best within 0.5 %: {found['within_half_percent']:2}, 1 %: {found['within_one_percent']:2}, the spread: "
        f"{found['within_spread']:2} of {found['cases']:2}; regret {100 * found['mean_regret']:.1f} %, worst "
        f"{100 * found['worst_regret']:.1f} %; peer / picked {found['peer_over_picked']:.3f}, slower than "
        f"peer {found['slower_than_peer']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leave-one-out", action="store_true", help="fit the constants again without each shape")
    parser.add_argument("--write", action="store_true", help="do so, and store all under benchmarks/results/")
    arguments = parser.parse_args()
    result = evaluation()
    for name, found in result["figures"].items():
        _print(name, found)
    for name, share in result["found_again"].items():
        print(f"{name}: measured again, the fastest would be within 1 % of the fastest in {100 * share:.0f} % of cases")
    if arguments.leave_one_out or arguments.write:
        result["leave_one_out"] = leave_one_out()
        for name, found in result["leave_one_out"]["figures"].items():
            _print(f"leave one out, {name}", found)
    if arguments.write:
        print(f"\nwritten to {store('heuristic_accuracy', result)}")


if __name__ == "__main__":
    main()
