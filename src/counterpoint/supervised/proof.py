"""Proof of what became of a plan in a job's processes: asked, applied, verified, refused, from the filters' own
counters.

A cap is verified if the driver's occupancy query, asked for the capped launch, allows no more CTAs than the plan. A
priority and a head start are verified by launches: the driver accepted the launch with the attribute, or the hold before
it. A limit on a collective's CTAs is a setting of NCCL and is verified by the launched grids.
"""

from collections.abc import Collection, Iterable, Sequence

from msgspec.structs import replace

from counterpoint.controls import Carveout, CommunicationCtas, Control, HeadStart, Priority, ResidencyCap
from counterpoint.engagement import Engagement, State
from counterpoint.errors import shown
from counterpoint.integrations.paths import PathCounts
from counterpoint.launch_filter.control_block import FilterState, RuleCounters, SeenFunction
from counterpoint.launch_filter.rules import FilterRule
from counterpoint.mismatch import nearest
from counterpoint.plan import Plan, Refusal
from counterpoint.supervised.settings import Setting, Totals, add_counters
from counterpoint.traces.classify import is_communication
from counterpoint.units import format_bytes, format_count
from counterpoint.value import Value

WARPS_BESIDE = 4  # NCCL starts up to this many warps beyond NCCL_NTHREADS for synchronization (544 to 640 threads for 512)


class ControlProof(Value, frozen=True, kw_only=True):
    """One control in one process: how many launches it matched, how many got it, and the proof."""

    engagement: Engagement
    num_matched: int
    num_applied: int


class ProcessProof(Value, frozen=True, kw_only=True):
    """One process that loaded the filter. `rank` is -1 if the launcher gave it none."""

    pid: int
    rank: int
    num_launches: int
    applied: tuple[ControlProof, ...]
    problem: str = ""


def prove_process(state: FilterState, plan: Plan, totals: Totals) -> ProcessProof:
    """Return what became of a setting (`totals` are all its counts) and of a plan's variables in one process."""
    counted = tuple(zip(totals.setting.rules, totals.counters, strict=True))
    idle = {rule.pattern for rule, counters in counted if not counters.num_matched and not rule.is_collective}
    launched = {function.name for function in state.functions} if len(idle) == 1 else set()  # otherwise no name is misspelt
    by_rule = [entry for rule, counters in counted for entry in prove_rule(rule, counters, launched)]
    settings = [
        _prove_setting(control, state.functions)
        for directive in plan.directives
        for control in directive.controls
        if isinstance(control, CommunicationCtas) or "job" in control.refused_by
    ]
    return ProcessProof(
        pid=state.pid,
        rank=state.rank,
        num_launches=state.num_launches,
        applied=(*by_rule, *prove_paths(totals), *settings),
        problem=state.problem,
    )


def prove_paths(totals: Totals) -> list[ControlProof]:
    """Return each control of the applied paths: calls on which it took effect, of all calls."""
    counted = totals.paths or tuple(PathCounts(control=tag, target=name) for tag, name in totals.setting.paths.targets)
    return [_prove_path(counts) for counts in counted]


def _prove_path(counts: PathCounts) -> ControlProof:
    is_met = counts.num_applied > 0
    found = f"{format_bytes(counts.num_bytes)} sent, {format_bytes(counts.symmetric_bytes)} held"
    if counts.num_in_place:
        found += f", {counts.num_in_place:,} in place"
    if counts.num_replayed:
        found += f", {counts.num_replayed:,} replayed"
    if counts.num_in_operators:
        found += f", {counts.num_in_operators:,} by the library within operators"
    engagement = Engagement(
        control=counts.control,
        target=counts.target,
        state="verified" if is_met else "refused" if counts.problem else "failed",
        asked="by copies",
        found=found if is_met else "",
        reason="" if is_met else why_no_copies(counts),
    )
    num_calls = counts.num_by_copies + counts.num_by_library
    return ControlProof(engagement=engagement, num_matched=num_calls, num_applied=counts.num_applied)


def why_no_copies(counts: PathCounts) -> str:
    """Return why nothing went by copies."""
    if counts.problem:
        return counts.problem
    if counts.num_by_library:
        why = f": {counts.reason}" if counts.reason else ", most likely because they are small"
        return f"all {format_count(counts.num_by_library, 'call')} stayed with the library{why}"
    return "the job made no such call while this was in force"


def count_setting(setting: Setting, state: FilterState, kept: Totals) -> Totals:
    """Return all counts of a process for a setting: what it saved when it swapped, and what its filter holds now."""
    counters = [RuleCounters() for _ in setting.rules]
    of_kept = (kept.setting.rules, kept.counters) if kept.setting == setting else ((), ())
    for rules, found in (of_kept, (state.rules, state.counters)):
        if rules == setting.rules and found:
            counters = [add_counters(*pair) for pair in zip(counters, found, strict=True)]
    return Totals(setting=setting, counters=tuple(counters), paths=kept.paths if kept.setting == setting else ())


