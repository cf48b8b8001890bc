"""Translates a plan into the launch filter's rules, which match kernel names.

An eager launch has only a name: no place in a step, no process group, no size. If the step is known, the operations that a
plan's directives match are translated to names. If names cannot express what the plan means, a cap is refused, because it
would slow other kernels. A priority or a head start has an effect only if there is something to race. So all launches of
that name get it, or all that communicate if the plan means a collective, and a remark says so.

This module knows nothing of the layout of the control block, nor of how the driver handles a rule.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from counterpoint.controls import Carveout, CommunicationCtas, Control, HeadStart, Priority, ResidencyCap
from counterpoint.errors import PlanError, shown
from counterpoint.plan import NUM_SHOWN, Directive, Match, Plan, Refusal
from counterpoint.step import CollectiveKind, Copy, OperationKind, Step
from counterpoint.traces.classify import classify_kernel, communication_patterns
from counterpoint.units import format_bytes, format_count
from counterpoint.value import Value, require


class FilterRule(Value, frozen=True, kw_only=True):
    """One line of the filter's table: which kernels it is for, and how to change their launches; None changes nothing.

    `dynamic_shared_bytes` of 0 leaves a kernel's as they are; without `ctas_per_sm` the rule sets the carveout alone.
    `pattern` must match the whole name, as the driver reports it or demangled: `*` and `?` as in a shell; a backslash before
    either (or before a backslash) makes it literal. If several rules set the same control, the last one counts. `kind`
    restricts a rule to kernels that some rule marks as collectives with `is_collective`, or to all others. The next head
    start waits for a launch that matches a rule with `is_collective`.
    """

    pattern: str
    kind: OperationKind | None = None
    dynamic_shared_bytes: int | None = None
    ctas_per_sm: int | None = None
    carveout_percent: int | None = None
    priority: int | None = None
    hold_us: float | None = None
    is_collective: bool = False

    def __post_init__(self) -> None:
        require(bool(self.pattern), PlanError, "A rule of the launch filter needs a pattern; found an empty one. Use '*'.")
        require(
            self.kind != "copy",
            PlanError,
            "A rule of the launch filter must be for kernels; found the kind 'copy'. Leave it out.",
        )
        require(
            0 <= (self.dynamic_shared_bytes or 0) < 1 << 31 and -1 <= (self.carveout_percent or 0) <= 100,
            PlanError,
            f"A rule needs 0 or more bytes and a carveout of -1 to 100; found {self.dynamic_shared_bytes} and "
            f"{self.carveout_percent}.",
        )
        if self.hold_us is not None:
            HeadStart(hold_us=self.hold_us)  # the control knows its limits
        if self.priority is not None:
            Priority(priority=self.priority)

    @property
    def target(self) -> str:
        """The kernels that the rule is for, in words for a report."""
        if self.pattern == "*" and self.kind is not None:
            return f"{self.kind} kernels"
        return self.pattern if self.kind is None or self.is_collective else f"{self.pattern} ({self.kind})"


class Translation(Value, frozen=True, kw_only=True):
    """The rules for a plan, what names cannot express of it, and which rules reach more launches than the plan chose."""

    rules: tuple[FilterRule, ...]
    refusals: tuple[Refusal, ...] = ()
    remarks: tuple[str, ...] = ()


def translate(plan: Plan, step: Step | None = None) -> Translation:
    """Translate a plan's directives into rules by name.

    Raises `PlanError` if the plan cannot be applied to `step`, names operations by number without a step, or holds
    operators' schedules: nothing of such a directive could be applied, and a job may run for days before anybody looks.
    Controls that the filter does not apply (communication CTAs, transport) become neither rules nor refusals; of these, only
    communication CTAs hold for the whole process, whatever operations a directive names.
    """
    if step is None:
        plan.refuse_for_steps()
    else:
        plan.check_step(step)
    rules: list[FilterRule] = []
    refusals: list[Refusal] = []
    remarks = list(plan.remarks_on(step)) if step is not None else []
    for number, directive in enumerate(plan.directives):
        if step is None and any(not isinstance(control, CommunicationCtas) for control in directive.controls):
            _check_has_names(number, directive)
        controls = tuple(control for control in directive.controls if is_by_launch(control))
        if not controls:
            continue
        part = _by_match(directive.match, controls) if step is None else _by_step(directive, controls, step)
        rules.extend(part.rules)
        refusals.extend(part.refusals)
        remarks.extend(part.remarks)
    rules = _with_joined_caps(rules)
    if any(rule.hold_us is not None or rule.kind is not None for rule in rules):
        rules = [FilterRule(pattern=pattern, is_collective=True) for pattern in communication_patterns()] + rules
    return Translation(rules=tuple(rules), refusals=tuple(refusals), remarks=tuple(remarks))


def _with_joined_caps(rules: Sequence[FilterRule]) -> list[FilterRule]:
    """Return the rules; a cap moves to a later rule that sets only the carveout of the same kernels, because the driver sets
    both at once.
    """
    found: list[FilterRule] = []
    capped: dict[tuple[str, OperationKind | None], int] = {}  # the place of the last cap
    for rule in rules:
        kernels, joined = (rule.pattern, rule.kind), rule
        if rule.dynamic_shared_bytes == 0 and kernels in capped:
            cap = found[capped[kernels]]
            joined = replace(rule, dynamic_shared_bytes=cap.dynamic_shared_bytes, ctas_per_sm=cap.ctas_per_sm)
            found[capped[kernels]] = replace(cap, dynamic_shared_bytes=None, ctas_per_sm=None, carveout_percent=None)
        if joined.ctas_per_sm is not None:
            capped[kernels] = len(found)
        found.append(joined)
    return [rule for rule in found if rule != FilterRule(pattern=rule.pattern, kind=rule.kind)]


def literal_pattern(name: str) -> str:
    """Return a pattern that matches only this name."""
    return "".join(f"\\{letter}" if letter in "\\*?" else letter for letter in name)


def _check_has_names(number: int, directive: Directive) -> None:
    operations = directive.match.operations
    if operations is None:
        return
    shown = ", ".join(map(str, operations[:NUM_SHOWN])) + (", ..." if len(operations) > NUM_SHOWN else "")
    controls = " and ".join(control.tag for control in directive.controls)
    raise PlanError(
        f"Directive {number} of the plan ({controls}) names operations by number ({shown}), but a job has only "
        "names. Give the trace or step from which the plan was made: --step TRACE."
    )


def _by_match(match: Match, controls: Sequence[Control]) -> Translation:
    """Translate a directive without the step: it can match by name, kind and collective only."""
    reason = ""
    if match.kind == "copy":
        reason = "it matches copies, but the launch filter sees only kernels"
    elif "[" in match.name:
        reason = "the launch filter supports only * and ?, not [...]; give the trace or step from which the plan was made"
    if reason:
        return Translation(rules=(), refusals=tuple(_refusal(control, match.name, reason) for control in controls))
    narrower = beyond_names(match)
    refusals: tuple[Refusal, ...] = ()
    remarks: tuple[str, ...] = ()
    fitting = list(controls)
    if narrower:
        target = match.describe(NUM_SHOWN)
        means = f"the plan matches {narrower}, but eager launches have only names"
        caps = [control for control in controls if isinstance(control, ResidencyCap | Carveout)]
        refusals = tuple(_refusal(cap, target, means) for cap in caps)
        fitting = [control for control in controls if control not in caps]
        reached = "all collectives" if match.name == "*" else "all of that name"
        remarks = tuple(f"{control.tag} on '{shown(target)}': {means}; {reached} get it" for control in fitting)
    kind: OperationKind | None = "communication" if match.collective else match.kind
    rules = (_rule(match.name.replace("\\", "\\\\"), kind, fitting),) if fitting else ()
    return Translation(rules=rules, refusals=refusals, remarks=remarks)


def beyond_names(match: Match) -> str:
    """Return what a match distinguishes that kernel names do not, in words; empty if there is nothing."""
    told: list[str] = []
    if match.collective is not None and not _is_kind_of(match.name, match.collective):
        told.append(match.collective)
    if match.ordinals is not None:
        told.append(f"{format_count(len(match.ordinals), 'launch', 'launches')} by number")
    if match.process_group is not None:
        told.append(f"process group {match.process_group}")
    if match.num_bytes is not None:
        told.append(format_bytes(match.num_bytes))
    return " and ".join(told)


def _is_kind_of(name: str, collective: CollectiveKind) -> bool:
    """Return whether a name, or every name that a pattern matches, is that of such a collective's kernel."""
    return classify_kernel(name.rstrip("*")).collective == collective


