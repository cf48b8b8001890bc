"""Predicts every case of the validation set with today's simulator, and compares with the measurements.

A case is predicted in up to three ways: from its captured step (lone times and launches are known), from a trace of the
unchanged step (everything is read from the trace), and from sizes alone (lone times are predicted, too).
"""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from counterpoint.errors import CounterpointError
from counterpoint.machine import Machine, load_machine
from counterpoint.measurement.tournament import WARM_UP_ROUNDS
from counterpoint.metrics import measure
from counterpoint.plan import Plan
from counterpoint.sim import Simulator
from counterpoint.sim.traced_waits import with_waits
from counterpoint.step import Copy, Kernel, Operation, Step
from counterpoint.traces import read_trace
from counterpoint.traces.classify import classify_kernel, ctas_per_cluster, matmul_type
from counterpoint.validation.cases import Case, cases_for
from counterpoint.validation.described import described_step, places_of
from counterpoint.validation.figures import MODELS, Figures, PredictedRow, figures_of
from counterpoint.validation.records import MeasuredCase, MeasuredRow, MeasuredSet, load_measured, trace_path
from counterpoint.value import Value

REPLAYS_PER_TIME = 2  # a time is that of the second replay
# the power limit of an H200 acts after this time under load, in two steps; a matmul's times say how large the first one is
BURST_US, FIRST_STEP_US, SHARE_OF_FIRST_STEP = 42_000.0, 82_000.0, 0.6
CLUSTERS_SINCE = 9  # major compute capability, that of all GPUs of stored captures
Origin = Literal["captured steps", "traces", "sizes alone"]
ORIGINS: tuple[Origin, ...] = get_args(Origin)


class OriginOutcome(Value, frozen=True, kw_only=True):
    """The predictions of one origin: the figures of the simulator first, then those of naive models, and every row."""

    origin: Origin
    figures: tuple[Figures, ...]
    rows: tuple[PredictedRow, ...]


class Outcome(Value, frozen=True, kw_only=True):
    """The outcome for one file of measurements; `left_out` names what could not be predicted, and why."""

    file: str
    machine: str
    num_gpus: int
    conditions: dict[str, Any]
    origins: tuple[OriginOutcome, ...]
    left_out: tuple[str, ...]


def validate_files(paths: Iterable[Path]) -> tuple[Outcome, ...]:
    """Predict the contents of each file of measurements. Raises `CounterpointError` if a file holds none."""
    return tuple(_validate(path, load_measured(path)) for path in paths)


def _validate(path: Path, measured: MeasuredSet) -> Outcome:
    machine = load_machine(measured.machine)
    cases = {case.name: case for case in cases_for(measured.num_gpus)}
    rows: dict[Origin, list[PredictedRow]] = {origin: [] for origin in ORIGINS}
    missing = [name for name in cases if name not in {found.name for found in measured.cases}]
    left_out = [f"{len(missing)} of {len(cases)} cases were not measured: {'; '.join(missing)}"] if missing else []
    num_former = sum(len(found.rows) - len(found.comparable_rows) for found in measured.cases)
    if num_former:
        left_out.append(f"{num_former} rows of reductions by copies: their sum was torch's, which one kernel replaces now")
    for found in measured.cases:
        for origin in ORIGINS:
            try:
                step = _step_of(origin, cases[found.name], found, path, machine)
                if step is not None:
                    rows[origin].extend(_predict(step, machine, found, _rows_for(origin, found), cases[found.name].family))
            except CounterpointError as problem:
                left_out.append(f"{found.name}, from {origin}: {problem}")
    return Outcome(
        file=path.name,
        machine=measured.machine,
        num_gpus=measured.num_gpus,
        conditions=measured.conditions,
        origins=tuple(_origin_outcome(origin, found) for origin, found in rows.items() if found),
        left_out=tuple(left_out),
    )


def _origin_outcome(origin: Origin, rows: Sequence[PredictedRow]) -> OriginOutcome:
    return OriginOutcome(origin=origin, figures=tuple(figures_of(rows, model) for model in MODELS), rows=tuple(rows))


def _step_of(origin: Origin, case: Case, measured: MeasuredCase, path: Path, machine: Machine) -> Step | None:
    """Return the step that predictions of this origin start from; None if the case has none."""
    if origin == "captured steps":
        return _as_captured(measured)
    if origin == "sizes alone":
        return described_step(case, as_read_today(measured.step))
    if measured.trace is None:
        return None
    traced = read_trace(trace_path(path, measured.trace))
    places_of(case, traced.step)  # raises if the plans, which were made for the captured step, mean other operations here
    return with_waits(traced.step, traced.timeline, machine)


def _as_captured(measured: MeasuredCase) -> Step:
    """Return a case's step as it was captured."""
    return msgspec.structs.replace(as_read_today(measured.step), is_timed_in_bursts=True)


