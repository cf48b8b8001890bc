"""The clock under the power limit, against what an H200 and an H100 did under load; and how it is fitted."""

import msgspec
import pytest

from counterpoint.controls import CommunicationCtas, Priority
from counterpoint.machine import Machine, load_machine
from counterpoint.measurement.points import Point
from counterpoint.plan import LEAVE_IT
from counterpoint.planner.ideal import scale_of
from counterpoint.sim import Simulator, power, step_run
from counterpoint.sim.calibration import load_calibration
from counterpoint.sim.calibration_fit import Points
from counterpoint.sim.calibration_power import fit_power
from counterpoint.sim.step_run import Spans, StepRun
from counterpoint.step import Collective, Footprint, Kernel, Step
from helpers.toy_steps import H200, plan_of

CUBLAS = Footprint(num_ctas=132, threads_per_cta=384, registers_per_thread=168, dynamic_shared_bytes=188_604)
LIGHT = Footprint(num_ctas=131_072, threads_per_cta=128, registers_per_thread=32)
# cuBLAS bf16 8192^3 in a burst, and PyTorch's elementwise kernel on 512 MiB, in microseconds
BURST_US, STREAMING_US = 1372.0, 254.4
H100 = load_machine("h100")


def matmul(lone_us: float = BURST_US) -> Kernel:
    return Kernel(name="mm", stream=0, footprint=CUBLAS, character="matmul", lone_us=lone_us, is_work_sharing=True)


def streaming() -> Kernel:
    return Kernel(name="mul", stream=0, footprint=LIGHT, character="streaming", lone_us=STREAMING_US)


def step(*operations: Kernel | Collective, **fields: bool) -> Step:
    return Step(name="load", num_ranks=2, operations=operations, **({"is_timed_in_bursts": True} | fields))  # type: ignore[arg-type]


def end_us(found: Step, simulator: Simulator | None = None, machine: Machine = H200) -> float:
    return (simulator or Simulator()).run(found, machine, LEAVE_IT).intervals[-1].end_us


def points_of_load() -> list[Point]:
    """What the H100's own file has of kernels that run on and on."""
    return list(load_calibration(H100).probes["load"].points)


def test_matmuls_that_run_on_take_what_they_took_under_load() -> None:
    # measured: 1,622.7 us each, 1.183 times a burst's (2026-11-23)
    assert end_us(step(*[matmul()] * 10)) / 10 == pytest.approx(1622.7, rel=0.01)


def test_a_kernel_that_the_memory_limits_takes_as_long_as_in_a_burst() -> None:
    assert end_us(step(*[streaming()] * 4)) == pytest.approx(end_us(step(*[streaming()] * 4, is_timed_in_bursts=False)))


@pytest.mark.parametrize(
    ("rows", "burst_us", "limits"),
    [(128, 71.5, (0.98, 1.06)), (512, 175.6, (1.12, 1.22))],  # measured: 1.012 and 1.184 times as long (2026-11-29)
)
def test_a_matmul_that_the_memory_limits_is_not_slowed_by_the_clock(
    rows: int, burst_us: float, limits: tuple[float, float]
) -> None:
    known = msgspec.structs.replace(matmul(burst_us), matmul_sizes=(rows, 8192, 16384))
    found = end_us(step(*[known] * 40)) / 40 / burst_us
    assert limits[0] < found < limits[1]


def described(size: int = 8192) -> Kernel:
    """cuBLAS's matmul of a cube, whose time follows from its size."""
    return msgspec.structs.replace(matmul(), lone_us=None, flops=2.0 * size**3, matmul_sizes=(size, size, size))


def test_times_from_sizes_are_those_of_a_burst_and_the_limit_sets_the_clock() -> None:
    load = step(*[described()] * 10, is_timed_in_bursts=False)
    assert Simulator().lone_times_us(load, H200)[0] == pytest.approx(BURST_US, rel=0.01)
    assert end_us(load) / 10 == pytest.approx(1622.7, rel=0.01), "as measured under load"
    assert scale_of(load, H200).sequential_us == pytest.approx(end_us(load), rel=0.01), "at the clock of the step"


