"""Light kernels in the simulator: they fit where NCCL's CTAs do not, take the times that were measured, and say where they
cannot be."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from counterpoint import Simulator, load_machine
from counterpoint.controls import Control, HeadStart, LightKernel, Priority
from counterpoint.errors import PlanError
from counterpoint.plan import LEAVE_IT, Directive, Match, Plan
from counterpoint.step import Collective, CollectiveKind, Footprint, Kernel, Step
from helpers.toy_steps import NCCL

H200 = load_machine("h200")
MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "shaping_map_2x_h200.json"
ALONE = next(run["alone"] for run in json.loads(MEASURED.read_text())["runs"] if "alone" in run)
SUMS = Footprint(num_ctas=4224, threads_per_cta=128, registers_per_thread=32)  # two waves of 16 CTAs on each SM


def plan(*controls: Control, **match: object) -> Plan:
    found = Match(**{"kind": "communication", **match})  # type: ignore[arg-type]
    return Plan(directives=(Directive(match=found, controls=controls, reason="test"),))


def collective(kind: CollectiveKind = "all_gather", num_bytes: int = 8 << 20) -> Collective:
    return Collective(name=kind, stream=1, collective=kind, num_bytes=num_bytes, group_size=2, footprint=NCCL)


def step(*operations: Kernel | Collective, ranks: int = 2) -> Step:
    return Step(name="made up", num_ranks=ranks, operations=operations)


@pytest.mark.parametrize("row", ALONE, ids=lambda row: f"{row['collective']} {row['mib']} MiB")
@pytest.mark.parametrize("num_ctas", [32, 64, 132])
def test_light_kernels_alone_take_the_measured_times_within_a_quarter(row: dict[str, float], num_ctas: int) -> None:
    made_up = step(collective(row["collective"], row["mib"] << 20))  # type: ignore[arg-type, operator]
    timeline = Simulator().run(made_up, H200, plan(LightKernel(num_ctas=num_ctas)))
    assert timeline.intervals[0].end_us == pytest.approx(row[f"light {num_ctas}"], rel=0.25)


def test_with_priority_a_light_kernel_starts_beside_a_kernel_that_leaves_no_room_for_nccl() -> None:
    half = replace(SUMS, num_ctas=132 * 8, registers_per_thread=56)  # half the threads, 7/8 of the registers
    made_up = step(Kernel(name="sums", stream=0, footprint=half, lone_us=1000.0), collective())
    ends = {
        label: next(each.end_us for each in Simulator().run(made_up, H200, wanted).intervals if each.operation == 1)
        for label, wanted in (("nccl", LEAVE_IT), ("light", plan(LightKernel(num_ctas=64), Priority(priority=-5))))
    }
    assert ends["light"] < 60
    assert ends["nccl"] > 1000


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (collective("broadcast"), "light kernels were measured for all_gather, all_to_all, reduce_scatter, all_reduce only"),
        (collective(num_bytes=0), "its size is unknown"),
    ],
)
def test_what_light_kernels_cannot_do_is_refused_with_the_reason(asked: Collective, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        Simulator().run(step(asked, ranks=asked.group_size), H200, plan(LightKernel(num_ctas=64)))


def test_clusters_that_took_their_last_slots_ahead_of_time_place_no_more() -> None:
    scan = Footprint(num_ctas=2560, threads_per_cta=128, registers_per_thread=48, dynamic_shared_bytes=128)
    kernels = [Kernel(name="scan", stream=0, footprint=scan, character="other", lone_us=3699.5 / 2)] * 2
    gathers = [replace(collective(), lone_us=2754.1 / 76)] * 12
    light = Directive(match=Match(operations=(3, 9)), controls=(LightKernel(num_ctas=132),), reason="others stay with NCCL")
    held = Directive(match=Match(operations=(0,)), controls=(HeadStart(hold_us=5.0),), reason="test")
    timeline = Simulator().run(step(*kernels, *gathers), H200, Plan(directives=(held, light)))
    assert len(timeline.intervals) == 14
