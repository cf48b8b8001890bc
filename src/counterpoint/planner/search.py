"""The search: try each control alone, then add to the best what still helps, then drop what the plan does not need.

It knows nothing of how a candidate is executed; it compares timelines that an executor returns. A plan must gain at
least `LEAST_SIMULATED_GAIN` of the baseline's makespan; otherwise the verdict is NO_GAIN and the plan is empty. Each
further control must add `LEAST_ADDED_GAIN`. For a traced step, a gain must also exceed the replay's error; otherwise the
verdict is UNKNOWN and the plan is empty.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec

from counterpoint.controls import Applier
from counterpoint.display import html_table, shortened
from counterpoint.errors import PlanError
from counterpoint.machine import Machine
from counterpoint.measurement.values import LEAST_ADDED_GAIN, LEAST_SIMULATED_GAIN, NEGLIGIBLE
from counterpoint.metrics import measure
from counterpoint.plan import Directive, Expectation, Plan, Refusal
from counterpoint.planner.candidates import propose
from counterpoint.planner.contention import find_contention
from counterpoint.planner.durable import DurableMatches
from counterpoint.planner.proposal import Candidate, Proposal, proposal
from counterpoint.sim.replay import compare_replay
from counterpoint.step import Step
from counterpoint.timeline import AbstractExecutor, Timeline
from counterpoint.units import format_change, format_count, format_percent, format_us
from counterpoint.value import Value

if TYPE_CHECKING:
    from concurrent.futures import Executor

AS_IT_IS = "as it is"
LEAST_SHARED_S = 0.2
"""Candidates go to worker processes if the first run of the step takes this long. Starting workers takes a tenth of a
second, and later runs are shorter, because they know how long much of the work takes."""
MOST_WORKERS = 16  # there are hardly more candidates to try at once


class Trial(Value, frozen=True, kw_only=True):
    """One executed candidate. `families` are the controls in it."""

    label: str
    families: tuple[str, ...]
    directives: tuple[Directive, ...]
    makespan_us: float
    exposed_us: float


class Tuning(Value, frozen=True, kw_only=True):
    """The result of a search: the plan, the timelines without and with it, and every trial in the order it was made.

    Directives describe operations; they name none by number.
    """

    plan: Plan
    baseline: Timeline
    planned: Timeline
    trials: tuple[Trial, ...]

    def _in_short(self) -> str:
        return f"{self.plan.verdict}: {shortened(self.plan.summary)}; {format_count(len(self.trials), 'trial')}"

    def _repr_html_(self) -> str:
        """Return what notebooks show of the result: the verdict, and the candidates, the shortest first."""
        baseline = self.trials[0]
        rows = [
            (
                trial.label,
                format_us(trial.makespan_us),
                format_change(trial.makespan_us / baseline.makespan_us - 1),
                format_us(trial.exposed_us),
            )
            for trial in [baseline, *sorted(self.trials[1:], key=lambda trial: trial.makespan_us)]
        ]
        headers = ("candidate (simulated)", "makespan", "change", "exposed")
        return html_table(f"{self.plan.verdict}: {self.plan.summary}", headers, rows)


class _Bench:
    """Executes each candidate of one step on one machine once, and caches the result."""

    def __init__(
        self,
        step: Step,
        machine: Machine,
        executor: AbstractExecutor,
        on_trial: Callable[[Trial], None] | None,
        applier: Applier,
    ) -> None:
        self._step = step
        self._machine = machine
        self._executor = executor
        self._on_trial = on_trial
        self._applier = applier
        self._workers: Executor | None = None
        self._timelines: dict[tuple[Directive, ...], Timeline] = {}
        self._known: dict[tuple[Directive, ...], Trial] = {}

    def run(self, parts: Sequence[Candidate]) -> Timeline:
        directives = _directives(parts)
        if directives not in self._timelines:
            self._timelines[directives] = self._executor.run(self._step, self._machine, Plan(directives=directives))
        return self._timelines[directives]

    @contextmanager
    def with_workers(self, number: int) -> Iterator[None]:
        """Let worker processes execute candidates within the block, if the step takes long enough."""
        begin_s = time.perf_counter()
        self.run(())
        if number < 2 or time.perf_counter() - begin_s < LEAST_SHARED_S:
            yield
            return
        from counterpoint.workers import worker_processes  # noqa: PLC0415  only long steps need it

        shared = self._step, self._machine, self._executor
        with ExitStack() as opened:
            with suppress(OSError, NotImplementedError):  # a system without semaphores has no workers
                pool = worker_processes(
                    min(number, MOST_WORKERS), PlanError, "use fewer cores (taskset -c 0-3 ...)", _hold, *shared
                )
                self._workers = opened.enter_context(pool)
            yield
        self._workers = None

    def attempt(self, parts: Sequence[Candidate]) -> Trial:
        return self.attempt_all([parts])[0]

    def attempt_all(self, plans: Sequence[Sequence[Candidate]]) -> list[Trial]:
        """Return a trial for each plan, in order."""
        new = {_directives(parts): parts for parts in plans if _directives(parts) not in self._known}
        if self._workers is not None and len(new) > 1:
            found: Iterator[Trial] = self._workers.map(_attempt_held, new.values())
        else:
            found = (_trial_of(parts, self.run(parts)) for parts in new.values())
        for directives, trial in zip(new, found, strict=True):
            self._known[directives] = trial
            if self._on_trial is not None:
                self._on_trial(trial)
        return [self._known[_directives(parts)] for parts in plans]

    def propose(self, parts: Sequence[Candidate]) -> Proposal:
        """Return what could act on the step as it runs with `parts`."""
        plan = Plan(directives=_directives(parts))
        found = propose(self._step, self._machine, find_contention(self._step, self.run(parts), plan), plan, self._applier)
        able = (each for each in found.candidates if not self._is_refused(each))
        return proposal(able, found.refusals)

    def _is_refused(self, candidate: Candidate) -> bool:
        controls = (control for directive in candidate.directives for control in directive.controls)
        return any(self._applier in control.refused_by for control in controls)

    def trials(self) -> tuple[Trial, ...]:
        """Return all trials in the order they were made."""
        return tuple(self._known.values())


def _trial_of(parts: Sequence[Candidate], timeline: Timeline) -> Trial:
    metrics = measure(timeline)
    return Trial(
        label=" + ".join(part.label for part in parts) or AS_IT_IS,
        families=tuple(part.family for part in parts),
        directives=_directives(parts),
        makespan_us=metrics.makespan_us,
        exposed_us=metrics.exposed_us,
    )


def attempt(step: Step, machine: Machine, executor: AbstractExecutor, *parts: Candidate) -> Trial:
    """Execute one candidate, or several together."""
    return _trial_of(parts, executor.run(step, machine, Plan(directives=_directives(parts))))


_HELD: list[tuple[Step, Machine, AbstractExecutor]] = []  # of a worker process


def _hold(*shared: object) -> None:
    """Keep what a worker process executes candidates with."""
    _HELD[:] = [shared]  # type: ignore[list-item]


def _attempt_held(parts: Sequence[Candidate]) -> Trial:
    return attempt(*_HELD[0], *parts)


def _directives(parts: Sequence[Candidate]) -> tuple[Directive, ...]:
    return tuple(directive for part in parts for directive in part.directives)


def tune(
    step: Step,
    machine: Machine,
    executor: AbstractExecutor,
    on_trial: Callable[[Trial], None] | None = None,
    applier: Applier = "step",
    *,
    traced: Timeline | None = None,
    num_workers: int = 1,
) -> Tuning:
    """Find the plan with the shortest makespan, using only controls that `applier` can apply.

    `on_trial` is called after each new trial, the baseline first. `traced` is the measured step, against which the
    executor is checked. `num_workers` processes execute candidates at once if a candidate takes long.
    """
    bench = _Bench(step, machine, executor, on_trial, applier)
    with bench.with_workers(num_workers):
        without = bench.attempt(())
        proposed = bench.propose(())
        parts = _shrink(bench, _grow(bench, without), proposed.candidates)
        best = bench.attempt(parts)
    baseline = bench.run(())
    trials, durable = bench.trials(), DurableMatches(step)
    unknown = "" if traced is None else compare_replay(traced, baseline).why_unknown(_gain(without, best))
    is_gain = best.makespan_us <= (1 - LEAST_SIMULATED_GAIN) * without.makespan_us and not unknown
    chosen = best if is_gain else without
    plan = Plan(
        step_name=step.name,
        step_fingerprint=step.fingerprint(),
        machine=machine.name,
        verdict="GAIN" if is_gain else "UNKNOWN" if unknown else "NO_GAIN",
        summary=_unknown(trials, unknown) if unknown else _summary(trials, chosen),
        expectation=Expectation(origin=baseline.origin, baseline_us=without.makespan_us, planned_us=chosen.makespan_us),
        directives=durable.directives(chosen.directives),
        refusals=_refusals(proposed, trials, chosen),
    )
    told = tuple(msgspec.structs.replace(trial, directives=durable.directives(trial.directives)) for trial in trials)
    return Tuning(plan=plan, baseline=baseline, planned=bench.run(parts if is_gain else ()), trials=told)


def _gain(without: Trial, best: Trial) -> float:
    """Return a plan's gain as a share of the makespan; 0 if it is below the least gain that simulations can tell."""
    gain = 1 - best.makespan_us / without.makespan_us
    return gain if gain >= LEAST_SIMULATED_GAIN else 0.0


