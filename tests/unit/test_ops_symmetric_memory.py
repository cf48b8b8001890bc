"""Symmetric memory that a captured graph uses outlives its successor, in operators and in lanes; lanes copy the rows that
several hosts need; and waits for peers' flags flush remote writes where the GPU can. On doubles of the driver and of torch's
symmetric memory."""

import ctypes
import gc
import importlib
import sys
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from counterpoint.errors import RefusedTogetherError

torch = pytest.importorskip("torch")
StorageWeakRef = pytest.importorskip("torch.multiprocessing.reductions").StorageWeakRef

MODULES = (
    "counterpoint.cuda.driver",
    "counterpoint.ops.driver_calls",
    "counterpoint.ops.gpu_progress",
    "counterpoint.ops.signals",
    "counterpoint.ops.call_order",
    "counterpoint.ops.launch_order",
    "counterpoint.ops.compiled_copies",
    "counterpoint.ops.copy_engines",
    "counterpoint.ops.copy_lane",
)
EQUAL, AT_LEAST, FLUSH = 1, 0, 1 << 30


class Memory:
    """Stands for a symmetric allocation."""

    can_end = staticmethod(lambda: True)

    def __init__(self, num_bytes: int, *_: object, **__: object) -> None:
        self.local, self.addresses = torch.empty(num_bytes, dtype=torch.uint8), [0, 0]


class Operation:
    """Stands for CUstreamBatchMemOpParams."""

    def __init__(self) -> None:
        self.waitValue, self.writeValue = SimpleNamespace(), SimpleNamespace()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[MagicMock]:
    """The modules that need the CUDA driver, imported on a double of it."""
    double = MagicMock()
    double.CUresult = SimpleNamespace(CUDA_SUCCESS="success")
    double.CUstreamWaitValue_flags = SimpleNamespace(
        CU_STREAM_WAIT_VALUE_EQ=EQUAL, CU_STREAM_WAIT_VALUE_GEQ=AT_LEAST, CU_STREAM_WAIT_VALUE_FLUSH=FLUSH
    )
    double.CUstreamBatchMemOpType = SimpleNamespace(
        CU_STREAM_MEM_OP_WAIT_VALUE_32="wait",
        CU_STREAM_MEM_OP_WRITE_VALUE_32="write",
        CU_STREAM_MEM_OP_WRITE_VALUE_64="write 64",
    )
    double.CUstreamBatchMemOpParams = Operation
    double.CUdeviceptr = double.cuuint32_t = double.cuuint64_t = lambda number: number
    double.cuDeviceGet = lambda number: ("success", number)
    bindings = ModuleType("cuda.bindings")
    bindings.driver = double  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    known = {name: sys.modules.pop(name, None) for name in MODULES}
    yield double
    for name, before in known.items():
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Any:
    symmetric = importlib.import_module("counterpoint.ops.symmetric")
    monkeypatch.setattr(symmetric, "SymmetricMemory", Memory)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    return symmetric.SymmetricPool(torch.device("cpu"), None, None)


