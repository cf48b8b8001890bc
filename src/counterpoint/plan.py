"""A plan: the controls for the operations of one step, each with its reason; or no control, with the verdict.

The verdict is UNKNOWN if the simulation differs from the trace by more than a plan would gain; such a plan is empty,
too.

A plan knows nothing of how its controls are applied. It is saved as TOML that people can read and edit. A control that
cannot help is not in the plan; `refusals` lists it with the reason.
"""

import math
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import msgspec

from counterpoint.controls import Control
from counterpoint.display import html_list, shortened
from counterpoint.errors import PlanError, require_kind, shown
from counterpoint.kernel_names import readable
from counterpoint.mismatch import nearest
from counterpoint.step import CollectiveKind, Operation, OperationKind, Step
from counterpoint.units import format_count, format_exact_bytes, format_numbered, format_numbers
from counterpoint.value import Value, check_types, read_toml, require, save_toml, toml_output

Verdict = Literal["GAIN", "NO_GAIN", "NO_VERDICT", "UNKNOWN"]
WILDCARDS = frozenset("*?[")
NUM_SHOWN = 4  # most ranges of numbers in a message; a plan may have hundreds
PLAN_FILE = "plan.toml"  # in commands that are printed
PLAN = toml_output("plan")


class Match(Value, frozen=True, kw_only=True):
    """Which operations a directive is for; all given fields must match.

    `name` is a shell pattern, or the name itself. `process_group` is the group's description or name, as in a trace;
    `num_bytes` is the size of a collective or a copy. `ordinals` select among the operations that all other fields
    accept, counted from 0 in the order of the step. These also hold for the next run of a job. `operations` are bare
    numbers in one step; plan files of earlier versions have them, and planners do not write them.
    """

    name: str = "*"
    kind: OperationKind | None = None
    collective: CollectiveKind | None = None
    process_group: str | None = None
    num_bytes: int | None = None
    ordinals: tuple[int, ...] | None = None
    operations: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        lowest = min(self.ordinals or (0,))
        require(lowest >= 0, PlanError, f"ordinals count from 0; found {lowest}. Give numbers of 0 or more.")
        require((self.num_bytes or 0) >= 0, PlanError, f"num_bytes must be 0 or more; found {self.num_bytes}.")
        lowest = min(self.operations or (0,))
        require(lowest >= 0, PlanError, f"operations count from 0; found {lowest}. Give numbers of 0 or more.")

    def candidates(self, step: Step) -> tuple[int, ...]:
        """Return the numbers of the operations that all fields but `ordinals` accept, ascending; ordinals count these."""
        numbers = None if self.operations is None else frozenset(self.operations)
        names = {name for name in {operation.name for operation in step.operations} if self.accepts_name(name)}
        return tuple(
            index
            for index, operation in enumerate(step.operations)
            if operation.name in names and (numbers is None or index in numbers) and self._fits(operation)
        )

    def accepted(self, step: Step) -> tuple[int, ...]:
        """Return the numbers of the matched operations of `step`, ascending; an ordinal beyond the last one matches
        none.
        """
        candidates = self.candidates(step)
        if self.ordinals is None:
            return candidates
        return tuple(candidates[ordinal] for ordinal in sorted(set(self.ordinals)) if ordinal < len(candidates))

    def _fits(self, operation: Operation) -> bool:
        """Return whether an operation with a matching name is meant, as far as that is known without the step."""
        return (
            (self.kind is None or operation.kind == self.kind)
            and (self.collective is None or getattr(operation, "collective", None) == self.collective)
            and (self.process_group is None or getattr(operation, "process_group", None) == self.process_group)
            and (self.num_bytes is None or getattr(operation, "num_bytes", None) == self.num_bytes)
        )

    def accepts_name(self, name: str) -> bool:
        """Return whether the pattern matches, or equals the name, which may itself contain pattern characters."""
        return self.name in ("*", name) or (not WILDCARDS.isdisjoint(self.name) and fnmatchcase(name, self.name))

    def shortened(self) -> "Match":
        """Return the match with a kernel's short name, for people; it matches nothing."""
        return msgspec.structs.replace(self, name=readable(self.name))

    def describe(self, most_shown: int | None = None) -> str:
        """Describe the match, as in "all_gather of 416 MiB in process group default_pg, numbers 0-11".

        `most_shown` is the number of ranges to list; None lists all.
        """
        words = self.collective or {"copy": "copies", None: "operations"}.get(self.kind, f"{self.kind} kernels")
        if self.name != "*":
            words = f"{words} '{self.name}'" if self.collective else self.name
        if self.num_bytes is not None:
            words += f" of {format_exact_bytes(self.num_bytes)}" if self.num_bytes else " of unknown size"
        if self.process_group is not None:
            words += f" in process group {self.process_group}"
        for what, numbers in (("number", self.ordinals), ("operation", self.operations)):
            if numbers is not None:
                words += f", {format_numbered(what, numbers, most_shown)}"
        return words


