"""What to try on a running job: candidates from the kernels that it was seen to launch and the limits of its GPU.

A running job has no timeline, so nothing here knows which kernel waits for which. What is known is what each kernel takes
of an SM, and what won races of a collective and a kernel on H200s (docs/race.md). Against a kernel of many waves priority
won, and a head start added nothing; against a kernel that holds every SM to its end only a head start won. So collectives
get priority, and such *holders* a head start. That is tried first. What is wider comes after it: head starts for all
kernels with a CTA for every SM, which cost a little where the collective wins by itself but paid on captured steps
(docs/gpu.md), and caps. Whether any of it pays is for the live steps to say.
"""

from collections.abc import Sequence

from counterpoint.cuda.running_job import JobGpu
from counterpoint.errors import OccupancyError, StepError
from counterpoint.launch_filter.control_block import FilterRule, SeenFunction, rules_of
from counterpoint.machine import Gpu, machine_for_device
from counterpoint.occupancy import cap_shared_bytes, largest_residency_beside, residency, room_for, shared_bytes_per_cta
from counterpoint.plan import HOLDS_US, Directive, HeadStart, Match, Plan, Priority, Refusal, ResidencyCap
from counterpoint.step import Footprint
from counterpoint.traces.classify import is_communication
from counterpoint.units import format_count
from counterpoint.value import Value

MOST_HELD, MOST_CAPPED = 64, 32  # the filter's table has 128 rows
SHORT_US, LONG_US = HOLDS_US
PRIORITY, CAPS, HELD = "priority", "caps", f"head start {SHORT_US:g} us"
ALL_HELD, ALL_HELD_LONGER = f"{HELD} in every race", f"head start {LONG_US:g} us in every race"
# The most promising first: a small budget tries two of these. A hold of 20 us won nothing that 5 us did not, and cost more.
IN_ORDER = (
    (PRIORITY,),
    (PRIORITY, HELD),
    (PRIORITY, ALL_HELD),
    (CAPS, PRIORITY),
    (HELD,),
    (CAPS, PRIORITY, HELD),
    (CAPS,),
    (PRIORITY, ALL_HELD_LONGER),
)


class LiveCandidate(Value, frozen=True, kw_only=True):
    """Directives to try together, and the filter's table for them."""

    label: str
    directives: tuple[Directive, ...]
    rules: tuple[FilterRule, ...]


class LiveProposal(Value, frozen=True, kw_only=True):
    """What to try, the most promising first, and what not to try and why."""

    candidates: tuple[LiveCandidate, ...]
    refusals: tuple[Refusal, ...] = ()


def propose_live(functions: Sequence[SeenFunction], job_gpu: JobGpu | None) -> LiveProposal:
    """Candidates for a job that launched `functions`, on the GPU at hand."""
    collectives = [function for function in functions if is_communication("kernel", function.name)]
    if not collectives or job_gpu is None:
        return _nothing("no kernel that communicates was launched" if job_gpu else "the job computes on no GPU")
    fillers = _fillers([function for function in functions if function not in collectives], job_gpu.num_sms)
    machine = machine_for_device(job_gpu.name)
    gpu = machine.gpu if machine else None
    holders = fillers if gpu is None else [each for each in fillers if _is_holder(gpu, each, collectives)]
    priority = _priority(gpu, job_gpu)
    capped, refusals = _caps(gpu, job_gpu, fillers, collectives)
    parts = {
        PRIORITY: priority,
        HELD: _head_starts(holders, SHORT_US),
        ALL_HELD: _head_starts(fillers, SHORT_US) if holders != fillers else (),
        ALL_HELD_LONGER: _head_starts(fillers, LONG_US),
        CAPS: capped,
    }
    candidates = _combine(parts)
    if not priority:
        refusals += (Refusal(control="priority", target="all collectives", reason=_no_priority(job_gpu)),)
    if not fillers:
        reason = f"no kernel has a CTA for each of the {job_gpu.num_sms} SMs, so none keeps a collective out"
        refusals += (Refusal(control="head_start", target="all kernels", reason=reason),)
    return LiveProposal(candidates=candidates, refusals=refusals)


def _combine(parts: dict[str, tuple[Directive, ...]]) -> tuple[LiveCandidate, ...]:
    """The combinations whose parts are all there; where there is no priority, the others go without it."""
    found: dict[str, LiveCandidate] = {}
    for names in IN_ORDER:
        usable = [name for name in names if parts[PRIORITY] or name != PRIORITY]
        if usable and all(parts[name] for name in usable):
            label, directives = " + ".join(usable), tuple(each for name in usable for each in parts[name])
            rules = rules_of(Plan(directives=directives))
            found.setdefault(label, LiveCandidate(label=label, directives=directives, rules=rules))
    return tuple(found.values())


def _nothing(reason: str) -> LiveProposal:
    return LiveProposal(candidates=(), refusals=(Refusal(control="all controls", target="the job", reason=reason),))


def _num_ctas(function: SeenFunction) -> int:
    return function.grid[0] * function.grid[1] * function.grid[2]


def _threads_per_cta(function: SeenFunction) -> int:
    return function.block[0] * function.block[1] * function.block[2]


