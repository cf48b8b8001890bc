"""What rank 0 decides from what all ranks saw: candidates, finalists, the plan, and whether a plan in force still pays.

Pure functions of the ranks' messages. A candidate wins only beyond the spread of its rounds; else the job stays as it
was.
"""

from collections.abc import Iterable, Sequence

from counterpoint.cuda.guard import TOLERANCE
from counterpoint.cuda.running_job import JobGpu
from counterpoint.cuda.timing import Measurement
from counterpoint.launch_filter.control_block import SeenFunction, rules_of, translate
from counterpoint.launch_filter.live_candidates import LiveCandidate, LiveProposal, propose_live
from counterpoint.launch_filter.live_messages import (
    Census,
    Decision,
    Finalists,
    Look,
    RaceResult,
    Trials,
    keep_engaged,
    without_effect,
)
from counterpoint.launch_filter.live_rounds import LEAST_ROUNDS, NUM_FINALISTS, best, judge, lay_out, needed_gain
from counterpoint.launch_filter.settings import LiveSettings
from counterpoint.machine import machine_for_device
from counterpoint.plan import Directive, Expectation, Plan, Refusal, control_tag
from counterpoint.units import format_count, format_percent, format_us
from counterpoint.value import Value

AS_IT_IS = "as it is"
GIVEN = "the plan given"
TOO_FEW_ROUNDS = "too few rounds could be timed on all ranks to tell a gain from noise; leave it as it is"
SLOWER_STEP = 0.10  # a step this much slower than when the plan was found is another step
CHANGED_SHARE = 0.10  # so is one of whose launches this share is of other kernels or grids


class Reference(Value, frozen=True, kw_only=True):
    """The job when its plan was found: grids by kernel, and a step's time as it is; 0 where it was not measured."""

    grids: dict[str, tuple[int, int, int]]
    baseline_us: float = 0.0


def propose(censuses: Sequence[Census], gpu: JobGpu | None, settings: LiveSettings, steps_left: int) -> Trials:
    """Candidates from the kernels of all ranks, the plan given first, as many as the budget lets try."""
    seen: dict[str, SeenFunction] = {}
    for census in censuses:
        for function in census.functions:
            seen.setdefault(function.name, function)
    proposal: LiveProposal = propose_live(list(seen.values()), gpu)
    candidates = list(proposal.candidates)
    if settings.rules:
        candidates.insert(0, LiveCandidate(label=GIVEN, directives=settings.plan.directives, rules=settings.rules))
    layout = lay_out(len(candidates), steps_left)
    too_many = tuple(
        Refusal(control="candidate", target=candidate.label, reason="the budget of steps is too small to try it")
        for candidate in candidates[layout.num_candidates :]
    )
    return Trials(candidates=tuple(candidates[: layout.num_candidates]), refusals=(*proposal.refusals, *too_many))


def pick_finalists(labels: Sequence[str], results: Sequence[RaceResult]) -> Finalists:
    """The fastest candidates of the heat; none where not even one round was timed on all ranks."""
    measurements = judge(labels, [result.times for result in results], least_rounds=1)
    if measurements is None:
        return Finalists(numbers=())
    order = sorted(range(1, len(labels)), key=lambda number: measurements[number].ratio)
    return Finalists(numbers=tuple(order[:NUM_FINALISTS]))


