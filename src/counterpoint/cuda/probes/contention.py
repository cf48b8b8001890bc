"""Collectives and kernels that run at the same time: how each slows the other, on all ranks of the calibration.

The collective has the greatest priority, so that it is placed at once. Ranks first bring it under way, then time what runs
beside it, or the other way round.
"""

import statistics

import torch

from counterpoint.cuda.probes.collectives import collective
from counterpoint.cuda.probes.occupying import Launch, Marks, compute
from counterpoint.cuda.probes.session import Issue, Session
from counterpoint.measurement.points import Point, point
from counterpoint.units import MIB

STREAMED_BYTES = 512 * MIB
COMMUNICATED_BYTES = 256 * MIB
KINDS = ("all_reduce", "all_gather", "all_to_all")
MATMUL_SIZE = 8192
ITERATIONS = 16_000  # of CTAs alone on their SMs: about four milliseconds
ARITHMETIC_THREADS = 512
ARITHMETIC_BYTES = 120 * 1024  # two do not fit on an SM of compute capability 9.0, one and a CTA of NCCL do
NUM_SLOWED = 16  # of the 24 CTAs that NCCL uses with two ranks


def probe_contention(session: Session) -> list[Point]:
    """A collective beside kernels that stream, multiply, compute; and each kernel beside the collective."""
    buffers = [torch.zeros(COMMUNICATED_BYTES // 2, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    points = []
    for name, kernel, num_others in _kernels(session):
        alone = session.rendezvous.slowest_of(session.times_us(kernel, rounds=3))
        points.append(point("kernel_us", alone, kernel=name))
        for kind in KINDS if name == "streaming" else KINDS[:1]:
            issue = collective(kind, COMMUNICATED_BYTES, (buffers[0], buffers[1]))
            points += _both(session, (name, kernel, num_others), (kind, issue))
    return [*points, *_issue_share(session, (buffers[0], buffers[1]))]


def _issue_share(session: Session, buffers: tuple[torch.Tensor, torch.Tensor]) -> list[Point]:
    """How much longer CTAs of fused multiply-adds take on SMs that they share with a CTA of NCCL.

    Shared memory lets one of them live on an SM, and a CTA of NCCL beside it. The slowest few are those that had one.
    """
    launch = Launch(
        num_ctas=session.num_sms, threads=ARITHMETIC_THREADS, shared_bytes=ARITHMETIC_BYTES, carveout_percent=100
    )
    issue = collective("all_reduce", COMMUNICATED_BYTES, buffers)
    side = torch.cuda.Stream(priority=session.gpu.greatest_priority)
    points = []
    for name, num_collectives in (("alone", 0), ("all_reduce", 10)):
        ratios = []
        for _ in range(4):
            marks = Marks(launch.num_ctas)
            session.wait()
            session.rendezvous.meet()
            session.hold(1000)
            compute(launch, marks, ITERATIONS)
            done = session.mark()
            with torch.cuda.stream(side):
                session.hold(1050)
                for _ in range(num_collectives):
                    issue()
                session.wait(done, session.mark())
            times = sorted(end - start for start, end in zip(marks.starts_us(), marks.ends_us(), strict=True))
            ratios.append(statistics.median(times[-NUM_SLOWED:]) / statistics.median(times))
        at = {"beside": name, "threads": ARITHMETIC_THREADS}
        points.append(point("slowest_ctas_ratio", ratios[1:], **at))
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
