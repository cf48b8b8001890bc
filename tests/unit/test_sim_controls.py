"""What a plan's controls do in the simulator, and what is refused: one line that says why and what to do."""

import msgspec
import pytest

from counterpoint.controls import (
    CommunicationCtas,
    Control,
    HeadStart,
    LightKernel,
    OverlapMatmul,
    OwnStream,
    Priority,
    ResidencyCap,
    Transport,
)
from counterpoint.errors import CounterpointError, MachineError, PlanError, StepError
from counterpoint.machine import load_machine
from counterpoint.plan import LEAVE_IT, Directive, Match, Plan
from counterpoint.sim import Simulator
from counterpoint.step import Collective, Copy, Footprint, Kernel
from helpers.toy_steps import (
    GREATEST,
    H200,
    WHOLE_SM_BYTES,
    all_reduce,
    copy,
    kernel,
    persistent_kernel,
    plan_of,
    simulate,
    spans,
    step_of,
)

# What is refused


def refused(error: type[CounterpointError], *operations: Kernel | Collective | Copy, plan: Plan = LEAVE_IT) -> str:
    """The message, which is one line."""
    with pytest.raises(error) as caught:
        simulate(H200, *operations, plan=plan)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


@pytest.mark.parametrize(
    ("footprint", "limiter"),
    [
        (Footprint(num_ctas=1, threads_per_cta=2048, registers_per_thread=32), "threads_per_cta"),
        (Footprint(num_ctas=1, threads_per_cta=1024, registers_per_thread=128), "registers"),
        (Footprint(num_ctas=1, threads_per_cta=32, registers_per_thread=32, dynamic_shared_bytes=232_449), "shared_memory"),
    ],
)
def test_a_launch_that_does_not_fit_is_refused(footprint: Footprint, limiter: str) -> None:
    message = refused(StepError, Kernel(name="too large", stream=1, footprint=footprint, cta_us=1.0))
    described = Kernel(name="too large", stream=1, footprint=footprint, character="matmul", flops=1e9, hbm_bytes=1e6)
    with pytest.raises(StepError) as caught:
        Simulator().lone_times_us(step_of(described), H200)
    assert str(caught.value) == message
    with pytest.raises(StepError) as caught:
        Simulator().least_busy_us(step_of(described), H200, [1.0])
    assert str(caught.value) == message
    assert "'too large'" in message
    assert limiter in message


def test_a_launch_of_less_than_whole_clusters_is_refused() -> None:
    assert "clusters of 2" in refused(StepError, kernel(7, 1.0, cluster=2))


def test_a_cluster_larger_than_any_gpc_is_refused() -> None:
    refused(StepError, kernel(32, 1.0, shared_bytes=WHOLE_SM_BYTES, cluster=32))


