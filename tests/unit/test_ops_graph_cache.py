"""Which operator calls are recorded as graphs: those that come again, as many as there is room for, the idle making room.

And what a capture leaves behind, on a double of torch: nothing, if it fails at any point.
"""

import ctypes
import gc
import os
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from counterpoint.ops import allocations, graph_cache
from counterpoint.ops.computation import half_precision_settings
from counterpoint.ops.graph_cache import CONNECTIONS, NUM_SEEN_BEFORE, Recordings, capture, is_possible, num_connections


class Graph:
    """Stands for a captured call."""


def call(kept: Recordings, key: Hashable) -> str:
    """What a call of an operator does with the graph_cache."""
    if kept.find(key) is not None:
        return "replayed"
    if kept.is_due(key):
        kept.keep(key, Graph(), ())  # type: ignore[arg-type]
        return "recorded"
    return "issued"


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Recordings:
    monkeypatch.setattr(graph_cache, "MAX_RECORDINGS", 3)
    monkeypatch.setattr(graph_cache, "IDLE_CALLS", 12)
    return Recordings(is_enabled=True)


def test_a_call_is_issued_until_it_has_come_often_enough_then_recorded_then_replayed() -> None:
    kept = Recordings(is_enabled=True)
    found = [call(kept, ("op", 1)) for _ in range(NUM_SEEN_BEFORE + 3)]
    assert found == ["issued"] * NUM_SEEN_BEFORE + ["recorded", "replayed", "replayed"]
    assert len(kept) == 1


def test_addresses_that_never_come_again_are_never_recorded_and_do_not_pile_up(few: Recordings) -> None:
    assert {call(few, number) for number in range(100)} == {"issued"}
    assert len(few) == 0
    assert len(few._num_seen) <= 2 * 3


def test_without_room_further_calls_are_issued_as_long_as_the_others_are_in_use(few: Recordings) -> None:
    steps = [[call(few, key) for key in range(4)] for _ in range(12)]
    assert steps[-1] == ["replayed"] * 3 + ["issued"]
    assert len(few) == 3


def test_what_is_idle_makes_room(few: Recordings) -> None:
    for _ in range(4):
        for key in range(3):
            call(few, key)
    late = [call(few, key) for _ in range(12) for key in ("new", 1)]
    assert "recorded" in late
    assert late[-2:] == ["replayed", "replayed"]
    assert few.find(0) is None, "the one that was replayed longest ago is gone"
    assert few.find(1) is not None


def test_nothing_is_replayed_after_memory_has_changed() -> None:
    kept = Recordings(is_enabled=True)
    for _ in range(NUM_SEEN_BEFORE + 1):
        call(kept, "op")
    kept.clear()
    assert call(kept, "op") == "issued"
    assert len(kept) == 0


