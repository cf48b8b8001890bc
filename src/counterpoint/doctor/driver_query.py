"""Asks the GPU driver what a job would see, through ctypes: `python -m counterpoint.doctor.driver_query` prints JSON.

It runs in a separate process with a time limit, because a faulty driver can hang. It creates no context and needs
neither torch nor CUDA bindings. NVIDIA's driver is asked first, then HIP. The HIP part follows HIP's documentation and
has never run on AMD hardware.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Literal

from counterpoint.doctor.job_context import FoundGpu
from counterpoint.value import Value, write_json

CUDA_LIBRARIES = ("libcuda.so.1",)
HIP_LIBRARIES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")
NCCL_LIBRARIES = ("libnccl.so.2",)
# numbers of CUdevice_attribute in cuda.h, CUDA 13.0
CAPABILITY_MAJOR, CAPABILITY_MINOR, MULTIPROCESSOR_COUNT, MULTICAST_SUPPORTED = 75, 76, 16, 132
NAME_BYTES = 256
NO_DEVICE = 100


class Answer(Value, frozen=True, kw_only=True):
    """The driver's answer; `reason` says why there are no GPUs. `nccl_version` is that of a library on the search path."""

    vendor: Literal["nvidia", "amd", "unknown"] = "unknown"
    gpus: tuple[FoundGpu, ...] = ()
    blocked_peers: tuple[tuple[int, int], ...] = ()
    driver_api_version: str = ""
    nccl_version: str = ""
    reason: str = ""


def ask() -> Answer:
    """Ask the first driver that is installed."""
    nccl = _nccl_version()
    if (cuda := _load(CUDA_LIBRARIES)) is not None:
        return _ask_cuda(cuda, nccl)
    if (hip := _load(HIP_LIBRARIES)) is not None:
        return _ask_hip(hip, nccl)
    return Answer(nccl_version=nccl, reason=f"neither {CUDA_LIBRARIES[0]} nor {HIP_LIBRARIES[0]} can be loaded")


def _load(names: Sequence[str]) -> ctypes.CDLL | None:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _ask_cuda(cuda: ctypes.CDLL, nccl: str) -> Answer:
    status = cuda.cuInit(0)
    if status != 0:
        problem = "finds no GPU" if status == NO_DEVICE else "refuses to start"
        return Answer(vendor="nvidia", nccl_version=nccl, reason=f"NVIDIA's driver {problem} (error {status})")
    count = _number(cuda.cuDeviceGetCount)
    devices = [_cuda_device(cuda, number) for number in range(count)]
    version = _number(cuda.cuDriverGetVersion)
    return Answer(
        vendor="nvidia",
        gpus=tuple(_cuda_gpu(cuda, device) for device in devices),
        blocked_peers=_blocked_peers(cuda.cuDeviceCanAccessPeer, devices),
        driver_api_version=f"{version // 1000}.{version % 1000 // 10}",
        nccl_version=nccl,
        reason="" if count else "NVIDIA's driver shows no GPU; check CUDA_VISIBLE_DEVICES",
    )


def _cuda_device(cuda: ctypes.CDLL, number: int) -> int:
    return _number(lambda out: cuda.cuDeviceGet(out, number))


def _cuda_gpu(cuda: ctypes.CDLL, device: int) -> FoundGpu:
    name = ctypes.create_string_buffer(NAME_BYTES)
    _check(cuda.cuDeviceGetName(name, NAME_BYTES, device))
    major, minor, num_sms = (
        _number(lambda out, wanted=attribute: cuda.cuDeviceGetAttribute(out, wanted, device))
        for attribute in (CAPABILITY_MAJOR, CAPABILITY_MINOR, MULTIPROCESSOR_COUNT)
    )
    multicast = ctypes.c_int()
    is_known = cuda.cuDeviceGetAttribute(ctypes.byref(multicast), MULTICAST_SUPPORTED, device) == 0  # not before CUDA 12.1
    return FoundGpu(
        name=name.value.decode(errors="replace"),
        compute_capability=f"{major}.{minor}",
        num_sms=num_sms,
        has_multicast=bool(multicast.value) if is_known else None,
    )


def _ask_hip(hip: ctypes.CDLL, nccl: str) -> Answer:
    count = ctypes.c_int()
    status = hip.hipGetDeviceCount(ctypes.byref(count))
    if status != 0 or count.value == 0:
        return Answer(
            vendor="amd", nccl_version=nccl, reason=f"HIP shows no GPU (status {status}); check HIP_VISIBLE_DEVICES"
        )
    return Answer(
        vendor="amd",
        gpus=tuple(_hip_gpu(hip, number) for number in range(count.value)),
        blocked_peers=_blocked_peers(hip.hipDeviceCanAccessPeer, range(count.value)),
        nccl_version=nccl,
    )


def _hip_gpu(hip: ctypes.CDLL, number: int) -> FoundGpu:
    name = ctypes.create_string_buffer(NAME_BYTES)
    _check(hip.hipDeviceGetName(name, NAME_BYTES, number))
    return FoundGpu(name=name.value.decode(errors="replace"))


def _blocked_peers(can_access: Callable[..., int], devices: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return pairs (from, to) of GPU numbers of which the first cannot access the second's memory."""
    pairs = [(one, other) for one in range(len(devices)) for other in range(len(devices)) if one != other]
    return tuple(pair for pair in pairs if _number(_access_of(can_access, devices[pair[0]], devices[pair[1]])) == 0)


def _access_of(can_access: Callable[..., int], one: int, other: int) -> Callable[..., int]:
    return lambda out: can_access(out, one, other)


def _nccl_version() -> str:
    """Return the version of an NCCL that the loader finds by itself, as in containers without NCCL's wheel."""
    library = _load(NCCL_LIBRARIES)
    if library is None:
        return ""
    version = _number(library.ncclGetVersion)
    return f"{version // 10_000}.{version % 10_000 // 100}.{version % 100}"


def _number(call: Callable[..., int]) -> int:
    out = ctypes.c_int()
    _check(call(ctypes.byref(out)))
    return out.value


def _check(status: int) -> None:
    if status != 0:
        raise OSError(f"a library rejected a query with status {status}")


if __name__ == "__main__":
    try:
        print(write_json(ask()))
    except (OSError, AttributeError) as problem:  # a rejected query, or a library without the function
        sys.exit(" ".join(str(problem).split()))