@pytest.mark.parametrize(
    ("control", "operation"),
    [
        (HeadStart(hold_us=5.0), all_reduce(10.0)),
        (ResidencyCap(ctas_per_sm=1, dynamic_shared_bytes=115_840), all_reduce(10.0)),
        (CommunicationCtas(max_ctas=8), kernel(1, 1.0)),
        (Transport(transport="copy_engine"), kernel(1, 1.0)),
        (LightKernel(num_ctas=64), kernel(1, 1.0)),
        (OverlapMatmul(), all_reduce(10.0)),
        (OverlapMatmul(), kernel(1, 1.0)),
        (OwnStream(), kernel(1, 1.0)),
        (GREATEST, copy(10.0, stream=1)),
        (HeadStart(hold_us=5.0), copy(10.0, stream=1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_control_that_cannot_apply_is_refused(control: Control, operation: Kernel | Collective | Copy) -> None:
    refused(PlanError, operation, plan=plan_of({0: control}))


def test_copies_do_not_reduce_to_one_rank() -> None:
    collective = Collective(name="reduce", stream=1, collective="reduce", num_bytes=1 << 20, group_size=2)
    assert "cannot do operation 0 ('reduce')" in refused(
        PlanError, collective, plan=plan_of({0: Transport(transport="copy_engine")})
    )


def test_a_cap_of_more_bytes_than_a_cta_may_have_is_refused() -> None:
    cap = ResidencyCap(ctas_per_sm=1, dynamic_shared_bytes=232_449)
    assert "232,448" in refused(PlanError, kernel(1, 1.0), plan=plan_of({0: cap}))


def test_a_plan_for_another_step_or_machine_is_refused() -> None:
    other = step_of(kernel(2, 1.0))
    refused(PlanError, kernel(1, 1.0), plan=Plan(step_name="other", step_fingerprint=other.fingerprint()))
    assert "h100" in refused(PlanError, kernel(1, 1.0), plan=Plan(machine="h100"))


def test_a_directive_that_matches_nothing_is_refused() -> None:
    directive = Directive(match=Match(name="gemm*"), controls=(GREATEST,), reason="test")
    refused(PlanError, kernel(1, 1.0), plan=Plan(directives=(directive,)))


def test_a_priority_that_the_driver_does_not_have_is_refused() -> None:
    assert "-5" in refused(PlanError, kernel(1, 1.0), plan=plan_of({0: Priority(priority=-6)}))


def test_a_priority_that_the_driver_ignores_and_a_head_start_on_amd_are_refused_and_the_least_priority_is_not() -> None:
    mi250x = load_machine("mi250x")
    operation = Kernel(
        name="wave", stream=1, footprint=Footprint(num_ctas=1, threads_per_cta=64, registers_per_thread=16), cta_us=1.0
    )
    with pytest.raises(PlanError, match="ignores stream priorities"):
        simulate(mi250x, operation, plan=plan_of({0: Priority(priority=-1)}))
    with pytest.raises(PlanError, match="mi250x has AMD GPUs, so a head start has no effect"):
        simulate(mi250x, operation, plan=plan_of({0: HeadStart(hold_us=5)}))
    assert spans(simulate(mi250x, operation, plan=plan_of({0: Priority(priority=0)}))) == [(0, 1)]


def test_a_library_without_a_known_footprint_is_refused() -> None:
    collective = Collective(
        name="sum", stream=1, collective="all_reduce", num_bytes=1 << 20, group_size=2, library="unheard-of"
    )
    assert "unheard-of" in refused(MachineError, collective)


# Communication CTAs


@pytest.mark.parametrize(("max_ctas", "num_ctas"), [(24, 24), (10, 10), (7, 7), (64, 24)])
def test_fewer_communication_ctas_leave_more_sms_to_computation(max_ctas: int, num_ctas: int) -> None:
    plan = plan_of({0: CommunicationCtas(max_ctas=max_ctas)})
    found = spans(simulate(H200, all_reduce(1000.0), persistent_kernel(shares_work=True), plan=plan))
    assert found[1] == (0, pytest.approx(100 * 132 / (132 - num_ctas), abs=1e-3))


@pytest.mark.parametrize(
    ("size_mib", "usual_us", "max_ctas", "measured_us"),
    [
        (256, 892.0, 16, 1015.0),
        (256, 892.0, 8, 1663.0),
        (256, 892.0, 4, 3235.0),
        (64, 249.0, 16, 275.0),
        (64, 249.0, 8, 429.0),
        (64, 249.0, 4, 821.0),
    ],
)
def test_fewer_communication_ctas_take_longer_as_measured(
    size_mib: int, usual_us: float, max_ctas: int, measured_us: float
) -> None:
    """All-reduces on 2 H200s, 2026-11-21 (docs/log.md); `usual_us` with the usual 24 CTAs."""
    collective = msgspec.structs.replace(all_reduce(usual_us), num_bytes=size_mib << 20)
    found = spans(simulate(H200, collective, plan=plan_of({0: CommunicationCtas(max_ctas=max_ctas)})))
    assert found[0][1] == pytest.approx(measured_us, rel=0.06)


def test_fewer_communication_ctas_do_not_lengthen_the_wait_for_other_ranks() -> None:
    without = all_reduce(249.0)
    waiting = msgspec.structs.replace(without, peer_wait_us=500.0)
    plan = plan_of({0: CommunicationCtas(max_ctas=4)})
    ends = [spans(simulate(H200, collective, plan=plan))[0][1] for collective in (without, waiting)]
    assert ends[1] - ends[0] == pytest.approx(500, rel=0.001)
