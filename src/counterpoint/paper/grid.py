"""The first paper's grid: sequential, plain overlap, and every control and combination on one of its workloads.

The same grid runs on the simulator, for any machine, and on GPUs, for a captured workload. The labels of caps state the
bytes of dynamic shared memory, so the sweep over residency is also the sweep over shared memory that the paper's reviewers
asked for.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing

import msgspec

from counterpoint.controls import Control, HeadStart, Priority, ResidencyCap
from counterpoint.cuda.graph import AbstractExecutable
from counterpoint.cuda.graph_rewriting import MOVED, rewrite
from counterpoint.machine import Gpu, Machine
from counterpoint.measurement.orders import draw_seed
from counterpoint.measurement.tournament import measure_rounds
from counterpoint.metrics import measure, sequential_us
from counterpoint.occupancy import cap_shared_bytes, residency
from counterpoint.paper.values import (
    CHOICE,
    COPY_ENGINES,
    PLAIN,
    PRIORITY,
    SEQUENTIAL,
    Energy,
    PaperResult,
    PaperRow,
    with_time_ratios,
)
from counterpoint.plan import Directive, Match, Plan
from counterpoint.planner.candidates import HOLDS_US
from counterpoint.planner.ideal import Scale, scale_of
from counterpoint.planner.measured import NUM_ROUNDS, Replayable, able_as_copies, tune_measured
from counterpoint.planner.search import tune
from counterpoint.sim import Simulator
from counterpoint.sim.costs import SUMMED_COLLECTIVES
from counterpoint.sim.effects import COPY_ENGINE_COLLECTIVES
from counterpoint.step import Footprint, Kernel, Step

Parts = list[tuple[Match, Control]]


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One row, ready to be replayed."""

    executable: AbstractExecutable
    is_engaged: bool


