"""The streams that the operators issue on besides the caller's: one for each group, device and name, for as long as the
process lives.

They outlive `release()`. torch draws streams from a pool of 32 in turn, and its matmuls keep a workspace of cuBLAS for
every stream that they ever ran on (measured on H200: 35,651,584 bytes each) and never give it back: a group that took
new streams after every release would hold a further workspace each time. With these, what the first use leaves is all
there is.

Streams to record on are the driver's own: torch's come round, and a recording must neither catch what somebody else issues
on the same stream, nor hold the address of a workspace that others use or that torch may give back.
"""

from functools import cache

import torch


@cache
def stream_of(group_name: str, device: torch.device, name: str, priority: int = 0) -> torch.cuda.Stream:
    """The stream of that name of a group on a device, the same at every call.

    `priority` is torch's (0 or less; lower is served first) and part of the name.
    """
    return torch.cuda.Stream(device, priority=priority)


@cache
def recording_stream_of(group_name: str, device: torch.device, name: str) -> torch.cuda.Stream:
    """The stream of that name of a group on a device that work is only captured on. All that runs there is what torch writes
    when it begins a capture."""
    from cuda.bindings import driver as cu  # noqa: PLC0415  streams to run on need torch only

    from counterpoint.cuda.driver import check  # noqa: PLC0415  it needs cuda-bindings

    with torch.cuda.device(device):
        handle = check("Making a stream", cu.cuStreamCreate(int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)))
    return torch.cuda.ExternalStream(int(handle), device)
