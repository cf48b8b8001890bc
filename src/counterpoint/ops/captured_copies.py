"""Replaces collectives of a captured step by copy engines: a small graph replaces the node of each.

A captured step keeps its addresses, so blocks are copied directly from their place on one rank to their place on the
other. Data to be reduced goes to rows of the receiving rank and is summed there, on SMs. Ranks open each other's memory
once, before anything is replayed. `recorded_copies.py` defines the recorded graph and its flags.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import final

import torch
from cuda.bindings import driver as cu

from counterpoint.cuda.capture import Captured
from counterpoint.cuda.collective_blocks import Blocks, IssuedCollective, are_in_turn, cut, obstacle_of
from counterpoint.cuda.driver import Handle, check
from counterpoint.cuda.driver_graph import CopyGraph
from counterpoint.errors import DeviceError, cause_of
from counterpoint.ops.agreement import exchange_values
from counterpoint.ops.peer_memory import IpcMemory, PeerMemory, ipc_memory_of
from counterpoint.ops.recorded_copies import NUM_FLAGS, Destinations, Parts, Recorder
from counterpoint.ops.replacements import places_of, replace_collectives, share_obstacles
from counterpoint.ops.runtime import runtime_of
from counterpoint.ops.signals import Flags, Signals
from counterpoint.value import Value


class Landing(Value, frozen=True, kw_only=True):
    """Where the blocks of the other ranks go on one rank, by sender in bytes from `place`, and its tensor for sums.

    `obstacle` says why copies to this rank are not possible.
    """

    obstacle: str = ""
    place: IpcMemory | None = None
    offsets: tuple[int, ...] = ()
    sums: IpcMemory | None = None


@final
class DirectCopies:
    """The replacements of one group's collectives; all ranks create it together, for the same collectives in the same
    order.

    `made` holds for each collective its replacement, or why there is none. `is_in_turn`: on this rank no two of
    them run at once, so they can share the rows that they sum.
    """

    def __init__(self, collectives: Sequence[IssuedCollective], device: torch.device, *, is_in_turn: bool) -> None:
        group = collectives[0].group
        self._device, self._runtime = device, runtime_of(group.group_name, device)
        self._rank, self._num_ranks = int(group.rank()), int(group.size())
        self._peers = tuple((self._rank + turn) % self._num_ranks for turn in range(1, self._num_ranks))
        self._memory = PeerMemory()
        self._rows: list[torch.Tensor] = []
        self._flags: Flags | None = None
        self._graphs: list[Handle] = []  # all that were recorded, also those that another rank cannot use
        self.made: list[CopyGraph | str] = []
        try:
            self.made = self._make(collectives, is_in_turn)
        except BaseException:
            self.close()
            raise

    def _make(self, collectives: Sequence[IssuedCollective], is_in_turn: bool) -> list[CopyGraph | str]:
        if self._runtime.obstacle:
            return [self._runtime.obstacle] * len(collectives)
        obstacles = [obstacle_of(issued, self._num_ranks) for issued in collectives]
        blocks = [cut(issued, self._rank, self._num_ranks) for issued in collectives]
        lengths = [0 if obstacle else each.row_bytes for each, obstacle in zip(blocks, obstacles, strict=True)]
        memory, problem = self._allocate(lengths, is_in_turn)
        parts = [self._parts(*each) for each in zip(collectives, blocks, memory, strict=True)]
        own = [
            self._landing(each, obstacle or (problem if length else ""))
            for each, obstacle, length in zip(parts, obstacles, lengths, strict=True)
        ]
        everyone = exchange_values(self._runtime.agreement, own, list[Landing])
        self._flags = flags = Flags(
            self._runtime.group, self._device, self._runtime.agreement, (0,) * (NUM_FLAGS * len(collectives))
        )
        made = [
            self._stand_in(Recorder(self._rank, self._peers, Signals(flags), NUM_FLAGS * number), each, landings)
            for number, (each, landings) in enumerate(zip(parts, zip(*everyone, strict=True), strict=True))
        ]
        return share_obstacles(made, self._runtime.agreement)

    def _allocate(self, lengths: Sequence[int], is_in_turn: bool) -> tuple[list[torch.Tensor | None], str]:
        """Allocate memory for the rows of each collective, with this many bytes a row, 0 for none; or return none at
        all, and why.
        """
        try:
            shared = self._bytes(max(lengths)) if is_in_turn else None
            return [(self._bytes(each) if shared is None else shared) if each else None for each in lengths], ""
        except torch.OutOfMemoryError:
            return [None] * len(lengths), "there is no memory for the blocks that it sums; free some"

    def _bytes(self, row_bytes: int) -> torch.Tensor:
        return torch.empty(self._num_ranks * row_bytes, dtype=torch.uint8, device=self._device)

    def _parts(self, issued: IssuedCollective, blocks: Blocks, memory: torch.Tensor | None) -> Parts:
        rows = None
        if memory is not None:
            self._rows.append(memory)
            used = memory[: self._num_ranks * blocks.row_bytes]
            rows = used.view(issued.given.dtype).view(self._num_ranks, -1)
        return Parts(issued=issued, blocks=blocks, rows=rows)

    def _landing(self, parts: Parts, obstacle: str) -> Landing:
        """Return what the others need to copy this rank's blocks to it."""
        if obstacle:
            return Landing(obstacle=obstacle)
        issued, rows = parts.issued, parts.rows
        try:
            return Landing(
                place=ipc_memory_of(issued.got.address if rows is None else rows.data_ptr()),
                offsets=tuple(start for start, _ in parts.blocks.got),
                sums=ipc_memory_of(issued.got.address) if issued.collective == "all_reduce" else None,
            )
        except DeviceError as problem:
            return Landing(obstacle=str(problem).rstrip("."))

    def _stand_in(self, recorder: Recorder, parts: Parts, landings: Sequence[Landing]) -> CopyGraph | str:
        obstacle = next((f"on rank {rank}: {each.obstacle}" for rank, each in enumerate(landings) if each.obstacle), "")
        if obstacle:
            return obstacle
        try:
            made = recorder.record(parts, self._destinations(landings, parts.blocks.given[self._rank][0]))
        except (DeviceError, RuntimeError) as problem:  # torch's own error if it has no such sum
            return f"its copies cannot be recorded: {cause_of(problem)}".rstrip(".")
        self._graphs.append(made.graph)
        return made

    def _destinations(self, landings: Sequence[Landing], start: int) -> Destinations:
        """Return where this rank's blocks go, and its sums, which begin `start` bytes into the others' tensors."""
        blocks: dict[int, int] = {}
        sums: dict[int, int] = {}
        for peer in self._peers:
            landing = landings[peer]
            assert landing.place is not None, "obstacles are asked for first"
            blocks[peer] = self._memory.address_of(landing.place) + landing.offsets[self._rank]
            if landing.sums is not None:
                sums[peer] = self._memory.address_of(landing.sums) + start
        return Destinations(blocks=blocks, sums=sums)

    def close(self) -> None:
        """Free all memory when running work has ended; no graph that holds a replacement may run any more."""
        flags, self._flags = self._flags, None
        with ExitStack() as freeing:  # in reverse order, and all of it even if a part fails
            if flags is not None:
                freeing.callback(flags.watch.close)
            freeing.callback(self._memory.close)
            freeing.callback(self._rows.clear)
            while self._graphs:
                freeing.callback(_destroy, self._graphs.pop())
            self.made = []
            torch.cuda.synchronize(self._device)


def _destroy(graph: Handle) -> None:
    check("Freeing a recorded collective", cu.cuGraphDestroy(graph))


def offer_copies(captured: Captured) -> None:
    """Prepare copies in place of the step's collectives, so that plans may use them; if one is impossible, the graph
    says why.

    All ranks call it together, before they tune or apply. Raises `PlanError` if they captured different steps.
    """
    nodes = captured.graph.nodes()

    def make(collectives: Sequence[IssuedCollective], device: torch.device) -> DirectCopies:
        places = [place for issued in collectives for place in places_of(captured, issued)]
        return DirectCopies(collectives, device, is_in_turn=are_in_turn(nodes, places))

    captured.graph.offer_copies(replace_collectives(captured, make))
