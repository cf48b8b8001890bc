"""Describes collectives of a captured step as blocks: which bytes of one rank go where on another. This module calls no
driver function and copies nothing.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal

import msgspec
import torch
import torch.distributed as dist

from counterpoint.cuda.graph import GraphNode
from counterpoint.step import CollectiveKind
from counterpoint.value import Value

Reduction = Literal["", "sum", "mean", "other"]
Span = tuple[int, int]  # offsets of the first byte and of the one after the last


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """The location of a tensor. The tensor itself is not kept, because the captured step may give its memory to another
    one.
    """

    address: int
    num_elements: int
    dtype: torch.dtype
    is_contiguous: bool

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.num_elements * int(self.dtype.itemsize)


class IssuedCollective(msgspec.Struct, frozen=True, kw_only=True):
    """One collective: what this rank sends and receives, in the order of ranks, and the handles of the nodes that do work.

    `lengths_given` and `lengths_got` are the numbers of elements for and from each rank; empty: equal parts.
    """

    collective: CollectiveKind
    group: dist.ProcessGroup
    given: Extent
    got: Extent
    reduction: Reduction = ""
    lengths_given: tuple[int, ...] = ()
    lengths_got: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()


class Blocks(Value, frozen=True, kw_only=True):
    """One collective cut into blocks, in the order of ranks. `given`: where this rank's block for each rank lies in its
    input. `got`: where the block of each rank goes, in the rows if blocks are summed, else in the output.

    `row_bytes` is the length of a row, 0 if nothing is summed.
    """

    given: tuple[Span, ...]
    got: tuple[Span, ...]
    row_bytes: int = 0


def cut(issued: IssuedCollective, rank: int, num_ranks: int) -> Blocks:
    """Return a collective's blocks as rank `rank` sees them."""
    size = int(issued.given.dtype.itemsize)
    even_given = _even(issued.given.num_elements, num_ranks, size)
    if issued.reduction:
        start, end = even_given[rank]
        own = end - start
        return Blocks(
            given=even_given, got=tuple((own * peer, own * (peer + 1)) for peer in range(num_ranks)), row_bytes=own
        )
    got = _spans(issued.lengths_got, size) or _even(issued.got.num_elements, num_ranks, size)
    if issued.collective == "all_gather":
        return Blocks(given=((0, issued.given.num_bytes),) * num_ranks, got=got)
    return Blocks(given=_spans(issued.lengths_given, size) or even_given, got=got)


def _even(num_elements: int, num_ranks: int, size: int) -> tuple[Span, ...]:
    """Return equal parts; the last ones are shorter if the division is not exact."""
    length = -(-num_elements // num_ranks)
    return tuple(
        (size * min(length * rank, num_elements), size * min(length * (rank + 1), num_elements)) for rank in range(num_ranks)
    )


def _spans(lengths: Sequence[int], size: int) -> tuple[Span, ...]:
    ends = list(accumulate(lengths))
    return tuple((size * (end - length), size * end) for length, end in zip(lengths, ends, strict=True))


def obstacle_of(issued: IssuedCollective, num_ranks: int) -> str:
    """Return why copies cannot do a collective on this rank; empty if they can."""
    if len(issued.nodes) != 1:
        return f"it became {len(issued.nodes)} nodes that do work, but only one can be replaced"
    if issued.reduction == "other":
        return "it reduces by something else than a sum or a mean"
    if not (issued.given.is_contiguous and issued.got.is_contiguous):
        return "its tensors are not contiguous"
    if issued.given.dtype != issued.got.dtype:
        return f"it turns {issued.given.dtype} into {issued.got.dtype}"
    if issued.given.num_elements < num_ranks:
        return f"it has {issued.given.num_elements} elements for {num_ranks} ranks"
    return "it has one rank and moves nothing" if num_ranks == 1 else ""


def are_in_turn(nodes: Sequence[GraphNode], numbers: Sequence[int]) -> bool:
    """Return whether each of these nodes waits, directly or indirectly, for the one before it."""
    return all(_follows(nodes, later, earlier) for earlier, later in pairwise(sorted(numbers)))


def _follows(nodes: Sequence[GraphNode], later: int, earlier: int) -> bool:
    left, passed = [later], {later}
    while left:
        waits = {wait for wait in nodes[left.pop()].waits_for if wait >= earlier} - passed  # none waits for a later one
        if earlier in waits:
            return True
        passed |= waits
        left.extend(waits)
    return False
