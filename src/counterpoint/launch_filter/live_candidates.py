"""What to try on a running job: candidates from the kernels that it was seen to launch and the limits of its GPU.

A running job has no timeline, so nothing here knows which kernel waits for which. What is known is what each kernel takes
of an SM, and that a kernel with at least one CTA for every SM can hold a collective up: a collective starts when the
kernel before it has placed all its CTAs, and a persistent kernel holds every SM to its end (measured on H200s,
docs/simulator.md). Such kernels get head starts and caps; collectives get priority. Whether any of it pays is for the
live steps to say.
"""

from collections.abc import Sequence

from counterpoint.cuda.running_job import JobGpu
from counterpoint.errors import OccupancyError, StepError
from counterpoint.launch_filter.control_block import FilterRule, SeenFunction, rules_of
from counterpoint.machine import Gpu, machine_for_device
from counterpoint.occupancy import cap_shared_bytes, largest_residency_beside, residency, shared_bytes_per_cta
from counterpoint.plan import HOLDS_US, Directive, HeadStart, Match, Plan, Priority, Refusal, ResidencyCap
from counterpoint.step import Footprint
from counterpoint.traces.classify import is_communication
from counterpoint.units import format_count
from counterpoint.value import Value

MOST_HELD, MOST_CAPPED = 64, 32  # the filter's table has 128 rows


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
    priority = _priority(machine.gpu if machine else None, job_gpu)
    held = [_head_starts(fillers, hold_us) for hold_us in HOLDS_US]
    capped, refusals = _caps(machine.gpu if machine else None, job_gpu, fillers, collectives)
    parts = {
        "priority": priority,
        f"priority + head start {HOLDS_US[0]:g} us": priority and held[0] and priority + held[0],
        f"head start {HOLDS_US[0]:g} us": held[0],
        "caps + priority": priority and capped and capped + priority,
        f"head start {HOLDS_US[1]:g} us": held[1],
        f"caps + priority + head start {HOLDS_US[0]:g} us": priority and capped and held[0] and capped + priority + held[0],
        "caps": capped,
    }
    candidates = tuple(
        LiveCandidate(label=label, directives=part, rules=rules_of(Plan(directives=part)))
        for label, part in parts.items()
        if part
    )
    if not priority:
        refusals += (Refusal(control="priority", target="all collectives", reason=_no_priority(job_gpu)),)
    if not fillers:
        reason = f"no kernel has a CTA for each of the {job_gpu.num_sms} SMs, so none keeps a collective out"
        refusals += (Refusal(control="head_start", target="all kernels", reason=reason),)
    return LiveProposal(candidates=candidates, refusals=refusals)


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
