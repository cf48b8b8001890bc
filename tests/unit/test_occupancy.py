"""Occupancy against NVIDIA's answers, against measurements on H200, and against its own definitions."""

import csv
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from counterpoint.errors import OccupancyError
from counterpoint.machine import Gpu, load_machine
from counterpoint.occupancy import (
    cap_shared_bytes,
    largest_residency_beside,
    residency,
    room_for,
    shared_bytes_per_cta,
    warps_per_cta,
)
from counterpoint.step import Footprint

DATA = Path(__file__).parents[1] / "data"
H200 = load_machine("h200").gpu
FULL = H200.shared_bytes_per_sm
# Compute capability 12.0 has no shipped machine; its SM is that of 8.9 but for the limit of 24 named barriers per SM.
SM_120 = replace(load_machine("l40s").gpu, compute_capability="12.0", named_barriers_per_sm=24)
GPU_OF = {
    "8.0": load_machine("a100").gpu,
    "8.6": load_machine("a40").gpu,
    "8.9": load_machine("l40s").gpu,
    "9.0": H200,
    "10.0": load_machine("b200").gpu,
    "12.0": SM_120,
}
MI300X = load_machine("mi300x").gpu
NCCL = Footprint(num_ctas=24, threads_per_cta=544, registers_per_thread=96, dynamic_shared_bytes=103_808, ctas_per_cluster=4)
SMALL = Footprint(num_ctas=4224, threads_per_cta=256, registers_per_thread=10)
CUBLAS = Footprint(num_ctas=132, threads_per_cta=384, registers_per_thread=168, dynamic_shared_bytes=200_000)


