"""Candidates for a running job: the planner's proposals for the kernels that the job launched, the most promising first.

A running job has no timeline, so it is not known which kernel waits for which. Known are the SM resources of each
kernel, and the winners of races on H200s (docs/race.md): against a kernel of many waves priority won, and a head start
added nothing; against a kernel that holds every SM to its end only a head start won. So every kernel with a CTA for each
SM counts as one that collectives may wait for, and the single-wave ones among them as the ones that win races now. The
live steps then show what pays.
"""

import math
from collections.abc import Iterable, Sequence

from counterpoint.errors import OccupancyError, StepError
from counterpoint.integrations.paths import COPIED_KINDS, COPIES, OVERLAP, WORDS, PathOffer
from counterpoint.integrations.planned_paths import paths_of
from counterpoint.launch_filter.control_block import SeenFunction
from counterpoint.machine import Gpu, machine_for_device
from counterpoint.occupancy import residency, room_beside, shared_bytes_per_cta
from counterpoint.plan import Directive, Match, Plan, Refusal
from counterpoint.planner.candidates import (
    HOLDS_US,
    IN_EVERY_RACE,
    NO_HEAD_STARTS,
    Blocker,
    propose_caps,
    propose_head_starts,
    propose_priority,
)
from counterpoint.planner.carveouts import FOR_ALL, FOR_FEWER, carveouts_of
from counterpoint.planner.proposal import Candidate
from counterpoint.step import REDUCING_COLLECTIVES, CollectiveKind, Footprint, Kernel
from counterpoint.supervised.running_job import JobGpu
from counterpoint.supervised.settings import Setting, setting_of
from counterpoint.traces.classify import classify_kernel, is_communication
from counterpoint.value import Value

# with the names of collectives (some 70) less than the filter's 256 rows (`launch_filter.layout.MAX_RULES`)
MOST_HELD, MOST_CAPPED = 64, 32
PRIORITY, CAPS = "priority", "caps"
HELD, HELD_LONGER = (f"head start {hold_us:g} us" for hold_us in HOLDS_US)
ALL_HELD, ALL_HELD_LONGER = (f"head start {hold_us:g} us{IN_EVERY_RACE}" for hold_us in HOLDS_US)
# The most promising first: a small budget tries two of these. A hold of 20 us won nothing that 5 us did not, and cost
# more.
IN_ORDER = (
    (PRIORITY,),
    (PRIORITY, FOR_ALL),
    (PRIORITY, FOR_FEWER),
    (PRIORITY, HELD),
    (PRIORITY, ALL_HELD),
    (CAPS, PRIORITY),
    (HELD,),
    (CAPS, PRIORITY, HELD),
    (CAPS,),
    (PRIORITY, ALL_HELD_LONGER),
)


OVERLAPPED, EXPERTS_OVERLAPPED = "matmuls overlapped", "experts overlapped"
ALL_TO_ALLS = Match(kind="communication", collective="all_to_all")
OTHER_BITS = "it sums in another order, which changes results within rounding; --bitwise excludes that"


def _by_copies(kind: CollectiveKind) -> str:
    return f"{WORDS[kind]} by copies"


GATHERED, SCATTERED, REDUCED, EXCHANGED = (_by_copies(kind) for kind in COPIED_KINDS)
# The most promising first. Under FSDP2 gathers and reductions together gained most on 2 and 4 GPUs; DDP's gain less.
PATHS_IN_ORDER = (
    (EXPERTS_OVERLAPPED,),
    (EXCHANGED,),
    (OVERLAPPED, EXPERTS_OVERLAPPED, GATHERED, SCATTERED),
    (OVERLAPPED, EXPERTS_OVERLAPPED, EXCHANGED, GATHERED, SCATTERED),
    (GATHERED, SCATTERED),
    (OVERLAPPED, EXPERTS_OVERLAPPED, GATHERED),
    (GATHERED,),
    (OVERLAPPED, EXPERTS_OVERLAPPED, EXCHANGED, GATHERED, SCATTERED, REDUCED),
    (REDUCED,),
)


class LiveCandidate(Value, frozen=True, kw_only=True):
    """Directives to try together, and the setting that they produce."""

    label: str
    directives: tuple[Directive, ...]
    setting: Setting


class LiveProposal(Value, frozen=True, kw_only=True):
    """What to try, the most promising first, and what not to try and why."""

    candidates: tuple[LiveCandidate, ...]
    refusals: tuple[Refusal, ...] = ()


