"""The paths that a plan requests in a running job, and the matches that such a job cannot distinguish.

A running job knows a collective by its kind, so all collectives of a kind use the same path. A plan that matches only
some of them is refused, unless these are all the collectives that copies would take in the step from which the plan was
made. `applied_in_job` tells what `run` applies of a plan, and `needs_step` which plans it cannot apply without that step.
"""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from counterpoint.controls import COPIES_TAKE_NO_SIZES, LEAST_PART_BYTES, Control, OverlapMatmul, Transport
from counterpoint.integrations.paths import COPIED_KINDS, LIBRARY, WORDS, Paths
from counterpoint.launch_filter.rules import beyond_names, is_by_launch, translate
from counterpoint.plan import NUM_SHOWN, Directive, Match, Plan, Refusal
from counterpoint.sim.matmul_pairs import MatmulPairs
from counterpoint.step import Collective, CollectiveKind, Step
from counterpoint.traces.classify import classify_kernel
from counterpoint.units import format_count
from counterpoint.value import Value

NARROWING = ("process_group", "num_bytes", "ordinals")  # fields of a match that a running job does not have
BY_KIND = "a running job knows collectives only by kind"


class PlannedPaths(Value, frozen=True, kw_only=True):
    """What a plan requests, and the refused parts with their reasons."""

    paths: Paths
    refusals: tuple[Refusal, ...] = ()


def paths_of(directives: Iterable[Directive]) -> Paths:
    """Return the paths that directives request; `planned_paths` also returns what is missing from them."""
    return planned_paths(directives).paths


def planned_paths(directives: Iterable[Directive], step: Step | None = None) -> PlannedPaths:
    """Return the paths that directives request; `step`, from which the plan was made, tells which collectives these are."""
    copies: set[CollectiveKind] = set()
    found = LIBRARY
    refusals: list[Refusal] = []
    asked = [(each, control) for each in directives for control in each.controls if is_path(control)]
    meant = [] if step is None else [number for each, _ in asked for number in each.match.accepted(step)]
    paired = frozenset[int]()
    if step is not None and any(isinstance(control, OverlapMatmul) for _, control in asked):
        paired = frozenset(MatmulPairs(step).found)
    for directive, control in asked:
        kinds = _kinds_of(directive.match, step)
        reason = (
            _obstacle(directive.match, control, kinds) if step is None else _obstacle_in(step, control, kinds, meant, paired)
        )
        if reason:
            refusals.append(Refusal(control=control.tag, target=directive.match.describe(NUM_SHOWN), reason=reason))
        elif isinstance(control, OverlapMatmul) and kinds == {"all_to_all"}:
            found = replace(found, overlaps_experts=True, experts_schedule=control.schedule)
        elif isinstance(control, OverlapMatmul):
            found = replace(found, overlaps_matmuls=True, schedule=control.schedule)
        else:
            copies.update(kinds)
    in_order = tuple(kind for kind in COPIED_KINDS if kind in copies)
    return PlannedPaths(paths=replace(found, copies=in_order), refusals=tuple(dict.fromkeys(refusals)))


def is_path(control: Control) -> bool:
    """Return whether a control moves collectives to another path in a running job."""
    return isinstance(control, OverlapMatmul) or (isinstance(control, Transport) and control.transport == "copy_engine")


def applied_in_job(plan: Plan, step: Step | None = None) -> tuple[Control, ...]:
    """Return the controls that `run` applies to a job, in the plan's order.

    `step`, from which the plan was made, tells which collectives and launches the plan means. Without it, controls count
    that a job may turn out not to have.
    """
    refused = set()
    if step is not None:
        refused = {(each.control, each.target) for each in planned_paths(plan.directives, step).refusals}
    return tuple(
        control
        for directive in plan.directives
        for control in directive.controls
        if "job" not in control.refused_by
        and (control.tag, directive.match.describe(NUM_SHOWN)) not in refused
        and (step is None or not is_by_launch(control) or _is_launched(directive, control, step))
    )


