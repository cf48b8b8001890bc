"""The streams that operators use besides the caller's: one for each group, device and name, which live as long as the
process.

They outlive `release()`. torch takes streams from a pool of 32 in turn, and its matmuls keep a cuBLAS workspace for
every stream on which they ever ran (measured on H200: 35,651,584 bytes each) and never free it: a group that took new
streams after every release would hold a further workspace each time. With these streams, only the first use costs
memory.

Streams for recording are the driver's own: torch reuses its streams, and a recording must neither capture what other
code issues on the same stream, nor hold the address of a workspace that others use or that torch may free.
"""

from functools import cache
from typing import final

import torch

StreamNumbers = tuple[int, int, int]  # torch's identification of a stream: its number, its device's and the device type's


@final
class OnStream:
    """Makes a stream current, as `torch.cuda.stream` does, but does not look up devices: its device is the current one."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._numbers = numbers_of(stream)

    def __enter__(self) -> None:
        self._former: StreamNumbers = torch._C._cuda_getCurrentStream(self._numbers[1])
        make_current(self._numbers)

    def __exit__(self, *_: object) -> None:
        make_current(self._former)


def numbers_of(stream: torch.cuda.Stream) -> StreamNumbers:
    """Return torch's identification of a stream."""
    return stream.stream_id, stream.device_index, stream.device_type


def make_current(numbers: StreamNumbers) -> None:
    """Make a stream torch's current stream."""
    stream_id, device_index, device_type = numbers
    torch._C._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)


@cache
def stream_of(group_name: str, device: torch.device, name: str, priority: int = 0) -> torch.cuda.Stream:
    """Return a group's stream of that name on a device, the same one at every call.

    `priority` is torch's (0 or less; a lower number is a higher priority) and part of the name.
    """
    return torch.cuda.Stream(device, priority=priority)


@cache
def recording_stream_of(group_name: str, device: torch.device, name: str, priority: int = 0) -> torch.cuda.Stream:
    """Return a group's stream of that name on a device on which work is only captured. Only what torch writes at the start
    of a capture runs there. Captured kernels keep its `priority` (the driver's)."""
    from cuda.bindings import driver as cu  # noqa: PLC0415  streams to run on need torch only

    from counterpoint.cuda.driver import check  # noqa: PLC0415  it needs cuda-bindings

    with torch.cuda.device(device):
        flags = int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        handle = check("Making a stream", cu.cuStreamCreateWithPriority(flags, priority))
    return torch.cuda.ExternalStream(int(handle), device)
