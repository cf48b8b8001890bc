"""Fits the clock under the power limit to kernels that run on and on, and to a matmul with pauses (`probe_load`).

The unit is the clock of a burst: at a share c of it an operation draws c to the power of `exponent` times its watts above an
idle GPU (`power.py`). What the library's matmul draws in a burst follows from running for part of the time, which the limit
leaves alone. The exponent follows from how much longer it takes without pauses. Tiled matmuls reach clocks of their own at
the limit; these are read.
"""

import math
import statistics
from typing import NamedTuple

from counterpoint.sim.calibration import PowerFigure
from counterpoint.sim.calibration_fit import Fitted, Points

LIBRARY, PAUSES = "matmul bf16", "pauses"
BUSY_SHARES = (0.25, 0.5)  # of the time that the library's matmul runs; the limit does not act on these
MOST_CAPPED_SHARE = 0.5  # of the readings under load, in which the power limit had lowered the clock
LEAST_SLOWDOWN = 1.01  # of the library's matmul; less cannot be told from noise
BURST_CLOCK = 1775 / 1980  # of the library's matmuls and of large tiles, relative to an idle GPU; read on an H200
LOADS: dict[PowerFigure, str] = {
    "fp32_matmul_w": "matmul fp32",
    "attention_w": "attention",
    "flash_attention_w": "flash attention",
    "row_wise_w": "softmax",
    "streaming_w": "streaming, random values",
    "other_w": "sort",
}
# names of the figures of tiled matmuls, the loads that tell them, and the clock of a burst of these
TILES: tuple[tuple[PowerFigure, PowerFigure | None, tuple[str, ...], float], ...] = (
    ("matmul_w", None, ("matmul 64x64x32", "matmul 64x64x32, 4 stages"), 1.0),
    (
        "large_matmul_w",
        "large_matmul_clock_exponent",
        ("matmul 128x128x32, 4 stages", "matmul 128x128x64, 3 stages"),
        BURST_CLOCK,
    ),
)


class Load(NamedTuple):
    """A kernel that runs on and on: the GPU's watts and MHz, how much longer than on a cool GPU a call takes, and whether
    the power limit acts."""

    watts: float
    clock_mhz: float
    slowdown: float
    is_capped: bool


class Limited(NamedTuple):
    """The library's matmul under the limit: watts above an idle GPU in a burst and under the limit; the exponent between
    these and the clock; and the share of a burst's clock for a ratio of clocks in MHz, as an exponent."""

    burst_w: float
    left_w: float
    exponent: float
    per_mhz: float


def fit_power(points: Points, limit_w: float) -> dict[PowerFigure, Fitted]:
    """Return figures of `Calibration.power` for a GPU with this limit; none if the limit does not slow down the library's
    matmul, or a point is missing.
    """
    idle, limited = _load(points, PAUSES), _limited(points, limit_w)
    if idle is None or limited is None:
        return {}
    left = f"the limit leaves {limited.left_w:.0f} W above an idle GPU"
    found: dict[PowerFigure, Fitted] = {
        "limit_w": _fitted([limit_w], "the GPU's power limit"),
        "idle_w": _fitted([idle.watts], "one CTA of one warp that waits, by the energy counter"),
        "library_matmul_w": _fitted([limited.burst_w], "cuBLAS bf16 that runs for 25 and 50 % of the time"),
        "exponent": _fitted([limited.exponent], f"cuBLAS bf16 under load and in a burst; {left}"),
    }
    for figure, name in LOADS.items():
        load = _load(points, name)
        if load is not None and load.is_capped:
            watts = limited.left_w * max(1.0, load.slowdown) ** limited.exponent
            found[figure] = _fitted([watts], f"{name}, {load.slowdown:.3f} times as long; {left}")
        elif load is not None:
            found[figure] = _fitted([load.watts - idle.watts], f"{name}, which the limit does not slow down")
    for watts_figure, clock_figure, names, burst_clock in TILES:
        loads = {name: load for name in names if (load := _load(points, name)) is not None}
        if loads:
            shares = [
                (load, min(0.999, (load.clock_mhz / idle.clock_mhz / burst_clock) ** limited.per_mhz))
                for load in loads.values()
            ]
            told = " and ".join(f"{name} at {load.clock_mhz:,.0f} MHz" for name, load in loads.items())
            found[watts_figure] = _fitted([(load.watts - idle.watts) / c**limited.exponent for load, c in shares], told)
            if clock_figure is not None:
                exponents = [max(0.0, -math.log(load.slowdown) / math.log(c)) for load, c in shares]
                found[clock_figure] = _fitted(exponents, told)
    return found


def _limited(points: Points, limit_w: float) -> Limited | None:
    idle, library = _load(points, PAUSES), _load(points, LIBRARY)
    paused = [_load(points, f"{LIBRARY}, {share:.0%} of the time") for share in BUSY_SHARES]
    if idle is None or library is None or library.slowdown < LEAST_SLOWDOWN or None in paused:
        return None
    burst_w = statistics.mean(
        (load.watts - idle.watts) / share for load, share in zip(paused, BUSY_SHARES, strict=True) if load is not None
    )
    left_w, fallen = limit_w - idle.watts, BURST_CLOCK * idle.clock_mhz / library.clock_mhz
    if not 0 < left_w < burst_w or fallen <= 1:
        return None
    slower = math.log(library.slowdown)
    return Limited(burst_w, left_w, math.log(burst_w / left_w) / slower, slower / math.log(fallen))


def _load(points: Points, name: str) -> Load | None:
    found = [points.one(figure, load=name) for figure in ("loaded_power_w", "loaded_clock_mhz", "warm_us", "cool_us")]
    watts, clock_mhz, warm_us, cool_us = (0.0 if each is None else each.value for each in found)
    capped = points.one("power_capped_share", load=name)
    is_capped = capped is not None and capped.value > MOST_CAPPED_SHARE
    return None if None in found else Load(watts, clock_mhz, warm_us / cool_us, is_capped)


def _fitted(values: list[float], source: str) -> Fitted:
    middle = statistics.mean(values)
    spread = (max(values) - min(values)) / 2 / middle if middle else 0.0
    return Fitted(value=middle, spread=spread, source=source)
