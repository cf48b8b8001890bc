"""Reach the CUDA graphs that others capture: torch.compile, `make_graphed_callables`, a serving engine.

The methods of torch's graph class itself are exchanged for the time of the hook, so whoever holds the class, by whatever
name, is reached, and putting the methods back is enough to be out again. While the hook is on, graphs keep what they
captured, each is copied when its capture ends, and replays launch what was given in place of the original.

What torch does in a replay beside the launch is not repeated here: `reached.py` has what that means for random numbers, and
from torch 2.14 a graph that is replaced runs none of torch's replay hooks. Knows nothing of plans or of ranks, nor of torch,
which `torch_graphs.py` hands in.
"""

import threading
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import msgspec

from counterpoint.cuda.graph import AbstractExecutable, AbstractGraph
from counterpoint.cuda.reached import CudaGraph, GraphAccess, ReachedGraph, first_line
from counterpoint.errors import INSTALL, DeviceError

OnCapture = Callable[[AbstractGraph], AbstractExecutable | None]


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
        self._methods = _find(access.graph_class, self._around())
        _exchange(access.graph_class, self._around(), self._methods)
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
        around: dict[str, Callable[..., Any]] = {
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
                self._notes.append(f"Graph {number} is left as it is: {first_line(problem)}")
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


def _find(graph_class: type[Any], names: Iterable[str]) -> dict[str, _Exchanged]:
    if graph_class.replay.__module__ == __name__:
        raise DeviceError("Captured graphs are already reached by another hook, and there can be one. Stop that one first.")
    own = vars(graph_class)
    return {name: _Exchanged(getattr(graph_class, name), (own[name],) if name in own else ()) for name in names}


def _exchange(graph_class: type[Any], around: dict[str, Callable[..., Any]], methods: dict[str, _Exchanged]) -> None:
    for name, call in around.items():
        method = _method(call, methods[name].original)
        setattr(graph_class, name, staticmethod(method) if name == "__new__" else method)


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


def reach_graphs(on_capture: OnCapture, access: GraphAccess | None = None) -> Reached:
    """Switch the hook on: each graph captured from now on is copied and shown to `on_capture`, one at a time.

    What `on_capture` returns is launched by `replay()` from the second replay on; None leaves the graph, which can still be
    replaced later through `graphs`. A graph that its owner keeps (`keep_graph=True`) is reached when it is made ready to
    run. One that cannot be copied (it allocates memory), draws random numbers, or for which `on_capture` raises, is left
    as it is, and `notes` says why. `access` is torch's own unless given. Raises `DeviceError` without torch, or if another
    hook is on.
    """
    return Reached(on_capture, access or _torch_access())


def _torch_access() -> GraphAccess:
    try:
        from counterpoint.cuda.torch_graphs import torch_access  # noqa: PLC0415  the hook itself needs no torch
    except ImportError as problem:
        raise DeviceError(
            f"'{problem.name}' is needed to reach captured graphs and cannot be imported. {INSTALL}"
        ) from problem
    return torch_access()
