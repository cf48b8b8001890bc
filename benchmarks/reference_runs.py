"""The runs measured on H200s in tests/data, described as steps, and what the simulator makes of them.

Each function returns one `Comparison` per measured figure. Nothing here is fitted: the descriptions hold what the header
of each file says, and the simulator's constants come from its calibration file.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.toy_steps import NCCL

from benchmarks.conditions import ROOT
from counterpoint.controls import Control, HeadStart, Priority, ResidencyCap
from counterpoint.machine import load_machine
from counterpoint.metrics import measure
from counterpoint.plan import Directive, Match, Plan
from counterpoint.sim import Simulator
from counterpoint.step import Collective, Dependency, Footprint, Kernel, Step
from counterpoint.timeline import Timeline

DATA = ROOT / "tests" / "data"
MIB = 1 << 20


CUBLAS_KERNEL = "nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT"  # what torch 2.11 runs for bf16 matmuls of 8192^3


@dataclass(frozen=True)
class Comparison:
    """One figure in microseconds, measured and simulated."""

    run: str
    figure: str
    measured_us: float
    simulated_us: float

    @property
    def error(self) -> float:
        return self.simulated_us / self.measured_us - 1


def _rows(name: str) -> list[dict[str, str]]:
    """Rows of a reference file; a kernel's name may hold commas, the figures after it never do."""
    lines = [line for line in (DATA / name).read_text().splitlines() if not line.startswith("#")]
    header = next(csv.reader(lines[:1]))
    return [dict(zip(header, line.rsplit(",", len(header) - 1), strict=True)) for line in lines[1:]]


def _simulate(step: Step, controls: dict[int, Control]) -> Timeline:
    directives = tuple(
        Directive(match=Match(operations=(index,)), controls=(control,), reason="reference run")
        for index, control in controls.items()
    )
    return Simulator().run(step, load_machine("h200"), Plan(directives=directives))


def _ends(timeline: Timeline) -> dict[int, float]:
    return {interval.operation: interval.end_us for interval in timeline.intervals}


def coresidency_runs() -> list[Comparison]:
    """When a kernel of long CTAs and an all-reduce of 64 MiB beside it end: 20 runs."""
    found = []
    for row in _rows("coresidency_h200.csv"):
        ctas_per_sm = int(row["ctas_per_sm"])
        kernel = Kernel(
            name="spin",
            stream=1,
            footprint=Footprint(
                num_ctas=132 * ctas_per_sm * 4,
                threads_per_cta=256,
                registers_per_thread=10,
                dynamic_shared_bytes=int(row["dynamic_shared_bytes"]),
                carveout_percent=-1 if row["carveout_percent"] == "default" else int(row["carveout_percent"]),
            ),
            cta_us=1000.0,
            cta_time_spread=1.0,
        )
        one_thread = Footprint(num_ctas=1, threads_per_cta=1, registers_per_thread=10)
        short = Kernel(name="one thread", stream=2, footprint=one_thread, cta_us=80.0, issued_us=30.0)
        collective = Collective(
            name="all-reduce",
            stream=2,
            collective="all_reduce",
            num_bytes=64 * MIB,
            group_size=2,
            footprint=NCCL,
            lone_us=272.0,
        )
        step = Step(name="co-residency", num_ranks=2, operations=(kernel, short, collective))
        priority = Priority(priority=-5 if row["stream_priority"] == "greatest" else 0)
        ends = _ends(_simulate(step, {1: priority, 2: priority}))
        run = f"carveout {row['carveout_percent']}, {ctas_per_sm} CTAs per SM, {row['stream_priority']} priority"
        found.append(Comparison(run, "kernel ends", float(row["compute_done_ms"]) * 1000, ends[0]))
        found.append(Comparison(run, "collective ends", float(row["collective_done_ms"]) * 1000, ends[2]))
    return found


