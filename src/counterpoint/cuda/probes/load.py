"""Clock and power under load: what a GPU keeps up when one kind of kernel runs for a second."""

import time

import torch

from counterpoint.cuda.probes.gpu_state import GpuState, Nvml
from counterpoint.cuda.probes.matmuls import TYPES, matmul
from counterpoint.cuda.probes.session import Issue, Session
from counterpoint.errors import DeviceError
from counterpoint.measurement.points import Point, point
from counterpoint.units import MIB

SIZE = 8192
LOAD_S = 0.4
SAMPLE_S = 0.05
SETTLING = 0.5  # the first part of the load is left out


def probe_load(session: Session, nvml: Nvml | None) -> list[Point]:
    """Clock and power of streaming and of matmuls of every type, of zeros too; time of each cool and warm."""
    if nvml is None:
        raise DeviceError("NVML is needed for it, and the driver's library libnvidia-ml.so.1 was not found")
    source = torch.ones(512 * MIB // 4, device="cuda")
    target = torch.empty_like(source)
    zeros = torch.zeros(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    points = _loaded(session, nvml, "streaming", lambda: torch.mul(source, 2.0, out=target))
    points += _loaded(session, nvml, "matmul of zeros", lambda: torch.mm(zeros, zeros))
    for kind in TYPES:
        issue = matmul(kind, SIZE, SIZE, SIZE)
        if issue is not None:
            points += _loaded(session, nvml, f"matmul {kind}", issue)
    return points


def _loaded(session: Session, nvml: Nvml, name: str, issue: Issue) -> list[Point]:
    time.sleep(0.1)
    cool = session.times_us(issue, rounds=2)
    states: list[GpuState] = []
    times: list[float] = []
    start = time.monotonic()
    while time.monotonic() - start < LOAD_S:
        begin = session.mark()
        deadline = time.monotonic() + SAMPLE_S
        calls = 0
        while time.monotonic() < deadline:
            issue()
            calls += 1
            if calls % 4 == 0:
                session.wait()
        end = session.mark()
        states.append(nvml.read())  # while the last calls still run
        session.wait(end)
        times.append(1000 * begin.elapsed_time(end) / calls)
    kept = round(len(states) * SETTLING)
    figures = {
        "loaded_clock_mhz": [float(each.clock_mhz) for each in states[kept:]],
        "loaded_power_w": [each.power_w for each in states[kept:]],
        "power_capped_share": [sum(each.is_power_capped for each in states[kept:]) / len(states[kept:])],
        "cool_us": cool,
        "warm_us": times[kept:],
    }
    return [point(figure, values, load=name) for figure, values in figures.items()]
