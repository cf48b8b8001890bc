"""Records of NCCL Inspector as its plugin writes them, with figures made by hand."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MIB = 1 << 20


def record(
    function: str = "AllReduce",
    *,
    number: int = 1,
    rank: int = 0,
    n_ranks: int = 2,
    num_bytes: int = MIB,
    time_us: float = 100,
    **more: Any,
) -> dict[str, Any]:
    """One collective, or with `is_p2p` one send or receive; `more` are `id` and `name` of the communicator, and others."""
    kind = "p2p" if more.get("is_p2p") else "coll"
    return {
        "header": {
            "id": more.get("id", "0x7f8c"),
            "comm_name": more.get("name", "dp"),
            "rank": rank,
            "n_ranks": n_ranks,
            "nnodes": 1,
        },
        "metadata": {
            "inspector_output_format_version": "v4.0",
            "git_rev": "",
            "rec_mechanism": "nccl_profiler_interface",
            "dump_timestamp_us": more.get("dumped_us", 1_748_030_377_748_202),
            "hostname": "host",
            "pid": 1,
        },
        f"{kind}_perf": {
            kind: function,
            f"{kind}_sn": number,
            f"{kind}_msg_size_bytes": num_bytes,
            f"{kind}_exec_time_us": time_us,
            f"{kind}_timing_source": more.get("source", "kernel_gpu"),
        },
    }


def write_log(path: Path, records: Iterable[dict[str, Any]]) -> Path:
    """A log with one record on each line."""
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path
