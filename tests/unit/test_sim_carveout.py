"""How an SM's split between L1 and shared memory outlives kernels, what collectives lose with little L1, and where CTAs that
waited go, against what H200s did on 2026-11-29.
"""

import msgspec
import pytest

from counterpoint.controls import CommunicationCtas, Control, ResidencyCap
from counterpoint.plan import LEAVE_IT, Plan
from counterpoint.sim import Simulator
from counterpoint.sim.task_graph import carveout_bytes
from counterpoint.step import Collective, CollectiveKind, Footprint, Kernel
from helpers.toy_steps import GREATEST, H200, NCCL, plan_of, simulate, spans, step_of

# time beside the largest carveout (28 KiB of L1) over the usual time: NCCL 2.28.9, 2 GPUs, 256 MiB alone in a captured graph
USUAL_CTAS: dict[CollectiveKind, float] = {
    "all_reduce": 1.063,
    "all_gather": 1.091,
    "reduce_scatter": 1.133,
    "all_to_all": 1.195,
}
EIGHT_CTAS: dict[CollectiveKind, float] = {
    "all_reduce": 1.121,
    "all_gather": 1.119,
    "reduce_scatter": 1.221,
    "all_to_all": 1.114,
}
LONE_US = {"all_reduce": 899.0, "all_gather": 551.0, "reduce_scatter": 592.0, "all_to_all": 478.0}


def collective(kind: CollectiveKind, carveout_percent: int = -1, issued_us: float | None = None) -> Collective:
    footprint = msgspec.structs.replace(NCCL, num_ctas=32 if kind == "all_to_all" else 24, carveout_percent=carveout_percent)
    return Collective(
        name=kind,
        stream=2,
        collective=kind,
        num_bytes=256 << 20,
        group_size=2,
        lone_us=LONE_US[kind],
        footprint=footprint,
        issued_us=issued_us,
    )


def spinning(ctas_per_sm: int, shared_bytes: int, *, threads: int = 128, registers: int = 16, waves: int = 200) -> Kernel:
    """A kernel of CTAs of 20 us that use neither memory nor an SM's pipes."""
    footprint = Footprint(
        num_ctas=132 * ctas_per_sm * waves,
        threads_per_cta=threads,
        registers_per_thread=registers,
        dynamic_shared_bytes=shared_bytes,
    )
    return Kernel(name="spin", stream=1, footprint=footprint, cta_us=20.0)


def lasts_us(kind: CollectiveKind, carveout_percent: int, plan: Plan = LEAVE_IT) -> float:
    (interval,) = Simulator().run(step_of(collective(kind, carveout_percent)), H200, plan).intervals
    return interval.end_us


@pytest.mark.parametrize("kind", USUAL_CTAS)
def test_a_collective_takes_its_measured_time_with_the_least_l1(kind: CollectiveKind) -> None:
    few = plan_of({0: CommunicationCtas(max_ctas=8)})
    assert lasts_us(kind, 60) == lasts_us(kind, -1) == pytest.approx(LONE_US[kind], abs=0.01)
    assert lasts_us(kind, 100) / lasts_us(kind, -1) == pytest.approx(USUAL_CTAS[kind], abs=0.015)
    assert lasts_us(kind, 100, few) / lasts_us(kind, -1, few) == pytest.approx(EIGHT_CTAS[kind], abs=0.09)


@pytest.mark.parametrize(
    ("kernel", "has_least_l1"),
    [
        (spinning(1, 200 << 10), True),
        (spinning(2, 100 << 10), True),
        (spinning(8, 27 << 10), True),
        (spinning(1, 0, threads=1024), False),
        (spinning(4, 24 << 10, threads=512), False),  # its carveout is too small for the collective, so the SM gets another
    ],
)
def test_an_sm_that_becomes_free_keeps_a_carveout_that_suffices(kernel: Kernel, has_least_l1: bool) -> None:
    """Measured with a copying kernel as large as NCCL's: 245 us with 28 KiB of L1 and 174 with more."""
    late = collective("all_to_all", issued_us=50.0)
    start_us, end_us = spans(simulate(H200, kernel, late, plan=plan_of({1: GREATEST})))[1]
    expected = USUAL_CTAS["all_to_all"] if has_least_l1 else 1.0
    assert (end_us - start_us) / LONE_US["all_to_all"] == pytest.approx(expected, abs=0.015)