class Readings(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a variant on GPUs besides its time; all ranks call these together.

    `output_bits` replays it once over poisoned outputs and returns their bits. `overlap_ratio` replays an overlapped variant
    once under the profiler; None if the profiler does not show the whole step. `energy` replays it for a while.
    """

    output_bits: Callable[[AbstractExecutable], bytes]
    overlap_ratio: Callable[[AbstractExecutable], float | None] = lambda executable: None
    energy: Callable[[AbstractExecutable], Energy | None] = lambda executable: None


def paper_grid(step: Step, machine: Machine) -> dict[str, Plan]:
    """Return labelled plans, plain overlap first; priority only if it has an effect, head starts only if there are any."""
    kernels = {index: operation for index, operation in enumerate(step.operations) if isinstance(operation, Kernel)}
    matmuls = Match(operations=tuple(kernels))
    collectives = Match(kind="communication")
    priority: Parts = [(collectives, Priority(priority=machine.gpu.greatest_priority))]
    grid: dict[str, Parts] = {PLAIN: [], PRIORITY: priority}
    for hold_us in HOLDS_US if machine.gpu.has_head_starts else ():
        ahead: Parts = [(Match(operations=tuple(kernels)[1:]), HeadStart(hold_us=hold_us))]
        grid[f"head start {hold_us:g} us"] = ahead
        grid[f"priority + head start {hold_us:g} us"] = priority + ahead
    for ctas_per_sm, dynamic in _caps(machine.gpu, [kernel.footprint for kernel in kernels.values()][:1]):
        cap: Parts = [(matmuls, ResidencyCap(ctas_per_sm=ctas_per_sm, dynamic_shared_bytes=dynamic))]
        grid[f"cap {ctas_per_sm} ({dynamic:,} B)"] = cap
        grid[f"priority + cap {ctas_per_sm} ({dynamic:,} B)"] = priority + cap
    if not machine.gpu.priority_is_effective:
        grid = {label: parts for label, parts in grid.items() if not label.startswith("priority")}
    return {label: plan_of(parts) for label, parts in grid.items()}


def _caps(gpu: Gpu, footprints: Sequence[Footprint]) -> Iterator[tuple[int, int]]:
    """Yield every residency below the kernel's own, the largest first, and the dynamic shared memory that caps it there."""
    for footprint in footprints:
        for ctas_per_sm in range(residency(gpu, footprint).ctas_per_sm - 1, 0, -1):
            yield ctas_per_sm, cap_shared_bytes(gpu, footprint, ctas_per_sm)


def plan_of(parts: Parts) -> Plan:
    """Return the plan that applies each control to its match."""
    return Plan(directives=tuple(Directive(match=match, controls=(control,), reason="grid") for match, control in parts))


def sweep_plans(step: Step, machine: Machine) -> dict[str, Plan]:
    """Return the variants of a sweep's point: plain overlap, priority if the driver heeds it, and copy engines."""
    parts: dict[str, Parts] = {PLAIN: []}
    if machine.gpu.priority_is_effective:
        parts[PRIORITY] = [(Match(kind="communication"), Priority(priority=machine.gpu.greatest_priority))]
    return {label: plan_of(each) for label, each in parts.items()} | _copied(step)


def _copied(step: Step) -> dict[str, Plan]:
    """Return a plan that runs all collectives by copy engines, if the simulator supports that."""
    kinds = {collective.collective for collective in step.collectives().values()}
    if not kinds or not kinds <= {*COPY_ENGINE_COLLECTIVES, *SUMMED_COLLECTIVES}:
        return {}
    return {COPY_ENGINES: plan_of([(Match(kind="communication"), MOVED)])}


def simulate_paper(step: Step, machine: Machine) -> PaperResult:
    """Simulate the grid, including copy engines if the collective only moves data."""
    choice = tune(step, machine, Simulator()).plan
    plans = {**paper_grid(step, machine), **_copied(step), CHOICE: choice}
    scale, rows = simulated_rows(step, machine, plans)
    return PaperResult(
        workload=step.name,
        machine=machine.name,
        num_ranks=step.num_ranks,
        ideal_us=scale.ideal_us,
        rows=rows,
        choice=choice,
    )


def simulated_rows(step: Step, machine: Machine, plans: Mapping[str, Plan]) -> tuple[Scale, tuple[PaperRow, ...]]:
    """Simulate the sequential form and each plan, at the clock that the power limit allows plans that take turns; return
    them and the step's scale.
    """
    simulator = Simulator(clock_share=Simulator().clock_of_turns(step, machine, list(plans.values())))
    in_turn_us = sequential_us(step, simulator.lone_times_us(step, machine))
    rows = [PaperRow(label=SEQUENTIAL, simulated_us=in_turn_us)]
    for label, plan in plans.items():
        found = measure(simulator.run(step, machine, plan))
        rows.append(PaperRow(label=label, simulated_us=found.makespan_us, overlap_ratio=found.overlap_ratio))
    return scale_of(step, machine, plans.values()), with_time_ratios(rows)


def measure_paper(
    overlapped: Replayable,
    machine: Machine,
    readings: Readings,
    *,
    forms: Mapping[str, Variant],
    num_rounds: int,
    num_choice_rounds: int = NUM_ROUNDS,
) -> PaperResult:
    """Measure the grid on GPUs, interleaved with plain overlap, and simulate it from the captured step.

    The planner chooses first, by `num_choice_rounds`; then its plan runs as a row of the grid, in the same rounds. `forms`
    are as in `measure_variants`.
    """
    step = overlapped.read.step
    choice = tune_measured(overlapped, machine, num_rounds=num_choice_rounds).plan
    plans = {**paper_grid(step, machine), **_copied(step), CHOICE: choice}
    rows, ideal_us = measure_variants(overlapped, machine, readings, plans=plans, forms=forms, num_rounds=num_rounds)
    return PaperResult(
        workload=step.name,
        machine=machine.name,
        num_ranks=step.num_ranks,
        ideal_us=ideal_us,
        rows=rows,
        choice=choice,
    )


def measure_variants(
    overlapped: Replayable,
    machine: Machine,
    readings: Readings,
    *,
    plans: Mapping[str, Plan],
    forms: Mapping[str, Variant],
    num_rounds: int,
) -> tuple[tuple[PaperRow, ...], float]:
    """Measure plans on GPUs in the same rounds, and simulate them; return a row for each, and the ideal in microseconds.

    `forms` are variants that no rewriting of the overlapped step makes, such as sequential; the caller closes them.
    """
    scale, simulated = simulated_rows(overlapped.read.step, machine, plans)
    with ExitStack() as opened:
        grid = _make_ready(overlapped, _movable(overlapped, plans), opened)
        variants = {PLAIN: grid[PLAIN], **forms, **grid}
        rows = _measured_rows(overlapped, variants, simulated, readings, num_rounds)
    return rows, scale.ideal_us


def _movable(overlapped: Replayable, plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """Return the plans, with copy engines for all collectives that can be captured as copies, sums included, if any."""
    found = {label: plan for label, plan in plans.items() if label != COPY_ENGINES}
    able, _ = able_as_copies(overlapped, Match(kind="communication"))
    if able:
        found[COPY_ENGINES] = plan_of([(Match(operations=able), MOVED)])
    return found


def why_no_copies(overlapped: Replayable) -> str:
    """Return why no collective of a captured step can be captured as copies; nothing if some can, or if there are none."""
    able, obstacles = able_as_copies(overlapped, Match(kind="communication"))
    return "" if able else next(iter(obstacles), "")


def _measured_rows(
    overlapped: Replayable,
    variants: Mapping[str, Variant],
    simulated: Sequence[PaperRow],
    readings: Readings,
    num_rounds: int,
) -> tuple[PaperRow, ...]:
    """Measure all variants in the same rounds, then read the rest of each. The sequential form has no overlap ratio."""
    labels = list(variants)
    seed = int(overlapped.agree(str(draw_seed())))
    found = measure_rounds(labels, lambda number: overlapped.time_us(variants[labels[number]].executable), num_rounds, seed)
    digests = {label: _digest(readings, each) for label, each in variants.items()}
    known = {row.label: row.simulated_us for row in simulated}
    return with_time_ratios(
        PaperRow(
            label=row.label,
            simulated_us=known.get(row.label),
            measured_us=row.median_us,
            ratio=row.ratio,
            spread=row.spread,
            overlap_ratio=readings.overlap_ratio(variants[row.label].executable) if row.label != SEQUENTIAL else None,
            energy=readings.energy(variants[row.label].executable),
            is_engaged=variants[row.label].is_engaged,
            is_identical=digests[row.label] == digests[PLAIN],
        )
        for row in found
    )


def _digest(readings: Readings, variant: Variant) -> bytes:
    return hashlib.sha256(readings.output_bits(variant.executable)).digest()


def _make_ready(overlapped: Replayable, plans: Mapping[str, Plan], opened: ExitStack) -> dict[str, Variant]:
    """Apply every plan to a copy of the graph; return variants by label, verified or not. `opened` closes them."""
    variants = {}
    for label, plan in plans.items():
        rewritten = rewrite(overlapped.graph, overlapped.read, plan)
        with closing(rewritten.graph):
            executable = opened.enter_context(closing(rewritten.graph.instantiate()))
        is_engaged = all(entry.state == "verified" for entry in rewritten.engagements)
        variants[label] = Variant(executable=executable, is_engaged=is_engaged)
    return variants