def test_a_recording_whose_memory_went_back_to_the_driver_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same addresses may come again, in another allocation; one address of each allocation is asked for."""
    number_of, asked = {100: 1, 101: 1, 200: 2}, []
    monkeypatch.setattr(allocations, "number_at", lambda address: asked.append(address) or number_of[address])
    kept = Recordings(is_enabled=True)
    kept.keep("op", Graph(), (100, 101, 200))  # type: ignore[arg-type]
    asked.clear()
    assert kept.find("op") is not None
    assert len(asked) == 2
    number_of[200] = 3
    assert kept.find("op") is None
    assert len(kept) == 0
    kept.keep("op", Graph(), (100, 101, 200))  # type: ignore[arg-type]
    assert kept.find("op") is not None


def test_the_driver_numbers_no_address_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocations, "_request", lambda: lambda number, attribute, address: 1)
    assert allocations.number_at(100) == 0
    assert allocations.Allocations((100,)).are_present()


@given(keys=st.lists(st.integers(0, 6), max_size=200))
def test_there_are_never_more_than_the_limit_and_only_what_was_recorded_is_replayed(keys: list[int]) -> None:
    kept, recorded = Recordings(is_enabled=True), set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_cache, "MAX_RECORDINGS", 2)
        patch.setattr(graph_cache, "IDLE_CALLS", 5)
        for key in keys:
            found = call(kept, key)
            recorded |= {key} if found == "recorded" else set()
            assert found != "replayed" or key in recorded
            assert len(kept) <= 2


@pytest.mark.parametrize(
    ("variable", "value", "holds"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", None, True),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "8", True),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32", True),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", False),
        ("CUDA_DEVICE_MAX_CONNECTIONS", " 1", False),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "+2", False),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "4 # as Megatron has it", False),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "", True),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "many", True),
        ("COUNTERPOINT_RECORDINGS", "0", False),
        ("COUNTERPOINT_RECORDINGS", "1", True),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", False),
    ],
)
def test_few_hardware_queues_no_cache_and_the_user_forbid_recording(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str | None, holds: bool
) -> None:
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "COUNTERPOINT_RECORDINGS", "PYTORCH_NO_CUDA_MEMORY_CACHING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    if value is not None:
        monkeypatch.setenv(variable, value)
    assert is_possible() is holds


@pytest.mark.parametrize(("of_python", "of_process"), [("1", "8"), ("8", "1")])
def test_the_number_of_queues_is_that_of_the_process_which_cuda_reads(
    monkeypatch: pytest.MonkeyPatch, of_python: str, of_process: str
) -> None:
    monkeypatch.setenv(CONNECTIONS, of_python)
    ctypes.CDLL(None).setenv(CONNECTIONS.encode(), of_process.encode(), 1)
    assert os.environ[CONNECTIONS] == of_python
    assert num_connections() == int(of_process)


def test_an_allocator_whose_captured_memory_belongs_to_one_graph_forbids_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert not is_possible()


@pytest.mark.parametrize(
    ("change", "back"),
    [
        (lambda: reduced_precision("bf16", False), lambda: reduced_precision("bf16", True)),
        (lambda: reduced_precision("fp16", False), lambda: reduced_precision("fp16", True)),
        (lambda: torch._C._set_sm_carveout_experimental(16), lambda: torch._C._set_sm_carveout_experimental(None)),
        (lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)),
    ],
)
def test_a_setting_of_torch_that_changes_matmuls_is_told_apart(change: Callable[[], None], back: Callable[[], None]) -> None:
    before = half_precision_settings()
    try:
        change()
        assert half_precision_settings() != before
    finally:
        back()
    assert half_precision_settings() == before
    assert hash(before) == hash(half_precision_settings())


def reduced_precision(name: str, is_allowed: bool) -> None:
    setattr(torch.backends.cuda.matmul, f"allow_{name}_reduced_precision_reduction", is_allowed)


def test_recordings_are_of_the_class_below_the_one_whose_methods_a_hook_exchanges() -> None:
    assert torch.cuda.CUDAGraph.__bases__ == (graph_cache.Graph,)


class Stream:
    """A stream by name."""

    device = torch.device("cpu")

    def __init__(self, gpu: "Gpu", name: str) -> None:
        self.gpu, self.name = gpu, name

    def wait_stream(self, other: "Stream") -> None:
        self.gpu.log.append(f"{self.name} waits for {other.name}")


class Gpu:
    """What torch 2.11 knows of captures: those its allocator takes to go on, and whether random numbers may be drawn."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.underway: list[object] = []
        self.underway_for_pinned_memory: list[object] = []  # which nobody can end from Python
        self.may_draw = True
        self.cannot: set[str] = set()
        self.on_begin: Callable[[CudaGraph], object] = lambda graph: None
        self.current = Stream(self, "current")

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def end_allocate_to_pool(self, index: object, pool: object) -> None:
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)


