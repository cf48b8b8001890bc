"""The parts of a profiler trace that Counterpoint uses: GPU operations, host calls, and the file's own facts.

This module knows nothing of files, of steps, or of what a kernel does. Quoted field names are those of Kineto's
`output_json.cpp`, as in the shipped traces.
"""

import re
from typing import Any, Literal

import msgspec

from counterpoint.errors import TraceError
from counterpoint.step import MAX_RANKS, MatmulSizes
from counterpoint.value import Value

Category = Literal["kernel", "memcpy", "memset"]
HostKind = Literal["launch", "record", "wait"]
GRAPH_LAUNCH = "GraphLaunch"
"""Every call that launches a graph has this in its name."""
HostPhase = Literal["forward", "backward", "optimizer", "unknown"]


class LaunchArguments(Value, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The arguments that the profiler writes with a GPU operation, under its own names.

    A copy between GPUs states `inDevice` and no `device`; the reader puts it into `device`.
    """

    stream: int
    device: int = 0
    copying_device: int | None = msgspec.field(default=None, name="inDevice")
    correlation: int = 0
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    registers_per_thread: int = msgspec.field(default=0, name="registers per thread")
    shared_bytes: int = msgspec.field(default=0, name="shared memory")
    num_bytes: int = msgspec.field(default=0, name="bytes")
    collective_name: str | None = msgspec.field(default=None, name="Collective name")
    in_elements: int | None = msgspec.field(default=None, name="In msg nelems")
    out_elements: int | None = msgspec.field(default=None, name="Out msg nelems")
    group_size: int | None = msgspec.field(default=None, name="Group size")
    group_name: str | None = msgspec.field(default=None, name="Process Group Name")
    group_description: str | None = msgspec.field(default=None, name="Process Group Description")
    group_ranks: str | None = msgspec.field(default=None, name="Process Group Ranks")
    dtype: str | None = None
    in_splits: Any = msgspec.field(default=None, name="In split size")
    out_splits: Any = msgspec.field(default=None, name="Out split size")
    external_id: int | None = msgspec.field(default=None, name="External id")
    priority: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= (self.group_size or 0) <= MAX_RANKS:
            raise TraceError(f"a collective's group has from 0 to {MAX_RANKS:,} ranks; found {self.group_size}.")
        sizes = (self.registers_per_thread, self.shared_bytes, self.num_bytes, self.in_elements or 0, self.out_elements or 0)
        dims = self.grid + self.block
        if min(sizes) < 0 or max(sizes) >= 2**60 or (dims and (min(dims) < 1 or max(dims) >= 2**32)):
            raise TraceError(
                f"a launch needs a positive grid and block and sizes from 0 to 2^60; found grid {list(self.grid)}, block "
                f"{list(self.block)}, sizes {list(sizes)}."
            )

    @property
    def process_group(self) -> tuple[str | None, str | None]:
        """The name and the description of the process group; None for what the profiler did not write."""
        return self.group_name, self.group_description


def listed_numbers(stated: object) -> list[int]:
    """Return the numbers of a list that the profiler wrote as text; return none if the text is cut short ("...")."""
    text = "" if stated is None else str(stated)
    return [] if "..." in text else [int(digits) for digits in re.findall(r"\d+", text)]


def ranks_of_group(arguments: LaunchArguments, group_size: int) -> tuple[int, ...]:
    """Return the ranks of the process group that launched the operation, if the profiler lists them all."""
    ranks = listed_numbers(arguments.group_ranks)
    return tuple(ranks) if len(ranks) == group_size else ()


class HostOperator(Value, frozen=True, kw_only=True):
    """The innermost host operator that launched something, such as `aten::mm`.

    `shapes` are the recorded dimensions of its inputs, as JSON, and `dtype` is the type of its first tensor; both are ""
    if the profiler recorded none. `module` is the innermost `nn.Module` or annotation around the launch, "" if none was
    recorded.
    """

    name: str
    shapes: str = ""
    dtype: str = ""
    thread: str = ""
    phase: HostPhase = "unknown"
    module: str = ""


class GpuOperation(Value, frozen=True, kw_only=True):
    """One kernel, copy or fill on the GPU. `launched_us` is None if the trace does not hold the launch.

    `operator` is an index into the trace's operators, None if the trace does not say which one launched it.
    `matmul_sizes`: rows, inner size and columns of the matrix multiplication that launched it, if the profiler recorded
    shapes.
    """

    name: str
    category: Category
    start_us: float
    end_us: float
    arguments: LaunchArguments
    launched_us: float | None = None
    launch_call: str = ""
    matmul_sizes: MatmulSizes | None = None
    operator: int | None = None

    @property
    def stream(self) -> int:
        """The stream that the operation ran on."""
        return self.arguments.stream

    @property
    def duration_us(self) -> float:
        """The time that the operation took on the GPU, as traced."""
        return self.end_us - self.start_us

    @property
    def graph_launch(self) -> int | None:
        """The correlation of the CUDA graph launch that started the operation; None if the host launched it directly."""
        return self.arguments.correlation if GRAPH_LAUNCH in self.launch_call else None


class SyncArguments(Value, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The arguments that the profiler writes with a synchronization: the waiting stream, the event, and the event's record
    if it is known.
    """

    stream: int = -1
    device: int | None = None
    correlation: int = 0
    event: int = msgspec.field(default=-1, name="wait_on_cuda_event_id")
    producer_stream: int = msgspec.field(default=-1, name="wait_on_stream")
    record_correlation: int = msgspec.field(default=-1, name="wait_on_cuda_event_record_corr_id")


class HostCall(Value, frozen=True, kw_only=True):
    """A launch, an event record or a stream's wait that the host issued; `operation` is the index of the operation that it
    launched.
    """

    kind: HostKind
    name: str
    time_us: float
    thread: str
    correlation: int
    operation: int = -1
    sync: SyncArguments | None = None


class ActivityTrace(Value, frozen=True, kw_only=True):
    """The parts of a trace that are used: operations in issue order, host calls in time order, step windows.

    `host_waits` are the times in which the host was blocked waiting for the GPU, in order. `operators` are those that
    launched something. `notes` say what the file lacks or contradicts, one sentence each. `is_by_torch`: torch's profiler
    recorded it, whose cost for kernels was measured.
    """

    path: str
    operations: tuple[GpuOperation, ...]
    host_calls: tuple[HostCall, ...]
    step_windows: tuple[tuple[float, float], ...]
    num_devices: int
    device_name: str | None
    num_sms: int | None
    compute_major: int
    rank: int | None
    world_size: int | None
    nccl_version: str | None
    host_waits: tuple[tuple[float, float], ...] = ()
    operators: tuple[HostOperator, ...] = ()
    notes: tuple[str, ...] = ()
    is_by_torch: bool = True
