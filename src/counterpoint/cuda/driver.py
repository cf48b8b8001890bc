"""Captured graphs through the CUDA driver: `graph.py`'s contract on real handles.

The calls, and what they need, were tried on CUDA 13.0: a residency cap needs MAX_DYNAMIC_SHARED_SIZE_BYTES raised first; a
kernel node's handle may be a CUkernel; node priority counts only in a graph instantiated with USE_NODE_PRIORITY; clusters
survive the edits.
"""

import ctypes
import heapq
from collections.abc import Mapping
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Any

from cuda.bindings import driver as cu

from counterpoint.cuda.graph import AbstractExecutable, AbstractGraph, GraphNode
from counterpoint.errors import DeviceError
from counterpoint.step import Footprint

USE_NODE_PRIORITY = 8  # CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY
EXPLAINED = {
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible; run on a machine with one, or check CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_OUT_OF_MEMORY": "GPU memory is used up; free some, or measure fewer candidates",
    "CUDA_ERROR_NOT_SUPPORTED": "this driver or GPU cannot do it; update the driver",
    "CUDA_ERROR_INVALID_VALUE": "the driver rejects the value",
    "CUDA_ERROR_INSUFFICIENT_DRIVER": "the driver is older than the CUDA libraries; update it",
}
NOT_NOTED = "torch.distributed did not issue it by itself while the step was captured"
Handle = Any  # cuda-bindings has no types


def check(what: str, result: tuple[Any, ...]) -> Any:
    """Unpack a driver call's result; an error code becomes a `DeviceError` that names the call and the remedy."""
    error, *values = result
    if error != cu.CUresult.CUDA_SUCCESS:
        remedy = EXPLAINED.get(error.name, "see the CUDA driver's documentation of this code")
        raise DeviceError(f"{what} failed with {error.name}: {remedy}.")
    return values[0] if len(values) == 1 else values


def driver_version() -> str:
    """The newest CUDA version that the installed driver supports, as in "13.0"."""
    number = int(check("Asking for the driver's version", cu.cuDriverGetVersion()))
    return f"{number // 1000}.{number % 1000 // 10}"


class DriverExecutable(AbstractExecutable):
    """An instantiated graph."""

    def __init__(self, graph: Handle) -> None:
        self._exec = check("Instantiating the graph", cu.cuGraphInstantiate(graph, USE_NODE_PRIORITY))
        try:
            # takes what memory the replays need now, not when other ranks already wait in the first of them
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


