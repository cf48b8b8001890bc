"""Prints plans: a file in words, the difference of two, how to apply one, and what to change if none pays."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.text import Text

from counterpoint.controls import Control
from counterpoint.errors import printable
from counterpoint.measurement.values import LEAST_SIMULATED_GAIN
from counterpoint.plan import Expectation, Match, Plan
from counterpoint.planner.job_changes import JobChange, JobChanges
from counterpoint.report.text import bullets, describe_directives, print_verdict
from counterpoint.report.to_apply import Application
from counterpoint.units import format_change, format_percent, format_us
from counterpoint.value import Value

SAME = "the plans are the same"
SAME_CONTROLS = "the plans hold the same controls; only the order of directives, the reasons or the refusals differ"


class PlanDifference(Value, frozen=True, kw_only=True):
    """One difference between two plans; `first` and `second` are in words."""

    what: str
    first: str
    second: str


class PlanDiff(Value, frozen=True, kw_only=True):
    """The difference of two plans: facts and controls that both have, and directives that only one has, in words.

    Different reasons, refusals and orders of directives are reported only as such.
    """

    is_same: bool

    differences: tuple[PlanDifference, ...] = ()
    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()


def compare_plans(first: Plan, second: Plan) -> PlanDiff:
    """Return how `second` differs from `first`."""
    before, after = (_controls_by_match(plan) for plan in (first, second))
    facts = [
        PlanDifference(what=what, first=a, second=b) for (what, a), (_, b) in zip(_facts(first), _facts(second), strict=True)
    ]
    changed = [
        PlanDifference(what=match.describe(), first=_in_words(controls), second=_in_words(after[match]))
        for match, controls in before.items()
        if match in after
    ]
    return PlanDiff(
        is_same=first == second,
        differences=tuple(each for each in (*facts, *changed) if each.first != each.second),
        only_first=tuple(_told(match, controls) for match, controls in before.items() if match not in after),
        only_second=tuple(_told(match, controls) for match, controls in after.items() if match not in before),
    )


def print_plan_file(console: Console, plan: Plan) -> None:
    """Print a plan in words: verdict, origin, and each directive with its reason."""
    print_verdict(console, plan)
    for what, said in list(_facts(plan))[1:]:
        if said:
            console.print(Text.assemble((f"{what}: ", "bold"), printable(said)))
    console.print(Text("directives" if plan.directives else "no directives: this plan changes nothing", style="bold"))
    if plan.directives:
        console.print(bullets(describe_directives(plan.directives, most_shown=None)))
    if any(directive.match.ordinals is not None for directive in plan.directives):
        console.print(Text("Numbers count from 0 in the order of the step.", style="dim"))
    console.print()


def print_diff(console: Console, names: tuple[str, str], diff: PlanDiff) -> None:
    """Print what differs, what only the first has, and what only the second has; `names` are those of the files."""
    if not (diff.differences or diff.only_first or diff.only_second):
        console.print(SAME if diff.is_same else SAME_CONTROLS)
        return
    for each in diff.differences:
        first, second = (printable(said) or "nothing" for said in (each.first, each.second))
        console.print(Text.assemble((printable(each.what), "bold"), f": {first} -> {second}"))
    for name, only in zip(names, (diff.only_first, diff.only_second), strict=True):
        if only:
            console.print(Text(f"only in {printable(name)}", style="bold"))
            console.print(bullets(Text(printable(line)) for line in only))


def print_job_changes(console: Console, changes: JobChanges) -> None:
    """Print what the user could change if no control helps, with simulated times, or that no change would help."""
    if not changes.simulated:
        console.print(Text("No change of streams, bucket sizes or prefetch applies to this step.", style="dim"))
    elif not changes.helpful:
        tried = "; ".join(f"{each.change} ({_against(each)})" for each in changes.simulated)
        least = format_percent(LEAST_SIMULATED_GAIN)
        console.print(Text(f"No change to the job saves {least} or more. Simulated: {tried}.", style="dim"))
    else:
        console.print(
            Text("changes to the job that could help (simulated; only if the data flow allows them)", style="bold")
        )
        console.print(bullets(Text(f"{each.change}: {_against(each)}") for each in changes.helpful))
    console.print()


def _against(change: JobChange) -> str:
    before, after = change.baseline_us, change.changed_us
    return f"{format_us(before)} to {format_us(after)}, {format_change(after / before - 1)}"


def print_to_apply(console: Console, ways: Sequence[Application]) -> None:
    """Print each way with what it applies; lines to type are printed unwrapped."""
    if not ways:
        return
    console.print(Text("to apply", style="bold"))
    for way in ways:
        told = Text.assemble((", ".join(way.controls), "bold"), ", " if way.controls else "", f"{way.where}:")
        console.print(bullets([told]))
        for line in way.lines:
            console.print(Text(f"     {line}", style="cyan"), soft_wrap=True)
    console.print()


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield what a plan states about itself, the verdict first; a missing fact is an empty string."""
    yield "verdict", plan.verdict
    step = f"'{plan.step_name}'" if plan.step_name else ""
    yield "step", " ".join(filter(None, (step, f"({plan.step_fingerprint})" if plan.step_fingerprint else "")))
    yield "machine", plan.machine
    yield "expected", "" if plan.expectation is None else _expected(plan.expectation)


def _expected(expectation: Expectation) -> str:
    before, after = expectation.baseline_us, expectation.planned_us
    change = f", {format_percent(1 - after / before)} less" if before > 0 and after < before else ""
    return f"{format_us(before)} without the plan, {format_us(after)} with it{change} ({expectation.origin})"


def _controls_by_match(plan: Plan) -> dict[Match, tuple[Control, ...]]:
    """Return the controls of each match, in the plan's order; several directives for one match are merged."""
    found: dict[Match, tuple[Control, ...]] = {}
    for directive in plan.directives:
        found[directive.match] = (*found.get(directive.match, ()), *directive.controls)
    return found


def _told(match: Match, controls: tuple[Control, ...]) -> str:
    return f"{_in_words(controls)} on {match.describe()}"


def _in_words(controls: Iterable[Control]) -> str:
    return ", ".join(control.describe() for control in controls) or "no control"
