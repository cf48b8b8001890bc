"""Implements `graph.py`'s interface with the CUDA driver, on handles of captured graphs.

Tested on CUDA 13.0: a residency cap requires MAX_DYNAMIC_SHARED_SIZE_BYTES to be raised first; node priority takes effect
only in a graph instantiated with USE_NODE_PRIORITY; the edits preserve clusters.
"""

import ctypes
import heapq
from collections.abc import Mapping
from functools import cache
from importlib import resources
from itertools import pairwise

import msgspec
from cuda.bindings import driver as cu

from counterpoint.cuda.driver import (
    Handle,
    check,
    describe_node,
    followers_of,
    function_attribute,
    function_of,
    handles_of,
    kernel_params,
    set_attribute,
    waits_of,
)
from counterpoint.cuda.graph import AbstractExecutable, AbstractGraph, GraphNode
from counterpoint.errors import DeviceError
from counterpoint.step import MatmulSizes

USE_NODE_PRIORITY = 8  # CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY
NOT_NOTED = "torch.distributed did not issue it directly while the step was captured"


class CopyGraph(msgspec.Struct, frozen=True, kw_only=True):
    """A replacement for a collective: a graph, and the addresses on other GPUs that its copies write to.

    The driver does not report reliably which GPU another process's memory is on, so the code that opened the memory
    records it.
    """

    graph: Handle
    targets: frozenset[int]


class LightLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """A light kernel that may replace a collective: its launch without the number of CTAs, and the data it points to."""

    params: Handle
    arguments: object


class DriverExecutable(AbstractExecutable):
    """An instantiated graph."""

    def __init__(self, graph: Handle) -> None:
        self._exec = check("Instantiating the graph", cu.cuGraphInstantiate(graph, USE_NODE_PRIORITY))
        try:
            # allocates the replays' memory now, not when other ranks already wait in the first replay
            check("Uploading the graph", cu.cuGraphUpload(self._exec, cu.CUstream(0)))
        except DeviceError:
            self.close()
            raise

    def launch(self, stream: int) -> None:
        """See `AbstractExecutable.launch`."""
        check("Launching the graph", cu.cuGraphLaunch(self._exec, cu.CUstream(stream)))

    def close(self) -> None:
        """See `AbstractExecutable.close`."""
        check("Freeing the graph", cu.cuGraphExecDestroy(self._exec))


class NodeEvents:
    """Events that a graph records, the first before its first node and one behind each."""

    def __init__(self, number: int) -> None:
        self.events = [check("Creating an event", cu.cuEventCreate(0)) for _ in range(number)]

    def times_us(self) -> list[float]:
        """Return the microseconds from each event to the next in a replay that has ended."""
        pairs = pairwise(self.events)
        return [1000 * check("Reading the time between two events", cu.cuEventElapsedTime(*pair)) for pair in pairs]

    def close(self) -> None:
        """Free the events; executables of the graph must not run any more."""
        for event in self.events:
            check("Freeing an event", cu.cuEventDestroy(event))


