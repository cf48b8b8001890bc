"""One captured graph that the hook reached: what stands in for it in replays, and its random state.

Torch's own replay moves random states on before it launches (CUDAGraph::replay in torch's CUDAGraph.cpp), which launching
another graph does not. So the first replay is always torch's own and shows whether the graph draws random numbers; one that
does is left as it is. Knows nothing of torch, which `torch_graphs.py` hands in as a `GraphAccess`.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from counterpoint.cuda.graph import AbstractExecutable, AbstractGraph
from counterpoint.errors import DeviceError, cause_of

MAX_CAUSE_LENGTH = 200
ONLY_TORCH_REPLAYS = "it draws random numbers, and only torch's own replay moves their state on"
CudaGraph = Any  # torch.cuda.CUDAGraph, or a double of it


class GraphAccess(msgspec.Struct, frozen=True, kw_only=True):
    """What the hook asks of torch and the driver.

    `copy` gives a copy of a captured graph and the call that frees it. `device` is the current one; `random_state` that of a
    device's default generator; `launch` takes the device the graph was captured on and launches on its current stream.
    `sheltered` is entered around calls that would break a capture of another thread. `register_capture_end` is torch's own
    hook, where it has one.
    """

    graph_class: type[Any]
    copy: Callable[[CudaGraph], tuple[AbstractGraph, Callable[[], None]]]
    device: Callable[[], int]
    random_state: Callable[[int], bytes]
    launch: Callable[[AbstractExecutable, int], None]
    sheltered: Callable[[], AbstractContextManager[None]]
    register_capture_end: Callable[[Callable[[CudaGraph], None]], Any] | None = None


class ReachedGraph:
    """A graph that was reached: its copy, to read and to edit copies of, and what its replays launch."""

    def __init__(self, number: int, access: GraphAccess, note: Callable[[str], None], source: CudaGraph) -> None:
        self.number = number
        self._access = access
        self._note = note
        self._device = access.device()
        self.graph, self._free_graph = access.copy(source)
        self._draws: bool | None = None  # unknown before the first replay
        self._executable: AbstractExecutable | None = None
        self._is_open = True
        self._lock = threading.RLock()  # a collection of garbage may close a graph at any point

    @property
    def is_replaced(self) -> bool:
        """Whether replays launch something else than the original, the first replay excepted."""
        return self._executable is not None

    def replace(self, executable: AbstractExecutable) -> None:
        """Launch `executable` in replays from now on; it is freed here when it is replaced, reverted or out of use.

        Raises `DeviceError` for a graph that draws random numbers, or is gone; the executable then stays the caller's.
        """
        with self._lock:
            if not self._is_open:
                raise DeviceError(f"Graph {self.number} is gone or its hook is stopped. Reach it again, then replace it.")
            if self._draws:
                raise DeviceError(f"Graph {self.number} cannot be replaced: {ONLY_TORCH_REPLAYS}. Capture it without them.")
            self.revert()
            self._executable = executable

    def revert(self) -> None:
        """Launch the original from now on."""
        with self._lock:
            executable, self._executable = self._executable, None
            if executable is not None:
                self._free(executable.close)

    def close(self) -> None:
        """Revert and free the copy; the graph cannot be replaced any more."""
        with self._lock:
            self.revert()
            if self._is_open:
                self._is_open = False
                self._free(self._free_graph)

    def replay(self, original: Callable[[], None]) -> None:
        """Launch what stands in for the graph, or run torch's own replay."""
        with self._lock:
            if self._draws is None:
                self._observe(original)
            elif self._executable is None or not self._has_launched(self._executable):
                original()

    def leave_random(self) -> None:
        """Note that the graph draws random numbers, and leave it as it is."""
        with self._lock:
            self._draws = True
            self.revert()
            self._note(f"Graph {self.number} is left as it is: {ONLY_TORCH_REPLAYS}.")

    def _observe(self, original: Callable[[], None]) -> None:
        """Run torch's own replay and see whether it moves the random state."""
        before = self._access.random_state(self._device)
        original()
        self._draws = self._access.random_state(self._device) != before
        if self._draws:
            self.leave_random()

    def _has_launched(self, executable: AbstractExecutable) -> bool:
        try:
            self._access.launch(executable, self._device)
        except Exception as problem:  # whatever it is, the job's own graph can still run
            self._note(f"Graph {self.number} is as it was again: {first_line(problem)}")
            self.revert()
            return False
        return True

    def _free(self, free: Callable[[], None]) -> None:
        try:
            with self._access.sheltered():
                free()
        except Exception as problem:  # reverting must never stop the job
            self._note(f"Graph {self.number} could not be freed: {first_line(problem)}")


def first_line(problem: Exception) -> str:
    """The first line of an error, as the end of a note."""
    first = cause_of(problem, MAX_CAUSE_LENGTH).rstrip(".")
    return f"{first}." if isinstance(problem, DeviceError) else f"{type(problem).__name__}: {first}."