def test_gpus_of_unknown_power_multiply_as_fast_as_in_steps_at_one_clock() -> None:
    b200 = load_machine("b200")
    load = step(*[described()] * 10, is_timed_in_bursts=False)
    lone_us = Simulator().lone_times_us(load, b200)[0]
    assert end_us(load, machine=b200) / 10 == pytest.approx(lone_us, rel=0.01)
    share = 2.0 * 8192**3 / lone_us * 1e6 / b200.matmul_flops_per_s("bf16")
    assert share == pytest.approx(0.72 * 132 / b200.gpu.num_sms, abs=0.01), "132 CTAs"
    assert end_us(step(*[matmul()] * 10), machine=b200) / 10 == pytest.approx(BURST_US, rel=0.01), "not the H200's limit"


def test_pauses_and_light_kernels_leave_matmuls_more_power() -> None:
    alone = end_us(step(*[matmul()] * 4)) / 4
    mixed = (end_us(step(*[matmul(), *[streaming()] * 5] * 4)) / 4) - 5 * STREAMING_US
    assert BURST_US < mixed < alone


def test_lone_times_of_a_job_stay_as_they_are() -> None:
    assert end_us(step(*[matmul()] * 10, is_timed_in_bursts=False)) / 10 == pytest.approx(BURST_US, rel=0.01)


@pytest.mark.parametrize(("number", "longer"), [(40, 1.155), (85, 1.082), (420, 1.016)])
def test_lone_times_that_were_taken_for_longer_than_the_window_are_under_load_already(number: int, longer: float) -> None:
    # measured: 1,372 us each for 42 ms, 1,520 up to 82 ms, then 1,623, which is so much longer than the mean of that many
    assert end_us(step(*[matmul()] * number)) / number == pytest.approx(longer * BURST_US, rel=0.03)


@pytest.mark.parametrize("number", [60, 300])
def test_kernels_beside_each_other_gain_as_much_in_a_long_step_as_in_a_short_one(number: int) -> None:
    def per_pair(count: int, *, is_beside: bool) -> float:
        beside = Collective(
            name="all_gather",
            stream=int(is_beside),
            collective="all_gather",
            num_bytes=1 << 28,
            group_size=2,
            library="nccl",
            lone_us=BURST_US / 2,
        )
        pairs = [each for _ in range(count) for each in (beside, matmul())]
        return max(each.end_us for each in Simulator().run(step(*pairs), H200, LEAVE_IT).intervals) / count

    gains = [per_pair(count, is_beside=True) / per_pair(count, is_beside=False) for count in (8, number)]
    assert gains[0] < 0.9
    assert gains[1] == pytest.approx(gains[0], abs=0.02)


def test_a_gpu_whose_power_nobody_measured_keeps_its_clock() -> None:
    unknown = Simulator(msgspec.structs.replace(load_calibration(H200), power={}))
    assert end_us(step(*[matmul()] * 10), unknown) / 10 == pytest.approx(BURST_US, rel=0.01)


def test_plans_that_take_turns_share_a_clock_between_those_of_each() -> None:
    hot, simulator = step(*[matmul()] * 4), Simulator()
    own = simulator.clock_of_turns(hot, H200, [LEAVE_IT])
    assert own == pytest.approx(1 / 1.183, abs=0.01)
    assert simulator.clock_of_turns(hot, H200, [LEAVE_IT, LEAVE_IT]) == pytest.approx(own)