def decide(
    candidates: Sequence[LiveCandidate], results: Sequence[RaceResult], refusals: Sequence[Refusal], gpu: JobGpu | None
) -> Decision:
    """The plan to keep: the best finalist beyond its spread, less what had no effect anywhere; else nothing."""
    labels = [AS_IT_IS, *(candidate.label for candidate in candidates)]
    measurements = judge(labels, [result.times for result in results], LEAST_ROUNDS)
    machine = machine_for_device(gpu.name) if gpu else None
    name = machine.name if machine else ""
    if measurements is None:
        summary = TOO_FEW_ROUNDS if candidates else _nothing_to_try(refusals)
        return Decision(plan=Plan(machine=name, summary=summary, refusals=tuple(refusals)))
    fastest = number = best(measurements)
    dropped = without_effect(tuple(results))
    chosen = candidates[number - 1].directives if number else ()
    kept = keep_engaged(chosen, {place: targets_of(each) for place, each in enumerate(chosen)}, dropped)
    if not kept:
        number = 0  # faster, but by nothing that we did
    is_given = bool(number) and labels[number] == GIVEN
    plan = Plan(
        step_name="live steps",
        machine=name,
        verdict="GAIN" if number else "NO_GAIN",
        summary=_summary(measurements, fastest, is_kept=bool(number)),
        expectation=Expectation(
            origin="measured", baseline_us=measurements[0].median_us, planned_us=measurements[number].median_us
        ),
        directives=kept,
        refusals=(*refusals, *_as_refusals(kept, dropped.values())),
    )
    rules = candidates[number - 1].rules if is_given else rules_of(plan)
    return Decision(plan=plan, rules=rules, measurements=measurements)


def targets_of(directive: Directive) -> frozenset[str]:
    """What the rules of a directive are for, in the words of proofs."""
    rules = translate(Plan(directives=(directive,))).rules
    return frozenset(rule.target for rule in rules if not rule.is_collective)


def _as_refusals(kept: Sequence[Directive], dropped: Iterable[Refusal]) -> tuple[Refusal, ...]:
    """Dropped controls that are nowhere in the plan."""
    in_plan = {(control_tag(control), target) for each in kept for control in each.controls for target in targets_of(each)}
    return tuple(refusal for refusal in dropped if (refusal.control, refusal.target) not in in_plan)


def _nothing_to_try(refusals: Sequence[Refusal]) -> str:
    """One reason is said; more than one are listed in the plan."""
    if len(refusals) == 1:
        return f"nothing to try: {refusals[0].reason}"
    return f"nothing to try ({format_count(len(refusals), 'refusal')})"


def _summary(measurements: Sequence[Measurement], fastest: int, *, is_kept: bool) -> str:
    """In one line; `fastest` is 0 where no candidate was faster by what is needed."""
    number = fastest or min(range(len(measurements)), key=lambda candidate: measurements[candidate].ratio)
    without, found = measurements[0], measurements[number]
    change, spread = format_percent(1 - found.ratio), format_percent(found.spread)
    if is_kept:
        times = f"{format_us(without.median_us)} to {format_us(found.median_us)}"
        return f"{found.label}: {times}, {change} less, spread {spread}"
    if fastest:
        return f"{found.label} was {change} faster, but none of its controls took effect; leave it as it is"
    if not number:
        return "no candidate was faster; leave it as it is"
    needed = f"{format_percent(needed_gain(found))} needed to tell it from noise"
    return f"the best candidate ({found.label}) was only {change} faster, {needed}; leave it as it is"


def look_at(
    times: Sequence[Measurement] | None,
    reference: Reference,
    grids: dict[str, tuple[int, int, int]],
    launches: dict[str, int],
) -> Look:
    """What the guard makes of its rounds: `times` of the job as it is and, if a plan is in force, with it.

    `grids` and `launches` are those of the kernels that were launched since the last look.
    """
    if times is not None and len(times) > 1:
        planned = times[1]
        if planned.is_slower() and planned.ratio > 1 + TOLERANCE:
            by = f"{format_percent(planned.ratio - 1)}, spread {format_percent(planned.spread)}"
            return Look(verdict="revert", reason=f"the plan has become slower than the job as it is by {by}")
    total = sum(launches.values())
    changed = sum(number for name, number in launches.items() if reference.grids.get(name) != grids[name])
    if total and changed > CHANGED_SHARE * total:
        share = format_percent(changed / total)
        return Look(verdict="reopen", reason=f"{share} of the launches are of other kernels or grids than when it was tuned")
    if times is not None and reference.baseline_us and times[0].median_us > (1 + SLOWER_STEP) * reference.baseline_us:
        longer = format_percent(times[0].median_us / reference.baseline_us - 1)
        return Look(verdict="reopen", reason=f"a step takes {longer} longer than when it was tuned")
    return Look(verdict="keep")