def rows(name: str) -> list[dict[str, str]]:
    lines = [line for line in (DATA / name).read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def vector(row: dict[str, str]) -> tuple[Gpu, Footprint]:
    footprint = Footprint(
        num_ctas=1,
        threads_per_cta=int(row["threads_per_cta"]),
        registers_per_thread=int(row["registers_per_thread"]),
        static_shared_bytes=int(row["static_shared_bytes"]),
        dynamic_shared_bytes=int(row["dynamic_shared_bytes"]),
        named_barriers=int(row["named_barriers"]),
        carveout_percent=int(row["carveout_percent"]),
    )
    return GPU_OF[row["compute_capability"]], footprint


def with_dynamic(footprint: Footprint, dynamic_shared_bytes: int) -> Footprint:
    return replace(footprint, dynamic_shared_bytes=dynamic_shared_bytes)


footprints = st.builds(
    Footprint,
    num_ctas=st.just(1),
    threads_per_cta=st.integers(1, 1024),
    registers_per_thread=st.integers(1, 255),
    static_shared_bytes=st.integers(0, 30_000),
    dynamic_shared_bytes=st.integers(0, 120_000),
    named_barriers=st.integers(0, 16),
    carveout_percent=st.sampled_from([-1, 0, 25, 50, 75, 100]),
)
gpus = st.sampled_from([*GPU_OF.values(), MI300X])


def test_residency_agrees_with_all_6000_reference_answers() -> None:
    answers = rows("occupancy_vectors.csv")
    assert len(answers) == 6000
    wrong = [row for row in answers if residency(*vector(row)).ctas_per_sm != int(row["max_ctas_per_sm"])]
    assert wrong == []


@pytest.mark.parametrize(("dynamic", "ctas"), [(28_288, 7), (32_384, 6), (45_696, 4), (76_928, 2), (115_840, 1)], ids=str)
def test_caps_measured_on_h200_are_in_the_allocation_unit_that_the_cap_starts(dynamic: int, ctas: int) -> None:
    smallest = cap_shared_bytes(H200, SMALL, ctas)
    assert smallest <= dynamic < smallest + H200.shared_allocation_unit_bytes
    assert shared_bytes_per_cta(H200, with_dynamic(SMALL, smallest)) == dynamic + 1024
    assert residency(H200, with_dynamic(SMALL, dynamic)).ctas_per_sm == ctas


@pytest.mark.parametrize(
    ("dynamic", "ctas"),
    [(28_160, 8), (28_161, 7), (45_568, 5), (45_569, 4), (76_800, 3), (76_801, 2), (115_712, 2), (115_713, 1)],
)
def test_the_byte_at_which_a_cap_begins_is_the_one_measured_on_h200(dynamic: int, ctas: int) -> None:
    # Both the driver's query and CTAs counted per SM, with the default carveout and with 100 percent, 2026-11-21.
    assert residency(H200, with_dynamic(SMALL, dynamic)).ctas_per_sm == ctas


@settings(max_examples=300)
@given(gpu=gpus, footprint=footprints, count=st.integers(1, 31))
def test_one_byte_less_would_break_the_cap(gpu: Gpu, footprint: Footprint, count: int) -> None:
    if residency(gpu, footprint).ctas_per_sm <= count:
        with pytest.raises(OccupancyError, match="changes nothing"):
            cap_shared_bytes(gpu, footprint, count)
        return
    cap = cap_shared_bytes(gpu, footprint, count)
    assert residency(gpu, with_dynamic(footprint, cap)).ctas_per_sm <= count
    assert residency(gpu, with_dynamic(footprint, cap - 1)).ctas_per_sm > count


@settings(max_examples=300)
@given(gpu=gpus, footprint=footprints, more=st.integers(1, 40_000))
def test_residency_never_rises_with_what_a_cta_asks_for(gpu: Gpu, footprint: Footprint, more: int) -> None:
    present = residency(gpu, footprint).ctas_per_sm
    for name in ("dynamic_shared_bytes", "static_shared_bytes", "registers_per_thread", "threads_per_cta", "named_barriers"):
        larger = replace(footprint, **{name: getattr(footprint, name) + more})
        assert residency(gpu, larger).ctas_per_sm <= present


@settings(max_examples=300)
@given(gpu=gpus, footprint=footprints)
def test_an_empty_sm_has_room_for_exactly_the_residency(gpu: Gpu, footprint: Footprint) -> None:
    fit = residency(gpu, footprint)
    assert room_for(gpu, (), fit.carveout_bytes, footprint) == fit.ctas_per_sm
    if fit.ctas_per_sm:
        assert room_for(gpu, ((footprint, fit.ctas_per_sm),), fit.carveout_bytes, footprint) == 0


@given(gpu=gpus, footprint=footprints)
def test_the_driver_takes_the_smallest_carveout_that_keeps_the_residency(gpu: Gpu, footprint: Footprint) -> None:
    fit = residency(gpu, replace(footprint, carveout_percent=-1))
    smaller = [step for step in gpu.carveout_steps_bytes if step < fit.carveout_bytes]
    if smaller and fit.ctas_per_sm:
        assert room_for(gpu, (), smaller[-1], footprint) < fit.ctas_per_sm


def test_room_beside_residents_is_what_was_measured_on_h200() -> None:
    measured = rows("beside_h200.csv")
    assert len(measured) == 301
    wrong = []
    for row in measured:
        number = {name: int(value) for name, value in row.items()}
        resident = Footprint(
            num_ctas=1,
            threads_per_cta=number["resident_threads"],
            registers_per_thread=number["resident_registers"],
            dynamic_shared_bytes=number["resident_dynamic_shared_bytes"],
        )
        second = Footprint(
            num_ctas=1,
            threads_per_cta=number["threads"],
            registers_per_thread=number["registers"],
            dynamic_shared_bytes=number["dynamic_shared_bytes"],
        )
        room = room_for(H200, ((resident, number["resident_ctas"]),), FULL, second)
        if room != number["room"]:
            wrong.append((row, room))
    assert wrong == []


def place_warp_by_warp(gpu: Gpu, placed: list[Footprint]) -> bool:
    """The documented rule, one warp at a time, without arithmetic on whole CTAs."""
    warps = [0] * gpu.num_sub_partitions
    registers = [0] * gpu.num_sub_partitions
    for footprint in placed:
        for _ in range(warps_per_cta(gpu, footprint)):
            target = warps.index(min(warps))
            warps[target] += 1
            units = -(-footprint.registers_per_thread * gpu.warp_size // gpu.register_allocation_unit)
            registers[target] += units * gpu.register_allocation_unit
    return (
        max(registers) <= gpu.registers_per_sub_partition
        and sum(warps) <= gpu.max_warps_per_sm
        and len(placed) <= gpu.max_ctas_per_sm
    )


@settings(max_examples=300)
@given(
    gpu=gpus, first=footprints, second=footprints, third=footprints, counts=st.tuples(st.integers(0, 3), st.integers(0, 3))
)
def test_room_agrees_with_placing_warp_by_warp(
    gpu: Gpu, first: Footprint, second: Footprint, third: Footprint, counts: tuple[int, int]
) -> None:
    bare = [
        replace(footprint, static_shared_bytes=0, dynamic_shared_bytes=0, named_barriers=0)
        for footprint in (first, second, third)
    ]
    residents = ((bare[0], counts[0]), (bare[1], counts[1]))
    placed = [bare[0]] * counts[0] + [bare[1]] * counts[1]
    room = room_for(gpu, residents, gpu.shared_bytes_per_sm, bare[2])
    if room:
        assert place_warp_by_warp(gpu, placed + [bare[2]] * room)
    elif residency(gpu, bare[2]).ctas_per_sm:
        assert not place_warp_by_warp(gpu, [*placed, bare[2]])


@settings(max_examples=300)
@given(gpu=gpus, first=footprints, second=footprints, counts=st.tuples(st.integers(1, 6), st.integers(1, 6)))
def test_what_fits_beside_what_does_not_depend_on_which_came_first(
    gpu: Gpu, first: Footprint, second: Footprint, counts: tuple[int, int]
) -> None:
    full = gpu.shared_bytes_per_sm
    if room_for(gpu, (), full, first) < counts[0] or room_for(gpu, (), full, second) < counts[1]:
        return
    one_way = room_for(gpu, ((first, counts[0]),), full, second) >= counts[1]
    assert one_way == (room_for(gpu, ((second, counts[1]),), full, first) >= counts[0])


@given(gpu=gpus, first=footprints, second=footprints, count=st.integers(1, 8))
def test_residents_never_make_room(gpu: Gpu, first: Footprint, second: Footprint, count: int) -> None:
    full = gpu.shared_bytes_per_sm
    assert room_for(gpu, ((first, count),), full, second) <= room_for(gpu, (), full, second)


@pytest.mark.parametrize("dynamic", [0, 32_384, 45_696, 115_840])
def test_one_compute_cta_at_most_runs_beside_a_nccl_cta_on_h200(dynamic: int) -> None:
    assert room_for(H200, ((NCCL, 1),), FULL, with_dynamic(SMALL, dynamic)) == 1


def test_a_collective_fits_beside_a_capped_cta_only_with_the_raised_carveout() -> None:
    capped = with_dynamic(SMALL, 115_840)
    chosen = residency(H200, capped).carveout_bytes
    assert chosen == 132 * 1024
    assert room_for(H200, ((capped, 1),), chosen, NCCL) == 0
    assert room_for(H200, ((capped, 1),), FULL, NCCL) == 1


def test_the_cap_beside_a_collective_is_one_cta_with_a_carveout_of_100_percent() -> None:
    beside = largest_residency_beside(H200, SMALL, NCCL)
    assert (beside.ctas_per_sm, beside.dynamic_shared_bytes, beside.carveout_percent) == (1, 115_713, 100)
    capped = replace(SMALL, dynamic_shared_bytes=beside.dynamic_shared_bytes, carveout_percent=100)
    assert room_for(H200, ((capped, 1),), residency(H200, capped).carveout_bytes, NCCL) == 1


def test_a_kernel_that_leaves_room_already_needs_no_cap() -> None:
    roomy = Footprint(num_ctas=132, threads_per_cta=256, registers_per_thread=40, dynamic_shared_bytes=120_000)
    beside = largest_residency_beside(H200, roomy, replace(NCCL, threads_per_cta=256))
    assert beside.dynamic_shared_bytes is None
    assert beside.ctas_per_sm == residency(H200, roomy).ctas_per_sm == 1
    assert beside.carveout_percent == 100
    small = replace(NCCL, threads_per_cta=256, dynamic_shared_bytes=1024)
    assert largest_residency_beside(H200, roomy, small).carveout_percent == -1


@settings(max_examples=200)
@given(gpu=gpus, computation=footprints, communication=footprints)
@example(
    gpu=load_machine("a100").gpu,  # where 31 CTAs can be had with a carveout of 100 and not with the kernel's own
    computation=Footprint(num_ctas=1, threads_per_cta=1, registers_per_thread=1, carveout_percent=50),
    communication=Footprint(num_ctas=1, threads_per_cta=1, registers_per_thread=1),
)
def test_a_larger_residency_than_the_one_found_leaves_no_room(
    gpu: Gpu, computation: Footprint, communication: Footprint
) -> None:
    alone = residency(gpu, computation).ctas_per_sm
    if not alone or not residency(gpu, communication).ctas_per_sm:
        with pytest.raises(OccupancyError, match="Not one CTA"):
            largest_residency_beside(gpu, computation, communication)
        return
    try:
        found = largest_residency_beside(gpu, computation, communication).ctas_per_sm
    except OccupancyError:
        found = 0
    for count in range(found + 1, alone + 1):
        wide = replace(computation, carveout_percent=100)
        if residency(gpu, wide).ctas_per_sm > count:
            wide = with_dynamic(wide, cap_shared_bytes(gpu, wide, count))
        resident = residency(gpu, wide).ctas_per_sm
        if resident > found:
            assert room_for(gpu, ((wide, resident),), gpu.shared_bytes_per_sm, communication) == 0


def test_a_kernel_that_fills_the_register_file_is_refused_with_that_reason() -> None:
    with pytest.raises(OccupancyError, match=r"fills the register file: it holds 64,512 of 65,536 registers") as caught:
        largest_residency_beside(H200, CUBLAS, NCCL)
    assert "\n" not in str(caught.value)


def test_a_kernel_that_fills_half_the_register_file_is_not_said_to_fill_it() -> None:
    half = Footprint(num_ctas=1, threads_per_cta=1024, registers_per_thread=32)
    with pytest.raises(OccupancyError, match=r"CTA holds 32,768 of 65,536 registers, and the other needs 52,224"):
        largest_residency_beside(H200, half, NCCL)


def test_a_kernel_that_keeps_the_shared_memory_is_refused_with_that_reason() -> None:
    greedy = Footprint(num_ctas=132, threads_per_cta=128, registers_per_thread=32, dynamic_shared_bytes=200_000)
    with pytest.raises(OccupancyError, match=r"holds 201,088 of 233,472 bytes of shared memory"):
        largest_residency_beside(H200, greedy, NCCL)


def test_a_cap_that_changes_nothing_says_so() -> None:
    with pytest.raises(OccupancyError, match=r"A cap at 8 CTAs per SM changes nothing: 8 are resident on an SM already"):
        cap_shared_bytes(H200, SMALL, 8)
    with pytest.raises(OccupancyError, match="Leave this kernel uncapped"):
        cap_shared_bytes(H200, CUBLAS, 1)


def test_a_cap_beyond_what_a_cta_may_use_says_how_low_it_can_go() -> None:
    old = replace(H200, max_shared_bytes_per_cta=49_152)
    with pytest.raises(
        OccupancyError, match=r"A cap at 2 CTAs per SM needs 76,801 bytes .* is 49,152\. Ask for 4 CTAs or more\."
    ):
        cap_shared_bytes(old, SMALL, 2)
    assert cap_shared_bytes(old, SMALL, 4) <= 49_152


@pytest.mark.parametrize("count", [0, -1])
def test_a_count_below_one_is_refused(count: int) -> None:
    with pytest.raises(OccupancyError, match="at least 1"):
        cap_shared_bytes(H200, SMALL, count)


@pytest.mark.parametrize("carveout_bytes", [-1, FULL + 1])
def test_a_carveout_that_the_sm_does_not_have_is_refused(carveout_bytes: int) -> None:
    with pytest.raises(OccupancyError, match="A carveout must be from 0 to 233,472"):
        room_for(H200, (), carveout_bytes, SMALL)


@pytest.mark.parametrize(
    ("change", "limiter"),
    [
        ({"threads_per_cta": 1025}, "threads_per_cta"),
        ({"registers_per_thread": 256}, "registers"),
        ({"threads_per_cta": 1024, "registers_per_thread": 72}, "registers"),
        ({"dynamic_shared_bytes": 232_449}, "shared_memory"),
        ({"named_barriers": 17}, "named_barriers"),
    ],
)
def test_a_launch_that_does_not_fit_names_what_it_lacks(change: dict[str, int], limiter: str) -> None:
    impossible = replace(SMALL, **change)
    fit = residency(H200, impossible)
    assert (fit.ctas_per_sm, fit.limiter) == (0, limiter)
    assert room_for(H200, (), FULL, impossible) == 0


def test_footprints_measured_on_h200_have_the_measured_residency() -> None:
    elementwise = Footprint(num_ctas=1, threads_per_cta=128, registers_per_thread=32)
    fp32 = Footprint(num_ctas=1, threads_per_cta=256, registers_per_thread=254, dynamic_shared_bytes=67_584)
    for footprint, expected in ((elementwise, 16), (CUBLAS, 1), (fp32, 1), (NCCL, 1), (SMALL, 8)):
        assert residency(H200, footprint).ctas_per_sm == expected
    for row in rows("residency_speed_h200.csv"):
        footprint = Footprint(
            num_ctas=int(row["num_ctas"]),
            threads_per_cta=int(row["threads_per_cta"]),
            registers_per_thread=int(row["registers_per_thread"]),
            static_shared_bytes=int(row["static_shared_bytes"]),
            dynamic_shared_bytes=int(row["dynamic_shared_bytes"]),
        )
        assert residency(H200, footprint).ctas_per_sm == int(row["ctas_per_sm"]), row
