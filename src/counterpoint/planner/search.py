"""The search: try each control alone, then add to the best what still helps, then drop what the plan does not need.

It knows nothing of how a candidate is executed; it compares timelines that an executor returns. A plan must gain at least
`MIN_GAIN` of the baseline's makespan, else the verdict is NO_GAIN and the plan is empty.
"""

from collections.abc import Callable, Sequence

import msgspec

from counterpoint.executor import AbstractExecutor
from counterpoint.machine import Machine
from counterpoint.metrics import measure
from counterpoint.plan import Directive, Expectation, Plan, Refusal
from counterpoint.planner.candidates import Candidate, propose
from counterpoint.planner.contention import find_contention
from counterpoint.step import Step
from counterpoint.timeline import Timeline
from counterpoint.units import format_percent, format_us
from counterpoint.value import Value

MIN_GAIN = 0.01
NEGLIGIBLE = 0.0005


class Trial(Value, frozen=True, kw_only=True):
    """One candidate as executed. `families` are the controls in it."""

    label: str
    families: tuple[str, ...]
    directives: tuple[Directive, ...]
    makespan_us: float
    exposed_us: float


class Tuning(Value, frozen=True, kw_only=True):
    """The outcome: the plan, the timelines without and with it, and every trial in the order it was made."""

    plan: Plan
    baseline: Timeline
    planned: Timeline
    trials: tuple[Trial, ...]


class _Bench:
    """Executes candidates of one step on one machine and remembers each outcome."""

    def __init__(
        self, step: Step, machine: Machine, executor: AbstractExecutor, on_trial: Callable[[Trial], None] | None
    ) -> None:
        self._step = step
        self._machine = machine
        self._executor = executor
        self._on_trial = on_trial
        self._known: dict[tuple[Directive, ...], Trial] = {}
        self.trials: list[Trial] = []

    def run(self, directives: tuple[Directive, ...]) -> Timeline:
        return self._executor.run(self._step, self._machine, Plan(directives=directives))

    def attempt(self, parts: Sequence[Candidate]) -> Trial:
        directives = tuple(directive for part in parts for directive in part.directives)
        if directives in self._known:
            return self._known[directives]
        metrics = measure(self.run(directives))
        trial = Trial(
            label=" + ".join(part.label for part in parts) or "as it is",
            families=tuple(part.family for part in parts),
            directives=directives,
            makespan_us=metrics.makespan_us,
            exposed_us=metrics.exposed_us,
        )
        self._known[directives] = trial
        self.trials.append(trial)
        if self._on_trial is not None:
            self._on_trial(trial)
        return trial


def tune(
    step: Step, machine: Machine, executor: AbstractExecutor, on_trial: Callable[[Trial], None] | None = None
) -> Tuning:
    """Find the plan with the shortest makespan. `on_trial` is called after each trial, the baseline first."""
    bench = _Bench(step, machine, executor, on_trial)
    baseline = bench.run(())
    proposal = propose(step, machine, find_contention(step, baseline))
    without = bench.attempt(())
    best_parts = _grow(bench, without, proposal.candidates)
    best_parts = _shrink(bench, best_parts)
    best = bench.attempt(best_parts)
    is_gain = best.makespan_us <= (1 - MIN_GAIN) * without.makespan_us
    chosen = best if is_gain else without
    plan = Plan(
        step_name=step.name,
        step_fingerprint=step.fingerprint(),
        machine=machine.name,
        verdict="GAIN" if is_gain else "NO_GAIN",
        summary=_summary(without, best, is_gain),
        expectation=Expectation(origin="simulated", baseline_us=without.makespan_us, planned_us=chosen.makespan_us),
        directives=chosen.directives,
        refusals=(*proposal.refusals, *_left_out(bench.trials, without, chosen, proposal.candidates)),
    )
    planned = bench.run(chosen.directives)
    return Tuning(plan=plan, baseline=baseline, planned=planned, trials=tuple(bench.trials))


def _grow(bench: _Bench, without: Trial, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Add one control at a time, always the one that shortens the step most; at most one candidate per family."""
    parts: list[Candidate] = []
    best = without
    while True:
        taken = {part.family for part in parts}
        trials = [
            (bench.attempt([*parts, candidate]), candidate) for candidate in candidates if candidate.family not in taken
        ]
        trials += [
            (bench.attempt([candidate if part.family == candidate.family else part for part in parts]), candidate)
            for candidate in candidates
            if candidate.family in taken and len(parts) > 1
        ]
        if not trials:
            return parts
        trial, candidate = min(trials, key=lambda entry: (entry[0].makespan_us, entry[0].exposed_us))
        if trial.makespan_us >= best.makespan_us * (1 - NEGLIGIBLE):
            return parts
        best = trial
        parts = [part for part in parts if part.family != candidate.family] + [candidate]


def _shrink(bench: _Bench, parts: list[Candidate]) -> list[Candidate]:
    """Drop every directive without which the step is not noticeably slower, so that the plan holds only what it needs."""
    best = bench.attempt(parts)
    for position, part in enumerate(parts):
        for directive in part.directives:
            if len(part.directives) == 1:
                continue
            kept = tuple(other for other in parts[position].directives if other is not directive)
            fewer = msgspec.structs.replace(parts[position], directives=kept)
            trial = bench.attempt([*parts[:position], fewer, *parts[position + 1 :]])
            if kept and trial.makespan_us <= best.makespan_us * (1 + NEGLIGIBLE):
                parts = [*parts[:position], fewer, *parts[position + 1 :]]
    return parts


def _summary(without: Trial, best: Trial, is_gain: bool) -> str:
    change = 1 - best.makespan_us / without.makespan_us
    if is_gain:
        times = f"{format_us(without.makespan_us)} to {format_us(best.makespan_us)}"
        return f"{best.label}: {times}, {format_percent(change)} less"
    if not best.directives:
        return "no control shortens this step; leave it as it is"
    return (
        f"the best control ({best.label}) would save {format_percent(change)}, less than the {format_percent(MIN_GAIN)} "
        "that a simulation can be trusted with; leave it as it is"
    )


def _left_out(trials: Sequence[Trial], without: Trial, chosen: Trial, candidates: Sequence[Candidate]) -> list[Refusal]:
    """A refusal for each family that was tried and is not in the plan, with the figure of its best member."""
    refusals = []
    for family in dict.fromkeys(candidate.family for candidate in candidates):
        alone = [trial for trial in trials if trial.families == (family,)]
        if family in chosen.families or not alone:
            continue
        best = min(alone, key=lambda trial: trial.makespan_us)
        change = best.makespan_us / without.makespan_us - 1
        verb = "lengthens" if change > NEGLIGIBLE else "shortens" if change < -NEGLIGIBLE else "does not change"
        by = f" by {format_percent(abs(change))}" if abs(change) > NEGLIGIBLE else ""
        beside = " and adds nothing to the plan" if chosen.directives else ""
        refusals.append(Refusal(control=family, target=best.label, reason=f"alone it {verb} the step{by}{beside}"))
    return refusals
