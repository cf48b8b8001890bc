"""Finds how much exposed time can be recovered, and by which change: controls, operators, integrations and changes to the
job, each one alone.

The planner simulates each change on the representative step. Results are sorted by value, with the lines that apply them. A
value below the error of the replay is marked: the simulator cannot distinguish it from zero. If `tune` would not use the
replay, nothing is recommended.
"""

import shlex
from collections.abc import Iterable, Iterator
from typing import Final

from msgspec.structs import replace

from counterpoint.analysis.values import Analysis, Cause, Recoverable
from counterpoint.errors import AnalysisError
from counterpoint.integrations.planned_paths import applied_in_job, needs_step
from counterpoint.job import Job
from counterpoint.measurement.values import LEAST_SIMULATED_GAIN
from counterpoint.metrics import measure
from counterpoint.plan import PLAN_FILE, Directive, Plan
from counterpoint.planner.job_changes import find_job_changes
from counterpoint.planner.search import Trial, Tuning, tune
from counterpoint.sim import Simulator
from counterpoint.sim.replay import compare_replay
from counterpoint.sim.traced_waits import with_waits
from counterpoint.step import Collective, Operation, Step
from counterpoint.workers import num_cores

MOST_NAMED = 8  # traces in a command
OTHER_PLAN = "# name all ranks' traces: from this one alone, tune does not know how long the rank waited for others"
OTHER_RULES = "# tune reads no file of --rules, so its plan may differ"
# The causes of exposed time that each control acts upon.
ACTS_ON: Final[dict[str, tuple[Cause, ...]]] = {
    "priority": ("starved", "queued"),
    "residency_cap": ("starved",),
    "carveout": ("starved", "dependent"),
    "head_start": ("starved",),
    "communication_ctas": ("starved",),
    "transport": ("starved", "dependent"),
    "overlap_matmul": ("dependent", "own_stream"),
    "own_stream": ("own_stream",),
}
# causes, what, microseconds, lines to paste, what a plan of it has
Entry = tuple[tuple[Cause, ...], str, float, tuple[str, ...], tuple[Directive, ...]]
OF_CHANGES: Final[tuple[Cause, ...]] = ("dependent", "own_stream", "queued", "launched_late", "tail")


def find_recoverable(
    analysis: Analysis, job: Job, source: str, machine_name: str | None = None, *, has_own_rules: bool = False
) -> tuple[Recoverable, ...]:
    """Return what would shorten the step of `job`, by value. Causes that the step does not have are not named.

    The job was read from `source`, by a user's rules if `has_own_rules` is set, and for the machine that the user named, or
    None. Raises `AnalysisError` if the replay differs so much from the trace that simulated gains say nothing.
    """
    machine = () if machine_name is None else ("--machine", machine_name)
    traced = None if job.traced is None else job.traced.timeline
    if job.traced is not None:
        known = without_waits(job.traced.step, analysis, source)
        job = replace(job, step=with_waits(known, job.traced.timeline, job.machine))
    tuning = tune(job.step, job.machine, Simulator(), traced=traced, num_workers=num_cores())
    replay = None if traced is None else compare_replay(traced, tuning.baseline)
    if replay is not None and (why := replay.why_unusable()):
        raise AnalysisError(f"{why}.")
    step = ("--step", source) if needs_step(tuning.plan) else ()
    paths = [each.path for each in analysis.ranks] if analysis.skews else [source]
    named = paths if len(paths) <= MOST_NAMED else [source]
    save = shlex.join(("counterpoint", "tune", *named, *machine, "-o", PLAN_FILE))
    run = shlex.join(("counterpoint", "run", "--plan", PLAN_FILE, *step, "--", "torchrun", "train.py"))
    remarks = (*((OTHER_PLAN,) if named != paths else ()), *((OTHER_RULES,) if has_own_rules else ()))
    commands = (*remarks, save, run) if applied_in_job(tuning.plan, job.step) else ()
    baseline_us = measure(tuning.baseline).makespan_us
    lone_us = Simulator().lone_times_us(job.step, job.machine)
    present = {total.cause for total in analysis.causes if total.exposed_us > 0}
    found = [
        Recoverable(
            causes=tuple(cause for cause in causes if cause in present),
            what=what,
            recovers_us=recovers_us,
            apply=apply,
            saved_us=_saved_us(job, lone_us, directives),
            is_within_replay_error=replay is not None and bool(replay.why_unknown(recovers_us / baseline_us)),
        )
        for causes, what, recovers_us, apply, directives in (
            *_by_controls(tuning, baseline_us, commands),
            *_by_changes(job, tuning.plan),
        )
    ]
    return tuple(sorted(found, key=lambda each: -each.recovers_us))


