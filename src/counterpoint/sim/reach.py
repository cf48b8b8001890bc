"""What collectives of W ranks move, and the link bandwidth that they can reach: bytes that each rank sends per second.

Ranks are GPUs 0 to W - 1 of a node. Behind a switch the bound is always the port's rate. On direct links it depends on which
GPUs communicate: an all-to-all ends with its slowest pair, because every pair moves as much; a ring crosses every cut of the
ranks into two parts, so all rings together carry no more than the thinnest cut; copies that follow one another each take
their pair's time. These are bounds of the wires, not of a library: the calibration holds the shares that are reached.

An all-to-all with parts of unequal sizes ends for all ranks with its slowest pair, and counts as one of equal parts that
takes as long. Kernels use equally many CTAs for every peer, whatever its part (NCCL's point-to-point channels), and the same
CTAs copy what the rank keeps. Copies go to their peers one after another, and what the rank keeps is not copied. A step
holds the parts of one rank; parts between two other ranks are unknown, so with more than two ranks this is a lower bound.
"""

from functools import lru_cache
from itertools import combinations

from counterpoint.links import Link
from counterpoint.step import Collective, CollectiveKind

MOST_CUT_OFF = 2  # most GPUs on the smaller side of the cuts examined: only pairs share wide links


def wire_bytes(kind: CollectiveKind, num_bytes: int, group_size: int) -> float:
    """Return the bytes that each rank sends, as nccl-tests derives bus bandwidth."""
    share = (group_size - 1) / group_size
    if kind == "all_reduce":
        return 2 * share * num_bytes
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return share * num_bytes
    return float(num_bytes) if group_size > 1 else 0.0


def bytes_to_a_peer(collective: Collective) -> float:
    """Return the bytes that a rank sends to each of its peers, of those to whom it sends."""
    moved = wire_bytes(collective.collective, collective.num_bytes, collective.group_size)
    return moved / max(1, collective.group_size - 1) if collective.collective == "all_to_all" else moved


@lru_cache(maxsize=1024)
def collective_bytes_per_s(link: Link, kind: CollectiveKind, num_ranks: int) -> float:
    """Return the bound for a library's collective."""
    if num_ranks < 2 or link.topology == "switch":
        return link.bytes_per_s
    if kind == "send_recv":
        return _slowest(link, num_ranks)
    if kind == "all_to_all":
        return min(link.bytes_per_s, (num_ranks - 1) * _slowest(link, num_ranks))
    return min(link.group_bytes_per_s(num_ranks), _thinnest_cut(link, num_ranks))


@lru_cache(maxsize=1024)
def copies_bytes_per_s(link: Link, num_ranks: int) -> float:
    """Return the bound for equal copies to all peers, one after another on each rank, as in the integrations' lanes."""
    if num_ranks < 2:
        return link.per_peer_bytes_per_s
    ranks = range(num_ranks)
    slowest = max(sum(1 / link.between(sender, peer) for peer in ranks if peer != sender) for sender in ranks)
    return (num_ranks - 1) / slowest


def by_kernels_bytes(collective: Collective) -> int:
    """Return the size of a buffer of equal parts for which kernels take as long."""
    return collective.num_bytes if collective.parts is None else collective.parts.as_equal_bytes


def by_copies_bytes(collective: Collective) -> int:
    """Return the size of a buffer of equal parts for which copies take as long."""
    size = collective.group_size
    if collective.parts is None or size < 2:
        return collective.num_bytes
    return max(collective.parts.leaving_bytes, collective.parts.arriving_bytes) * size // (size - 1)


def _slowest(link: Link, num_ranks: int) -> float:
    return min(link.between(*pair) for pair in combinations(range(num_ranks), 2))


def _thinnest_cut(link: Link, num_ranks: int) -> float:
    """Return the least bandwidth from one or two GPUs to all others together."""
    ranks = range(num_ranks)
    inside = [part for size in range(1, MOST_CUT_OFF + 1) if size < num_ranks for part in combinations(ranks, size)]
    return min(
        sum(min(link.bytes_per_s, sum(link.between(one, other) for other in ranks if other not in part)) for one in part)
        for part in inside
    )
