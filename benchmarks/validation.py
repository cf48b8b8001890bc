"""The validation set's figures, and the bounds that the project prints beside what was never measured.

    python -m benchmarks.validation [--write]

Needs no GPU: today's simulator is compared with the measurements that ship with the project. `--write` stores the figures
under benchmarks/results/ and the bounds in src/counterpoint/validation/bounds.toml.
"""

import argparse
from collections.abc import Iterator, Sequence
from datetime import date

import msgspec
import numpy as np

from benchmarks.conditions import ROOT, store
from benchmarks.heuristic_cases import all_cases
from benchmarks.ops_shapes import HELD_OUT
from counterpoint.errors import CounterpointError
from counterpoint.machine import load_machine
from counterpoint.report.text import new_console
from counterpoint.report.validation import print_validation
from counterpoint.schedule import make_schedule
from counterpoint.schedule.estimate import estimate, estimate_sequential
from counterpoint.schedule.heuristic import candidate_descriptions
from counterpoint.sim import Simulator
from counterpoint.sim.calibration import load_calibration
from counterpoint.step import Collective, CollectiveKind, Step
from counterpoint.validation.bounds import BoundsTable, ComparedGpu, RatioSpan
from counterpoint.validation.outcome import ORIGINS, Outcome, validate_files
from counterpoint.validation.records import shipped_measurements
from counterpoint.value import Value, read_shipped, write_toml, write_whole

BOUNDS = ROOT / "src" / "counterpoint" / "validation" / "bounds.toml"
GPU = "h200"  # whose constants all others are scaled from


class PublishedTime(Value, frozen=True, kw_only=True):
    """One collective alone."""

    num_ranks: int
    num_bytes: int
    measured_us: float


class PublishedTimes(Value, frozen=True, kw_only=True):
    """Times of a machine that others measured."""

    machine: str
    collective: CollectiveKind
    times: tuple[PublishedTime, ...]


def published_ratios() -> list[float]:
    """Measured over predicted times of published collectives."""
    published = read_shipped("validation/published.toml", PublishedTimes, CounterpointError)
    machine = load_machine(published.machine)
    ratios = []
    for entry in published.times:
        alone = Collective(
            name=published.collective,
            stream=0,
            collective=published.collective,
            num_bytes=entry.num_bytes,
            group_size=entry.num_ranks,
        )
        step = Step(name="published", num_ranks=entry.num_ranks, operations=(alone,))
        ratios.append(entry.measured_us / Simulator().lone_times_us(step, machine)[0])
    return ratios


def schedule_ratios() -> Iterator[float]:
    """Measured over estimated times of operators' schedules on the shapes that the estimate was not fitted to."""
    for case in all_cases():
        if case.shape not in HELD_OUT:
            continue
        yield case.times_us["sequential"] / estimate_sequential(case.problem, case.machine)
        for description in candidate_descriptions(case.problem, case.machine):
            measured_us = case.times_us.get(description.label())
            if measured_us is not None and not description.is_sequential:
                found = estimate(make_schedule(case.problem, description), case.problem, case.machine)
                yield measured_us / found.makespan_us


def ratios_of(outcomes: Sequence[Outcome], origin: str) -> list[float]:
    """Measured over predicted times of one origin."""
    return [
        row.measured_us / row.predicted_us
        for outcome in outcomes
        for found in outcome.origins
        if found.origin == origin
        for row in found.rows
    ]


def compared_gpus(outcomes: Sequence[Outcome]) -> tuple[ComparedGpu, ...]:
    """The GPUs of the measurements, and on how many at most; the first paper's grid ran on 4 H200s."""
    most: dict[str, int] = {load_machine(GPU).device_names[0]: 4}
    for outcome in outcomes:
        name = load_machine(outcome.machine).device_names[0]
        most[name] = max(outcome.num_gpus, most.get(name, 0))
    return tuple(ComparedGpu(device_name=name, most_gpus=number) for name, number in most.items())


def span(ratios: Sequence[float], source: str) -> RatioSpan:
    """The middle 90 % of the ratios."""
    low, high = np.quantile(np.array(ratios), (0.05, 0.95))
    return RatioSpan(low=round(float(low), 3), high=round(float(high), 3), num_rows=len(ratios), source=source)


def bounds_of(outcomes: Sequence[Outcome]) -> BoundsTable:
    """The bounds that follow from these outcomes and from published times."""
    bases = {origin: span(ratios_of(outcomes, origin), f"validation set, predicted from {origin}") for origin in ORIGINS}
    operators = span(list(schedule_ratios()), "operators' schedules on 2 and 4 H200s, the shapes that no fit has seen")
    scaled = [outcome for outcome in outcomes if not _is_calibrated(outcome)]
    return BoundsTable(
        date=date.today().isoformat(),
        compared=compared_gpus(outcomes),
        bases={**bases, "copy schedules": operators},
        transfer=span(
            [*published_ratios(), *ratios_of(scaled, "sizes alone")],
            "GPUs whose constants are the H200's, scaled: published all-reduces on A100s"
            + "".join(f"; {outcome.conditions['gpus']}, validation set from sizes alone" for outcome in scaled),
        ),
    )


def _is_calibrated(outcome: Outcome) -> bool:
    machine = load_machine(outcome.machine)
    return load_calibration(machine).device_name in machine.device_names


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The figures as the Markdown table of docs/validation.md."""
    yield "| measured on | predicted | cases | rows | error | 90 % | bias | clear sign | ranks | regret, worst |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for outcome in outcomes:
        for found in outcome.origins:
            for each in found.figures:
                name = f"**from {found.origin}**" if each.model == "simulator" else each.model
                clear = "-" if each.clear_sign is None else f"{100 * each.clear_sign:.0f} % of {each.num_clear}"
                ranks = "-" if each.rank_correlation is None else f"{each.rank_correlation:.2f}"
                errors = f"{each.mean_error:.1%} | {each.p90_error:.1%} | {each.bias:+.1%}".replace("%", " %")
                regrets = f"{each.mean_regret:.1%}, {each.worst_regret:.1%}".replace("%", " %")
                counts = f"{each.num_groups} | {each.num_rows}"
                yield f"| {outcome.conditions['gpus']} | {name} | {counts} | {errors} | {clear} | {ranks} | {regrets} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store figures and bounds")
    outcomes = validate_files(shipped_measurements())
    print_validation(new_console(), outcomes)
    print("\n".join(table(outcomes)))
    bounds = bounds_of(outcomes)
    for name, found in (*bounds.bases.items(), ("transfer", bounds.transfer)):
        print(f"{name:16} {found.low:.3f} to {found.high:.3f} of {found.num_rows} rows")
    if parser.parse_args().write:
        write_whole(BOUNDS, write_toml(bounds).encode())
        figures = [
            {
                "file": outcome.file,
                "conditions": outcome.conditions,
                "origins": {found.origin: msgspec.to_builtins(found.figures) for found in outcome.origins},
                "left_out": outcome.left_out,
            }
            for outcome in outcomes
        ]
        print(f"written to {store('validation', figures)} and {BOUNDS}")


if __name__ == "__main__":
    main()
