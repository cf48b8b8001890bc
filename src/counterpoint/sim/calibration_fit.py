"""Derives the simulator's constants from the probes' points, by inverting the simulator's own formulas.

Each function takes the points and returns one constant, or None if its points are missing: the constant of a failed probe
stays unchanged. This module knows only the machine file's figures of a GPU.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from counterpoint.machine import ElementType, Machine
from counterpoint.measurement.points import Point
from counterpoint.sim.block_kernels import SUM_BYTES, SUM_CTAS_PER_SM
from counterpoint.sim.matmul_rates import LARGE_SIZE
from counterpoint.units import US_PER_S
from counterpoint.value import Value
from counterpoint.workloads.gemm import matmul_flops

FLOPS_PER_ITERATION = 2 * 64  # operations of one thread of the probes' arithmetic kernel
ATTENTION_FLOPS = 4.0 * 2 * 16 * 8192**2 * 128  # of the probes' attention
STEPS = (1.3, 1.1, 1.03, 1.01, 1.003)


class Fitted(Value, frozen=True, kw_only=True):
    """A constant's value, its relative spread or the residual of its fit, and a description of its source."""

    value: float
    spread: float
    source: str


class Points:
    """Points by name and conditions."""

    def __init__(self, points: Iterable[Point]) -> None:
        self._points = [each for each in points if each.value > 0]

    def all(self, name: str, **at: float | str) -> list[Point]:
        """Return the points of a name that were measured under these conditions."""
        return [each for each in self._points if each.name == name and at.items() <= each.at.items()]

    def one(self, name: str, **at: float | str) -> Point | None:
        """Return the latest point that `all` returns, or None."""
        found = self.all(name, **at)
        return found[-1] if found else None

    def of_fewest_ranks(self, name: str, **at: float | str) -> list[Point]:
        """Return what `all` returns, of the fewest ranks that measured it."""
        found = self.all(name, **at)
        least = min((num_ranks(each) for each in found), default=0)
        return [each for each in found if num_ranks(each) == least]


def num_ranks(each: Point) -> int:
    """Return the number of ranks that took part in a point's probe; 0 where it measured one GPU alone."""
    return int(each.at.get("ranks", 0))


def fit_scalars(points: Points, machine: Machine) -> dict[str, Fitted]:
    """Return every constant that is a single number, by its name; without points, a constant is left out."""
    copies = _copy_fraction(points, machine)
    found = {
        "launch_gap_us": _as_measured(points, "launch_gap_us", issued="eagerly"),
        "dependency_latency_us": _as_measured(points, "dependency_latency_us", issued="eagerly"),
        "hbm_efficiency": _hbm_efficiency(points, machine),
        "matmul_peak_fraction": _matmul_fraction(points, machine, "bf16"),
        "attention_peak_fraction": _attention_fraction(points, machine),
        "fp32_peak_fraction": _fp32_fraction(points, machine),
        "host_link_bytes_per_s": _host_link(points),
        "block_sum_us": _block_sum(points, machine),
        "copy_engine_fraction": copies,
        "recorded_copy_fraction": copies,
        "copy_latency_us": _copy_latency(points),
    }
    return {name: fitted for name, fitted in found.items() if fitted is not None}


def fit_matmul_fractions(points: Points, machine: Machine) -> dict[ElementType, Fitted]:
    """Return the share of its peak that each type's largest matmul reaches, for types with a rate in the machine."""
    found = {kind: _matmul_fraction(points, machine, kind) for kind in machine.gpu.matmul_rates()}
    return {kind: fitted for kind, fitted in found.items() if fitted is not None}


def _as_measured(points: Points, name: str, **at: float | str) -> Fitted | None:
    found = points.one(name, **at)
    return None if found is None else Fitted(value=found.value, spread=found.spread, source=_words(found))


def _words(found: Point) -> str:
    """Describe a point: its name and conditions."""
    conditions = ", ".join(
        f"{key} {value:,}" if isinstance(value, int) else f"{key} {value}" for key, value in found.at.items()
    )
    return f"{found.name}, {conditions}" if conditions else found.name


def _hbm_efficiency(points: Points, machine: Machine) -> Fitted | None:
    found = points.one("streaming_us", type="bf16") or points.one("streaming_us")
    if found is None:
        return None
    rate = float(found.at["bytes"]) * US_PER_S / found.value
    done = f"512 MiB read and 512 MiB written in {found.value:.1f} us: {rate / 1e12:.3f} TB/s"
    source = f"elementwise kernel of {found.at['type']}, {done}"
    return Fitted(value=rate / machine.gpu.hbm_bytes_per_s, spread=found.spread, source=source)


def _matmul_fraction(points: Points, machine: Machine, kind: ElementType) -> Fitted | None:
    """Return the share of the type's peak that its largest matmul reaches on a cool GPU. For fp32 it is the ordinary units'
    share, unless the GPU has matrix units for fp32.
    """
    cool = points.one("matmul_us", type=kind, m=LARGE_SIZE, n=LARGE_SIZE, k=LARGE_SIZE)
    peak = machine.gpu.matmul_rates().get(kind)
    if cool is None or peak is None:
        return None
    reached = matmul_flops(LARGE_SIZE, LARGE_SIZE, LARGE_SIZE) * US_PER_S / cool.value / peak
    source = f"cuBLAS {kind} {LARGE_SIZE}^3 on a cool GPU in {cool.value:,.0f} us, of {peak / 1e12:.0f} TFLOP/s"
    return Fitted(value=reached, spread=cool.spread, source=source)