def prove_rule(rule: FilterRule, counters: RuleCounters, launched: Collection[str] = ()) -> list[ControlProof]:
    """Return each control of one rule. If it matched nothing, the reason names the nearest of the `launched` kernels."""
    entries = _prove_controls(rule, counters)
    close = "" if counters.num_matched or not entries else nearest(rule.pattern.replace("\\", ""), launched)
    if not close:
        return entries
    reason = f"no launch matched; the nearest kernel is '{shown(close)}'"
    return [replace(each, engagement=replace(each.engagement, reason=reason)) for each in entries]


def _prove_controls(rule: FilterRule, counters: RuleCounters) -> list[ControlProof]:
    entries: list[ControlProof] = []
    if rule.ctas_per_sm is None and rule.dynamic_shared_bytes == 0 and rule.carveout_percent is not None:
        carveout = Carveout(percent=rule.carveout_percent)
        entries.append(_by_launches(rule, counters, carveout, counters.num_capped))
    elif rule.dynamic_shared_bytes is not None:
        entries.append(_prove_cap(rule, counters))
    if rule.priority is not None:
        priority = Priority(priority=rule.priority)
        entries.append(_by_launches(rule, counters, priority, counters.num_prioritized))
    if rule.hold_us is not None:
        entries.append(_by_launches(rule, counters, HeadStart(hold_us=rule.hold_us), counters.num_held))
    return entries


def _prove_cap(rule: FilterRule, counters: RuleCounters) -> ControlProof:
    cap = ResidencyCap(
        ctas_per_sm=rule.ctas_per_sm or 1,
        dynamic_shared_bytes=rule.dynamic_shared_bytes or 0,
        carveout_percent=-1 if rule.carveout_percent is None else rule.carveout_percent,
    )
    by_launches = _by_launches(rule, counters, cap, counters.num_capped)
    found = counters.residency_found
    if not counters.num_capped or found is None or rule.ctas_per_sm is None:
        return by_launches
    is_met = found <= rule.ctas_per_sm
    engagement = replace(
        by_launches.engagement,
        state="verified" if is_met else "failed",
        found=f"{format_count(found, 'CTA')} per SM",
        reason="" if is_met else "the driver still allows more CTAs per SM",
    )
    return replace(by_launches, engagement=engagement)


def _by_launches(rule: FilterRule, counters: RuleCounters, control: Control, num_applied: int) -> ControlProof:
    """Return verified if launches were changed; otherwise what prevents it."""
    state: State = "verified" if num_applied else "refused" if counters.refusal else "failed"
    engagement = Engagement(
        control=control.tag,
        target=rule.target,
        state=state,
        asked=control.describe(),
        found=control.describe() if num_applied else "",
        reason="" if num_applied else _why_not(counters, control),
    )
    return ControlProof(engagement=engagement, num_matched=counters.num_matched, num_applied=num_applied)


def _why_not(counters: RuleCounters, control: Control) -> str:
    if not counters.num_matched:
        return "no launch matched; the plan may belong to another step"
    if counters.refusal:
        return counters.refusal
    return "no collective was launched just before it" if isinstance(control, HeadStart) else "no launch was changed"


def refused(refusals: Iterable[Refusal]) -> list[ControlProof]:
    """Return the controls of a plan that could not even be passed to the filter."""
    return [
        ControlProof(
            engagement=Engagement(
                control=refusal.control, target=refusal.target, state="refused", asked=refusal.control, reason=refusal.reason
            ),
            num_matched=0,
            num_applied=0,
        )
        for refusal in refusals
    ]


def _prove_setting(control: Control, functions: Sequence[SeenFunction]) -> ControlProof:
    """Prove a control that is no rule of the filter, from the launched kernels."""
    collectives = [function for function in functions if is_communication("kernel", function.name)]
    num_launches = sum(function.num_launches for function in collectives)
    state: State = "verified"
    found, reason, num_applied = "", "", num_launches
    if not isinstance(control, CommunicationCtas):
        state, reason, num_applied = "refused", control.refused_by["job"], 0
    elif not collectives:
        state, reason = "failed", "no collective was launched"
    else:
        most_ctas = max(function.grid[0] for function in collectives)
        most_threads = max(function.block[0] for function in collectives)
        found = f"{format_count(most_ctas, 'CTA')} of {most_threads} threads"
        threads = control.num_threads
        if most_ctas > control.max_ctas or (threads is not None and most_threads > threads + 32 * WARPS_BESIDE):
            state, reason, num_applied = "failed", "the process group was created with other limits", 0
    engagement = Engagement(
        control=control.tag,
        target="all collectives",
        state=state,
        asked=control.describe(),
        found=found,
        reason=reason,
    )
    return ControlProof(engagement=engagement, num_matched=num_launches, num_applied=num_applied)
