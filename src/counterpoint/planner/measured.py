"""Tunes a captured step by measurement: the simulator prunes, and the best few candidates are timed against the
unchanged step.

A plan is kept only if it is proven faster (`measurement.tournament`); otherwise the step stays as it was. All ranks
measure the candidates of rank 0. A candidate's time is that of the slowest rank, so all ranks make the same choice. If a
candidate cannot be prepared on one rank, for example for lack of memory, all ranks leave it out. If a candidate fails
after it was started, tuning ends, because other ranks may already wait in its collectives.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import chain, combinations
from typing import Protocol

import msgspec
from msgspec.structs import replace

from counterpoint.cuda.graph import AbstractExecutable, AbstractGraph
from counterpoint.cuda.graph_reading import ReadGraph
from counterpoint.cuda.graph_rewriting import MOVED, rewrite
from counterpoint.engagement import Engagement
from counterpoint.errors import DeviceError
from counterpoint.machine import Machine
from counterpoint.measurement.orders import draw_seed
from counterpoint.measurement.tournament import compare
from counterpoint.measurement.values import SIMULATION_ERROR, Comparison
from counterpoint.plan import Directive, Expectation, Match, Plan, Refusal
from counterpoint.planner.candidates import propose_unsimulated
from counterpoint.planner.durable import DurableMatches
from counterpoint.planner.search import AS_IT_IS, Trial, Tuning, attempt, tune
from counterpoint.sim import Simulator
from counterpoint.sim.costs import SUMMED_COLLECTIVES
from counterpoint.step import Collective, Step
from counterpoint.value import Value

Kinds = tuple[str, ...]
CAP, SUMS = "residency_cap", "transport of reductions"
MOVES = frozenset({("transport",), (SUMS,)})
NUM_CANDIDATES = 11  # two transports, light kernels, priority, head starts and a cap, and most of their pairs
NUM_ROUNDS = 15


class Replayable(Protocol):
    """A captured step that can be timed on all ranks: `cuda.capture.Captured`, or a double."""

    @property
    def graph(self) -> AbstractGraph:
        """The captured graph; it is never edited in place."""

    @property
    def read(self) -> ReadGraph:
        """The step that the graph holds."""

    def time_us(self, executable: AbstractExecutable) -> float:
        """Time one replay on the slowest rank."""

    def agree(self, text: str) -> str:
        """Return rank 0's text on every rank."""

    def is_everywhere(self, is_true: bool) -> bool:
        """Return whether the value is true on every rank; all ranks must call it."""


class Contender(Value, frozen=True, kw_only=True):
    """One candidate that is worth measuring."""

    label: str
    directives: tuple[Directive, ...]


class Entrant(msgspec.Struct, frozen=True, kw_only=True):
    """A contender that is ready to be replayed, and the state of its controls."""

    contender: Contender
    executable: AbstractExecutable
    engagements: tuple[Engagement, ...]


class MeasuredTuning(Value, frozen=True, kw_only=True):
    """The plan, all measurements, and the state of each control of the plan."""

    plan: Plan
    comparison: Comparison
    engagements: tuple[Engagement, ...]
    simulated: Tuning


def tune_measured(
    captured: Replayable, machine: Machine, num_candidates: int = NUM_CANDIDATES, num_rounds: int = NUM_ROUNDS
) -> MeasuredTuning:
    """Find the best plan for a captured step on this machine's GPUs, with the replays of `num_rounds` rounds over all
    candidates.

    Raises `DeviceError` if the unchanged step cannot be prepared, or if a replay fails. A candidate that cannot be
    prepared is listed in the plan's refusals.
    """
    step = captured.read.step
    simulated = tune(step, machine, Simulator())
    # if operators would be best, the search above tries little else, and a captured step does not take them
    able = tune(step, machine, Simulator(), applier="graph")
    trials = [*simulated.trials, *able.trials[1:], *_unsimulated(step, machine, simulated)]
    applicable, inapplicable = _applicable(captured, trials)
    contenders = _agree(captured, applicable[:num_candidates])
    with ExitStack() as opened:
        entrants, dropped = _admit_all(captured, contenders, opened)
        comparison = compare(
            [entrant.contender.label for entrant in entrants],
            lambda number: captured.time_us(entrants[number].executable),
            num_rounds,
            seed=int(captured.agree(str(draw_seed()))),
        )
    chosen, measurements = comparison.chosen, comparison.measurements
    directives, engagements = entrants[chosen].contender.directives, entrants[chosen].engagements
    plan = Plan(
        step_name=step.name,
        step_fingerprint=step.fingerprint(),
        machine=machine.name,
        verdict="GAIN" if chosen else "NO_GAIN",
        summary=comparison.describe(),
        expectation=Expectation(
            origin="measured", baseline_us=measurements[0].median_us, planned_us=measurements[chosen].median_us
        )
        if measurements
        else None,
        directives=DurableMatches(step).directives(directives),
        refusals=(*_left_out(directives, inapplicable, simulated.plan.refusals), *dropped),
    )
    return MeasuredTuning(plan=plan, comparison=comparison, engagements=engagements, simulated=simulated)


