"""Doubles of torch's graph class and of what the hook asks of torch and the driver: no torch and no GPU.

A test holds a `Torch` of its own, captures and replays graphs as a job would, and reads what was launched, copied and freed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from counterpoint.cuda.graph import AbstractExecutable, AbstractGraph, GraphNode
from counterpoint.cuda.hook import Reached
from counterpoint.cuda.reached import GraphAccess
from counterpoint.machine import load_machine
from counterpoint.step import Footprint
from helpers.graph_double import ExecutableDouble, Faults, GraphDouble

GPU = load_machine("h200").gpu
KERNEL = GraphNode(
    kind="kernel", name="matmul", footprint=Footprint(num_ctas=1, threads_per_cta=32, registers_per_thread=32)
)
PRIORITY = -5
DEVICE = 3


class NativeGraph:
    """What torch's class inherits: like a C++ class, it takes `keep_graph` in `__init__` and refuses what torch refuses."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.keeps = keep_graph
        self.nodes: list[GraphNode] | None = None
        self.is_ready = False
        self.num_replays = 0
        self.draws = False
        self.generators: list[object] = []
        self.faults = Faults()

    def register_generator_state(self, generator: object) -> None:
        self.generators.append(generator)


class CudaGraphDouble(NativeGraph):
    """Like torch.cuda.CUDAGraph. `state` stands for the device's random state."""

    state = 0
    was_made_to_keep: bool

    def __new__(cls, keep_graph: bool = False) -> "CudaGraphDouble":
        made = super().__new__(cls)
        made.was_made_to_keep = keep_graph  # torch 2.14 notes it here, and earlier ones nowhere
        return made

    def capture_end(self) -> None:
        if self.nodes is not None:
            raise RuntimeError("the capture was invalidated")
        self.nodes = [KERNEL]
        if not self.keeps:
            self.is_ready = True

    def instantiate(self) -> None:
        assert self.nodes is not None, "capture_end comes first"
        self.is_ready = True

    def replay(self) -> None:
        self.is_ready = True
        self.num_replays += 1
        type(self).state += self.draws

    def reset(self) -> None:
        self.nodes, self.is_ready = None, False


class Torch:
    """A torch of its own for each test: a fresh graph class, and what was asked of the driver."""

    def __init__(self, has_own_hook: bool = False) -> None:
        self.graph_class: type[CudaGraphDouble] = type("CudaGraph", (CudaGraphDouble,), dict(vars(CudaGraphDouble)))
        self.copies: list[GraphDouble] = []
        self.freed: list[GraphDouble] = []
        self.launches: list[tuple[AbstractExecutable, int]] = []
        self.hooks: dict[int, Callable[[Any], None]] = {}
        self.launch_problem: Exception | None = None
        self.during_launch: Callable[[], None] = lambda: None
        self.num_sheltered = 0
        self.access = GraphAccess(
            graph_class=self.graph_class,
            copy=self.copy,
            device=lambda: DEVICE,
            random_state=lambda device: bytes([self.graph_class.state, device]),
            launch=self.launch,
            sheltered=self.sheltered,
            register_capture_end=self.register if has_own_hook else None,
        )

    def copy(self, graph: CudaGraphDouble) -> tuple[GraphDouble, Callable[[], None]]:
        assert self.num_sheltered, "copying could end another thread's capture"
        if not graph.keeps:
            raise RuntimeError("You cannot access the raw graph unless keep_graph=true\nC++ stack")
        assert graph.nodes is not None
        copied = GraphDouble(graph.nodes, GPU, graph.faults).copy()
        self.copies.append(copied)
        return copied, lambda: self.free(copied)

    def free(self, copied: GraphDouble) -> None:
        assert self.num_sheltered, "freeing could end another thread's capture"
        assert copied not in self.freed, "a copy is freed once"
        self.freed.append(copied)

    def launch(self, executable: AbstractExecutable, device: int) -> None:
        if self.launch_problem is not None:
            raise self.launch_problem
        self.during_launch()
        executable.launch(0)
        self.launches.append((executable, device))

    @contextmanager
    def sheltered(self) -> Iterator[None]:
        self.num_sheltered += 1
        yield
        self.num_sheltered -= 1

    def register(self, hook: Callable[[Any], None]) -> "Handle":
        self.hooks[0] = hook
        return Handle(self.hooks)

    def capture(self, keep_graph: bool = False) -> CudaGraphDouble:
        graph = self.graph_class(keep_graph=keep_graph)
        graph.capture_end()
        return graph


class Handle:
    """What torch gives for a hook that it registered."""

    def __init__(self, hooks: dict[int, Callable[[Any], None]]) -> None:
        self.hooks = hooks

    def remove(self) -> None:
        self.hooks.clear()


class Planner:
    """An `on_capture` that raises the priority of the first node on a copy, and remembers what it gave."""

    def __init__(self) -> None:
        self.given: list[ExecutableDouble] = []

    def __call__(self, graph: AbstractGraph) -> ExecutableDouble:
        edited = graph.copy()
        edited.set_priority(0, PRIORITY)
        executable = edited.instantiate()
        assert isinstance(executable, ExecutableDouble)
        self.given.append(executable)
        return executable


def leave(graph: AbstractGraph) -> None:
    return None


def replay(graph: CudaGraphDouble, times: int) -> None:
    for _ in range(times):
        graph.replay()


def only(reached: Reached) -> Any:
    assert len(reached.graphs) == 1
    return reached.graphs[0]
