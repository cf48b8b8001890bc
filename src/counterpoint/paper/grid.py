"""The first paper's grid: sequential, plain overlap, and every control and combination on one of its workloads.

The same grid runs on the simulator, for any machine, and on GPUs, for a captured workload. The caps name the bytes of
dynamic shared memory they use, so that the sweep over residency is the sweep over shared memory that the paper's
reviewers asked for.
"""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing

import msgspec
import numpy as np
from numpy.typing import NDArray

from counterpoint.controls import Control, HeadStart, Priority, ResidencyCap
from counterpoint.cuda.graph import AbstractExecutable
from counterpoint.cuda.graph_rewriting import MOVED, rewrite
from counterpoint.machine import Machine
from counterpoint.measurement.orders import draw_seed
from counterpoint.measurement.tournament import measure_rounds
from counterpoint.metrics import measure
from counterpoint.occupancy import cap_shared_bytes, residency
from counterpoint.plan import Directive, Match, Plan
from counterpoint.planner.candidates import HOLDS_US
from counterpoint.planner.ideal import Scale, scale_of
from counterpoint.planner.measured import Replayable, tune_measured
from counterpoint.planner.search import tune
from counterpoint.sim import Simulator
from counterpoint.sim.costs import SUMMED_COLLECTIVES
from counterpoint.sim.effects import COPY_ENGINE_COLLECTIVES
from counterpoint.step import Collective, Kernel, Step
from counterpoint.value import Value

PLAIN, SEQUENTIAL, CHOICE, COPY_ENGINES = "plain overlap", "sequential", "planner's choice", "copy engines"
Parts = list[tuple[Match, Control]]


class PaperRow(Value, frozen=True, kw_only=True):
    """One variant. `measured_us` and what belongs to it are None where nothing ran on a GPU.

    `ratio` is the measured time over plain overlap's of the same rounds, `spread` its spread. `is_engaged` says whether
    every control was verified, `is_identical` whether the outputs were bit-identical to plain overlap's.
    """

    label: str
    simulated_us: float | None
    measured_us: float | None = None
    ratio: float | None = None
    spread: float | None = None
    is_engaged: bool | None = None
    is_identical: bool | None = None


class PaperResult(Value, frozen=True, kw_only=True):
    """One workload on one machine. `choice` is the planner's plan, `ideal_us` as in `planner/ideal.py`."""

    workload: str
    machine: str
    num_ranks: int
    ideal_us: float
    rows: tuple[PaperRow, ...]
    choice: Plan