def _unsimulated(step: Step, machine: Machine, simulated: Tuning) -> Iterator[Trial]:
    """Yield trials of controls for which the simulator saw no use and whose effects it cannot predict."""
    tried = {family for trial in simulated.trials for family in trial.families if len(trial.families) == 1}
    for candidate in propose_unsimulated(step, machine):
        if candidate.family not in tried:
            trial = attempt(step, machine, Simulator(), candidate)
            yield replace(trial, directives=DurableMatches(step).directives(trial.directives))


def _applicable(captured: Replayable, trials: Sequence[Trial]) -> tuple[list[Contender], list[Refusal]]:
    """Return the best simulated candidate of each combination of controls, best first, and what cannot be applied here.

    It also returns pairs of controls that may help alone. Copies with and without reductions both take part.
    """
    best: dict[Kinds, Contender] = {}
    refusals: list[Refusal] = []
    promising: list[str] = []
    for trial in sorted(trials[1:], key=lambda entry: (entry.makespan_us, len(entry.families))):
        moves = _moves(captured, trial.directives)
        kinds = _kinds(trial.families, moves)
        if kinds in best:
            continue
        directives, unmet = _movable(captured, trial.directives)
        unmet += _unmet(captured, trial.label, directives) if directives else []
        refusals.extend(unmet)
        # a candidate of which only the reductions, or only the rest, can move equals another candidate, which is also a
        # trial
        if directives and not unmet and _moves(captured, directives) == moves:
            best[kinds] = Contender(label=trial.label, directives=directives)
            is_unpredicted = kinds == (CAP,)  # what a cap does to the kernel itself
            if len(kinds) == 1 and (is_unpredicted or trial.makespan_us < trials[0].makespan_us * (1 + SIMULATION_ERROR)):
                promising.append(kinds[0])
    _add_pairs(captured, best, promising)
    favorite = next(iter(best), ())
    # the simulator's favorite, then copies, then pairs that it may have found no better than one of the two, then the
    # others, and last pairs with a cap, which is no part of most steps' best plans
    ordered = sorted(
        best,
        key=lambda kinds: (kinds != favorite, kinds not in MOVES, CAP in kinds and len(kinds) > 1, len(kinds) < 2),
    )
    return [best[kinds] for kinds in ordered], refusals


def _add_pairs(captured: Replayable, best: dict[Kinds, Contender], promising: Sequence[str]) -> None:
    """Add every pair of controls that may help alone, because candidates with equal simulated times often differ on a GPU.
    Copies are paired with other controls only if some collectives stay on SMs.
    """
    for pair in combinations(promising, 2):
        parts = [best[kind,] for kind in pair]
        directives = tuple(directive for part in parts for directive in part.directives)
        label = " + ".join(part.label for part in parts)
        num_moving = sum((kind,) in MOVES for kind in pair)
        is_effective = num_moving == 0 or (_is_some_left(captured, directives) and not _unmet(captured, label, directives))
        if num_moving < 2 and is_effective:
            best.setdefault(tuple(sorted(pair)), Contender(label=label, directives=directives))


def _movable(captured: Replayable, directives: tuple[Directive, ...]) -> tuple[tuple[Directive, ...], list[Refusal]]:
    """Return the directives without the collectives that copies cannot replace, or nothing and the reason if no other is
    left.
    """
    obstacles: dict[str, Refusal] = {}
    kept: list[Directive] = []
    for directive in directives:
        if MOVED not in directive.controls:
            kept.append(directive)
            continue
        able, found = able_as_copies(captured, directive.match)
        obstacles |= found
        if able:
            kept.append(replace(directive, match=replace(directive.match, ordinals=None, operations=able)))
    is_moving = any(MOVED in directive.controls for directive in kept)
    return (tuple(kept), []) if is_moving or not obstacles else ((), list(obstacles.values()))


