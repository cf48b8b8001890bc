"""How often the heuristic picks the best measured schedule, from the stored times of the operators' benchmark.

    python -m benchmarks.heuristic_accuracy [--leave-one-out] [--write]

Needs no GPU. A pick counts as the best within 0.5 % and within 1 % of the fastest schedule that was measured, sequential
included; and within the spread, where the two measured intervals (median +- half the interquartile range) meet. Regret is
how much longer the pick takes than the fastest. `peer / picked` is the geometric mean of the time of PyTorch's fused
operator over that of the pick; `slower than peer` counts the picks for which that is below 1. A case whose pick was not
timed is left out.

--leave-one-out fits the constants of schedules once for each of the 24 shapes, without it, from the same rough start
(benchmarks/heuristic_fit.py), and picks for it with those. It takes two or three minutes on 2 cores. Shapes that a seed drew
after the fit are listed by seed; `when measured` is what was picked then.
"""

import argparse
import concurrent.futures
import math
import random
from collections.abc import Iterable
from typing import NamedTuple

from benchmarks.conditions import store
from benchmarks.heuristic_cases import (
    AGAIN,
    OPERATIONS,
    PRESENT,
    SEEDED,
    SEEDED_ON_H100,
    STORED,
    UNSEEN,
    Case,
    all_cases,
    by_seed,
    seed_of,
    stored_cases,
    stored_entries,
)
from benchmarks.heuristic_fit import START, SchedulesFit, fitted, search
from benchmarks.ops_shapes import HELD_OUT, SHAPES
from counterpoint.schedule.costs import DEFAULT_COSTS, Costs
from counterpoint.schedule.heuristic import pick_schedule

# Of normally distributed times: a median's error over a mean's, and the deviation over half the interquartile range
MEDIAN_OVER_MEAN, SIGMA_OVER_QUARTILES = math.sqrt(math.pi / 2), 1.4826
NUM_DRAWS = 400


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


def choices(cases: Iterable[Case], costs: Costs = DEFAULT_COSTS) -> list[Choice]:
    """The pick for each case, but for cases whose pick was not timed."""
    picked = ((case, pick_schedule(case.problem, case.machine, "forward", costs).description.label()) for case in cases)
    return [Choice(case, label) for case, label in picked if label in case.times_us]


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


def by_group(chosen: Iterable[Choice]) -> dict[str, list[Choice]]:
    """The picks of each operator on each number of GPUs."""
    chosen = list(chosen)
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
        width = MEDIAN_OVER_MEAN * SIGMA_OVER_QUARTILES / math.sqrt(case.num_rounds)
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
    unseen |= {part: choices(all_cases(stored)) for part, stored in (AGAIN | PRESENT).items()}
    seeded = {seed: choices(cases) for seed, cases in by_seed(all_cases(SEEDED)).items()}
    unseen |= {f"H100, {seed}": choices(cases) for seed, cases in by_seed(stored_cases(2, SEEDED_ON_H100)).items()}
    of_unseen = {
        f"{part}, {group}": figures(of_group)
        for part, picks in (unseen | seeded).items()
        for group, of_group in {**by_group(picks), "all": picks}.items()
        if of_group
    }
    of_seeds = by_group(each for picks in seeded.values() for each in picks)
    found_anew = {name: found_again(each.case for each in group) for name, group in by_group(chosen).items()}
    found_anew |= {f"seeds, {name}": found_again(each.case for each in group) for name, group in of_seeds.items() if group}
    return {
        "figures": grouped(chosen) | of_unseen,
        "when_measured": {seed: figures(picks) for seed, picks in picked_when_measured().items()},
        "found_again": found_anew,
        "picks": {f"{each.case.num_gpus} GPUs, {each.case.op}, {each.case.shape}": each.label for each in chosen},
    }


def picked_when_measured() -> dict[str, list[Choice]]:
    """What was picked for the shapes of each seed by the heuristic that was in force when they were measured."""
    measured = [
        Choice(case, entry["picked"])
        for num_gpus, name in SEEDED.items()
        for case, entry in zip(stored_cases(num_gpus, name), stored_entries(name), strict=True)
    ]
    seeds = dict.fromkeys(seed_of(each.case) for each in measured)
    return {seed: [each for each in measured if seed_of(each.case) == seed] for seed in seeds}


def without(shape: str) -> tuple[dict[str, float], list[str]]:
    """The constants fitted without a shape, and the picks for it by those, in the order of the stored cases."""
    costs = search(SchedulesFit(case for case in stored_cases(2) if case.shape != shape).loss, START)
    of_shape = [case for case in all_cases() if case.shape == shape]
    return fitted(costs, START), [choice.label for choice in choices(of_shape, costs)]


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
        "constants": {name: constants for name, (constants, _) in found.items()},
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
    for name, found in result["when_measured"].items():
        _print(f"{name}, when measured", found)
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
