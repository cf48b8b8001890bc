"""Read a recording of Nsight Systems: the database that `nsys export --type sqlite` writes.

Tables and columns are those of Nvidia's "SQLite Schema Reference"; its times are nanoseconds. If a database holds several
processes, the one with the most GPU operations on one device is read. NVTX ranges are used as operators and modules, and
those of NCCL tell sizes and groups of collectives, which CUPTI does not record. The module knows neither steps nor kernels.
"""

import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from sys import intern
from typing import Any
from urllib.parse import quote

import msgspec

from counterpoint.errors import CounterpointError, TraceError, shown
from counterpoint.files import is_pipe
from counterpoint.traces.activity import ActivityTrace, Category, GpuOperation, HostCall, LaunchArguments, SyncArguments
from counterpoint.traces.assembly import assemble, busiest, launches_here
from counterpoint.traces.collective_ranges import CollectiveRange, Communicator, by_nccl, describe_collectives
from counterpoint.traces.event_stream import Event
from counterpoint.traces.host_operators import HostOperators, innermost_ranges
from counterpoint.value import require

MAGIC = b"SQLite format 3\0"
KERNELS, COPIES, FILLS, GRAPHS = (f"CUPTI_ACTIVITY_KIND_{name}" for name in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE"))
STREAMS = "TARGET_INFO_CUDA_STREAM"
CALLS, SYNCS, RANGES = "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "NVTX_EVENTS"
STREAM_WAIT_EVENT = 2  # CUpti_ActivitySynchronizationType
COPY_NAMES = {1: "Memcpy HtoD", 2: "Memcpy DtoH", 8: "Memcpy DtoD", 10: "Memcpy PtoP"}  # CUpti_ActivityMemcpyKind
PROCESS_BITS = 24  # a thread's global number is that of its process with this many low bits added
PROCESS_MASK = 0xFFFFFF  # above these bits, the number of the process in its system
_STEP = re.compile(r"(?i)^(?:profilerstep|(?:train(?:ing)?[ _]?)?(?:step|iteration|iter))[ _#:]*\d*$")
_OF_NCCL = re.compile(r"^p?nccl[A-Z]")
_VERSION = re.compile(r"_v\d+$")
_PLACE = ("start", "end", "deviceId", "streamId", "correlationId")
_SHAPE = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
_SIZES = ("registersPerThread", "staticSharedMemory", "dynamicSharedMemory")

Process = tuple[int, int]  # the global number of a process, and a device
Range = tuple[float, float, int, str]  # an NVTX range's start and end in microseconds, its thread and its name


def knows(head: bytes) -> bool:
    """Return whether a file that begins with these bytes is an SQLite database."""
    return head.startswith(MAGIC)


def read(path: Path, pieces: Iterator[bytes]) -> ActivityTrace:
    """Return the activity in a database. Raises `TraceError` if it is not of Nsight Systems, or has no GPU activity."""
    require(
        not is_pipe(path),
        TraceError,
        f"{path} is a pipe with a database, of which every part must be read several times; give the .sqlite file.",
    )
    try:
        with path.open("rb") as file:
            is_plain = knows(file.read(len(MAGIC)))
    except OSError as problem:
        raise TraceError(f"Cannot read {path}: {problem.strerror}; give a .sqlite file.") from problem
    if not is_plain:
        first = next(pieces, b"")
        require(
            knows(first),
            TraceError,
            f"{path} is not an SQLite database, as its name says; make it by nsys export --type sqlite.",
        )
        num_bytes = len(first) + sum(map(len, pieces))
        raise TraceError(
            f"{path} is a compressed database ({num_bytes:,} bytes); unpack it (gunzip) and give the .sqlite file."
        )
    try:
        connection = sqlite3.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True)
        try:
            return _Database(path, connection).trace()
        finally:
            connection.close()
    except sqlite3.Error as problem:
        raise TraceError(
            f"{path} is not a complete database ({problem}); export it again: nsys export --type sqlite."
        ) from problem