class Directive(Value, frozen=True, kw_only=True):
    """The controls for the operations that `match` accepts, and why."""

    match: Match
    controls: tuple[Control, ...]
    reason: str


class Refusal(Value, frozen=True, kw_only=True):
    """A control that was considered for `target` and left out, and why. With `num_targets` above 1 `target` is the first."""

    control: str
    target: str
    reason: str
    num_targets: int = 1

    def __post_init__(self) -> None:
        require(self.num_targets >= 1, PlanError, f"num_targets must be 1 or more; found {self.num_targets}. Correct it.")


class Expectation(Value, frozen=True, kw_only=True):
    """The times that were predicted or measured when the plan was made; `origin` says which."""

    origin: Literal["simulated", "measured"]
    baseline_us: float
    planned_us: float

    def __post_init__(self) -> None:
        for name, time_us in (("baseline_us", self.baseline_us), ("planned_us", self.planned_us)):
            require(0 <= time_us < math.inf, PlanError, f"{name} must be a time of 0 or more; found {time_us}.")


class Plan(Value, frozen=True, kw_only=True):
    """Directives for one step (`step_fingerprint`) on one machine, with the verdict, NO_VERDICT if nobody judged the plan.

    An empty plan changes nothing.
    """

    step_name: str = ""
    step_fingerprint: str = ""
    machine: str = ""
    verdict: Verdict = msgspec.field(default_factory=lambda: "NO_VERDICT")  # written to the file, unlike a default
    summary: str = ""
    expectation: Expectation | None = None
    directives: tuple[Directive, ...] = ()
    refusals: tuple[Refusal, ...] = ()

    def __post_init__(self) -> None:
        check_types(self, PlanError)
        for number, directive in enumerate(self.directives):
            where = f"Directive {number} of the plan"
            check_types(directive, PlanError, where)
            for part in (directive.match, *directive.controls):
                check_types(part, PlanError, where)

    def controls_of(self, step: Step) -> tuple[tuple[Control, ...], ...]:
        """Return, for each operation of `step`, the controls of every directive that matches it, in the plan's order."""
        controls: dict[int, tuple[Control, ...]] = {}
        for directive in self.directives:
            for index in directive.match.accepted(step):
                controls[index] = (*controls.get(index, ()), *directive.controls)
        return tuple(controls.get(index, ()) for index in range(len(step.operations)))

    def check_step(self, step: Step) -> None:
        """Raise `PlanError` if the plan cannot be applied to `step` because one of its directives would do nothing.

        A plan of another step is applied if every directive matches (`remarks_on` reports that), unless it names
        operations by number, which mean nothing in another step, or has no directives.
        """
        self.refuse_for_steps()
        is_other = self._is_of_another(step)
        by_number = any(directive.match.operations is not None for directive in self.directives)
        if is_other and (by_number or not self.directives):
            raise PlanError(
                f"The plan was made for step '{shown(self.step_name)}' ({self.step_fingerprint}), not for "
                f"'{shown(step.name)}' "
                f"({step.fingerprint()}){', and names operations by number' if by_number else ''}. "
                f"Run `counterpoint tune` on this step."
            )
        for number, directive in enumerate(self.directives):
            problem = _why_idle(directive.match, step, is_other)
            if problem:
                raise PlanError(f"Directive {number} of the plan {problem}. Correct its match, or leave it out.")

    def remarks_on(self, step: Step) -> tuple[str, ...]:
        """Return remarks, one line each, on a plan that matches `step` but was made for another."""
        if not self._is_of_another(step):
            return ()
        remarks = [
            (
                f"The plan was made for step '{shown(self.step_name)}' ({self.step_fingerprint}), and this is "
                f"'{shown(step.name)}' ({step.fingerprint()}). Every directive matches here; the plan's expected "
                "times are those of the other step."
            )
        ]
        for number, directive in enumerate(self.directives):
            count = len(directive.match.candidates(step)) if directive.match.ordinals else 0
            beyond = [ordinal for ordinal in directive.match.ordinals or () if ordinal >= count]
            if beyond:
                remarks.append(
                    f"Directive {number}: this step has {count} of '{shown(_others(directive.match))}', so "
                    f"numbers {format_numbers(beyond, NUM_SHOWN)} match nothing here."
                )
        return tuple(remarks)

    def _is_of_another(self, step: Step) -> bool:
        return bool(self.step_fingerprint) and self.step_fingerprint != step.fingerprint()

    def refuse_for_steps(self) -> None:
        """Raise `PlanError` for a plan with a control that no operation of a step can take, such as an operator's
        schedule.
        """
        for number, directive in enumerate(self.directives):
            for control in directive.controls:
                if "step" in control.refused_by:
                    raise PlanError(
                        f"Directive {number} of the plan holds a {control.tag} for '{shown(directive.match.name)}'; "
                        f"{control.refused_by['step']}. Leave it out here."
                    )

    def _in_short(self) -> str:
        directives = format_count(len(self.directives), "directive")
        step, summary = shortened(self.step_name), shortened(self.summary)
        return f"{self.verdict} for {step!r} on {self.machine!r}: {summary}; {directives}, {len(self.refusals)} left out"

    def _repr_html_(self) -> str:
        """Return what notebooks show of the plan: the verdict, and each directive with its reason."""
        lines = (
            f"{', '.join(control.describe() for control in each.controls)} on "
            f"{each.match.shortened().describe(NUM_SHOWN)}: {each.reason}"
            for each in self.directives
        )
        return html_list(f"{self.verdict}: {self.summary or 'this plan changes nothing'}", lines)


