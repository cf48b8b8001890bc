"""Kernels whose CTAs differ in length: the cost does not grow with their number, and the short cut is near the exact way."""

import random
import time

import msgspec
import pytest

from counterpoint.controls import Priority
from counterpoint.errors import StepError
from counterpoint.plan import LEAVE_IT
from counterpoint.sim import Simulator, engine, sm
from counterpoint.sim.task import Cohort, SmTask, SmWork
from counterpoint.step import MAX_CTAS, Collective, Footprint, Kernel, Step
from counterpoint.timeline import Timeline
from counterpoint.value import cyclic_gc_paused
from helpers.toy_steps import H200, plan_of

SMALL = msgspec.structs.replace(H200, gpu=msgspec.structs.replace(H200.gpu, num_sms=16, sms_per_gpc=(8, 8)))


def elementwise(num_ctas: int) -> Step:
    footprint = Footprint(num_ctas=num_ctas, threads_per_cta=256, registers_per_thread=64)
    kernel = Kernel(name="add", stream=0, footprint=footprint, lone_us=1000.0, cta_time_spread=0.1)
    collective = Collective(name="gather", stream=1, collective="all_gather", num_bytes=8 << 20, group_size=4)
    return Step(name="elementwise", num_ranks=4, operations=(kernel, collective))


@pytest.mark.parametrize("num_ctas", [2640, 26_400, 264_000, 26_400_000])
def test_time_does_not_grow_with_the_number_of_ctas(num_ctas: int) -> None:
    begin = time.process_time()
    with cyclic_gc_paused():  # a collection of what other tests left takes half a second
        timeline = Simulator().run(elementwise(num_ctas), H200, LEAVE_IT)
    assert time.process_time() - begin < 0.2, "seconds; 0.01 to 0.03 as a rule, where following each CTA took minutes"
    kernel, collective = sorted(timeline.intervals, key=lambda interval: interval.operation)
    assert kernel.end_us == pytest.approx(1000, rel=0.03)
    lone_us = Simulator().lone_times_us(elementwise(num_ctas), H200)[1]
    assert collective.end_us == pytest.approx(kernel.end_us + lone_us, abs=20)


@pytest.mark.parametrize("spread", [0.05, 0.3, 1.0])
def test_time_does_not_grow_with_the_ctas_on_an_sm(spread: float) -> None:
    """32 CTAs on each of 132 SMs would be 4,224 lengths to follow."""
    footprint = Footprint(num_ctas=42_240, threads_per_cta=64, registers_per_thread=16)
    kernel = Kernel(name="small", stream=0, footprint=footprint, lone_us=1000.0, cta_time_spread=spread)
    begin = time.process_time()
    with cyclic_gc_paused():
        (end,) = ends(Simulator().run(Step(name="small", num_ranks=1, operations=(kernel,)), H200, LEAVE_IT))
    assert time.process_time() - begin < 0.2, "seconds; 0.01 to 0.03 as a rule"
    assert end == pytest.approx(1000, rel=0.04)


def test_clusters_of_many_uneven_ctas_come_to_an_end() -> None:
    """Slots take CTAs one by one, and at the end a single CTA of a cluster of four may be left."""
    footprint = Footprint(num_ctas=400_000, threads_per_cta=128, registers_per_thread=32, ctas_per_cluster=4)
    kernel = Kernel(name="uneven", stream=0, footprint=footprint, character="matmul", lone_us=100.0, cta_time_spread=0.3)
    (end,) = ends(Simulator().run(Step(name="clusters", num_ranks=1, operations=(kernel,)), H200, LEAVE_IT))
    assert end == pytest.approx(100, rel=0.03)


