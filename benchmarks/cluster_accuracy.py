"""The cluster estimator against published step times: errors, regret of the chosen configuration, scaling, an ablation.

    python -m benchmarks.cluster_accuracy [--fit] [--write]

Needs no GPU. Nothing here was measured by this project (benchmarks/data/cluster/README.md). Constants of jobs and networks
that no table states are fitted to a seeded half of the rows of each family (--fit); the other half is the check, and both
errors are printed. A naive formula stands next to the estimator: operations at half the peak, plus the pipeline's bubble.
"""

import argparse
import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import mean

from benchmarks.cluster_rows import Constants, Row, calibration_for, llm_foundry, megascale, scaling, vtrain
from benchmarks.conditions import store
from counterpoint.cluster.estimate import ClusterEstimate, PassMemory, estimate_step

SEED = 17
NAIVE_SHARE = 0.5  # of the peak
WITHIN_POINTS = 2.0
# 2026-11-23, by --fit on the seeded halves, but Megatron-LM's network: the better of 2 on all rows
VTRAIN = {
    "single node": Constants(matmul_speed=1.2, memory_speed=0.5, host_us=100.0),
    "several nodes": Constants(matmul_speed=1.3, memory_speed=0.7, host_us=70.0, efficiency=0.6),
}
NETWORKS = {
    "llm-foundry h100": Constants(efficiency=0.9, per_doubling=0.8),
    "llm-foundry a100": Constants(efficiency=0.5, per_doubling=0.9),
    "torchtitan": Constants(efficiency=0.5, per_doubling=1.0),
    "megatron": Constants(memory_speed=0.5, efficiency=0.9, per_doubling=1.0),
}
GRIDS = {
    "matmul_speed": (1.0, 1.1, 1.2, 1.3),
    "memory_speed": (0.4, 0.5, 0.6, 0.7, 0.8, 1.0),
    "host_us": (70.0, 80.0, 90.0, 100.0, 105.0, 110.0),
    "efficiency": (0.5, 0.6, 0.7, 0.8, 0.9),
    "per_doubling": (0.8, 0.85, 0.9, 0.95, 1.0),
}


class Bench:
    """Estimates of rows; passes that rows share are simulated once."""

    def __init__(self) -> None:
        self._memories: dict[int, PassMemory] = {}

    def estimate(self, row: Row, constants: Constants) -> ClusterEstimate:
        calibration = calibration_for(row)
        memory = self._memories.setdefault(id(calibration), PassMemory())
        return estimate_step(row.with_constants(constants), memory, calibration)

    def errors(self, rows: Sequence[Row], constants: Constants) -> list[float]:
        """Relative errors of step times in milliseconds."""
        return [self.estimate(row, constants).step_us / 1e3 / row.measured - 1 for row in rows]

    def points(self, rows: Sequence[Row], constants: Constants) -> dict[str, tuple[float, float]]:
        """Scaling efficiency of each row but its group's smallest: published and estimated, in percent."""
        found = {}
        for group in dict.fromkeys(row.group for row in rows):
            members = sorted((row for row in rows if row.group == group), key=lambda row: row.gpus)
            figures = [self._figure(row, self.estimate(row, constants)) for row in members]
            for row, figure in zip(members[1:], figures[1:], strict=True):
                key = f"{group}, {row.gpus} GPUs"
                found[key] = (100 * row.measured / members[0].measured, 100 * figure / figures[0])
        return found

    @staticmethod
    def _figure(row: Row, estimate: ClusterEstimate) -> float:
        """What the table states, up to a factor: tokens per second and GPU, or the model's operations."""
        is_tokens = row.family != "megatron"
        return estimate.tokens_per_s_per_gpu if is_tokens else estimate.model_flops_utilization


