"""Profiler traces small enough to be test data: what no reader of ours needs is left out, the rest stays as it was written.

Left out: Python functions, arrows (`ac2g`, `fwdbwd`: correlations and sequence numbers say the same), and runtime calls that
neither launched anything nor recorded, waited for or synchronised anything. Host operations, GPU activity, synchronisation
and what stands beside the events stay.
"""

import gzip
import json
from pathlib import Path
from typing import Any

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
