"""Measures energy with the GPU's own counter: NVML's total energy since the driver was loaded, in millijoules.

The counter advances only every 20 to 100 ms, so a single step cannot be measured: a step is replayed for `LEAST_S` or
longer, and the mean power between two advances is multiplied by the time of one replay. Volta and later have
the counter.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from counterpoint.cuda.nvml import LIBRARY, Nvml
from counterpoint.errors import DeviceError

LEAST_S = 1.0
# Clocks and power settle during this share of the replays; advances of the counter during it do not count.
SETTLING_SHARE = 0.2
Reading = tuple[float, float]


def open_counter(pci_bus_id: str, library: Any = None) -> Nvml:
    """Open the energy counter of the GPU at an address on the PCI bus, through `library`, by default the driver's NVML.

    Raises `DeviceError` if the library is missing, or the GPU has no counter.
    """
    try:
        counter = Nvml(pci_bus_id, library)
        counter.joules()
    except OSError as problem:
        raise DeviceError(
            f"NVML ({LIBRARY}) cannot be loaded, so energy cannot be measured. It comes with the driver; leave --energy out."
        ) from problem
    except DeviceError as problem:
        raise DeviceError(f"{problem} Leave --energy out.") from problem
    return counter


def watch(counter: Nvml, is_over: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> list[Reading]:
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
