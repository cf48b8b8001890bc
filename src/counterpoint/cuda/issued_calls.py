"""Records the collectives that a step issues while it is captured: the data that each moves, its ranks, and its nodes in
the graph. Sizes of matrix multiplications are recorded, too.

torch calls an operator of its dispatcher for every collective and every matmul, however it was called, and `NotedCalls`
intercepts these operators. A call's nodes are those that it added to the captured graph, so that no collective is mistaken
for another one's kernel.

Event nodes are left out: NCCL's graph mixing puts one before and one after each collective (2.28: wait_event, kernel,
event_record). They keep the communicator's work inside and outside of graphs in order, whatever replaces the collective.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, final

import msgspec
import torch
import torch.distributed as dist
from cuda.bindings import driver as cu
from torch.utils._python_dispatch import TorchDispatchMode

from counterpoint.cuda.collective_blocks import Extent, IssuedCollective, Reduction
from counterpoint.cuda.driver import check, handles_of, waits_of
from counterpoint.step import MatmulSizes

TYPES = cu.CUgraphNodeType
ORDERING = (TYPES.CU_GRAPH_NODE_TYPE_WAIT_EVENT, TYPES.CU_GRAPH_NODE_TYPE_EVENT_RECORD, TYPES.CU_GRAPH_NODE_TYPE_EMPTY)
REDUCTIONS: dict[int, Reduction] = {0: "sum", 1: "mean"}  # torch's c10d::ReduceOp::RedOpType


def extent_of(tensor: torch.Tensor) -> Extent:
    """Return the location of a tensor."""
    return Extent(
        address=tensor.data_ptr(), num_elements=tensor.numel(), dtype=tensor.dtype, is_contiguous=tensor.is_contiguous()
    )


def _all_reduce(tensors: Sequence[torch.Tensor], group: Any, reduction: Any, *_: object) -> IssuedCollective | None:
    if len(tensors) != 1:
        return None
    place = extent_of(tensors[0])
    return IssuedCollective(
        collective="all_reduce", group=_group(group), given=place, got=place, reduction=_reduction(reduction)
    )


def _all_gather(output: torch.Tensor, given: torch.Tensor, group: Any, *_: object) -> IssuedCollective:
    return IssuedCollective(collective="all_gather", group=_group(group), given=extent_of(given), got=extent_of(output))


def _reduce_scatter(output: torch.Tensor, given: torch.Tensor, group: Any, reduction: Any, *_: object) -> IssuedCollective:
    return IssuedCollective(
        collective="reduce_scatter",
        group=_group(group),
        given=extent_of(given),
        got=extent_of(output),
        reduction=_reduction(reduction),
    )


def _all_to_all(
    output: torch.Tensor, given: torch.Tensor, group: Any, rows_got: list[int], rows_given: list[int], *_: object
) -> IssuedCollective:
    return IssuedCollective(
        collective="all_to_all",
        group=_group(group),
        given=extent_of(given),
        got=extent_of(output),
        lengths_given=_elements(given, rows_given),
        lengths_got=_elements(output, rows_got),
    )


def _group(group: Any) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(group)


def _reduction(reduction: Any) -> Reduction:
    return REDUCTIONS.get(int(reduction.op()), "other")


def _elements(tensor: torch.Tensor, rows: Sequence[int]) -> tuple[int, ...]:
    row = tensor.numel() // tensor.shape[0] if tensor.numel() else 0
    return tuple(number * row for number in rows)


READERS: dict[object, Callable[..., IssuedCollective | None]] = {
    torch.ops.c10d.allreduce_.default: _all_reduce,
    torch.ops.c10d._allgather_base_.default: _all_gather,
    torch.ops.c10d._reduce_scatter_base_.default: _reduce_scatter,
    torch.ops.c10d.alltoall_base_.default: _all_to_all,
}


LEFT_MATRIX: dict[object, int] = {  # number of the argument that is the left matrix; the right one follows
    torch.ops.aten.mm.default: 0,
    torch.ops.aten.mm.out: 0,
    torch.ops.aten.addmm.default: 1,
    torch.ops.aten.addmm.out: 1,
    torch.ops.aten._scaled_mm.default: 0,
    torch.ops.aten._scaled_mm.out: 0,
}


@final
class NotedCalls(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
    """Records the collectives that are issued in a capture while this mode is active, in their order, and the rows, inner
    size and columns of matmuls by the handles of their nodes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[IssuedCollective] = []
        self.matmul_sizes: dict[int, MatmulSizes] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled parts of a step are captured compiled, not run eagerly because of this mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (left := LEFT_MATRIX.get(func)) is not None:  # there are many, and all nodes of one are on its stream
            _, earlier = _under_capture()
            result = func(*args, **(kwargs or {}))
            (rows, inner), (_, columns) = args[left].shape, args[left + 1].shape
            self.matmul_sizes |= dict.fromkeys(_nodes_since(earlier), (rows, inner, columns))
            return result
        if (reader := READERS.get(func)) is None:
            return func(*args, **(kwargs or {}))
        before = set(_nodes_of_capture())
        result = func(*args, **(kwargs or {}))
        if (noted := reader(*args, **(kwargs or {}))) is not None:
            added = tuple(node for node in _nodes_of_capture() if node not in before and _is_work(node))
            self.collectives.append(msgspec.structs.replace(noted, nodes=added))
        return result


def _under_capture() -> tuple[Any, list[int]]:
    """Return the graph under capture, or None, and the nodes that the next work of the current stream will wait for."""
    stream = cu.CUstream(torch.cuda.current_stream().cuda_stream)
    _, _, graph, last, *_, number = check("Asking for the graph under capture", cu.cuStreamGetCaptureInfo(stream))
    return (graph, [int(node) for node in last[:number]]) if graph is not None and int(graph) else (None, [])


def _nodes_of_capture() -> list[int]:
    """Return the handles of the nodes that the graph under capture holds so far."""
    graph, _ = _under_capture()
    return [] if graph is None else [int(node) for node in handles_of(graph)]


def _nodes_since(earlier: Collection[int]) -> list[int]:
    """Return the nodes that do work on the current stream after the nodes where it ended `earlier`."""
    _, left = _under_capture()
    found, seen = list[int](), set(earlier)
    while left:
        if (node := left.pop()) not in seen:
            seen.add(node)
            left += waits_of(cu.CUgraphNode(node))
            if _is_work(node):
                found.append(node)
    return found


def _is_work(node: int) -> bool:
    """Return whether a node does work: nodes that only order others do not."""
    return check("Reading a node's type", cu.cuGraphNodeGetType(cu.CUgraphNode(node))) not in ORDERING