def test_candidates_start_from_the_clock_of_the_step_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = Collective(name="g", stream=1, collective="all_gather", num_bytes=1 << 30, group_size=2, lone_us=1000.0)
    beside = step(*(matmul(), gather) * 4)
    fewer, prioritized = plan_of({7: CommunicationCtas(max_ctas=8)}), plan_of({7: Priority(priority=-5)})
    simulated: list[float] = []
    original = StepRun._simulated

    def noted(run: StepRun, clock_share: float) -> Spans:
        simulated.append(clock_share)
        return original(run, clock_share)

    monkeypatch.setattr(StepRun, "_simulated", noted)
    simulator = Simulator()
    for chosen, most in ((LEAVE_IT, 2), (LEAVE_IT, 0), (prioritized, 1), (fewer, 2)):
        simulated.clear()
        found = simulator.run(beside, H200, chosen)
        assert len(simulated) <= most, chosen
        assert simulator.run(beside, H200, chosen) == found == Simulator().run(beside, H200, chosen)


def test_a_plan_without_an_effect_gives_the_times_of_no_plan() -> None:
    alone = step(*[matmul()] * 4)
    assert Simulator().run(alone, H200, plan_of({0: Priority(priority=-1)})) == Simulator().run(alone, H200, LEAVE_IT)


def test_a_clock_is_found_with_few_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = Collective(name="g", stream=1, collective="all_gather", num_bytes=1 << 30, group_size=2, lone_us=1000.0)
    simulated: list[float] = []

    def noted(run: StepRun, clock_share: float) -> Spans:
        simulated.append(clock_share)
        return original(run, clock_share)

    original = StepRun._simulated
    for layers in ((matmul(), gather), (matmul(), gather, matmul())):
        beside = step(*layers * 4)
        with monkeypatch.context() as patched:
            patched.setattr(StepRun, "_simulated", noted)
            simulated.clear()
            found_us = end_us(beside)
            assert len(simulated) <= 3
        with monkeypatch.context() as patched:
            patched.setattr(power, "SAME_CLOCK", 1e-6)
            patched.setattr(power, "MOST_ROUNDS", 40)
            patched.setattr(step_run, "CLOSE_CLOCK", 2e-5)
            patched.setattr(step_run, "MOST_SIMULATIONS", 30)
            assert found_us == pytest.approx(end_us(beside), rel=0.002)
        assert found_us > end_us(beside, Simulator(clock_share=1.0))


def test_an_h100_takes_its_own_time_under_load() -> None:
    # measured: 1,395.0 us each in a burst, 1,546.4 without pauses (2026-11-25)
    assert end_us(step(*[matmul(1395.0)] * 10), machine=H100) / 10 == pytest.approx(1546.4, rel=0.01)


def test_figures_of_power_follow_from_points_of_load() -> None:
    found, stored = fit_power(Points(points_of_load()), 700.0), load_calibration(H100).power
    assert {name for name, each in stored.items() if each.status == "measured"} == set(found)
    for name, each in found.items():
        assert stored[name].value == pytest.approx(each.value, rel=1e-3), name
    idle, burst = found["idle_w"].value, found["library_matmul_w"].value
    assert idle + 0.25 * burst == pytest.approx(334.8, rel=0.01)  # watts, measured with pauses three times as long
    assert burst * (1395.0 / 1546.4) ** found["exponent"].value == pytest.approx(700.0 - idle, rel=0.01)


def test_matmuls_that_are_hardly_slowed_down_tell_nothing_of_the_limit() -> None:
    fast = [
        msgspec.structs.replace(each, value=1400.0) if each.at["load"] == "matmul bf16" and each.name == "warm_us" else each
        for each in points_of_load()
    ]
    assert not fit_power(Points(fast), 700.0)


@pytest.mark.parametrize(
    ("left_out", "limit_w"),
    [("pauses", 700.0), ("matmul bf16", 700.0), ("matmul bf16, 25% of the time", 700.0), ("", 1200.0)],
)
def test_a_limit_that_does_not_act_or_was_not_measured_gives_no_figures(left_out: str, limit_w: float) -> None:
    assert not fit_power(Points(each for each in points_of_load() if each.at["load"] != left_out), limit_w)
