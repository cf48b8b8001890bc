"""Replaces collectives of a captured step by light kernels: a launch replaces the node of each.

All-gathers and all-to-alls write this rank's blocks to their destinations on the others. Reductions read this rank's
block of all ranks, add in single precision in the order of ranks, round once, and write the sum. Ranks open each other's
memory once, before anything is replayed, as they do for copies (`captured_copies.py`).
"""

from collections.abc import Sequence
from typing import final

import torch

from counterpoint.controls import MOST_LIGHT_CTAS, MOST_LIGHT_RANKS
from counterpoint.cuda.capture import Captured
from counterpoint.cuda.collective_blocks import Blocks, IssuedCollective, cut, obstacle_of
from counterpoint.cuda.driver_graph import LightLaunch
from counterpoint.errors import DeviceError
from counterpoint.ops.agreement import exchange_values
from counterpoint.ops.light_kernels import PUSH, REDUCE, WORD_BYTES, LightSignals, Moves, launch_of
from counterpoint.ops.peer_memory import IpcMemory, PeerMemory, ipc_memory_of
from counterpoint.ops.replacements import replace_collectives, share_obstacles
from counterpoint.ops.runtime import runtime_of
from counterpoint.ops.symmetric import SymmetricMemory
from counterpoint.value import Value


class Reach(Value, frozen=True, kw_only=True):
    """Where a collective's tensors are on one rank, and where the blocks of each rank begin in its result.

    `obstacle` says why other ranks cannot reach them.
    """

    obstacle: str = ""
    given: IpcMemory | None = None
    got: IpcMemory | None = None
    starts: tuple[int, ...] = ()


