"""The figures of a report as values, shared by the text output and JSON.

The replay compares the simulation without any control with the trace: makespan, exposed time, overlap.
"""

from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from counterpoint.job import Job
from counterpoint.metrics import Metrics, measure, share_of_ideal
from counterpoint.plan import LEAVE_IT, Plan
from counterpoint.planner import Trial, Tuning
from counterpoint.planner.ideal import Scale, scale_of
from counterpoint.planner.job_changes import JobChanges, find_job_changes
from counterpoint.report.to_apply import NOWHERE, Application, PlanOrigin, ways_to_apply
from counterpoint.sim import Simulator
from counterpoint.sim.calibrated_range import outside_calibration
from counterpoint.sim.replay import ReplayAccuracy, compare_replay
from counterpoint.timeline import Timeline
from counterpoint.units import format_change, format_count, format_percent, format_us
from counterpoint.validation.bounds import ErrorBounds, bounds_for
from counterpoint.value import Value

NO_COMMUNICATION = (
    "This step holds no communication, so there is nothing to hide. Did the job use one GPU, or do its "
    "collectives have unknown names?"
)


class ReportRow(Value, frozen=True, kw_only=True):
    """One row about the whole step; `metrics` is None if only a time is known. `remark` is for people.

    `between_us` bounds the time that a measurement would give, on a machine that was never compared with hardware.
    """

    name: str
    makespan_us: float
    metrics: Metrics | None = None
    remark: str = ""
    between_us: tuple[float, float] | None = None


class Summary(Value, frozen=True, kw_only=True, tag_field="schema", tag="counterpoint.report/1"):
    """The result of a command. `schema` names the format in JSON; a change that breaks readers increments it.

    `replay` says how accurate the simulation is; None without a trace and for a step under a plan. `replay_error` is the
    error of its makespan alone. `bounds` are those of every simulated time. `job_changes` are simulated only if `tune`
    found no plan.
    """

    step_name: str
    step_fingerprint: str
    machine: str
    origin: str
    notes: tuple[str, ...]
    step: tuple[ReportRow, ...]
    bounds: ErrorBounds
    replay_error: float | None = None
    replay: ReplayAccuracy | None = None
    plan: Plan | None = None
    trials: tuple[Trial, ...] = ()
    to_apply: tuple[Application, ...] = ()
    job_changes: JobChanges | None = None


def summarize_tuning(job: Job, tuning: Tuning, origin: PlanOrigin = NOWHERE) -> Summary:
    """Return the figures of `tune` and how to apply the plan; without a plan, what could be changed in the job.

    `origin` says where the plan comes from.
    """
    scale = _scale(job, tuning.plan)
    rows = [_replayed_row(job, scale, "as replayed" if job.traced else "as it is", tuning.baseline)]
    if tuning.plan.directives:
        rows.append(_planned_row(scale, "with the plan", tuning.planned, tuning.plan))
    found = _summary(job, scale, rows, _replay(job, tuning.baseline), plan=tuning.plan, trials=tuning.trials)
    if tuning.plan.directives:
        return replace(found, to_apply=ways_to_apply(tuning.plan, origin, job.step))
    return replace(found, job_changes=find_job_changes(job.step, job.machine, Simulator()))


def summarize_simulation(job: Job, simulated: Timeline, plan: Plan = LEAVE_IT, remarks: tuple[str, ...] = ()) -> Summary:
    """Return the figures of `simulate`; under a plan that changes the step, there is no replay error.

    `remarks` are about the plan, or about the cluster that the step was extended to.
    """
    scale = _scale(job, plan)
    if plan.directives:
        rows = [_planned_row(scale, "with the plan", simulated, plan)]
        return _summary(job, scale, rows, None, plan=plan, remarks=remarks)
    rows = [_replayed_row(job, scale, "simulated", simulated)]
    return _summary(job, scale, rows, _replay(job, simulated), remarks=remarks)