def propose_paths(offers: Iterable[PathOffer], *, keeps_bits: bool) -> LiveProposal:
    """Return candidates for the paths that all ranks offer, and the reasons why the rest has none."""
    able: dict[str, Directive] = {}
    refusals: list[Refusal] = []
    for offer in offers:
        directives = _path_directives(offer)
        for label, directive in directives.items():
            if offer.refusal:
                refusals.append(Refusal(control=directive.controls[0].tag, target=offer.what, reason=offer.refusal))
            elif keeps_bits and not paths_of([directive]).keeps_bits:
                refusals.append(Refusal(control=directive.controls[0].tag, target=offer.what, reason=OTHER_BITS))
            else:
                able[label] = directive
    candidates: dict[str, LiveCandidate] = {}
    for names in PATHS_IN_ORDER:
        usable = [name for name in names if name in able]
        label = " + ".join(usable)
        if usable and label not in candidates:
            candidates[label] = _candidate(label, tuple(able[name] for name in usable))
    return LiveProposal(candidates=tuple(candidates.values()), refusals=tuple(dict.fromkeys(refusals)))


def _path_directives(offer: PathOffer) -> dict[str, Directive]:
    """Return a directive for each control of an offer, by the control's label."""
    if offer.integration == "tensor_parallel":
        reason = f"{offer.what}: gathers and sums move in pieces beside the matmuls that need and feed them"
        return {OVERLAPPED: Directive(match=Match(kind="communication"), controls=(OVERLAP,), reason=reason)}
    if offer.integration == "expert_parallel":
        reason = f"{offer.what}: tokens move in pieces beside the grouped matmuls that need and feed them"
        return {EXPERTS_OVERLAPPED: Directive(match=ALL_TO_ALLS, controls=(OVERLAP,), reason=reason)}
    found = {}
    for kind in offer.kinds:
        needs = ", and only the sum needs some" if kind in REDUCING_COLLECTIVES else ""
        reason = f"{offer.what}: copies leave the SMs to other kernels{needs}"
        match = Match(kind="communication", collective=kind)
        found[_by_copies(kind)] = Directive(match=match, controls=(COPIES,), reason=reason)
    return found


def propose_live(functions: Sequence[SeenFunction], job_gpu: JobGpu | None) -> LiveProposal:
    """Return the launch filter's candidates for a job that launched `functions`, on the GPU at hand."""
    collectives = [function for function in functions if is_communication("kernel", function.name)]
    if not collectives or job_gpu is None:
        return _nothing("the job launched no communication kernel" if job_gpu else "the job computes on no GPU")
    blockers = _full_machine_kernels([each for each in functions if each not in collectives], job_gpu.num_sms)
    machine = machine_for_device(job_gpu.name)
    gpu = machine.gpu if machine else None
    racers = [each for each in blockers if gpu is None or _is_single_wave(gpu, each, collectives)]
    parts: dict[str, tuple[Directive, ...]] = {}
    refusals: list[Refusal] = []
    priority = propose_priority(
        _greatest_priority(gpu, job_gpu),
        Match(kind="communication"),
        "collectives may wait",
        f"{job_gpu.name} has no stream priorities, or its driver ignores them",
    )
    caps = propose_caps(gpu, _as_blockers(gpu, blockers, collectives)) if gpu is not None else None
    has_head_starts = gpu is None or gpu.has_head_starts
    for candidate in (*priority.candidates, *(_head_starts(racers, blockers) if has_head_starts else ())):
        parts[candidate.label] = candidate.directives
    for candidate in (*(caps.candidates if caps else ()), *(_carveouts(gpu, blockers) if gpu is not None else ())):
        parts[candidate.label] = candidate.directives[:MOST_CAPPED]
    if len(racers) == len(blockers) and HELD_LONGER in parts:
        parts[ALL_HELD_LONGER] = parts[HELD_LONGER]
    refusals.extend((*priority.refusals, *(caps.refusals if caps and blockers else ())))
    if gpu is None:
        reason = f"no shipped machine describes '{job_gpu.name}', so the limits of its SMs are unknown"
        refusals.append(Refusal(control="residency_cap", target="all kernels", reason=reason))
    if not has_head_starts:
        refusals.append(Refusal(control="head_start", target="all kernels", reason=NO_HEAD_STARTS))
    elif not blockers:
        reason = f"no kernel has a CTA for each of the {job_gpu.num_sms} SMs, so none blocks a collective"
        refusals.append(Refusal(control="head_start", target="all kernels", reason=reason))
    return LiveProposal(candidates=_combine(parts), refusals=tuple(refusals))


