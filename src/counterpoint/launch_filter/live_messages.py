"""What the ranks of a tuned job tell each other, as values: each offers what it saw, rank 0 answers what all then do."""

from typing import Literal

from counterpoint.cuda.timing import Measurement
from counterpoint.launch_filter.control_block import FilterRule, SeenFunction
from counterpoint.launch_filter.live_candidates import LiveCandidate
from counterpoint.launch_filter.live_rounds import Times
from counterpoint.plan import Directive, Plan, Refusal, control_tag
from counterpoint.value import Value

Control = tuple[str, str]  # the control's tag and its target in words


class Announcement(Value, frozen=True, kw_only=True):
    """Rank 0's answer, in force on every rank when step `start_step` has ended; or why there is none."""

    start_step: int
    text: str = ""
    problem: str = ""


class Census(Value, frozen=True, kw_only=True):
    """The kernels that one rank has launched."""

    functions: tuple[SeenFunction, ...]


class Trials(Value, frozen=True, kw_only=True):
    """What all ranks try: the candidates that fit the budget, and what is left out with the reason."""

    candidates: tuple[LiveCandidate, ...]
    refusals: tuple[Refusal, ...]


class RaceResult(Value, frozen=True, kw_only=True):
    """What one rank saw in a race: times, controls that took effect there, and why others did not."""

    times: Times
    engaged: tuple[Control, ...] = ()
    unengaged: tuple[Refusal, ...] = ()


class Finalists(Value, frozen=True, kw_only=True):
    """Numbers of the candidates that go on, the fastest first."""

    numbers: tuple[int, ...]


class Decision(Value, frozen=True, kw_only=True):
    """The plan that is in force from now on, its table, and the times behind it."""

    plan: Plan
    rules: tuple[FilterRule, ...] = ()
    measurements: tuple[Measurement, ...] = ()


class Look(Value, frozen=True, kw_only=True):
    """What the guard found: go on, revert for good, or try again; and why."""

    verdict: Literal["keep", "revert", "reopen"]
    reason: str = ""


def without_effect(results: tuple[RaceResult, ...]) -> dict[Control, Refusal]:
    """Controls that took effect on no rank, with the first reason given."""
    engaged = {control for result in results for control in result.engaged}
    found: dict[Control, Refusal] = {}
    for result in results:
        for refusal in result.unengaged:
            key = (refusal.control, refusal.target)
            if key not in engaged:
                found.setdefault(key, refusal)
    return found


def keep_engaged(
    directives: tuple[Directive, ...], targets: dict[int, frozenset[str]], dropped: dict[Control, Refusal]
) -> tuple[Directive, ...]:
    """Directives less the controls that had no effect anywhere; `targets` are those of each directive's rules."""
    kept: list[Directive] = []
    for number, directive in enumerate(directives):
        controls = tuple(
            control
            for control in directive.controls
            if not targets[number] or any((control_tag(control), target) not in dropped for target in targets[number])
        )
        if controls:
            kept.append(Directive(match=directive.match, controls=controls, reason=directive.reason))
    return tuple(kept)
