"""The choice of operators' copy schedules from measured times: which are worth measuring, which is kept, and the plan of it.

The estimate prunes and names its own pick; a schedule is kept only if it beats `sequential`, the library's collective
and then the matmul, beyond the spread and by `LEAST_MEASURED_GAIN`. Knows nothing of tensors or GPUs; the measuring is in
`operators_on_gpu.py`.
"""

from collections.abc import Sequence

from counterpoint.cuda.timing import Measurement, fastest, finalists
from counterpoint.machine import Machine
from counterpoint.plan import Directive, Expectation, Match, Plan, ScheduleChoice
from counterpoint.schedule import SEQUENTIAL, Problem, ScheduleDescription
from counterpoint.schedule.actions import Pass
from counterpoint.schedule.heuristic import pick_schedule, rank_candidates
from counterpoint.units import format_count, format_percent, format_us
from counterpoint.value import Value

NUM_CANDIDATES = 4  # beside sequential: the best by the estimate, which seldom misses by more than that
LEAST_MEASURED_GAIN = 0.005  # less is not worth a plan, as for steps under `run --tune`


class TunedOperator(Value, frozen=True, kw_only=True):
    """One call and what its schedules took. `descriptions` and `measurements` go together, `sequential` first;
    `estimated` and `chosen` are places in them: the heuristic's pick, and what is kept. `ideal_us` is estimated."""

    name: str
    descriptions: tuple[ScheduleDescription, ...]
    measurements: tuple[Measurement, ...]
    estimated: int
    chosen: int
    ideal_us: float

    @property
    def sequential_us(self) -> float:
        """What the call takes one after the other."""
        return self.measurements[0].median_us

    @property
    def chosen_us(self) -> float:
        """What the call takes by the schedule that is kept."""
        return self.measurements[self.chosen].median_us

    @property
    def fastest(self) -> int:
        """The schedule with the best ratio to sequential, of those that were in the final; 0 where there is no other."""
        return min(finalists(self.measurements)[1:], key=lambda number: self.measurements[number].ratio, default=0)

    def reason(self) -> str:
        """Why this schedule, in words for the plan."""
        if not self.chosen:
            return f"measured: sequential takes {format_us(self.sequential_us)}; {self._no_gain()}"
        chosen = self.measurements[self.chosen]
        taken = f"{chosen.label} takes {format_us(self.chosen_us)} against {format_us(self.sequential_us)} sequential"
        return f"measured: {taken}{self._as_estimated()} (spread {format_percent(chosen.spread)})"

    def _as_estimated(self) -> str:
        if self.estimated == self.chosen:
            return ", the estimate's pick, too"
        if not self.estimated:
            return ", the estimate's pick"
        estimated = self.measurements[self.estimated]
        return f" and {format_us(estimated.median_us)} as estimated ({estimated.label})"

    def _no_gain(self) -> str:
        if not self.fastest:
            return "no schedule was measured beside it"
        best = self.measurements[self.fastest]
        taken = f"the fastest schedule ({best.label}) takes {format_us(best.median_us)}"
        if best.ratio >= 1:
            return taken
        least = max(best.spread, LEAST_MEASURED_GAIN)
        return f"{taken}, {format_percent(1 - best.ratio)} less, which is within {format_percent(least)}"


class OperatorTuning(Value, frozen=True, kw_only=True):
    """The plan, and what was measured for each call."""

    plan: Plan
    operators: tuple[TunedOperator, ...]


def descriptions_to_measure(problem: Problem, machine: Machine, direction: Pass) -> tuple[ScheduleDescription, ...]:
    """`sequential`, the heuristic's pick, and the best few by the estimate; each once."""
    picked = pick_schedule(problem, machine, direction).description
    ranked = [candidate.description for candidate in rank_candidates(problem, machine, direction)]
    return tuple(dict.fromkeys((SEQUENTIAL, picked, *ranked[:NUM_CANDIDATES])))


def choose(measurements: Sequence[Measurement]) -> int:
    """The fastest that beats the first, `sequential`, beyond its spread and the least gain; 0, the first, if none does."""
    return fastest(measurements, LEAST_MEASURED_GAIN)


def plan_of(operators: Sequence[TunedOperator], machine: str) -> OperatorTuning:
    """The plan that names what was chosen for each call, `sequential` too."""
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
        return "no schedule beats sequential beyond the spread; leave the calls to the library"
    estimated_us = sum(tuned.measurements[tuned.estimated].median_us for tuned in operators)
    return (
        f"{num_gains} of {format_count(len(operators), 'call')} by copy schedules: {format_us(baseline_us)} sequential to "
        f"{format_us(planned_us)} in all, {format_percent(1 - planned_us / baseline_us)} less; "
        f"{format_us(estimated_us)} by the estimate's picks"
    )