class DriverGraph(AbstractGraph):
    """A captured graph, or a copy of one. The owner of the capture keeps the original handle alive."""

    def __init__(self, graph: Handle, copied_from: "DriverGraph | None" = None) -> None:
        self._graph = graph
        self._holds: dict[int, tuple[Handle, float]] = {}  # by node: the head start's own node, and how long it is
        # nodes as they were last read, for those that were not edited since
        self._known: dict[int, GraphNode] = {}
        # by node: the graph that may take its place, or why none can
        self._stand_ins: Mapping[int, Handle | str] = copied_from._stand_ins if copied_from is not None else {}
        self._replaced: dict[int, Handle] = {}  # by node: the node that stands in its place
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
            self._known[number] = _describe(self._handles[number], self._waits_for[number])
        return self._known[number]

    def copy(self) -> "DriverGraph":
        """See `AbstractGraph.copy`."""
        clone = check("Copying the graph (graphs that allocate memory cannot be copied)", cu.cuGraphClone(self._graph))
        return DriverGraph(clone, self)

    def set_shared_memory(self, node: int, dynamic_bytes: int, carveout_percent: int) -> None:
        """See `AbstractGraph.set_shared_memory`."""
        handle = self._edited(node)
        params = _kernel_params(handle)
        limit = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        function = _function(params)
        if dynamic_bytes > _attribute(function, "MAX_DYNAMIC_SHARED_SIZE_BYTES"):
            check("Raising a kernel's shared memory limit", cu.cuFuncSetAttribute(function, limit, dynamic_bytes))
        params.sharedMemBytes = dynamic_bytes
        check("Setting a kernel's shared memory", cu.cuGraphKernelNodeSetParams(handle, params))
        if carveout_percent >= 0:
            value = cu.CUkernelNodeAttrValue()
            value.sharedMemCarveout = carveout_percent
            _set_attribute(handle, "PREFERRED_SHARED_MEMORY_CARVEOUT", value)

    def set_priority(self, node: int, priority: int) -> None:
        """See `AbstractGraph.set_priority`."""
        value = cu.CUkernelNodeAttrValue()
        value.priority = priority
        _set_attribute(self._edited(node), "PRIORITY", value)

    def _edited(self, node: int) -> Handle:
        """The handle of a node that is about to change, so that what was read of it is forgotten."""
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

    def offer_copies(self, stand_ins: "Mapping[int, Handle | str]") -> None:
        """Say for collectives, by node, which graph of copies may take the node's place, or why none can.

        The graphs stay the caller's, and must live as long as this one and all that is made of it.
        """
        self._stand_ins = dict(stand_ins)

    def number_of(self, handle: int) -> int | None:
        """The number of a node, or None for a handle that is none of this graph's."""
        return next((number for number, each in enumerate(self._handles) if int(each) == handle), None)

    def obstacle_to_copies(self, node: int) -> str:
        """See `AbstractGraph.obstacle_to_copies`."""
        stand_in = self._stand_ins.get(node, NOT_NOTED)
        return stand_in if isinstance(stand_in, str) else ""

    def move_to_copies(self, node: int) -> None:
        """See `AbstractGraph.move_to_copies`."""
        old, earlier = self._edited(node), waits_of(self._handles[node])
        waits = [cu.CUgraphNode(handle) for handle in earlier]
        child = check("Adding copies", cu.cuGraphAddChildGraphNode(self._graph, waits, len(waits), self._stand_ins[node]))
        for later in _followers_of(old):
            check("Ordering copies", cu.cuGraphAddDependencies(self._graph, [child], [later], None, 1))
        check("Taking out a collective", cu.cuGraphDestroyNode(old))
        self._handles[node] = self._replaced[node] = child

    def copied_bytes(self, node: int) -> int:
        """See `AbstractGraph.copied_bytes`."""
        if node not in self._replaced:
            return 0
        inner = check("Reading a node's own graph", cu.cuGraphChildGraphNodeGetGraph(self._replaced[node]))
        device = check("Finding the GPU", cu.cuCtxGetDevice())
        return sum(_bytes_to_others(handle, int(device)) for handle in handles_of(inner))

    def residency(self, node: int) -> int:
        """See `AbstractGraph.residency`."""
        params = _kernel_params(self._handles[node])
        threads = params.blockDimX * params.blockDimY * params.blockDimZ
        query = cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(_function(params), threads, params.sharedMemBytes)
        return int(check("Asking for a kernel's occupancy", query))

    def serialize(self) -> None:
        """See `AbstractGraph.serialize`."""
        for number, (earlier, later) in enumerate(pairwise(self._handles), start=1):
            if number - 1 not in self._waits_for[number]:
                check("Ordering two nodes", cu.cuGraphAddDependencies(self._graph, [earlier], [later], None, 1))

    def instantiate(self) -> DriverExecutable:
        """See `AbstractGraph.instantiate`."""
        return DriverExecutable(self._graph)

    def close(self) -> None:
        """See `AbstractGraph.close`."""
        check("Freeing a copied graph", cu.cuGraphDestroy(self._graph))


def _waits(graph: Handle) -> dict[int, list[int]]:
    """For each node, by handle, the handles of what it waits for."""
    _, _, _, number = check("Counting the graph's edges", cu.cuGraphGetEdges(graph, 0))
    waits: dict[int, list[int]] = {}
    if number:
        earlier, later, _, _ = check("Reading the graph's edges", cu.cuGraphGetEdges(graph, number))
        for one, other in zip(earlier[:number], later[:number], strict=True):
            waits.setdefault(int(other), []).append(int(one))
    return waits


def waits_of(node: Handle) -> list[int]:
    """The handles of what one node of a graph waits for now."""
    _, _, number = check("Counting a node's dependencies", cu.cuGraphNodeGetDependencies(node, 0))
    if not number:
        return []
    earlier, _, _ = check("Reading a node's dependencies", cu.cuGraphNodeGetDependencies(node, number))
    return [int(handle) for handle in earlier[:number]]


def _followers_of(node: Handle) -> list[Handle]:
    """What waits for one node of a graph now."""
    _, _, number = check("Counting a node's followers", cu.cuGraphNodeGetDependentNodes(node, 0))
    if not number:
        return []
    later, _, _ = check("Reading a node's followers", cu.cuGraphNodeGetDependentNodes(node, number))
    return list(later[:number])


def handles_of(graph: Handle) -> list[Handle]:
    """The graph's nodes, as the driver lists them."""
    _, number = check("Counting the graph's nodes", cu.cuGraphGetNodes(graph, 0))
    if not number:
        return []
    nodes, _ = check("Reading the graph's nodes", cu.cuGraphGetNodes(graph, number))
    return list(nodes[:number])


def _bytes_to_others(handle: Handle, device: int) -> int:
    """How many bytes a node brings to another GPU; 0 unless it is such a copy."""
    if check("Reading a node's type", cu.cuGraphNodeGetType(handle)) != cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY:
        return 0
    params = check("Reading a copy", cu.cuGraphMemcpyNodeGetParams(handle))
    ordinal = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    places = (int(params.srcDevice), int(params.dstDevice))
    owners = {int(check("Asking where memory lies", cu.cuPointerGetAttribute(ordinal, place))) for place in places}
    return params.WidthInBytes * max(1, params.Height) * max(1, params.Depth) if owners - {device} else 0


