"""Which CTA runs when, on steps worked out by hand: the rules that were measured on H200s, one behavior at a time."""

import msgspec
import pytest

from counterpoint.controls import HeadStart, Priority, ResidencyCap, Transport
from counterpoint.plan import LEAVE_IT
from counterpoint.sim import Simulator
from counterpoint.sim.sm import SmArray
from counterpoint.sim.task import SmTask, SmWork
from counterpoint.step import Collective, Dependency, Footprint, Kernel, Step
from helpers.toy_steps import (
    COLLECTIVE_LAUNCH_US,
    DEPENDENCY_LATENCY_US,
    GREATEST,
    H200,
    HALF_SM_BYTES,
    WHOLE_SM_BYTES,
    all_reduce,
    copy,
    kernel,
    persistent_kernel,
    plan_of,
    simulate,
    spans,
    step_of,
    toy,
)

# Placing and refilling


def test_a_grid_runs_in_waves_of_what_fits() -> None:
    # 2 CTAs on each of 4 SMs: 20 CTAs are two waves of 8 and one of 4.
    timeline = simulate(toy(2, 2), kernel(20, 10.0, shared_bytes=HALF_SM_BYTES))
    assert spans(timeline) == [(0, 30)]


def test_at_equal_priority_a_later_kernel_waits_until_the_earlier_one_placed_all_its_ctas() -> None:
    # The first kernel runs in three waves and leaves 8 KiB of every SM free: the second would fit there at once.
    first = kernel(12, 100.0, shared_bytes=WHOLE_SM_BYTES - 8192)
    one_thread = kernel(1, 5.0, stream=2)
    assert spans(simulate(toy(2, 2), first, one_thread)) == [(0, 300), (200, 205)]


def test_the_same_kernel_starts_at_once_when_it_is_issued_first() -> None:
    first = kernel(12, 100.0, shared_bytes=WHOLE_SM_BYTES - 8192)
    assert spans(simulate(toy(2, 2), kernel(1, 5.0, stream=2), first)) == [(0, 5), (0, 300)]


def test_a_greater_priority_takes_free_room_at_once() -> None:
    first = kernel(12, 100.0, shared_bytes=WHOLE_SM_BYTES - 8192)
    one_thread = kernel(1, 5.0, stream=2, issued_us=10.0)
    assert spans(simulate(toy(2, 2), first, one_thread, plan=plan_of({1: GREATEST}))) == [(0, 300), (10, 15)]


def test_a_greater_priority_waits_for_a_cta_to_retire_and_never_preempts() -> None:
    first = kernel(24, 100.0, shared_bytes=HALF_SM_BYTES)
    short = kernel(1, 5.0, stream=2, shared_bytes=HALF_SM_BYTES, issued_us=10.0)
    at_equal = spans(simulate(toy(2, 2), first, short))
    at_greatest = spans(simulate(toy(2, 2), first, short, plan=plan_of({1: GREATEST})))
    assert at_equal == [(0, 300), (300, 305)]
    # It takes one of 8 slots at 100; the last of the 24 CTAs goes where it was, at 105, and again at 205.
    assert at_greatest == [(0, 305), (100, 105)]


@pytest.mark.parametrize(
    ("priority", "expected"),
    [
        # Priority stops the refill at 70, though a CTA of the second kernel would fit: the SM is drained until 100.
        (-5, [(0, 100), (0, 290), (100, 150)]),
        # At equal priority refills go on: at 70, 100 and 140. The third kernel starts when the last of them ended.
        (0, [(0, 100), (0, 210), (210, 260)]),
    ],
)
def test_priority_stops_refill_until_its_own_kernel_fits(priority: int, expected: list[tuple[float, float]]) -> None:
    operations = (
        kernel(1, 100.0, stream=1, shared_bytes=HALF_SM_BYTES),
        kernel(4, 70.0, stream=2, shared_bytes=HALF_SM_BYTES),
        kernel(1, 50.0, stream=3, shared_bytes=WHOLE_SM_BYTES, issued_us=10.0),
    )
    plan = plan_of({2: Priority(priority=priority)})
    assert spans(simulate(toy(1), *operations, plan=plan)) == expected


