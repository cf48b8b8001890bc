"""Reads a GPU's state and energy with NVML, and checks whether the GPU is fit to be measured.

Calls the driver's own library (`libnvidia-ml.so.1`), so nothing has to be installed. If the library is missing, a GPU is
calibrated nevertheless, and the conditions say that its state could not be read.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

from counterpoint.errors import DeviceError
from counterpoint.units import MIB, format_bytes
from counterpoint.value import Value

LIBRARY = "libnvidia-ml.so.1"
# nvml.h of CUDA 13.0: nvmlClocksEventReasons. The power cap is not a fault: dense matmuls reach it on every such GPU.
THROTTLES = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
POWER_CAP = 0x04
# nvml.h: nvmlReturn_t
ERRORS = {3: "not supported by this GPU", 4: "no permission", 6: "GPU not found", 9: "driver not loaded"}
INSUFFICIENT_SIZE = 7
SM_CLOCK = 1
MOST_BUSY_PERCENT = 5  # of the last sampling period; an idle GPU shows 0. An assumption
MOST_USED_BYTES = 2048 * MIB  # an idle GPU holds 0.5 to 1 GiB for the driver. An assumption


class GpuState(Value, frozen=True, kw_only=True):
    """A reading of one GPU. `num_processes` counts those that compute on it, this one included."""

    clock_mhz: int
    max_clock_mhz: int
    power_w: float
    power_limit_w: float
    temperature_c: int
    reasons: int
    busy_percent: int
    used_bytes: int
    num_processes: int

    @property
    def is_power_capped(self) -> bool:
        """Whether the power limit lowered the clock at the time of the reading."""
        return bool(self.reasons & POWER_CAP)

    def throttle(self) -> str:
        """Return what slows the GPU down below its design, in words with the reading; empty if nothing does."""
        found = [words for bit, words in THROTTLES.items() if self.reasons & bit]
        if not found:
            return ""
        return (
            f"{', '.join(found)} at {self.temperature_c} C, {self.power_w:.0f} of {self.power_limit_w:.0f} W, "
            f"SM clock {self.clock_mhz} of {self.max_clock_mhz} MHz"
        )


def check_unthrottled(state: GpuState, where: str) -> None:
    """Raise `DeviceError` with the reading if something slows the GPU down below its design."""
    found = state.throttle()
    if found:
        raise DeviceError(f"{where} is throttled: {found}. Cool it or repair its power supply, then run again.")


def check_alone(state: GpuState, where: str) -> None:
    """Raise `DeviceError` with the reading if others use the GPU. Call it before this process uses the GPU."""
    found = []
    if state.num_processes:
        found.append(f"{state.num_processes} processes compute on it")
    if state.busy_percent > MOST_BUSY_PERCENT:
        found.append(f"it was busy for {state.busy_percent} % of the last sampling period (limit {MOST_BUSY_PERCENT} %)")
    if state.used_bytes > MOST_USED_BYTES:
        found.append(f"{format_bytes(state.used_bytes)} of its memory are in use (limit {format_bytes(MOST_USED_BYTES)})")
    if found:
        raise DeviceError(f"{where} is shared: {'; '.join(found)}. End the other work, or choose an idle GPU.")


class Nvml:
    """NVML, opened for the GPU at an address on the PCI bus, as in "0000:18:00.0".

    `library` is NVML, by default as `ctypes` loads it. Raises `OSError` if it is missing, and `DeviceError` if it fails.
    """

    def __init__(self, pci_bus_id: str, library: Any = None) -> None:
        self._library = ctypes.CDLL(LIBRARY) if library is None else library
        self._device = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByPciBusId_v2", pci_bus_id.encode(), ctypes.byref(self._device))

    def read(self) -> GpuState:
        """Return the GPU's current state. Raises `DeviceError` if the driver does not answer."""
        used = (ctypes.c_ulonglong * 3)()  # total, free, used
        busy = (ctypes.c_uint * 2)()  # of SMs, of memory
        self._call("nvmlDeviceGetMemoryInfo", self._device, used)
        self._call("nvmlDeviceGetUtilizationRates", self._device, busy)
        reasons = ctypes.c_ulonglong()
        # drivers before R535 also have the function of this name
        self._call("nvmlDeviceGetCurrentClocksThrottleReasons", self._device, ctypes.byref(reasons))
        return GpuState(
            clock_mhz=self._number("nvmlDeviceGetClockInfo", SM_CLOCK),
            max_clock_mhz=self._number("nvmlDeviceGetMaxClockInfo", SM_CLOCK),
            power_w=self._number("nvmlDeviceGetPowerUsage") / 1000,
            power_limit_w=self._number("nvmlDeviceGetEnforcedPowerLimit") / 1000,
            temperature_c=self._number("nvmlDeviceGetTemperature", 0),
            reasons=int(reasons.value),
            busy_percent=int(busy[0]),
            used_bytes=int(used[2]),
            num_processes=self._num_processes(),
        )

    def joules(self) -> float:
        """Return the GPU's energy in joules since the driver was loaded. Raises `DeviceError` if it has no such counter."""
        millijoules = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._device, ctypes.byref(millijoules))
        return millijoules.value / 1000.0

    def _num_processes(self) -> int:
        """Return the number of compute processes. Without a buffer the driver only counts, and says that it needs one."""
        count = ctypes.c_uint(0)
        name = "nvmlDeviceGetComputeRunningProcesses_v3"
        _check(name, getattr(self._library, name)(self._device, ctypes.byref(count), None), (0, INSUFFICIENT_SIZE))
        return int(count.value)

    def _number(self, name: str, *values: int) -> int:
        found = ctypes.c_uint()
        self._call(name, self._device, *values, ctypes.byref(found))
        return int(found.value)

    def _call(self, name: str, *values: Any) -> None:
        _check(name, getattr(self._library, name)(*values))


def _check(name: str, status: int, expected: Sequence[int] = (0,)) -> None:
    if status not in expected:
        reason = ERRORS.get(status, "see nvmlReturn_t in NVIDIA's documentation")
        raise DeviceError(f"{name} of NVML failed with error {status} ({reason}). Check nvidia-smi.")
