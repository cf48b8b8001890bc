"""Measures clock and power under load: what a GPU sustains while one kind of work runs continuously.

The power limit acts on the mean of some tens of milliseconds, so a short burst runs at a higher clock than a job does. Power
comes from NVML's energy counter, because NVML's power reading is a mean of the last second and lags behind the load.
"""

import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch.nn.attention import SDPBackend

from counterpoint.cuda.energy import Reading, mean_watts
from counterpoint.cuda.nvml import GpuState, Nvml
from counterpoint.cuda.probes.matmuls import TILES, TYPES, attention, matmul, tiled
from counterpoint.cuda.probes.session import Issue, Session
from counterpoint.errors import DeviceError
from counterpoint.measurement.points import Point, point
from counterpoint.units import MIB

SIZE = 8192
ROWS = (16, 128, 512)  # of matmuls that wait for memory, wholly or in part
LOAD_S = 0.7
COOLING_S = 0.1
BATCH_US = 10_000.0  # between two readings
SETTLING = 0.5  # the first part of the load is left out
BUSY_SHARES = (0.25, 0.5, 0.75)  # of the time that a matmul runs, with pauses of its length between


def probe_load(session: Session, nvml: Nvml | None) -> list[Point]:
    """Measure clock, power, and times cool and warm of kernels of every kind, issued one after another without a pause."""
    known = _needed(nvml)
    # equal values would draw less: few bits change on the way
    source = torch.randn(512 * MIB // 2, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    zeros = torch.zeros(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(12288, 12288, device="cuda", dtype=torch.bfloat16)
    normal = torch.empty_like(rows)
    loads: dict[str, Issue | None] = {
        "pauses": lambda: session.hold(1000.0),
        "streaming, random values": lambda: torch.mul(source, 2.0, out=target),
        "softmax": lambda: torch.softmax(rows, 1, out=normal),
        "sort": lambda: torch.sort(rows[:2048], dim=1),
        "attention": attention(SDPBackend.CUDNN_ATTENTION, 2 * 16, SIZE, 128),
        "flash attention": attention(SDPBackend.FLASH_ATTENTION, 2 * 16, SIZE, 128),
        "matmul of zeros": lambda: torch.mm(zeros, zeros),
    }
    loads |= {f"matmul {kind}": matmul(kind, SIZE, SIZE, SIZE) for kind in TYPES}
    loads |= {f"matmul bf16, {m} rows": matmul("bf16", m, 2 * SIZE, SIZE) for m in ROWS}
    loads |= {f"matmul {tile}": tiled(tile) for tile in TILES}
    points: list[Point] = []
    for name, issue in loads.items():
        if issue is not None:
            points += _loaded(session, known, name, issue)
    multiply = matmul("bf16", SIZE, SIZE, SIZE)
    assert multiply is not None, "every GPU that is calibrated has bf16"
    for share in BUSY_SHARES:
        points += _loaded(session, known, f"matmul bf16, {share:.0%} of the time", _with_pauses(session, multiply, share))
    return points


def _needed(nvml: Nvml | None) -> Nvml:
    if nvml is None:
        raise DeviceError("NVML is needed for it, and the driver's library libnvidia-ml.so.1 was not found")
    return nvml


def _with_pauses(session: Session, issue: Issue, share: float) -> Issue:
    pause_us = max(session.times_us(issue, rounds=2)) * (1 / share - 1)

    def run() -> None:
        issue()
        session.hold(pause_us)

    return run


def _loaded(session: Session, nvml: Nvml, name: str, issue: Issue) -> list[Point]:
    """Run one load for `LOAD_S`; the figures are of this rank's GPU."""
    session.wait()
    time.sleep(COOLING_S)
    cool = session.times_us(issue, rounds=2)
    states: list[GpuState] = []
    readings: list[Reading] = []

    def look() -> None:
        states.append(nvml.read())
        readings.append((time.monotonic(), nvml.joules()))

    times = _run_on(session, issue, max(cool), look)
    kept = round(len(states) * SETTLING)
    late = states[kept:]
    jumps = [
        reading for before, reading in zip([*readings[:1], *readings], readings, strict=False) if reading[1] != before[1]
    ]
    watts = mean_watts([readings[0], *jumps])
    figures = {
        "loaded_clock_mhz": [float(each.clock_mhz) for each in late],
        "loaded_power_w": [] if watts is None else [watts],
        "power_capped_share": [sum(each.is_power_capped for each in late) / len(late)],
        "cool_us": cool,
        "warm_us": times[kept:],
    }
    return [point(figure, values, load=name) for figure, values in figures.items() if values]


def _run_on(session: Session, issue: Issue, call_us: float, look: Callable[[], None]) -> list[float]:
    """Return the time per call of each batch; the host stays one batch ahead, and calls `look` while the next one runs."""
    calls = max(1, round(BATCH_US / call_us))
    batches = max(4, round(LOAD_S * 1e6 / (calls * call_us)))
    marks = [session.mark()]
    for number in range(batches):
        for _ in range(calls):
            issue()
        marks.append(session.mark())
        if number:
            session.wait(marks[-2])
            look()
    session.wait(marks[-1])
    return [1000 * start.elapsed_time(end) / calls for start, end in pairwise(marks)]