def test_the_greater_of_two_priorities_goes_first_whatever_the_order_of_issue() -> None:
    operations = [
        kernel(2, 100.0, stream=stream, shared_bytes=WHOLE_SM_BYTES, issued_us=float(stream)) for stream in range(3)
    ]
    plan = plan_of({1: Priority(priority=-1), 2: Priority(priority=-2)})
    # One SM: the first kernel's first CTA runs; then both CTAs of the last kernel, both of the middle one, one of the first.
    assert spans(simulate(toy(1), *operations, plan=plan)) == [(0, 600), (300, 500), (100, 300)]


# Shared memory and its carveout


def test_ctas_that_find_room_go_on_although_nothing_starts_or_ends_then() -> None:
    # An SM has room for four CTAs of the first kernel, or for one of the second and one of the first. The second is placed
    # whole when its last CTA begins, at 120, and only then may the first one's fifth CTA take the room beside it.
    quarter, most = 57_344, 174_080  # 1 KiB is reserved for each CTA
    long = kernel(5, 100.0, shared_bytes=quarter)
    urgent = kernel(3, 10.0, stream=2, shared_bytes=most, issued_us=10.0)
    assert spans(simulate(toy(1), long, urgent, plan=plan_of({1: GREATEST}))) == [(0, 220), (100, 130)]


@pytest.mark.parametrize(("carveout_percent", "collective_start"), [(100, 10.0), (-1, 100.0)])
def test_a_cap_makes_room_only_with_the_carveout_to_match(carveout_percent: int, collective_start: float) -> None:
    computation = Kernel(
        name="spin",
        stream=1,
        footprint=Footprint(num_ctas=8 * 132, threads_per_cta=256, registers_per_thread=10),
        cta_us=100.0,
    )
    plan = plan_of(
        {
            0: ResidencyCap(ctas_per_sm=1, dynamic_shared_bytes=115_840, carveout_percent=carveout_percent),
            1: GREATEST,
        }
    )
    # The capped CTA takes 116,864 bytes with its reserve; of the 135,168 that the driver would set, 18,304 are left.
    found = spans(simulate(H200, computation, all_reduce(50.0, issued_us=10.0), plan=plan))
    # Beside the largest carveout it takes 1.06 times as long (measured, below).
    lasts = 50 * (1.06 if carveout_percent == 100 else 1)
    assert found[1] == (collective_start, pytest.approx(collective_start + lasts, abs=2.5))
    assert found[0][1] == pytest.approx(800, abs=101)


def test_a_cap_beside_which_the_collective_fits_costs_the_kernel_nothing() -> None:
    computation = Kernel(
        name="spin",
        stream=1,
        footprint=Footprint(num_ctas=4 * 132, threads_per_cta=256, registers_per_thread=10, dynamic_shared_bytes=115_840),
        cta_us=100.0,
    )
    raised = msgspec.structs.replace(
        computation, footprint=msgspec.structs.replace(computation.footprint, carveout_percent=100)
    )
    with_carveout = spans(simulate(H200, raised, all_reduce(50.0, issued_us=10.0), plan=plan_of({1: GREATEST})))
    without = spans(simulate(H200, computation, all_reduce(50.0, issued_us=10.0), plan=plan_of({1: GREATEST})))
    assert with_carveout == [(0, pytest.approx(400, abs=0.01)), (10, pytest.approx(63, abs=2.5))]
    # On 24 SMs the second CTA starts 50 us late, and so does each after it.
    assert without == [(0, 450), (100, 150)]


def test_an_empty_sm_takes_the_carveout_of_the_next_kernel() -> None:
    small = Kernel(
        name="no shared memory",
        stream=1,
        footprint=Footprint(num_ctas=2, threads_per_cta=32, registers_per_thread=16),
        cta_us=100.0,
    )
    large = kernel(2, 10.0, stream=2, shared_bytes=HALF_SM_BYTES, issued_us=10.0)
    # The driver sets the 8 KiB that the first kernel asks for; until its CTAs end, the second one's bytes are not there.
    assert spans(simulate(toy(2), small, large)) == [(0, 100), (100, 110)]


