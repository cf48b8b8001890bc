"""A cache of calls recorded as CUDA graphs: for calls that repeat at the same addresses, one launch replaces dozens of
driver calls.

A training step calls an operator at the same addresses in every step, because torch's allocator repeats itself. Such a
call is captured once and then replayed: launching the graph takes the host 11 to 18 us, whereas the operator takes 98 to
192 call by call, and NCCL with a matmul 43 to 54 (2 H200s, 2026-11-21). A call at new addresses is issued directly.

A call's first run cannot become part of a graph, Counterpoint's or a user's, because it allocates memory and compares
with other ranks on the host. `refuse_in_capture` reports that.

This module knows nothing of schedules: a key holds everything that a call would issue, to the last address. Graphs are
of torch's native class, so a job that patches `torch.cuda.CUDAGraph` finds its own graphs and none of these.
"""

import ctypes
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Generic, TypeVar, final

import torch
from torch._C import _CUDAGraph as Graph

from counterpoint.errors import DeviceError, OperatorError, cause_of
from counterpoint.ops.allocations import Allocations

LOGGER = logging.getLogger("counterpoint")
Key = tuple[Hashable, ...]  # a schedule, and everything else that determines what a call issues
Pool = tuple[int, int]  # torch's number of a memory pool
NOTHING = None, Allocations(())
R = TypeVar("R")  # a recording: a graph, and what its caller keeps with it

MAX_RECORDINGS = 1024  # most recordings of one group: 32 layers with 4 linears, forward and backward, are 256
NUM_SEEN_BEFORE = 2  # calls before one is recorded: recording takes about a ms, and the first steps have other addresses
IDLE_CALLS = 8 * MAX_RECORDINGS  # LRU eviction: only recordings that were not replayed for this many calls
SWITCH = "COUNTERPOINT_RECORDINGS"  # 0 turns recording off, for jobs whose other threads would disturb a capture
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING"
LEAST_CONNECTIONS = 8  # CUDA's default; branches of a graph that wait for other GPUs must not block each other


def is_possible() -> bool:
    """Return whether calls may be recorded in this process."""
    return (
        os.environ.get(SWITCH) != "0"
        and num_connections() >= LEAST_CONNECTIONS
        # memory taken in a capture must stay allocated: without a cache it is freed at once, and cudaMallocAsync makes
        # it part of that one graph, while the next graph would use it, too
        and UNCACHED not in os.environ
        and torch.cuda.get_allocator_backend() == "native"
    )


def num_connections() -> int:
    """Return how many hardware queues the process has, as CUDA reads its variable: by its leading number, in the process's
    own environment, where `counterpoint run --queues` writes another number than Python's copy has.
    """
    found = re.match(r"\s*\+?(\d+)", (_libc().getenv(CONNECTIONS.encode()) or b"").decode(errors="replace"))
    return int(found[1]) if found else LEAST_CONNECTIONS


@cache
def _libc() -> Any:
    library = ctypes.CDLL(None)
    library.getenv.restype = ctypes.c_char_p
    return library


def is_capturing(device: torch.device) -> bool:
    """Return whether work issued on that kind of device now is captured in a graph."""
    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


def refuse_in_capture(what: str, device: torch.device) -> None:
    """Raise `OperatorError` within a capture; `what` is about to run for the first time."""
    if is_capturing(device):
        raise OperatorError(
            f"{what} has not run before this capture, and its first run cannot be captured. Run it once before."
        )


