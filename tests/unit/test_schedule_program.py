"""What the ranks issue, run by a double of streams and flags in random orders: right results, no deadlock, flags at rest."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.schedule import CopySchedule, Region, ScheduleDescription
from counterpoint.schedule.program import FREE
from helpers.schedules import OPERATIONS, descriptions, expected, given_rows, made
from helpers.stream_double import DeadlockError, Node


@st.composite
def call_sequences(draw: st.DrawFn) -> list[CopySchedule]:
    """One to four calls of one group, forward or backward, each with a schedule of its own."""
    num_ranks = draw(st.integers(1, 4))
    calls = []
    for _ in range(draw(st.integers(1, 4))):
        operation, direction = draw(st.sampled_from(OPERATIONS)), draw(st.sampled_from(["forward", "backward"]))
        schedule = made(operation, (num_ranks, draw(st.integers(1, 17))), draw(descriptions), direction)
        calls += [schedule] if schedule is not None else []
    return calls


@settings(max_examples=200)
@given(calls=call_sequences(), seed=st.integers(0, 1 << 16), is_one_queue=st.booleans())
def test_calls_in_any_order_the_hardware_may_choose_give_their_products(
    calls: list[CopySchedule], seed: int, is_one_queue: bool
) -> None:
    if not calls:
        return
    node = Node(calls[0].num_ranks, is_one_queue=is_one_queue)
    memories = [node.issue(schedule, given_rows(number)) for number, schedule in enumerate(calls)]
    node.run(random.Random(seed))
    for number, (schedule, memory) in enumerate(zip(calls, memories, strict=True)):
        for rank in range(schedule.num_ranks):
            wanted = expected(schedule, rank, number)
            product = Region(rank=rank, buffer="product", start=0, stop=len(wanted))
            assert memory.content(product) == wanted
    assert not any(value for (_, number, _), value in node.flags.items() if number == FREE)


def test_a_wait_without_a_signal_is_found() -> None:
    schedule = made("all_gather_matmul", (2, 4), ScheduleDescription(), "forward")
    assert schedule is not None
    node = Node(2, is_one_queue=False)
    node.issue(schedule, given_rows(0))
    for (rank, _), queue in node.queues.items():
        if rank == 1:
            queue.clear()
    with pytest.raises(DeadlockError):
        node.run(random.Random(0))
