"""Chooses operators' copy schedules from measured times: which to measure, which to keep, and the resulting plan.

The estimate prunes and makes its own pick. A schedule is kept only if it is proven faster than `sequential`, the
library's collective followed by the matmul (`measurement.tournament`). This module knows nothing of tensors or GPUs;
`operators_on_gpu.py` measures.
"""

from collections.abc import Sequence

from counterpoint.controls import ScheduleChoice
from counterpoint.machine import Machine
from counterpoint.measurement.values import Comparison, Measurement
from counterpoint.plan import Directive, Expectation, Match, Plan
from counterpoint.schedule import SEQUENTIAL, Problem, ScheduleDescription
from counterpoint.schedule.actions import Pass
from counterpoint.schedule.heuristic import pick_schedule, rank_candidates
from counterpoint.units import format_count, format_percent, format_us
from counterpoint.value import Value

NUM_CANDIDATES = 4  # besides sequential: the best by the estimate, which seldom misses by more than that


class TunedOperator(Value, frozen=True, kw_only=True):
    """One call and the times of its schedules. `descriptions` go with the measurements of `comparison`, `sequential`
    first; `estimated` is the index of the heuristic's pick. `ideal_us` is estimated.
    """

    name: str
    descriptions: tuple[ScheduleDescription, ...]
    comparison: Comparison
    estimated: int
    ideal_us: float

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """The times of the schedules, `sequential` first."""
        return self.comparison.measurements

    @property
    def chosen(self) -> int:
        """The index of the schedule that is kept."""
        return self.comparison.chosen

    @property
    def sequential_us(self) -> float:
        """Time of the call with the collective and the matmul one after the other."""
        return self.measurements[0].median_us

    @property
    def chosen_us(self) -> float:
        """Time of the call with the schedule that is kept."""
        return self.measurements[self.chosen].median_us

    def reason(self) -> str:
        """Return why this schedule was chosen, in words for the plan."""
        if not self.chosen:
            return f"measured: sequential takes {format_us(self.sequential_us)}; {self._no_gain()}"
        chosen = self.measurements[self.chosen]
        taken = f"{chosen.label} takes {format_us(self.chosen_us)} against {format_us(self.sequential_us)} sequential"
        return f"measured: {taken}{self._as_estimated()} (spread {format_percent(chosen.spread)})"

    def _as_estimated(self) -> str:
        if self.estimated == self.chosen:
            return ", also the estimate's pick"
        if not self.estimated:
            return ", the estimate's pick"
        estimated = self.measurements[self.estimated]
        return f" and {format_us(estimated.median_us)} as estimated ({estimated.label})"

    def _no_gain(self) -> str:
        others = self.measurements[1:]
        if not others:
            return "no other schedule was measured"
        verdict = self.comparison.verdict
        best = self.measurements[verdict.best] if verdict.best else min(others, key=lambda row: row.ratio)
        taken = f"the fastest schedule ({best.label}) takes {format_us(best.median_us)}"
        if not verdict.best:
            return taken
        return f"{taken}, {format_percent(verdict.gain)} less; at least {format_percent(verdict.needed_gain)} must be proven"


class OperatorTuning(Value, frozen=True, kw_only=True):
    """The plan, and what was measured for each call."""

    plan: Plan
    operators: tuple[TunedOperator, ...]


def descriptions_to_measure(problem: Problem, machine: Machine, direction: Pass) -> tuple[ScheduleDescription, ...]:
    """Return `sequential`, the heuristic's pick, and the best few by the estimate; each once."""
    picked = pick_schedule(problem, machine, direction).description
    ranked = [candidate.description for candidate in rank_candidates(problem, machine, direction)]
    return tuple(dict.fromkeys((SEQUENTIAL, picked, *ranked[:NUM_CANDIDATES])))


def plan_of(operators: Sequence[TunedOperator], machine: str) -> OperatorTuning:
    """Build the plan that names the chosen schedule of each call, `sequential` included."""
    directives = tuple(
        Directive(
            match=Match(name=tuned.name),
            controls=(ScheduleChoice(schedule=tuned.descriptions[tuned.chosen]),),
            reason=tuned.reason(),
        )
        for tuned in operators
    )
    baseline_us = sum(tuned.sequential_us for tuned in operators)
    planned_us = sum(tuned.chosen_us for tuned in operators)
    plan = Plan(
        step_name=format_count(len(operators), "operator call"),
        machine=machine,
        verdict="GAIN" if any(tuned.chosen for tuned in operators) else "NO_GAIN",
        summary=_summary(operators, baseline_us, planned_us),
        expectation=Expectation(origin="measured", baseline_us=baseline_us, planned_us=planned_us),
        directives=directives,
    )
    return OperatorTuning(plan=plan, operators=tuple(operators))


def _summary(operators: Sequence[TunedOperator], baseline_us: float, planned_us: float) -> str:
    num_gains = sum(tuned.chosen > 0 for tuned in operators)
    if not num_gains:
        return "no schedule is proven faster than sequential; leave the calls to the library"
    estimated_us = sum(tuned.measurements[tuned.estimated].median_us for tuned in operators)
    return (
        f"{num_gains} of {format_count(len(operators), 'call')} by copy schedules: {format_us(baseline_us)} "
        f"sequential to {format_us(planned_us)} in total, {format_percent(1 - planned_us / baseline_us)} less; "
        f"{format_us(estimated_us)} with the estimate's picks"
    )
