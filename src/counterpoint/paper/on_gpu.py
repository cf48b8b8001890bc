"""Captures a workload of the paper, or a case of a sweep, in each of its forms on this machine's GPUs, and measures it."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from msgspec.structs import replace

from counterpoint.cuda.capture import Captured, capture, record
from counterpoint.cuda.driver_graph import DriverGraph
from counterpoint.cuda.energy import LEAST_S, mean_watts, watch
from counterpoint.cuda.graph import AbstractExecutable
from counterpoint.cuda.nvml import Nvml
from counterpoint.cuda.rendezvous import num_ranks
from counterpoint.errors import DeviceError, WorkloadError
from counterpoint.metrics import measure
from counterpoint.ops.captured_copies import offer_copies
from counterpoint.paper.cases import Axis, SweepCase, cases_of, with_ranks, with_stages
from counterpoint.paper.grid import Readings, Variant, measure_paper, measure_variants, sweep_plans, why_no_copies
from counterpoint.paper.values import SEQUENTIAL, Energy, PaperResult, Sweep, SweepPoint
from counterpoint.paper.workloads import (
    PaperWorkload,
    check_fits,
    check_runnable,
    launch_in_a_row,
    open_energy_counter,
)
from counterpoint.planner.on_gpu import machine_of
from counterpoint.step import Step
from counterpoint.units import US_PER_S
from counterpoint.workloads.description import Description

LONGEST_S = 60.0


def check_cases(descriptions: Sequence[Description]) -> None:
    """Raise `WorkloadError` for the first description that cannot run here, before any of them takes memory."""
    for description in descriptions:
        check_runnable(description)
        check_fits(description)


def on_these_ranks(description: Description) -> Description:
    """Return the same workload on as many ranks as were started."""
    return with_ranks(description, str(num_ranks()))


def sweeps_of(
    descriptions: Sequence[Description], axes: Sequence[tuple[Axis, tuple[str, ...]]]
) -> list[tuple[Description, Axis, list[SweepCase]]]:
    """Return each workload along each axis; all are checked before any takes memory. Raises `WorkloadError`."""
    if any(axis == "ranks" for axis, _ in axes):
        raise WorkloadError(
            f"On GPUs the number of ranks is that of the started processes, here {num_ranks()}. Start the "
            "command once for each number, or simulate the sweep: --simulate MACHINE --sweep ranks."
        )
    found = [(described, axis, cases_of(described, axis, values)) for described in descriptions for axis, values in axes]
    check_cases([case.description for _, _, cases in found for case in cases])
    return found


def measure_sweep(
    description: Description, axis: Axis, cases: Sequence[SweepCase], num_rounds: int, *, with_energy: bool
) -> Sweep:
    """Capture and measure each case in turn; all ranks call this together."""
    found = [measure_case(case, num_rounds, with_energy=with_energy) for case in cases]
    points = tuple(point for _, point in found)
    return Sweep(workload=description.name, machine=found[0][0], axis=axis, points=points)


def measure_workload(
    description: Description, num_rounds: int, num_choice_rounds: int, *, with_energy: bool
) -> tuple[PaperResult, Step]:
    """Capture the workload and measure its grid; all ranks call this together. Also returns the captured step.

    Raises what capturing raises.
    """
    with _captured(description, with_energy) as (overlapped, readings, forms):
        result = measure_paper(
            overlapped,
            machine_of(overlapped),
            readings,
            forms=forms,
            num_rounds=num_rounds,
            num_choice_rounds=num_choice_rounds,
        )
        step = overlapped.read.step
    return replace(result, iterations=description.iterations, sum_by="one kernel"), step


def measure_case(case: SweepCase, num_rounds: int, *, with_energy: bool) -> tuple[str, SweepPoint]:
    """Capture a case and measure its variants; all ranks call this together. Also returns the machine's name."""
    described = case.description
    with _captured(described, with_energy) as (overlapped, readings, forms):
        machine = machine_of(overlapped)
        plans = sweep_plans(overlapped.read.step, machine)
        rows, ideal_us = measure_variants(overlapped, machine, readings, plans=plans, forms=forms, num_rounds=num_rounds)
        obstacle = why_no_copies(overlapped)
    point = SweepPoint(setting=case.setting, num_ranks=described.num_ranks, iterations=described.iterations)
    return machine.name, point.with_rows(rows, ideal_us, f"copy engines were left out: {obstacle}" if obstacle else "")


@contextmanager
def _captured(description: Description, with_energy: bool) -> Iterator[tuple[Captured, Readings, dict[str, Variant]]]:
    """Yield the overlapped step, the readings of its variants, and its sequential form; close all of them."""
    workload = PaperWorkload(description)
    sequential = record(workload.sequential)  # its owner must live until the graph is instantiated
    counter = open_energy_counter() if with_energy else None
    with (
        closing(DriverGraph(sequential.graph.raw_cuda_graph()).instantiate()) as in_sequence,
        closing(capture(workload.overlapped, description.name)) as overlapped,
    ):
        offer_copies(overlapped)
        overlapped.read = replace(overlapped.read, step=with_stages(overlapped.read.step, description))
        readings = Readings(
            output_bits=workload.output_bits,
            overlap_ratio=lambda executable: overlap_ratio(overlapped, executable),
            energy=lambda executable: None if counter is None else measure_energy(overlapped, executable, counter),
        )
        yield overlapped, readings, {SEQUENTIAL: Variant(executable=in_sequence, is_engaged=True)}


def overlap_ratio(captured: Captured, executable: AbstractExecutable) -> float | None:
    """Return this rank's hidden share of communication in one replay under the profiler; None if operations are missing.

    They are missing if copies replace a collective: the profiler then shows no collective.
    """
    timeline = captured.timeline(executable)
    shown = {interval.operation for interval in timeline.intervals}
    return measure(timeline).overlap_ratio if len(shown) == len(captured.read.step.operations) else None


def measure_energy(captured: Captured, executable: AbstractExecutable, counter: Nvml) -> Energy:
    """Return the joules of one replay on all GPUs, from at least `LEAST_S` of replays; all ranks call this together."""
    number = max(2, math.ceil(LEAST_S * US_PER_S / captured.time_us(executable)))
    captured.rendezvous.meet()
    start, end = launch_in_a_row(executable, number)
    deadline = time.monotonic() + LONGEST_S  # for a rank that waits for one that has ended; `wait_for` then reports that
    readings = watch(counter, lambda: end.query() or time.monotonic() > deadline)
    captured.rendezvous.wait_for(end)
    watts = mean_watts(readings)
    if not captured.is_everywhere(watts is not None):
        spent_s = readings[-1][0] - readings[0][0]
        raise DeviceError(
            f"The energy counter changed fewer than two times in {spent_s:.2f} s of replays. Leave --energy out."
        )
    everyone = captured.rendezvous.each(watts or 0.0)
    step_s = captured.rendezvous.slowest(start.elapsed_time(end)) / 1000.0 / number
    return Energy(joules_per_step=sum(everyone) * step_s, watts=sum(everyone) / len(everyone))
