"""Runs the probes of a calibration one after the other, on all ranks together.

Each probe has its own limit. If a probe fails on all ranks, or only rank 0 runs it, the failure is reported and the other
probes run. If a probe fails on some ranks, the calibration ends on all of them, because the others' GPUs may wait in a
collective forever. It also ends if a GPU is throttled.
"""

import json
import os
import time
from collections.abc import Callable, Collection, Sequence

import msgspec
import torch
from cuda.bindings import driver as cu

from counterpoint.cuda.driver import check, pci_bus_id
from counterpoint.cuda.nvml import GpuState, Nvml, check_alone, check_unthrottled
from counterpoint.cuda.probes.collectives import probe_collectives
from counterpoint.cuda.probes.contention import probe_contention
from counterpoint.cuda.probes.copies import probe_copies
from counterpoint.cuda.probes.launches import probe_launches
from counterpoint.cuda.probes.load import probe_load
from counterpoint.cuda.probes.matmuls import probe_matmuls, probe_residency
from counterpoint.cuda.probes.memory import probe_host_copies, probe_rows, probe_sharing, probe_streaming, probe_sums
from counterpoint.cuda.probes.placement import probe_head_start, probe_placement
from counterpoint.cuda.probes.session import Session
from counterpoint.cuda.rendezvous import open_exchange
from counterpoint.errors import CounterpointError, DeviceError
from counterpoint.machine import Machine
from counterpoint.measurement.points import Point
from counterpoint.value import Value

STATUS_LIMIT_S = 120.0  # more than twice any probe's own limit
READINGS, READING_S = 3, 0.25


class Probe(msgspec.Struct, frozen=True):
    """A probe, its time limit, and whether all ranks run it; otherwise rank 0 runs it, and the others wait."""

    name: str
    limit_s: float
    run: Callable[[Session], list[Point]]
    is_of_all_ranks: bool = False
    least_ranks: int = 1

    def label(self, num_ranks: int) -> str:
        """Return the name of its results; if it measures between GPUs, the name includes the number of ranks."""
        return self.name if self.least_ranks == 1 else f"{self.name} of {num_ranks} ranks"


class ProbeResult(Value, frozen=True, kw_only=True):
    """What a probe measured on rank 0, or why it failed."""

    probe: str
    seconds: float
    points: tuple[Point, ...] = ()
    failure: str = ""


def probes(nvml: Nvml | None) -> tuple[Probe, ...]:
    """Return all probes in the order in which they run; probes that heat the GPU come last."""
    return (
        Probe("launches", 10.0, probe_launches),
        Probe("placement", 15.0, probe_placement),
        Probe("head start", 10.0, probe_head_start),
        Probe("streaming", 20.0, probe_streaming),
        Probe("rows", 20.0, probe_rows),
        Probe("sharing", 20.0, probe_sharing),
        Probe("sums", 10.0, probe_sums),
        Probe("host copies", 15.0, probe_host_copies),
        Probe("copies", 30.0, probe_copies, least_ranks=2),
        Probe("collectives", 60.0, probe_collectives, is_of_all_ranks=True, least_ranks=2),
        Probe("contention", 30.0, probe_contention, is_of_all_ranks=True, least_ranks=2),
        Probe("residency", 40.0, probe_residency),
        Probe("matmuls", 40.0, probe_matmuls),
        Probe("load", 30.0, lambda session: probe_load(session, nvml)),
    )


def open_nvml() -> Nvml | None:
    """Return NVML for this rank's GPU; None if the driver's library is missing. Starts nothing on the GPU."""
    check("Starting the driver", cu.cuInit(0))
    try:
        return Nvml(pci_bus_id(int(os.environ.get("LOCAL_RANK", "0"))))
    except OSError:
        return None


def check_fit(nvml: Nvml) -> GpuState:
    """Return the least busy of a few readings of an idle GPU. Raises `DeviceError` if it is throttled or others use it."""
    readings = []
    for _ in range(READINGS):
        readings.append(nvml.read())
        time.sleep(READING_S)
    state = min(readings, key=lambda reading: reading.busy_percent)
    check_unthrottled(state, "The GPU")
    check_alone(state, "The GPU")
    return state


def run_probes(
    machine: Machine,
    nvml: Nvml | None,
    is_done: Collection[str],
    on_result: Callable[[ProbeResult], None],
    only: Collection[str],
) -> None:
    """Run the probes that are not done yet, or those named in `only`; on rank 0, `on_result` gets each result at once.

    Rank 0's `is_done` and `only` count. Raises `DeviceError` if a rank is gone or failed alone, or if a GPU is throttled.
    """
    status = open_exchange("calibration", STATUS_LIMIT_S)
    rank, num_ranks = status.rank, status.num_ranks
    left = [probe for probe in probes(nvml) if num_ranks >= probe.least_ranks]
    chosen = [probe for probe in left if (probe.name in only if only else probe.label(num_ranks) not in is_done)]
    wanted = [probe.label(num_ranks) for probe in chosen]
    wanted = json.loads(status.round(json.dumps(wanted).encode(), "the choice of probes")[0])
    session = Session(machine, rank, num_ranks)
    for probe in left:
        if probe.label(num_ranks) not in wanted:
            continue
        result = _run(probe, session)
        problems = _problems(result, nvml, rank)
        texts = status.round(json.dumps(problems).encode(), f"the end of probe '{probe.name}'")
        everyone = [json.loads(text) for text in texts]
        _check_together(probe, everyone, num_ranks)
        if rank == 0:
            on_result(result)


def _run(probe: Probe, session: Session) -> ProbeResult:
    start = time.monotonic()
    session.begin(probe.limit_s)
    points: list[Point] = []
    failure = ""
    try:
        if session.rank == 0 or probe.is_of_all_ranks:
            points = probe.run(session)
    except (CounterpointError, RuntimeError, torch.OutOfMemoryError) as problem:
        failure = " ".join(str(problem).split())[:300] or type(problem).__name__
    torch.cuda.empty_cache()
    label, seconds = probe.label(session.num_ranks), round(time.monotonic() - start, 1)
    return ProbeResult(probe=label, seconds=seconds, points=tuple(points), failure=failure)


def _problems(result: ProbeResult, nvml: Nvml | None, rank: int) -> dict[str, str]:
    """Return why the probe failed on this rank, and what slows its GPU down; empty if nothing."""
    return {"failure": result.failure, "throttle": "" if nvml is None else nvml.read().throttle(), "rank": str(rank)}


def _check_together(probe: Probe, everyone: Sequence[dict[str, str]], num_ranks: int) -> None:
    for each in everyone:
        if each["throttle"]:
            raise DeviceError(
                f"The GPU of rank {each['rank']} was throttled during probe '{probe.name}': {each['throttle']}. "
                "Cool it or repair its power supply, and run again: earlier measurements are kept."
            )
    failed = [each for each in everyone if each["failure"]]
    if probe.is_of_all_ranks and 0 < len(failed) < num_ranks:
        raise DeviceError(
            f"Probe '{probe.name}' failed only on rank {failed[0]['rank']}: {failed[0]['failure']}. Start all "
            "ranks again: earlier measurements are kept."
        )