@final
class LightCollectives:
    """The launches of one group's collectives; all ranks create it together, for the same collectives in the same order.

    `made` holds for each collective its replacement, or why there is none.
    """

    def __init__(self, collectives: Sequence[IssuedCollective], device: torch.device) -> None:
        group = collectives[0].group
        self._device, self._runtime = device, runtime_of(group.group_name, device)
        self._rank, self._num_ranks = int(group.rank()), int(group.size())
        self._peers = tuple((self._rank + turn) % self._num_ranks for turn in range(1, self._num_ranks))
        self._memory = PeerMemory()
        self._flags: SymmetricMemory | None = None
        self._counts: torch.Tensor | None = None
        self.made: list[LightLaunch | str] = []
        try:
            self.made = self._make(collectives)
        except BaseException:
            self.close()
            raise

    def _make(self, collectives: Sequence[IssuedCollective]) -> list[LightLaunch | str]:
        if self._runtime.obstacle:
            return [self._runtime.obstacle] * len(collectives)
        blocks = [cut(issued, self._rank, self._num_ranks) for issued in collectives]
        own = [self._reach(*each) for each in zip(collectives, blocks, strict=True)]
        everyone = exchange_values(self._runtime.agreement, own, list[Reach])
        self._make_flags(len(collectives))
        made = [
            self._launch(number, *each)
            for number, each in enumerate(zip(collectives, blocks, zip(*everyone, strict=True), strict=True))
        ]
        return share_obstacles(made, self._runtime.agreement)

    def _make_flags(self, num_collectives: int) -> None:
        """Allocate flags by collective, setting rank and CTA, and counts by collective and CTA."""
        num_words = num_collectives * self._num_ranks * MOST_LIGHT_CTAS
        self._flags = SymmetricMemory(num_words * WORD_BYTES, self._device, self._runtime.group, self._runtime.agreement)
        self._flags.local.zero_()
        self._counts = torch.zeros(num_collectives * MOST_LIGHT_CTAS, dtype=torch.int32, device=self._device)
        torch.cuda.synchronize(self._device)
        self._runtime.agreement.exchange(b"flags at rest")  # no rank sets a flag before they are there

    def _reach(self, issued: IssuedCollective, blocks: Blocks) -> Reach:
        obstacle = obstacle_of(issued, self._num_ranks) or _obstacle_to_light(issued, self._num_ranks)
        if obstacle:
            return Reach(obstacle=obstacle)
        try:
            return Reach(
                given=ipc_memory_of(issued.given.address),
                got=ipc_memory_of(issued.got.address),
                starts=tuple(start for start, _ in blocks.got),
            )
        except DeviceError as problem:
            return Reach(obstacle=str(problem).rstrip("."))

    def _launch(self, number: int, issued: IssuedCollective, blocks: Blocks, reaches: Sequence[Reach]) -> LightLaunch | str:
        obstacle = next((f"on rank {rank}: {each.obstacle}" for rank, each in enumerate(reaches) if each.obstacle), "")
        if obstacle:
            return obstacle
        try:
            moves = self._sums(issued, blocks, reaches) if issued.reduction else self._pushes(issued, blocks, reaches)
            kernel = REDUCE[issued.given.dtype] if issued.reduction else PUSH
            return moves.obstacle() or launch_of(kernel, moves, self._signals(number))
        except DeviceError as problem:
            return str(problem).rstrip(".")

    def _pushes(self, issued: IssuedCollective, blocks: Blocks, reaches: Sequence[Reach]) -> Moves:
        """Return the moves of this rank's block for each rank, peers first, to its destination there."""
        moves: list[tuple[int, int, int]] = []
        for to in (*self._peers, self._rank):
            start, end = blocks.given[to]
            source = issued.given.address + start
            target = self._got_by(to, issued, reaches) + reaches[to].starts[self._rank]
            if source != target:
                moves.append((source, target, end - start))
        return Moves(
            source=tuple(source for source, _, _ in moves),
            target=tuple(target for _, target, _ in moves),
            num_bytes=tuple(num_bytes for _, _, num_bytes in moves),
        )

    def _sums(self, issued: IssuedCollective, blocks: Blocks, reaches: Sequence[Reach]) -> Moves:
        """Return the moves of this rank's block of all ranks, to the destinations of the sum."""
        start, end = blocks.given[self._rank]
        sources = tuple(self._given_by(rank, issued, reaches) + start for rank in range(self._num_ranks))
        targets: tuple[int, ...] = (issued.got.address,)
        if issued.collective == "all_reduce":
            targets = tuple(self._got_by(to, issued, reaches) + start for to in (*self._peers, self._rank))
        scale = 1.0 / self._num_ranks if issued.reduction == "mean" else 1.0
        return Moves(source=sources, target=targets, num_bytes=(end - start,), scale=scale)

    def _given_by(self, rank: int, issued: IssuedCollective, reaches: Sequence[Reach]) -> int:
        place = reaches[rank].given
        assert place is not None, "obstacles are asked for first"
        return issued.given.address if rank == self._rank else self._memory.address_of(place)

    def _got_by(self, rank: int, issued: IssuedCollective, reaches: Sequence[Reach]) -> int:
        place = reaches[rank].got
        assert place is not None, "obstacles are asked for first"
        return issued.got.address if rank == self._rank else self._memory.address_of(place)

    def _signals(self, number: int) -> LightSignals:
        assert self._flags is not None, "flags are made before launches"
        assert self._counts is not None, "counts are made with the flags"
        addresses = self._flags.addresses

        def flags_of(on: int, by: int) -> int:
            return addresses[on] + WORD_BYTES * MOST_LIGHT_CTAS * (number * self._num_ranks + by)

        return LightSignals(
            raised=tuple(flags_of(peer, self._rank) for peer in self._peers),
            awaited=tuple(flags_of(self._rank, peer) for peer in self._peers),
            counts=self._counts.data_ptr() + WORD_BYTES * MOST_LIGHT_CTAS * number,
        )

    def close(self) -> None:
        """Free all memory when running work has ended; no graph that holds a launch may run any more."""
        torch.cuda.synchronize(self._device)
        self.made = []
        self._memory.close()
        self._flags = self._counts = None


def _obstacle_to_light(issued: IssuedCollective, num_ranks: int) -> str:
    """Return what prevents light kernels but not copies, or nothing."""
    if num_ranks > MOST_LIGHT_RANKS:
        return f"it has {num_ranks} ranks; light kernels support at most {MOST_LIGHT_RANKS}"
    if issued.reduction and issued.given.dtype not in REDUCE:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in REDUCE)
        return f"it reduces {str(issued.given.dtype).removeprefix('torch.')}; light kernels support only {known}"
    return ""


def offer_light_kernels(captured: Captured) -> None:
    """Prepare light kernels in place of the step's collectives, so that plans may use them; if one is impossible, the
    graph says why.

    All ranks call it together, before they tune or apply. Raises `PlanError` if they captured different steps.
    """
    captured.graph.offer_light_kernels(replace_collectives(captured, LightCollectives))
