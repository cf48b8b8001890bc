"""The checks pass every schedule that is generated, find every kind of fault, and let nothing wrong through."""

import random
from collections.abc import Callable, Iterable

import msgspec
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from counterpoint.errors import ScheduleError
from counterpoint.schedule import Action, CopySchedule, Problem, Region, ScheduleDescription, delivery, make_schedule, split
from counterpoint.schedule.checks import (
    CHECKS,
    buffer_faults,
    check_schedule,
    order_faults,
    port_faults,
    signal_faults,
)
from counterpoint.schedule.delivery import delivery_faults
from helpers.schedules import OPERATIONS, expected, first_pass, given_rows, made, schedules
from helpers.stream_double import DeadlockError, Node

Check = Callable[[CopySchedule], Iterable[str]]


def with_actions(schedule: CopySchedule, actions: Iterable[Action]) -> CopySchedule:
    return msgspec.structs.replace(schedule, actions=tuple(actions))


def changed(schedule: CopySchedule, position: int, **fields: object) -> CopySchedule:
    """The schedule with one action changed."""
    actions = list(schedule.actions)
    actions[position] = msgspec.structs.replace(actions[position], **fields)
    return with_actions(schedule, actions)


def without(schedule: CopySchedule, dropped: int) -> CopySchedule:
    """The schedule without one action; whoever waited for it waits for what it waited for."""
    actions = []
    for number, action in enumerate(schedule.actions):
        inherited = schedule.actions[dropped].after if dropped in action.after else ()
        after = {*action.after, *inherited} - {dropped}
        moved = tuple(sorted(each - (each > dropped) for each in after))
        if number != dropped:
            actions.append(msgspec.structs.replace(action, after=moved))
    return with_actions(schedule, actions)


def positions(schedule: CopySchedule, *kinds: str) -> list[int]:
    return [position for position, action in enumerate(schedule.actions) if action.kind in kinds]


def faults_of(schedule: CopySchedule, check: Check) -> list[str]:
    return list(check(schedule))


def typical(operation: str = "all_gather_matmul", num_ranks: int = 3, **choices: object) -> CopySchedule:
    schedule = made(operation, (num_ranks, 12), ScheduleDescription(**choices), first_pass(operation))
    assert schedule is not None
    return schedule


GROWING = ScheduleDescription(pattern="all_peers", chunks=5, matmul="chunk", chunk_growth=2.0)


# the first of growing chunks has a row of a block of 7, and none of a block of 6
@example(made("matmul_reduce_scatter", (3, 20), GROWING, "forward"))
# a second phase whose copies have a stream of their own must still wait for the call to begin
@example(made("matmul_all_reduce", (2, 1), ScheduleDescription(pattern="ring", num_copy_streams=2), "forward"))
@settings(max_examples=250)
@given(schedule=schedules())
def test_every_generated_schedule_passes_all_checks(schedule: CopySchedule) -> None:
    assert [(name, list(check(schedule))) for name, check in CHECKS] == [(name, []) for name, _ in CHECKS]


@given(schedule=schedules())
def test_a_schedule_is_the_same_after_a_trip_through_json(schedule: CopySchedule) -> None:
    assert msgspec.json.decode(msgspec.json.encode(schedule), type=CopySchedule) == schedule


@given(schedule=schedules(least_ranks=2))
def test_each_rank_receives_as_many_rows_as_its_operator_needs(schedule: CopySchedule) -> None:
    """Counted without looking at which rows: what the other ranks have of a block, or what they add to it."""
    num_ranks, num_rows, operation = schedule.num_ranks, schedule.num_rows, schedule.operation
    lengths = [stop - start for start, stop in split(num_rows, num_ranks)]
    gathers = operation == "all_gather_matmul" or (operation, schedule.direction) == ("matmul_reduce_scatter", "backward")
    for rank, own in enumerate(lengths):
        gathered = num_rows - own
        exchanged = (num_ranks - 1) * own
        needed = {
            "all_gather_matmul": gathered,
            "matmul_reduce_scatter": gathered if gathers else exchanged,
            "matmul_all_reduce": exchanged + gathered,
            "column_parallel_matmul": exchanged + gathered,
            "all_to_all_matmul": exchanged,
        }[operation]
        if schedule.direction == "backward" and operation == "all_gather_matmul":
            needed = gathered + exchanged
        if schedule.direction == "backward" and operation == "all_to_all_matmul":
            needed = exchanged + gathered  # its tokens again, and the gradients of those it sent
        received = [
            action.writes[0].num_rows
            for action in schedule.actions
            if action.kind == "copy" and action.writes[0].rank == rank
        ]
        is_ring_reduction = schedule.description.pattern == "ring" and any(
            action.kind == "add_matmul" for action in schedule.actions
        )
        if is_ring_reduction:  # partial sums pass through: each rank receives every block but the one that starts there
            needed += num_rows - lengths[(rank + 1) % num_ranks] - exchanged
        assert sum(received) == needed


