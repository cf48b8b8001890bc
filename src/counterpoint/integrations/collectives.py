"""Moves large collectives that a job itself calls (`torch.distributed.all_reduce` and others) to copy engines.

    replaced = collectives.replace()       # on every rank, between two steps
    replaced.use(False)                    # the library's again, from the next call on
    replaced.undo()

All references to torch's functions lead to the replacement (`torch_functions.py`). Other callers of the library (DDP's
reducer, functional collectives, compiled code) are not affected. All ranks of a group must make the same calls in the same
order, as torch requires: with the same sizes and types, and with contiguous tensors on all ranks or on none.

Where a job coalesces collectives, as Megatron-LM does with its buckets, copies do the large ones when the block ends, and
the library's manager does the others.

A job's tensors are not in symmetric memory. Copy engines push parts from where they are into the peers' lanes, from
which the peers copy or sum them. Averages, and parts gathered between hosts, are pulled from the lane. A collective runs
on its lane's stream after all work on the current stream, which waits for it unless the collective is asynchronous.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias, final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from counterpoint.controls import LEAST_PART_BYTES
from counterpoint.errors import IntegrationError
from counterpoint.integrations.compression import BLOCK_ELEMENTS, AsIs
from counterpoint.integrations.lane_collectives import (
    MAX_BUFFER_BYTES,
    SWITCHED_OFF,
    CollectiveCounts,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    require_buffer,
    require_in_flight,
    require_least_part,
    require_switch,
    uses_nccl,
)
from counterpoint.integrations.lanes import AcrossHosts, Lanes, require_across_hosts
from counterpoint.integrations.paths import COPIED_KINDS, WORDS
from counterpoint.integrations.piecewise import Piece, PiecewiseCopies
from counterpoint.integrations.torch_functions import TorchFunctions
from counterpoint.ops.collectives import (
    library_all_gather,
    library_all_reduce,
    library_all_to_all,
    library_reduce_scatter,
)
from counterpoint.ops.graph_cache import is_capturing
from counterpoint.step import REDUCING_COLLECTIVES, CollectiveKind
from counterpoint.value import require

Group: TypeAlias = dist.ProcessGroup
SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


class Issued(NamedTuple):
    """A collective that copies do; the handle is None if it is not asynchronous."""

    handle: Any


PLAIN = (torch.Tensor, torch.nn.Parameter)


@final
class ReplacedCollectives:
    """The replacement that `replace` made, with its switch and its counts; `print` shows the counts."""

    def __init__(
        self, groups: Collection[Group] | None, in_flight: int, limits: tuple[int, int], across_hosts: AcrossHosts
    ) -> None:
        self._groups = None if groups is None else list(groups)
        self._in_flight, self._across_hosts = in_flight, across_hosts
        least_part_bytes, self._max_buffer_bytes = limits
        self._device_type = "cuda" if torch.cuda.is_available() else "cpu"
        self._lanes: dict[str, Lanes] = {}
        self._least_part_bytes = least_part_bytes
        self.tallies = {
            kind: CollectiveCounts(f"one of the job's own {WORDS[kind]}", least_part_bytes) for kind in COPIED_KINDS
        }
        self._num_large: dict[CollectiveKind, int] = dict.fromkeys(COPIED_KINDS, 0)
        self._functions = TorchFunctions()
        self._on: frozenset[CollectiveKind] = frozenset()
        self._blocks: list[Any] = []  # groups whose collectives are being coalesced

    @classmethod
    def in_job(cls) -> "ReplacedCollectives":
        """Do as `replace`, switched off, in a job that nobody edits: the job may call `replace` itself later, which then
        counts and moves what it calls.
        """
        replaced = cls(None, 3, (LEAST_PART_BYTES, MAX_BUFFER_BYTES), "auto")
        replaced.put_in_place()
        return replaced

    @property
    def is_on(self) -> bool:
        """Whether any collectives go by copies, unless something prevents it."""
        return bool(self._on)

    @property
    def num_by_copies(self) -> int:
        """The number of collectives done by copies."""
        return sum(tally.num_by_copies for tally in self.tallies.values())

    @property
    def num_by_library(self) -> int:
        """The number of collectives done by the library."""
        return sum(tally.num_by_library for tally in self.tallies.values())

    @property
    def num_bytes(self) -> int:
        """The bytes that copies moved from this rank to others."""
        return sum(tally.num_bytes for tally in self.tallies.values())

    @property
    def large_kinds(self) -> tuple[CollectiveKind, ...]:
        """The kinds of called collectives that were large enough for copies, whether copies did them or not."""
        return tuple(kind for kind, number in self._num_large.items() if number)

    @property
    def num_large_sums(self) -> int:
        """The number of called reduce-scatters and all-reduces that were large enough for copies, done by either."""
        return sum(self._num_large[kind] for kind in REDUCING_COLLECTIVES if kind in self._num_large)

    def __repr__(self) -> str:
        """Describe the counts of collectives by copies and by the library, and for which kinds copies are on."""
        done = "; ".join(map(str, self.tallies.values()))
        return f"{done}; copies are {'on for ' + ', '.join(sorted(self._on)) if self._on else 'off'}"

    def use(self, is_on: bool, kinds: Collection[CollectiveKind] = COPIED_KINDS) -> None:
        """From the next call on, let copies do large collectives of these kinds, and the library all others.

        Call it on every rank, between the same calls. Raises `IntegrationError`.
        """
        require_switch(is_on=is_on)
        require(
            isinstance(kinds, Collection) and not isinstance(kinds, str) and all(kind in COPIED_KINDS for kind in kinds),
            IntegrationError,
            f"kinds takes a list of kinds, each one of {', '.join(COPIED_KINDS)}; found {kinds!r}. Pass such a list.",
        )
        require(
            bool(self._functions),
            IntegrationError,
            "undo() has restored the library's functions. Call collectives.replace() again, on every rank.",
        )
        self._on = frozenset(kinds) if is_on else frozenset()

    def put_in_place(self) -> None:
        """Let torch's functions call ours."""
        for name, ours in (
            ("all_gather_into_tensor", self._all_gather),
            ("all_gather_single", self._all_gather),  # torch 2.13's name
            ("reduce_scatter_tensor", self._reduce_scatter),
            ("reduce_scatter_single", self._reduce_scatter),
            ("all_reduce", self._all_reduce),
            ("all_to_all_single", self._all_to_all),
        ):
            self._functions.replace(name, ours)
        self._functions.replace_coalescing(self._coalesce)

    def undo(self) -> None:
        """Restore the library's functions."""
        self._on = frozenset()
        self._functions.restore()
        if self in in_place():
            in_place().remove(self)

    def _all_gather(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Group | None = None, async_op: bool = False
    ) -> Any:
        issued = self._gather_by_copies(output_tensor, input_tensor, group, async_op)
        return issued.handle if issued else library_all_gather(output_tensor, input_tensor, group=group, async_op=async_op)

    def _gather_by_copies(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Group | None, async_op: bool
    ) -> Issued | None:
        copies = self._copies_for("all_gather", group, (output_tensor, input_tensor), lambda: input_tensor.nbytes)
        if copies is None or output_tensor.numel() != input_tensor.numel() * copies.num_ranks:
            return None
        given = input_tensor.view(-1)
        outputs = output_tensor.view(copies.num_ranks, -1)
        parts = self._parts(given, given.numel(), copies.num_ranks)
        pieces: list[Piece] = [functools.partial(all_gather, outputs=outputs[:, part], given=given[part]) for part in parts]
        return self._issued(copies, pieces, parts[0].stop * given.itemsize, (output_tensor, input_tensor), async_op)

    def _reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any = SUM,
        group: Group | None = None,
        async_op: bool = False,
    ) -> Any:
        issued = self._scatter_by_copies(output, input, op, group, async_op)
        return issued.handle if issued else library_reduce_scatter(output, input, op=op, group=group, async_op=async_op)

    def _scatter_by_copies(
        self, output: torch.Tensor, input: torch.Tensor, op: Any, group: Group | None, async_op: bool
    ) -> Issued | None:
        copies = self._copies_for("reduce_scatter", group, (output, input), lambda: output.nbytes, op)
        if copies is None or input.numel() != output.numel() * copies.num_ranks:
            return None
        flat, blocks = output.view(-1), input.view(copies.num_ranks, -1)
        divisor = copies.num_ranks if op == AVG else 1
        parts = self._parts(flat, flat.numel(), copies.num_ranks)
        pieces: list[Piece] = [
            functools.partial(reduce_scatter, output=flat[part], blocks=blocks[:, part], divisor=divisor) for part in parts
        ]
        return self._issued(copies, pieces, parts[0].stop * flat.itemsize, (output, input), async_op)

    def _all_reduce(self, tensor: torch.Tensor, op: Any = SUM, group: Group | None = None, async_op: bool = False) -> Any:
        issued = self._reduce_by_copies(tensor, op, group, async_op)
        return issued.handle if issued else library_all_reduce(tensor, op=op, group=group, async_op=async_op)

    def _reduce_by_copies(self, tensor: torch.Tensor, op: Any, group: Group | None, async_op: bool) -> Issued | None:
        copies = self._copies_for("all_reduce", group, (tensor,), lambda: -(-tensor.nbytes // _size_of(group)), op)
        if copies is None:
            return None
        length = self._part_elements(tensor, -(-tensor.numel() // copies.num_ranks), copies.num_ranks)
        flat = tensor.view(-1)
        parts = (flat,) if length * copies.num_ranks >= len(flat) else flat.split(length * copies.num_ranks)
        pieces: list[Piece] = [functools.partial(all_reduce, bucket=part, wire=AsIs(is_mean=op == AVG)) for part in parts]
        return self._issued(copies, pieces, length * tensor.itemsize, (tensor,), async_op)

    def _all_to_all(  # noqa: PLR0917  as torch has them
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: Group | None = None,
        async_op: bool = False,
    ) -> Any:
        sizes = output_split_sizes, input_split_sizes
        copies = self._copies_for(
            "all_to_all",
            group,
            (output, input),
            lambda: input.nbytes // _size_of(group),
            obstacle_of_kind=lambda: _why_not_exchanged(output, input, sizes, _size_of(group)),
        )
        if copies is None:
            return library_all_to_all(output, input, *sizes, group=group, async_op=async_op)
        outputs, blocks = output.view(copies.num_ranks, -1), input.view(copies.num_ranks, -1)
        parts = self._parts(input, blocks.shape[1], copies.num_ranks)
        pieces: list[Piece] = [
            functools.partial(all_to_all, outputs=outputs[:, part], given=blocks[:, part]) for part in parts
        ]
        issued = self._issued(copies, pieces, parts[0].stop * input.itemsize, (output, input), async_op)
        return issued.handle if issued else library_all_to_all(output, input, *sizes, group=group, async_op=async_op)

    def _coalesce(
        self,
        theirs: Callable[..., Iterator[Any]],
        group: Group | None = None,
        device: torch.device | None = None,
        async_ops: bool = False,
    ) -> Iterator[Any]:
        """Do as torch's manager of coalesced collectives, but let copies do the large ones when the block ends."""
        coalesced, found = theirs(group, device, async_ops), dist.group.WORLD if group is None else group
        manager = next(coalesced)
        if device is not None:  # calls go to the library within the block
            yield manager
        else:
            self._blocks.append(found)
            try:
                yield manager
            finally:
                self._blocks.remove(found)
            for issued in self._taken_from_block(found):
                if async_ops:
                    manager.append(issued.handle)
                else:
                    issued.handle.wait()
        next(coalesced, None)

    def _taken_from_block(self, group: Any) -> Iterator[Issued]:
        """Issue those of a block's collectives that go by copies, and leave the others to the library's manager."""
        waiting = distributed_c10d._world.pg_coalesce_state
        calls, left = waiting.pop(group, []), []
        for call in calls:
            if call.op.__name__ == "all_reduce":
                issued = self._reduce_by_copies(call.tensor, call.redop, group, True)
            elif call.op.__name__.startswith("all_gather"):
                issued = self._gather_by_copies(call.dst_tensor, call.tensor, group, True)
            else:
                issued = self._scatter_by_copies(call.dst_tensor, call.tensor, call.redop, group, True)
            if issued is None:
                left.append(call)
            else:
                yield issued
        waiting[group] = left

    def _issued(
        self,
        copies: PiecewiseCopies,
        pieces: Sequence[Piece],
        part_bytes: int,
        tensors: tuple[torch.Tensor, ...],
        async_op: bool,
    ) -> Issued | None:
        """Issue a collective; None if there is no memory for it on some rank."""
        if not copies.have_memory(part_bytes, len(pieces)):
            return None
        return Issued(copies.issue(pieces, tensors, async_op=async_op))

    def _copies_for(
        self,
        kind: CollectiveKind,
        group: Group | None,
        tensors: Sequence[torch.Tensor],
        bytes_of_part: Callable[[], int],
        op: Any = None,
        *,
        obstacle_of_kind: Callable[[], str] = str,
    ) -> PiecewiseCopies | None:
        """Return the copies for this collective, or None if the library does it; that is counted with the reason.

        `obstacle_of_kind` returns why the library does a call of this kind, or nothing; it is asked last.
        """
        found = dist.group.WORLD if group is None else group
        if found in self._blocks:
            return None  # decided when the block ends
        tally = self.tallies[kind]
        obstacle = self._obstacle(found, tensors, op) or obstacle_of_kind()
        part_bytes = 0 if obstacle else bytes_of_part()
        is_large = not obstacle and part_bytes >= self._least_part_bytes
        self._num_large[kind] += is_large
        if obstacle or kind not in self._on:
            tally.count_library(obstacle if kind in self._on else SWITCHED_OFF)
            return None
        assert isinstance(found, dist.ProcessGroup)
        lanes = self._lanes_of(found, tensors[0].device)
        if tally.is_librarys(part_bytes * self._num_hosts(lanes, part_bytes), "", found):  # small ones need no lanes
            return None
        obstacle = lanes.obstacle_to(kind, max(tensor.nbytes for tensor in tensors)) or lanes.obstacle
        if obstacle:
            tally.count_library(obstacle, group=found)
            return None
        return PiecewiseCopies(lanes, tally)

    def _num_hosts(self, lanes: Lanes, part_bytes: int) -> int:
        """Return the number of hosts between which the collective may be split; 1 if it is not, without asking for hosts."""
        is_small = part_bytes * lanes.group.size() < self._least_part_bytes
        return 1 if is_small or self._across_hosts == "never" else lanes.num_hosts

    def _obstacle(self, group: Any, tensors: Sequence[Any], op: Any) -> str:
        """Return why a collective of any size stays with the library, or nothing; the same on every rank that makes the
        same call.
        """
        if not isinstance(group, dist.ProcessGroup) or group.size() == 1:
            return "its group has no other rank"
        if self._groups is not None and all(group is not each for each in self._groups):
            return "its group is none of those given to replace()"
        if distributed_c10d._world.pg_coalesce_state:
            return "it is coalesced with other collectives"
        if not all(map(_is_plain, tensors)):
            return "its tensors are not plain and contiguous"
        if not all(each.numel() for each in tensors):
            return "its tensors are empty"
        first = tensors[0]
        if any(each.device != first.device or each.dtype != first.dtype for each in tensors):
            return "its tensors differ in type or device"
        if op is not None and (op not in (SUM, AVG) or not first.is_floating_point()):
            return "it is no sum or mean of floating-point numbers"
        if first.device.type != self._device_type:
            return f"its tensors are not on '{self._device_type}'"
        if first.is_cuda and not uses_nccl(group, first.device):
            return "its group does not use NCCL"
        return "it is captured in a graph" if is_capturing(first.device) else ""

    def _lanes_of(self, group: Group, device: torch.device) -> Lanes:
        found = self._lanes.get(group.group_name)
        if found is None or found.group is not group:  # a group may be destroyed and another one may get its name
            found = self._lanes[group.group_name] = Lanes(
                (group, device, "collectives"), self._in_flight, self._across_hosts
            )
        return found

    def _parts(self, tensor: torch.Tensor, num_elements: int, num_ranks: int) -> list[slice]:
        """Return the pieces, of equal length but the last, in which the elements from each rank go."""
        length = self._part_elements(tensor, num_elements, num_ranks)
        return [slice(start, start + length) for start in range(0, num_elements, length)]

    def _part_elements(self, tensor: torch.Tensor, num_elements: int, num_ranks: int) -> int:
        """Return how many of `num_elements` elements to take from each rank at a time: as many as fit a buffer."""
        most = self._max_buffer_bytes // num_ranks // int(tensor.itemsize)
        return max(1, min(most // BLOCK_ELEMENTS, -(-num_elements // BLOCK_ELEMENTS))) * BLOCK_ELEMENTS


def _is_plain(tensor: Any) -> bool:
    """Return whether the tensor's memory holds its values in order; with a conjugate or negative bit it holds others."""
    return (
        type(tensor) in PLAIN
        and tensor.is_contiguous()
        and not (tensor.is_inference() or tensor.is_conj() or tensor.is_neg())
    )


def _why_not_exchanged(output: torch.Tensor, input: torch.Tensor, sizes: tuple[Any, Any], num_ranks: int) -> str:
    """Return why the library does an all-to-all, or nothing. Only calls without sizes are known to be even on all ranks: a
    rank does not see the sizes between two others.
    """
    if not all(each is None or (isinstance(each, list | tuple) and not each) for each in sizes):
        return "its call gives the sizes of parts, which may differ between other ranks"
    is_even = output.numel() == input.numel() and not input.numel() % num_ranks
    return "" if is_even else "its parts differ in size"


def replace(
    groups: Collection[Group] | None = None,
    *,
    in_flight: int = 3,
    least_part_bytes: int = LEAST_PART_BYTES,
    max_buffer_bytes: int = MAX_BUFFER_BYTES,
    across_hosts: AcrossHosts = "auto",
    is_on: bool = True,
) -> ReplacedCollectives:
    """Let copy engines do the large all-gathers, reduce-scatters, all-reduces and all-to-alls (`all_to_all_single` without
    sizes of parts) that the job calls; call it on every rank.

    `groups`: only in these groups; None means all of the process. `in_flight`: concurrent collectives of a group, each
    with its own buffers. `least_part_bytes`: collectives with less from each rank stay with the library.
    `max_buffer_bytes`: larger tensors are sent in parts. `across_hosts`: whether collectives of several hosts are split
    into two levels. `is_on`: False only replaces the functions, until `use(True)`. Raises `IntegrationError`.
    """
    require_in_flight(in_flight)
    require_least_part(least_part_bytes)
    require_buffer(max_buffer_bytes)
    require_across_hosts(across_hosts)
    require_switch(is_on=is_on)
    require(
        not in_place(),
        IntegrationError,
        "collectives.replace() has already replaced torch's functions. Switch the object that it returned, or "
        "call undo() on it first.",
    )
    _require_groups(groups)
    replaced = ReplacedCollectives(groups, in_flight, (least_part_bytes, max_buffer_bytes), across_hosts)
    replaced.put_in_place()
    in_place().append(replaced)
    replaced.use(is_on)
    return replaced


def _require_groups(groups: Collection[Group] | None) -> None:
    """Raise `IntegrationError` unless these are some groups of this rank, or None."""
    if groups is None:
        return
    require(
        isinstance(groups, Collection),
        IntegrationError,
        f"groups takes a list of process groups; found one of type {type(groups).__name__}. Put it into a list.",
    )
    require(bool(groups), IntegrationError, "groups is empty, so nothing could go by copies. Leave it out, or name a group.")
    for group in groups:
        require(
            isinstance(group, dist.ProcessGroup),
            IntegrationError,
            "groups must be process groups that this rank belongs to; found one of type "
            f"{type(group).__name__}. Leave it out.",
        )


@cache
def in_place() -> list[ReplacedCollectives]:
    """Holds what `replace` put in place of torch's functions in this process: one at most."""
    return []


def _size_of(group: Group | None) -> int:
    return int((dist.group.WORLD if group is None else group).size())
