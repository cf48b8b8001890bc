"""Tells whether memory is still the one that a graph was recorded with.

The driver resolves the addresses of a graph's copies when the graph is made. Torch may give memory back to the driver
(`empty_cache()`, or when no other memory is left) and later get new memory at the same address. Then a replay fails with
"invalid argument", or the process crashes in the driver (both seen with driver 580.159). Kernels only need the address to be
valid. The driver numbers its allocations and never uses a number twice.
"""

import ctypes
from collections.abc import Iterable
from functools import cache
from typing import Any, final

LIBRARY = "libcuda.so.1"
BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID


@final
class Allocations:
    """The driver's allocations that hold these addresses, as they are now."""

    __slots__ = ("_numbers",)

    def __init__(self, addresses: Iterable[int]) -> None:
        by_number = {number_at(address): address for address in addresses}
        self._numbers = tuple(by_number.items())  # one address of each is enough

    def are_present(self) -> bool:
        """Return whether the addresses are still in the same allocations; it takes 0.4 to 1.5 us for each."""
        return all(number_at(address) == number for number, address in self._numbers)


def number_at(address: int) -> int:
    """Return the driver's number of the allocation that holds this address; 0 if there is none."""
    number = ctypes.c_ulonglong()
    result = _request()(ctypes.byref(number), BUFFER_ID, ctypes.c_uint64(address))
    return number.value if result == 0 else 0


@cache
def _request() -> Any:
    return ctypes.CDLL(LIBRARY).cuPointerGetAttribute
