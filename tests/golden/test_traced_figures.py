"""The figures of the traced step against an independent reading: JSON alone, and a sweep over starts and ends.

Nothing here is shared with the product but the file. Communication is told by a few words in names. A step begins with the
first operation that the host launched in it, once the computation's stream is done with the step before; whatever ran until
the next one begins counts.
"""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from counterpoint.metrics import measure
from counterpoint.traces import read_trace

ROOT = Path(__file__).parents[2]
SHIPPED, RECORDED = ROOT / "examples" / "traces", ROOT / "tests" / "data" / "traces"
COMMUNICATION = ("nccl", "barrier_kernel", "memcpy ptop")
MAIN_STREAM = 7
WITHIN = 0.01
Event = dict[str, Any]


class Figures(NamedTuple):
    """Microseconds."""

    makespan: float
    computation: float
    communication: float
    exposed: float


def sweep(events: list[Event], begin: float, end: float) -> Figures:
    """Unions by counting how many of each kind run between any two moments at which something starts or ends."""
    changes: list[tuple[float, int, int]] = []
    for event in events:
        start, stop = max(event["ts"], begin), min(event["ts"] + event["dur"], end)
        if start < stop:
            communicates = any(word in event["name"].lower() for word in COMMUNICATION)
            kind = 1 if communicates else 0 if event["cat"] == "kernel" else 2
            changes += [(start, kind, 1), (stop, kind, -1)]
    changes.sort()
    running, totals, exposed, last = [0, 0, 0], [0.0, 0.0, 0.0], 0.0, changes[0][0]
    for time, kind, change in changes:
        for each in range(3):
            totals[each] += (time - last) if running[each] else 0.0
        exposed += (time - last) if running[1] and not running[0] else 0.0
        running[kind] += change
        last = time
    return Figures(last - changes[0][0], totals[0], totals[1], exposed)


def read_raw(path: Path, step: int, num_steps: int) -> Figures:
    document = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    events = [event for event in document if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    calls = {e["args"].get("correlation"): e["ts"] for e in document if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    events.sort(key=lambda event: (calls[event["args"]["correlation"]], event["ts"]))
    begins = sorted(e["ts"] for e in document if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep#"))
    begins = begins or [
        calls[events[number * len(events) // num_steps]["args"]["correlation"]] for number in range(num_steps)
    ]
    assert len(begins) == num_steps
    firsts, computed = [], 0.0
    for begin, end in pairwise((*begins, float("inf"))):
        launched = [event for event in events if begin <= calls[event["args"]["correlation"]] < end]
        firsts.append(min(event["ts"] for event in launched if event["ts"] >= computed))
        computed = max(event["ts"] + event["dur"] for event in launched if event["args"]["stream"] == MAIN_STREAM)
    ends = [*firsts[1:], max(event["ts"] + event["dur"] for event in events)]
    return sweep(events, firsts[step], ends[step])


@pytest.mark.parametrize(
    ("path", "step", "num_steps"),
    [
        (SHIPPED / "ddp.rank0.json.gz", 1, 3),
        (SHIPPED / "ddp.rank1.json.gz", 1, 3),
        (SHIPPED / "fsdp2.rank0.json.gz", 1, 3),
        (SHIPPED / "moe.rank0.json.gz", 1, 3),
        (SHIPPED / "tp.rank0.json.gz", 1, 3),
        (RECORDED / "starve.rank0.json.gz", 1, 3),
        (RECORDED / "asynctp.rank0.json.gz", 2, 3),
        (RECORDED / "ddp_dma.rank0.json.gz", 1, 2),
        (RECORDED / "titan_tp_compile.rank0.json.gz", 0, 1),
    ],
    ids=lambda value: value.name.split(".json")[0] if isinstance(value, Path) else None,
)
def test_the_traced_figures_are_those_of_an_independent_union(path: Path, step: int, num_steps: int) -> None:
    rank = measure(read_trace(path).timeline).ranks[0]
    found = Figures(rank.makespan_us, rank.computation_us, rank.communication_us, rank.exposed_us)
    assert tuple(found) == pytest.approx(tuple(read_raw(path, step, num_steps)), rel=WITHIN, abs=0.01)


def test_the_sweep_counts_what_overlaps_once() -> None:
    events = [
        {"name": "gemm", "cat": "kernel", "ts": 0.0, "dur": 10.0},
        {"name": "ncclDevKernel_AllReduce", "cat": "kernel", "ts": 5.0, "dur": 10.0},
        {"name": "Memcpy PtoP (Device -> Device)", "cat": "gpu_memcpy", "ts": 12.0, "dur": 8.0},
    ]
    assert sweep(events, 2.0, 18.0) == Figures(16.0, 8.0, 13.0, 8.0)