# Placement


def test_a_cluster_waits_for_all_its_ctas_in_one_gpc() -> None:
    # The first kernel's two CTAs go to the two emptiest GPCs, one SM in each: two SMs are left, not in one GPC.
    occupant = kernel(2, 100.0, shared_bytes=WHOLE_SM_BYTES)
    machine = toy(2, 2)
    alone = spans(simulate(machine, occupant, kernel(2, 10.0, stream=2, shared_bytes=WHOLE_SM_BYTES)))
    clustered = spans(simulate(machine, occupant, kernel(2, 10.0, stream=2, shared_bytes=WHOLE_SM_BYTES, cluster=2)))
    assert alone == [(0, 100), (0, 10)]
    assert clustered == [(0, 100), (100, 110)]


def test_a_cluster_finds_room_where_one_gpc_has_it() -> None:
    machine = toy(2, 3)
    occupant = kernel(2, 100.0, shared_bytes=WHOLE_SM_BYTES)
    clustered = kernel(2, 10.0, stream=2, shared_bytes=WHOLE_SM_BYTES, cluster=2)
    assert spans(simulate(machine, occupant, clustered)) == [(0, 100), (0, 10)]


def test_an_odd_sm_of_a_gpc_is_of_no_use_to_clusters_of_two() -> None:
    # GPCs of 3 SMs hold one such cluster each: six clusters need three waves, where twelve single CTAs need two.
    assert spans(simulate(toy(3, 3), kernel(12, 10.0, shared_bytes=WHOLE_SM_BYTES, cluster=2))) == [(0, 30)]
    assert spans(simulate(toy(3, 3), kernel(12, 10.0, shared_bytes=WHOLE_SM_BYTES))) == [(0, 20)]


def residents(sms: SmArray) -> list[tuple[int, tuple[int, ...], dict[int, int]]]:
    """Of each group: how many SMs, in which GPCs, and how many CTAs of each operation on each of them."""
    found = []
    for group in sms.groups:
        counts: dict[int, int] = {}
        for cohort in group.cohorts:
            counts[cohort.task.index] = counts.get(cohort.task.index, 0) + cohort.count
        found.append((group.num_sms(), tuple(group.sms), counts))
    return sorted(found, key=repr)


def task(index: int, num_ctas: int, shared_bytes: int = 0) -> SmTask:
    footprint = kernel(num_ctas, 1.0, shared_bytes=shared_bytes).footprint
    return SmTask(
        index=index,
        footprint=footprint,
        priority=0,
        work=SmWork(cta_ps=1.0),
        carveout_bytes=H200.gpu.shared_bytes_per_sm,
        num_unplaced=num_ctas,
    )


def test_ctas_go_to_the_sms_with_most_room() -> None:
    sms = SmArray(toy(2, 2).gpu)
    sms.place(task(0, 3, HALF_SM_BYTES))
    sms.place(task(1, 1, WHOLE_SM_BYTES))
    sms.place(task(2, 3, HALF_SM_BYTES))
    sms.merge()
    # The kernel that needs a whole SM finds the one that is empty; the last one fills the three half-full ones.
    assert sorted(str(counts) for number, _, counts in residents(sms) for _ in range(number)) == sorted(
        ["{0: 1, 2: 1}"] * 3 + ["{1: 1}"]
    )


def test_a_grid_spreads_evenly_and_ties_go_to_the_first_gpc() -> None:
    sms = SmArray(toy(2, 2).gpu)
    sms.place(task(0, 5))
    sms.merge()
    assert residents(sms) == [(1, (1, 0), {0: 2}), (3, (1, 2), {0: 1})]


def test_no_sm_gets_a_second_cta_while_another_sm_is_empty() -> None:
    # GPCs of 18 SMs have more free slots than those of 16, but what counts is the room on each SM.
    sms = SmArray(H200.gpu)
    sms.place(task(0, 129, HALF_SM_BYTES))
    sms.merge()
    assert sorted((number, counts) for number, _, counts in residents(sms) if counts) == [(129, {0: 1})]


