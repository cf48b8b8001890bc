"""How bandwidth is shared and limits combine, against the definitions; and the interference that follows."""

import heapq
from collections.abc import Sequence
from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.controls import ResidencyCap
from counterpoint.occupancy import cap_shared_bytes
from counterpoint.plan import LEAVE_IT
from counterpoint.sim import Simulator
from counterpoint.sim.rates import MemoryLatency, available_to, smooth_minimum
from counterpoint.sim.sm import level_after_taking
from counterpoint.step import Collective, Footprint, Kernel, Operation
from counterpoint.timeline import Timeline
from helpers.toy_steps import H200, all_reduce, plan_of, simulate, spans, step_of

DEMANDS = st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e3), st.just(inf)), min_size=1, max_size=8)
CAPACITY = st.floats(1e-3, 1e4)
LIMIT = st.floats(1e-6, 1e15)
MIB = 1 << 20


# Max-min fair shares


def max_min_shares(demands: Sequence[float], capacity: float) -> list[float]:
    """The definition: smaller demands first, and what is left in equal parts."""
    shares = [0.0] * len(demands)
    left = capacity
    ascending = sorted(range(len(demands)), key=lambda index: demands[index])
    for position, index in enumerate(ascending):
        shares[index] = min(demands[index], left / (len(ascending) - position))
        left -= shares[index]
    return shares


def test_max_min_shares_of_a_worked_example() -> None:
    # 2 is satisfied; of the 8 left each of the other three gets 8/3, but 2.6 needs less; the last two share 5.4.
    assert max_min_shares([2, 4, 2.6, 5], 10) == pytest.approx([2, 2.7, 2.6, 2.7])


@given(DEMANDS, CAPACITY, st.data())
def test_what_is_available_to_a_flow_is_an_equal_share_or_what_the_others_leave(
    demands: list[float], capacity: float, data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(demands) - 1))
    available = available_to(index, demands, capacity)
    left = capacity - (
        sum(demands) - demands[index] if demands[index] < inf else sum(demands[:index] + demands[index + 1 :])
    )
    assert available >= max(left, capacity / len(demands)) * (1 - 1e-9)
    assert available <= capacity
    # A flow that asks for less than that is given all it asks for.
    share = max_min_shares(demands, capacity)[index]
    assert share == pytest.approx(min(demands[index], available))


# Two limits


@given(LIMIT, LIMIT)
def test_two_limits_together_are_a_little_below_the_smaller(first: float, second: float) -> None:
    combined = smooth_minimum(first, second)
    assert 2**-0.25 * min(first, second) * (1 - 1e-12) <= combined <= min(first, second)
    assert combined == smooth_minimum(second, first)


@given(LIMIT, LIMIT, st.floats(1, 10))
def test_a_higher_limit_never_slows(first: float, second: float, factor: float) -> None:
    assert smooth_minimum(first * factor, second) >= smooth_minimum(first, second) * (1 - 1e-12)


@given(LIMIT, LIMIT)
def test_two_limits_combine_by_their_fourth_powers(first: float, second: float) -> None:
    assert smooth_minimum(first, second) ** -4 == pytest.approx(first**-4 + second**-4)


def test_a_limit_of_nothing_leaves_nothing() -> None:
    assert smooth_minimum(0, 5) == smooth_minimum(5, 0) == 0


# The most-room rule


def one_at_a_time(levels: list[int], multiplicities: list[int], amount: int) -> list[int]:
    """Levels of all vessels, ascending, after `amount` units were taken, each from a fullest one."""
    heap = [-level for level, number in zip(levels, multiplicities, strict=True) for _ in range(number)]
    heapq.heapify(heap)
    for _ in range(amount):
        heapq.heappush(heap, heapq.heappop(heap) + 1)
    return sorted(-level for level in heap)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)), min_size=1, max_size=6), st.data())
def test_taking_from_the_fullest_agrees_with_taking_one_unit_at_a_time(
    vessels: list[tuple[int, int]], data: st.DataObject
) -> None:
    levels, multiplicities = [level for level, _ in vessels], [number for _, number in vessels]
    held = sum(level * number for level, number in vessels)
    amount = data.draw(st.integers(0, held))
    floor, extra = level_after_taking(levels, multiplicities, amount)
    drained = sorted(min(level, floor) for level, number in vessels for _ in range(number))
    for position, level in enumerate(drained):
        if extra and level == floor:
            drained[position] -= 1
            extra -= 1
    assert extra == 0
    assert sorted(drained) == one_at_a_time(levels, multiplicities, amount)


# Interference


def streaming(num_mib: int) -> Kernel:
    """An elementwise kernel that reads and writes `num_mib` each: 16 CTAs of 128 threads live on an SM."""
    return Kernel(
        name="elementwise",
        stream=1,
        footprint=Footprint(num_ctas=num_mib * 512, threads_per_cta=128, registers_per_thread=32),
        character="streaming",
        hbm_bytes=2.0 * num_mib * MIB,
    )