def _topological(graph: Handle, waits: dict[int, list[int]]) -> list[Handle]:
    """The graph's nodes, each after all it waits for, otherwise as the driver lists them: the order of capture."""
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


def _describe(handle: Handle, waits_for: tuple[int, ...]) -> GraphNode:
    kind = check("Reading a node's type", cu.cuGraphNodeGetType(handle))
    types = cu.CUgraphNodeType
    if kind == types.CU_GRAPH_NODE_TYPE_KERNEL:
        return _describe_kernel(handle, waits_for)
    if kind == types.CU_GRAPH_NODE_TYPE_MEMSET:
        params = check("Reading a fill", cu.cuGraphMemsetNodeGetParams(handle))
        size = params.width * params.elementSize * max(1, params.height)
        return GraphNode(kind="copy", name="Memset (Device)", waits_for=waits_for, num_bytes=size, direction="set")
    if kind == types.CU_GRAPH_NODE_TYPE_MEMCPY:
        params = check("Reading a copy", cu.cuGraphMemcpyNodeGetParams(handle))
        size = params.WidthInBytes * max(1, params.Height) * max(1, params.Depth)
        return GraphNode(kind="copy", name="Memcpy", waits_for=waits_for, num_bytes=size)
    return GraphNode(kind="other", name=kind.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower(), waits_for=waits_for)


def _describe_kernel(handle: Handle, waits_for: tuple[int, ...]) -> GraphNode:
    params = _kernel_params(handle)
    function = _function(params)
    cluster = _get_attribute(handle, "CLUSTER_DIMENSION").clusterDim
    # the driver reports 0 for a node that never asked for a carveout
    carveout = int(_get_attribute(handle, "PREFERRED_SHARED_MEMORY_CARVEOUT").sharedMemCarveout) or -1
    footprint = Footprint(
        num_ctas=params.gridDimX * params.gridDimY * params.gridDimZ,
        threads_per_cta=params.blockDimX * params.blockDimY * params.blockDimZ,
        registers_per_thread=_attribute(function, "NUM_REGS"),
        static_shared_bytes=_attribute(function, "SHARED_SIZE_BYTES"),
        dynamic_shared_bytes=params.sharedMemBytes,
        ctas_per_cluster=max(1, cluster.x) * max(1, cluster.y) * max(1, cluster.z),
        carveout_percent=carveout if carveout <= 100 else -1,
    )
    return GraphNode(
        kind="kernel",
        name=_kernel_name(params),
        waits_for=waits_for,
        footprint=footprint,
        priority=_get_attribute(handle, "PRIORITY").priority,
        is_cooperative=bool(_get_attribute(handle, "COOPERATIVE").cooperative),
    )


def _kernel_params(handle: Handle) -> Handle:
    return check("Reading a kernel node", cu.cuGraphKernelNodeGetParams(handle))


def _function(params: Handle) -> Handle:
    if int(params.func):
        return params.func
    return check("Resolving a kernel", cu.cuKernelGetFunction(params.kern))


def _kernel_name(params: Handle) -> str:
    named = cu.cuFuncGetName(params.func) if int(params.func) else cu.cuKernelGetName(params.kern)
    name = check("Reading a kernel's name", named)
    return name.decode() if isinstance(name, bytes) else str(name)


def _attribute(function: Handle, name: str) -> int:
    attribute = getattr(cu.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
    return int(check(f"Reading {name} of a kernel", cu.cuFuncGetAttribute(attribute, function)))


def _get_attribute(handle: Handle, name: str) -> Handle:
    attribute = getattr(cu.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
    return check(f"Reading {name} of a node", cu.cuGraphKernelNodeGetAttribute(handle, attribute))


def _set_attribute(handle: Handle, name: str, value: Handle) -> None:
    attribute = getattr(cu.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
    check(f"Setting {name} of a node", cu.cuGraphKernelNodeSetAttribute(handle, attribute, value))


@cache
def _hold_function(context: int) -> Handle:
    """The head start kernel in the CUDA context of that handle."""
    image = resources.files("counterpoint.cuda").joinpath("hold.ptx").read_bytes() + b"\0"
    module = check(f"Loading the head start kernel in context {context:#x}", cu.cuModuleLoadData(image))
    return check("Finding the head start kernel", cu.cuModuleGetFunction(module, b"counterpoint_hold"))


def _hold_params(hold_us: float) -> Handle:
    """Launch parameters of a one-thread kernel that ends after `hold_us`."""
    params = cu.CUDA_KERNEL_NODE_PARAMS()
    params.func = _hold_function(int(check("Finding the CUDA context", cu.cuCtxGetCurrent())))
    params.gridDimX = params.gridDimY = params.gridDimZ = 1
    params.blockDimX = params.blockDimY = params.blockDimZ = 1
    params.kernelParams = ((round(hold_us * 1000),), (ctypes.c_ulonglong,))
    return params
