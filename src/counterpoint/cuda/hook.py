"""Reach the CUDA graphs that others capture: torch.compile, `make_graphed_callables`, a serving engine.

The methods of torch's graph class itself are exchanged for the time of the hook, so whoever holds the class, by whatever name,
is reached, and putting the methods back is enough to be out again. While the hook is on, graphs keep what they captured,
each is copied when its capture ends, and replays launch what was given in place of the original.

What torch does in a replay beside the launch is not repeated here. It moves random states on (aten/src/ATen/cuda/CUDAGraph.cpp),
so the first replay is always torch's own and shows whether the graph draws random numbers; one that does is left as it is.
From torch 2.14 it also runs replay hooks: a graph that is replaced runs none. Knows nothing of plans or of ranks.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

import msgspec

from counterpoint.cuda.graph import AbstractExecutable, AbstractGraph
from counterpoint.errors import DeviceError

MAX_CAUSE_LENGTH = 200
ONLY_TORCH_REPLAYS = "it draws random numbers, and only torch's own replay moves their state on"
CudaGraph = Any  # torch.cuda.CUDAGraph, or a double of it
OnCapture = Callable[[AbstractGraph], AbstractExecutable | None]


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
        self.graph, self._free_graph = access.copy(source)
        self._access = access
        self._note = note
        self._device = access.device()
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
        except DeviceError as problem:
            self._note(f"Graph {self.number} is as it was again: {_cause(problem)}")
            self.revert()
            return False
        return True

    def _free(self, free: Callable[[], None]) -> None:
        try:
            with self._access.sheltered():
                free()
        except DeviceError as problem:  # reverting must never stop the job
            self._note(f"Graph {self.number} could not be freed: {_cause(problem)}")


class Reached:
    """The hook while it is on, and what it reached. Made by `reach_graphs`; also a context manager that stops at its end."""

    def __init__(self, on_capture: OnCapture, access: GraphAccess) -> None:
        self._on_capture = on_capture
        self._access = access
        self._notes: list[str] = []
        self._num_captures = 0
        self._records: weakref.WeakKeyDictionary[CudaGraph, ReachedGraph] = weakref.WeakKeyDictionary()
        self._owner_keeps: weakref.WeakKeyDictionary[CudaGraph, bool] = weakref.WeakKeyDictionary()
        self._unread: weakref.WeakSet[CudaGraph] = weakref.WeakSet()
        self._random: weakref.WeakSet[CudaGraph] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._thread = threading.local()  # graphs that on_capture itself captures are not reached
        self._is_active = True
        self._methods = _exchange(access.graph_class, self._around())
        self._registered = access.register_capture_end(self._end) if access.register_capture_end else None

    def __enter__(self) -> "Reached":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def graphs(self) -> tuple[ReachedGraph, ...]:
        """The graphs that were reached and still live, in the order of their captures."""
        with self._lock:
            return tuple(sorted(self._records.values(), key=lambda record: record.number))

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each graph that was left as it is, and why."""
        return tuple(self._notes)

    def stop(self) -> None:
        """Put torch's methods back. Graphs that were reached go on as they were captured; a second call does nothing."""
        with self._lock:
            if not self._is_active:
                return
            self._is_active = False
            _put_back(self._access.graph_class, self._methods)
            if self._registered is not None:
                self._registered.remove()
            for record in self.graphs:
                record.close()

    def _around(self) -> dict[str, Callable[..., Any]]:
        """What is called in place of each method, the original being its first argument."""
        around = {
            "__new__": self._make,
            "__init__": self._initialize,
            "instantiate": self._instantiate,
            "replay": self._replay,
            "reset": self._reset,
            "register_generator_state": self._register_generator,
        }
        # torch 2.14 ends captures in two halves, so there its own hook says when
        return around if self._access.register_capture_end else {**around, "capture_end": self._capture_end}

    def _make(self, original: Callable[..., Any], graph_class: type[Any], keep_graph: bool = False) -> CudaGraph:
        return original(graph_class, keep_graph=True)

    def _initialize(self, original: Callable[..., None], graph: CudaGraph, keep_graph: bool = False) -> None:
        original(graph, keep_graph=True)
        self._owner_keeps[graph] = keep_graph

    def _capture_end(self, original: Callable[..., None], graph: CudaGraph) -> None:
        original(graph)
        if self._owner_keeps.get(graph) is False:
            self._methods["instantiate"].original(graph)  # as torch does at this point without keep_graph
        self._end(graph)

    def _end(self, graph: CudaGraph) -> None:
        """A capture has ended. Its owner may still edit a graph that he keeps himself, until it is made ready to run."""
        if self._owner_keeps.get(graph):
            self._unread.add(graph)
        else:
            self._reach(graph)

    def _instantiate(self, original: Callable[..., None], graph: CudaGraph) -> None:
        original(graph)
        if self._owner_keeps.get(graph):
            self._reach(graph)

    def _replay(self, original: Callable[..., None], graph: CudaGraph) -> None:
        record = self._records.get(graph)
        if record is not None:
            record.replay(lambda: original(graph))
            return
        original(graph)
        if graph in self._unread:
            self._reach(graph)

    def _reset(self, original: Callable[..., None], graph: CudaGraph) -> None:
        self._forget(graph)
        self._random.discard(graph)
        original(graph)

    def _register_generator(self, original: Callable[..., None], graph: CudaGraph, *generators: object) -> None:
        self._random.add(graph)
        original(graph, *generators)

    def _forget(self, graph: CudaGraph) -> None:
        self._unread.discard(graph)
        record = self._records.pop(graph, None)
        if record is not None:
            record.close()

    def _reach(self, graph: CudaGraph) -> None:
        """Copy a graph, show it to `on_capture` and install what that returns; one graph at a time, and never an error."""
        if getattr(self._thread, "is_reaching", False):
            return
        with self._lock:
            if not self._is_active:
                return
            number = self._num_captures
            self._num_captures += 1
            self._thread.is_reaching = True
            try:
                with self._access.sheltered():
                    self._show(number, graph)
            except Exception as problem:  # whatever it is, the job's own capture is intact
                self._notes.append(f"Graph {number} is left as it is: {_cause(problem)}")
            finally:
                self._thread.is_reaching = False

    def _show(self, number: int, graph: CudaGraph) -> None:
        self._forget(graph)
        record = ReachedGraph(number, self._access, self._notes.append, graph)
        self._records[graph] = record
        # at the end of the process the driver may be gone before the graphs
        weakref.finalize(graph, record.close).atexit = False
        if graph in self._random:
            record.leave_random()
            return
        executable = self._on_capture(record.graph)
        if executable is not None:
            record.replace(executable)