def _by_step(directive: Directive, controls: Sequence[Control], step: Step) -> Translation:
    """Translate a directive with the step: into the names of the kernels that it accepts."""
    rules: list[FilterRule] = []
    refusals: list[Refusal] = []
    remarks: list[str] = []
    launches: dict[str, list[bool]] = {}  # by name: is this launch chosen?
    accepted = frozenset(directive.match.accepted(step))
    for index, operation in enumerate(step.operations):
        is_chosen = index in accepted
        if is_chosen and isinstance(operation, Copy):
            reason = "it is a copy, but the launch filter sees only kernels"
            refusals.extend(_refusal(control, operation.name, reason) for control in controls)
        elif not isinstance(operation, Copy):
            launches.setdefault(operation.name, []).append(is_chosen)
    for name, chosen in launches.items():
        if not any(chosen):
            continue
        fitting = list(controls)
        if not all(chosen):
            shared = f"the plan matches {sum(chosen)} of the {format_count(len(chosen), 'launch', 'launches')} of this name"
            caps = [control for control in controls if isinstance(control, ResidencyCap | Carveout)]
            refusals.extend(_refusal(cap, name, f"{shared}, but eager launches have only names") for cap in caps)
            fitting = [control for control in controls if control not in caps]
            remarks.extend(f"{control.tag} on '{shown(name)}': {shared}; all of them get it" for control in fitting)
        if fitting:
            rules.append(_rule(literal_pattern(name), None, fitting))
    return Translation(rules=tuple(rules), refusals=tuple(dict.fromkeys(refusals)), remarks=tuple(remarks))


def _rule(pattern: str, kind: OperationKind | None, controls: Sequence[Control]) -> FilterRule:
    """Return one rule with all the controls; of two equal ones the last one counts, as everywhere a plan is applied."""
    fields = {name: value for control in controls for name, value in _fields(control).items()}
    if "carveout_percent" in fields:
        fields.setdefault("dynamic_shared_bytes", 0)
    return FilterRule(pattern=pattern, kind=kind, **fields)  # type: ignore[arg-type]


def is_by_launch(control: Control) -> bool:
    """Return whether the launch filter applies the control, launch by launch."""
    return bool(_fields(control))


def _fields(control: Control) -> dict[str, int | float]:
    """Return the rule's fields that a control sets; none if the control applies to the process group, not to a launch."""
    match control:
        case ResidencyCap():
            return {name: getattr(control, name) for name in ("ctas_per_sm", "dynamic_shared_bytes", "carveout_percent")}
        case Carveout():
            return {"carveout_percent": control.percent}
        case Priority():
            return {"priority": control.priority}
        case HeadStart():
            return {"hold_us": control.hold_us}
        case _:
            return {}


def _refusal(control: Control, target: str, reason: str) -> Refusal:
    return Refusal(control=control.tag, target=target, reason=reason)