def _attention_fraction(points: Points, machine: Machine) -> Fitted | None:
    """Return the share of the bf16 peak that attention of long sequences reaches on a cool GPU."""
    cool = points.one("cool_us", load="attention")
    if cool is None:
        return None
    reached = ATTENTION_FLOPS * US_PER_S / cool.value / machine.gpu.bf16_flops_per_s
    source = f"cuDNN attention in bf16, 2 x 16 heads, 8,192 tokens of 128, on a cool GPU in {cool.value:,.0f} us"
    return Fitted(value=reached, spread=cool.spread, source=source)


def _fp32_fraction(points: Points, machine: Machine) -> Fitted | None:
    measured = points.all("arithmetic_capped_us", chains=8)
    if not measured:
        return None
    found = min(measured, key=lambda each: each.value)
    number = float(found.at["ctas"]) * float(found.at["threads"]) * float(found.at["iterations"])
    share = number * FLOPS_PER_ITERATION * US_PER_S / found.value / machine.gpu.fp32_flops_per_s
    return Fitted(value=share, spread=found.spread, source=f"fused multiply-adds in 8 chains: {_words(found)}")


def _host_link(points: Points) -> Fitted | None:
    times = points.all("host_copy_us", bytes=max((each.at["bytes"] for each in points.all("host_copy_us")), default=0))
    if not times:
        return None
    rates = [float(each.at["bytes"]) * US_PER_S / each.value for each in times]
    return Fitted(value=min(rates), spread=max(each.spread for each in times), source="pinned copies, the slower direction")


def _block_sum(points: Points, machine: Machine) -> Fitted | None:
    """Return the time in which a CTA of the kernel that adds blocks reads a part of one block, or writes that of the sum."""
    times = points.all("block_sum_us")
    if not times:
        return None
    num_ctas = SUM_CTAS_PER_SM * machine.gpu.num_sms
    parts = [float(each.at["bytes"]) / SUM_BYTES / num_ctas * (float(each.at["blocks"]) + 1) for each in times]
    each_us = [time.value / number for time, number in zip(times, parts, strict=True)]
    spread = (max(each_us) - min(each_us)) / 2 / statistics.fmean(each_us)
    source = (
        "the kernel that adds 2, 4 and 8 bf16 blocks of 32 MiB, none in L2: 8 KiB of a block by one of two CTAs on an SM"
    )
    return Fitted(value=statistics.fmean(each_us), spread=spread, source=source)


def _copy_fraction(points: Points, machine: Machine) -> Fitted | None:
    rate = _copy_rate(points)
    if rate is None:
        return None
    source = f"copies between two GPUs, what grows with bytes: {rate / 1e9:.0f} GB/s"
    spread = points.of_fewest_ranks("copy_us")[-1].spread
    return Fitted(value=rate / machine.link.per_peer_bytes_per_s, spread=spread, source=source)


def _copy_rate(points: Points) -> float | None:
    """Return the bytes per second of one copy between GPUs, from its two largest sizes; None if both take as long."""
    times = sorted(points.of_fewest_ranks("copy_us", peers=1, pieces=1), key=lambda each: each.at["bytes"])[-2:]
    if len(times) < 2:
        return None
    small, large = times
    if large.at["bytes"] == small.at["bytes"] or large.value <= small.value:
        return None
    return (float(large.at["bytes"]) - float(small.at["bytes"])) * US_PER_S / (large.value - small.value)


def _copy_latency(points: Points) -> Fitted | None:
    """Return the time of the smallest copy beyond that of its bytes."""
    times, rate = points.of_fewest_ranks("copy_us", peers=1, pieces=1), _copy_rate(points)
    if rate is None:
        return None
    least = min(times, key=lambda each: each.at["bytes"])
    latency_us = least.value - float(least.at["bytes"]) * US_PER_S / rate
    return (
        Fitted(value=latency_us, spread=least.spread, source=f"{_words(least)}, less its bytes") if latency_us > 0 else None
    )


def minimize(error: Callable[[Sequence[float]], float], start: Sequence[float]) -> tuple[list[float], float]:
    """Return the positive figures with the least error near `start`, searched one at a time in ever finer steps."""
    best, least = list(start), error(start)
    for step in STEPS:
        is_better = True
        while is_better:
            is_better = False
            for place in range(len(best)):
                for factor in (step, 1 / step):
                    tried = [*best[:place], best[place] * factor, *best[place + 1 :]]
                    found = error(tried)
                    if found < least * (1 - 1e-9):
                        best, least, is_better = tried, found, True
    return best, least


def log_error(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the root mean square of the relative errors of (found, wanted)."""
    return math.sqrt(statistics.fmean(math.log(found / wanted) ** 2 for found, wanted in pairs))
