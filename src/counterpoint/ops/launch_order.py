"""In which order a captured call launches the first matmuls of its two computation streams.

A graph launches what waits for the same thing in any order. Where the second stream's matmul got in ahead of the first
stream's, what that one sends left late, and the call took up to half as long again (2 H200s: docs/log.md, 2026-11-22). An
edge of the graph tells the order: a kernel is launched when all blocks of another have begun, so that it fills the SMs that
the other leaves, and never takes them first. Calls that are not captured are launched in the order the host issues them.
"""

from typing import Any

from cuda.bindings import driver as cu

from counterpoint.cuda.driver import check, waits_of
from counterpoint.ops.issuing import Call, Issue

Handle = Any  # cuda-bindings has no types
KERNEL = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
PROGRAMMATIC = int(cu.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
ALL_BLOCKS_HAVE_BEGUN = cu.CU_GRAPH_KERNEL_NODE_PORT_LAUNCH_ORDER


def launch_behind(earlier: str, name: str, piece: Issue) -> Issue:
    """`piece`, the first one of the stream `name`, launched in a capture behind the last kernel so far of `earlier`."""

    def issue(call: Call) -> None:
        if not call.is_captured:
            piece(call)
            return
        first, second = call.handles[earlier], call.handles[name]
        _, before = _captured(second)
        piece(call)
        graph, ahead = _captured(first)
        kernel = _first_kernel(second, before)
        if kernel is not None and len(ahead) == 1 and _is_kernel(ahead[0]):
            check("Ordering two matmuls", cu.cuGraphAddDependencies(graph, ahead, [kernel], [_launch_edge()], 1))

    return issue


def _captured(stream: Handle) -> tuple[Handle, list[Handle]]:
    """The graph that a stream is captured into, and the nodes that whatever is captured next waits for."""
    _, _, graph, nodes, _, number = check("Asking for the capture", cu.cuStreamGetCaptureInfo(stream))
    return graph, list(nodes[:number])


def _first_kernel(stream: Handle, before: list[Handle]) -> Handle | None:
    """The first kernel that a stream got after these nodes, if what it got is a chain."""
    known = {int(node) for node in before}
    _, latest = _captured(stream)
    kernel = None
    while len(latest) == 1 and int(latest[0]) not in known:
        kernel = latest[0] if _is_kernel(latest[0]) else kernel
        latest = [cu.CUgraphNode(node) for node in waits_of(latest[0]) if node not in known]
    return kernel


def _is_kernel(node: Handle) -> bool:
    return bool(check("Asking for a node's type", cu.cuGraphNodeGetType(node)) == KERNEL)


def _launch_edge() -> Handle:
    edge = cu.CUgraphEdgeData()
    edge.from_port, edge.type = ALL_BLOCKS_HAVE_BEGUN, PROGRAMMATIC
    return edge
