"""Proposes controls for a step: directives with their reasons, and refusals with theirs.

A control is proposed only if the baseline's timeline shows something for it to act on and the machine supports it. The
search then decides whether it pays.
"""

import contextlib
from collections.abc import Iterator, Sequence

from counterpoint.controls import Applier, CommunicationCtas, HeadStart, LightKernel, Priority, ResidencyCap
from counterpoint.errors import OccupancyError, StepError
from counterpoint.footprints import communication_footprint
from counterpoint.machine import Gpu, Machine
from counterpoint.occupancy import cap_shared_bytes, largest_residency_beside, residency
from counterpoint.plan import LEAVE_IT, Directive, Match, Plan, Refusal
from counterpoint.planner.carveouts import propose_carveouts
from counterpoint.planner.contention import Contention, find_rivals
from counterpoint.planner.light_kernels import propose_light_kernels
from counterpoint.planner.movements import ALONE, propose_overlaps, propose_own_streams, propose_transports
from counterpoint.planner.proposal import ALL_COLLECTIVES, Candidate, Proposal, one, proposal, refusal
from counterpoint.sim.effects import light_footprint
from counterpoint.step import Footprint, Kernel, Step
from counterpoint.units import format_count, format_us
from counterpoint.value import Value

CTA_COUNTS = (4, 8, 16)
HOLDS_US = (5.0, 20.0)  # head starts worth a try: the two that were measured on H200s (tests/data/head_start_h200.csv)
# Caps, measured on 2 H200s with kernels in common use (docs/shaping.md, 2026-11-23)
LEAST_KEPT = 0.75  # of a kernel's CTAs per SM
LEAST_CTA_US = 100.0
PRIORITY_IGNORED = "this driver ignores stream priorities unless DEBUG_HIP_IGNORE_STREAM_PRIORITY=0 is set"
NO_HEAD_STARTS = "head starts need CUDA; the launch filter cannot hold a stream on AMD GPUs"
IN_EVERY_RACE = " in all possible races"


class Blocker(Value, frozen=True, kw_only=True):
    """A kernel that a collective waits for, and what a CTA of that collective takes of an SM.

    `cta_us`: how long a CTA of the kernel takes; None where that is not known.
    """

    name: str
    footprint: Footprint
    communication: Footprint
    is_cooperative: bool = False
    cta_us: float | None = None


def propose(
    step: Step, machine: Machine, contention: Sequence[Contention], plan: Plan = LEAVE_IT, applier: Applier = "step"
) -> Proposal:
    """Return every single control that could act on `step` as it runs under `plan`, and a refusal for each of the
    others.

    `contention` is empty for collectives that no longer run on SMs. Light kernels are proposed only if the `applier` is
    a captured graph, because only a graph can take them. A collective whose group has one rank is no candidate.
    """
    return _together(
        (
            propose_on_sms(step, machine, contention, plan, applier),
            propose_transports(step, machine, plan),
            propose_overlaps(step, machine, plan),
            propose_own_streams(step, machine, plan),
        )
    )


def propose_on_sms(
    step: Step, machine: Machine, contention: Sequence[Contention], plan: Plan = LEAVE_IT, applier: Applier = "step"
) -> Proposal:
    """Return the controls that leave collectives on SMs, as `propose` does."""
    with_peers = [entry for entry in contention if step.collective(entry.collective).group_size > 1]
    light = (propose_light_kernels(step, machine, with_peers),) if applier == "graph" else ()
    parts = (
        *light,
        _priority(step, machine.gpu, with_peers),
        _head_starts(step, machine.gpu, with_peers),
        propose_caps(machine.gpu, _blockers(step, machine.gpu, with_peers, plan)),
        propose_carveouts(step, machine.gpu, with_peers),
        _communication_ctas(step, machine.gpu, with_peers),
    )
    if contention and not with_peers:
        parts = tuple(refusal(each.refusals[0].control, ALL_COLLECTIVES, ALONE) for each in parts)
    return _together(parts)


def _together(parts: Sequence[Proposal]) -> Proposal:
    return proposal(
        (candidate for part in parts for candidate in part.candidates),
        (refused for part in parts for refused in part.refusals),
    )


def propose_unsimulated(step: Step, machine: Machine) -> tuple[Candidate, ...]:
    """Return controls with effects that a simulation cannot predict; the caller measures them. Priority and head starts can
    change the winner of a race, and a cap can make a kernel faster by itself.
    """
    rivals = find_rivals(step)
    if not rivals:
        return ()
    collectives = tuple(step.collectives())
    candidates = list(_head_starts_of(rivals)) if machine.gpu.has_head_starts else []
    if machine.gpu.priority_is_effective:
        reason = "kernels become ready at the same time as collectives; a higher priority places the collectives first"
        controls = (Priority(priority=machine.gpu.greatest_priority),)
        candidates.append(one("priority", "priority", Match(kind="communication", operations=collectives), controls, reason))
    return (*candidates, *_mild_cap(step, machine.gpu, rivals))