def residency_speed_runs() -> list[Comparison]:
    """Time of a kernel alone when its residency is capped, from its time uncapped."""
    characters = {"fma": "other", "triton": "matmul", "elementwise": "streaming"}
    uncapped: dict[str, dict[str, str]] = {}
    found = []
    for row in _rows("residency_speed_h200.csv"):
        name = row["kernel"]
        first = uncapped.setdefault(name, row)
        if row is first:
            continue
        footprint = Footprint(
            num_ctas=int(first["num_ctas"]),
            threads_per_cta=int(first["threads_per_cta"]),
            registers_per_thread=int(first["registers_per_thread"]),
            static_shared_bytes=int(first["static_shared_bytes"]),
            dynamic_shared_bytes=int(first["dynamic_shared_bytes"]),
        )
        kernel = Kernel(
            name=name,
            stream=1,
            footprint=footprint,
            character=characters[name.split("_")[0]],
            lone_us=float(first["time_ms"]) * 1000,
        )
        cap = ResidencyCap(ctas_per_sm=int(row["ctas_per_sm"]), dynamic_shared_bytes=int(row["dynamic_shared_bytes"]))
        timeline = _simulate(Step(name=name, num_ranks=1, operations=(kernel,)), {0: cap})
        run = f"{name}, {row['ctas_per_sm']} CTAs per SM"
        found.append(Comparison(run, "time", float(row["time_ms"]) * 1000, _ends(timeline)[0]))
    return found


def head_start_runs() -> list[tuple[Comparison, Comparison]]:
    """One iteration by default and with a head start of 5 us, from the time of its kernels alone."""
    found = []
    for row in _rows("head_start_h200.csv"):
        name = row["kernel"].split(" (")[0]
        step, racer = _head_start_step(name, float(row["none"]) * 1000)
        default, ahead = (
            measure(_simulate(step, controls)).makespan_us for controls in ({}, {racer: HeadStart(hold_us=5.0)})
        )
        found.append(
            (
                Comparison(name, "default", float(row["default"]) * 1000, default),
                Comparison(name, "head start 5 us", float(row["head_start_5us"]) * 1000, ahead),
            )
        )
    return found


def _head_start_step(name: str, kernels_us: float) -> tuple[Step, int]:
    """Kernels, an all-reduce of 256 MiB of their result, the same kernels again; and the number of the racing one."""
    count = {"two attentions": 2, "four elementwise kernels of 512 MiB": 4}.get(name, 1)
    if "elementwise" in name:
        footprint = Footprint(num_ctas=262144, threads_per_cta=128, registers_per_thread=32)
        character, shares = "streaming", False
    else:
        footprint = Footprint(
            num_ctas=132,
            threads_per_cta=384,
            registers_per_thread=168,
            dynamic_shared_bytes=232448 if "attention" in name else 213188,
            ctas_per_cluster=1 if "attention" in name else 2,
        )
        character, shares = "attention" if "attention" in name else "matmul", True
    is_matmul = name.startswith("matmul")
    kernel = Kernel(
        name=CUBLAS_KERNEL if is_matmul else name,
        stream=7,
        footprint=footprint,
        character=character,
        lone_us=kernels_us / (2 * count) - 1.6,
        is_work_sharing=shares,
        matmul_sizes=_sizes(name.split()[1]) if is_matmul else None,
    )
    collective = Collective(
        name="all-reduce",
        stream=19,
        collective="all_reduce",
        num_bytes=256 * MIB,
        group_size=2,
        waits_for=(Dependency(operation=count - 1),),
    )
    operations = (*[kernel] * count, collective, *[kernel] * count)
    return Step(name=name, num_ranks=2, operations=operations), count + 1


def _sizes(text: str) -> tuple[int, int, int]:
    """Rows, inner size and columns of `MxNxK`."""
    rows, columns, inner = (int(size) for size in text.split("x"))
    return rows, inner, columns


def shipped_traces() -> list[Path]:
    """The profiler traces that come with the project."""
    return sorted((ROOT / "examples" / "traces").glob("*.json.gz"))
