"""Reads a captured graph as a step: exact dependencies and footprints from the graph, times from replays.

A graph has no streams. Each node continues the chain of a node it waits for if that chain is free, else it starts a new one;
each such chain is a stream here. If a collective and a computation kernel wait for the same node, the kernel continues the
chain, and so is placed first: that is what the graphs of benchmarks/results/paper_4x_h200.json did. There a head start
shortens the steps whose collectives are the longer part by 10 to 13 %, which it could not if the collective were placed
first anyway. The graph does not hold the sizes of collectives: they come from the calls recorded during the capture, in the
order of issue.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from counterpoint.cuda.graph import GraphNode
from counterpoint.errors import StepError
from counterpoint.step import Collective, CollectiveKind, Copy, Dependency, Kernel, MatmulSizes, Operation, Step
from counterpoint.traces.classify import Group, classify_kernel, copy_direction, element_bytes, known_collective, name_groups
from counterpoint.value import Value

RECORDED_LIBRARIES = ("nccl", "rccl")  # libraries that torch.distributed calls, so their collectives are recorded
LEAST_CORRECTED_US = 50.0  # shorter operations vary more between two events than a profiler adds
LEAST_OF_PROFILED = 0.9  # share of a profiled time: a profiler adds less than that to any kernel that was tried


class CollectiveCall(Value, frozen=True, kw_only=True):
    """One collective that torch.distributed issued; `num_bytes` is counted as nccl-tests does."""

    collective: CollectiveKind
    num_bytes: int
    group_size: int
    process_group: str | None = None


class GraphTimes(Value, frozen=True, kw_only=True):
    """The time of each node when it runs alone, in microseconds, by node number; 0 for nodes without work.

    `names` are the full names that the profiler shows, by node number, if they are known.
    """

    device_name: str
    lone_us: tuple[float, ...]
    names: tuple[str, ...] = ()


class ReadGraph(Value, frozen=True, kw_only=True):
    """The step, and for each of its operations the number of its node in the graph."""

    step: Step
    nodes: tuple[int, ...]


def read_graph(
    name: str,
    nodes: Sequence[GraphNode],
    calls: Sequence[CollectiveCall],
    times: GraphTimes,
    num_ranks: int,
    *,
    matmul_sizes: Mapping[int, MatmulSizes] = MappingProxyType({}),
) -> ReadGraph:
    """Build the step of a graph. An operation that waits for a node without work (an event) depends on what that waits for.

    `matmul_sizes` are by node number; they may hold nodes of a matmul that are no matmul kernels. The size of a collective
    is 0 if it is not known: for libraries other than NCCL and RCCL, or if no call was recorded at all. Raises `StepError` if
    calls were recorded, but their number differs from the number of collectives in the graph.
    """
    if times.names:
        nodes = [replace(node, name=full) for node, full in zip(nodes, times.names, strict=True)]
    _check_calls(name, nodes, calls)
    streams = _chains(nodes)
    waiting_calls = list(calls)
    numbers: dict[int, int] = {}
    operations: list[Operation] = []
    for number, node in enumerate(nodes):
        if node.kind == "other":
            continue
        waits = tuple(Dependency(operation=numbers[wait]) for wait in _working(number, nodes))
        numbers[number] = len(operations)
        operation = _operation(node, streams[number], waits, times.lone_us[number], waiting_calls)
        if isinstance(operation, Kernel) and operation.character == "matmul":
            operation = replace(operation, matmul_sizes=matmul_sizes.get(number))
        operations.append(operation)
    step = Step(
        name=name,
        num_ranks=num_ranks,
        operations=tuple(without_waits(operations)),
        device_name=times.device_name,
        is_timed_in_bursts=True,
    )
    return ReadGraph(step=step, nodes=tuple(numbers))


def without_excess(profiled_us: Sequence[float], by_events_us: Sequence[float], corrected: Iterable[int]) -> list[float]:
    """Return profiled times of nodes, those of long ones in `corrected` without what the profiler adds: PyTorch's softmax
    takes up to 7 % longer with it. Times by events hold what two events take besides, as much for each node.
    """
    long = [number for number in corrected if profiled_us[number] >= LEAST_CORRECTED_US]
    excess_us = [by_events_us[number] - profiled_us[number] for number in long]
    events_us = max(0.0, statistics.median(excess_us)) if excess_us else 0.0
    found = list(profiled_us)
    for number in long:
        found[number] = min(found[number], max(by_events_us[number] - events_us, LEAST_OF_PROFILED * found[number]))
    return found


def without_waits(operations: Sequence[Operation]) -> list[Operation]:
    """Return the operations, each collective with the least time of its kind: the rest is waiting for other ranks.

    Timed alone, the first collective of a graph waits for ranks that begin later: the first of four equal all-to-alls on
    2 H200s took 798 us, the others 184 to 206 (2026-11-23).
    """
    least: dict[Operation, float] = {}
    for operation in operations:
        if isinstance(operation, Collective) and operation.lone_us is not None:
            key = _kind_of(operation)
            least[key] = min(operation.lone_us, least.get(key, operation.lone_us))
    return [
        replace(operation, lone_us=least[_kind_of(operation)])
        if isinstance(operation, Collective) and operation.lone_us is not None and operation.num_bytes
        else operation
        for operation in operations
    ]


def _kind_of(collective: Collective) -> Collective:
    """Return the collective without stream, time and dependencies: equal for collectives of one kind."""
    return replace(collective, stream=0, lone_us=None, waits_for=())


def read_calls(events: Iterable[Mapping[str, Any]]) -> list[CollectiveCall]:
    """Return the collectives among a profiler's events, in order of issue; an unknown size is 0, as in traces."""
    noted = sorted((event for event in events if event.get("name") == "record_param_comms"), key=lambda event: event["ts"])
    groups = name_groups(_group_of(event.get("args", {})) for event in noted)
    calls = []
    for event in noted:
        args = event.get("args", {})
        kind = known_collective(str(args.get("Collective name", "")))
        if kind is None:
            continue
        size = element_bytes(str(args.get("dtype", ""))) or 0
        elements = max(int(args.get("In msg nelems", 0)), int(args.get("Out msg nelems", 0)))
        calls.append(
            CollectiveCall(
                collective=kind,
                num_bytes=elements * size,
                group_size=int(args.get("Group size", 1)),
                process_group=groups.get(_group_of(args)),
            )
        )
    return calls


