"""Proposes smaller carveouts for kernels that ask for more shared memory than their CTAs need, where collectives run.

An SM with the largest carveout has the least L1, and a collective's CTA moves less there; an empty SM keeps its carveout for
the next kernel. On 2 H200s Triton's matmuls beside collectives with priority took 1 to 11 % less with the carveout that
their CTAs need (docs/shaping.md).
"""

from collections.abc import Iterable, Iterator, Sequence

from counterpoint.controls import Carveout
from counterpoint.machine import Gpu
from counterpoint.occupancy import residency, shared_bytes_per_cta
from counterpoint.plan import Directive, Match
from counterpoint.planner.contention import Contention
from counterpoint.planner.proposal import Candidate, Proposal, proposal, refusal
from counterpoint.sim.task_graph import carveout_bytes
from counterpoint.step import Kernel, Step
from counterpoint.units import format_count

FOR_ALL, FOR_FEWER = "carveout", "carveout for a CTA less"


def propose_carveouts(step: Step, gpu: Gpu, contention: Sequence[Contention]) -> Proposal:
    """Return smaller carveouts for the kernels that run beside collectives or hold the SMs for which these wait."""
    if len(gpu.carveout_steps_bytes) == 1:
        return refusal("carveout", "all kernels", "the shared memory of this GPU is not a part of its L1 cache")
    numbers = dict.fromkeys(number for entry in contention for number in (*entry.blockers, *entry.companions))
    candidates = list(carveouts_of(gpu, [step.kernel(number) for number in numbers]))
    if not candidates:
        reason = "no kernel beside a collective asks for more shared memory than its CTAs need"
        return refusal("carveout", "all kernels", reason)
    return proposal(candidates)


def carveouts_of(gpu: Gpu, kernels: Iterable[Kernel]) -> Iterator[Candidate]:
    """Yield a candidate that keeps all CTAs of each kernel, and one in which kernels that need the largest carveout run a
    CTA less on an SM.
    """
    by_name = {kernel.name: kernel for kernel in kernels}
    kept = [directive for kernel in by_name.values() if (directive := _smaller(gpu, kernel, 0))]
    if kept:
        yield Candidate(family="carveout", label=FOR_ALL, directives=tuple(kept))
    fewer = [directive for kernel in by_name.values() if (directive := _smaller(gpu, kernel, 0) or _smaller(gpu, kernel, 1))]
    if len(fewer) > len(kept):
        yield Candidate(family="carveout", label=FOR_FEWER, directives=tuple(fewer))


def _smaller(gpu: Gpu, kernel: Kernel, fewer: int) -> Directive | None:
    """Return the smallest carveout that holds the kernel's CTAs but so many; None if it has no smaller one than now."""
    usual = residency(gpu, kernel.footprint).ctas_per_sm
    needed = (usual - fewer) * shared_bytes_per_cta(gpu, kernel.footprint)
    largest = gpu.carveout_steps_bytes[-1]
    step = next((each for each in gpu.carveout_steps_bytes if each >= needed), largest)
    if usual <= fewer or step == largest or carveout_bytes(gpu, kernel) < largest:
        return None
    held = f"{usual - fewer} of its {format_count(usual, 'CTA')}" if fewer else f"its {format_count(usual, 'CTA')}"
    return Directive(
        match=Match(name=kernel.name, kind="computation"),
        controls=(Carveout(percent=100 * step // largest),),
        reason=f"it asks for the most shared memory; so much holds {held} per SM and leaves L1 to collectives",
    )