def test_the_largest_grid_that_is_taken_comes_to_an_end() -> None:
    for spread in (0.0, 0.1):
        step = elementwise(MAX_CTAS)
        kernel = msgspec.structs.replace(step.operations[0], cta_time_spread=spread)
        ended = ends(
            Simulator().run(msgspec.structs.replace(step, operations=(kernel, *step.operations[1:])), H200, LEAVE_IT)
        )
        assert ended[0] >= MAX_CTAS / (132 * 16) * 1e-3, "no CTA takes less than a nanosecond"


def test_a_larger_grid_is_refused() -> None:
    with pytest.raises(StepError, match="num_ctas of a kernel must be from 1 to 1,125,899,906,842,624; found 9,223,"):
        elementwise(2147483647 * 65535 * 65535)


def ends(timeline: Timeline) -> list[float]:
    return [interval.end_us for interval in sorted(timeline.intervals, key=lambda interval: interval.operation)]


def random_step(chance: random.Random) -> Step:
    """A kernel or two of ten waves and more on the small machine, and a collective beside them."""
    kernels = [
        Kernel(
            name=f"kernel {number}",
            stream=chance.choice([0, 2]),
            footprint=Footprint(
                num_ctas=chance.randint(1280, 2000),
                threads_per_cta=chance.choice([256, 512]),
                registers_per_thread=chance.choice([32, 64]),
            ),
            character=chance.choice(["streaming", "other", "matmul"]),
            cta_time_spread=chance.choice([0.02, 0.1, 0.3, 1.0, 2.0]),
            lone_us=chance.choice([100.0, 1000.0]),
        )
        for number in range(chance.randint(1, 2))
    ]
    collective = Collective(
        name="gather",
        stream=1,
        collective="all_gather",
        num_bytes=chance.choice([1 << 20, 1 << 23, 1 << 26]),
        group_size=4,
        issued_us=chance.choice([0.0, 30.0, 200.0]),
    )
    return Step(name="random", num_ranks=4, operations=(*kernels, collective))


@pytest.mark.parametrize(("most_groups", "most_lengths", "limit"), [(16, 8, 0.02), (4, 3, 0.04)])
@pytest.mark.parametrize("seed", range(12))
def test_the_short_cut_is_near_to_following_each_cta(
    seed: int, most_groups: int, most_lengths: int, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 16 SMs, of which 16 or 4 groups are alike, with up to 8 CTAs each, of which all differ or 3."""
    chance = random.Random(seed)
    step = random_step(chance)
    plan = plan_of({len(step.operations) - 1: Priority(priority=-5)}) if chance.random() < 0.5 else LEAVE_IT
    monkeypatch.setattr(engine, "MAX_FOLLOWED_CTAS", 1 << 60)
    exact = ends(Simulator().run(step, SMALL, plan))
    monkeypatch.undo()
    monkeypatch.setattr(sm, "MOST_GROUPS", most_groups)
    monkeypatch.setattr(sm, "MOST_LENGTHS", most_lengths)
    assert ends(Simulator().run(step, SMALL, plan)) == pytest.approx(exact, abs=limit * max(exact))


def cohort(remaining: float) -> Cohort:
    footprint = Footprint(num_ctas=8, threads_per_cta=128, registers_per_thread=32)
    work = SmWork(cta_ps=1e6, cta_time_spread=0.5)
    return Cohort(SmTask(0, footprint, 0, work, carveout_bytes=0, num_unplaced=8), 1, remaining)


@pytest.mark.parametrize(
    ("done", "taken_back", "left"),
    [
        (0.5, 4, 0.7),  # what ran when they were handed out runs still
        (1.2 + 0.55, 3, 0.55),  # the first of them is half done
        (1.2 + 3 * 1.1, 0, 1.1),  # the last is about to begin
        (1.2 + 4.0, 0, 0.4),
    ],
)
def test_ctas_that_have_not_begun_are_taken_back(done: float, taken_back: int, left: float) -> None:
    slot = cohort(1.2)
    slot.hand(4, 1.1)
    slot.remaining -= done
    assert slot.recall() == taken_back
    assert slot.remaining == pytest.approx(left)
    assert slot.recall() == 0
