"""The interface to a captured CUDA graph: read its nodes, edit a copy, run it.

`driver_graph.py` implements it on the driver; tests use an in-memory double. A node keeps its number through every edit.
"""

from abc import ABC, abstractmethod
from typing import Literal

from counterpoint.step import CopyDirection, Footprint
from counterpoint.value import Value


class GraphNode(Value, frozen=True, kw_only=True):
    """One node of a graph. `waits_for` are numbers of nodes earlier in topological order; only kernels have a `footprint`.

    `is_cooperative` kernels contain a grid barrier and need all their CTAs resident at once.
    """

    kind: Literal["kernel", "copy", "other"]
    name: str
    waits_for: tuple[int, ...] = ()
    footprint: Footprint | None = None
    priority: int = 0
    is_cooperative: bool = False
    num_bytes: int = 0
    direction: CopyDirection = "device_to_device"


class AbstractExecutable(ABC):
    """An instantiated graph."""

    @abstractmethod
    def launch(self, stream: int) -> None:
        """Start one replay on a stream, given by its driver handle."""

    @abstractmethod
    def close(self) -> None:
        """Free the graph."""


class AbstractGraph(ABC):
    """A graph whose nodes can be read and, on a copy, edited."""

    @abstractmethod
    def nodes(self) -> tuple[GraphNode, ...]:
        """Return all nodes as they are now, in topological order; the dependencies of delayed nodes leave out the delays."""

    @abstractmethod
    def node(self, number: int) -> GraphNode:
        """Return one node as it is now, as `nodes` would."""

    @abstractmethod
    def copy(self) -> "AbstractGraph":
        """Return an independent copy. Raises `DeviceError` if the driver cannot copy the graph, as with memory nodes."""

    @abstractmethod
    def set_shared_memory(self, node: int, dynamic_bytes: int, carveout_percent: int) -> None:
        """Give a kernel's CTAs `dynamic_bytes` of dynamic shared memory, and request the carveout; -1 leaves it."""

    @abstractmethod
    def set_priority(self, node: int, priority: int) -> None:
        """Give a kernel a launch priority; a lower number is a higher priority."""

    @abstractmethod
    def hold_before(self, node: int, hold_us: float) -> None:
        """Delay a node by `hold_us` after everything it waits for has ended; a second delay replaces the first."""

    @abstractmethod
    def held_us(self, node: int) -> float:
        """Return the delay before a node in microseconds, 0 if none."""

    @abstractmethod
    def obstacle_to_copies(self, node: int) -> str:
        """Return why copies cannot replace a node; empty if they can."""

    @abstractmethod
    def move_to_copies(self, node: int) -> None:
        """Replace a collective by copies between the GPUs, which `obstacle_to_copies` allows."""

    @abstractmethod
    def copied_bytes(self, node: int) -> int:
        """Return the bytes that the copies in a node's place send to other GPUs, as the driver reports; 0 without copies."""

    @abstractmethod
    def obstacle_to_light_kernel(self, node: int) -> str:
        """Return why a light kernel cannot replace a node; empty if it can."""

    @abstractmethod
    def move_to_light_kernel(self, node: int, num_ctas: int) -> None:
        """Replace a collective by a light kernel, which `obstacle_to_light_kernel` allows. It has priority 0."""

    @abstractmethod
    def residency(self, node: int) -> int:
        """Return how many CTAs of a kernel, as it would be launched now, fit on an SM, from the driver's occupancy query."""

    @abstractmethod
    def serialize(self) -> None:
        """Make each node wait for the one before it, so that a replay runs every node alone."""

    @abstractmethod
    def instantiate(self) -> AbstractExecutable:
        """Instantiate the graph with its node priorities. The result does not need the graph any more."""

    @abstractmethod
    def close(self) -> None:
        """Free a copy, which then cannot be used any more; a captured graph is freed by its owner."""
