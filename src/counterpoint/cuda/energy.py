"""Measures energy with the GPU's own counter: NVML's total energy since the driver was loaded, in millijoules.

The counter advances only every 20 to 100 ms, so a single step cannot be measured: a step is replayed for `LEAST_S` or
longer, and the mean power between two advances is multiplied by the time of one replay. NVML comes with the driver; it is
called through `ctypes`, and no package is needed. Volta and later have the counter.
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

from counterpoint.errors import DeviceError

LIBRARY = "libnvidia-ml.so.1"
LEAST_S = 1.0
# Clocks and power settle during this share of the replays; advances of the counter during it do not count.
SETTLING_SHARE = 0.2
Reading = tuple[float, float]


class EnergyCounter:
    """The energy counter of one GPU, which is given by its address on the PCI bus, as in "0000:18:00.0".

    `library` is NVML, by default as `ctypes` loads it. Raises `DeviceError` if the GPU has no counter.
    """

    def __init__(self, pci_bus_id: str, library: Any = None) -> None:
        self._nvml = _load() if library is None else library
        self._device = ctypes.c_void_p()
        _check("starting NVML", self._nvml.nvmlInit_v2())
        found = self._nvml.nvmlDeviceGetHandleByPciBusId_v2(pci_bus_id.encode(), ctypes.byref(self._device))
        _check(f"finding GPU {pci_bus_id}", found)
        self.joules()

    def joules(self) -> float:
        """Return the energy in joules since the driver was loaded."""
        millijoules = ctypes.c_ulonglong()
        counted = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(millijoules))
        _check("reading the energy counter", counted)
        return millijoules.value / 1000.0


def _load() -> Any:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as problem:
        raise DeviceError(
            f"NVML ({LIBRARY}) cannot be loaded, so energy cannot be measured. It comes with the driver; leave --energy out."
        ) from problem


def _check(what: str, code: int) -> None:
    if code:
        known = {3: "not supported by this GPU", 4: "no permission", 6: "GPU not found", 9: "driver not loaded"}
        reason = known.get(code, "see nvmlReturn_t in NVIDIA's documentation")
        raise DeviceError(f"NVML failed at {what} with error {code} ({reason}). Leave --energy out.")


def watch(counter: EnergyCounter, is_over: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> list[Reading]:
    """Return a first reading and each change of the counter until `is_over`: seconds of the clock, and joules."""
    readings = [(clock(), counter.joules())]
    while not is_over():
        joules = counter.joules()
        if joules != readings[-1][1]:
            readings.append((clock(), joules))
    return readings


def mean_watts(readings: Sequence[Reading]) -> float | None:
    """Return the mean power (watts) between the first and the last settled change; None if there are fewer than two.

    The first reading is not a change: the time at which the counter reached its value is not known.
    """
    settled_s = readings[0][0] + SETTLING_SHARE * (readings[-1][0] - readings[0][0])
    jumps = [reading for reading in readings[1:] if reading[0] >= settled_s]
    if len(jumps) < 2:
        return None
    (first_s, first), (last_s, last) = jumps[0], jumps[-1]
    return (last - first) / (last_s - first_s)
