"""An export of Nsight Systems gives the same activity as a profiler trace of the same operations."""

import gzip
import os
import sqlite3
import threading
from pathlib import Path

import pytest

from counterpoint.errors import TraceError
from counterpoint.step import Collective, Kernel
from counterpoint.traces import read_trace
from counterpoint.traces.activity import HostOperator
from counterpoint.traces.formats import read_activity
from helpers.trace_builder import MATMUL, NCCL

PROCESS = 5 << 24
TABLES = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
CREATE TABLE TARGET_INFO_GPU (id INT, name TEXT, smCount INT, computeMajor INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT, contextId INT, streamId INT, correlationId INT,
    globalPid INT, demangledName INT, shortName INT, registersPerThread INT, gridX INT, gridY INT, gridZ INT, blockX INT,
    blockY INT, blockZ INT, staticSharedMemory INT, dynamicSharedMemory INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT, end INT, deviceId INT, streamId INT, correlationId INT, globalPid INT,
    bytes INT, copyKind INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, globalTid INT, correlationId INT, nameId INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION (streamId INT, correlationId INT, globalPid INT, syncType INT, eventId INT);
CREATE TABLE NVTX_EVENTS (start INT, end INT, globalTid INT, text TEXT, textId INT);
"""
NAMES = (MATMUL, NCCL, "cudaLaunchKernel_v7000", "cudaEventRecord_v3020", "cudaStreamWaitEvent_v3020", "aten::mm", "copy")


class Database:
    """Three steps of a matmul, an all-reduce that waits for it, and a copy to a peer; a second process has one kernel."""

    def __init__(self, path: Path) -> None:
        self.file, self.correlation = sqlite3.connect(path), 0
        self.file.executescript(TABLES)
        self.file.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(NAMES))
        self.file.execute("INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA H200', 132, 9)")
        for number in range(3):
            self.step(1_000_000 * number)
        self.call(50, 2, PROCESS + (1 << 24) + 1)
        self.kernel(60, 70, 7, 0, PROCESS + (1 << 24))
        self.file.commit()
        self.file.close()

    def step(self, begin: int) -> None:
        thread = PROCESS + 9
        ranges = [(begin + 1, begin + 900_000, thread, "step 1", None), (begin + 5, begin + 2_000, thread, None, 5)]
        self.file.executemany("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?)", ranges)
        self.call(begin + 1_000, 2, thread)
        self.kernel(begin + 10_000, begin + 110_000, 7, 0, PROCESS)
        self.call(begin + 3_000, 3, thread)
        self.call(begin + 4_000, 4, thread)
        wait = (19, self.correlation, PROCESS, 2, 77 + begin)
        self.file.execute("INSERT INTO CUPTI_ACTIVITY_KIND_SYNCHRONIZATION VALUES (?, ?, ?, ?, ?)", wait)
        self.call(begin + 5_000, 2, thread)
        self.kernel(begin + 111_000, begin + 311_000, 19, 1, PROCESS)
        self.call(begin + 6_000, 6, thread)
        copy = (begin + 320_000, begin + 330_000, 0, 7, self.correlation, PROCESS, 4096, 10)
        self.file.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, ?, ?, ?, ?, ?, ?)", copy)

    def call(self, start: int, name: int, thread: int) -> None:
        self.correlation += 1
        row = (start, start + 400, thread, self.correlation, name)
        self.file.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", row)

    def kernel(self, start: int, end: int, stream: int, name: int, process: int) -> None:
        row = (start, end, 0, 1, stream, self.correlation, process, name, name, 168, 132, 1, 1, 384, 1, 1, 1024, 200_000)
        self.file.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({', '.join('?' * len(row))})", row)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    Database(tmp_path / "report.sqlite")
    return tmp_path / "report.sqlite"


def add(path: Path, *statements: str) -> None:
    """Change the database."""
    file = sqlite3.connect(path)
    for statement in statements:
        file.execute(statement)
    file.commit()
    file.close()


@pytest.mark.parametrize("is_alone", [False, True])
def test_graphs_whose_kernels_were_not_recorded_are_refused(path: Path, is_alone: bool) -> None:
    table = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
    add(path, f"CREATE TABLE {table} (start INT, end INT, deviceId INT, globalPid INT)")
    add(path, f"INSERT INTO {table} VALUES (1, 2, 0, {PROCESS + (1 << 24)})")
    assert len(read_activity(path).operations) == 9  # another process launched that graph
    add(path, f"INSERT INTO {table} VALUES (1, 2, 0, {PROCESS})")
    if is_alone:
        add(path, "DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL", "DELETE FROM CUPTI_ACTIVITY_KIND_MEMCPY")
    with pytest.raises(TraceError, match=r"graphs without their kernels; record with nsys profile --cuda-graph-trace=node"):
        read_activity(path)


def test_ranges_within_a_step_that_are_named_like_steps_are_no_steps(path: Path) -> None:
    windows = read_activity(path).step_windows
    add(path, *(f"INSERT INTO NVTX_EVENTS VALUES ({begin + 10}, {begin + 300_000}, {PROCESS + 9}, '{name}', NULL)"
                for begin in (0, 1_000_000, 2_000_000) for name in ("step", "iteration 1")))  # fmt: skip
    assert read_activity(path).step_windows == windows


def test_operations_launches_waits_and_ranges_are_read(path: Path) -> None:
    trace = read_activity(path)
    assert [item.name for item in trace.operations] == [MATMUL, NCCL, "Memcpy PtoP"] * 3
    first = trace.operations[0]
    assert (first.start_us, first.end_us, first.launched_us, first.launch_call) == (10.0, 110.0, 1.0, "cudaLaunchKernel")
    assert (first.arguments.grid, first.arguments.block, first.arguments.shared_bytes) == ((132, 1, 1), (384, 1, 1), 201_024)
    assert trace.operators[first.operator or 0] == HostOperator(
        name="aten::mm", thread=str(PROCESS + 9), module="aten::mm", phase="unknown"
    )
    assert [call.kind for call in trace.host_calls] == ["launch", "record", "wait", "launch", "launch"] * 3
    assert (trace.num_devices, trace.device_name, trace.num_sms, trace.compute_major) == (1, "NVIDIA H200", 132, 9)
    assert trace.step_windows == ((0.001, 900.0), (1000.001, 1900.0), (2000.001, 2900.0))


def test_a_step_of_an_export_can_be_planned(path: Path) -> None:
    traced = read_trace(path)
    assert (traced.step.name, traced.num_steps) == ("report", 3)
    assert [operation.kind for operation in traced.step.operations] == ["computation", "communication", "communication"]
    assert [edge.operation for edge in traced.step.operations[1].waits_for] == [0]


def test_nothing_is_taken_off_for_what_torchs_profiler_adds_to_kernels(path: Path) -> None:
    launch = "gridX = 96800, blockX = 1024, registersPerThread = 32, staticSharedMemory = 0, dynamicSharedMemory = 0"
    add(
        path,
        "UPDATE StringIds SET value = 'conv_depthwise2d_forward_kernel' WHERE id = 0",
        f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET {launch} WHERE streamId = 7",
    )
    kernel = read_trace(path).step.operations[0]
    assert isinstance(kernel, Kernel)
    assert (kernel.character, kernel.footprint.num_ctas, kernel.lone_us) == ("row_wise", 96_800, pytest.approx(100))


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("DROP TABLE StringIds", "not an export of Nsight Systems"),
        ("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL; DELETE FROM CUPTI_ACTIVITY_KIND_MEMCPY", "holds no GPU activity"),
        ("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN streamId", "has no column streamId"),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = -5", "all four must be whole numbers"),
    ],
)
def test_another_database_is_refused_in_one_line(path: Path, statement: str, says: str) -> None:
    with sqlite3.connect(path) as file:
        file.executescript(statement)
    file.close()
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_database_is_not_called_a_compressed_one(path: Path) -> None:
    packed = path.with_name("packed.sqlite")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    path.write_text("notes")
    for file, says in ((path, "is not an SQLite database, as its name says"), (packed, "is a compressed database")):
        with pytest.raises(TraceError, match=says):
            read_trace(file)


def test_a_damaged_database_is_refused_in_one_line(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(TraceError, match="is not a complete database"):
        read_trace(path)


def test_cells_without_a_value_leave_out_their_rows(path: Path) -> None:
    add(
        path,
        "INSERT INTO StringIds VALUES (99, NULL)",
        "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (NULL, 5, 9, 900, 2), (5, 6, NULL, 901, 2)",
        "INSERT INTO NVTX_EVENTS VALUES (NULL, 7, 9, 'range', NULL), (5, 7, 'thread', 'range', NULL)",
    )
    assert len(read_activity(path).operations) == 9


def test_a_database_in_a_pipe_is_refused_and_nobody_waits(tmp_path: Path) -> None:
    pipe = tmp_path / "report.sqlite"
    os.mkfifo(pipe)
    Database(tmp_path / "whole.sqlite")
    writer = threading.Thread(target=lambda: pipe.write_bytes((tmp_path / "whole.sqlite").read_bytes()), daemon=True)
    writer.start()
    with pytest.raises(TraceError, match=r"is a pipe with a database.*give the \.sqlite file"):
        read_trace(pipe)


def test_several_processes_are_noted_and_no_second_device_is_claimed(path: Path) -> None:
    notes = read_trace(path).notes
    assert (
        "The trace holds 2 processes that use GPUs; only the busiest, on device 0, was read. Record one file for each rank."
        in notes
    )
    assert not any("devices" in each for each in notes)


@pytest.mark.parametrize(("process", "found"), [(5, -5), (6, 0)])
def test_priorities_of_streams_are_those_of_the_process_that_is_read(process: int, found: int, tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    Database(path)
    with sqlite3.connect(path) as file:
        file.execute("CREATE TABLE TARGET_INFO_CUDA_STREAM (streamId INT, processId INT, contextId INT, priority INT)")
        rows = [(19, process, 1, 2**32 - 5), (7, process, 1, 0)]
        file.executemany("INSERT INTO TARGET_INFO_CUDA_STREAM VALUES (?, ?, ?, ?)", rows)
    matmul, collective, _ = read_trace(path).step.operations
    assert isinstance(matmul, Kernel)
    assert isinstance(collective, Collective)
    assert (matmul.priority, collective.priority) == (0, found)


def add_nccl(path: Path, *ranges: tuple[int, int, str, str]) -> None:
    """Add NVTX ranges of NCCL: begin, end, function and payload."""
    add(
        path,
        "ALTER TABLE NVTX_EVENTS ADD COLUMN jsonText TEXT",
        *(f"INSERT INTO NVTX_EVENTS VALUES ({begin}, {end}, {PROCESS + 9}, '{name}', NULL, '{{{payload}}}')"
          for begin, end, name, payload in ranges),
    )  # fmt: skip


def test_ranges_of_nccl_tell_bytes_ranks_and_groups(path: Path) -> None:
    size = '"NCCL communicator ID":77,"Message size [bytes]":4096'
    made = (1, 9, "ncclCommInitRankConfig", '"NCCL communicator ID":77,"No. of ranks":8,"Rank":3,"CUDA device":3')
    calls = [(begin + 4_900, begin + 5_800, "ncclAllGather", size) for begin in range(0, 3_000_000, 1_000_000)]
    add_nccl(path, made, *calls)
    trace, traced = read_activity(path), read_trace(path)
    collective = traced.step.operations[1]
    assert isinstance(collective, Collective)
    assert (trace.rank, trace.world_size, traced.step.num_ranks) == (3, 8, 8)
    assert (collective.collective, collective.num_bytes, collective.group_size) == ("all_gather", 8 * 4096, 8)
    assert not any(operator.name.startswith("nccl") for operator in trace.operators)


def test_a_kernel_behind_a_group_of_calls_has_the_bytes_of_all_of_them(path: Path) -> None:
    size = '"NCCL communicator ID":77,"Message size [bytes]":4096'
    calls = [(begin + 4_100 + 200 * place, begin + 4_200 + 200 * place, "ncclAllReduce", size)
             for begin in range(0, 3_000_000, 1_000_000) for place in range(3)]  # fmt: skip
    add_nccl(path, *calls)
    for collective in (each for each in read_trace(path).step.operations if isinstance(each, Collective)):
        assert (collective.collective, collective.num_bytes, collective.group_size) == ("all_reduce", 3 * 4096, 2)


@pytest.mark.parametrize(
    "payload", ['"Message size [bytes]":-5', '"Message size [bytes]":"many"', '"No. of ranks":0,"Rank":7']
)
def test_payloads_that_say_nothing_leave_sizes_unknown(path: Path, payload: str) -> None:
    add_nccl(path, (4_900, 5_800, "ncclAllReduce", f'"NCCL communicator ID":77,{payload}'))
    assert any("without an element count" in note for note in read_trace(path).notes)
