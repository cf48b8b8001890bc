"""Experts' rows in groups: every row is in one block, at its place on both sides, whatever the routing."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import ScheduleError
from counterpoint.schedule.expert_layout import ExpertLayout, counts_of
from counterpoint.schedule.routing import Routing


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    """Some with experts that get nothing, ranks that send nothing, or all rows for one rank."""
    num_ranks, num_experts = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    counts = st.one_of(st.just(0), st.integers(0, 7), st.integers(0, 900))
    row = st.lists(counts, min_size=num_ranks * num_experts, max_size=num_ranks * num_experts).map(tuple)
    return Routing(counts=tuple(draw(st.lists(row, min_size=num_ranks, max_size=num_ranks))))


def tiled(spans: list[tuple[int, int]]) -> list[int]:
    """All rows of these (first, how many), in order; some row is there twice if spans overlap."""
    return sorted(row for start, number in spans for row in range(start, start + number))


@given(routings(), st.integers(1, 6))
def test_every_row_is_in_one_block_and_both_sides_agree(routing: Routing, num_groups: int) -> None:
    ranks = range(routing.num_ranks)
    layouts = [ExpertLayout(counts_of(routing), rank, num_groups) for rank in ranks]
    for rank, layout in enumerate(layouts):
        numbers = range(len(layout.groups))
        placed = [
            block for source, number in itertools.product(ranks, numbers) for block in layout.blocks(source, rank, number)
        ]
        assert tiled([(block.placed, block.num_rows) for block in placed]) == list(range(routing.num_grouped(rank)))
        sent = [(rank, rank, number) for number in numbers] + [(rank, *each) for each in layout.outgoing()]
        blocks = [block for part in sent for block in layout.blocks(*part)]
        assert tiled([(block.sent, block.num_rows) for block in blocks]) == list(range(routing.num_sent(rank)))
        for peer, number in layout.outgoing():
            assert rank in layouts[peer].sources(number)
            assert list(layout.blocks(rank, peer, number)) == list(layouts[peer].blocks(rank, peer, number))
        assert len(layout.groups) <= num_groups


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((), "One row of counts"),
        (((1, 2, 3), (1, 2, 3)), "for every expert"),
        (((1, 2), (1,)), "found 1 counts of rank 1"),
        (((1, -2), (1, 0)), "found -2 of rank 0"),
    ],
)
def test_a_matrix_that_is_none_is_refused(counts: tuple[tuple[int, ...], ...], said: str) -> None:
    with pytest.raises(ScheduleError, match=f"(?i){said}"):
        Routing(counts=counts)