def fma_only(num_ctas: int, lone_us: float) -> Kernel:
    """256 threads of arithmetic: 8 CTAs live on an SM, and about 2 saturate it."""
    return Kernel(
        name="fma",
        stream=1,
        footprint=Footprint(num_ctas=num_ctas, threads_per_cta=256, registers_per_thread=10),
        lone_us=lone_us,
    )


def durations(timeline: Timeline) -> list[float]:
    return [end - start for start, end in spans(timeline)]


def lone_us(*operations: Operation) -> list[float]:
    return Simulator().lone_times_us(step_of(*operations), H200)


def test_a_matmul_of_many_warps_and_small_tiles_pays_half_for_a_cap_at_one_of_two_ctas() -> None:
    """An fp32 matmul with tiles in 8,448 bytes took 1.355 times as long (H200, 2026-11-22): warps saturate an SM first."""
    footprint = Footprint(num_ctas=132 * 2 * 20, threads_per_cta=1024, registers_per_thread=32, static_shared_bytes=8448)
    step = step_of(Kernel(name="tile_mm", stream=1, footprint=footprint, character="matmul", lone_us=1000.0))
    cap = ResidencyCap(ctas_per_sm=1, dynamic_shared_bytes=115_840 - 8448)
    assert durations(Simulator().run(step, H200, plan_of({0: cap}))) == [pytest.approx(1355, rel=0.02)]


def test_a_streaming_kernel_reaches_the_bandwidth_that_was_measured() -> None:
    # 512 MiB read and 512 MiB written in 251.7 us on an H200, 2026-11-21.
    assert durations(simulate(H200, streaming(512))) == [pytest.approx(251.7, rel=0.03)]


# Microseconds of PyTorch's elementwise kernel on 512 MiB, by CTAs on an SM (H200, `counterpoint calibrate`, 2026-11-23).
STREAMING_US = {12: 269.6, 8: 291.4, 6: 334.4, 5: 377.7, 4: 444.5, 3: 556.8, 2: 783.2}


@pytest.mark.parametrize(("ctas_per_sm", "measured_us"), STREAMING_US.items())
def test_a_streaming_kernel_of_few_ctas_gains_by_the_lower_latency(ctas_per_sm: int, measured_us: float) -> None:
    """If latency did not fall with the load, 2 CTAs on an SM would take 8.7 % longer than measured."""
    dynamic = cap_shared_bytes(H200.gpu, streaming(512).footprint, ctas_per_sm)
    cap = ResidencyCap(ctas_per_sm=ctas_per_sm, dynamic_shared_bytes=dynamic)
    kernel = msgspec.structs.replace(streaming(512), lone_us=254.3)
    assert durations(simulate(H200, kernel, plan=plan_of({0: cap}))) == [pytest.approx(measured_us, rel=0.04)]


@given(st.floats(0, 3), st.floats(0, 1), st.floats(0, 5))
def test_the_load_that_kernels_make_is_what_they_keep_in_flight_over_the_latency(
    at_low_load: float, other: float, in_flight: float
) -> None:
    slowdown = MemoryLatency(at_low_load=at_low_load, per_load=1.8).slowdown(in_flight, other)
    load = min(1.0, other + in_flight / slowdown)
    assert slowdown == pytest.approx(1 + at_low_load * load, rel=1e-6)


@given(st.floats(0, 1), st.floats(0, 1))
def test_latency_grows_with_the_load_slowly_first(first: float, second: float) -> None:
    latency = MemoryLatency(at_low_load=0.5, per_load=1.8)
    low, high = sorted((first, second))
    assert latency.growth(low) <= latency.growth(high) <= 1.8 * high
    assert latency.growth(1.0) == pytest.approx(1.8)
    assert latency.growth(0.5) < 0.3


def test_an_all_to_all_feels_more_of_a_full_memory_than_an_all_gather() -> None:
    times = {}
    for kind in ("all_gather", "all_to_all"):
        collective = Collective(name=kind, stream=2, collective=kind, num_bytes=64 * MIB, group_size=2, lone_us=150.0)
        times[kind] = durations(simulate(H200, collective, streaming(8 * 512)))[0]
    assert 150 < times["all_gather"] < times["all_to_all"]


