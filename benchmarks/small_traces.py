"""Profiler traces small enough to be test data: what no reader of ours needs is left out, the rest stays as it was written.

Left out: Python functions, arrows (`ac2g`, `fwdbwd`: correlations and sequence numbers say the same), and runtime calls that
neither launched anything nor recorded, waited for or synchronized anything. Host operations, GPU activity, synchronisation
and what stands beside the events stay.
"""

import gzip
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

UNREAD = ("python_function", "ac2g", "fwdbwd")
GPU = ("kernel", "gpu_memcpy", "gpu_memset")
RUNTIME = ("cuda_runtime", "cuda_driver")
ORDERING = ("EventRecord", "StreamWaitEvent", "Synchronize", "GraphLaunch")


def trim(document: dict[str, Any]) -> dict[str, Any]:
    """The same trace without events that no reader needs; their order and everything else is kept."""
    events = document["traceEvents"]
    launched = {_correlation(event) for event in events if event.get("cat") in GPU}
    return document | {"traceEvents": [event for event in events if _is_read(event, launched)]}


def _is_read(event: dict[str, Any], launched: set[int]) -> bool:
    category = event.get("cat")
    if category in RUNTIME:
        return _correlation(event) in launched or any(word in event["name"] for word in ORDERING)
    return category not in UNREAD


def _correlation(event: dict[str, Any]) -> int:
    return int(event.get("args", {}).get("correlation", 0))


def write_small(exported: Path, path: Path) -> int:
    """Trim the trace that torch.profiler exported, write it to `path` packed by gzip, and return its bytes.

    The same trace gives the same bytes.
    """
    document = trim(json.loads(exported.read_text(), strict=False))
    document["traceName"] = path.name  # torch writes where it was exported to
    packed = gzip.compress(json.dumps(document, separators=(",", ":")).encode(), compresslevel=9, mtime=0)
    path.write_bytes(packed)
    return len(packed)


def record_steps(step: Callable[[], object], num_steps: int, path: Path, meet: Callable[[], object]) -> int:
    """Record steps of a job that is warm, small enough to be test data; the bytes of the file.

    `meet` returns once all ranks have called it: the steps then start together. The GPU is idle before the first of them.
    """
    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "trace.json"
        with profile(
            activities=[ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else []),
            schedule=schedule(wait=0, warmup=1, active=num_steps, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(exported)),
            record_shapes=True,
            experimental_config=torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True),
        ) as profiler:
            step()  # while the profiler warms up
            synchronize()
            profiler.step()
            meet()
            for number in range(num_steps):
                step()
                if number == num_steps - 1:
                    synchronize()
                profiler.step()
        return write_small(exported, path)


def synchronize() -> None:
    """Wait for this rank's GPU, where it has one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
