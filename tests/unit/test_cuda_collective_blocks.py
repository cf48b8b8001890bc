"""Collectives cut into blocks: moved as the cuts say, they give what the collective's definition gives."""

import math
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.cuda.collective_blocks import Extent, IssuedCollective, are_in_turn, cut, obstacle_of
from counterpoint.cuda.graph import GraphNode
from counterpoint.step import CollectiveKind

NUM_RANKS = st.integers(2, 5)


def extent(num_elements: int, dtype: torch.dtype = torch.int32, *, is_contiguous: bool = True) -> Extent:
    return Extent(address=4096, num_elements=num_elements, dtype=dtype, is_contiguous=is_contiguous)


def issued(collective: CollectiveKind, num_given: int, num_got: int, **more: Any) -> IssuedCollective:
    values: dict[str, Any] = {"given": extent(num_given), "got": extent(num_got), "nodes": (1,), **more}
    return IssuedCollective(collective=collective, group=cast("Any", None), **values)


def moved(of_ranks: list[IssuedCollective], given: list[torch.Tensor]) -> list[torch.Tensor]:
    """What lies on each rank once every block has gone where it belongs; no byte is written twice."""
    num_ranks = len(of_ranks)
    blocks = [cut(each, rank, num_ranks) for rank, each in enumerate(of_ranks)]
    landed = []
    for rank, each in enumerate(of_ranks):
        num_bytes = num_ranks * blocks[rank].row_bytes if each.reduction else each.got.num_bytes
        target, written = torch.zeros(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.int)
        for sender in range(num_ranks):
            start, end = blocks[sender].given[rank]
            first, last = blocks[rank].got[sender]
            assert last - first == end - start
            target[first:last] = given[sender].view(torch.uint8)[start:end]
            written[first:last] += 1
        assert written.eq(1).all(), "every byte once"
        landed.append(target.view(torch.int32))
    return landed


def tensors(lengths: list[int]) -> list[torch.Tensor]:
    return [1000 * rank + torch.arange(length, dtype=torch.int32) for rank, length in enumerate(lengths)]


@given(num_ranks=NUM_RANKS, length=st.integers(1, 7))
def test_an_all_gather_puts_the_ranks_parts_one_behind_the_other(num_ranks: int, length: int) -> None:
    parts = tensors([length] * num_ranks)
    landed = moved([issued("all_gather", length, length * num_ranks)] * num_ranks, parts)
    assert all(torch.equal(each, torch.cat(parts)) for each in landed)


@given(data=st.data(), num_ranks=NUM_RANKS)
def test_an_all_to_all_sends_as_many_elements_to_each_rank_as_was_said(data: st.DataObject, num_ranks: int) -> None:
    lengths = [data.draw(st.lists(st.integers(0, 5), min_size=num_ranks, max_size=num_ranks)) for _ in range(num_ranks)]
    parts = tensors([sum(each) for each in lengths])
    of_ranks = [
        issued(
            "all_to_all",
            sum(lengths[rank]),
            sum(each[rank] for each in lengths),
            lengths_given=tuple(lengths[rank]),
            lengths_got=tuple(each[rank] for each in lengths),
        )
        for rank in range(num_ranks)
    ]
    split = [part.split(each) for part, each in zip(parts, lengths, strict=True)]
    for rank, found in enumerate(moved(of_ranks, parts)):
        assert torch.equal(found, torch.cat([blocks[rank] for blocks in split]))


@given(num_ranks=NUM_RANKS, length=st.integers(1, 7))
def test_an_all_to_all_without_lengths_has_even_blocks(num_ranks: int, length: int) -> None:
    parts = tensors([length * num_ranks] * num_ranks)
    for rank, found in enumerate(moved([issued("all_to_all", *[length * num_ranks] * 2)] * num_ranks, parts)):
        assert torch.equal(found, torch.cat([part.chunk(num_ranks)[rank] for part in parts]))


@given(num_ranks=NUM_RANKS, length=st.integers(1, 40), collective=st.sampled_from(["reduce_scatter", "all_reduce"]))
def test_a_reduction_has_the_blocks_of_all_ranks_in_rows_whose_sum_is_the_rank_s_part(
    num_ranks: int, length: int, collective: CollectiveKind
) -> None:
    if collective == "reduce_scatter":
        length *= num_ranks
    parts = tensors([length] * num_ranks)
    num_got = length // num_ranks if collective == "reduce_scatter" else length
    landed = moved([issued(collective, length, num_got, reduction="sum")] * num_ranks, parts)
    sums = torch.cat([rows.view(num_ranks, -1).sum(0) for rows in landed])
    assert torch.equal(sums, torch.stack(parts).sum(0))
    if collective == "reduce_scatter":
        assert {rows.numel() for rows in landed} == {length}
    else:
        assert max(rows.numel() for rows in landed) == num_ranks * math.ceil(length / num_ranks)


@pytest.mark.parametrize(
    ("collective", "words"),
    [
        (issued("all_reduce", 8, 8, reduction="other"), "by something else than a sum or a mean"),
        (issued("all_reduce", 8, 8, reduction="sum", nodes=(1, 2)), "became 2 nodes that do work"),
        (issued("all_reduce", 8, 8, reduction="sum", nodes=()), "became 0 nodes that do work"),
        (issued("all_to_all", 8, 8, given=extent(8, is_contiguous=False)), "not contiguous"),
        (issued("all_gather", 4, 8, got=extent(8, torch.int64)), "turns torch.int32 into torch.int64"),
        (issued("all_reduce", 1, 1, reduction="sum"), "1 elements for 2 ranks"),
    ],
    ids=["reduction", "two nodes", "no node", "strides", "types", "tiny"],
)
def test_what_copies_cannot_do_is_refused_with_the_reason(collective: IssuedCollective, words: str) -> None:
    assert words in obstacle_of(collective, 2)


def test_sums_means_and_moves_can_be_copies_and_one_rank_has_nothing_to_move() -> None:
    collectives = [issued("all_reduce", 8, 8, reduction="mean"), issued("all_to_all", 8, 8), issued("all_gather", 4, 8)]
    assert not any(obstacle_of(each, 2) for each in collectives)
    assert "one rank" in obstacle_of(collectives[0], 1)


def node(*waits_for: int) -> GraphNode:
    return GraphNode(kind="kernel", name="any", waits_for=waits_for)


def test_nodes_are_in_turn_where_each_waits_for_the_one_before_however_indirectly() -> None:
    nodes = (node(), node(0), node(0), node(2), node(1, 3), node(3))
    assert are_in_turn(nodes, [0, 2, 4])
    assert are_in_turn(nodes, [4, 0, 3])
    assert not are_in_turn(nodes, [1, 3])
    assert not are_in_turn(nodes, [0, 4, 5])
    assert are_in_turn(nodes, [5])