def test_clusters_spread_over_gpcs_by_their_number_of_sms() -> None:
    sms = SmArray(toy(2, 4, 6).gpu)
    clustered = kernel(6, 1.0, shared_bytes=HALF_SM_BYTES, cluster=2).footprint
    six = task(0, 6, HALF_SM_BYTES)
    six.footprint = clustered
    sms.place(six)
    sms.merge()
    assert residents(sms) == [(6, (0, 2, 4), {0: 1}), (6, (2, 2, 2), {})]


def test_a_ctas_place_does_not_depend_on_how_often_it_is_asked() -> None:
    first, second = SmArray(H200.gpu), SmArray(H200.gpu)
    for sms in (first, second):
        for index in range(4):
            sms.place(task(index, 100 + index, 20_000 * index))
            sms.merge()
    assert residents(first) == residents(second)


# Kernels that share work, and those that do not


def test_displaced_ctas_of_a_static_kernel_are_a_second_wave() -> None:
    # The collective holds 24 SMs to 300 us; 108 CTAs run first, the other 24 after them.
    found = spans(simulate(H200, all_reduce(300.0), persistent_kernel(shares_work=False)))
    assert found == [(0, 300), (0, 200)]


def test_a_work_sharing_kernel_loses_only_its_share_of_sms() -> None:
    found = spans(simulate(H200, all_reduce(300.0), persistent_kernel(shares_work=True)))
    assert found == [(0, 300), (0, round(100 * 132 / 108, 3))]


def test_a_work_sharing_kernel_takes_the_sms_that_become_free() -> None:
    # 132 CTAs of 100 us are 13,200 of work; 54 us on 108 SMs leave 7,368, which 132 SMs do in 55.818 us.
    found = spans(simulate(H200, all_reduce(54.0), persistent_kernel(shares_work=True)))
    assert found == [(0, 54), (0, round(54 + (13_200 - 54 * 108) / 132, 3))]


def test_ctas_that_find_no_sm_before_the_shared_work_ends_never_run() -> None:
    follower = kernel(1, 5.0, stream=1)
    found = spans(simulate(H200, all_reduce(300.0), persistent_kernel(shares_work=True), follower))
    assert found[2] == (found[1][1], found[1][1] + 5)


# Head start


def racing_step() -> tuple[Kernel, Collective, Kernel]:
    first, second = persistent_kernel(shares_work=True), persistent_kernel(shares_work=True)
    return first, all_reduce(300.0, after=0), second


def test_without_a_head_start_the_next_kernel_takes_every_sm_first() -> None:
    found = spans(simulate(H200, *racing_step()))
    # The kernel follows at once on its stream, the collective after the latency of a dependency; then no SM is free.
    assert found == [(0, 100), (200, 500), (100, 200)]


def test_a_head_start_lets_the_collective_be_placed_first() -> None:
    found = spans(simulate(H200, *racing_step(), plan=plan_of({2: HeadStart(hold_us=7.0)})))
    late_us = DEPENDENCY_LATENCY_US + COLLECTIVE_LAUNCH_US
    assert found[1] == (100 + late_us, 400 + late_us)
    assert found[2] == (107, round(107 + 100 * 132 / 108, 3))


def test_a_captured_step_begins_with_its_kernel_and_not_with_its_collective() -> None:
    operations = (all_reduce(300.0), persistent_kernel(shares_work=True))
    described, captured = (Step(name="start", num_ranks=4, operations=operations, device_name=name) for name in (None, "H"))
    assert [spans(Simulator().run(each, H200, LEAVE_IT))[0][0] for each in (described, captured)] == [0, 100]


def test_a_head_start_shorter_than_the_collectives_latency_is_lost_time() -> None:
    found = spans(simulate(H200, *racing_step(), plan=plan_of({2: HeadStart(hold_us=2.0)})))
    assert found == [(0, 100), (202, 502), (102, 202)]


