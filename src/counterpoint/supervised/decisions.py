"""Rank 0's decisions from the reports of all ranks: the candidates, the plan to keep, and whether the job has changed.

These are pure functions. `measurement` decides what is faster or slower, and when that is certain.
"""

from collections.abc import Iterable, Mapping, Sequence

from counterpoint.integrations.paths import LIBRARY, PathOffer
from counterpoint.integrations.planned_paths import paths_of
from counterpoint.launch_filter.control_block import SeenFunction
from counterpoint.launch_filter.rules import translate
from counterpoint.machine import machine_for_device
from counterpoint.measurement.guard import are_other_launches, is_longer_step
from counterpoint.measurement.tournament import least_turns, num_admitted
from counterpoint.measurement.values import Comparison, Measurement
from counterpoint.plan import Directive, Expectation, Plan, Refusal
from counterpoint.planner.search import AS_IT_IS
from counterpoint.supervised.candidates import LiveCandidate, propose_live, propose_paths
from counterpoint.supervised.messages import ControlTarget, Decision, KernelReport, RoundReport, Trials
from counterpoint.supervised.running_job import JobGpu
from counterpoint.supervised.settings import CANDIDATE, UNCHANGED, UNTRIED, LiveSettings, Setting, setting_of
from counterpoint.supervised.turns import PATH_WARM_UP_TURNS, TURN_STEPS
from counterpoint.units import format_count, format_percent
from counterpoint.value import Value

GIVEN = "the plan given"
MOST_ALIKE = 3  # refusals for one reason that a plan lists one by one
NUM_NAMED = 2  # of more candidates than that, for want of steps
MOST_REASONS = 3  # that a summary names; the plan has all
Grid = tuple[int, int, int]


class Reference(Value, frozen=True, kw_only=True):
    """The job at the time its plan was found: grids by kernel, and the time of an unmodified step; 0 if it was not
    measured.
    """

    grids: dict[str, Grid]
    baseline_us: float = 0.0


class Room(Value, frozen=True, kw_only=True):
    """The number of turns left in a budget, and the number that a new order costs."""

    num_turns: int
    answer_turns: int = 0


def _turns_left(tried: Sequence[LiveCandidate], room: Room) -> int:
    """Return the turns left when these have warmed up: those that switch paths first compile, record and take memory."""
    return room.num_turns - PATH_WARM_UP_TURNS * sum(each.setting.paths != LIBRARY for each in tried)


def _num_tried(candidates: Sequence[LiveCandidate], room: Room) -> int:
    """Return how many of them, in order, fit the budget."""
    numbers = range(len(candidates), 0, -1)
    return next(
        (
            number
            for number in numbers
            if num_admitted(number, _turns_left(candidates[:number], room), room.answer_turns) == number
        ),
        0,
    )


def propose(
    reports: Sequence[KernelReport],
    gpu: JobGpu | None,
    settings: LiveSettings,
    room: Room,
    offers: Sequence[PathOffer] = (),
) -> Trials:
    """Return candidates from the kernels and the offers of all ranks, the given plan first, as many as fit the budget."""
    seen: dict[str, SeenFunction] = {}
    for report in reports:
        for function in report.functions:
            seen.setdefault(function.name, function)
    of_paths = propose_paths(offers, keeps_bits=settings.keeps_bits)
    proposal = propose_live(list(seen.values()), gpu)
    candidates = [*of_paths.candidates, *proposal.candidates]
    if settings.given != UNCHANGED:
        candidates.insert(0, LiveCandidate(label=GIVEN, directives=settings.plan.directives, setting=settings.given))
    number = _num_tried(candidates, room)
    advice = _advice(candidates, number, settings.budget_steps, room)
    untried = _untried([each.label for each in candidates[number:]], advice)
    return Trials(candidates=tuple(candidates[:number]), refusals=(*of_paths.refusals, *proposal.refusals, *untried))


def _advice(candidates: Sequence[LiveCandidate], num_tried: int, budget_steps: int, room: Room) -> str:
    """Return the least budget that tries all candidates, or if it is too small for any, the least that tries one."""
    wanted = len(candidates) if num_tried else 1
    turns = least_turns(wanted, room.answer_turns) - _turns_left(candidates[:wanted], room)
    least = budget_steps + TURN_STEPS * turns
    if num_tried:
        return f"raise --budget (now {budget_steps}; {least} is enough for all)"
    return f"--budget {budget_steps} is too small to try any candidate here; the least is {least}"


def _untried(labels: Sequence[str], advice: str) -> tuple[Refusal, ...]:
    """Return one refusal for all candidates that the budget has no room for."""
    if not labels:
        return ()
    few = len(labels) <= MOST_ALIKE
    target = ", ".join(labels) if few else f"{', '.join(labels[:NUM_NAMED])} and {len(labels) - NUM_NAMED} more"
    return (Refusal(control=CANDIDATE, target=target, reason=f"{UNTRIED}: {advice}"),)


def settings_of(trials: Trials) -> tuple[Setting, ...]:
    """Return the settings of the variants by number: the unmodified job, and the candidates."""
    return (UNCHANGED, *(candidate.setting for candidate in trials.candidates))


def labels_of(candidates: Sequence[LiveCandidate]) -> list[str]:
    """Return the labels of the unmodified job and the candidates."""
    return [AS_IT_IS, *(candidate.label for candidate in candidates)]