class SimulationAccuracy(Value, frozen=True, kw_only=True):
    """Simulated against measured times over the variants of one workload: errors as fractions, Spearman's correlation."""

    num_rows: int
    mean_absolute_error: float
    worst_error: float
    worst_label: str
    rank_correlation: float


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the grid, ready to be replayed.

    `output_bits` replays it once over poisoned outputs and returns their bits.
    """

    executable: AbstractExecutable
    is_engaged: bool
    output_bits: Callable[[AbstractExecutable], bytes]


def paper_grid(step: Step, machine: Machine) -> dict[str, Plan]:
    """Labelled plans, plain overlap first; without priority where the driver ignores it, and head starts where none are."""
    kernels = {index: operation for index, operation in enumerate(step.operations) if isinstance(operation, Kernel)}
    matmuls = Match(operations=tuple(kernels))
    collectives = Match(kind="communication")
    priority: Parts = [(collectives, Priority(priority=machine.gpu.greatest_priority))]
    grid: dict[str, Parts] = {PLAIN: [], "priority": priority}
    for hold_us in HOLDS_US if machine.gpu.has_head_starts else ():
        ahead: Parts = [(Match(operations=tuple(kernels)[1:]), HeadStart(hold_us=hold_us))]
        grid[f"head start {hold_us:g} us"] = ahead
        grid[f"priority + head start {hold_us:g} us"] = priority + ahead
    footprint = next(iter(kernels.values())).footprint
    for ctas_per_sm in range(residency(machine.gpu, footprint).ctas_per_sm - 1, 0, -1):
        dynamic = cap_shared_bytes(machine.gpu, footprint, ctas_per_sm)
        cap: Parts = [(matmuls, ResidencyCap(ctas_per_sm=ctas_per_sm, dynamic_shared_bytes=dynamic))]
        grid[f"cap {ctas_per_sm} ({dynamic:,} B)"] = cap
        grid[f"priority + cap {ctas_per_sm} ({dynamic:,} B)"] = priority + cap
    if not machine.gpu.priority_is_effective:
        grid = {label: parts for label, parts in grid.items() if not label.startswith("priority")}
    return {label: _plan(parts) for label, parts in grid.items()}


def _plan(parts: Parts) -> Plan:
    return Plan(directives=tuple(Directive(match=match, controls=(control,), reason="grid") for match, control in parts))


def simulate_paper(step: Step, machine: Machine) -> PaperResult:
    """The grid on the simulator, copy engines included where the collective only moves data."""
    choice = tune(step, machine, Simulator()).plan
    plans = _simulated_plans(step, machine, choice)
    scale = scale_of(step, machine, plans.values())
    return PaperResult(
        workload=step.name,
        machine=machine.name,
        num_ranks=step.num_ranks,
        ideal_us=scale.ideal_us,
        rows=_simulated_rows(step, machine, plans, scale),
        choice=choice,
    )


def _simulated_plans(step: Step, machine: Machine, choice: Plan) -> dict[str, Plan]:
    plans = paper_grid(step, machine)
    kinds = {operation.collective for operation in step.operations if isinstance(operation, Collective)}
    if kinds <= {*COPY_ENGINE_COLLECTIVES, *SUMMED_COLLECTIVES}:
        plans[COPY_ENGINES] = _plan([(Match(kind="communication"), MOVED)])
    plans[CHOICE] = choice
    return plans


def _measured_plans(overlapped: Replayable, simulated: Mapping[str, Plan], choice: Plan) -> dict[str, Plan]:
    """The simulated plans, with copy engines for all that can be captured as copies, sums included, or without."""
    plans = {label: plan for label, plan in simulated.items() if label != COPY_ENGINES}
    step = overlapped.read.step
    able = tuple(
        index
        for index, operation in enumerate(step.operations)
        if isinstance(operation, Collective) and not overlapped.graph.obstacle_to_copies(overlapped.read.nodes[index])
    )
    if able:
        plans[COPY_ENGINES] = _plan([(Match(operations=able), MOVED)])
    return {**plans, CHOICE: choice}


def _simulated_rows(step: Step, machine: Machine, plans: Mapping[str, Plan], scale: Scale) -> tuple[PaperRow, ...]:
    simulator = Simulator()
    rows = [PaperRow(label=SEQUENTIAL, simulated_us=scale.sequential_us)]
    for label, plan in plans.items():
        rows.append(PaperRow(label=label, simulated_us=measure(simulator.run(step, machine, plan)).makespan_us))
    return tuple(rows)


def measure_paper(
    overlapped: Replayable,
    machine: Machine,
    output_bits: Callable[[AbstractExecutable], bytes],
    *,
    forms: Mapping[str, Variant],
    num_rounds: int,
) -> PaperResult:
    """The grid on GPUs, interleaved with plain overlap, beside what the simulator says of the captured step.

    `output_bits` is as in `Variant`. `forms` are variants that no rewriting of the overlapped step makes, as sequential;
    they are closed here. The planner chooses first, by measurements of its own; then its plan runs as a row of the grid, in
    the same rounds.
    """
    step = overlapped.read.step
    with ExitStack() as opened:
        for form in forms.values():
            opened.callback(form.executable.close)
        choice = tune_measured(overlapped, machine, num_rounds=num_rounds).plan
        simulated_plans = _simulated_plans(step, machine, choice)
        scale = scale_of(step, machine, simulated_plans.values())
        simulated = {row.label: row.simulated_us for row in _simulated_rows(step, machine, simulated_plans, scale)}
        plans = _measured_plans(overlapped, simulated_plans, choice)
        grid = {
            label: Variant(executable=executable, is_engaged=is_engaged, output_bits=output_bits)
            for label, (executable, is_engaged) in _make_ready(overlapped, plans, opened).items()
        }
        variants = {PLAIN: grid[PLAIN], **forms, **grid}
        labels = list(variants)
        seed = int(overlapped.agree(str(draw_seed())))
        found = measure_rounds(
            labels, lambda number: overlapped.time_us(variants[labels[number]].executable), num_rounds, seed
        )
        digests = {label: hashlib.sha256(each.output_bits(each.executable)).digest() for label, each in variants.items()}
    rows = tuple(
        PaperRow(
            label=row.label,
            simulated_us=simulated.get(row.label),
            measured_us=row.median_us,
            ratio=row.ratio,
            spread=row.spread,
            is_engaged=variants[row.label].is_engaged,
            is_identical=digests[row.label] == digests[PLAIN],
        )
        for row in found
    )
    return PaperResult(
        workload=step.name,
        machine=machine.name,
        num_ranks=step.num_ranks,
        ideal_us=scale.ideal_us,
        rows=rows,
        choice=choice,
    )


def simulation_accuracy(result: PaperResult) -> SimulationAccuracy | None:
    """The simulator's errors over the measured variants of one workload; None where fewer than three were measured."""
    rows = [row for row in result.rows if row.measured_us and row.simulated_us and row.label != CHOICE]
    if len(rows) < 3:
        return None
    measured, simulated = (np.array([getattr(row, name) for row in rows]) for name in ("measured_us", "simulated_us"))
    errors = simulated / measured - 1
    worst = int(np.argmax(np.abs(errors)))
    return SimulationAccuracy(
        num_rows=len(rows),
        mean_absolute_error=float(np.mean(np.abs(errors))),
        worst_error=float(errors[worst]),
        worst_label=rows[worst].label,
        rank_correlation=rank_correlation(measured, simulated),
    )


def rank_correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Spearman's correlation; NaN where all values of one side are equal."""
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return float("nan")
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Places from smallest to greatest; equal values share the mean of theirs."""
    below = (values[:, None] > values).sum(axis=1)
    equal = (values[:, None] == values).sum(axis=1)
    return np.asarray(below + (equal - 1) / 2, np.float64)


def _make_ready(
    overlapped: Replayable, plans: Mapping[str, Plan], opened: ExitStack
) -> dict[str, tuple[AbstractExecutable, bool]]:
    """Every plan on a copy of the graph, by label, and whether all of it is verified; `opened` closes what was made."""
    variants = {}
    for label, plan in plans.items():
        rewritten = rewrite(overlapped.graph, overlapped.read, plan)
        with closing(rewritten.graph):
            executable = opened.enter_context(closing(rewritten.graph.instantiate()))
        is_engaged = all(entry.state == "verified" for entry in rewritten.engagements)
        variants[label] = executable, is_engaged
    return variants