def _group_of(args: Mapping[str, Any]) -> Group:
    """Return name and description of the process group of a call."""
    name, description = (args.get(f"Process Group {what}") for what in ("Name", "Description"))
    return (None if name is None else str(name), None if description is None else str(description))


def _check_calls(name: str, nodes: Sequence[GraphNode], calls: Sequence[CollectiveCall]) -> None:
    held = sum(node.kind == "kernel" and classify_kernel(node.name).library in RECORDED_LIBRARIES for node in nodes)
    if calls and held != len(calls):
        raise StepError(
            f"The graph of '{name}' holds {held} collectives, but {len(calls)} were recorded while it was captured. "
            "Issue all of them through torch.distributed, and do not coalesce them."
        )


def _operation(
    node: GraphNode, stream: int, waits: tuple[Dependency, ...], lone_us: float, calls: list[CollectiveCall]
) -> Operation:
    if node.kind == "copy":
        return Copy(
            name=node.name,
            stream=stream,
            # the name that the profiler shows states the direction; the driver's copy node does not
            direction=node.direction if node.direction != "device_to_device" else copy_direction(node.name),
            num_bytes=node.num_bytes,
            lone_us=lone_us,
            waits_for=waits,
        )
    assert node.footprint is not None, "a kernel node has a footprint"
    rule = classify_kernel(node.name)
    if rule.kind != "communication":
        return Kernel(
            name=node.name,
            stream=stream,
            footprint=node.footprint,
            character=rule.character,
            lone_us=lone_us,
            is_work_sharing=rule.is_work_sharing,
            priority=node.priority,
            waits_for=waits,
        )
    is_recorded = bool(calls) and rule.library in RECORDED_LIBRARIES
    call = calls.pop(0) if is_recorded else CollectiveCall(collective=rule.collective, num_bytes=0, group_size=1)
    return Collective(
        name=node.name,
        stream=stream,
        collective=call.collective,
        num_bytes=call.num_bytes,
        group_size=call.group_size,
        process_group=call.process_group,
        priority=node.priority,
        library=rule.library or "nccl",
        footprint=node.footprint,
        lone_us=lone_us,
        waits_for=waits,
    )


def _working(number: int, nodes: Sequence[GraphNode]) -> list[int]:
    """Return the nodes with work that node `number` waits for, directly or through nodes without work."""
    found: set[int] = set()
    passed: set[int] = set()  # without it, nodes without work would be visited once for every path through them
    left = list(nodes[number].waits_for)
    while left:
        wait = left.pop()
        if wait in passed:
            continue
        passed.add(wait)
        if nodes[wait].kind == "other":
            left.extend(nodes[wait].waits_for)
        else:
            found.add(wait)
    return sorted(found)


def _is_communication(node: GraphNode) -> bool:
    return classify_kernel(node.name).kind == "communication"


def _chains(nodes: Sequence[GraphNode]) -> list[int]:
    """Return a stream number for each node: each stream is a chain of dependencies, which computation continues first."""
    computed_after = {
        wait for node in nodes if node.kind == "kernel" and not _is_communication(node) for wait in node.waits_for
    }
    last_of_chain: list[int] = []
    chains = []
    for number, node in enumerate(nodes):
        free = [chain for chain, last in enumerate(last_of_chain) if last in node.waits_for]
        if node.kind == "kernel" and _is_communication(node):
            free = [chain for chain in free if last_of_chain[chain] not in computed_after]
        if free:
            chains.append(free[0])
            last_of_chain[free[0]] = number
        else:
            chains.append(len(last_of_chain))
            last_of_chain.append(number)
    return chains