def _fillers(functions: Sequence[SeenFunction], num_sms: int) -> list[SeenFunction]:
    """Kernels that can take every SM, those with the most threads launched in all first; a guess at where time goes."""
    work: dict[str, int] = {}
    first: dict[str, SeenFunction] = {}
    for function in functions:
        if _num_ctas(function) >= num_sms and "\\" not in function.pattern:  # a plan's patterns cannot say such a name
            first.setdefault(function.name, function)
            threads = _num_ctas(function) * _threads_per_cta(function) * function.num_launches
            work[function.name] = work.get(function.name, 0) + threads
    return sorted(first.values(), key=lambda function: (-work[function.name], function.name))


def _is_holder(gpu: Gpu, function: SeenFunction, collectives: Sequence[SeenFunction]) -> bool:
    """Whether a kernel's CTAs all live at once, to its end, and leave no room for a CTA of one of the collectives.

    A function is known by its last launch alone. One whose footprint the GPU cannot have is none; its cap is refused.
    """
    try:
        footprint = _footprint(function)
        alone = residency(gpu, footprint)
        here = -(-footprint.num_ctas // gpu.num_sms)  # on the fullest SM
        residents = ((footprint, here),)
        return here <= alone.ctas_per_sm and not all(
            room_for(gpu, residents, alone.carveout_bytes, _footprint(collective)) for collective in collectives
        )
    except (OccupancyError, StepError):
        return False


def _priority(gpu: Gpu | None, job_gpu: JobGpu) -> tuple[Directive, ...]:
    """The driver's greatest priority: as the machine file has it, since torch offers its streams fewer levels."""
    if gpu is not None and not gpu.priority_is_effective:
        return ()
    greatest = gpu.greatest_priority if gpu is not None else job_gpu.greatest_priority
    if greatest >= 0:
        return ()
    reason = "a greater priority lets collectives take the slots that become free"
    return (Directive(match=Match(kind="communication"), controls=(Priority(priority=greatest),), reason=reason),)


def _no_priority(job_gpu: JobGpu) -> str:
    return f"{job_gpu.name} has no priorities, or its driver ignores them"


def _head_starts(fillers: Sequence[SeenFunction], hold_us: float) -> tuple[Directive, ...]:
    reason = "it can take every SM; held back that long, it lets a collective that was launched just before it in"
    return tuple(
        Directive(match=_match(function), controls=(HeadStart(hold_us=hold_us),), reason=reason)
        for function in fillers[:MOST_HELD]
    )


def _match(function: SeenFunction) -> Match:
    return Match(name=function.pattern, kind="computation")


def _caps(
    gpu: Gpu | None, job_gpu: JobGpu, fillers: Sequence[SeenFunction], collectives: Sequence[SeenFunction]
) -> tuple[tuple[Directive, ...], tuple[Refusal, ...]]:
    """Caps that let the largest collective's CTA live beside a kernel, and refusals for kernels that leave no such room."""
    if gpu is None:
        reason = f"no shipped machine describes '{job_gpu.name}', so it is not known what fits on an SM"
        return (), (Refusal(control="residency_cap", target="all kernels", reason=reason),)
    largest = max((_footprint(function) for function in collectives), key=lambda found: shared_bytes_per_cta(gpu, found))
    directives: list[Directive] = []
    refusals: list[Refusal] = []
    for function in fillers:
        try:
            directive = _cap(gpu, function, largest)
        except (OccupancyError, StepError) as problem:
            refusals.append(Refusal(control="residency_cap", target=function.name, reason=str(problem)))
            continue
        if directive is not None and len(directives) < MOST_CAPPED:
            directives.append(directive)
    return tuple(directives), tuple(refusals)


def _cap(gpu: Gpu, function: SeenFunction, communication: Footprint) -> Directive | None:
    """None where a communication CTA fits beside without a cap. Raises `OccupancyError` where none lets it in."""
    if function.is_cooperative:
        raise OccupancyError("It has a grid barrier and needs all its CTAs resident at once.")
    footprint = _footprint(function)
    usual = residency(gpu, footprint).ctas_per_sm
    beside = largest_residency_beside(gpu, footprint, communication)
    if beside.ctas_per_sm == usual and beside.carveout_percent == footprint.carveout_percent:
        return None
    dynamic = footprint.dynamic_shared_bytes
    if beside.ctas_per_sm < usual:
        dynamic = cap_shared_bytes(gpu, footprint, beside.ctas_per_sm)
    cap = ResidencyCap(
        ctas_per_sm=beside.ctas_per_sm, dynamic_shared_bytes=dynamic, carveout_percent=beside.carveout_percent
    )
    reason = f"{beside.ctas_per_sm} instead of {format_count(usual, 'CTA')} per SM, so that a communication CTA fits beside"
    return Directive(match=_match(function), controls=(cap,), reason=reason)


def _footprint(function: SeenFunction) -> Footprint:
    return Footprint(
        num_ctas=_num_ctas(function),
        threads_per_cta=_threads_per_cta(function),
        registers_per_thread=function.registers_per_thread,
        static_shared_bytes=function.static_shared_bytes,
        dynamic_shared_bytes=function.dynamic_shared_bytes,
        ctas_per_cluster=max(1, function.ctas_per_cluster),
    )