@settings(max_examples=150)
@given(schedule=schedules(least_ranks=2), data=st.data())
def test_a_schedule_without_one_of_its_copies_does_not_deliver(schedule: CopySchedule, data: st.DataObject) -> None:
    copies = positions(schedule, "copy")
    assume(copies)
    mutated = without(schedule, data.draw(st.sampled_from(copies)))
    assert faults_of(mutated, delivery_faults)


@given(schedule=schedules(least_ranks=2), data=st.data())
def test_a_copy_made_twice_crosses_the_link_twice(schedule: CopySchedule, data: st.DataObject) -> None:
    copies = positions(schedule, "copy")
    assume(copies)
    again = schedule.actions[data.draw(st.sampled_from(copies))]
    mutated = with_actions(schedule, [*schedule.actions, again])
    assert any("has already" in fault for fault in faults_of(mutated, delivery_faults))


@settings(max_examples=150)
@given(schedule=schedules(), data=st.data())
def test_a_schedule_without_one_of_its_computations_does_not_deliver(schedule: CopySchedule, data: st.DataObject) -> None:
    computations = positions(schedule, "matmul", "add_matmul", "sum", "weight_gradient")
    dropped = data.draw(st.sampled_from(computations))
    assert faults_of(without(schedule, dropped), delivery_faults)


@given(schedule=schedules(least_ranks=2), data=st.data())
def test_a_copy_of_other_rows_does_not_deliver(schedule: CopySchedule, data: st.DataObject) -> None:
    copies = [
        position
        for position in positions(schedule, "copy")
        if schedule.actions[position].reads[0].stop < schedule.buffer(schedule.actions[position].reads[0].buffer).num_rows
    ]
    assume(copies)
    position = data.draw(st.sampled_from(copies))
    source = schedule.actions[position].reads[0]
    shifted = Region(rank=source.rank, buffer=source.buffer, start=source.start + 1, stop=source.stop + 1)
    assert faults_of(changed(schedule, position, reads=(shifted,)), delivery_faults)


@given(schedule=schedules(), data=st.data())
def test_waiting_for_what_comes_later_is_found(schedule: CopySchedule, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(schedule.actions) - 1))
    later = data.draw(st.integers(position, len(schedule.actions) + 1))
    faults = faults_of(changed(schedule, position, after=(later,)), order_faults)
    assert any(f"waits for action {later}" in fault for fault in faults)


@pytest.mark.parametrize("kind", ["begin", "end"])
def test_a_rank_that_does_not_begin_or_end_is_found(kind: str) -> None:
    schedule = typical()
    mutated = without(schedule, positions(schedule, kind)[0])
    assert faults_of(mutated, order_faults) == [f"the ranks with a '{kind}' are [1, 2], not each of 3 once"]


@given(schedule=schedules(), data=st.data())
def test_rows_outside_of_their_buffer_are_found(schedule: CopySchedule, data: st.DataObject) -> None:
    position = data.draw(st.sampled_from([n for n, action in enumerate(schedule.actions) if action.writes]))
    target = schedule.actions[position].writes[0]
    beyond = schedule.buffer(target.buffer).num_rows
    outside = Region(rank=target.rank, buffer=target.buffer, start=beyond, stop=beyond + 1)
    faults = faults_of(changed(schedule, position, writes=(outside,)), buffer_faults)
    assert any(f"touches rows {beyond} to {beyond + 1} of the {beyond} of" in fault for fault in faults)


@pytest.mark.parametrize("pattern", ["ring", "one_peer", "all_peers"])
def test_a_matmul_that_does_not_wait_for_its_rows_is_found(pattern: str) -> None:
    schedule = typical(pattern=pattern)
    waiting = [position for position in positions(schedule, "matmul") if schedule.actions[position].after]
    assert waiting
    for position in waiting:
        faults = faults_of(changed(schedule, position, after=()), buffer_faults)
        assert any("may not be written yet" in fault for fault in faults)
        assert any("at the same time" in fault for fault in faults)


def test_a_copy_that_does_not_wait_for_the_call_to_begin_is_found() -> None:
    """It may overwrite what the receiver still reads for the call before."""
    schedule = typical()
    first = positions(schedule, "copy")[0]
    moved = changed(schedule, first, after=(), stream="copy 7")
    assert any("at the same time" in fault for fault in faults_of(moved, buffer_faults))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_end_that_waits_for_nobody_is_found(operation: str) -> None:
    schedule = typical(operation)
    end = positions(schedule, "end")[0]
    faults = faults_of(changed(schedule, end, after=()), signal_faults)
    assert any("rank 0 may end before" in fault for fault in faults)


def test_a_signal_from_a_rank_that_may_not_have_begun_is_found() -> None:
    schedule = typical(num_ranks=2)
    first = positions(schedule, "copy")[0]
    moved = changed(schedule, first, after=(), stream="copy 7")
    assert any(fault.endswith("before rank 0 has begun") for fault in faults_of(moved, signal_faults))


