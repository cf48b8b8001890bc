"""The choice by measurement: the simulator prunes, the best few candidates are measured interleaved with the baseline.

A plan is kept only if its gain exceeds the spread; otherwise the step stays as it was. All ranks measure the same
candidates, rank 0's, and each candidate's time is that of the slowest rank, so all come to the same choice.
"""

from typing import Protocol

import msgspec

from counterpoint.cuda.graph import AbstractExecutable, AbstractGraph
from counterpoint.cuda.reading import ReadGraph
from counterpoint.cuda.rewriting import rewrite
from counterpoint.cuda.timing import Measurement, measure_interleaved
from counterpoint.engagement import Engagement
from counterpoint.machine import Machine
from counterpoint.plan import Directive, Expectation, Plan, Refusal
from counterpoint.planner.search import Trial, Tuning, tune
from counterpoint.sim import Simulator
from counterpoint.units import format_percent, format_us
from counterpoint.value import Value

AS_IT_IS = "as it is"


class Replayable(Protocol):
    """A captured step that can be timed on all ranks: `cuda.capture.Captured`, or a double."""

    @property
    def graph(self) -> AbstractGraph:
        """The captured graph, never edited itself."""

    @property
    def read(self) -> ReadGraph:
        """The step it is."""

    def time_us(self, executable: AbstractExecutable) -> float:
        """One replay's time on the slowest rank."""

    def agree(self, text: str) -> str:
        """Rank 0's text on every rank."""


class Contender(Value, frozen=True, kw_only=True):
    """One candidate that is worth measuring."""

    label: str
    directives: tuple[Directive, ...]


class MeasuredTuning(Value, frozen=True, kw_only=True):
    """The plan, what was measured, and what became of each control of the plan."""

    plan: Plan
    measurements: tuple[Measurement, ...]
    engagements: tuple[Engagement, ...]
    simulated: Tuning


def tune_measured(captured: Replayable, machine: Machine, num_candidates: int = 5, num_rounds: int = 15) -> MeasuredTuning:
    """Find the best plan for a captured step on the GPUs at hand."""
    step = captured.read.step
    simulated = tune(step, machine, Simulator())
    contenders = _agree(captured, _contenders(captured, simulated, num_candidates))
    plans = [Plan(directives=contender.directives) for contender in contenders]
    rewritten = [rewrite(captured.graph, captured.read, plan) for plan in plans]
    executables = [each.graph.instantiate() for each in rewritten]
    measurements = measure_interleaved(
        [contender.label for contender in contenders],
        lambda candidate: captured.time_us(executables[candidate]),
        num_rounds,
    )
    for executable in executables:
        executable.close()
    best = min(range(len(contenders)), key=lambda candidate: measurements[candidate].ratio)
    is_gain = measurements[best].is_faster()
    chosen = best if is_gain else 0
    plan = Plan(
        step_name=step.name,
        step_fingerprint=step.fingerprint(),
        machine=machine.name,
        verdict="GAIN" if is_gain else "NO_GAIN",
        summary=_summary(measurements, best, is_gain),
        expectation=Expectation(
            origin="measured", baseline_us=measurements[0].median_us, planned_us=measurements[chosen].median_us
        ),
        directives=contenders[chosen].directives,
        refusals=(*simulated.plan.refusals, *_not_engaged(rewritten[chosen].engagements)),
    )
    return MeasuredTuning(
        plan=plan, measurements=measurements, engagements=rewritten[chosen].engagements, simulated=simulated
    )


def _contenders(captured: Replayable, simulated: Tuning, num_candidates: int) -> list[Contender]:
    """As it is, then the best simulated candidate of each combination of controls, if all of them can be applied here.

    One of each combination, because what the simulator cannot tell apart is often apart on a GPU.
    """
    best: dict[tuple[str, ...], Trial] = {}
    for trial in sorted(simulated.trials[1:], key=lambda entry: (entry.makespan_us, len(entry.families))):
        families = tuple(sorted(trial.families))
        if families not in best and _is_applicable(captured, trial):
            best[families] = trial
    chosen = list(best.values())[:num_candidates]
    return [
        Contender(label=AS_IT_IS, directives=()),
        *(Contender(label=trial.label, directives=trial.directives) for trial in chosen),
    ]


def _is_applicable(captured: Replayable, trial: Trial) -> bool:
    engagements = rewrite(captured.graph, captured.read, Plan(directives=trial.directives)).engagements
    return all(engagement.state == "verified" for engagement in engagements)


def _agree(captured: Replayable, contenders: list[Contender]) -> list[Contender]:
    text = captured.agree(msgspec.json.encode(contenders).decode())
    return msgspec.json.decode(text, type=list[Contender])


def _summary(measurements: tuple[Measurement, ...], best: int, is_gain: bool) -> str:
    without, with_plan = measurements[0], measurements[best]
    times = f"{format_us(without.median_us)} to {format_us(with_plan.median_us)}"
    change = format_percent(1 - with_plan.ratio)
    if is_gain:
        return f"{with_plan.label}: {times}, {change} less, spread {format_percent(with_plan.spread)}"
    if best == 0:
        return "no candidate was faster; leave it as it is"
    return (
        f"the best candidate ({with_plan.label}) was {change} faster, within the spread of "
        f"{format_percent(with_plan.spread)}; leave it as it is"
    )


def _not_engaged(engagements: tuple[Engagement, ...]) -> tuple[Refusal, ...]:
    return tuple(
        Refusal(control=engagement.control, target=engagement.target, reason=engagement.reason)
        for engagement in engagements
        if engagement.state != "verified"
    )
