"""Copies of many blocks by one call of the driver.

The driver takes arrays of addresses and sizes. Its Python bindings take lists of objects instead, which for a hundred blocks
costs the host more than the copies cost the GPU, so this module calls the driver by itself.
"""

import ctypes
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, final

import numpy as np
from cuda.bindings import driver as cu

from counterpoint.cuda.driver import Handle
from counterpoint.ops.allocations import LIBRARY
from counterpoint.ops.copy_lane import copy_bytes
from counterpoint.schedule.expert_layout import Counts
from counterpoint.units import MIB

SYMBOL = "cuMemcpyBatchAsync_v2"  # from CUDA 13.0 on
LEAST_BATCH = 4  # fewer blocks are copied one by one
MOST_JOINED_BYTES = 16 * MIB  # chosen, not measured
POINTER, SIZE = ctypes.c_void_p, ctypes.c_size_t
ARGUMENTS = (POINTER, POINTER, POINTER, SIZE, POINTER, POINTER, SIZE, POINTER)


class BlockAddresses(NamedTuple):
    """Blocks by address in target and source and by number of bytes; contiguous arrays of 64-bit integers."""

    targets: Counts
    sources: Counts
    num_bytes: Counts


def requests(blocks: Mapping[int, BlockAddresses]) -> Iterator[tuple[tuple[int, ...], BlockAddresses]]:
    """Yield what to request at once, with the peers concerned, of these blocks by peer: all if they are small, because a
    request takes the host as long as their copies; otherwise one peer's after the other's.
    """
    if len(blocks) > 1 and sum(int(each.num_bytes.sum()) for each in blocks.values()) < MOST_JOINED_BYTES:
        joined = map(np.concatenate, zip(*blocks.values(), strict=True))
        yield tuple(blocks), BlockAddresses(*joined)
    else:
        yield from (((peer,), each) for peer, each in blocks.items())


@final
class BlockCopies:
    """Copies blocks, all of a call by one request to the driver if it has such requests."""

    def __init__(self) -> None:
        self._request = _bind()
        # in the order of the stream, and without SMs if possible
        self._attributes = cu.CUmemcpyAttributes()
        self._attributes.srcAccessOrder = cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        self._attributes.flags = int(cu.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)
        self._first = SIZE(0)  # the block from which on the attributes apply

    def copy(self, blocks: BlockAddresses, stream: Handle) -> None:
        """Copy the blocks after the stream's work, in any order among each other."""
        count = len(blocks.num_bytes)
        if count >= LEAST_BATCH and self._request is not None:
            addresses = (each.ctypes.data for each in blocks)
            attributes = self._attributes.getPtr(), ctypes.addressof(self._first), 1
            if self._request(*addresses, count, *attributes, int(stream)) == 0:
                return
            self._request = None  # a driver that refuses one such request refuses all
        for target, source, num_bytes in zip(*(each.tolist() for each in blocks), strict=True):
            copy_bytes(target, source, num_bytes, stream)


def _bind() -> Any:
    """Return the driver's function, or None if it has none."""
    try:
        request = getattr(ctypes.CDLL(LIBRARY), SYMBOL)
    except (OSError, AttributeError):
        return None
    request.argtypes, request.restype = ARGUMENTS, ctypes.c_int
    return request
