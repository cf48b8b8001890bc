"""Matmuls whose CTAs have a tile each: what a launch says of it, how they crowd L2, and what delays their tiles."""

import json
from typing import Any

import pytest
from benchmarks.conditions import RESULTS

from counterpoint.controls import ResidencyCap
from counterpoint.machine import load_machine
from counterpoint.occupancy import cap_shared_bytes
from counterpoint.plan import LEAVE_IT, Plan
from counterpoint.sim import Simulator
from counterpoint.sim.tiles import MatmulTile, tile_of, tile_stages
from counterpoint.step import Collective, Footprint, Kernel, Step
from counterpoint.units import MIB
from counterpoint.workloads.gemm import Tile, parse_tile, stage_bytes
from helpers.toy_steps import H200, plan_of

LONE_US = 1447.0  # 64x64x32 of 4 stages, 6144^3, on an H200 (2026-11-29)
BY_RESIDENCY_US = {5: 1433.0, 4: 1391.0, 3: 1260.0, 2: 1605.0}  # the same kernel on zeros, at 1,980 MHz; alone 1,443
LAUNCHES = {"64x64x32": (64, 128), "128x128x32": (100, 256), "128x128x64": (116, 256)}  # registers and threads
BESIDE: list[dict[str, Any]] = json.loads((RESULTS / "tiles_beside_2x_h200.json").read_text())["result"]


def tiled(tile: Tile, num_stages: int, registers: int, threads: int, *, num_ctas: int = 9216, **more: Any) -> Kernel:
    shared = num_stages * stage_bytes("bf16", tile)
    footprint = Footprint(
        num_ctas=num_ctas, threads_per_cta=threads, registers_per_thread=registers, dynamic_shared_bytes=shared
    )
    return Kernel(name="tiled", stream=0, footprint=footprint, character="matmul", **({"lone_us": LONE_US} | more))


def small(**more: Any) -> Kernel:
    return tiled((64, 64, 32), 4, 58, 128, **more)


def ends_us(*operations: Kernel | Collective, plan: Plan = LEAVE_IT, is_traced: bool = False) -> list[float]:
    step = Step(
        name="tiles", num_ranks=2, operations=operations, device_name="NVIDIA H200", is_timed_in_bursts=not is_traced
    )
    timeline = Simulator(clock_share=1.0).run(step, H200, plan)
    return [each.end_us for each in sorted(timeline.intervals, key=lambda each: each.operation)]


@pytest.mark.parametrize(
    ("tile", "num_stages", "registers", "threads"),
    [
        ((64, 64, 32), 2, 64, 128),
        ((64, 64, 32), 4, 58, 128),
        ((64, 128, 32), 4, 96, 128),
        ((128, 64, 64), 3, 120, 128),
        ((256, 64, 32), 3, 96, 256),
        ((128, 128, 32), 4, 98, 256),
        ((128, 128, 64), 3, 116, 256),
    ],
)
def test_the_launch_of_a_triton_matmul_says_its_tile_and_its_stages(
    tile: Tile, num_stages: int, registers: int, threads: int
) -> None:
    """Launches of kernels that were compiled for an H200; the first has as many stages of half the depth, too."""
    kernel = tiled(tile, num_stages, registers, threads)
    found, (long, short) = tile_of(kernel), sorted(tile[:2], reverse=True)
    assert found is not None
    assert (found.long, found.short) == (long, short)
    if num_stages > 2:
        assert (found.num_stages, tile_stages(kernel)) == (num_stages, (num_stages, stage_bytes("bf16", tile)))
    known = tile_of(tiled(tile, num_stages, registers, threads, stage_bytes=stage_bytes("bf16", tile)))
    assert known == MatmulTile(long=long, short=short, num_stages=num_stages)


@pytest.mark.parametrize(("shared_bytes", "registers"), [(45_000, 64), (0, 64), (32_768, 72)])
def test_other_launches_say_no_tile(shared_bytes: int, registers: int) -> None:
    footprint = Footprint(
        num_ctas=1000, threads_per_cta=128, registers_per_thread=registers, dynamic_shared_bytes=shared_bytes
    )
    kernel = Kernel(name="mm", stream=0, footprint=footprint, character="matmul", lone_us=1.0)
    assert tile_of(kernel) is None