class _Database:
    """One exported database."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path, self.connection = path, connection
        self.tables = {
            name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        }
        require(
            "StringIds" in self.tables,
            TraceError,
            f"{path} is not an export of Nsight Systems: it has no table StringIds; make it by nsys export --type sqlite.",
        )
        self.names: dict[int, str] = {
            number: intern(text) for number, text in self.rows("StringIds", ("id", "value")) if isinstance(text, str)
        }

    def rows(self, table: str, needed: Sequence[str], optional: Sequence[str] = ()) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a table, none if the table is missing; `optional` columns that it lacks are None."""
        if table not in self.tables:
            return iter(())
        present = {column for _, column, *_ in self.connection.execute(f'PRAGMA table_info("{table}")')}
        lacking = [name for name in needed if name not in present]
        require(
            not lacking,
            TraceError,
            f"{self.path}: table {table} has no column {', '.join(lacking)}; export it again with a recent Nsight Systems.",
        )
        columns = ", ".join(f'"{name}"' if name in present else "NULL" for name in (*needed, *optional))
        return self.connection.execute(f'SELECT {columns} FROM "{table}"')

    def trace(self) -> ActivityTrace:
        """Return the trace of the process and device that compute longest."""
        found: dict[Process, list[GpuOperation]] = {}
        for place, operation in self.operations():
            found.setdefault(place, []).append(operation)
        graphs = {(process or 0, device) for device, process in self.rows(GRAPHS, ("deviceId",), ("globalPid",))}
        require(
            bool(found or graphs),
            TraceError,
            f"{self.path} holds no GPU activity; record with nsys profile --trace=cuda,nvtx and export again.",
        )
        process, device = busiest(found) if found else min(graphs)
        require(
            (process, device) not in graphs,
            TraceError,
            f"{self.path} holds launches of CUDA graphs without their kernels; record with nsys profile "
            "--cuda-graph-trace=node and export again.",
        )
        num_processes = len({each for each, _ in found})
        note = (
            f"The trace holds {num_processes} processes that use GPUs; only the busiest, on device {device}, was read. "
            "Record one file for each rank."
        )
        operations = found[process, device]
        calls, waits = self.calls(process, device)
        beside = (line for place, line in found.items() if place[0] == process and place[1] != device)
        calls = launches_here(calls, operations, beside)
        ranges, of_nccl = self.ranges(process)
        operators, windows = _operators(ranges, operations, calls)
        collectives, communicators = _collectives(of_nccl)
        whole = max(communicators.values(), key=lambda each: each.num_ranks, default=None)
        world_size = None if whole is None else whole.num_ranks
        describe_collectives(operations, calls, collectives, communicators, world_size)
        gpus = {row[0]: row[1:] for row in self.rows("TARGET_INFO_GPU", ("id",), ("name", "smCount", "computeMajor"))}
        name, num_sms, compute_major = gpus.get(device, (None, None, None))
        trace = ActivityTrace(
            path=str(self.path),
            operations=(),
            host_calls=(),
            step_windows=windows,
            num_devices=sum(each == process for each, _ in found),
            device_name=name,
            num_sms=num_sms or None,
            compute_major=compute_major or 0,
            rank=None if whole is None else whole.rank,
            world_size=world_size,
            nccl_version=None,
            host_waits=waits,
            notes=(note,) if num_processes > 1 else (),
            is_by_torch=False,
        )
        return assemble(trace, operations, calls, operators, None)

    def operations(self) -> Iterator[tuple[Process, GpuOperation]]:
        """Yield kernels, copies and fills, each with its process and device."""
        optional = ("globalPid", "demangledName", "shortName", *_SHAPE, *_SIZES)
        priorities = self.priorities()
        for row in self.rows(KERNELS, _PLACE, optional):
            process, name, short, *launch = row[5:]
            grid = tuple(int(size) for size in launch[:3] if size)
            block = tuple(int(size) for size in launch[3:6] if size)
            registers, static, dynamic = (size or 0 for size in launch[6:])
            more = {"grid": grid, "block": block, "registers_per_thread": registers, "shared_bytes": static + dynamic}
            more["priority"] = priorities.get(((process or 0) >> PROCESS_BITS & PROCESS_MASK, row[3]))
            called = self.names.get(name) or self.names.get(short) or "unknown"
            yield self._operation("kernel", called, row, process, more)
        for row in self.rows(COPIES, _PLACE, ("globalPid", "bytes", "copyKind")):
            process, num_bytes, kind = row[5:]
            yield self._operation("memcpy", COPY_NAMES.get(kind, "Memcpy"), row, process, {"num_bytes": num_bytes or 0})
        for row in self.rows(FILLS, _PLACE, ("globalPid", "bytes")):
            process, num_bytes = row[5:]
            yield self._operation("memset", "Memset (Device)", row, process, {"num_bytes": num_bytes or 0})

    def priorities(self) -> dict[tuple[int, int], int]:
        """Return priorities by the process' number in its system and by stream, where the export states them."""
        rows = self.rows(STREAMS, ("streamId",), ("processId", "priority"))
        return {
            (process, stream): priority - (2**32 if priority >= 2**31 else 0)  # CUPTI's are unsigned
            for stream, process, priority in rows
            if isinstance(priority, int) and isinstance(process, int)
        }

    def _operation(
        self, category: Category, name: str, row: tuple[Any, ...], process: int | None, more: dict[str, Any]
    ) -> tuple[Process, GpuOperation]:
        start, end, device, stream, correlation, *_ = row
        require(
            all(isinstance(value, int) for value in row[: len(_PLACE)]) and 0 <= start <= end,
            TraceError,
            f"{self.path}: '{shown(name)}' on stream {stream} of device {device} runs from {start} to {end} ns; all four "
            "must be whole numbers, times from 0. Export it again.",
        )
        try:
            arguments = LaunchArguments(stream=stream, device=device, correlation=correlation or 0, **more)
        except CounterpointError as problem:
            raise TraceError(f"{self.path}: '{shown(name)}': {problem}") from problem
        operation = GpuOperation(name=name, category=category, start_us=start / 1e3, end_us=end / 1e3, arguments=arguments)
        return (process or 0, device), operation

    def calls(self, process: int, device: int) -> tuple[dict[int, HostCall], tuple[tuple[float, float], ...]]:
        """Return a process's calls by correlation, waits with their events, and when the host waited for the GPU."""
        found: dict[int, HostCall] = {}
        waits: list[tuple[float, float]] = []
        for start, end, thread, correlation, name_id in self.rows(
            CALLS, ("start", "end", "globalTid", "correlationId", "nameId")
        ):
            if not _is_of(process, start, end, thread):
                continue
            name = intern(_VERSION.sub("", self.names.get(name_id, "")))
            if name.endswith("Synchronize"):
                waits.append((start / 1e3, end / 1e3))
            found[correlation] = HostCall(
                kind="record" if "EventRecord" in name else "launch",
                name=name,
                time_us=start / 1e3,
                thread=intern(str(thread)),
                correlation=correlation,
            )
        columns = ("streamId", "correlationId", "syncType", "eventId")
        for stream, correlation, kind, event, wait_process in self.rows(SYNCS, columns, ("globalPid",)):
            call = found.get(correlation)
            if kind == STREAM_WAIT_EVENT and call is not None and wait_process in (None, process):
                sync = SyncArguments(stream=stream, device=device, correlation=correlation, event=event)
                found[correlation] = msgspec.structs.replace(call, kind="wait", sync=sync)
        return found, tuple(sorted(waits))

    def ranges(self, process: int) -> tuple[list[Range], list[tuple[Range, str | None]]]:
        """Return a process's NVTX ranges, and apart from them those of NCCL, each with its payload as JSON."""
        ranges: list[Range] = []
        of_nccl: list[tuple[Range, str | None]] = []
        optional = ("text", "textId", "jsonText", "jsonTextId")
        for start, end, thread, text, text_id, payload, payload_id in self.rows(
            RANGES, ("start", "end", "globalTid"), optional
        ):
            name = text or self.names.get(text_id, "")
            if not name or not end or not _is_of(process, start, end, thread):
                continue
            found = start / 1e3, end / 1e3, thread, name
            if _OF_NCCL.match(name):
                of_nccl.append((found, payload or self.names.get(payload_id)))
            else:
                ranges.append(found)
        return ranges, of_nccl