def predict_case(origin: Origin, case: Case, measured: MeasuredCase, path: Path, machine: Machine) -> list[PredictedRow]:
    """Return the rows of a case that need not be one of the set; none from traces if the case has no trace.

    `path` is the file of measurements.
    """
    step = _step_of(origin, case, measured, path, machine)
    return [] if step is None else list(_predict(step, machine, measured, _rows_for(origin, measured), "fresh"))


def predict_rows(measured: MeasuredCase, machine: Machine) -> list[PredictedRow]:
    """Return the rows of a captured step that no case describes."""
    return list(_predict(_as_captured(measured), machine, measured, _rows_for("captured steps", measured), "fresh"))


def _loaded_us(measured: MeasuredCase) -> float:
    """Return how long the GPU had run at the middle one of a case's rounds: this decides whether the power limit acted."""
    captured = [row for row in measured.rows if row.setting == "captured"]
    return REPLAYS_PER_TIME * sum(row.measured_us * (WARM_UP_ROUNDS + row.num_rounds / 2) for row in captured)


def _share_of_limit(measured: MeasuredCase) -> float:
    """Return how far the power limit had lowered the clock at the middle one of a case's rounds."""
    loaded_us = _loaded_us(measured)
    if loaded_us <= BURST_US:
        return 0.0
    return SHARE_OF_FIRST_STEP if loaded_us <= FIRST_STEP_US else 1.0


def as_read_today(step: Step) -> Step:
    """Return a stored captured step, with its kernels classified by their names under today's rules.

    Captures before 2026-11-29 held no clusters of CTAs. The rules for traces say them.
    """
    return msgspec.structs.replace(step, operations=tuple(map(_as_read_today, step.operations)))


def _as_read_today(operation: Operation) -> Operation:
    if isinstance(operation, Copy) or operation.footprint is None:
        return operation
    rule, footprint = classify_kernel(operation.name), operation.footprint
    if footprint.ctas_per_cluster == 1:
        size = ctas_per_cluster(rule, CLUSTERS_SINCE, footprint.num_ctas)
        operation = msgspec.structs.replace(operation, footprint=msgspec.structs.replace(footprint, ctas_per_cluster=size))
    if not isinstance(operation, Kernel):
        return operation
    element_type = matmul_type(operation.name, "") if rule.character == "matmul" else None
    return msgspec.structs.replace(operation, character=rule.character, element_type=element_type)


def _rows_for(origin: Origin, measured: MeasuredCase) -> list[MeasuredRow]:
    """Return all rows for a trace, since a user applies a plan in either setting; otherwise return the captured ones."""
    return [row for row in _distinct(measured.comparable_rows) if origin == "traces" or row.setting == "captured"]


def _distinct(rows: Sequence[MeasuredRow]) -> list[MeasuredRow]:
    """Return the rows; a plan that was measured under two names becomes one variant with the mean figures."""
    found: dict[tuple[str, Plan], list[MeasuredRow]] = {}
    for row in rows:
        found.setdefault((row.setting, row.plan), []).append(row)
    return [
        msgspec.structs.replace(
            same[0],
            measured_us=statistics.fmean(row.measured_us for row in same),
            ratio=statistics.fmean(row.ratio for row in same),
        )
        for same in found.values()
    ]


def _predict(
    step: Step, machine: Machine, measured: MeasuredCase, rows: Sequence[MeasuredRow], family: str
) -> Iterator[PredictedRow]:
    lone_us = Simulator().lone_times_us(step, machine)  # naive models know no power limit
    captured = {row.label: row.plan for row in rows if row.setting == "captured"}
    clock_share = Simulator().clock_of_turns(step, machine, list(captured.values()))
    simulator = Simulator(clock_share=1 - _share_of_limit(measured) * (1 - clock_share))
    predicted: dict[str, float] = {}
    for row in rows:
        if row.label not in predicted:
            predicted[row.label] = measure(simulator.run(step, machine, row.plan)).makespan_us
    plain = rows[0].label
    for row in rows:
        baseline_us = row.measured_us / row.ratio
        yield PredictedRow(
            group=f"{measured.name} ({row.setting})",
            family=family,
            label=row.label,
            measured_us=row.measured_us,
            measured_baseline_us=baseline_us,
            predicted_us=predicted[row.label],
            predicted_baseline_us=predicted[plain],
            sum_us=sum(lone_us),
            longest_us=_longest_path_us(step, lone_us),
            spread=row.spread,
        )


def _longest_path_us(step: Step, lone_us: Sequence[float]) -> float:
    """Return the longest path through streams and dependencies, with the lone time of each operation."""
    ends: list[float] = []
    last: dict[int, float] = {}
    for operation, time_us in zip(step.operations, lone_us, strict=True):
        waits = (ends[wait.operation] for wait in operation.waits_for)
        ends.append(max(last.get(operation.stream, 0.0), *waits, 0.0) + time_us)
        last[operation.stream] = ends[-1]
    return max(ends)