def _others(match: Match) -> str:
    """Describe what the ordinals of a match count."""
    return msgspec.structs.replace(match, ordinals=None).describe(NUM_SHOWN)


def _why_idle(match: Match, step: Step, is_other: bool) -> str:
    """Return why a directive would do nothing to `step`, or not all that its numbers say; empty if it does all."""
    where = f"step '{shown(step.name)}'"
    beyond = [each for each in match.operations or () if not 0 <= each < len(step.operations)]
    if beyond:
        return f"names operation {beyond[0]}, and {where} has operations 0 to {len(step.operations) - 1}"
    candidates = match.candidates(step)
    if not candidates or match.ordinals == ():
        names = {operation.name for operation in step.operations}
        close = "" if any(map(match.accepts_name, names)) else nearest(match.name, names)
        hint = f"; the nearest name there is '{shown(close)}'" if close else ""
        return f"matches none of the {len(step.operations)} operations of {where}{hint}"
    missing = [ordinal for ordinal in match.ordinals or () if ordinal >= len(candidates)]
    if missing and (not is_other or len(missing) == len(match.ordinals or ())):
        return (
            f"names number {missing[0]} of '{shown(_others(match))}', and {where} has {len(candidates)} of "
            f"them, numbers 0 to {len(candidates) - 1}"
        )
    return ""


LEAVE_IT = Plan()


def load_plan(path: Path | str) -> Plan:
    """Read a plan from TOML. Raises `PlanError`."""
    require_kind(path, (str, Path), "load_plan takes a path", "Pass the path of a plan file (.toml).")
    return read_toml(path, Plan, PlanError)


def save_plan(plan: Plan, path: Path | str) -> None:
    """Write a plan as TOML. Raises `PlanError` if the file cannot be written, if its name does not end in .toml, or if it
    holds something other than a plan.
    """
    require_kind(
        plan,
        Plan,
        "the first argument of save_plan must be a Plan",
        "Pass the plan, then the path: save_plan(tuning.plan, path).",
    )
    save_toml(path, plan, PLAN, PlanError)