def _is_launched(directive: Directive, control: Control, step: Step) -> bool:
    """Return whether kernels of the step get the control by their names."""
    rules = translate(Plan(directives=(replace(directive, controls=(control,)),)), step).rules
    return not all(rule.is_collective for rule in rules)


def needs_step(plan: Plan) -> bool:
    """Return whether a job needs the step of a plan, because names of kernels and kinds of collectives do not identify its
    targets.
    """
    return any(_is_beyond(directive.match, control) for directive in plan.directives for control in directive.controls)


def _is_beyond(match: Match, control: Control) -> bool:
    """Return whether a job alone does not tell what a directive's control is for."""
    if is_path(control):
        return match.operations is not None or bool(narrowing_keys(match))
    return is_by_launch(control) and (match.operations is not None or "[" in match.name or bool(beyond_names(match)))


def narrowing_keys(match: Match) -> list[str]:
    """Return what a match goes by that a running job does not know of a collective; the step tells it."""
    return [name for name in NARROWING if getattr(match, name) is not None]


def _obstacle(match: Match, control: Control, kinds: set[CollectiveKind]) -> str:
    """Return why a directive is not possible, judged by its match alone; or nothing."""
    ignored = narrowing_keys(match)
    if ignored:
        names = " and ".join(ignored)
        return f"it goes by {names}, and {BY_KIND}; add --step TRACE, from which the plan was made, or match by kind alone"
    return _obstacle_to_copies(control, kinds)


def _obstacle_in(
    step: Step, control: Control, kinds: set[CollectiveKind], meant: Sequence[int], paired: frozenset[int]
) -> str:
    """Return why a directive is not possible if the plan matches these operations of the step; or nothing.

    Operators leave a collective alone that is none of the `paired`, which have a matmul. Experts' all-to-alls need none.
    """
    accepted = {number: each for number in meant if isinstance(each := step.operations[number], Collective)}
    groups = {each.process_group for each in accepted.values()}
    is_copied = isinstance(control, Transport)
    for kind in kinds:
        is_operator = not is_copied and kind != "all_to_all"
        large = {
            number
            for number, each in step.collectives().items()
            if each.collective == kind
            and _may_be_large(each)
            and (not each.gives_sizes if is_copied else each.process_group in groups)
            and (number in paired or not is_operator)
        }
        num_left = len(large - accepted.keys())
        if num_left:
            number = format_count(len(large), kind, WORDS.get(kind, f"{kind.replace('_', '-')}s"))
            which = "have a matmul" if is_operator else "are large enough"
            return f"the plan matches {len(large) - num_left} of {number} that {which}, but {BY_KIND}"
    of_kinds = [each for each in accepted.values() if each.collective in kinds]
    if is_copied and of_kinds and all(each.gives_sizes for each in of_kinds):
        return COPIES_TAKE_NO_SIZES
    return _obstacle_to_copies(control, kinds)


def _may_be_large(collective: Collective) -> bool:
    """Return whether a collective is large enough for copies; one of unknown size might be."""
    return not collective.num_bytes or collective.num_bytes >= collective.group_size * LEAST_PART_BYTES


def _obstacle_to_copies(control: Control, kinds: set[CollectiveKind]) -> str:
    """Return why no integration moves these, or nothing."""
    if isinstance(control, OverlapMatmul):
        return ""
    if not kinds:
        return "it names no kind of collective; give its match one, such as collective = 'all_gather'"
    others = sorted(kind for kind in kinds if kind not in COPIED_KINDS)
    return f"no integration moves {' and '.join(others)} by copies in a running job" if len(others) == len(kinds) else ""


def _kinds_of(match: Match, step: Step | None) -> set[CollectiveKind]:
    """Return the kinds of collectives that a match accepts: from the match, the step's operations, or kernel names."""
    if match.kind not in (None, "communication"):
        return set()
    if match.collective is not None:
        return {match.collective}
    if step is not None:
        accepted = (step.operations[index] for index in match.accepted(step))
        return {each.collective for each in accepted if isinstance(each, Collective)}
    rule = classify_kernel(match.name)
    return {rule.collective} if rule.kind == "communication" else set(COPIED_KINDS) if match.name == "*" else set()