@final
class Recordings(Generic[R]):
    """An LRU cache of the recorded calls of one group on one GPU; it decides which calls are worth recording."""

    def __init__(self, *, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self._recordings: OrderedDict[Key, tuple[R, Allocations]] = OrderedDict()  # least recently replayed first
        self._last_call: dict[Key, int] = {}
        self._num_seen: OrderedDict[Key, int] = OrderedDict()  # sightings of calls that are not recorded
        self._num_calls = 0

    def __len__(self) -> int:
        return len(self._recordings)

    def find(self, key: Key) -> R | None:
        """Return the recording of a call, or None. A recording whose memory went back to the driver is dropped."""
        self._num_calls += 1
        recording, allocations = self._recordings.get(key, NOTHING)
        if recording is None:
            return None
        if not allocations.are_present():
            del self._recordings[key], self._last_call[key]
            return None
        self._recordings.move_to_end(key)
        self._last_call[key] = self._num_calls
        return recording

    def is_due(self, key: Key) -> bool:
        """Count a call without a recording; return whether it has come often enough to be recorded, and there is room."""
        seen = self._num_seen.pop(key, 0)
        if seen >= NUM_SEEN_BEFORE and self._has_room():
            return True
        self._num_seen[key] = seen + 1
        if len(self._num_seen) > 2 * MAX_RECORDINGS:
            self._num_seen.popitem(last=False)
        return False

    def keep(self, key: Key, recording: R, addresses: Iterable[int]) -> None:
        """Keep this recording for this call. `addresses` are those in torch's memory that it copies from or to."""
        self._recordings[key] = recording, Allocations(addresses)
        self._last_call[key] = self._num_calls

    def forget(self, schedules: Sequence[Hashable]) -> None:
        """Forget the calls of these schedules, which are the first elements of their keys; graphs in flight end first."""
        of_these: list[OrderedDict[Key, Any] | dict[Key, Any]] = [self._recordings, self._last_call, self._num_seen]
        for entries in of_these:
            for key in [key for key in entries if key[0] in schedules]:
                del entries[key]

    def clear(self) -> None:
        """Forget all; graphs in flight end first."""
        self._recordings.clear()
        self._last_call.clear()
        self._num_seen.clear()

    def _has_room(self) -> bool:
        """Return whether one more may be recorded, if necessary in place of an idle one."""
        if len(self._recordings) < MAX_RECORDINGS:
            return True
        oldest = next(iter(self._recordings))
        if self._num_calls - self._last_call[oldest] < IDLE_CALLS:
            return False
        del self._recordings[oldest], self._last_call[oldest]
        return True


def capture(stream: torch.cuda.Stream, issue: Callable[[], object]) -> Graph:
    """Capture what `issue` puts on this stream, and on streams that it forks and joins again, as a graph; nothing runs
    yet.

    Memory that torch takes meanwhile, mainly cuBLAS's workspaces, comes from a pool of this stream that lives as long as
    its graphs: they hold its addresses, and other code may make torch forget the workspaces. (A pool that the caller has
    made the thread's own, `torch.cuda.use_mem_pool`, takes precedence in torch's allocator without any message:
    docs/ops.md warns.) After an error, torch is as it was.
    """
    current = torch.cuda.current_stream(stream.device)
    # torch begins a capture by writing, on this stream, the words from which random numbers in graphs start: the
    # caller's graphs that have yet to run read them
    stream.wait_stream(current)
    try:
        return _captured(stream, issue, _pool(stream))
    finally:
        current.wait_stream(stream)


def capture_or_disable(
    recordings: Recordings[Any], stream: torch.cuda.Stream, issue: Callable[[], object], what: str
) -> Graph | None:
    """Capture as `capture` does. If that fails, record nothing more, log the reason and return None: `what` can be issued
    without a recording.
    """
    try:
        return capture(stream, issue)
    except (RuntimeError, DeviceError) as problem:
        recordings.is_enabled = False
        reason = cause_of(problem)
        LOGGER.warning("%s are issued call by call, because recording one as a CUDA graph failed (%s).", what, reason)
        return None


def _pool(stream: torch.cuda.Stream) -> Pool:
    """Return the stream's pool. Streams of other groups have their own pools, because their graphs may run at the same
    time.
    """
    first = _first_graphs()
    if stream not in first:
        first[stream] = _captured(stream, lambda: torch.zeros(1, device=stream.device), None)
    pool: Pool = first[stream].pool()
    return pool


@cache
def _first_graphs() -> dict[torch.cuda.Stream, Graph]:
    """Hold, by stream, a graph that keeps its pool alive: torch 2.11 fails to capture into a pool whose graphs are all
    gone.
    """
    return {}


@cache
def _failed_graphs() -> list[Graph]:
    """Hold graphs whose capture failed, as long as the process lives: torch's allocator of pinned memory may go on
    asking them which stream they capture.
    """
    return []


def _captured(stream: torch.cuda.Stream, issue: Callable[[], object], pool: Pool | None) -> Graph:
    graph = Graph()
    with torch.cuda.stream(stream):
        try:
            # other threads, and this one's garbage collector, may make calls that a strict capture forbids
            graph.capture_begin(pool, capture_error_mode="relaxed")
            try:
                issue()
            finally:
                graph.capture_end()
        except BaseException:
            _failed_graphs().append(graph)
            _first_graphs().pop(stream, None)
            _tidy_up(stream.device, pool)
            raise
    return graph


def _tidy_up(device: torch.device, pool: Pool | None) -> None:
    """Undo what torch 2.11 leaves behind after a capture that could not begin or end.

    Its allocator would assume that the capture goes on, and its generator would refuse to draw random numbers for the
    rest of the process (CUDAGraph::capture_end in its CUDAGraph.cpp: both come after the driver's call). A capture that
    ends well resets the generator. Its allocator of pinned memory cannot be told, and refuses another capture into this
    pool, so the next one gets a new pool.
    """
    if pool is not None:
        with suppress(RuntimeError):  # torch itself got this far
            torch._C._cuda_endAllocateToPool(device.index, pool)
    with suppress(RuntimeError), torch.cuda.stream(torch.cuda.Stream(device)):
        word, graph = torch.zeros(1, device=device), Graph()
        graph.capture_begin(None, capture_error_mode="relaxed")
        try:
            word.zero_()
        finally:
            graph.capture_end()