def test_a_library_matmul_of_two_stages_waits_for_its_loads() -> None:
    """128 x 28,672 x 8,192: with two stages loading, multiplying and latency add up; with six loading hides the rest."""
    footprint = Footprint(num_ctas=128, threads_per_cta=384, registers_per_thread=168, dynamic_shared_bytes=163_972)
    work = {"flops": 2.0 * 128 * 28672 * 8192, "hbm_bytes": 2.0 * 28672 * 8192, "matmul_sizes": (128, 8192, 28672)}
    times = []
    for number in (2, 3, 6):
        name = f"nvjet_sm90_tst_448x64_64x{number}_1x2_h_bz_coopB_NNN"
        kernel = Kernel(name=name, stream=0, footprint=footprint, character="matmul", is_work_sharing=True, **work)
        times += lone_us(kernel)
    assert times[0] > 1.5 * times[2]
    assert times[0] == pytest.approx(2 * times[1], rel=0.15)
    assert times[2] == pytest.approx(2.0 * 28672 * 8192 / 4.32e6, rel=0.05)  # what the memory takes for the weights


def test_a_collective_takes_sms_and_bandwidth_from_a_streaming_kernel() -> None:
    """Beside kernels that saturate HBM an all-reduce of 256 MiB ran at 0.62, they at 0.81 (H200, 2026-11-21)."""
    collective = Collective(
        name="all-reduce",
        stream=2,
        collective="all_reduce",
        num_bytes=256 * MIB,
        group_size=2,
        footprint=all_reduce(1).footprint,
    )
    operations = (collective, streaming(8 * 512))
    alone = lone_us(*operations)
    step = step_of(*operations)
    beside = durations(Simulator().run(step, H200, LEAVE_IT))
    assert alone[0] / beside[0] == pytest.approx(0.62, abs=0.06)
    # While the collective runs, the kernel does what it has not done by the end of the rest at its lone rate.
    done_beside = alone[1] - (beside[1] - beside[0])
    assert done_beside / beside[0] == pytest.approx(0.81, abs=0.08)


def test_a_kernel_that_only_computes_does_not_slow_a_collective() -> None:
    collective = all_reduce(272.0)
    kernel = Kernel(
        name="spin",
        stream=1,
        footprint=Footprint(num_ctas=8 * 132, threads_per_cta=32, registers_per_thread=10, carveout_percent=100),
        cta_us=1000.0,
    )
    assert durations(simulate(H200, collective, kernel))[0] == pytest.approx(272, rel=1e-3)


def test_two_streaming_kernels_at_once_take_as_long_as_one_after_the_other() -> None:
    # Half of each SM's slots each: neither alone saturates the memory, both together do.
    half = msgspec.structs.replace(streaming(512).footprint, num_ctas=8 * 132, carveout_percent=100)
    first = msgspec.structs.replace(streaming(512), footprint=half, lone_us=300.0)
    second = msgspec.structs.replace(first, stream=2)
    beside = durations(simulate(H200, first, second))
    assert beside[0] == beside[1]
    assert 300 * 1.3 < beside[0] <= 600


@pytest.mark.parametrize(("num_mib_beside", "least"), [(1, 1.0), (4 * 512, 1.2)])
def test_a_collective_slows_as_the_memory_fills(num_mib_beside: int, least: float) -> None:
    collective = all_reduce(272.0)
    beside = durations(simulate(H200, collective, streaming(num_mib_beside)))
    assert beside[0] >= 272 * least - 0.01


@given(st.integers(1, 7))
def test_a_lower_residency_never_runs_faster(ctas_per_sm: int) -> None:
    kernel = fma_only(12672, 9273.0)
    times = []
    for cap in (ctas_per_sm, ctas_per_sm + 1):
        bytes_for_cap = 233_472 // (cap + 1) // 128 * 128 + 128 - 1024
        control = ResidencyCap(ctas_per_sm=cap, dynamic_shared_bytes=bytes_for_cap)
        times.append(durations(simulate(H200, kernel, plan=plan_of({0: control} if cap < 8 else {})))[0])
    # Whole waves are the same number of CTAs per SM, but a partial last wave may differ by its share of one wave.
    assert times[0] >= times[1] * 0.985


def test_collectives_on_the_same_link_share_it() -> None:
    first, second = all_reduce(1000.0), all_reduce(1000.0, stream=3)
    beside = durations(simulate(H200, first, second))
    assert beside[0] == pytest.approx(beside[1])
    # Together they have 48 CTAs for one link, so they lose a little less than half of their rate each.
    assert 1.5 < beside[0] / 1000 <= 2


def test_a_matmul_keeps_its_speed_beside_a_collective_by_copy_engines() -> None:
    matmul = Kernel(
        name="matmul",
        stream=1,
        footprint=Footprint(
            num_ctas=132, threads_per_cta=384, registers_per_thread=168, dynamic_shared_bytes=213_188, ctas_per_cluster=2
        ),
        character="matmul",
        lone_us=1469.0,
        is_work_sharing=True,
    )
    gather = Collective(
        name="gather", stream=2, collective="all_gather", num_bytes=896 * MIB, group_size=4, transport="copy_engine"
    )
    # Measured: a matmul beside copy-engine pulls takes 1452 us against 1469 alone (H200, 2026-11-21).
    assert durations(simulate(H200, matmul, gather))[0] == pytest.approx(1469, rel=0.02)