class DriverGraph(AbstractGraph):
    """A captured graph, or a copy of one. The owner of the capture keeps the original handle alive."""

    def __init__(self, graph: Handle, copied_from: "DriverGraph | None" = None) -> None:
        self._graph = graph
        self._holds: dict[int, tuple[Handle, float]] = {}  # by node: the node of its head start, and the head start's length
        # nodes as last read, unless edited since
        self._known: dict[int, GraphNode] = {}
        # by node: what may replace it, or why nothing can
        self._stand_ins: Mapping[int, CopyGraph | str] = copied_from._stand_ins if copied_from is not None else {}
        self._light: Mapping[int, LightLaunch | str] = copied_from._light if copied_from is not None else {}
        self._replaced: dict[int, Handle] = {}  # by node: the node that replaced it
        if copied_from is None:
            waits = _waits(graph)
            self._handles = _topological(graph, waits)
            numbers = {int(handle): number for number, handle in enumerate(self._handles)}
            earlier = [[numbers[wait] for wait in waits.get(int(handle), ())] for handle in self._handles]
            self._waits_for = [tuple(sorted(found)) for found in earlier]
            return
        self._handles = [
            check("Finding a copied node", cu.cuGraphNodeFindInClone(handle, graph)) for handle in copied_from._handles
        ]
        self._waits_for = copied_from._waits_for
        self._known = dict(copied_from._known)

    def nodes(self) -> tuple[GraphNode, ...]:
        """See `AbstractGraph.nodes`."""
        return tuple(self.node(number) for number in range(len(self._handles)))

    def node(self, number: int) -> GraphNode:
        """See `AbstractGraph.node`."""
        if number not in self._known:
            self._known[number] = describe_node(self._handles[number], self._waits_for[number])
        return self._known[number]

    def by_number(self, found: Mapping[int, MatmulSizes]) -> dict[int, MatmulSizes]:
        """Return sizes that are given by nodes' handles, by nodes' numbers."""
        return {number: found[int(handle)] for number, handle in enumerate(self._handles) if int(handle) in found}

    def copy(self) -> "DriverGraph":
        """See `AbstractGraph.copy`."""
        clone = check("Copying the graph (graphs that allocate memory cannot be copied)", cu.cuGraphClone(self._graph))
        return DriverGraph(clone, self)

    def set_shared_memory(self, node: int, dynamic_bytes: int, carveout_percent: int) -> None:
        """See `AbstractGraph.set_shared_memory`."""
        handle = self._edited(node)
        params = kernel_params(handle)
        limit = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        function = function_of(params)
        if dynamic_bytes > function_attribute(function, "MAX_DYNAMIC_SHARED_SIZE_BYTES"):
            check("Raising a kernel's shared memory limit", cu.cuFuncSetAttribute(function, limit, dynamic_bytes))
        params.sharedMemBytes = dynamic_bytes
        check("Setting a kernel's shared memory", cu.cuGraphKernelNodeSetParams(handle, params))
        if carveout_percent >= 0:
            value = cu.CUkernelNodeAttrValue()
            value.sharedMemCarveout = carveout_percent
            set_attribute(handle, "PREFERRED_SHARED_MEMORY_CARVEOUT", value)

    def set_priority(self, node: int, priority: int) -> None:
        """See `AbstractGraph.set_priority`."""
        value = cu.CUkernelNodeAttrValue()
        value.priority = priority
        set_attribute(self._edited(node), "PRIORITY", value)

    def _edited(self, node: int) -> Handle:
        """Return the handle of a node that is about to be edited, and drop what was read of it."""
        self._known.pop(node, None)
        return self._handles[node]

    def hold_before(self, node: int, hold_us: float) -> None:
        """See `AbstractGraph.hold_before`."""
        handle, params = self._handles[node], _hold_params(hold_us)
        if node in self._holds:
            hold, _ = self._holds[node]
            check("Changing a head start", cu.cuGraphKernelNodeSetParams(hold, params))
            self._holds[node] = hold, hold_us
            return
        earlier = [self._handles[number] for number in self._waits_for[node]]
        hold = check("Adding a head start", cu.cuGraphAddKernelNode(self._graph, earlier, len(earlier), params))
        check("Ordering a head start", cu.cuGraphAddDependencies(self._graph, [hold], [handle], None, 1))
        self._holds[node] = hold, hold_us

    def held_us(self, node: int) -> float:
        """See `AbstractGraph.held_us`."""
        if node not in self._holds:
            return 0.0
        hold, hold_us = self._holds[node]
        return hold_us if int(hold) in waits_of(self._handles[node]) else 0.0

    def offer_copies(self, stand_ins: Mapping[int, CopyGraph | str]) -> None:
        """Set for collectives, by node, what may replace the node, or why nothing can.

        The caller owns the stand-ins' memory, and keeps it as long as executables of this graph or of its copies exist.
        """
        self._stand_ins = dict(stand_ins)

    def offer_light_kernels(self, launches: Mapping[int, LightLaunch | str]) -> None:
        """Set for collectives, by node, which light kernel may replace the node, or why none can.

        The caller owns what the launches point to, and keeps it as long as executables of this graph or of its copies
        exist.
        """
        self._light = dict(launches)

    def number_of(self, handle: int) -> int | None:
        """Return the number of a node, or None if the handle is not one of this graph's."""
        return next((number for number, each in enumerate(self._handles) if int(each) == handle), None)

    def obstacle_to_copies(self, node: int) -> str:
        """See `AbstractGraph.obstacle_to_copies`."""
        stand_in = self._stand_ins.get(node, NOT_NOTED)
        return stand_in if isinstance(stand_in, str) else ""

    def move_to_copies(self, node: int) -> None:
        """See `AbstractGraph.move_to_copies`."""
        stand_in = self._stand_ins[node]
        assert isinstance(stand_in, CopyGraph), "obstacles are asked for first"
        old = self._edited(node)
        waits = [cu.CUgraphNode(handle) for handle in waits_of(old)]
        child = check("Adding copies", cu.cuGraphAddChildGraphNode(self._graph, waits, len(waits), stand_in.graph))
        self._handles[node] = self._replaced[node] = self._put_in_place_of(old, child)

    def obstacle_to_light_kernel(self, node: int) -> str:
        """See `AbstractGraph.obstacle_to_light_kernel`."""
        launch = self._light.get(node, NOT_NOTED)
        return launch if isinstance(launch, str) else ""

    def move_to_light_kernel(self, node: int, num_ctas: int) -> None:
        """See `AbstractGraph.move_to_light_kernel`."""
        launch = self._light[node]
        assert isinstance(launch, LightLaunch), "obstacles are asked for first"
        old = self._edited(node)
        waits = [cu.CUgraphNode(handle) for handle in waits_of(old)]
        launch.params.gridDimX = num_ctas
        added = check("Adding a light kernel", cu.cuGraphAddKernelNode(self._graph, waits, len(waits), launch.params))
        self._handles[node] = self._put_in_place_of(old, added)

    def _put_in_place_of(self, old: Handle, new: Handle) -> Handle:
        """Make the followers of the old node wait for the new one, and remove the old one."""
        for later in followers_of(old):
            check("Ordering a node", cu.cuGraphAddDependencies(self._graph, [new], [later], None, 1))
        check("Taking out a collective", cu.cuGraphDestroyNode(old))
        return new

    def copied_bytes(self, node: int) -> int:
        """See `AbstractGraph.copied_bytes`."""
        stand_in = self._stand_ins.get(node)
        if node not in self._replaced or not isinstance(stand_in, CopyGraph):
            return 0
        inner = check("Reading a node's own graph", cu.cuGraphChildGraphNodeGetGraph(self._replaced[node]))
        return sum(_bytes_copied_to(stand_in.targets, handle) for handle in handles_of(inner))

    def residency(self, node: int) -> int:
        """See `AbstractGraph.residency`."""
        params = kernel_params(self._handles[node])
        threads = params.blockDimX * params.blockDimY * params.blockDimZ
        query = cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(function_of(params), threads, params.sharedMemBytes)
        return int(check("Asking for a kernel's occupancy", query))

    def serialize(self) -> None:
        """See `AbstractGraph.serialize`."""
        for number, (earlier, later) in enumerate(pairwise(self._handles), start=1):
            if number - 1 not in self._waits_for[number]:
                check("Ordering two nodes", cu.cuGraphAddDependencies(self._graph, [earlier], [later], None, 1))

    def serialize_with_events(self) -> NodeEvents:
        """Serialize the graph, and let it record the time between nodes."""
        events = NodeEvents(len(self._handles) + 1)
        before = check("Adding an event", cu.cuGraphAddEventRecordNode(self._graph, [], 0, events.events[0]))
        for handle, event in zip(self._handles, events.events[1:], strict=True):
            check("Ordering an event", cu.cuGraphAddDependencies(self._graph, [before], [handle], None, 1))
            before = check("Adding an event", cu.cuGraphAddEventRecordNode(self._graph, [handle], 1, event))
        return events

    def instantiate(self) -> DriverExecutable:
        """See `AbstractGraph.instantiate`."""
        return DriverExecutable(self._graph)

    def close(self) -> None:
        """See `AbstractGraph.close`."""
        check("Freeing a copied graph", cu.cuGraphDestroy(self._graph))