def without_waits(step: Step, analysis: Analysis, source: str) -> Step:
    """Return the step without waits that other ranks' traces show: no control shortens the wait for a rank that comes later.

    The step is of the rank that was read from `source`; its collectives are found again by kind and traced time.
    """
    rank = next((each for each in analysis.ranks if each.path == source), None)
    if rank is None:
        return step
    waited = {
        (skew.process_group, number): dict(skew.waits_us)[rank.rank]
        for skew in analysis.skews
        if (number := dict(skew.group_numbers).get(rank.rank)) is not None
    }
    wait_us = {
        (each.collective, round(each.end_us - each.start_us, 2)): waited.get((each.process_group, each.group_number), 0.0)
        for each in rank.collectives
    }

    def of_all_ranks(operation: Operation) -> Operation:
        if not isinstance(operation, Collective) or operation.lone_us is None:
            return operation
        traced_us = operation.lone_us + operation.peer_wait_us
        transfer_us = traced_us - wait_us.get((operation.collective, round(traced_us, 2)), 0.0)
        lone_us = min(operation.lone_us, max(0.0, transfer_us))
        return replace(operation, lone_us=lone_us, peer_wait_us=traced_us - lone_us)

    return replace(step, operations=tuple(map(of_all_ranks, step.operations)))


def _by_controls(tuning: Tuning, baseline_us: float, commands: tuple[str, ...]) -> Iterator[Entry]:
    """Yield the best trial of each control alone, and the plan, if it holds several controls.

    The commands apply the whole plan, so only the entry of the plan has them.
    """
    best: dict[str, Trial] = {}
    for trial in tuning.trials:
        if len(trial.families) != 1 or trial.makespan_us > (1 - LEAST_SIMULATED_GAIN) * baseline_us:
            continue
        held = best.get(trial.families[0])
        if held is None or trial.makespan_us < held.makespan_us:
            best[trial.families[0]] = trial
    planned = next(trial for trial in tuning.trials if trial.directives == tuning.plan.directives)
    if len(planned.families) == 1:
        best[planned.families[0]] = planned
    for family, trial in best.items():
        apply = (*(commands if trial is planned else ()), *dict.fromkeys(_lines_of(trial)))
        yield ACTS_ON.get(family, ()), trial.label, baseline_us - trial.makespan_us, apply, trial.directives
    if len(planned.families) > 1:
        causes = tuple(dict.fromkeys(cause for family in planned.families for cause in ACTS_ON.get(family, ())))
        yield causes, planned.label, baseline_us - planned.makespan_us, commands, planned.directives


def _saved_us(job: Job, lone_us: list[float], directives: tuple[Directive, ...]) -> float:
    """Return the time of the kernels that these directives make unnecessary; `lone_us` are all operations' times alone."""
    if not directives:
        return 0.0
    planned_us = Simulator().lone_times_us(job.step, job.machine, Plan(directives=directives))
    return sum(before_us for before_us, after_us in zip(lone_us, planned_us, strict=True) if not after_us)


def _lines_of(trial: Trial) -> Iterable[str]:
    """Yield the lines that a user can write in the job for the controls of a trial."""
    for directive in trial.directives:
        for control in directive.controls:
            for way in control.ways(directive.match.collective):
                yield f"# {way.where}"
                yield from way.lines


def _by_changes(job: Job, plan: Plan) -> Iterator[Entry]:
    """Yield the gain of changes to the job itself, other than those that the plan's operators make."""
    for change in find_job_changes(job.step, job.machine, Simulator(), plan).helpful:
        yield OF_CHANGES, change.change, change.baseline_us - change.changed_us, (), ()