def _operators(
    ranges: Sequence[Range], operations: list[GpuOperation], calls: dict[int, HostCall]
) -> tuple[HostOperators, tuple[tuple[float, float], ...]]:
    """Return NVTX ranges as operators, with each operation's innermost one, and the ranges that are steps."""
    operators = HostOperators()
    steps = {step: f"ProfilerStep#{number}" for number, step in enumerate(_steps(ranges), 1)}
    events = [
        _event(each, name=steps.get(each, each[-1]), args=b'{"External id": %d}' % number)
        for number, each in enumerate(ranges, 1)
    ]
    operators.add_operators(events)
    for event in events:
        operators.add_annotation(event)
    launches = [calls.get(operation.arguments.correlation) for operation in operations]
    found = innermost_ranges(events, [(call.time_us, call.thread) for call in launches if call is not None])
    for operation, call in zip(operations, launches, strict=True):
        number = None if call is None else found.get((call.time_us, call.thread))
        if number is not None:
            msgspec.structs.force_setattr(operation.arguments, "external_id", number + 1)
    return operators, tuple((start, end) for start, end, *_ in steps)


def _collectives(
    of_nccl: Iterable[tuple[Range, str | None]],
) -> tuple[list[CollectiveRange], dict[str, Communicator]]:
    """Return the collectives that NCCL's NVTX ranges name, and the communicators that the process made."""
    ranges: list[CollectiveRange] = []
    communicators: dict[str, Communicator] = {}
    for each, payload in of_nccl:
        found, made = by_nccl(_event(each, name=each[-1]), payload)
        communicators |= made
        if found is not None:
            ranges.append(found)
    return ranges, communicators


def _event(each: Range, *, name: str, args: bytes = b"{}") -> Event:
    start_us, end_us, thread, _ = each
    return Event(name=name, ts=start_us, dur=end_us - start_us, tid=str(thread), args=msgspec.Raw(args))


def _is_of(process: int, start: object, end: object, thread: object) -> bool:
    """Return whether a call or a range has times, and a thread of the process, or any thread if the process is unknown."""
    if not (isinstance(start, int) and isinstance(end, int) and isinstance(thread, int)):
        return False
    return not process or thread >> PROCESS_BITS == process >> PROCESS_BITS


def _steps(ranges: Sequence[Range]) -> list[Range]:
    """Return the ranges that are steps by their names, in order: numbered ones if there are any, and of nested ones the
    outermost, because optimizers and loops within a step have such ranges, too.
    """
    named = [each for each in ranges if _STEP.match(each[-1])]
    numbered = [each for each in named if each[-1][-1].isdigit()] or named
    steps: list[Range] = []
    for each in sorted(numbered, key=lambda found: (found[0], -found[1])):
        if not steps or each[0] >= steps[-1][1]:
            steps.append(each)
    return steps