def decide(trials: Trials, comparison: Comparison, reports: Sequence[RoundReport], gpu: JobGpu | None) -> Decision:
    """Return the plan to keep: what is proven faster, without controls that had no effect on any rank; otherwise an
    empty plan.
    """
    machine = machine_for_device(gpu.name) if gpu else None
    name = machine.name if machine else ""
    measurements, chosen = comparison.measurements, comparison.chosen
    if not measurements:
        summary = comparison.describe() if trials.candidates else _nothing_to_try(trials.refusals)
        return Decision(plan=Plan(machine=name, verdict="NO_GAIN", summary=summary, refusals=_merged(trials.refusals)))
    dropped = without_effect(reports)
    candidate = trials.candidates[chosen - 1] if chosen else None
    kept = _keep_engaged(candidate.directives if candidate else (), dropped)
    is_kept = bool(kept)
    plan = Plan(
        step_name="live steps",
        machine=name,
        verdict="GAIN" if is_kept else "NO_GAIN",
        summary=comparison.describe() if is_kept or not chosen else _without_any_effect(comparison),
        expectation=Expectation(
            origin="measured",
            baseline_us=measurements[0].median_us,
            planned_us=measurements[chosen if is_kept else 0].median_us,
        ),
        directives=kept,
        refusals=_merged((*trials.refusals, *_as_refusals(kept, dropped.values()))),
    )
    is_given = candidate is not None and candidate.label == GIVEN and is_kept
    return Decision(
        plan=plan, setting=candidate.setting if candidate and is_given else setting_of(plan), measurements=measurements
    )


def why_another_job(
    times: Sequence[Measurement], reference: Reference, grids: Mapping[str, Grid], launches: Mapping[str, int]
) -> str:
    """Return why the job differs from the one that was tuned, or nothing.

    `times` are the guard's, the unmodified job first; `grids` and `launches` are those of the kernels launched since its
    last check.
    """
    total = sum(launches.values())
    changed = sum(number for name, number in launches.items() if reference.grids.get(name) != grids[name])
    if are_other_launches(changed, total):
        return f"{format_percent(changed / total)} of the launches have other kernels or grids than when the job was tuned"
    if times and reference.baseline_us and is_longer_step(times[0].median_us, reference.baseline_us):
        longer = format_percent(times[0].median_us / reference.baseline_us - 1)
        return f"a step takes {longer} longer than when the job was tuned"
    return ""


def why_removed(times: Sequence[Measurement]) -> str:
    """Describe the check that proved a plan slower."""
    planned = times[1]
    by = f"{format_percent(planned.ratio - 1)}, spread {format_percent(planned.spread)}, in its last check"
    return f"the plan has become slower than the unmodified job (by {by})"


def without_effect(reports: Iterable[RoundReport]) -> dict[ControlTarget, Refusal]:
    """Return controls that took effect on no rank, with the first reason given."""
    every = list(reports)
    engaged = {control for report in every for control in report.engaged}
    found: dict[ControlTarget, Refusal] = {}
    for report in every:
        for refusal in report.unengaged:
            key = (refusal.control, refusal.target)
            if key not in engaged:
                found.setdefault(key, refusal)
    return found


def targets_of(directive: Directive) -> frozenset[str]:
    """Return the targets of a directive's rules and paths, in the words of proofs."""
    rules = translate(Plan(directives=(directive,))).rules
    of_paths = {target for _, target in paths_of([directive]).targets}
    return frozenset({rule.target for rule in rules if not rule.is_collective} | of_paths)


def _keep_engaged(directives: Sequence[Directive], dropped: Mapping[ControlTarget, Refusal]) -> tuple[Directive, ...]:
    """Return the directives without the controls that had no effect on any rank."""
    kept: list[Directive] = []
    for directive in directives:
        targets = targets_of(directive)
        controls = tuple(
            control
            for control in directive.controls
            if not targets or any((control.tag, target) not in dropped for target in targets)
        )
        if controls:
            kept.append(Directive(match=directive.match, controls=controls, reason=directive.reason))
    return tuple(kept)


def _as_refusals(kept: Sequence[Directive], dropped: Iterable[Refusal]) -> tuple[Refusal, ...]:
    """Return refusals of dropped controls that the plan does not contain."""
    in_plan = {(control.tag, target) for each in kept for control in each.controls for target in targets_of(each)}
    return tuple(refusal for refusal in dropped if (refusal.control, refusal.target) not in in_plan)


def _merged(refusals: Iterable[Refusal]) -> tuple[Refusal, ...]:
    """Return one refusal for many with the same control and reason, because a step has dozens of kernels."""
    alike: dict[tuple[str, str], list[Refusal]] = {}
    for refusal in refusals:
        alike.setdefault((refusal.control, refusal.reason), []).append(refusal)
    found: list[Refusal] = []
    for (control, reason), each in alike.items():
        if len(each) <= MOST_ALIKE:
            found.extend(each)
        else:
            found.append(Refusal(control=control, target=each[0].target, reason=reason, num_targets=len(each)))
    return tuple(found)


def _nothing_to_try(refusals: Sequence[Refusal]) -> str:
    """Return the summary: the reasons if they are few, or that the budget is too small; the plan lists every refusal."""
    untried = next((refusal for refusal in refusals if refusal.control == CANDIDATE), None)
    if untried is not None:
        return f"nothing was tried: {untried.reason.removeprefix(f'{UNTRIED}: ')}"
    reasons = tuple(dict.fromkeys(refusal.reason for refusal in refusals))
    if 0 < len(reasons) <= MOST_REASONS:
        return f"nothing to try: {'; '.join(reasons)}"
    return f"nothing to try ({format_count(len(refusals), 'refusal')})"


def _without_any_effect(comparison: Comparison) -> str:
    verdict = comparison.verdict
    label, gain = comparison.measurements[verdict.best].label, format_percent(verdict.gain)
    return f"{label} was {gain} faster, but none of its controls took effect; leave it as it is"
