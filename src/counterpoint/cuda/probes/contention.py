"""Collectives and kernels that run at the same time: how each slows the other, on all ranks of the calibration.

The collective has the greatest priority, so that it is placed at once. Ranks first bring it under way, then time what runs
beside it, or the other way round.
"""

import torch

from counterpoint.cuda.probes.collectives import collective
from counterpoint.cuda.probes.session import Issue, Session
from counterpoint.measurement.points import Point, point
from counterpoint.units import MIB

STREAMED_BYTES = 512 * MIB
COMMUNICATED_BYTES = 256 * MIB
KINDS = ("all_reduce", "all_gather", "all_to_all")
MATMUL_SIZE = 8192


def probe_contention(session: Session) -> list[Point]:
    """A collective beside kernels that stream and that multiply; and each kernel beside the collective."""
    buffers = [torch.zeros(COMMUNICATED_BYTES // 2, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    points = []
    for name, kernel, num_others in _kernels(session):
        alone = session.rendezvous.slowest_of(session.times_us(kernel, rounds=3))
        points.append(point("kernel_us", alone, kernel=name, group="contention"))
        for kind in KINDS if name == "streaming" else KINDS[:1]:
            issue = collective(kind, COMMUNICATED_BYTES, (buffers[0], buffers[1]))
            points += _both(session, (name, kernel, num_others), (kind, issue))
    return points


def _kernels(session: Session) -> list[tuple[str, Issue, int]]:
    """Name, kernel, and how many of it outlast a collective."""
    source = torch.ones(STREAMED_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    a, b, c = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return [
        ("streaming", lambda: torch.mul(source, 2.0, out=target), 24),
        ("matmul", lambda: torch.mm(a, b, out=c), 6),
    ]


def _both(session: Session, kernel: tuple[str, Issue, int], communication: tuple[str, Issue]) -> list[Point]:
    name, run, num_others = kernel
    kind, issue = communication
    side = torch.cuda.Stream(priority=session.gpu.greatest_priority)
    session.rendezvous.meet()
    slowed = session.times_beside_us(issue, run, num_others=num_others, stream=side)
    points = [
        point(
            "collective_beside_us", session.rendezvous.slowest_of(slowed), kind=kind, kernel=name, bytes=COMMUNICATED_BYTES
        )
    ]
    session.rendezvous.meet()
    with torch.cuda.stream(side):
        slowed = session.times_beside_us(run, issue, num_others=8, stream=torch.cuda.Stream())
    points.append(
        point("kernel_beside_us", session.rendezvous.slowest_of(slowed), kind=kind, kernel=name, bytes=COMMUNICATED_BYTES)
    )
    return points
