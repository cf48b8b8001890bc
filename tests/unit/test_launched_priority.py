"""Priorities that a job asks for by itself, from the trace to the planner."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from counterpoint.controls import Priority
from counterpoint.plan import LEAVE_IT
from counterpoint.planner.candidates import propose_on_sms
from counterpoint.planner.contention import find_contention
from counterpoint.sim import Simulator
from counterpoint.step import Collective, Kernel
from counterpoint.traces.traced_step import read_trace
from helpers.toy_steps import H200, all_reduce, kernel, plan_of, step_of
from helpers.trace_builder import MATMUL, TraceBuilder


@pytest.mark.parametrize(
    ("name", "traced", "found"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", None, 0),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", -5, -5),
        ("void deep_ep::internode::dispatch<false, 8, false, 8>(int4*)", None, -3),
        ("void deep_ep::internode::dispatch<false, 8, false, 8>(int4*)", 0, 0),
    ],
)
def test_a_collectives_priority_is_as_traced_or_as_its_library_asks(
    name: str, traced: int | None, found: int, tmp_path: Path
) -> None:
    trace = TraceBuilder()
    trace.step(0, 1000)
    trace.kernel(MATMUL, 10, 50, host=1)
    trace.collective(20, 50, name=name, host=2, args={} if traced is None else {"priority": traced})
    matmul, collective = read_trace(trace.write(tmp_path)).step.operations
    assert isinstance(matmul, Kernel)
    assert isinstance(collective, Collective)
    assert (matmul.priority, collective.priority) == (0, found)


@pytest.mark.parametrize("asked", [-5, -100])
def test_a_job_that_asks_for_priority_runs_as_under_a_plan_with_it_and_is_not_told_to(asked: int) -> None:
    waiting = step_of(kernel(50_000, 50.0), replace(all_reduce(300.0, stream=2), issued_us=60.0))
    prior = replace(
        waiting,
        operations=tuple(
            replace(each, priority=asked if index == 1 else 0) for index, each in enumerate(waiting.operations)
        ),
    )
    plain, asks = (Simulator().run(each, H200, LEAVE_IT) for each in (waiting, prior))
    assert Simulator().run(waiting, H200, plan_of({1: Priority(priority=-5)})).intervals == asks.intervals != plain.intervals
    told = propose_on_sms(waiting, H200, find_contention(waiting, plain, LEAVE_IT))
    assert any(each.family == "priority" for each in told.candidates)
    told = propose_on_sms(prior, H200, find_contention(prior, asks, LEAVE_IT))
    assert not any(each.family == "priority" for each in told.candidates)
