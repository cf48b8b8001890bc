"""Builds small profiler traces in the shape torch.profiler exports, event by event, with the clock in the test's hands."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEVICE = {"id": 0, "name": "NVIDIA H200", "computeMajor": 9, "computeMinor": 0, "numSms": 132}
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
MATMUL = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16> >"


class TraceBuilder:
    """Collects events. Host calls get rising correlations; times are microseconds."""

    def __init__(self, *, world_size: int | None = 4, rank: int = 0) -> None:
        self.events: list[dict[str, Any]] = []
        self.document: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [DEVICE], "traceEvents": self.events}
        if world_size is not None:
            self.document["distributedInfo"] = {"rank": rank, "world_size": world_size, "nccl_version": "2.28.9"}
        self.correlation = 0

    def step(self, start: float, end: float) -> None:
        self.range("ProfilerStep#1", start, end)

    def range(self, name: str, start: float, end: float, **args: Any) -> None:
        self._add("user_annotation", name, start, end - start, tid=1, args=args)

    def kernel(self, name: str, start: float, dur: float, *, host: float | None = None, stream: int = 7, **more: Any) -> int:
        call, thread = more.pop("call", "cudaLaunchKernel"), more.pop("thread", 1)
        correlation = self.call(call, start - 5 if host is None else host, thread)
        arguments = {
            "stream": stream,
            "device": 0,
            "correlation": correlation,
            "grid": [264, 1, 1],
            "block": [128, 1, 1],
            "registers per thread": 32,
            "shared memory": 0,
        }
        self._add("kernel", name, start, dur, tid=stream, args=arguments | more.pop("args", {}))
        return correlation

    def collective(self, start: float, dur: float, *, name: str = NCCL, elements: int = 1024, **more: Any) -> int:
        arguments = {
            "grid": [24, 1, 1],
            "block": [544, 1, 1],
            "registers per thread": 96,
            "shared memory": 103808,
            "Collective name": "allreduce",
            "In msg nelems": elements,
            "Out msg nelems": elements,
            "Group size": 4,
            "dtype": "BFloat16",
            "Process Group Name": "0",
        }
        more.setdefault("stream", 19)
        return self.kernel(name, start, dur, args=arguments | more.pop("args", {}), **more)

    def copy(
        self, name: str, start: float, dur: float, *, num_bytes: int, host: float | None = None, stream: int = 7, **more: Any
    ) -> int:
        is_fill = name.startswith("Memset")
        call = "cudaMemsetAsync" if is_fill else "cudaMemcpyAsync"
        correlation = self.call(call, start - 5 if host is None else host, 1)
        where = {"fromDevice": 0, "inDevice": 0, "toDevice": 1} if "PtoP" in name else {"device": 0}
        arguments = where | {"stream": stream, "correlation": correlation, "bytes": num_bytes} | more.pop("args", {})
        self._add("gpu_memset" if is_fill else "gpu_memcpy", name, start, dur, tid=stream, args=arguments)
        return correlation

    def call(self, name: str, host: float, thread: int = 1) -> int:
        self.correlation += 1
        self._add("cuda_runtime", name, host, 0.5, tid=thread, args={"correlation": self.correlation})
        return self.correlation

    def record(self, host: float, *, name: str = "cudaEventRecordWithFlags") -> int:
        return self.call(name, host)

    def wait(self, host: float, *, stream: int, event: int, on_stream: int = -1, record: int = -1) -> int:
        correlation = self.call("cudaStreamWaitEvent", host)
        arguments = {
            "stream": stream,
            "correlation": correlation,
            "wait_on_cuda_event_id": event,
            "wait_on_stream": on_stream,
            "wait_on_cuda_event_record_corr_id": record,
        }
        self._add("cuda_sync", "Stream Wait Event", host, 0.1, tid=stream, args=arguments)
        return correlation

    def text(self) -> bytes:
        return json.dumps(self.document).encode()

    def write(self, folder: Path, name: str = "small.json") -> Path:
        path = folder / name
        path.write_bytes(gzip.compress(self.text()) if name.endswith(".gz") else self.text())
        return path

    def _add(
        self, category: str, name: str, start: float, dur: float, *, tid: int, args: dict[str, Any] | None = None
    ) -> None:
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": tid, "ts": start, "dur": dur, "args": args or {}}
        )


def small_trace() -> TraceBuilder:
    """Three alike steps: matmul, all-reduce beside a second matmul, and an addition that waits for the all-reduce."""
    trace = TraceBuilder()
    for number in range(3):
        begin = 10_000.0 * number
        trace.step(begin, begin + 9_000)
        trace.copy("Memset (Device)", begin + 100, 1, num_bytes=4, host=begin + 10)
        trace.kernel(MATMUL, begin + 102, 100, host=begin + 12, args={"grid": [2, 66, 1]})
        trace.record(begin + 14)
        trace.wait(begin + 15, stream=19, event=55)
        trace.collective(begin + 204, 300 + number, host=begin + 20)
        end_record = trace.record(begin + 22)
        trace.copy("Memset (Device)", begin + 203, 1, num_bytes=4, host=begin + 24)
        trace.kernel(MATMUL, begin + 205, 120, host=begin + 26, args={"grid": [2, 66, 1]})
        trace.wait(begin + 30, stream=7, event=700 + end_record)
        trace.kernel(ELEMENTWISE, begin + 510 + number, 40, host=begin + 32)
    return trace


def without(path: Path, folder: Path, is_left_out: Callable[[dict[str, Any]], bool]) -> Path:
    """A trace without some of its events, written anew in a folder."""
    document = json.loads(gzip.decompress(path.read_bytes()))
    document["traceEvents"] = [event for event in document["traceEvents"] if not is_left_out(event)]
    written = folder / path.name.removesuffix(".gz")
    written.write_text(json.dumps(document))
    return written
