"""Times a kernel with fewer of its CTAs per SM: in a captured graph, the kernel is given more shared memory."""

from contextlib import closing
from functools import partial

import msgspec
import torch

from counterpoint.cuda.driver_graph import DriverGraph
from counterpoint.cuda.probes.session import Issue, Session
from counterpoint.errors import DeviceError
from counterpoint.measurement.points import Point, point
from counterpoint.occupancy import cap_shared_bytes, residency
from counterpoint.step import Footprint


def residency_times(
    session: Session, issue: Issue, name: str, ctas_per_sm: tuple[int, ...], **at: float | str
) -> list[Point]:
    """Time the single kernel that `issue` launches: unchanged, then at each residency in `ctas_per_sm` below its own.

    If `at` holds `loaded_ms`, the kernel runs for that many milliseconds before it is timed.
    """
    recorded = torch.cuda.CUDAGraph(keep_graph=True)
    issue()
    session.wait()
    with torch.cuda.graph(recorded, capture_error_mode="thread_local"):
        issue()
    graph = DriverGraph(recorded.raw_cuda_graph())
    kernels = [number for number, node in enumerate(graph.nodes()) if node.kind == "kernel"]
    if len(kernels) != 1:
        raise DeviceError(f"one kernel was expected in the captured call, and {len(kernels)} were found")
    footprint = graph.node(kernels[0]).footprint
    assert footprint is not None, "a kernel has a footprint"
    usual = residency(session.gpu, footprint).ctas_per_sm
    at = {
        "ctas": footprint.num_ctas,
        "threads": footprint.threads_per_cta,
        "registers": footprint.registers_per_thread,
        "shared_bytes": footprint.shared_bytes,
        **at,
    }
    points = [_timed(session, graph, kernels[0], None, name, ctas_per_sm=usual, **at)]
    for count in ctas_per_sm:
        if count < usual:
            wanted = cap_shared_bytes(session.gpu, footprint, count)
            capped = msgspec.structs.replace(footprint, dynamic_shared_bytes=wanted)
            points.append(_timed(session, graph, kernels[0], capped, name, ctas_per_sm=count, **at))
    return points


def _timed(session: Session, graph: DriverGraph, node: int, capped: Footprint | None, name: str, **at: float | str) -> Point:
    with closing(graph.copy()) as edited:
        if capped is not None:
            edited.set_shared_memory(node, capped.dynamic_shared_bytes, -1)
            found = edited.residency(node)
            if found != at["ctas_per_sm"]:
                raise DeviceError(f"the driver puts {found} CTAs on an SM, but {at['ctas_per_sm']} were requested")
        with closing(edited.instantiate()) as executable:
            launch = partial(executable.launch, torch.cuda.current_stream().cuda_stream)
            session.keep_busy(launch, float(at.get("loaded_ms", 0)) / 1000)
            times = session.times_us(launch, calls=3)
    return point(name, times, **at)
