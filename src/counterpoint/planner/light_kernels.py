"""Proposes light kernels in place of a library's collectives that wait for SMs on which they have no room.

NCCL's CTA needs about 101 KiB of shared memory and 52,000 registers. Beside most kernels it waits until their CTAs end,
at any residency. A light kernel's CTA needs four warps and 4,096 registers (`footprints.toml`).
"""

from collections.abc import Sequence

from counterpoint.controls import LightKernel
from counterpoint.machine import Machine
from counterpoint.plan import Match, Refusal
from counterpoint.planner.contention import Contention
from counterpoint.planner.proposal import ALL_COLLECTIVES, Proposal, one, proposal, refusal
from counterpoint.sim.calibration import load_calibration
from counterpoint.sim.effects import obstacle_to_light
from counterpoint.sim.nodes import obstacle_to_copies
from counterpoint.step import Step
from counterpoint.units import format_us

SHARES_OF_SMS = (4, 2, 1)  # CTAs on a fourth of the SMs, on half, on all: those that were measured


def propose_light_kernels(step: Step, machine: Machine, contention: Sequence[Contention]) -> Proposal:
    """Propose light kernels for the collectives that wait for CTAs to end, and say why not for the others."""
    waiting = [entry for entry in contention if entry.blockers]
    if not waiting:
        return refusal("light_kernel", ALL_COLLECTIVES, "no collective waits for another kernel's CTAs to leave")
    able: list[int] = []
    refusals: dict[str, Refusal] = {}
    for entry in waiting:
        collective = step.collective(entry.collective)
        obstacle = obstacle_to_copies(collective, step.num_ranks, machine) or obstacle_to_light(
            collective, machine.gpu, load_calibration()
        )
        if obstacle:
            refusals[obstacle] = Refusal(control="light_kernel", target=collective.collective, reason=obstacle)
        else:
            able.append(entry.collective)
    if not able:
        return proposal(refusals=refusals.values())
    waited_us = sum(entry.waited_us for entry in waiting if entry.collective in able)
    reason = (
        f"collectives wait {format_us(waited_us)} while CTAs hold the SMs; a CTA of 128 threads without shared "
        "memory fits where the library's does not"
    )
    match = Match(kind="communication", operations=tuple(able))
    counts = [max(1, machine.gpu.num_sms // share) for share in SHARES_OF_SMS]
    candidates = [
        one("light_kernel", f"light kernels of {count} CTAs", match, (LightKernel(num_ctas=count),), reason)
        for count in counts
    ]
    return proposal(candidates, refusals.values())