def _summary(
    job: Job,
    scale: Scale,
    rows: Sequence[ReportRow],
    replay: ReplayAccuracy | None,
    *,
    plan: Plan | None = None,
    trials: tuple[Trial, ...] = (),
    remarks: tuple[str, ...] = (),
) -> Summary:
    """Return the figures of a command; rows are sequential, as traced, the simulated ones and the ideals, in this order."""
    bounds = bounds_for(job.machine, job.step.num_ranks, "traces" if job.traced else "sizes alone")
    first = []
    if job.traced is not None:
        traced = measure(job.traced.timeline)
        remark = f"measured, {format_count(job.traced.num_steps, 'profiled step')}"
        first.append(ReportRow(name="as traced", makespan_us=traced.makespan_us, metrics=traced, remark=remark))
    sequential = ReportRow(name="sequential", makespan_us=scale.sequential_us, remark="sum of stand-alone times")
    sequential, *simulated = _bounded((sequential, *rows, *_ideal_rows(scale)), bounds)
    return Summary(
        step_name=job.step.name,
        step_fingerprint=job.step.fingerprint(),
        machine=job.machine.name,
        origin="simulated",
        notes=(*_notes(job, bounds), *([f"Replay against the trace: {replay.describe()}."] if replay else ()), *remarks),
        step=(sequential, *first, *simulated),
        bounds=bounds,
        replay_error=None if replay is None else replay.makespan_error,
        replay=replay,
        plan=plan,
        trials=trials,
    )


def _bounded(rows: Iterable[ReportRow], bounds: ErrorBounds) -> list[ReportRow]:
    """Return simulated rows, with bounds if the machine was never compared with hardware."""
    if bounds.is_compared:
        return list(rows)
    return [replace(row, between_us=bounds.around(row.makespan_us)) for row in rows]


def _notes(job: Job, bounds: ErrorBounds) -> tuple[str, ...]:
    """Return notes on how the step was read, and on the machine."""
    notes = job.traced.notes if job.traced else ()
    if not any(operation.kind == "communication" for operation in job.step.operations):
        notes = (*notes, NO_COMMUNICATION)
    if not bounds.is_compared:
        notes = (*notes, bounds.note)
    outside = outside_calibration(job.step, job.machine)
    if outside:
        notes = (*notes, f"Outside the calibrated range: {'; '.join(outside)}.")
    return notes


def _replay(job: Job, simulated: Timeline) -> ReplayAccuracy | None:
    return None if job.traced is None else compare_replay(job.traced.timeline, simulated)


def _replayed_row(job: Job, scale: Scale, name: str, simulated: Timeline) -> ReportRow:
    replay = _replay(job, simulated)
    if replay is None:
        return _planned_row(scale, name, simulated)
    metrics = measure(simulated)
    remark = f"replay error {format_change(replay.makespan_error)}"
    return ReportRow(name=name, makespan_us=metrics.makespan_us, metrics=metrics, remark=remark)


def _scale(job: Job, plan: Plan) -> Scale:
    traced_us = None if job.traced is None else measure(job.traced.timeline).makespan_us
    return scale_of(job.step, job.machine, [plan], traced_us)


def _ideal_rows(scale: Scale) -> Iterator[ReportRow]:
    """Yield both ideals, each with its assumption."""
    remark = "with today's dependencies"
    if scale.inexact_us is not None:
        remark = f"the traced time; inexact stand-alone times and dependencies give {format_us(scale.inexact_us)}"
    yield ReportRow(name="ideal", makespan_us=scale.ideal_us, remark=remark)
    yield ReportRow(name="ideal in pieces", makespan_us=scale.in_pieces_us, remark="with collectives cut into pieces")


def _planned_row(scale: Scale, name: str, simulated: Timeline, plan: Plan = LEAVE_IT) -> ReportRow:
    metrics = measure(simulated)
    remark = _reached(scale, metrics.makespan_us, scale.ideal_of(plan))
    return ReportRow(name=name, makespan_us=metrics.makespan_us, metrics=metrics, remark=remark)


def _reached(scale: Scale, makespan_us: float, ideal_us: float) -> str:
    """Say which share of the possible gain was reached, or why there is none; nothing where nothing can be gained."""
    share = share_of_ideal(scale.start_us, makespan_us, ideal_us)
    if share is not None and 0 <= round(share, 3) <= 1:
        return f"{format_percent(share)} of the possible gain"
    if round(makespan_us, 3) > round(scale.start_us, 3):
        start = "sequential, which has no launch gaps" if scale.start_us == scale.sequential_us else "the traced time"
        return f"no share: above {start}"
    return "no share: below the ideal, which is inexact" if makespan_us < ideal_us else ""