def able_as_copies(captured: Replayable, match: Match) -> tuple[tuple[int, ...], dict[str, Refusal]]:
    """Return the matched collectives that can be captured as copies; for the others, each reason once."""
    able: list[int] = []
    obstacles: dict[str, Refusal] = {}
    for index in match.accepted(captured.read.step):
        operation = captured.read.step.operations[index]
        if not isinstance(operation, Collective):
            continue
        obstacle = captured.graph.obstacle_to_copies(captured.read.nodes[index])
        if obstacle:
            obstacles[obstacle] = Refusal(control="transport", target=operation.collective, reason=obstacle)
        else:
            able.append(index)
    return tuple(able), obstacles


def _is_some_left(captured: Replayable, directives: tuple[Directive, ...]) -> bool:
    """Return whether some collectives stay on SMs under these directives."""
    step = captured.read.step
    each = zip(step.operations, Plan(directives=directives).controls_of(step), strict=True)
    return any(isinstance(operation, Collective) and MOVED not in controls for operation, controls in each)


def _moves(captured: Replayable, directives: Iterable[Directive]) -> frozenset[bool]:
    """Return whether the collectives that the directives move to copies reduce: true, false, both, or none if nothing
    moves.
    """
    step = captured.read.step
    moved = (directive.match.accepted(step) for directive in directives if MOVED in directive.controls)
    each = (step.operations[index] for index in chain.from_iterable(moved))
    return frozenset(operation.collective in SUMMED_COLLECTIVES for operation in each if isinstance(operation, Collective))


def _kinds(families: Iterable[str], moves: frozenset[bool]) -> Kinds:
    """Return the kinds of controls in a candidate, sorted. Copies that reduce are a separate kind, because the sums may
    be slow.
    """
    return tuple(sorted(SUMS if family == "transport" and True in moves else family for family in families))


def _unmet(captured: Replayable, label: str, directives: tuple[Directive, ...]) -> list[Refusal]:
    """Return the controls of a candidate that do not take effect on a copy of the graph."""
    try:
        rewritten = rewrite(captured.graph, captured.read, Plan(directives=directives))
        rewritten.graph.close()
    except DeviceError as problem:
        tags = dict.fromkeys(control.tag for directive in directives for control in directive.controls)
        return [Refusal(control=tag, target=label, reason=str(problem).rstrip(".")) for tag in tags]
    return [
        Refusal(control=engagement.control, target=engagement.target, reason=engagement.reason)
        for engagement in rewritten.engagements
        if engagement.state != "verified"
    ]


def _admit_all(
    captured: Replayable, contenders: Iterable[Contender], opened: ExitStack
) -> tuple[list[Entrant], list[Refusal]]:
    """Return the unchanged step and every contender that is ready on all ranks (`opened` closes them), and the others
    with reasons.
    """
    entrants: list[Entrant] = []
    refusals: list[Refusal] = []
    for contender in (Contender(label=AS_IT_IS, directives=()), *contenders):
        try:
            entrant = _make_ready(captured, contender, opened)
            reason = "another rank cannot prepare it; see that rank's output"
        except DeviceError as problem:
            entrant, reason = None, str(problem).rstrip(".")
        is_ready = captured.is_everywhere(entrant is not None)
        if is_ready and entrant is not None:
            entrants.append(entrant)
        elif entrants:
            refusals.append(Refusal(control=contender.label, target="the whole step", reason=reason))
        else:
            raise DeviceError(f"The captured step cannot be replayed unchanged: {reason}.")
    return entrants, refusals


def _make_ready(captured: Replayable, contender: Contender, opened: ExitStack) -> Entrant:
    rewritten = rewrite(captured.graph, captured.read, Plan(directives=contender.directives))
    with closing(rewritten.graph):  # the prepared graph no longer needs the copy
        executable = rewritten.graph.instantiate()
        opened.callback(executable.close)
    return Entrant(contender=contender, executable=executable, engagements=rewritten.engagements)


def _left_out(
    directives: Sequence[Directive], inapplicable: Iterable[Refusal], simulated: Iterable[Refusal]
) -> list[Refusal]:
    """Return refusals of the controls that are not in the plan: what cannot be applied here, else what the simulator
    says.
    """
    chosen = {control.tag for directive in directives for control in directive.controls}
    first: dict[str, Refusal] = {}
    for refusal in inapplicable:
        first.setdefault(refusal.control, refusal)
    others = [refusal for refusal in simulated if refusal.control not in first]
    return [refusal for refusal in (*first.values(), *others) if refusal.control not in chosen]


def _agree(captured: Replayable, contenders: list[Contender]) -> list[Contender]:
    text = captured.agree(msgspec.json.encode(contenders).decode())
    return msgspec.json.decode(text, type=list[Contender])