class CudaGraph:
    """Begins and ends captures in the order of torch's own class, which stops at the first call of CUDA that fails."""

    gpu: Gpu

    def __init__(self) -> None:
        self.own_pool: object = self

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert capture_error_mode == "relaxed"
        self.gpu.on_begin(self)
        self.own_pool = pool or self
        self.gpu.may_draw = False
        for underway in (self.gpu.underway, self.gpu.underway_for_pinned_memory):
            if self.own_pool in underway:
                raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
            underway.append(self.own_pool)
        self.gpu.log.append(f"begin on {self.gpu.current.name}")
        self.fail("begin")

    def capture_end(self) -> None:
        self.fail("end")
        self.gpu.log.append(f"end on {self.gpu.current.name}")
        self.gpu.underway.remove(self.own_pool)
        self.gpu.underway_for_pinned_memory.remove(self.own_pool)
        self.gpu.may_draw = True
        self.fail("instantiate")

    def fail(self, step: str) -> None:
        if step in self.gpu.cannot:
            self.gpu.cannot.remove(step)
            raise RuntimeError(f"CUDA error: {step}")

    def pool(self) -> object:
        return self.own_pool


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    found = Gpu()
    monkeypatch.setattr(graph_cache, "Graph", type("Graph", (CudaGraph,), {"gpu": found}))
    monkeypatch.setattr(torch.cuda, "stream", found.stream)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(found, "a new one"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.current)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", found.end_allocate_to_pool)
    yield found
    graph_cache._first_graphs.cache_clear()
    graph_cache._failed_graphs.cache_clear()


def test_a_graph_whose_capture_failed_is_kept_as_torch_goes_on_asking_it(gpu: Gpu) -> None:
    made: list[weakref.ref[CudaGraph]] = []
    gpu.cannot = {"end"}
    gpu.on_begin = lambda graph: made.append(weakref.ref(graph))
    with pytest.raises(RuntimeError, match="CUDA error: end"):
        capture(Stream(gpu, "ours"), lambda: None)
    gc.collect()
    assert made[0]() is not None


def test_what_torch_writes_when_a_capture_begins_is_ordered_among_the_callers_work(gpu: Gpu) -> None:
    stream = Stream(gpu, "ours")
    capture(stream, lambda: None)
    gpu.log.clear()
    capture(stream, lambda: gpu.log.append("issued"))
    assert gpu.log == ["ours waits for current", "begin on ours", "issued", "end on ours", "current waits for ours"]


def test_captures_on_one_stream_share_a_pool_and_those_on_others_do_not(gpu: Gpu) -> None:
    ours, theirs = Stream(gpu, "ours"), Stream(gpu, "theirs")
    pools = [capture(stream, lambda: None).pool() for stream in (ours, theirs, ours, theirs)]
    assert pools[0] is pools[2] is not pools[1]
    assert pools[1] is pools[3]


@pytest.mark.parametrize("step", ["begin", "end", "instantiate", "issue"])
def test_a_capture_that_fails_leaves_torch_as_it_was_and_the_next_one_works(gpu: Gpu, step: str) -> None:
    stream = Stream(gpu, "ours")
    capture(stream, lambda: None)

    def issue() -> None:
        if step == "issue":
            raise RuntimeError("CUDA error: issue")

    gpu.cannot = {step}
    with pytest.raises(RuntimeError, match=f"CUDA error: {step}"):
        capture(stream, issue)
    assert gpu.may_draw
    assert gpu.underway == []
    assert gpu.log[-1] == "current waits for ours"
    gpu.cannot.clear()
    assert capture(stream, lambda: None).pool() is capture(stream, lambda: None).pool()


def test_calls_of_a_schedule_that_goes_are_forgotten_and_no_others(few: Recordings) -> None:
    for _ in range(NUM_SEEN_BEFORE + 1):
        for key in (("goes", 1), ("stays", 1)):
            call(few, key)
    call(few, ("goes", 2))
    few.forget(["goes"])
    assert [call(few, key) for key in (("goes", 1), ("stays", 1))] == ["issued", "replayed"]
    assert len(few) == 1