def _waits(graph: Handle) -> dict[int, list[int]]:
    """Return the handles of the nodes that each node waits for, by the node's handle."""
    _, _, _, number = check("Counting the graph's edges", cu.cuGraphGetEdges(graph, 0))
    waits: dict[int, list[int]] = {}
    if number:
        earlier, later, _, _ = check("Reading the graph's edges", cu.cuGraphGetEdges(graph, number))
        for one, other in zip(earlier[:number], later[:number], strict=True):
            waits.setdefault(int(other), []).append(int(one))
    return waits


def _bytes_copied_to(targets: frozenset[int], handle: Handle) -> int:
    """Return how many bytes a node copies to these addresses; 0 for any other node."""
    if check("Reading a node's type", cu.cuGraphNodeGetType(handle)) != cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY:
        return 0
    copied = check("Reading a copy", cu.cuGraphMemcpyNodeGetParams(handle))  # the address is read in its memory
    if int(copied.dstDevice) not in targets:
        return 0
    return describe_node(handle, ()).num_bytes


def _topological(graph: Handle, waits: dict[int, list[int]]) -> list[Handle]:
    """Return the graph's nodes in topological order, otherwise in the driver's order, which is the order of capture."""
    nodes = handles_of(graph)
    places = {int(node): place for place, node in enumerate(nodes)}
    missing = [len(waits.get(int(node), ())) for node in nodes]
    followers: dict[int, list[int]] = {}
    for later, earlier in waits.items():
        for handle in earlier:
            followers.setdefault(handle, []).append(places[later])
    ready = [place for place, count in enumerate(missing) if count == 0]
    ordered = []
    while ready:
        place = heapq.heappop(ready)
        ordered.append(nodes[place])
        for follower in followers.get(int(nodes[place]), ()):
            missing[follower] -= 1
            if missing[follower] == 0:
                heapq.heappush(ready, follower)
    return ordered


@cache
def _hold_function(context: int) -> Handle:
    """Load the head start kernel into the CUDA context with that handle, and return its function."""
    image = resources.files("counterpoint.cuda").joinpath("hold.ptx").read_bytes() + b"\0"
    module = check(f"Loading the head start kernel in context {context:#x}", cu.cuModuleLoadData(image))
    return check("Finding the head start kernel", cu.cuModuleGetFunction(module, b"counterpoint_hold"))


def _hold_params(hold_us: float) -> Handle:
    """Return the launch parameters of a one-thread kernel that ends after `hold_us`."""
    params = cu.CUDA_KERNEL_NODE_PARAMS()
    params.func = _hold_function(int(check("Finding the CUDA context", cu.cuCtxGetCurrent())))
    params.gridDimX = params.gridDimY = params.gridDimZ = 1
    params.blockDimX = params.blockDimY = params.blockDimZ = 1
    params.kernelParams = ((round(hold_us * 1000),), (ctypes.c_ulonglong,))
    return params
