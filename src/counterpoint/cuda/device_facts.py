"""What the driver reports about the visible GPUs, as values. Needs no driver and no bindings.

`device_query.py` queries them, and `probing.py` builds a machine from them.
"""

import re
from pathlib import Path

from counterpoint.errors import DeviceError
from counterpoint.value import Value

KERNEL_MODULE_VERSION = Path("/proc/driver/nvidia/version")
# the oldest CUDA that torch 2.11 is built for; its driver supports the carveout of a kernel node in a graph
OLDEST_CUDA = (12, 6)
# figures that equal one attribute of the device, with the attribute's name in the driver
QUERIED = {
    "num_sms": "MULTIPROCESSOR_COUNT",
    "warp_size": "WARP_SIZE",
    "max_ctas_per_sm": "MAX_BLOCKS_PER_MULTIPROCESSOR",
    "max_threads_per_cta": "MAX_THREADS_PER_BLOCK",
    "shared_bytes_per_sm": "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
    "max_shared_bytes_per_cta": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
    "reserved_shared_bytes_per_cta": "RESERVED_SHARED_MEMORY_PER_BLOCK",
    "l2_bytes": "L2_CACHE_SIZE",
    "num_copy_engines": "ASYNC_ENGINE_COUNT",
}
ATTRIBUTES = (
    *QUERIED.values(),
    "COMPUTE_CAPABILITY_MAJOR",
    "COMPUTE_CAPABILITY_MINOR",
    "CLOCK_RATE",
    "MAX_THREADS_PER_MULTIPROCESSOR",
    "MAX_REGISTERS_PER_MULTIPROCESSOR",
    "MEMORY_CLOCK_RATE",
    "GLOBAL_MEMORY_BUS_WIDTH",
)


def kernel_module_version(file: Path = KERNEL_MODULE_VERSION) -> str:
    """Return the version of NVIDIA's kernel module, as in "580.159.04"; empty if it is not loaded or states none."""
    try:
        found = re.search(r"\s(\d+\.\d+(\.\d+)*)\s", file.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


class Peer(Value, frozen=True, kw_only=True):
    """One direction between two GPUs, given by their numbers: what the driver allows, and the rate of a lone copy."""

    source: int
    destination: int
    has_access: bool
    has_native_atomics: bool
    copy_bytes_per_s: float


class Queried(Value, frozen=True, kw_only=True):
    """What the driver reports about one GPU. `attributes` are those of `ATTRIBUTES`, in the driver's units."""

    device_name: str
    cuda_version: tuple[int, int]
    attributes: dict[str, int]
    hbm_bytes: int
    greatest_priority: int


class Measured(Value, frozen=True, kw_only=True):
    """Rates that copies of 256 MiB reach, bytes per second; HBM counts bytes read and written.

    `all_peers_bytes_per_s` is the rate at which the first GPU sends to all others at once, None if there are none.
    """

    hbm_copy_bytes_per_s: float
    peers: tuple[Peer, ...] = ()
    all_peers_bytes_per_s: float | None = None


def check_driver(version: int) -> tuple[int, int]:
    """Split a driver's version (1000 x major + 10 x minor). Raises `DeviceError` if it is too old."""
    found = (version // 1000, version % 1000 // 10)
    if found < OLDEST_CUDA:
        raise DeviceError(
            f"The driver is too old: it supports CUDA {found[0]}.{found[1]}, but "
            f"{OLDEST_CUDA[0]}.{OLDEST_CUDA[1]} or later is needed. Update the NVIDIA driver."
        )
    return found


def check_alike(queried: tuple[Queried, ...]) -> None:
    """Raise `DeviceError` unless the visible GPUs are all of one kind, as a machine requires."""
    names = sorted({each.device_name for each in queried})
    if len(names) > 1:
        raise DeviceError(
            f"A machine has equal GPUs, but {len(names)} kinds are visible: {', '.join(names)}. "
            "Choose one kind with CUDA_VISIBLE_DEVICES."
        )
