"""The moves of a copy lane as steps on one stream: flags to take and to raise, blocks to push and parts to pull.

Flags, per peer: FREE, my rows may be written; ARRIVED, they are written; READY, my shared part may be fetched; FETCHED,
it was fetched. FREE and FETCHED are 1 between calls, the others 0, and none is set before it was reset: ARRIVED follows
FREE, which follows the sum that reset ARRIVED, and READY follows FETCHED likewise. Waits for FREE and FETCHED come at
the next use, long after they were set, so an all-reduce has two real waits: for blocks to arrive and for sums to be
ready.
"""

from typing import Literal

from counterpoint.value import Value

FREE, ARRIVED, READY, FETCHED = range(4)
RESTING = (1, 0, 0, 1)


class LaneStep(Value, frozen=True, kw_only=True):
    """One step. take: wait for the peers' flag and reset it. raise: set mine on them. push: my block for a peer into its
    rows. pull: a peer's shared part into my output.
    """

    kind: Literal["take", "raise", "push", "pull"]
    peers: tuple[int, ...]
    flag: int = -1


class LaneMoves(Value, frozen=True, kw_only=True):
    """One rank's steps: after `exchange` the rows are there; `release` when they were read; after `share` the shared part
    may be filled in; `fetch` when it is.
    """

    exchange: tuple[LaneStep, ...]
    release: tuple[LaneStep, ...]
    share: tuple[LaneStep, ...]
    fetch: tuple[LaneStep, ...]


def lane_moves(rank: int, num_ranks: int) -> LaneMoves:
    """Return the steps of `rank`. It starts with its nearest peer above, so that every port is used once per turn."""
    peers = tuple((rank + turn) % num_ranks for turn in range(1, num_ranks))
    pulls = [
        step
        for peer in peers
        for step in (LaneStep(kind="take", flag=READY, peers=(peer,)), LaneStep(kind="pull", peers=(peer,)))
    ]
    return LaneMoves(
        exchange=(
            LaneStep(kind="take", flag=FREE, peers=peers),
            *(LaneStep(kind="push", peers=(peer,)) for peer in peers),
            LaneStep(kind="raise", flag=ARRIVED, peers=peers),
            LaneStep(kind="take", flag=ARRIVED, peers=peers),
        ),
        release=(LaneStep(kind="raise", flag=FREE, peers=peers),),
        share=(LaneStep(kind="take", flag=FETCHED, peers=peers),),
        fetch=(
            LaneStep(kind="raise", flag=READY, peers=peers),
            *pulls,
            LaneStep(kind="raise", flag=FETCHED, peers=peers),
        ),
    )
