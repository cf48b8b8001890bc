"""What launches cost: gaps between kernels of one stream, waits across streams, the host's time for a launch."""

import time

import torch

from counterpoint.cuda.probes.occupying import Launch, Marks, occupy
from counterpoint.cuda.probes.session import Issue, Session
from counterpoint.measurement.points import Point, point

NUM_KERNELS = 60
KERNEL_US = 8.0
NUM_HOST_LAUNCHES = 400


def probe_launches(session: Session) -> list[Point]:
    """From the last end of a kernel's CTAs to the first start of the next kernel's, with the host ahead."""
    launch = Launch(num_ctas=session.num_sms)
    marks = [Marks(launch.num_ctas) for _ in range(NUM_KERNELS)]
    session.wait()

    def chain() -> None:
        for each in marks:
            occupy(launch, each, KERNEL_US)

    def zigzag() -> None:
        streams = (torch.cuda.current_stream(), side)
        for number, each in enumerate(marks):
            stream, before = streams[number % 2], streams[(number + 1) % 2]
            stream.wait_event(session.mark(before))
            with torch.cuda.stream(stream):
                occupy(launch, each, KERNEL_US)
        streams[0].wait_stream(side)

    side = torch.cuda.Stream()
    points = [
        point("launch_gap_us", _gaps_us(session, chain, marks), issued="eagerly"),
        point("launch_gap_us", _gaps_us(session, _captured(chain), marks), issued="in a graph"),
        point("dependency_latency_us", _gaps_us(session, zigzag, marks), issued="eagerly"),
    ]
    return [*points, _host_launch(session, marks[0])]


def _gaps_us(session: Session, issue: Issue, marks: list[Marks]) -> list[float]:
    """Gaps between consecutive kernels; the clock ticks coarsely on some GPUs, so means of tens are taken."""
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
    """The host's time for one launch, while the GPU keeps up."""
    launch, times = Launch(num_ctas=1, threads=32), []
    for _ in range(5):
        session.wait()
        start = time.perf_counter()
        for _ in range(NUM_HOST_LAUNCHES):
            occupy(launch, marks, 0.0)
        times.append((time.perf_counter() - start) * 1e6 / NUM_HOST_LAUNCHES)
    return point("host_launch_us", times, issued="by cuda-bindings")