class _Exchanged(msgspec.Struct, frozen=True):
    """A method that was exchanged: as callers found it, and as the class itself held it, if it did."""

    original: Callable[..., Any]
    own: tuple[object, ...]


def _exchange(graph_class: type[Any], around: dict[str, Callable[..., Any]]) -> dict[str, _Exchanged]:
    if graph_class.replay.__module__ == __name__:
        raise DeviceError("Captured graphs are already reached by another hook, and there can be one. Stop that one first.")
    methods = {}
    for name, call in around.items():
        own = (vars(graph_class)[name],) if name in vars(graph_class) else ()
        methods[name] = _Exchanged(getattr(graph_class, name), own)
        method = _method(call, methods[name].original)
        setattr(graph_class, name, staticmethod(method) if name == "__new__" else method)
    return methods


def _method(call: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    return method


def _put_back(graph_class: type[Any], methods: dict[str, _Exchanged]) -> None:
    for name, method in methods.items():
        if method.own:
            setattr(graph_class, name, method.own[0])
        else:
            delattr(graph_class, name)


def _cause(problem: Exception) -> str:
    """The first line of an error, as the end of a note."""
    first = str(problem).strip().split("\n")[0][:MAX_CAUSE_LENGTH].rstrip(".")
    return f"{first}." if isinstance(problem, DeviceError) else f"{type(problem).__name__}: {first}."


def reach_graphs(on_capture: OnCapture, access: GraphAccess | None = None) -> Reached:
    """Switch the hook on: each graph captured from now on is copied and shown to `on_capture`, one at a time.

    What `on_capture` returns is launched by `replay()` from the second replay on; None leaves the graph, which can still be
    replaced later through `graphs`. A graph that its owner keeps (`keep_graph=True`) is reached when it is made ready to run. One
    that cannot be copied (it allocates memory), draws random numbers, or for which `on_capture` raises, is left as it is, and `notes`
    says why. `access` is torch's own unless given. Raises `DeviceError` without torch, or if another hook is on.
    """
    return Reached(on_capture, access or torch_access())


def torch_access() -> GraphAccess:
    """Torch's graphs and the CUDA driver. Raises `DeviceError` where torch or cuda-bindings is not installed."""
    try:
        import torch  # noqa: PLC0415  the hook itself needs neither
        from cuda.bindings import driver as cu  # noqa: PLC0415

        from counterpoint.cuda.driver import DriverGraph, check  # noqa: PLC0415
    except ImportError as problem:
        raise DeviceError(
            f"'{problem.name}' is needed to reach captured graphs and is not installed. Install it: pip install 'counterpoint[cuda]'."
        ) from problem

    def copy(graph: CudaGraph) -> tuple[AbstractGraph, Callable[[], None]]:
        copied = DriverGraph(graph.raw_cuda_graph()).copy()
        return copied, copied.close

    def launch(executable: AbstractExecutable, device: int) -> None:
        with torch.cuda.device(device):
            executable.launch(torch.cuda.current_stream().cuda_stream)

    @contextmanager
    def sheltered() -> Iterator[None]:
        relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = check("Relaxing this thread's capture mode", cu.cuThreadExchangeStreamCaptureMode(relaxed))
        try:
            yield
        finally:
            check("Restoring this thread's capture mode", cu.cuThreadExchangeStreamCaptureMode(before))

    return GraphAccess(
        graph_class=torch.cuda.CUDAGraph,
        copy=copy,
        device=torch.cuda.current_device,
        random_state=lambda device: torch.cuda.default_generators[device].get_state().numpy().tobytes(),
        launch=launch,
        sheltered=sheltered,
        register_capture_end=getattr(torch.cuda.graphs, "register_graph_capture_end_hook", None),
    )