def test_a_signal_that_may_come_again_before_it_was_taken_is_found() -> None:
    schedule = typical(num_ranks=2)
    (to_rank_0,) = [n for n in positions(schedule, "copy") if schedule.actions[n].writes[0].rank == 0]
    (matmul,) = [n for n in positions(schedule, "matmul") if to_rank_0 in schedule.actions[n].after]
    (end,) = [n for n in positions(schedule, "end") if schedule.actions[n].rank == 0]
    kept = tuple(before for before in schedule.actions[end].after if before != matmul)
    mutated = changed(changed(schedule, matmul, stream="compute 9"), end, after=kept)
    assert any("again before it has received the last signal" in fault for fault in faults_of(mutated, signal_faults))


def test_all_ranks_that_send_to_one_at_once_are_found() -> None:
    """As when every rank starts with rank 0 instead of its own neighbor."""
    schedule = typical(num_ranks=4)
    first, second = (next(n for n in positions(schedule, "copy") if schedule.actions[n].rank == rank) for rank in (2, 3))
    target = schedule.actions[positions(schedule, "copy")[1]].writes[0]
    crowded = changed(schedule, first, writes=(target,))
    crowded = changed(crowded, second, writes=(target,))
    many_rows = changed(crowded, second, writes=(msgspec.structs.replace(target, start=0, stop=12),))
    assert not faults_of(schedule, port_faults)
    assert any("receives" in fault for fault in faults_of(crowded, port_faults))
    assert faults_of(many_rows, port_faults)


@settings(max_examples=300, deadline=None)
@given(schedule=schedules(least_ranks=2, most_rows=11), data=st.data(), seed=st.integers(0, 1 << 16))
def test_what_passes_the_checks_runs_right_even_when_dependencies_are_left_out(
    schedule: CopySchedule, data: st.DataObject, seed: int
) -> None:
    """The checks against an independent double of streams and flags: no mutation that they pass gives a wrong result."""
    dropped = data.draw(st.sets(st.integers(0, len(schedule.actions) - 1), min_size=1, max_size=3))
    mutated = schedule
    for position in dropped:
        after = schedule.actions[position].after
        kept = data.draw(st.sets(st.sampled_from(after))) if after else ()
        mutated = changed(mutated, position, after=tuple(sorted(kept)))
    is_passed = not any(list(check(mutated)) for _, check in CHECKS)
    is_right = _runs_right(mutated, random.Random(seed))
    assert is_right or not is_passed


def _runs_right(schedule: CopySchedule, chance: random.Random) -> bool:
    """Three calls in a row, in one of the orders that the hardware may choose."""
    node = Node(schedule.num_ranks, is_one_queue=False)
    memories = [node.issue(schedule, given_rows(number)) for number in range(3)]
    try:
        node.run(chance)
    except (DeadlockError, AssertionError):
        return False
    for number, memory in enumerate(memories):
        for rank in range(schedule.num_ranks):
            wanted = expected(schedule, rank, number)
            if memory.content(Region(rank=rank, buffer="product", start=0, stop=len(wanted))) != wanted:
                return False
    return True


def test_the_first_fault_is_one_line_that_names_the_check() -> None:
    schedule = typical()
    broken = changed(schedule, positions(schedule, "matmul")[-1], after=())
    with pytest.raises(ScheduleError, match=r"^The schedule fails its check of buffers: action \d+ \(matmul of rank .*\."):
        check_schedule(broken)


SPANS = st.tuples(st.integers(0, 30), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(SPANS, max_size=12), SPANS)
def test_contents_hold_what_was_written_last_to_each_row(written: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    schedule = make_schedule(
        Problem(operation="all_gather_matmul", num_ranks=2, num_rows=64, num_inner=8, num_columns=8), ScheduleDescription()
    )
    contents, rows, arrivals = delivery.Contents(schedule), dict[int, delivery.Term](), delivery._Arrivals()
    for number, (start, stop) in enumerate(written):
        was_there = any(row in rows for row in range(start, stop))
        term = delivery.Term(owner=number, buffer="shard", shift=0)
        terms = delivery.Terms({term: 1})
        contents.write(Region(rank=0, buffer="product", start=start, stop=stop), [delivery.Run(0, stop - start, terms)])
        if start < stop:
            assert arrivals.add(start, stop) == was_there
        rows |= dict.fromkeys(range(start, stop), term._replace(shift=-start))
    start, stop = asked
    runs = contents.read(Region(rank=0, buffer="product", start=start, stop=stop))
    assert [edge for run in runs for edge in (run.start, run.stop)][1:-1:2] == [run.start for run in runs[1:]]
    found = {start + row: run.terms for run in runs for row in range(run.start, run.stop)}
    assert sorted(found) == list(range(start, stop))
    for row, terms in found.items():
        held = rows.get(row)
        assert terms == (None if held is None else {held._replace(shift=held.shift + start): 1})