# Copy engines


def test_copies_are_served_first_come_first_served() -> None:
    # Two engines; the copies become ready at 3, 2, 1 and 0 us, each on its own stream.
    copies = [copy(10.0, stream=stream, issued_us=float(3 - stream)) for stream in range(4)]
    assert spans(simulate(toy(1, num_copy_engines=2), *copies)) == [(11, 21), (10, 20), (1, 11), (0, 10)]


@pytest.mark.parametrize(("num_engines", "end"), [(1, 60.0), (2, 30.0), (3, 20.0), (6, 10.0), (8, 10.0)])
def test_as_many_copies_run_at_once_as_there_are_engines(num_engines: int, end: float) -> None:
    copies = [copy(10.0, stream=stream) for stream in range(6)]
    timeline = simulate(toy(1, num_copy_engines=num_engines), *copies)
    assert max(finish for _, finish in spans(timeline)) == end


def test_a_copy_takes_no_sm_and_needs_none() -> None:
    full = kernel(8, 100.0, shared_bytes=WHOLE_SM_BYTES)
    assert spans(simulate(toy(2, 2), full, copy(10.0, stream=2))) == [(0, 200), (0, 10)]


def test_a_collective_by_copy_engines_needs_no_sm_either() -> None:
    gather = Collective(name="gather", stream=2, collective="all_gather", num_bytes=64 << 20, group_size=2)
    plan = plan_of({1: Transport(transport="copy_engine")})
    by_copy_engine = spans(simulate(H200, persistent_kernel(shares_work=False), gather, plan=plan))
    by_sms = spans(simulate(H200, persistent_kernel(shares_work=False), gather))
    assert by_copy_engine[0] == (0, 100)
    assert by_copy_engine[1][0] == 0
    assert by_sms[1][0] == 100
    # 32 MiB at 0.8 of 450 GB/s, and 6 us before they start.
    assert by_copy_engine[1][1] == pytest.approx(6 + (32 << 20) / 360e3, rel=1e-3)


# Streams, dependencies and the host


def test_a_stream_keeps_its_order_with_the_usual_gap() -> None:
    step = msgspec.structs.replace(step_of(kernel(1, 10.0), kernel(1, 10.0)), launch_gap_us=1.25)
    assert spans(Simulator().run(step, toy(1), LEAVE_IT)) == [(0, 10), (11.25, 21.25)]


@pytest.mark.parametrize(("device_name", "gap_us"), [(None, 1.25), ("NVIDIA H200", DEPENDENCY_LATENCY_US)])
def test_a_collective_of_a_job_follows_another_one_later_than_a_kernel_would(device_name: str | None, gap_us: float) -> None:
    step = step_of(all_reduce(10.0), all_reduce(10.0))
    step = msgspec.structs.replace(step, launch_gap_us=1.25, device_name=device_name)
    (_, end_us), (start_us, _) = spans(Simulator().run(step, H200, LEAVE_IT))
    assert start_us - end_us == pytest.approx(gap_us)


def test_an_operation_does_not_start_before_the_host_issued_it() -> None:
    assert spans(simulate(toy(1), kernel(1, 10.0, issued_us=7.5))) == [(7.5, 17.5)]


def test_what_waits_for_another_streams_event_is_not_before_the_next_on_the_same_stream() -> None:
    first, same = kernel(8, 100.0, shared_bytes=HALF_SM_BYTES), kernel(24, 100.0, shared_bytes=HALF_SM_BYTES)
    other = msgspec.structs.replace(same, stream=2, waits_for=(Dependency(operation=0),))
    step = msgspec.structs.replace(step_of(first, same, other), launch_gap_us=DEPENDENCY_LATENCY_US + 1)
    _, (start_us, _), (start_of_other_us, _) = spans(Simulator().run(step, toy(2, 2), LEAVE_IT))
    assert start_us == 100 + DEPENDENCY_LATENCY_US + 1
    assert start_of_other_us == start_us + 300, "a tie is the earlier issued kernel's"
