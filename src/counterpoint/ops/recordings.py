"""Calls that come again at the same addresses, recorded as CUDA graphs: one launch in place of dozens of driver calls.

A training step calls an operator at the same addresses in every step, because torch's allocator repeats itself. What
such a call issues is captured once and then replayed: launching the graph takes the host 11 to 18 us, where call by
call the operator takes 98 to 192, and NCCL with a matmul 43 to 54 (2 H200s, 2026-11-21). A call at addresses that are
new is issued as it stands.

Knows nothing of schedules: a key says what a call would issue, to the last address.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cache
from typing import final

import torch

MAX_RECORDINGS = 1024  # of one group: 32 layers with 4 linears, forward and backward, are 256
SIGHTINGS_BEFORE = 2  # recording costs about a ms, and the first steps have addresses of their own
IDLE_CALLS = 8 * MAX_RECORDINGS  # a recording that was not replayed for so many calls makes room
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
LEAST_CONNECTIONS = 8  # CUDA's default; branches of a graph that wait for other GPUs must not block each other


@final
class Recordings:
    """Which calls of one group on one GPU are recorded, and which are worth it."""

    def __init__(self) -> None:
        self._graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph] = OrderedDict()  # least recently replayed first
        self._last_call: dict[Hashable, int] = {}
        self._sightings: OrderedDict[Hashable, int] = OrderedDict()  # of calls that are not recorded
        self._num_calls = 0
        self.is_enabled = int(os.environ.get(CONNECTIONS, LEAST_CONNECTIONS)) >= LEAST_CONNECTIONS

    def __len__(self) -> int:
        return len(self._graphs)

    def find(self, key: Hashable) -> torch.cuda.CUDAGraph | None:
        """The recording of a call, or None."""
        self._num_calls += 1
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            self._last_call[key] = self._num_calls
        return graph

    def is_due(self, key: Hashable) -> bool:
        """Whether a call that has no recording, now seen once more, has come often enough, and there is room."""
        seen = self._sightings.pop(key, 0)
        if seen >= SIGHTINGS_BEFORE and self._has_room():
            return True
        self._sightings[key] = seen + 1
        if len(self._sightings) > 2 * MAX_RECORDINGS:
            self._sightings.popitem(last=False)
        return False

    def keep(self, key: Hashable, graph: torch.cuda.CUDAGraph) -> None:
        """Have this recording for this call from now on."""
        self._graphs[key] = graph
        self._last_call[key] = self._num_calls

    def clear(self) -> None:
        """Forget all; graphs in flight end first."""
        self._graphs.clear()
        self._last_call.clear()
        self._sightings.clear()

    def _has_room(self) -> bool:
        """Whether one more may be recorded, in place of one that has been idle if need be."""
        if len(self._graphs) < MAX_RECORDINGS:
            return True
        oldest = next(iter(self._graphs))
        if self._num_calls - self._last_call[oldest] < IDLE_CALLS:
            return False
        del self._graphs[oldest], self._last_call[oldest]
        return True


def capture(stream: torch.cuda.Stream, issue: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """What `issue` puts on this stream, and on streams that it forks and joins again, as a graph; nothing runs yet.

    Memory that torch takes meanwhile, cuBLAS's workspaces above all, comes from a pool that lives as long as the
    process: graphs hold its addresses, and others may make torch forget the workspaces.
    """
    return _captured(stream, issue, _first_graph(stream.device).pool())


@cache
def _first_graph(device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph that keeps its pool alive: torch 2.11 fails to capture into a pool whose graphs are all gone."""
    return _captured(torch.cuda.Stream(device), lambda: torch.zeros(1, device=device), None)


def _captured(stream: torch.cuda.Stream, issue: Callable[[], object], pool: tuple[int, int] | None) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        # other threads, and this one's garbage collector, may call what a strict capture would forbid
        graph.capture_begin(pool, capture_error_mode="relaxed")
        try:
            issue()
        finally:
            graph.capture_end()
    return graph