def halves(keys: Iterable[str]) -> tuple[set[str], set[str]]:
    """A seeded half to fit to, and the other."""
    ordered = sorted(set(keys))
    fitted = set(random.Random(SEED).sample(ordered, len(ordered) // 2))
    return fitted, set(ordered) - fitted


def descend(start: Constants, names: Sequence[str], loss: Callable[[Constants], float]) -> Constants:
    """Coordinate descent over the grids, until nothing improves."""
    best, least = start, loss(start)
    is_better = True
    while is_better:
        is_better = False
        for name in names:
            for value in GRIDS[name]:
                trial = best._replace(**{name: value})
                found = loss(trial) if trial != best else least
                if found < least:
                    best, least, is_better = trial, found, True
    return best


def regrets(rows: Sequence[Row], predicted: Sequence[float]) -> list[float]:
    """By how much the configuration with the least predicted time is slower than the fastest, per model, GPUs and batch."""
    found = []
    for group in dict.fromkeys(row.group for row in rows):
        members = [(guess, row.measured) for row, guess in zip(rows, predicted, strict=True) if row.group == group]
        if len(members) > 1:
            least = min(guess for guess, _ in members)
            chosen = mean(time for guess, time in members if guess <= least * (1 + 1e-9))
            found.append(chosen / min(time for _, time in members) - 1)
    return found


def naive_ms(row: Row) -> float:
    """Operations at half the peak, with recomputation, plus the bubble."""
    configuration = row.configuration
    tokens = configuration.training.global_batch * configuration.model.sequence
    flops = 4 * configuration.model.forward_flops_per_token * tokens
    rate = configuration.fabric.machine.matmul_flops_per_s("bf16") * NAIVE_SHARE * configuration.fabric.num_gpus
    bubble = (configuration.parallelism.pipeline - 1) / configuration.num_micro_batches
    return 1e3 * flops / rate * (1 + bubble)


def _fit_vtrain(start: Constants, sample: Sequence[Row], has_network: bool) -> Constants:
    names = ("host_us", "matmul_speed", "memory_speed", *(("efficiency",) if has_network else ()))
    return descend(start, names, lambda trial: mean(abs(each) for each in Bench().errors(sample, trial)))


def vtrain_results(bench: Bench, is_fitting: bool) -> dict[str, object]:
    """Errors and regret on vTrain's rows; the two files are of two systems, each with its own constants."""
    families = {"single node": ("s", vtrain(False)), "several nodes": ("m", vtrain(True))}
    fitted, held = halves(f"{letter}{number}" for letter, rows in families.values() for number in range(len(rows)))
    result: dict[str, object] = {}
    for name, (letter, rows) in families.items():
        constants = VTRAIN[name]
        if is_fitting:
            own = [row for number, row in enumerate(rows) if f"{letter}{number}" in fitted]
            constants = _fit_vtrain(constants, random.Random(SEED).sample(own, min(80, len(own))), letter == "m")
        errors = bench.errors(rows, constants)
        by_key = {f"{letter}{number}": abs(error) for number, error in enumerate(errors)}
        found = regrets(rows, [row.measured * (1 + error) for row, error in zip(rows, errors, strict=True)])
        naive = [naive_ms(row) for row in rows]
        naive_regrets = regrets(rows, naive)
        result[name] = {
            "constants": constants._asdict(),
            "rows": len(rows),
            "mean error": mean(by_key.values()),
            "mean error, fitted half": mean(by_key[key] for key in fitted if key in by_key),
            "mean error, other half": mean(by_key[key] for key in held if key in by_key),
            "worst error": max(by_key.values()),
            "naive formula: mean error": mean(abs(guess / row.measured - 1) for row, guess in zip(rows, naive, strict=True)),
            "choices": len(found),
            "mean regret": mean(found),
            "worst regret": max(found),
            "naive formula: mean regret": mean(naive_regrets),
            "naive formula: worst regret": max(naive_regrets),
        }
    return result


def fit_networks(bench: Bench, rows: Sequence[Row], fitted: set[str]) -> dict[str, Constants]:
    """Each publisher's network, and the speed of its kernels that memory bounds, from the seeded half of its rows."""
    found = {}
    for network, start in NETWORKS.items():
        own = [row for row in rows if row.group.startswith(network)]

        def loss(trial: Constants, own: Sequence[Row] = own) -> float:
            points = bench.points(own, trial)
            return mean(min(10.0, abs(points[key][1] - points[key][0])) for key in points if key in fitted)

        found[network] = descend(start, ("memory_speed", "efficiency", "per_doubling"), loss)
    return found


def scaling_results(bench: Bench, is_fitting: bool) -> dict[str, object]:
    """Scaling efficiency, in points of a percent; "no loss" is the guess that it is always 100 %."""
    rows = [*llm_foundry(), *scaling()]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    names = [f"{group}, {row.gpus} GPUs" for group, own in groups.items() for row in sorted(own, key=lambda r: r.gpus)[1:]]
    fitted, held = halves(names)
    networks = fit_networks(bench, rows, fitted) if is_fitting else NETWORKS
    found: dict[str, tuple[float, float]] = {}
    for network, constants in networks.items():
        found |= bench.points([row for row in rows if row.group.startswith(network)], constants)
    gaps = {key: abs(estimated - published) for key, (published, estimated) in found.items()}
    naive = {key: abs(100 - published) for key, (published, _) in found.items()}

    def shares(keys: Iterable[str]) -> dict[str, float]:
        chosen = list(keys)
        parts = {"": chosen, ", fitted half": fitted & set(chosen), ", other half": held & set(chosen)}
        result: dict[str, float] = {"rows": len(chosen)}
        for words, members in parts.items():
            if members:
                result[f"within 2 points{words}"] = mean(gaps[key] <= WITHIN_POINTS for key in members)
        result["no loss: within 2 points"] = mean(naive[key] <= WITHIN_POINTS for key in chosen)
        return result

    alike = []
    for group, own in groups.items():
        first, *others = sorted(own, key=lambda row: row.gpus)
        batch = first.configuration.training.micro_batch
        if group != "megatron weak":
            alike += [f"{group}, {row.gpus} GPUs" for row in others if row.configuration.training.micro_batch == batch]
    return {
        "constants": {network: constants._asdict() for network, constants in networks.items()},
        "all": shares(gaps),
        "one model and micro-batch": shares(alike),
        "by network": {network: shares(key for key in gaps if key.startswith(network)) for network in networks},
        "published and estimated": {key: [round(each, 1) for each in pair] for key, pair in found.items()},
    }


def ablation_results() -> list[dict[str, object]]:
    """MegaScale's ablation, in points of MFU; `published base` times the estimated ratio, so that only the gain counts."""
    steps = megascale()
    memory = PassMemory()
    found = [100 * estimate_step(configuration, memory).model_flops_utilization for *_, configuration in steps]
    scale = steps[0][1] / found[0]
    return [
        {
            "step": steps[number][0],
            "published gain": round(steps[number][1] - steps[number - 1][1], 2),
            "estimated gain": round(scale * (found[number] - found[number - 1]), 2),
            "estimated MFU": round(found[number], 2),
        }
        for number in range(1, len(steps))
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all results; --write stores them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="fit the constants again")
    parser.add_argument("--write", action="store_true", help="store the results")
    options = parser.parse_args(arguments)
    begun = time.perf_counter()
    bench = Bench()
    results: dict[str, object] = {
        "vtrain": vtrain_results(bench, options.fit),
        "scaling": scaling_results(Bench(), options.fit),
        "megascale": ablation_results(),
    }
    for line in itertools.chain.from_iterable(_lines(name, part) for name, part in results.items()):
        print(line)
    print(f"{time.perf_counter() - begun:.0f} s")
    if options.write:
        store("cluster_accuracy", results)


def _lines(name: str, part: object) -> Iterable[str]:
    if isinstance(part, dict):
        for key, value in part.items():
            yield from _lines(f"{name}, {key}", value)
    elif isinstance(part, list) and part and isinstance(part[0], dict):
        yield from (f"{name}: {each}" for each in part)
    else:
        yield f"{name}: {part:.4g}" if isinstance(part, float) else f"{name}: {part}"


if __name__ == "__main__":
    main()