def _mild_cap(step: Step, gpu: Gpu, rivals: Sequence[int]) -> Iterator[Candidate]:
    """Yield a cap of one CTA per SM less for the kernel that takes longest of those that race a collective.

    Triton matmuls of some tiles took 6 to 7 % less so, on H100s or H200s (docs/shaping.md).
    """
    kernels = [step.kernel(number) for number in rivals]
    total_us: dict[str, float] = {}
    for each in kernels:
        total_us[each.name] = total_us.get(each.name, 0.0) + (each.lone_us or 0.0)
    longest = max(kernels, key=lambda each: total_us[each.name], default=None)
    if longest is None or not total_us[longest.name]:
        return
    with contextlib.suppress(OccupancyError):  # the GPU cannot run it, or no number of bytes gives that residency
        usual = residency(gpu, longest.footprint).ctas_per_sm
        if 2 <= usual <= -(-longest.footprint.num_ctas // gpu.num_sms):
            reason = f"{usual - 1} instead of {usual} CTAs per SM: some kernels are faster so"
            cap = _cap(gpu, longest, usual - 1, longest.footprint.carveout_percent, reason)
            yield Candidate(family="residency_cap", label=f"a CTA less per SM ({usual - 1})", directives=(cap,))


def _priority(step: Step, gpu: Gpu, contention: Sequence[Contention]) -> Proposal:
    if not any(entry.blockers for entry in contention):
        reason = "no collective waits for another kernel's CTAs, so the launch order does not matter"
        return refusal("priority", ALL_COLLECTIVES, reason if gpu.priority_is_effective else PRIORITY_IGNORED)
    greatest_of_kernels = min((each.priority for each in step.operations if isinstance(each, Kernel)), default=0)
    contention = [entry for entry in contention if step.collective(entry.collective).priority >= greatest_of_kernels]
    if not any(entry.blockers for entry in contention):
        return refusal("priority", ALL_COLLECTIVES, "the job already gives them a greater priority than its kernels")
    waited_us = sum(entry.waited_us for entry in contention)
    match = Match(kind="communication", operations=tuple(entry.collective for entry in contention))
    greatest = gpu.greatest_priority if gpu.priority_is_effective else 0
    return propose_priority(greatest, match, f"collectives wait {format_us(waited_us)} for SMs")


def propose_priority(greatest_priority: int, match: Match, trouble: str, ignored: str = PRIORITY_IGNORED) -> Proposal:
    """Propose the driver's highest priority for the collectives that `match` means. If that is 0, `ignored` is the
    reason for the refusal.
    """
    if greatest_priority >= 0:
        return refusal("priority", ALL_COLLECTIVES, ignored)
    reason = f"{trouble} behind kernels that are still placing CTAs; a higher priority gives them the next free slots"
    return proposal([one("priority", "priority", match, (Priority(priority=greatest_priority),), reason)])


def _head_starts(step: Step, gpu: Gpu, contention: Sequence[Contention]) -> Proposal:
    """Propose head starts for the races that are lost now, and for all possible races, because winning one race can
    cause another.
    """
    if not gpu.has_head_starts:
        return refusal("head_start", "all kernels", NO_HEAD_STARTS)
    racers = tuple(sorted({racer for entry in contention for racer in entry.racers}))
    if not racers:
        reason = "no kernel races a collective for SMs"
        return refusal("head_start", "all kernels", reason)
    return proposal(propose_head_starts(racers, tuple(sorted({*racers, *find_rivals(step)}))))


def propose_head_starts(racers: tuple[int, ...], rivals: tuple[int, ...]) -> Iterator[Candidate]:
    """Propose head starts for the kernels (by number) that win their races now, and for every kernel that may race a
    collective.
    """
    if racers:
        yield from _head_starts_of(racers)
    if len(rivals) > len(racers):
        yield from _head_starts_of(rivals, IN_EVERY_RACE)


def _head_starts_of(kernels: tuple[int, ...], where: str = "") -> Iterator[Candidate]:
    for hold_us in HOLDS_US:
        yield one(
            "head_start",
            f"head start {hold_us:g} us{where}",
            Match(kind="computation", operations=kernels),
            (HeadStart(hold_us=hold_us),),
            "it becomes ready together with a collective and takes the SMs first; this delay lets the "
            "collective start first",
        )


def propose_caps(gpu: Gpu, blockers: Sequence[Blocker]) -> Proposal:
    """Propose caps for kernels that a collective waits for, at the residency that leaves room for the collective, if a
    cap can pay.

    Measurements say when a cap pays (docs/shaping.md). The cap must keep at least three quarters of the kernel's CTAs;
    NCCL's CTA never allows that, a light kernel's does. The kernel's CTAs must also be long, because otherwise few
    collectives wait for them.
    """
    if not blockers:
        return refusal("residency_cap", "all kernels", "no collective waits for another kernel's CTAs to leave")
    directives: list[Directive] = []
    refusals: list[Refusal] = []
    for blocker in blockers:
        try:
            directives.extend(_useful_cap(gpu, blocker))
        except (OccupancyError, StepError) as problem:
            refusals.append(Refusal(control="residency_cap", target=blocker.name, reason=str(problem)))
    caps = [Candidate(family="residency_cap", label="caps", directives=tuple(directives))] if directives else []
    return proposal(caps, refusals)


def _useful_cap(gpu: Gpu, blocker: Blocker) -> Iterator[Directive]:
    """Yield the cap of one kernel; nothing if the collective already fits beside the kernel as it is.

    Raises `OccupancyError` if no cap pays.
    """
    if blocker.is_cooperative:
        raise OccupancyError("The kernel has a grid barrier, so all its CTAs must be resident at once.")
    usual = residency(gpu, blocker.footprint).ctas_per_sm
    beside = largest_residency_beside(gpu, blocker.footprint, blocker.communication)
    count, percent = beside.ctas_per_sm, beside.carveout_percent
    if count < LEAST_KEPT * usual:
        raise OccupancyError(
            f"A communication CTA fits beside only {count} of the kernel's {usual} CTAs per SM. Such a cap costs the "
            "kernel more than the collectives gain (docs/shaping.md). Try light kernels in a captured step, or copy "
            "engines."
        )
    if blocker.cta_us is not None and blocker.cta_us < LEAST_CTA_US:
        raise OccupancyError(
            f"Each CTA of the kernel ends after {format_us(blocker.cta_us)}. A cap costs more than waiting for "
            f"CTAs shorter than {format_us(LEAST_CTA_US)} (docs/shaping.md). Leave this kernel uncapped."
        )
    if count < usual or percent != blocker.footprint.carveout_percent:
        reason = f"{count} instead of {usual} CTAs per SM, so that a communication CTA fits beside them"
        yield _cap(gpu, blocker, count, percent, reason)


def _blockers(step: Step, gpu: Gpu, contention: Sequence[Contention], plan: Plan) -> list[Blocker]:
    """Return each kernel that a collective waits for under a plan, once per name."""
    found: dict[str, Blocker] = {}
    planned = plan.controls_of(step)
    for entry in contention:
        collective = step.collective(entry.collective)
        light = [control for control in planned[entry.collective] if isinstance(control, LightKernel)]
        footprint = collective.footprint or communication_footprint(gpu, collective.library)
        footprint = light_footprint(gpu, light[-1]) if light else footprint
        for number in entry.blockers:
            kernel = step.kernel(number)
            blocker = Blocker(
                name=kernel.name, footprint=kernel.footprint, communication=footprint, cta_us=_cta_us(gpu, kernel)
            )
            found.setdefault(kernel.name, blocker)
    return list(found.values())


def _cta_us(gpu: Gpu, kernel: Kernel) -> float | None:
    """Return how long one CTA of the kernel takes: as stated, or its lone time divided by its number of waves."""
    slots = residency(gpu, kernel.footprint).ctas_per_sm * gpu.num_sms
    if kernel.cta_us is not None or kernel.lone_us is None or not slots:
        return kernel.cta_us
    return kernel.lone_us / max(1.0, kernel.footprint.num_ctas / slots)


def _cap(gpu: Gpu, kernel: Blocker | Kernel, ctas_per_sm: int, carveout_percent: int, reason: str) -> Directive:
    footprint = kernel.footprint
    is_raised = ctas_per_sm < residency(gpu, footprint).ctas_per_sm
    dynamic = cap_shared_bytes(gpu, footprint, ctas_per_sm) if is_raised else footprint.dynamic_shared_bytes
    cap = ResidencyCap(ctas_per_sm=ctas_per_sm, dynamic_shared_bytes=dynamic, carveout_percent=carveout_percent)
    return Directive(match=Match(name=kernel.name, kind="computation"), controls=(cap,), reason=reason)


def _communication_ctas(step: Step, gpu: Gpu, contention: Sequence[Contention]) -> Proposal:
    beside = [entry for entry in contention if entry.companions]
    if not beside:
        return refusal(
            "communication_ctas", "all collectives", "no kernel that could use a collective's SMs runs at the same time"
        )
    collectives = {entry.collective: step.collective(entry.collective) for entry in beside}
    managed = {index: each for index, each in collectives.items() if each.library in ("nccl", "rccl")}
    if not managed:
        return refusal("communication_ctas", "all collectives", "only NCCL and RCCL accept a limit on their CTAs")
    match = Match(kind="communication", operations=tuple(managed))
    usual = max((each.footprint or communication_footprint(gpu, each.library)).num_ctas for each in managed.values())
    counts = [count for count in CTA_COUNTS if count < usual]
    if not counts:
        most = f"{format_count(usual, 'CTA')} at most ({len(managed)} of {format_count(len(contention), 'collective')})"
        reason = f"those that run beside a kernel use {most}; fewer than {min(CTA_COUNTS)} are not tried"
        return refusal("communication_ctas", "all collectives", reason)
    candidates = [
        one(
            "communication_ctas",
            f"{count} communication CTAs",
            match,
            (CommunicationCtas(max_ctas=count),),
            f"{count} instead of {usual} CTAs, to leave more SMs to kernels that run at the same time",
        )
        for count in counts
    ]
    return proposal(candidates)