def _unknown(trials: Sequence[Trial], reason: str) -> str:
    best = min(trials, key=lambda trial: trial.makespan_us)
    change = 1 - best.makespan_us / trials[0].makespan_us
    said = f"{reason}; " + (f"measure the best candidate ({best.label})" if change > NEGLIGIBLE else "leave it as it is")
    return said if change <= NEGLIGIBLE else f"{said}; in the replay it saves {format_percent(change)}"


def _grow(bench: _Bench, without: Trial) -> list[Candidate]:
    """Add the control that shortens the step most, look again at the step as it then runs, and repeat; one control of
    each family.
    """
    parts: list[Candidate] = []
    best = without
    while True:
        taken = {part.family for part in parts}
        candidates = [candidate for candidate in bench.propose(parts).candidates if candidate.family not in taken]
        found = bench.attempt_all([[*parts, candidate] for candidate in candidates])
        trials = list(zip(found, candidates, strict=True))
        if not trials:
            return parts
        trial, candidate = min(trials, key=lambda entry: (entry[0].makespan_us, entry[0].exposed_us))
        if trial.makespan_us > best.makespan_us * (1 - LEAST_ADDED_GAIN):
            return parts
        best = trial
        parts.append(candidate)


def _shrink(bench: _Bench, parts: list[Candidate], proposed: Sequence[Candidate]) -> list[Candidate]:
    """Drop every candidate, and every directive of the others, that does not make the step noticeably faster, so that the
    plan holds only what it needs.

    If one of the `proposed` candidates has just the remaining directives, its label is used.
    """
    best = bench.attempt(parts)
    for part in list(parts):
        others = [other for other in parts if other is not part]
        if others and bench.attempt(others).makespan_us <= best.makespan_us * (1 + NEGLIGIBLE):
            parts = others
    for position, part in enumerate(parts):
        for directive in part.directives if len(part.directives) > 1 else ():
            kept = tuple(other for other in parts[position].directives if other is not directive)
            same = (candidate for candidate in proposed if candidate.directives == kept)
            fewer = next(same, msgspec.structs.replace(part, directives=kept))
            shorter = [*parts[:position], fewer, *parts[position + 1 :]]
            if kept and bench.attempt(shorter).makespan_us <= best.makespan_us * (1 + NEGLIGIBLE):
                parts = shorter
    return parts