@pytest.mark.parametrize("ctas_per_sm", BY_RESIDENCY_US)
def test_fewer_ctas_crowd_l2_less_and_can_be_faster(ctas_per_sm: int) -> None:
    kernel = small(lone_us=1443.0)
    dynamic_bytes = cap_shared_bytes(H200.gpu, kernel.footprint, ctas_per_sm)
    cap = ResidencyCap(ctas_per_sm=ctas_per_sm, dynamic_shared_bytes=dynamic_bytes, carveout_percent=-1)
    (found,) = ends_us(kernel, plan=plan_of({0: cap}))
    assert found == pytest.approx(BY_RESIDENCY_US[ctas_per_sm], rel=0.11)
    assert (found < 1443) == (ctas_per_sm > 2)


def test_alone_it_takes_its_lone_time_whatever_its_last_wave() -> None:
    for num_ctas in (133, 200, 700, 792, 800, 1000, 1500, 9216):
        assert ends_us(small(num_ctas=num_ctas)) == [pytest.approx(LONE_US, rel=0.001)]
    for num_ctas in (133, 200, 420, 528, 660):  # 4 CTAs on an SM
        kernel = tiled((64, 128, 32), 4, 96, 128, num_ctas=num_ctas)
        assert ends_us(kernel) == [pytest.approx(LONE_US, rel=0.001)]


@pytest.mark.parametrize(("shares_work", "sizes"), [(False, None), (True, (128, 4096, 4096))])
def test_a_measured_matmul_of_a_type_that_the_machine_does_not_multiply_keeps_its_time(
    shares_work: bool, sizes: tuple[int, int, int] | None
) -> None:
    a100 = load_machine("a100")
    kernel = small(element_type="fp8", num_ctas=108, is_work_sharing=shares_work, matmul_sizes=sizes)
    step = Step(name="fp8", num_ranks=1, operations=(kernel,), device_name="NVIDIA H200", is_timed_in_bursts=True)
    (found,) = Simulator(clock_share=1.0).run(step, a100, LEAVE_IT).intervals
    assert found.end_us == pytest.approx(LONE_US, rel=0.001)


@pytest.mark.parametrize("row", [row for row in BESIDE if row["matmul"].startswith("64 tiles")], ids=str)
def test_a_few_tiles_arrive_later_beside_collectives_as_measured(row: dict[str, Any]) -> None:
    name, number = row["matmul"].removeprefix("64 tiles of ").removesuffix(" stages").split(", ")
    tile = tiled(parse_tile(name, "a row"), int(number), *LAUNCHES[name], num_ctas=64)
    exchange = Collective(name="c", stream=1, collective=row["beside"], num_bytes=1024 * MIB, group_size=2)
    _, found = ends_us(exchange, tile)
    assert found / LONE_US == pytest.approx(row["ratio"], rel=0.13)


def test_times_from_a_trace_hold_what_collectives_took() -> None:
    few, exchange = (
        tiled((64, 64, 32), 2, 64, 128, num_ctas=64),
        Collective(name="c", stream=1, collective="all_reduce", num_bytes=1024 * MIB, group_size=2),
    )
    assert ends_us(exchange, few, is_traced=True)[1] == pytest.approx(LONE_US, rel=0.01)


# Triton's matmuls of 6144^3 on an H200 (2026-11-29), us at MHz: at two clocks, alone and with one CTA on an SM
@pytest.mark.parametrize(
    ("tile", "num_stages", "usual", "alone"),
    [
        ((64, 128, 32), 4, ((1515, 1071), (1320, 1210)), ((1967, 1639), (1637, 1740))),
        ((128, 64, 64), 3, ((1651, 1056), (1358, 1174)), ((1966, 1418), (1576, 1540))),
    ],
)
def test_small_tiles_keep_their_speed_down_to_a_knee_of_the_clock_unless_few_ctas_wait_for_them(
    tile: Tile, num_stages: int, usual: Any, alone: Any
) -> None:
    kernel = tiled(tile, num_stages, 90, 128, num_ctas=4608, lone_us=1000.0)
    cap = ResidencyCap(ctas_per_sm=1, dynamic_shared_bytes=cap_shared_bytes(H200.gpu, kernel.footprint, 1))
    step = Step(name="tiles", num_ranks=1, operations=(kernel,), device_name="NVIDIA H200", is_timed_in_bursts=True)

    def longer(clocks: Any, plan: Plan) -> float:
        burst_mhz = 1775.0
        times = [Simulator(clock_share=mhz / burst_mhz).run(step, H200, plan).intervals[0].end_us for mhz, _ in clocks]
        return times[1] / times[0]

    for clocks, plan in ((usual, LEAVE_IT), (alone, plan_of({0: cap}))):
        assert longer(clocks, plan) == pytest.approx(clocks[1][1] / clocks[0][1], rel=0.04)
