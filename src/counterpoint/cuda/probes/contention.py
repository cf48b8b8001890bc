"""Measures how collectives and kernels that run at the same time slow each other, on all ranks of the calibration.

The collective has the greatest priority, so that it is placed at once. The ranks start it first and time the kernels that
run beside it, or start the kernels first and time the collective.
"""

import torch

from counterpoint.cuda.probes.collectives import collective, group_of
from counterpoint.cuda.probes.matmuls import tiled
from counterpoint.cuda.probes.memory import STREAMED_BYTES
from counterpoint.cuda.probes.session import Issue, Session
from counterpoint.measurement.points import Point, point
from counterpoint.units import MIB

COMMUNICATED_BYTES = 256 * MIB
KINDS = ("all_reduce", "all_gather", "all_to_all")
KINDS_AMONG_STREAMING = (*KINDS, "reduce_scatter")
FEW_CTAS = 8
MATMUL_SIZE = 8192
HEAD_START_US = 20.0
NUM_OTHERS = {"streaming": 24, "matmul": 6}  # launches that outlast a collective, by kernel
ROUNDS = 3


def probe_contention(session: Session) -> list[Point]:
    """Time a collective beside kernels that stream and that multiply, and each kernel beside the collective."""
    buffers = [torch.zeros(COMMUNICATED_BYTES // 2, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    neighbors = _neighbors()
    points = _placed_first(session, neighbors, (buffers[0], buffers[1]))
    for name, num_others in NUM_OTHERS.items():
        kernel = neighbors[name]
        alone = session.rendezvous.slowest_of(session.times_us(kernel, rounds=3))
        points.append(point("kernel_us", alone, kernel=name, group="contention"))
        for kind in KINDS_AMONG_STREAMING if name == "streaming" else KINDS[:1]:
            issue = collective(kind, COMMUNICATED_BYTES, (buffers[0], buffers[1]))
            points += _both(session, (name, kernel, num_others), (kind, issue))
    return points


def _placed_first(session: Session, neighbors: dict[str, Issue], buffers: tuple[torch.Tensor, torch.Tensor]) -> list[Point]:
    """Time collectives that are placed on their SMs before kernels start beside them, with their usual CTAs and with few."""
    points = []
    side = torch.cuda.Stream(priority=session.gpu.greatest_priority)
    for num_ctas in (None, FEW_CTAS):
        group = group_of(num_ctas)
        for kind in KINDS:
            issue = collective(kind, COMMUNICATED_BYTES, buffers, group)
            at: dict[str, str | int] = {"kind": kind, "ctas": num_ctas or "usual", "bytes": COMMUNICATED_BYTES}
            alone = session.times_of_ranks_us(issue, rounds=ROUNDS)
            points.append(point("collective_first_us", alone, kernel="none", **at))
            for name, kernel in neighbors.items():
                kernel_us = session.rendezvous.slowest(min(session.times_us(kernel, rounds=2)))
                number = 2 + round(3 * max(alone) / kernel_us)
                session.rendezvous.meet()
                times = _first_us(session, issue, kernel, number, side)
                points.append(point("collective_first_us", session.rendezvous.slowest_of(times), kernel=name, **at))
    return points


def _neighbors() -> dict[str, Issue]:
    """Return the kernels that run beside collectives, by name."""
    source = torch.ones(STREAMED_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    a, b, c = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    rows = torch.randn(12288, 12288, device="cuda", dtype=torch.bfloat16)
    normal = torch.empty_like(rows)
    return {
        "streaming": lambda: torch.mul(source, 2.0, out=target),
        "softmax": lambda: torch.softmax(rows, 1, out=normal),
        "matmul": lambda: torch.mm(a, b, out=c),
        "matmul 64x64x32": tiled("64x64x32"),
        "matmul 128x128x32": tiled("128x128x32"),
    }


def _first_us(session: Session, issue: Issue, kernel: Issue, number: int, side: torch.cuda.Stream) -> list[float]:
    """Return times of the second of two collectives on `side`; the kernels start shortly after it."""
    times = []
    for _ in range(ROUNDS):
        session.wait()
        main = torch.cuda.current_stream()
        session.hold(2000.0)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            issue()  # the first collective synchronizes the ranks
            start = session.mark()
            issue()
            end = session.mark()
        main.wait_event(start)
        session.hold(HEAD_START_US)
        for _ in range(number):
            kernel()
        session.wait(session.mark(main), end)
        times.append(1000 * start.elapsed_time(end))
    return times


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
