"""A captured graph in memory, and ranks that time it: everything the GPU layer decides can be tested without a GPU.

The double keeps what it is told, answers residency with `counterpoint.occupancy`, and can be told to misbehave as drivers
do: to refuse, or to accept a control and do nothing. Every call to the driver is counted, one for each node touched.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from threading import Barrier
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from counterpoint import Simulator
from counterpoint.controls import HeadStart, LightKernel, Priority, ResidencyCap, Transport
from counterpoint.cuda.graph import AbstractExecutable, AbstractGraph, GraphNode
from counterpoint.cuda.graph_reading import ReadGraph
from counterpoint.errors import DeviceError, PlanError
from counterpoint.machine import Gpu, Machine
from counterpoint.metrics import measure
from counterpoint.occupancy import residency
from counterpoint.plan import Directive, Match, Plan
from counterpoint.step import Footprint

T = TypeVar("T")
PATIENCE_S = 60.0


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """How the driver misbehaves. What is ignored is accepted without an error and does nothing."""

    refuses_copy: bool = False
    refuses_edits: bool = False
    ignores_priority: bool = False
    ignores_carveout: bool = False
    ignores_shared_memory: bool = False
    ignores_holds: bool = False
    ignores_copies: bool = False
    lacks_memory_for: Callable[["GraphDouble"], bool] = lambda graph: False


class Edit(NamedTuple):
    """One edit: which method, on which node, with which figures."""

    method: str
    node: int
    figures: tuple[float, ...]


class Log:
    """What a graph and all its copies asked of the driver."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.executables: list[ExecutableDouble] = []
        self.copies: list[GraphDouble] = []

    def num_open(self) -> int:
        return sum(each.is_open for each in (*self.executables, *self.copies))


class ExecutableDouble(AbstractExecutable):
    """Remembers the graph as it was made ready, and every launch."""

    def __init__(self, graph: "GraphDouble") -> None:
        self.nodes = graph.nodes()
        self.faults = graph.faults
        self.edits = tuple(graph.edits)
        self.residencies = {edit.node: graph.residency(edit.node) for edit in graph.edits if edit.method == "shared_memory"}
        self.streams: list[int] = []
        self.is_open = True

    def launch(self, stream: int) -> None:
        assert self.is_open, "a freed graph cannot be launched"
        self.streams.append(stream)

    def close(self) -> None:
        assert self.is_open, "a graph is freed once"
        self.is_open = False


class GraphDouble(AbstractGraph):
    """A graph of the given nodes on the given GPU."""

    def __init__(
        self,
        nodes: Sequence[GraphNode],
        gpu: Gpu,
        faults: Faults | None = None,
        log: Log | None = None,
        obstacles: Mapping[int, str] | None = None,
        *,
        light: Collection[int] = (),
    ) -> None:
        self.gpu = gpu
        self.faults = faults or Faults()
        self.log = log or Log()
        self.edits: list[Edit] = []
        self._nodes = list(nodes)
        self.is_open = True
        self._holds: dict[int, float] = {}
        self._copied: dict[int, int] = {}
        self._light = light  # nodes whose place a light kernel can take
        self._obstacles = dict(obstacles or {})  # by node: why no copies can take its place; empty: they can

    def nodes(self) -> tuple[GraphNode, ...]:
        return tuple(self.node(number) for number in range(len(self._nodes)))

    def node(self, number: int) -> GraphNode:
        assert self.is_open, "a freed graph cannot be read"
        self.log.num_calls += 1
        return self._nodes[number]

    def copy(self) -> "GraphDouble":
        self.log.num_calls += len(self._nodes)
        if self.faults.refuses_copy:
            raise DeviceError("Copying the graph failed with CUDA_ERROR_NOT_SUPPORTED: update the driver.")
        self.log.copies.append(GraphDouble(self._nodes, self.gpu, self.faults, self.log, self._obstacles, light=self._light))
        return self.log.copies[-1]

    def set_shared_memory(self, node: int, dynamic_bytes: int, carveout_percent: int) -> None:
        self._note("shared_memory", node, dynamic_bytes, carveout_percent)
        footprint = self._footprint(node)
        if not self.faults.ignores_shared_memory:
            footprint = replace(footprint, dynamic_shared_bytes=dynamic_bytes)
        if not self.faults.ignores_carveout and carveout_percent >= 0:
            footprint = replace(footprint, carveout_percent=carveout_percent)
        self._nodes[node] = replace(self._nodes[node], footprint=footprint)

    def set_priority(self, node: int, priority: int) -> None:
        self._note("priority", node, priority)
        if not self.faults.ignores_priority:
            self._nodes[node] = replace(self._nodes[node], priority=priority)

    def hold_before(self, node: int, hold_us: float) -> None:
        self._note("hold", node, hold_us)
        if not self.faults.ignores_holds:
            self._holds[node] = hold_us

    def held_us(self, node: int) -> float:
        self.log.num_calls += 1
        return self._holds.get(node, 0.0)

    def obstacle_to_copies(self, node: int) -> str:
        return self._obstacles.get(node, "no copies were prepared")

    def move_to_copies(self, node: int) -> None:
        assert not self.obstacle_to_copies(node), "an obstacle is asked for first"
        assert node not in self._copied, "a collective is moved once"
        self._note("copies", node)
        self._copied[node] = 0 if self.faults.ignores_copies else 1 << 20

    def copied_bytes(self, node: int) -> int:
        self.log.num_calls += 1
        return self._copied.get(node, 0)

    def obstacle_to_light_kernel(self, node: int) -> str:
        return "" if node in self._light else "no light kernels were prepared"

    def move_to_light_kernel(self, node: int, num_ctas: int) -> None:
        assert not self.obstacle_to_light_kernel(node), "an obstacle is asked for first"
        self._note("light_kernel", node, num_ctas)
        if not self.faults.ignores_copies:
            light = Footprint(num_ctas=num_ctas, threads_per_cta=128, registers_per_thread=32)
            self._nodes[node] = replace(self._nodes[node], name="counterpoint_light_push", footprint=light, priority=0)

    def residency(self, node: int) -> int:
        self.log.num_calls += 1
        return residency(self.gpu, self._footprint(node)).ctas_per_sm

    def serialize(self) -> None:
        self._nodes = [
            replace(node, waits_for=tuple(sorted({*node.waits_for, number - 1})) if number else node.waits_for)
            for number, node in enumerate(self._nodes)
        ]

    def instantiate(self) -> ExecutableDouble:
        if self.faults.lacks_memory_for(self):
            raise DeviceError("Instantiating the graph failed with CUDA_ERROR_OUT_OF_MEMORY: GPU memory is used up.")
        executable = ExecutableDouble(self)
        self.log.executables.append(executable)
        return executable

    def close(self) -> None:
        assert self in self.log.copies, "a captured graph is freed by its owner"
        assert self.is_open, "a copy is freed once"
        self.is_open = False

    def _footprint(self, node: int) -> Footprint:
        footprint = self._nodes[node].footprint
        assert footprint is not None, f"node {node} is no kernel"
        return footprint

    def _note(self, method: str, node: int, *figures: float) -> None:
        assert self.is_open, "a freed graph cannot be edited"
        if self.faults.refuses_edits:
            raise DeviceError(
                f"Setting {method.upper()} of a node failed with CUDA_ERROR_INVALID_VALUE: the driver rejects it."
            )
        self.log.num_calls += 1
        self.edits.append(Edit(method, node, figures))


