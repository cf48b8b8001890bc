"""Calls the CUDA driver, raises its errors as Counterpoint's, and reads the nodes of a graph.

The function handle of a kernel node may be a CUkernel (tested on CUDA 13.0). `driver_graph.py` edits and runs graphs.
"""

from typing import Any

from cuda.bindings import driver as cu

from counterpoint.cuda.graph import GraphNode
from counterpoint.errors import DeviceError
from counterpoint.step import Footprint

EXPLAINED = {
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible; run on a machine with one, or check CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_OUT_OF_MEMORY": "there is not enough GPU memory; free some, or measure fewer candidates",
    "CUDA_ERROR_NOT_SUPPORTED": "this driver or GPU cannot do it; update the driver",
    "CUDA_ERROR_INVALID_VALUE": "the driver rejects the value",
    "CUDA_ERROR_INSUFFICIENT_DRIVER": "the driver is older than the CUDA libraries; update it",
}
PCI_BUS_ID_BYTES = 32
Handle = Any  # cuda-bindings has no types
SUCCESS = cu.CUresult.CUDA_SUCCESS


def check(what: str, result: tuple[Any, ...]) -> Any:
    """Unpack a driver call's result; an error code becomes a `DeviceError` that names the call and the remedy."""
    error, *values = result
    if error != SUCCESS:
        remedy = EXPLAINED.get(error.name, "see the CUDA driver's documentation of this code")
        raise DeviceError(f"{what} failed with {error.name}: {remedy}.")
    return values[0] if len(values) == 1 else values


def driver_version() -> str:
    """Return the newest CUDA version that the installed driver supports, as in "13.0"."""
    number = int(check("Asking for the driver's version", cu.cuDriverGetVersion()))
    return f"{number // 1000}.{number % 1000 // 10}"


def pci_bus_id(device: int) -> str:
    """Return a visible GPU's address on the PCI bus, as in "0000:18:00.0"."""
    handle = check("Finding a GPU", cu.cuDeviceGet(device))
    found: bytes = check("Asking for a GPU's place on the PCI bus", cu.cuDeviceGetPCIBusId(PCI_BUS_ID_BYTES, handle))
    return found.split(b"\0")[0].decode()


def waits_of(node: Handle) -> list[int]:
    """Return the handles of the nodes that a node of a graph waits for."""
    _, _, number = check("Counting a node's dependencies", cu.cuGraphNodeGetDependencies(node, 0))
    if not number:
        return []
    earlier, _, _ = check("Reading a node's dependencies", cu.cuGraphNodeGetDependencies(node, number))
    return [int(handle) for handle in earlier[:number]]


def followers_of(node: Handle) -> list[Handle]:
    """Return the nodes of a graph that wait for `node`."""
    _, _, number = check("Counting a node's followers", cu.cuGraphNodeGetDependentNodes(node, 0))
    if not number:
        return []
    later, _, _ = check("Reading a node's followers", cu.cuGraphNodeGetDependentNodes(node, number))
    return list(later[:number])


def handles_of(graph: Handle) -> list[Handle]:
    """Return the graph's nodes, in the driver's order."""
    _, number = check("Counting the graph's nodes", cu.cuGraphGetNodes(graph, 0))
    if not number:
        return []
    nodes, _ = check("Reading the graph's nodes", cu.cuGraphGetNodes(graph, number))
    return list(nodes[:number])


def describe_node(handle: Handle, waits_for: tuple[int, ...]) -> GraphNode:
    """Describe a node of a graph as it is now; `waits_for` are the numbers of earlier nodes."""
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
    params = kernel_params(handle)
    function = function_of(params)
    clusters = _get_attribute(handle, "CLUSTER_DIMENSION")
    cluster = clusters.clusterDim
    # the driver reports 0 for a node whose carveout was never set; then the function's own applies
    carveout = int(_get_attribute(handle, "PREFERRED_SHARED_MEMORY_CARVEOUT").sharedMemCarveout)
    carveout = carveout or function_attribute(function, "PREFERRED_SHARED_MEMORY_CARVEOUT")
    footprint = Footprint(
        num_ctas=params.gridDimX * params.gridDimY * params.gridDimZ,
        threads_per_cta=params.blockDimX * params.blockDimY * params.blockDimZ,
        registers_per_thread=function_attribute(function, "NUM_REGS"),
        static_shared_bytes=function_attribute(function, "SHARED_SIZE_BYTES"),
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


def kernel_params(handle: Handle) -> Handle:
    """Return a kernel node's launch parameters."""
    return check("Reading a kernel node", cu.cuGraphKernelNodeGetParams(handle))


def function_of(params: Handle) -> Handle:
    """Return the function that a kernel node launches in the current context."""
    if int(params.func):
        return params.func
    return check("Resolving a kernel", cu.cuKernelGetFunction(params.kern))


def _kernel_name(params: Handle) -> str:
    named = cu.cuFuncGetName(params.func) if int(params.func) else cu.cuKernelGetName(params.kern)
    name = check("Reading a kernel's name", named)
    return name.decode() if isinstance(name, bytes) else str(name)


def function_attribute(function: Handle, name: str) -> int:
    """Return one of a kernel's CU_FUNC_ATTRIBUTE values."""
    attribute = getattr(cu.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
    return int(check(f"Reading {name} of a kernel", cu.cuFuncGetAttribute(attribute, function)))


def _get_attribute(handle: Handle, name: str) -> Handle:
    """Return one of a kernel node's CU_LAUNCH_ATTRIBUTE values. Parts of it that are no numbers are read in its memory, so
    it must outlive them; so must parameters of nodes.
    """
    attribute = getattr(cu.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
    return check(f"Reading {name} of a node", cu.cuGraphKernelNodeGetAttribute(handle, attribute))


def set_attribute(handle: Handle, name: str, value: Handle) -> None:
    """Set one of a kernel node's CU_LAUNCH_ATTRIBUTE values."""
    attribute = getattr(cu.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
    check(f"Setting {name} of a node", cu.cuGraphKernelNodeSetAttribute(handle, attribute, value))
