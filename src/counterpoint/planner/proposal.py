"""The planner's proposals as values: candidates to try, and refusals with their reasons."""

from collections.abc import Iterable

from counterpoint.controls import Control
from counterpoint.plan import Directive, Match, Refusal
from counterpoint.value import Value

ALL_COLLECTIVES = "all collectives"


class Candidate(Value, frozen=True, kw_only=True):
    """Directives of one control that belong together; `family` names the control, `label` is for people."""

    family: str
    label: str
    directives: tuple[Directive, ...]


class Proposal(Value, frozen=True, kw_only=True):
    """What to try, and what not to try and why."""

    candidates: tuple[Candidate, ...]
    refusals: tuple[Refusal, ...]


def proposal(candidates: Iterable[Candidate] = (), refusals: Iterable[Refusal] = ()) -> Proposal:
    """Return candidates and refusals as one proposal."""
    return Proposal(candidates=tuple(candidates), refusals=tuple(refusals))


def refusal(control: str, target: str, reason: str) -> Proposal:
    """Return a proposal without candidates, for one reason."""
    return proposal(refusals=[Refusal(control=control, target=target, reason=reason)])


def one(family: str, label: str, match: Match, controls: tuple[Control, ...], reason: str) -> Candidate:
    """Return a candidate of one directive."""
    return Candidate(family=family, label=label, directives=(Directive(match=match, controls=controls, reason=reason),))