def _combine(parts: dict[str, tuple[Directive, ...]]) -> tuple[LiveCandidate, ...]:
    """Return the combinations whose parts all exist; without priority, the others are tried without it."""
    found: dict[str, LiveCandidate] = {}
    for names in IN_ORDER:
        usable = [name for name in names if PRIORITY in parts or name != PRIORITY]
        if usable and all(name in parts for name in usable):
            label, directives = " + ".join(usable), tuple(each for name in usable for each in parts[name])
            found.setdefault(label, _candidate(label, directives))
    return tuple(found.values())


def _candidate(label: str, directives: tuple[Directive, ...]) -> LiveCandidate:
    return LiveCandidate(label=label, directives=directives, setting=setting_of(Plan(directives=directives)))


def _nothing(reason: str) -> LiveProposal:
    return LiveProposal(candidates=(), refusals=(Refusal(control="all controls", target="the job", reason=reason),))


def _greatest_priority(gpu: Gpu | None, job_gpu: JobGpu) -> int:
    """Return the priority from the machine file, because torch offers fewer levels; 0 if priorities have no effect."""
    if gpu is None:
        return job_gpu.greatest_priority
    return gpu.greatest_priority if gpu.priority_is_effective else 0


def _head_starts(racers: Sequence[SeenFunction], blockers: Sequence[SeenFunction]) -> Iterable[Candidate]:
    """Yield the planner's head starts with kernels by name, because a launch has no number in a step."""
    kernels = [*racers, *(each for each in blockers if each not in racers)]
    for candidate in propose_head_starts(tuple(range(len(racers))), tuple(range(len(kernels)))):
        yield Candidate(
            family=candidate.family,
            label=candidate.label,
            directives=tuple(
                Directive(match=_match(kernels[number]), controls=directive.controls, reason=directive.reason)
                for directive in candidate.directives
                for number in (directive.match.operations or ())[:MOST_HELD]
            ),
        )


def _carveouts(gpu: Gpu, blockers: Sequence[SeenFunction]) -> Iterable[Candidate]:
    """Return the planner's carveouts for kernels that fill the GPU."""
    kernels = (
        Kernel(
            name=function.pattern,
            stream=0,
            footprint=_footprint(function),
            character=classify_kernel(function.name).character,
        )
        for function in blockers
    )
    return carveouts_of(gpu, kernels)


def _as_blockers(gpu: Gpu, functions: Sequence[SeenFunction], collectives: Sequence[SeenFunction]) -> list[Blocker]:
    """Return kernels that may keep out the largest collective's CTA."""
    largest = max((_footprint(function) for function in collectives), key=lambda found: shared_bytes_per_cta(gpu, found))
    return [
        Blocker(
            name=function.pattern,
            footprint=_footprint(function),
            communication=largest,
            is_cooperative=function.is_cooperative,
        )
        for function in functions
    ]


def _match(function: SeenFunction) -> Match:
    return Match(name=function.pattern, kind="computation")


def _num_ctas(function: SeenFunction) -> int:
    return math.prod(function.grid)


def _threads_per_cta(function: SeenFunction) -> int:
    return math.prod(function.block)


def _full_machine_kernels(functions: Sequence[SeenFunction], num_sms: int) -> list[SeenFunction]:
    """Return kernels that can fill every SM, those with the most launched threads in total first, a guess at where time
    goes.
    """
    work: dict[str, int] = {}
    first: dict[str, SeenFunction] = {}
    for function in functions:
        if _num_ctas(function) >= num_sms and "\\" not in function.pattern:  # a plan's patterns cannot express such a name
            first.setdefault(function.name, function)
            threads = _num_ctas(function) * _threads_per_cta(function) * function.num_launches
            work[function.name] = work.get(function.name, 0) + threads
    return sorted(first.values(), key=lambda function: (-work[function.name], function.name))


def _is_single_wave(gpu: Gpu, function: SeenFunction, collectives: Sequence[SeenFunction]) -> bool:
    """Return whether all of a kernel's CTAs are resident at once, to its end, and leave no room for a CTA of one of the
    collectives.

    Only a function's last launch is known. A footprint that the GPU cannot run counts as no kernel; its cap is refused.
    """
    try:
        footprint = _footprint(function)
        is_resident = footprint.num_ctas <= gpu.num_sms * residency(gpu, footprint).ctas_per_sm
        return is_resident and not all(room_beside(gpu, footprint, _footprint(collective)) for collective in collectives)
    except (OccupancyError, StepError):
        return False


def _footprint(function: SeenFunction) -> Footprint:
    return Footprint(
        num_ctas=_num_ctas(function),
        threads_per_cta=_threads_per_cta(function),
        registers_per_thread=function.registers_per_thread,
        static_shared_bytes=function.static_shared_bytes,
        dynamic_shared_bytes=function.dynamic_shared_bytes,
        ctas_per_cluster=max(1, function.ctas_per_cluster),
    )
