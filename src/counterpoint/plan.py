"""A plan: the controls chosen for the operations of one step, each with its reason, or none with the verdict.

A plan knows nothing of how its controls are applied. It is saved as TOML that a person can read and edit. A control that
cannot help is not in the plan: it is listed under `refusals` with the reason.
"""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import msgspec

from counterpoint.errors import PlanError, require_kind, shown
from counterpoint.schedule.description import ScheduleDescription
from counterpoint.step import Operation, OperationKind, Step, TransportKind
from counterpoint.units import format_count
from counterpoint.value import Value, read_toml, require, save_toml

Verdict = Literal["GAIN", "NO_GAIN"]
HOLDS_US = (5.0, 20.0)  # head starts worth a try: the two that were measured on H200s (tests/data/head_start_h200.csv)


class ResidencyCap(Value, frozen=True, kw_only=True, tag_field="control", tag="residency_cap"):
    """At most `ctas_per_sm` CTAs of the kernel on an SM, by raising its dynamic shared memory to `dynamic_shared_bytes`.

    `carveout_percent` raises the SM's shared-memory carveout to match; without it the freed room is not usable.
    """

    ctas_per_sm: int
    dynamic_shared_bytes: int
    carveout_percent: int = 100

    def __post_init__(self) -> None:
        require(self.ctas_per_sm >= 1, PlanError, f"A residency cap must allow at least 1 CTA; found {self.ctas_per_sm}.")
        require(
            self.dynamic_shared_bytes >= 0 and -1 <= self.carveout_percent <= 100,
            PlanError,
            f"A residency cap needs 0 or more bytes and a carveout of -1 to 100; found {self.dynamic_shared_bytes} and "
            f"{self.carveout_percent}.",
        )


class Priority(Value, frozen=True, kw_only=True, tag_field="control", tag="priority"):
    """Launch priority as the driver counts it: a lower number is greater, 0 is the least."""

    priority: int

    def __post_init__(self) -> None:
        require(self.priority <= 0, PlanError, f"A priority is 0 or lower (lower is greater); found {self.priority}.")


class CommunicationCtas(Value, frozen=True, kw_only=True, tag_field="control", tag="communication_ctas"):
    """How many CTAs (NCCL `max_ctas`), and threads in each (`NCCL_NTHREADS`; None leaves them), a collective runs with."""

    max_ctas: int
    num_threads: int | None = None

    def __post_init__(self) -> None:
        require(1 <= self.max_ctas <= 64, PlanError, f"max_ctas must be from 1 to 64; found {self.max_ctas}.")
        require(
            self.num_threads is None or (64 <= self.num_threads <= 512 and self.num_threads % 32 == 0),
            PlanError,
            f"num_threads must be a multiple of 32 from 64 to 512; found {self.num_threads}.",
        )


class Transport(Value, frozen=True, kw_only=True, tag_field="control", tag="transport"):
    """Run a collective by kernels on SMs or by copy engines."""

    transport: TransportKind


class HeadStart(Value, frozen=True, kw_only=True, tag_field="control", tag="head_start"):
    """Hold the computation stream for `hold_us` before the matched kernel when a collective was launched just before it."""

    hold_us: float

    def __post_init__(self) -> None:
        require(0 < self.hold_us <= 1000, PlanError, f"A head start is above 0 and at most 1000 us; found {self.hold_us}.")


class ScheduleChoice(Value, frozen=True, kw_only=True, tag_field="control", tag="copy_schedule"):
    """Run an operator of `counterpoint.ops` by this copy schedule; `sequential` is the library's collective and a matmul."""

    schedule: ScheduleDescription


Control = ResidencyCap | Priority | CommunicationCtas | Transport | HeadStart | ScheduleChoice
FOR_OPERATORS = "it is for operators: counterpoint.ops.use_plan takes it"


def describe_control(control: Control) -> str:
    """A control in a few words, the same in every report and proof."""
    match control:
        case ResidencyCap():
            how = f"{control.dynamic_shared_bytes:,} B of shared memory, carveout {control.carveout_percent} %"
            return f"cap of {format_count(control.ctas_per_sm, 'CTA')} per SM ({how})"
        case Priority():
            return f"priority {control.priority}"
        case CommunicationCtas():
            threads = f" of {control.num_threads} threads" if control.num_threads else ""
            return f"at most {format_count(control.max_ctas, 'CTA')}{threads}"
        case Transport():
            return f"transport {control.transport}"
        case HeadStart():
            return f"head start {control.hold_us:g} us"
        case ScheduleChoice():
            return f"copy schedule {control.schedule.label()}"


def control_tag(control: Control) -> str:
    """The name that files and reports call a control by, as in "residency_cap"."""
    return str(control.__struct_config__.tag)


class Match(Value, frozen=True, kw_only=True):
    """Which operations a directive is for: a shell pattern on the name, a kind, the operations' numbers; all must hold."""

    name: str = "*"
    kind: OperationKind | None = None
    operations: tuple[int, ...] | None = None

    def accepts(self, index: int, operation: Operation) -> bool:
        """Whether operation number `index` of the step is meant."""
        return (
            (self.kind is None or operation.kind == self.kind)
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
        self.refuse_schedules()
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

    def refuse_schedules(self) -> None:
        """Raise `PlanError` for a plan of operators' schedules: nothing else can apply them."""
        for number, directive in enumerate(self.directives):
            if any(isinstance(control, ScheduleChoice) for control in directive.controls):
                raise PlanError(
                    f"Directive {number} of the plan holds a copy_schedule for '{shown(directive.match.name)}'; "
                    f"{FOR_OPERATORS}. "
                    "Leave it out here."
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
