"""The order in which a captured call launches the first matmuls of its two computation streams.

A graph launches nodes with the same dependency in any order. If the second stream's matmul got in ahead of the first
stream's, the latter's sends left late, and the call took up to half as long again (2 H200s: docs/log.md, 2026-11-22). An
edge of the graph fixes the order: a kernel is launched when all blocks of another have begun, so that it fills the SMs
that the other leaves. CUDA promises only its best effort; H200s comply. Calls that are not captured are launched in the
host's order of issue.
"""

from cuda.bindings import driver as cu

from counterpoint.cuda.driver import Handle, check, waits_of
from counterpoint.ops.driver_calls import Call, Issue

KERNEL = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
PROGRAMMATIC = int(cu.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
ALL_BLOCKS_HAVE_BEGUN = cu.CU_GRAPH_KERNEL_NODE_PORT_LAUNCH_ORDER


def launch_behind(earlier: str, name: str, piece: Issue) -> Issue:
    """Launch `piece`, the first one of the stream `name`, in a capture after the last kernel so far of `earlier`."""

    def issue(call: Call) -> None:
        if not call.is_captured:
            piece(call)
            return
        first, second = call.handles[earlier], call.handles[name]
        graph, before = _captured(second)
        piece(call)
        leader, follower = _last_kernel(first, before), _first_kernel(second, before)
        if leader is not None and follower is not None:
            # if a driver rejects it, the order stays open, and results are the same
            cu.cuGraphAddDependencies(graph, [leader], [follower], [_launch_edge()], 1)

    return issue


def _captured(stream: Handle) -> tuple[Handle, list[int]]:
    """Return the graph that a stream is captured into, and the nodes for which the next captured node waits."""
    _, _, graph, nodes, _, number = check("Asking for the capture", cu.cuStreamGetCaptureInfo(stream))
    return graph, [int(node) for node in nodes[:number]]


def _last_kernel(stream: Handle, before: list[int]) -> Handle | None:
    """Return the stream's last node, if that is a kernel and none of these nodes: a matmul may be missing for few rows."""
    _, latest = _captured(stream)
    return _kernel(latest[0]) if len(latest) == 1 and latest[0] not in before else None


def _first_kernel(stream: Handle, before: list[int]) -> Handle | None:
    """Return the first kernel of a stream after these nodes, if its nodes are a chain."""
    _, latest = _captured(stream)
    found = None
    while len(latest) == 1 and latest[0] not in before:
        found = _kernel(latest[0]) or found
        latest = [node for node in waits_of(cu.CUgraphNode(latest[0])) if node not in before]
    return found


def _kernel(number: int) -> Handle | None:
    """Return the node of this number, if it is a kernel."""
    node = cu.CUgraphNode(number)
    return node if check("Asking for a node's type", cu.cuGraphNodeGetType(node)) == KERNEL else None


def _launch_edge() -> Handle:
    edge = cu.CUgraphEdgeData()
    edge.from_port, edge.type = ALL_BLOCKS_HAVE_BEGUN, PROGRAMMATIC
    return edge
