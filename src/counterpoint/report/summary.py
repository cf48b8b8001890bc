"""The figures of a report as values: the same for the text that people read and for JSON.

The replay error compares the makespan simulated without any control with the traced one.
"""

from counterpoint.job import Job
from counterpoint.metrics import Metrics, ideal_us, measure, sequential_us, share_of_ideal
from counterpoint.plan import Plan
from counterpoint.planner import Trial, Tuning
from counterpoint.sim import Simulator
from counterpoint.timeline import Timeline
from counterpoint.units import format_percent
from counterpoint.value import Value


class Row(Value, frozen=True, kw_only=True):
    """One line about the whole step; `metrics` is None where only a time is known. `remark` is for people."""

    name: str
    makespan_us: float
    metrics: Metrics | None = None
    remark: str = ""


class Summary(Value, frozen=True, kw_only=True):
    """What a command found. `replay_error` is signed, a fraction of the traced makespan, None without a trace."""

    step_name: str
    step_fingerprint: str
    machine: str
    origin: str
    notes: tuple[str, ...]
    step: tuple[Row, ...]
    replay_error: float | None = None
    plan: Plan | None = None
    trials: tuple[Trial, ...] = ()


def summarize_tuning(job: Job, tuning: Tuning) -> Summary:
    """The figures of `tune`."""
    rows, error = _step_rows(job, tuning.baseline, "as replayed" if job.traced else "as it is")
    if tuning.plan.directives:
        rows = (*rows[:-1], _simulated_row(job, "with the plan", tuning.planned), rows[-1])
    return _summary(job, rows, error, plan=tuning.plan, trials=tuning.trials)


def summarize_simulation(job: Job, simulated: Timeline) -> Summary:
    """The figures of `simulate`."""
    rows, _ = _step_rows(job, simulated, "simulated")
    return _summary(job, rows, None)


def _summary(
    job: Job, rows: tuple[Row, ...], error: float | None, plan: Plan | None = None, trials: tuple[Trial, ...] = ()
) -> Summary:
    return Summary(
        step_name=job.step.name,
        step_fingerprint=job.step.fingerprint(),
        machine=job.machine.name,
        origin="simulated",
        notes=job.traced.notes if job.traced else (),
        step=rows,
        replay_error=error,
        plan=plan,
        trials=trials,
    )


def _step_rows(job: Job, simulated: Timeline, name: str) -> tuple[tuple[Row, ...], float | None]:
    """Sequential, as traced, as simulated and ideal, in this order."""
    lone_us = Simulator().lone_times_us(job.step, job.machine)
    sequential = Row(name="sequential", makespan_us=sequential_us(job.step, lone_us), remark="sum of lone times")
    ideal = Row(name="ideal", makespan_us=ideal_us(job.step, lone_us), remark="busiest resource or critical path")
    replayed = _simulated_row(job, name, simulated)
    if job.traced is None:
        return (sequential, replayed, ideal), None
    traced = measure(job.traced.timeline)
    error = replayed.makespan_us / traced.makespan_us - 1
    replayed = Row(
        name=name,
        makespan_us=replayed.makespan_us,
        metrics=replayed.metrics,
        remark=f"replay error {100 * error:+.1f} %",
    )
    remark = f"measured, {job.traced.num_steps} profiled steps"
    return (
        sequential,
        Row(name="as traced", makespan_us=traced.makespan_us, metrics=traced, remark=remark),
        replayed,
        ideal,
    ), error


def _simulated_row(job: Job, name: str, simulated: Timeline) -> Row:
    lone_us = Simulator().lone_times_us(job.step, job.machine)
    metrics = measure(simulated)
    share = share_of_ideal(sequential_us(job.step, lone_us), metrics.makespan_us, ideal_us(job.step, lone_us))
    remark = "" if share is None else f"{format_percent(share)} of the possible gain"
    return Row(name=name, makespan_us=metrics.makespan_us, metrics=metrics, remark=remark)
