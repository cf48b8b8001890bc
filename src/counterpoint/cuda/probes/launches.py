"""Measures the costs of launches: gaps between kernels of one stream, waits across streams, the host's time per launch."""

import time

import torch

from counterpoint.cuda.probes.occupying import Marks, ProbeLaunch, occupy
from counterpoint.cuda.probes.session import Issue, Session
from counterpoint.measurement.points import Point, point

NUM_KERNELS = 60
KERNEL_US = 8.0
NUM_HOST_LAUNCHES = 400


def probe_launches(session: Session) -> list[Point]:
    """Measure the gap from the last end of a kernel's CTAs to the first start of the next kernel's, with the host ahead."""
    launch = ProbeLaunch(num_ctas=session.num_sms)
    marks = [Marks(launch.num_ctas) for _ in range(NUM_KERNELS)]
    session.wait()

    def chain() -> None:
        for each in marks:
            occupy(launch, each, KERNEL_US)

    def zigzag() -> None:
        streams = (torch.cuda.current_stream(), side)
        for number, each in enumerate(marks):
            stream, before = streams[number % 2], streams[(number + 1) % 2]
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                occupy(launch, each, KERNEL_US)
        streams[0].wait_stream(side)

    side = torch.cuda.Stream()
    points = [
        point("launch_gap_us", _gaps_us(session, chain, marks), issued="eagerly"),
        point("launch_gap_us", _gaps_us(session, _captured(chain), marks), issued="in a graph"),
        point("dependency_latency_us", _gaps_us(session, zigzag, marks), issued="eagerly"),
    ]
    return [*points, *_fork(session, launch), _host_launch(session, marks[0])]


def _fork(session: Session, launch: ProbeLaunch) -> list[Point]:
    """Measure the gaps from a kernel's end to the starts of two that wait for it on two streams, in a graph and eagerly."""
    small = ProbeLaunch(num_ctas=session.num_sms // 2, threads=launch.threads)
    first, same, other = Marks(launch.num_ctas), Marks(small.num_ctas), Marks(small.num_ctas)
    side = torch.cuda.Stream()

    def fork() -> None:
        occupy(launch, first, 50.0)
        side.wait_stream(torch.cuda.current_stream())
        occupy(small, same, 50.0)
        with torch.cuda.stream(side):
            occupy(small, other, 50.0)
        torch.cuda.current_stream().wait_stream(side)

    points = []
    for issued, issue in (("eagerly", fork), ("in a graph", _captured(fork))):
        delays: dict[str, list[float]] = {"the same stream": [], "another stream": []}
        for _ in range(30):
            session.hold(300)
            issue()
            session.wait()
            end = max(first.ends_us())
            delays["the same stream"].append(min(same.starts_us()) - end)
            delays["another stream"].append(min(other.starts_us()) - end)
        points += [point("fork_latency_us", some[5:], issued=issued, on=name) for name, some in delays.items()]
    return points


def _gaps_us(session: Session, issue: Issue, marks: list[Marks]) -> list[float]:
    """Return gaps between consecutive kernels, as means of tens, because the clock of some GPUs is coarse."""
    issue()
    session.wait()
    session.hold(4000)
    issue()
    session.wait()
    starts, ends = [min(each.starts_us()) for each in marks], [max(each.ends_us()) for each in marks]
    gaps = [start - end for start, end in zip(starts[1:], ends, strict=False)]
    tenths = [sorted(gaps[number::5])[1:-1] for number in range(5)]
    return [sum(some) / len(some) for some in tenths]


def _captured(issue: Issue) -> Issue:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        issue()

    def replay() -> None:
        graph.replay()

    return replay


def _host_launch(session: Session, marks: Marks) -> Point:
    """Measure the host's time for one launch, while the GPU keeps up."""
    launch, times = ProbeLaunch(num_ctas=1, threads=32), []
    for _ in range(5):
        session.wait()
        start = time.perf_counter()
        for _ in range(NUM_HOST_LAUNCHES):
            occupy(launch, marks, 0.0)
        times.append((time.perf_counter() - start) * 1e6 / NUM_HOST_LAUNCHES)
    return point("host_launch_us", times, issued="by cuda-bindings")