class Ranks:
    """Ranks that run in threads and exchange values in lockstep; one that never comes breaks the wait of the others."""

    def __init__(self, number: int) -> None:
        self._values: list[Any] = [None] * number
        self._barrier = Barrier(number)

    def exchange(self, rank: int, value: T) -> list[T]:
        """Everyone's value, by rank, on every rank."""
        self._values[rank] = value
        self._barrier.wait(PATIENCE_S)
        everyone = list(self._values)
        self._barrier.wait(PATIENCE_S)
        return everyone


class ReplayDouble:
    """A captured step whose replays take what `plan_us` says of the plan that its executable holds, times the noise.

    `noise` is given the number of the replay. The plan is rebuilt from the edits; one directive for each operation.
    """

    def __init__(
        self,
        graph: GraphDouble,
        read: ReadGraph,
        plan_us: Callable[[Plan], float],
        *,
        noise: Callable[[int], float] = lambda replay: 1.0,
        ranks: Ranks | None = None,
        rank: int = 0,
    ) -> None:
        self.graph = graph
        self.read = read
        self.replays: list[Plan] = []
        self._plan_us = plan_us
        self._noise = noise
        self._ranks = ranks or Ranks(1)
        self._rank = rank

    def time_us(self, executable: AbstractExecutable) -> float:
        assert isinstance(executable, ExecutableDouble), "only what the double made can be timed on it"
        executable.launch(0)
        plan = plan_of(executable, self.read)
        own_us = self._plan_us(plan) * self._noise(len(self.replays))
        self.replays.append(plan)
        return max(self._ranks.exchange(self._rank, own_us))

    def agree(self, text: str) -> str:
        everyone = self._ranks.exchange(self._rank, (self.read.step.fingerprint(), text))
        if len({fingerprint for fingerprint, _ in everyone}) > 1:
            raise PlanError("The ranks captured different steps, so one plan cannot fit them.")
        return everyone[0][1]

    def is_everywhere(self, is_true: bool) -> bool:
        return all(self._ranks.exchange(self._rank, is_true))


def plan_of(executable: ExecutableDouble, read: ReadGraph) -> Plan:
    """The plan whose controls an executable's edits are."""
    operations: Mapping[int, int] = {node: index for index, node in enumerate(read.nodes)}
    directives = []
    for edit in executable.edits:
        match edit.method:
            case "copies":
                control: Priority | ResidencyCap | HeadStart | Transport | LightKernel = Transport(transport="copy_engine")
            case "light_kernel":
                control = LightKernel(num_ctas=int(edit.figures[0]))
            case "priority":
                control = Priority(priority=int(edit.figures[0]))
            case "hold":
                control = HeadStart(hold_us=edit.figures[0])
            case _:
                dynamic_bytes, percent = (int(figure) for figure in edit.figures)
                ctas_per_sm = executable.residencies[edit.node]
                control = ResidencyCap(ctas_per_sm=ctas_per_sm, dynamic_shared_bytes=dynamic_bytes, carveout_percent=percent)
        match_ = Match(operations=(operations[edit.node],))
        directives.append(Directive(match=match_, controls=(control,), reason="found in the graph"))
    return Plan(directives=tuple(directives))


def controls_of(plan: Plan) -> frozenset[str]:
    """The kinds of controls in a plan."""
    return frozenset(str(control.__struct_config__.tag) for directive in plan.directives for control in directive.controls)


def simulated_us(read: ReadGraph, machine: Machine) -> Callable[[Plan], float]:
    """A clock that goes by the simulator."""
    return lambda plan: measure(Simulator().run(read.step, machine, plan)).makespan_us


def contents(graph: GraphDouble) -> bytes:
    """All that a graph is, to see whether anything changed."""
    return msgspec.json.encode((graph.nodes(), graph.edits, [graph.held_us(node) for node in range(len(graph.nodes()))]))