def _summary(trials: Sequence[Trial], chosen: Trial) -> str:
    without, best = trials[0], min(trials, key=lambda trial: trial.makespan_us)
    if chosen.directives:
        times = f"{format_us(without.makespan_us)} to {format_us(chosen.makespan_us)}"
        return f"{chosen.label}: {times}, {format_percent(1 - chosen.makespan_us / without.makespan_us)} less"
    change = 1 - best.makespan_us / without.makespan_us
    if change <= NEGLIGIBLE:
        return "no control shortens this step; leave it as it is"
    return (
        f"the best candidate ({best.label}) saves {100 * change:z.2f} %, below the "
        f"{format_percent(LEAST_SIMULATED_GAIN)} that a simulation can tell from its own error; leave it as it "
        "is"
    )


def _refusals(proposed: Proposal, trials: Sequence[Trial], chosen: Trial) -> tuple[Refusal, ...]:
    """Return what could not act, and each family that was tried and is not in the plan, with its best candidate's
    figure.
    """
    refusals = [refusal for refusal in proposed.refusals if refusal.control not in chosen.families]
    for family in dict.fromkeys(candidate.family for candidate in proposed.candidates):
        alone = [trial for trial in trials if trial.families == (family,)]
        if family in chosen.families or not alone:
            continue
        best = min(alone, key=lambda trial: trial.makespan_us)
        change = best.makespan_us / trials[0].makespan_us - 1
        which = f" ({best.label})" if len({trial.label for trial in alone}) > 1 else ""
        reason = f"{_effect(change)} when used alone{which}"
        if chosen.directives and change < -NEGLIGIBLE:
            reason = f"{reason}, but adds less than {format_percent(LEAST_ADDED_GAIN)} to the plan"
        refusals.append(Refusal(control=family, target=_target(best.directives), reason=reason))
    return tuple(refusals)


def _effect(change: float) -> str:
    """Return the change of the makespan in words."""
    if abs(change) <= NEGLIGIBLE:
        return "no effect"
    return f"{format_percent(abs(change))} {'slower' if change > 0 else 'faster'}"


def _target(directives: Sequence[Directive]) -> str:
    """Return how many collectives or kernels the directives are for."""
    number = sum(len(directive.match.operations) if directive.match.operations else 1 for directive in directives)
    noun = "collective" if directives[0].match.kind == "communication" else "kernel"
    return format_count(number, noun)