@pytest.mark.parametrize("has_captured", [False, True])
def test_a_lane_that_grows_keeps_the_memory_of_a_captured_exchange(
    has_captured: bool, driver: MagicMock, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("counterpoint.ops.copy_lane")
    lane = object.__new__(module.CopyLane)
    lane._pool, lane._row_bytes, lane._has_captured, lane.num_ranks = pool, 0, False, 2
    lane._device, lane._flags = torch.device("cpu"), MagicMock()
    lane._recordings, lane._copied = MagicMock(), None
    lane.reserve(1024)
    before = weakref.ref(pool.memory)
    monkeypatch.setattr(module, "is_capturing", lambda _: has_captured)
    lane._sample(stream=0)
    lane.reserve(4096)
    assert (before() is not None) == has_captured
    assert pool.num_bytes() == 3 * 4096 + (3 * 1024 if has_captured else 0)


class Graph:
    """Stands for a recording."""

    def __init__(self, issue: Callable[[], object]) -> None:
        issue()
        self.replay = MagicMock()


@pytest.fixture
def recording(driver: MagicMock, pool: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A lane that records, on a double of a capture."""
    module = importlib.import_module("counterpoint.ops.copy_lane")
    lane = object.__new__(module.CopyLane)
    lane._pool, lane._row_bytes, lane._has_captured, lane.num_ranks = pool, 0, False, 2
    lane._device, lane._flags, lane._group_name = torch.device("cpu"), MagicMock(), "all"
    lane._recordings, lane._copied = module.Recordings(is_enabled=True), None
    monkeypatch.setattr("counterpoint.ops.graph_cache.capture", lambda _, issue: Graph(issue))
    monkeypatch.setattr(module, "recording_stream_of", lambda *_: None)
    monkeypatch.setattr(module.CopyLane, "_current", lambda _: 0)
    return lane


def test_what_a_lane_repeats_is_recorded_at_the_third_call_and_watched_in_each(recording: Any) -> None:
    issued: list[int] = []

    def issue() -> int:
        issued.append(1)
        recording._sample(0)
        return 7

    assert [recording.repeat(("sum", 1), issue) for _ in range(5)] == [7] * 5
    assert recording.num_recordings() == 1
    assert len(issued) == 3, "twice, and once in the capture"
    assert recording._recordings.find(("sum", 1)).graph.replay.call_count == 3
    assert recording._flags.watch.sample.call_count == 5
    assert not recording._has_captured
    recording.reserve(1024)
    assert recording.num_recordings() == 0, "a recording holds addresses of the memory before"


def test_a_lane_whose_recording_fails_says_so_once_and_goes_on(
    recording: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no capture here")

    monkeypatch.setattr("counterpoint.ops.graph_cache.capture", fail)
    assert [recording.repeat(("sum", key), lambda: 3) for key in (1, 1, 1, 1, 2, 2, 2)] == [3] * 7
    assert [record.getMessage() for record in caplog.records] == [
        "Collectives are issued call by call, because recording one as a CUDA graph failed (no capture here)."
    ]


def test_a_lane_records_nothing_that_its_caller_captures(recording: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("counterpoint.ops.copy_lane"), "is_capturing", lambda _: True)
    assert [recording.repeat(("sum", 1), lambda: 3) for _ in range(5)] == [3] * 5
    assert recording.num_recordings() == 0


@pytest.fixture
def lanes(driver: MagicMock, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The lanes of three ranks on one host, whose copies happen when they are issued. Flags do nothing."""

    def copy(target: int, source: int, num_bytes: int, _stream: object) -> tuple[str]:
        ctypes.memmove(target, source, num_bytes)
        return ("success",)

    def copy_rows(rows: Any, stream: object) -> tuple[str]:
        for number in range(rows.Height):
            copy(rows.dstDevice + number * rows.dstPitch, rows.srcDevice + number * rows.srcPitch, rows.WidthInBytes, stream)
        return ("success",)

    driver.cuMemcpyAsync, driver.cuMemcpy2DAsync, driver.CUDA_MEMCPY2D = (
        copy,
        MagicMock(side_effect=copy_rows),
        SimpleNamespace,
    )
    module = importlib.import_module("counterpoint.ops.copy_lane")
    monkeypatch.setattr(module.CopyLane, "_current", lambda _: 0)
    monkeypatch.setattr(module.CopyLane, "_sample", lambda *_: None)
    memories = [Memory(1 << 16) for _ in range(3)]
    made = []
    for rank, memory in enumerate(memories):
        lane = object.__new__(module.CopyLane)
        lane.rank, lane.num_ranks, lane._row_bytes = rank, 3, 1 << 14
        lane._moves, lane._flags, lane._signals = module.lane_moves(rank, 3), MagicMock(), MagicMock()
        memory.addresses = [each.local.data_ptr() for each in memories]
        lane._pool, lane._copied = SimpleNamespace(memory=memory), None
        made.append(lane)
    return made


@pytest.mark.parametrize("has_wide_pitch", [False, True])
@pytest.mark.parametrize("distance", [(1, 3), (4, 1)])
def test_lanes_copy_rows_at_equal_distances(
    distance: tuple[int, int], has_wide_pitch: bool, driver: MagicMock, lanes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts for one rank of a host lie apart, or next to each other, among those of 4 hosts; what arrives is flat."""
    monkeypatch.setattr(importlib.import_module("counterpoint.ops.copy_lane"), "MAX_PITCH", 1 if has_wide_pitch else 1 << 31)
    start, step = distance
    places = [slice(first, first + 4 * step - (step - 1), step) for first in (start * each for each in range(3))]
    blocks = [torch.arange(12 * 5.0).view(12, 5) + 100 * lane.rank for lane in lanes]
    arrived = [lane.exchange([[given[place]] for place in places]) for lane, given in zip(lanes, blocks, strict=True)]
    for lane, found in zip(lanes, arrived, strict=True):
        assert torch.equal(found.completed(), torch.stack([given[places[lane.rank]].flatten() for given in blocks]))
    outputs = [torch.zeros(12, 5) for _ in lanes]
    for lane in lanes:
        lane.shared(20, torch.float32).copy_(torch.arange(20.0) + 100 * lane.rank)
    for lane, output in zip(lanes, outputs, strict=True):
        lane.fetch([[output[place]] for place in places])
        for peer, place in enumerate(places):
            wanted = torch.arange(20.0) + 100 * peer if peer != lane.rank else torch.zeros(20)
            assert torch.equal(output[place].flatten(), wanted)
    gathered = [lane.shared(60, torch.float32).view(12, 5) for lane in lanes]
    for lane, output in zip(lanes, gathered, strict=True):
        output.fill_(-1)[places[lane.rank]] = float(lane.rank)
    for lane, output in zip(lanes, gathered, strict=True):
        lane.gather([output[place] for place in places])
        assert all(bool((output[place] == peer).all()) for peer, place in enumerate(places))
    assert driver.cuMemcpy2DAsync.called == (step > 1 and not has_wide_pitch)


class Pool:
    """Stands for a `torch.cuda.MemPool`: what lies in it when it ends stays allocated."""

    id = (0, 1)
    num_made = 0

    def __init__(self, _allocator: object) -> None:
        Pool.num_made += 1


class Allocator:
    """Stands for torch's caching allocator, where a pool of the job's own may go before an inner one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, has_pool_of_job: bool) -> None:
        self.stream, self._pools = 7, list[tuple[int, int]]()
        self.enter_job_pool(has_pool_of_job)
        self._empty, self.allocated, self.segments = torch.empty, list[Any](), list[Any]()
        monkeypatch.setattr(Pool, "num_made", 0)
        monkeypatch.setattr(torch.cuda, "MemPool", Pool)
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: self.segments)
        monkeypatch.setattr(torch, "empty", self.empty)
        for name, act in {
            "_cuda_getCurrentRawStream": lambda _: self.stream,
            "_cuda_beginAllocateCurrentThreadToPool": lambda _, pool: self._pools.append(pool),
            "_cuda_endAllocateToPool": lambda _, pool: self._pools.remove(pool),
            "_cuda_releasePool": lambda *_: None,
        }.items():
            monkeypatch.setattr(torch._C, name, act, raising=False)

    def enter_job_pool(self, is_current: bool) -> None:
        self._pools[:] = [(3, 0)] * is_current

    def empty(self, *size: Any, **options: Any) -> Any:
        made = self._empty(*size, **options)
        pool, address = next(iter(self._pools), (0, 0)), made.data_ptr()
        self.segments[:] = [each for each in self.segments if each["address"] != address]  # memory that was free again
        self.segments.insert(0, {"address": address, "total_size": made.nbytes, "segment_pool_id": pool})
        self.allocated.append(StorageWeakRef(made.untyped_storage()))
        return made

    def is_symmetric(self, address: int) -> bool:
        return any(each["address"] == address and each["segment_pool_id"] == Pool.id for each in self.segments)


@pytest.fixture
def symmetric(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, on a double of torch's symmetric memory that knows no other memory."""
    module, known = importlib.import_module("counterpoint.ops.symmetric"), list[int]()

    def empty(num_bytes: int, **options: Any) -> Any:
        made = torch.zeros(num_bytes, **options)
        known.append(made.data_ptr())
        return made

    def rendezvous(local: Any, _group: str) -> Any:
        is_known = local.data_ptr() in known or module.allocator.is_symmetric(local.data_ptr())
        return SimpleNamespace(buffer_ptrs=[local.data_ptr()], get_buffer=lambda *_: local) if is_known else None

    double = SimpleNamespace(empty=empty, rendezvous=rendezvous, get_mempool_allocator=lambda _: None)
    monkeypatch.setattr(module, "symmetric_memory", double)
    monkeypatch.setattr(module, "allocator", None, raising=False)
    return module


@pytest.mark.parametrize("has_pool_of_job", [False, True])
def test_memory_is_lent_on_its_stream_unless_the_job_has_a_pool(
    has_pool_of_job: bool, symmetric: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    symmetric.allocator = Allocator(monkeypatch, has_pool_of_job=has_pool_of_job)
    memory = symmetric.SymmetricMemory(64, torch.device("cpu"), MagicMock(), MagicMock(), is_lent=True)
    assert memory.addresses == [memory.local.data_ptr()]
    assert memory.is_lent_here() != has_pool_of_job
    assert Pool.num_made != has_pool_of_job, "a pool that ends within another ends the process"
    symmetric.allocator.stream = 8
    assert not memory.is_lent_here(), "another stream gets other memory"


def test_memory_that_a_rank_lacks_is_freed_before_the_pool_that_lends_it(
    symmetric: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator, were_free = Allocator(monkeypatch, has_pool_of_job=False), list[bool]()

    def refuse(_: object) -> None:
        raise RefusedTogetherError("rank 1 has no room")

    monkeypatch.setattr(Pool, "__del__", lambda _: were_free.append(allocator.allocated[-1].expired()), raising=False)
    with pytest.raises(RefusedTogetherError):
        symmetric.SymmetricMemory(64, torch.device("cpu"), MagicMock(), SimpleNamespace(compare=refuse), is_lent=True)
    gc.collect()
    assert were_free == [True]


@pytest.mark.parametrize("is_closed", [False, True])
def test_lent_memory_outlives_a_pool_of_the_job_that_is_current(
    is_closed: bool, symmetric: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    symmetric.allocator, num_ended = Allocator(monkeypatch, has_pool_of_job=False), list[None]()
    monkeypatch.setattr(Pool, "__del__", lambda _: num_ended.append(None), raising=False)
    monkeypatch.setattr(symmetric, "refuse_in_capture", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    pool = symmetric.SymmetricPool(torch.device("cpu"), MagicMock(), MagicMock(), is_lent=True)
    assert pool.replace(64, "A test", has_captured=False).is_lent_here()
    symmetric.allocator.enter_job_pool(True)
    if is_closed:
        pool.close()
    else:
        assert not pool.replace(128, "A test", has_captured=False).is_lent_here()
        assert pool.num_bytes() == 64 + 128
    gc.collect()
    assert not num_ended, "torch would end the process"
    symmetric.allocator.enter_job_pool(False)
    if is_closed:
        pool.replace(64, "A test", has_captured=False)
        gc.collect()
        assert len(num_ended) == 1, "the next call frees it"
    pool.close()
    gc.collect()
    assert len(num_ended) == 1 + is_closed
    assert pool.num_bytes() == 0


@pytest.mark.parametrize("has_captured", [False, True])
def test_operators_that_need_more_keep_the_memory_of_captured_calls(
    has_captured: bool, driver: MagicMock, pool: Any
) -> None:
    module = importlib.import_module("counterpoint.ops.copy_engines")
    engines = object.__new__(module.CopyEngines)
    engines._pool, engines._prepared, engines._device = pool, [], torch.device("cpu")
    engines._order, engines._recordings = SimpleNamespace(has_captured=False), MagicMock()
    engines._require_memory(1024)
    before = weakref.ref(pool.memory)
    engines._order.has_captured = has_captured
    engines._require_memory(4096)
    assert (before() is not None) == has_captured
    assert not engines._order.has_captured


def test_the_last_wait_for_flags_flushes_remote_writes_where_the_gpu_can(driver: MagicMock) -> None:
    module = importlib.import_module("counterpoint.ops.driver_calls")
    for is_flushing in (False, True):
        first, second, *lowered = module.taking([8, 12], is_flushing=is_flushing)
        assert (first.waitValue.address, first.waitValue.flags) == (8, EQUAL)
        assert (second.waitValue.address, second.waitValue.flags) == (12, EQUAL | FLUSH if is_flushing else EQUAL)
        assert [(each.writeValue.value, each.writeValue.flags) for each in lowered] == [(0, 0), (0, 0)]


def test_numbered_flags_are_set_to_and_awaited_at_the_number_of_the_call(
    driver: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals = importlib.import_module("counterpoint.ops.signals")
    issued: list[list[tuple[int, int]]] = []
    driver.cuStreamBatchMemOp = lambda _, number, operations, __: issued.append([seen(each) for each in operations])
    monkeypatch.setattr(signals, "check", lambda *_: None)
    monkeypatch.setattr(signals, "Flags", flags := MagicMock())
    flags.return_value.own = lambda flag, peer: 100 * flag + peer
    flags.return_value.of_peer = lambda flag, peer: 1000 + 100 * flag + peer
    flags.return_value.is_flushing = True

    def seen(operation: Operation) -> tuple[int, int]:
        fields = operation.waitValue if vars(operation.waitValue) else operation.writeValue
        if vars(operation.waitValue):
            assert fields.flags & ~FLUSH == AT_LEAST
        return fields.address, fields.value64 if fields.operation == "write 64" else fields.value

    numbered = signals.NumberedSignals(*[MagicMock()] * 3, 4)
    assert flags.call_args.args[3] == [0] * 4, "all flags rest at 0"
    for call in (1, 2):
        numbered.begin_call()
        numbered.raise_to(2, (0, 3), None)
        numbered.wait(2, (0, 3), None)
        numbered.exchange(1, (3,), None, words=(7000, 8000), value=50 + call)
        raised, awaited = [(1200, call), (1203, call)], [(200, call), (203, call)]
        written = [(7000, 50 + call), (8000, 50 + call)]
        assert issued[-3:] == [raised, awaited, [*written, (1103, call), (103, call)]], "words are there before the flag"
        freeing = flags.call_args.args[4]()
        assert call < freeing < 2**31, "a wait of this call and of those that are queued passes"
    numbered._number = 2**32 - 1
    assert flags.call_args.args[4]() < 2**31, "numbers go round, and waits compare differences"
    numbered.begin_call()
    assert numbered._number == 0


@pytest.mark.usefixtures("driver")
def test_a_call_says_whether_it_was_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls at two sets of addresses in turn: the third of each is recorded."""
    compiled_copies = importlib.import_module("counterpoint.ops.compiled_copies")
    graph_cache = importlib.import_module("counterpoint.ops.graph_cache")
    memory, ran, order = object(), [], MagicMock(is_in_capture=False)
    shared = SimpleNamespace(
        memory=lambda: memory,
        order=order,
        recordings=graph_cache.Recordings(is_enabled=True),
        device=SimpleNamespace(index=0),
    )
    copies = object.__new__(compiled_copies.CompiledCopies)
    for name, value in {"shared": shared, "memory": memory, "may_be_recorded": True, "branches": None}.items():
        setattr(copies, f"_{name}", value)
    copies._sliced, copies._local = [], []
    monkeypatch.setattr(graph_cache, "Allocations", lambda _: SimpleNamespace(are_present=lambda: True))
    for name in ("_cuda_getCurrentRawStream", "_cuda_getCurrentStream", "_cuda_tunableop_is_enabled"):
        monkeypatch.setattr(torch._C, name, lambda *_: 0, raising=False)
    for name, made in {
        "_call": lambda *_, **__: None,
        "_issue": lambda *_: ran.append("issued"),
        "_record": lambda *_: SimpleNamespace(replay=lambda: ran.append("replayed")),
    }.items():
        monkeypatch.setattr(compiled_copies.CompiledCopies, name, made)
    operands, weight = [torch.ones(2, 4), torch.ones(2, 4)], torch.ones(4, 4)
    said = [copies.run({"shard": operands[number % 2]}, [weight]) for number in range(8)]
    assert ran == ["issued"] * 4 + ["replayed"] * 4
    assert said == [how == "replayed" for how in ran]
    order.is_in_capture = True
    assert not copies.run({"shard": operands[0]}, [weight]), "a call that its caller captures is issued"


@pytest.mark.parametrize(
    ("gpu", "says"),
    [
        ((1, "NVIDIA L40S", 0), ""),
        ((0, "NVIDIA H200", 1), ""),
        ((0, "NVIDIA H100 PCIe", 0), "GPU 0 (NVIDIA H100 PCIe) cannot flush remote writes in a wait"),
        ((0, "NVIDIA L40S", 0), "GPU 0 (NVIDIA L40S) cannot flush remote writes in a wait"),
    ],
)
def test_gpus_that_cannot_flush_need_a_link_that_is_proven(
    gpu: tuple[int, str, int], says: str, driver: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    can_flush, name, has_nvlink = gpu
    driver.cuDeviceGetAttribute = lambda _attribute, _gpu: ("success", can_flush)
    driver.cuDeviceGetP2PAttribute = lambda _attribute, _gpu, _peer: ("success", has_nvlink)
    peer_access = importlib.import_module("counterpoint.ops.peer_access")
    monkeypatch.setattr(peer_access, "find_spec", lambda _: object())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"gpu-{number}"))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda _one, _other: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    found = peer_access.obstacle_on(torch.device("cuda", 0), ["gpu-0", "gpu-1"])
    assert found.startswith(says)
    assert bool(found) == bool(says)
