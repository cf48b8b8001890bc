"""The command `bench`, on GPUs or simulated. Imports torch only when it measures.

Under torchrun every rank runs the command and only rank 0 prints. A rank that fails prints its one line and exits at once,
so that no other rank waits for it forever.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import click
import msgspec
from msgspec.structs import replace

from counterpoint.cli.options import Group, argument, complete_shipped, file_option, output_option
from counterpoint.errors import CounterpointError, DeviceError, WorkloadError, shown
from counterpoint.value import check_outputs, save_text, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from counterpoint.paper.cases import Axis
    from counterpoint.paper.values import PaperResult, Sweep
    from counterpoint.validation.bounds import ErrorBounds
    from counterpoint.workloads.description import Description

ROUNDS = {"cb": 11, "mb": 5}
SWEEP_ROUNDS = 5
NO_BOUNDS: "Mapping[str, ErrorBounds]" = MappingProxyType({})


@click.group(cls=Group)
def bench() -> None:
    """Run the workloads of the first paper (arXiv 2606.09200) under all controls."""


@bench.command(
    name="paper",
    examples=(
        "counterpoint bench paper cb_ar_opt2 --simulate h200",
        "counterpoint bench paper --simulate all --sweep ctas -o ctas.json",
        "torchrun --nproc-per-node 4 -m counterpoint bench paper",
    ),
)
@argument(
    "workloads",
    metavar="[WORKLOAD...]",
    nargs=-1,
    shell_complete=complete_shipped("workloads"),
    help="Names of workloads, such as cb_ar_opt2.  [default: all of them]",
)
@click.option(
    "--simulate",
    metavar="MACHINE",
    help="Simulate for this machine, or for 'all'.  [default: run on the GPUs of this machine]",
)
@click.option(
    "--sweep",
    metavar="AXIS",
    multiple=True,
    help="Instead of the grid, sweep ctas, sizes, bytes, tiles, types, ranks or iterations. ctas=64,256,tiles chooses "
    "values. May be repeated.  [default: the grid]",
)
@click.option(
    "--iterations", type=click.IntRange(1, 1000), metavar="N", help="The number of iterations of a step.  [default: 4]"
)
@click.option(
    "--rounds",
    type=click.IntRange(2, 1000),
    metavar="N",
    help="On GPUs: rounds of all variants.  [default: 11 for cb, 5 for mb and for sweeps]",
)
@click.option(
    "--energy", is_flag=True, help="On GPUs: measure joules per step, too. This takes a second more for each variant."
)
@file_option("--plot", help="Draw the sweeps (.svg, .png, .pdf). This needs matplotlib.  [default: none]")
@output_option("Save the results (.json). On GPUs a grid goes on where FILE ends.")
@click.option("--again", is_flag=True, help="On GPUs: measure again what FILE already holds.")
def bench_paper(
    workloads: tuple[str, ...],
    *,
    simulate: str | None,
    sweep: tuple[str, ...],
    iterations: int | None,
    rounds: int | None,
    energy: bool,
    plot: Path | None,
    output: Path | None,
    again: bool,
) -> None:
    """Run the first paper's grid of controls and its sweeps, on GPUs or simulated.

    The grid is sequential, plain overlap, priority, residency caps, head start, and the planner's choice. A sweep varies one
    axis under sequential, plain overlap, priority and copy engines. It prints TimeRatio and overlap ratio.
    """
    from counterpoint.paper.stored import RESULTS  # noqa: PLC0415  a fast --help
    from counterpoint.report.plots import PLOT  # noqa: PLC0415

    check_outputs(((output, RESULTS), (plot, PLOT)))
    asked = BenchOptions(workloads, sweep, iterations, rounds, energy, plot, output, again)
    asked.check(is_simulated=simulate is not None)
    if simulate is not None:
        _simulate_paper(asked, simulate)
        return
    from counterpoint.cuda.ranks import run_and_leave  # noqa: PLC0415

    run_and_leave(lambda: _measure_paper(asked))


@bench.command(name="allocations", examples=("counterpoint bench allocations h100 h200 -o allocations.md",))
@argument(
    "machines",
    metavar="[MACHINE...]",
    nargs=-1,
    shell_complete=complete_shipped("machines"),
    help="Names of machines.  [default: all of them]",
)
@output_option("Save the page (.md).  [default: print it]")
def bench_allocations(machines: tuple[str, ...], output: Path | None) -> None:
    """Print the shared memory per CTA that gives each residency, for each GPU; simulated.

    The page (Markdown) holds reference allocations of the first paper's matmuls: what sets each residency, what it leaves
    free and what it costs.
    """
    from counterpoint.machine import load_machine, machine_names  # noqa: PLC0415
    from counterpoint.paper.allocations import allocations_of  # noqa: PLC0415
    from counterpoint.report.allocations import ALLOCATIONS, allocations_page  # noqa: PLC0415

    check_outputs(((output, ALLOCATIONS),))
    loaded = [load_machine(name) for name in machines or machine_names(variants=False)]
    page = allocations_page([(machine, allocations_of(machine)) for machine in loaded])
    if output is None:
        print(page, end="")
    else:
        save_text(output, page, ALLOCATIONS, CounterpointError)


class BenchOptions(msgspec.Struct, frozen=True):
    """The options of `bench paper`, as they were typed."""

    workloads: tuple[str, ...]
    sweeps: tuple[str, ...]
    iterations: int | None
    rounds: int | None
    with_energy: bool
    plot: Path | None
    output: Path | None
    is_anew: bool = False

    def check(self, *, is_simulated: bool) -> None:
        """Raise `CounterpointError` for options that cannot be combined."""
        if self.with_energy and is_simulated:
            raise DeviceError(
                "--energy reads the GPU's counter, and a simulation has none. Leave --energy or --simulate out."
            )
        if self.rounds is not None and is_simulated:
            raise DeviceError("--rounds repeats measurements, and a simulation has none. Leave --rounds or --simulate out.")
        if self.is_anew and (is_simulated or self.sweeps):
            raise DeviceError("--again is for grids on GPUs, which go on where their file ends. Leave it out.")
        if self.plot is not None:
            if not self.sweeps:
                raise WorkloadError("--plot draws sweeps, and none was asked for. Add --sweep ctas, or leave --plot out.")
            from counterpoint.report.plots import check_plot  # noqa: PLC0415

            check_plot()

    def check_panels(self, number: int) -> None:
        """Raise `CounterpointError` if a plot was requested that cannot hold `number` sweeps."""
        if self.plot is not None:
            from counterpoint.report.plots import check_panels  # noqa: PLC0415

            check_panels(number)

    def axes(self) -> list[tuple["Axis", tuple[str, ...]]]:
        """Parse the sweeps. Raises `WorkloadError`."""
        from counterpoint.paper.cases import parse_sweep  # noqa: PLC0415

        return [parse_sweep(each) for each in self.sweeps]

    def descriptions(self, usual: list[str]) -> dict[str, "Description"]:
        """Return the requested or usual workloads by name, with the requested iterations. Raises `WorkloadError`."""
        from counterpoint.paper.cases import paper_description, with_iterations  # noqa: PLC0415

        found = {name: paper_description(name) for name in self.workloads or usual}
        if self.iterations is None:
            return found
        return {name: with_iterations(each, str(self.iterations)) for name, each in found.items()}


def _simulate_paper(asked: BenchOptions, machine_name: str) -> None:
    from counterpoint.machine import load_machine, machine_names  # noqa: PLC0415
    from counterpoint.paper.cases import check_memory  # noqa: PLC0415
    from counterpoint.paper.grid import simulate_paper  # noqa: PLC0415
    from counterpoint.paper.launches import compiled_for  # noqa: PLC0415
    from counterpoint.paper.sweep import simulate_sweep  # noqa: PLC0415
    from counterpoint.report.text import ProgressLine  # noqa: PLC0415
    from counterpoint.validation.bounds import bounds_for  # noqa: PLC0415
    from counterpoint.workloads import build_step, workload_names  # noqa: PLC0415

    axes, descriptions = asked.axes(), asked.descriptions(workload_names())
    machines = [load_machine(name) for name in (machine_names(variants=False) if machine_name == "all" else [machine_name])]
    num_ranks = max(described.num_ranks for described in descriptions.values())
    bounds = {machine.name: bounds_for(machine, num_ranks, "sizes alone") for machine in machines}
    # a user's own file has its own launches
    jobs = [
        (described, machine, not name.lower().endswith(".toml"))
        for machine in machines
        for name, described in descriptions.items()
    ]
    if axes:
        asked.check_panels(len(jobs) * len(axes))
        sweeps = []
        with ProgressLine() as show:
            for described, machine, is_compiled in jobs:
                for axis, values in axes:
                    show(f"simulating {shown(described.name)} on {shown(machine.name)}, sweep of {axis}")
                    sweeps.append(simulate_sweep(described, machine, axis, values, is_compiled=is_compiled))
        _show_sweeps(sweeps, bounds)
        _finish_sweeps(sweeps, asked, {"gpus": "none used, simulated"}, bounds)
        return
    for described, machine, _ in jobs:
        check_memory(described, machine.gpu.hbm_bytes, f"a GPU of '{machine.name}' has")
    results = []
    with ProgressLine() as show:
        for described, machine, is_compiled in jobs:
            show(f"simulating {shown(described.name)} on {shown(machine.name)}")
            step = build_step(compiled_for(described, machine.gpu) if is_compiled else described)
            results.append(replace(simulate_paper(step, machine), iterations=described.iterations))
    _show(results, asked.output, bounds)


def _measure_paper(asked: BenchOptions) -> None:
    from counterpoint.cuda.ranks import join_ranks  # noqa: PLC0415

    rank = join_ranks("Without GPUs, simulate: counterpoint bench paper --simulate MACHINE.")
    from counterpoint.cuda.conditions import measuring_conditions  # noqa: PLC0415
    from counterpoint.paper.cases import paper_workload_names  # noqa: PLC0415
    from counterpoint.paper.on_gpu import check_cases, measure_workload, on_these_ranks  # noqa: PLC0415
    from counterpoint.paper.stored import read_grid  # noqa: PLC0415
    from counterpoint.planner.measured import NUM_ROUNDS  # noqa: PLC0415

    axes = asked.axes()
    descriptions = [on_these_ranks(each) for each in asked.descriptions(paper_workload_names()).values()]
    if axes:
        _measure_sweeps(asked, descriptions, rank)
        return
    check_cases(descriptions)
    conditions = measuring_conditions(rounds=asked.rounds or ROUNDS)
    num_ranks = max(described.num_ranks for described in descriptions)
    stored = read_grid(asked.output, conditions, num_ranks)  # on every rank, before any of them writes
    measured = frozenset() if asked.is_anew else stored.measured(num_ranks)
    if rank == 0 and measured:
        print(
            f"Going on with {asked.output}: {len(measured)} workloads are measured; --again measures them anew.", flush=True
        )
    for described in descriptions:
        if described.name in measured:
            continue
        rounds = asked.rounds or ROUNDS.get(described.name.split("_")[0], SWEEP_ROUNDS)
        num_choice_rounds = min(asked.rounds or NUM_ROUNDS, NUM_ROUNDS)
        result, step = measure_workload(described, rounds, num_choice_rounds, with_energy=asked.with_energy)
        if rank == 0:
            _show([result], None)
            stored = stored.with_result(result, step, conditions)
            if asked.output is not None:
                stored.save(asked.output)


def _measure_sweeps(asked: BenchOptions, descriptions: list["Description"], rank: int) -> None:
    """Measure every sweep on GPUs, and store the results after each."""
    from counterpoint.cuda.conditions import measuring_conditions  # noqa: PLC0415
    from counterpoint.paper.on_gpu import measure_sweep, sweeps_of  # noqa: PLC0415

    planned = sweeps_of(descriptions, asked.axes())
    asked.check_panels(len(planned))
    sweeps = []
    rounds = asked.rounds or SWEEP_ROUNDS
    for described, axis, cases in planned:
        sweeps.append(measure_sweep(described, axis, cases, rounds, with_energy=asked.with_energy))
        if rank == 0:
            _show_sweeps(sweeps[-1:])
            _finish_sweeps(sweeps, asked, measuring_conditions(rounds=rounds))


def _unmeasured(bounds: "Mapping[str, ErrorBounds]", machine: str) -> "ErrorBounds | None":
    """Return the bounds of a machine that was never compared with hardware; None for any other."""
    found = bounds.get(machine)
    return None if found is None or found.is_compared else found


def _show_sweeps(sweeps: list["Sweep"], bounds: "Mapping[str, ErrorBounds]" = NO_BOUNDS) -> None:
    from counterpoint.report.paper import print_sweep  # noqa: PLC0415
    from counterpoint.report.text import new_console  # noqa: PLC0415

    console = new_console()
    for sweep in sweeps:
        print_sweep(console, sweep, _unmeasured(bounds, sweep.machine))


def _finish_sweeps(
    sweeps: list["Sweep"],
    asked: BenchOptions,
    conditions: dict[str, object],
    bounds: "Mapping[str, ErrorBounds]" = NO_BOUNDS,
) -> None:
    _save(sweeps, asked.output, conditions, bounds)
    if asked.plot is not None:
        from counterpoint.report.plots import draw_sweeps  # noqa: PLC0415

        draw_sweeps(sweeps, asked.plot, str(conditions["gpus"]))


def _show(results: list["PaperResult"], output: Path | None, bounds: "Mapping[str, ErrorBounds]" = NO_BOUNDS) -> None:
    """Print the results and save them; `bounds` are those of simulated times, by machine."""
    from counterpoint.report.paper import print_paper  # noqa: PLC0415
    from counterpoint.report.text import new_console  # noqa: PLC0415

    console = new_console()
    for result in results:
        print_paper(console, result, _unmeasured(bounds, result.machine))
    _show_how_to_apply(console, results)
    _save(results, output, {"gpus": "none used, simulated"}, bounds)


def _show_how_to_apply(console: "Console", results: list["PaperResult"]) -> None:
    """Print how to apply the choice for one workload; for several or measured ones, how to get a plan to apply."""
    from counterpoint.report.plan import print_to_apply  # noqa: PLC0415
    from counterpoint.report.to_apply import PlanOrigin, ways_to_apply  # noqa: PLC0415

    chosen = [result for result in results if result.choice.directives]
    if any(result.choice.expectation and result.choice.expectation.origin == "measured" for result in chosen):
        print("The workloads are the paper's. For a step of your own: counterpoint tune module:function -o plan.toml")
    elif len(results) > 1 and chosen:
        print("To apply a choice: counterpoint tune WORKLOAD --machine NAME -o plan.toml, which then says how.")
    else:
        for result in chosen:
            finding = ("counterpoint", "tune", result.workload, "--machine", result.machine)
            print_to_apply(console, ways_to_apply(result.choice, PlanOrigin(finding=finding, step=result.workload)))


def _save(
    results: Sequence[object], output: Path | None, conditions: dict[str, object], bounds: "Mapping[str, ErrorBounds]"
) -> None:
    """Store the results with the conditions under which they were obtained, in one object, as benchmarks do."""
    if output is not None:
        from counterpoint.paper.stored import RESULTS  # noqa: PLC0415

        stored = {"conditions": conditions, **({"bounds": dict(bounds)} if bounds else {}), "result": results}
        save_text(output, f"{write_json(stored)}\n", RESULTS, CounterpointError)
