"""Memory of other processes' GPUs: maps a tensor of one rank to an address that another rank's copies can use.

CUDA's interprocess handles name a whole allocation, so a rank sends the others the handle and the tensor's offset in it.
Symmetric memory (`symmetric.py`) is allocated for the purpose; this module maps memory that torch's allocator gave to
any tensor, such as those of a captured step.
"""

from typing import final

from cuda.bindings import driver as cu

from counterpoint.cuda.driver import SUCCESS, check
from counterpoint.errors import DeviceError
from counterpoint.value import Value

LAZY_PEER_ACCESS = int(cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)


class IpcMemory(Value, frozen=True, kw_only=True):
    """The location of memory for other processes: the handle of its allocation and the bytes before it."""

    allocation: bytes
    offset: int


def ipc_memory_of(address: int) -> IpcMemory:
    """Return the location of the memory at `address`. Raises `DeviceError` for memory that other processes cannot open."""
    base, _ = check("Finding an allocation", cu.cuMemGetAddressRange(cu.CUdeviceptr(address)))
    error, handle = cu.cuIpcGetMemHandle(base)
    if error != SUCCESS:
        raise DeviceError(
            f"other ranks cannot open its memory ({error.name}), for example that of expandable segments; take "
            "expandable_segments out of PYTORCH_CUDA_ALLOC_CONF"
        )
    return IpcMemory(allocation=bytes(handle.reserved), offset=address - int(base))


@final
class PeerMemory:
    """Allocations of other ranks, each opened once, until `close`."""

    def __init__(self) -> None:
        self._opened: dict[bytes, int] = {}

    def address_of(self, place: IpcMemory) -> int:
        """Return its address for copies of this rank. Raises `DeviceError` if the driver cannot open it."""
        if place.allocation not in self._opened:
            handle = cu.CUipcMemHandle()
            handle.reserved = place.allocation
            opened = cu.cuIpcOpenMemHandle(handle, LAZY_PEER_ACCESS)
            self._opened[place.allocation] = int(check("Opening another rank's allocation", opened))
        return self._opened[place.allocation] + place.offset

    def close(self) -> None:
        """Close all allocations; nothing may copy there any more."""
        while self._opened:
            _, address = self._opened.popitem()
            check("Closing another rank's allocation", cu.cuIpcCloseMemHandle(cu.CUdeviceptr(address)))
