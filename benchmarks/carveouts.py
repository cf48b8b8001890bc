"""Triton matmuls beside collectives with the carveout that their CTAs need, alone and with priority.

    torchrun --nproc-per-node 2 -m benchmarks.carveouts -o carveouts.json
    python -m benchmarks.carveouts carveouts.json       # without a GPU: predicted and measured changes

Five tiles and four collectives, in a chain and ready at once, in captured graphs; carveouts are those that the planner
proposes. `benchmarks/jobs/tiled_chain.py` is the same chain as an eager job.
"""

import argparse
import statistics
from collections.abc import Iterator

from benchmarks.conditions import compare_or_measure, measured_in
from counterpoint.controls import Priority
from counterpoint.machine import Machine, load_machine
from counterpoint.paper.values import PLAIN
from counterpoint.plan import Directive, Match, Plan
from counterpoint.planner.carveouts import carveouts_of
from counterpoint.step import Kernel, Step
from counterpoint.units import MIB
from counterpoint.validation.cases import COLLECTIVES, Case, CollectiveWork, Entry, Matmul, chain
from counterpoint.validation.outcome import predict_rows
from counterpoint.validation.records import MeasuredCase

PRIORITY = "priority"
TILES = {  # rows, columns and depth, warps, stages
    "128x64x64": ((128, 64, 64), 4, 3),
    "64x128x64": ((64, 128, 64), 4, 3),
    "256x64x32": ((256, 64, 32), 8, 3),
    "128x128x64": ((128, 128, 64), 8, 3),
    "128x128x32": ((128, 128, 32), 8, 4),
}


def cases() -> Iterator[Case]:
    """A chain of four pairs, and a collective that is ready together with a matmul, for each tile and collective."""
    for name, (tile, warps, stages) in TILES.items():
        matmul = Matmul(m=6144, n=5120, k=7168, tile=tile, num_warps=warps, num_stages=stages)
        for kind in COLLECTIVES:
            exchange = CollectiveWork(collective=kind, num_bytes=320 * MIB)
            yield Case(name=f"{name}, {kind}, chain", family="pairs", entries=tuple(chain([matmul], exchange, 4)))
            together = (Entry(work=exchange, stream=1), Entry(work=matmul), Entry(work=matmul))
            yield Case(name=f"{name}, {kind}, at once", family="pairs", entries=together)


def plans_of(_: Case, step: Step, machine: Machine) -> dict[str, Plan]:
    """Plain overlap, priority, and each of the planner's carveouts without and with it."""
    match = Match(kind="communication")
    ahead = Directive(match=match, controls=(Priority(priority=machine.gpu.greatest_priority),), reason="measured")
    found = {PLAIN: Plan(), PRIORITY: Plan(directives=(ahead,))}
    for candidate in carveouts_of(machine.gpu, [each for each in step.operations if isinstance(each, Kernel)]):
        found[candidate.label] = Plan(directives=candidate.directives)
        found[f"{PRIORITY} + {candidate.label}"] = Plan(directives=(ahead, *candidate.directives))
    return found


def measure(options: argparse.Namespace) -> None:
    """Measure all cases on these GPUs, and save after each one."""
    from benchmarks.on_gpus import join, saving  # noqa: PLC0415  comparing needs no GPU
    from counterpoint.validation.on_gpu import CaseMeasuring, measure_cases  # noqa: PLC0415

    join(200)

    def captured(case: CaseMeasuring) -> MeasuredCase:
        return case.measure_captured(with_limits=False, plans=plans_of)

    measure_cases(cases(), "carveouts", options.output, saving(options.output), captured)


def compared(options: argparse.Namespace) -> Iterator[str]:
    """Each case with its predicted and measured changes, and what carveouts add to priority."""
    added: dict[str, list[float]] = {}
    errors: list[float] = []
    for path in options.files:
        measured = measured_in(path)
        for case in measured.cases:
            rows = {row.label: row for row in predict_rows(case, load_machine(measured.machine))}
            errors += [abs(row.predicted_us / row.measured_us - 1) for row in rows.values()]
            told = [
                f"{label} {row.measured_us / row.measured_baseline_us - 1:+.1%} "
                f"(predicted {row.predicted_us / row.predicted_baseline_us - 1:+.1%})"
                for label, row in rows.items()
                if label != PLAIN
            ]
            yield f"{case.name}: {rows[PLAIN].measured_us:.0f} us; {', '.join(told)}"
            for label, row in rows.items():
                if label.startswith(f"{PRIORITY} +"):
                    less = 1 - row.measured_us / row.measured_baseline_us / (
                        rows[PRIORITY].measured_us / rows[PRIORITY].measured_baseline_us
                    )
                    added.setdefault(case.name.rpartition(", ")[2], []).append(less)
    yield f"predictions are {statistics.mean(errors):.1%} off"
    for form, gains in added.items():
        mean = statistics.mean(gains)
        yield f"{form}: a carveout takes {min(gains):.1%} to {max(gains):.1%} off priority, {mean:.1%} in the mean"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    compare_or_measure(parser, compared, measure)


if __name__ == "__main__":
    main()
