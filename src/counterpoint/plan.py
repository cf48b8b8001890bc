"""A plan: the controls chosen for the operations of one step, each with its reason, or none with the verdict.

A plan knows nothing of how its controls are applied. It is saved as TOML that a person can read and edit. A control that
cannot help is not in the plan: it is listed under `refusals` with the reason.
"""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import msgspec

from counterpoint.controls import Control
from counterpoint.errors import PlanError, require_kind, shown
from counterpoint.step import CollectiveKind, Operation, OperationKind, Step
from counterpoint.value import Value, read_toml, require, save_toml

Verdict = Literal["GAIN", "NO_GAIN"]


class Match(Value, frozen=True, kw_only=True):
    """Which operations a directive is for: a shell pattern on the name, a kind, a collective, the operations' numbers.

    All that is given must hold.
    """

    name: str = "*"
    kind: OperationKind | None = None
    collective: CollectiveKind | None = None
    operations: tuple[int, ...] | None = None

    def accepts(self, index: int, operation: Operation) -> bool:
        """Whether operation number `index` of the step is meant."""
        return (
            (self.kind is None or operation.kind == self.kind)
            and (self.collective is None or getattr(operation, "collective", None) == self.collective)
            and (self.operations is None or index in self.operations)
            and self.accepts_name(operation.name)
        )

    def accepts_name(self, name: str) -> bool:
        """Whether the pattern fits, or is the name itself, which may hold a pattern's characters."""
        return name == self.name or fnmatchcase(name, self.name)


class Directive(Value, frozen=True, kw_only=True):
    """Controls for the operations that `match` accepts, and why."""

    match: Match
    controls: tuple[Control, ...]
    reason: str


class Refusal(Value, frozen=True, kw_only=True):
    """A control that was considered for `target` and left out, and why."""

    control: str
    target: str
    reason: str


class Expectation(Value, frozen=True, kw_only=True):
    """What was predicted or measured when the plan was made; `origin` says which."""

    origin: Literal["simulated", "measured"]
    baseline_us: float
    planned_us: float


class Plan(Value, frozen=True, kw_only=True):
    """Directives for one step (`step_fingerprint`) on one machine, with the verdict. An empty plan leaves all as it is."""

    step_name: str = ""
    step_fingerprint: str = ""
    machine: str = ""
    verdict: Verdict = msgspec.field(default_factory=lambda: "NO_GAIN")  # unlike a default, it is written
    summary: str = ""
    expectation: Expectation | None = None
    directives: tuple[Directive, ...] = ()
    refusals: tuple[Refusal, ...] = ()

    def controls_for(self, index: int, operation: Operation) -> tuple[Control, ...]:
        """The controls of every directive that matches, in the plan's order."""
        return tuple(
            control
            for directive in self.directives
            if directive.match.accepts(index, operation)
            for control in directive.controls
        )

    def check_step(self, step: Step) -> None:
        """Raise `PlanError` if this plan was made for another step, or a directive of it would do nothing to `step`."""
        self.refuse_for_steps()
        if self.step_fingerprint and self.step_fingerprint != step.fingerprint():
            raise PlanError(
                f"The plan was made for step '{shown(self.step_name)}' ({self.step_fingerprint}), not for "
                f"'{shown(step.name)}' "
                f"({step.fingerprint()}). Run `counterpoint tune` on this step."
            )
        for number, directive in enumerate(self.directives):
            beyond = [each for each in directive.match.operations or () if not 0 <= each < len(step.operations)]
            if beyond:
                raise PlanError(
                    f"Directive {number} of the plan names operation {beyond[0]}, and step '{shown(step.name)}' "
                    f"has operations 0 "
                    f"to {len(step.operations) - 1}. Correct its match, or leave it out."
                )
            if not any(directive.match.accepts(index, operation) for index, operation in enumerate(step.operations)):
                raise PlanError(
                    f"Directive {number} of the plan matches none of the {len(step.operations)} operations of step "
                    f"'{shown(step.name)}'. Correct its match, or leave it out."
                )

    def refuse_for_steps(self) -> None:
        """Raise `PlanError` for a plan with a control that is for no operation of a step, such as an operator's schedule."""
        for number, directive in enumerate(self.directives):
            for control in directive.controls:
                if "step" in control.refused_by:
                    raise PlanError(
                        f"Directive {number} of the plan holds a {control.tag} for '{shown(directive.match.name)}'; "
                        f"{control.refused_by['step']}. Leave it out here."
                    )


LEAVE_IT = Plan()


def load_plan(path: Path | str) -> Plan:
    """Read a plan from TOML. Raises `PlanError`."""
    require_kind(path, (str, Path), "load_plan takes a path", "Pass that of a plan file (.toml).")
    return read_toml(path, Plan, PlanError)


def check_plan_name(path: Path) -> None:
    """Raise `PlanError` for a file whose name says that it holds something else than TOML."""
    require(path.suffix != ".json", PlanError, f"Plans are TOML; found the name {shown(path.name)}. End it with .toml.")


def save_plan(plan: Plan, path: Path | str) -> None:
    """Write a plan as TOML. Raises `PlanError` if the file cannot be written, or its name says that it is JSON."""
    require_kind(plan, Plan, "save_plan takes a Plan first", "Pass the plan, then the path: save_plan(tuning.plan, path).")
    check_plan_name(Path(path))
    save_toml(path, plan, "plan", PlanError)