@pytest.mark.parametrize(("carveout_percent", "has_least_l1"), [(None, True), (57, False), (100, True)])
def test_a_matmul_asks_for_the_largest_carveout_unless_a_plan_asks_for_another(
    carveout_percent: int | None, has_least_l1: bool
) -> None:
    """Measured beside Triton's tiles of 256x64, two on an SM: a reduce-scatter takes 1.21, 1.07 and 1.20 times as long."""
    footprint = Footprint(num_ctas=2688, threads_per_cta=256, registers_per_thread=96, dynamic_shared_bytes=61_440)
    matmul = Kernel(name="matmul_kernel", stream=1, footprint=footprint, character="matmul", lone_us=900.0)
    controls: dict[int, Control] = {1: GREATEST}
    if carveout_percent is not None:
        controls[0] = ResidencyCap(ctas_per_sm=2, dynamic_shared_bytes=61_440, carveout_percent=carveout_percent)
    late = collective("reduce_scatter", issued_us=50.0)
    start_us, end_us = spans(simulate(H200, matmul, late, plan=plan_of(controls)))[1]
    slowdown = (end_us - start_us) / LONE_US["reduce_scatter"]
    assert slowdown > 1.15 if has_least_l1 else slowdown < 1.1


@pytest.mark.parametrize(
    ("name", "shared_bytes", "asks_for_most"),
    [
        ("triton_tem_fused_flex_attention_0", 65_536, True),
        ("triton_tem_fused_flex_attention_0", 49_152, False),
        ("flash_fwd_kernel", 65_536, False),
    ],
)
def test_kernels_of_inductor_ask_for_the_largest_carveout_above_48_kib(
    name: str, shared_bytes: int, asks_for_most: bool
) -> None:
    """`loadBinary` of Triton's driver.c asks for it; FlashAttention 2 sets only how much a CTA may have."""
    footprint = Footprint(num_ctas=4096, threads_per_cta=128, registers_per_thread=168, dynamic_shared_bytes=shared_bytes)
    kernel = Kernel(name=name, stream=1, footprint=footprint, character="attention")
    assert (carveout_bytes(H200.gpu, kernel) == H200.gpu.shared_bytes_per_sm) is asks_for_most


def test_a_gpu_at_rest_forgets_carveouts() -> None:
    kernel = msgspec.structs.replace(spinning(2, 100 << 10, waves=1), stream=2)
    start_us, end_us = spans(simulate(H200, kernel, collective("all_to_all")))[1]
    assert end_us - start_us == pytest.approx(LONE_US["all_to_all"], abs=0.01)


@pytest.mark.parametrize("shared_kb", [0, 4, 16])
def test_ctas_that_waited_fill_sms_and_the_others_join_them(shared_kb: int) -> None:
    """Measured: 64 CTAs of which 3 fit on an SM were on 23 to 32 SMs, beside 2.6 to 2.9 instead of 4 CTAs of 48 KiB."""
    footprint = Footprint(num_ctas=64, threads_per_cta=256, registers_per_thread=72, dynamic_shared_bytes=shared_kb << 10)
    late = Kernel(name="late", stream=2, footprint=footprint, cta_us=400.0, issued_us=50.0)
    kernel = spinning(4, 48 << 10, waves=40)
    alone, beside = (
        spans(simulate(H200, *each, plan=plan_of({1: GREATEST}) if len(each) > 1 else LEAVE_IT))[0][1]
        for each in ((kernel,), (kernel, late))
    )
    lost = 400 * 22 * (4 - 2.75) / (132 * 4)  # us, if 64 CTAs take 22 SMs and a quarter to a half of the room there
    assert beside - alone == pytest.approx(lost, abs=20)
