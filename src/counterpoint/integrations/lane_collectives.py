"""Bare collectives on lanes, several in flight, and the rules for when not to use them.

An all-reduce is a reduce-scatter (blocks go to their ranks, which average them) and an all-gather of the averages. Each
collective takes the next lane, so that one can wait for an SM while another copies. A lane holds a block for every rank
and one more. DDP cuts buckets larger than `MAX_BUFFER_BYTES` into parts, so its memory is bounded.

On several hosts a lane's ranks are those of one host. An all-gather goes between hosts first, then within each. A
reduce-scatter sums within each host first, then between them. An all-reduce has one between hosts amid its two halves. Sums
between hosts are the library's, of blocks that were divided before, in their type.

If a rank's part is small, the library's collective is faster (measured: with 6 MiB from each of 4 ranks copies are still
faster; below 4 MiB is an assumption). Without peer access, or when symmetric memory runs out, only the library is left;
`CollectiveCounts` logs that once. All ranks reach the same decision, so none waits for copies of another that calls the
library.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any, final

import torch
import torch.distributed as dist

from counterpoint.cuda.block_sums import Pieces, sum_arrived
from counterpoint.errors import IntegrationError
from counterpoint.integrations.compression import AbstractWire, AsIs, block_elements
from counterpoint.ops.host_levels import HostLevels
from counterpoint.ops.lane import AbstractLane
from counterpoint.units import KIB, MIB, format_bytes
from counterpoint.value import require

MAX_BUFFER_BYTES = 256 * MIB
MAX_IN_FLIGHT = 8
LEAST_BUFFER_BYTES = 4096
LEAST_PIECE_BYTES = 256 * KIB  # on average: the driver takes 3.5 us for each copy, about what a kernel takes for 8 MiB
SWITCHED_OFF = "switched off"

logger = logging.getLogger("counterpoint")


@final
class CollectiveCounts:
    """Counts how often copies did a collective, how often the library did it and why; each reason except the switch is
    logged once, by the first rank of `group`; None means the group of each call.
    """

    def __init__(self, what: str, least_part_bytes: int, group: dist.ProcessGroup | None = None) -> None:
        self._what, self._least_part_bytes, self._group = what, least_part_bytes, group
        self._by_library: dict[str, int] = {}
        self.num_by_copies = 0
        self.num_in_two_levels = 0  # of those by copies: the library did the level between hosts
        self.num_in_place = 0  # of those by copies: without flat buffers
        self.num_bytes = 0  # bytes that copies moved from this rank to others

    @property
    def num_by_library(self) -> int:
        """Collectives that the library did."""
        return sum(self._by_library.values())

    @property
    def library_reason(self) -> str:
        """The main reason why the library did collectives while copies were on; empty if it did none."""
        reasons = {reason: number for reason, number in self._by_library.items() if reason != SWITCHED_OFF}
        return max(reasons, key=lambda reason: reasons[reason], default="")

    def is_librarys(self, part_bytes: int, obstacle: str, group: dist.ProcessGroup | None = None) -> bool:
        """Return whether the library should do a collective with this many bytes from each rank; if so, count it."""
        if obstacle:
            self.count_library(obstacle, group=group)
            return True
        if part_bytes < self._least_part_bytes:
            self.count_library(
                f"less than {format_bytes(self._least_part_bytes)} from each rank",
                f"{format_bytes(part_bytes)} from each rank; the library is faster below "
                f"{format_bytes(self._least_part_bytes)}",
                group,
            )
            return True
        return False

    def count_library(self, reason: str, words: str = "", group: dist.ProcessGroup | None = None) -> None:
        """Count one more by the library, for this reason; `words` replace the reason if they tell more."""
        if reason not in self._by_library and reason != SWITCHED_OFF:
            line = "The library runs %s, not copies: %s."
            warn_from_first_rank(line, self._what, words or reason, group=group or self._group)
        self._by_library[reason] = self._by_library.get(reason, 0) + 1

    def count_copies(self, num_bytes: int, num_hosts: int, *, is_in_place: bool = False) -> None:
        """Count one more by copies, which moved this many bytes from this rank to others on its host."""
        self.num_by_copies += 1
        self.num_in_place += is_in_place
        self.num_in_two_levels += num_hosts > 1
        self.num_bytes += num_bytes

    def __repr__(self) -> str:
        """Describe the counts: "a gradient bucket: 12 times by copies (3 GiB sent), 2 times by the library (2: switched
        off)".
        """
        reasons = "; ".join(f"{number}: {reason}" for reason, number in self._by_library.items())
        library = f"{self.num_by_library} times by the library" + (f" ({reasons})" if reasons else "")
        forms = {"in place": self.num_in_place, "in two levels": self.num_in_two_levels}
        found = [f"{format_bytes(self.num_bytes)} sent", *(f"{number} {form}" for form, number in forms.items() if number)]
        sent = ", ".join(found)
        return f"{self._what}: {self.num_by_copies} times by copies ({sent}), {library}"


def require_least_part(least_part_bytes: object) -> None:
    """Raise `IntegrationError` unless this is a number of bytes."""
    _require_bytes("least_part_bytes", least_part_bytes, "0 leaves nothing to the library.")


def require_least_piece(least_piece_bytes: object) -> None:
    """Raise `IntegrationError` unless this is a number of bytes."""
    _require_bytes("least_piece_bytes", least_piece_bytes, "0 moves all parameters and gradients in place.")


def _require_bytes(name: str, num_bytes: object, advice: str) -> None:
    require(
        type(num_bytes) is int and num_bytes >= 0,
        IntegrationError,
        f"{name} must be a whole number, 0 or more; found {num_bytes!r}. {advice}",
    )


def require_in_flight(in_flight: object) -> None:
    """Raise `IntegrationError` unless this many collectives can be in flight."""
    require(
        type(in_flight) is int and 1 <= in_flight <= MAX_IN_FLIGHT,
        IntegrationError,
        f"in_flight must be from 1 to {MAX_IN_FLIGHT}; found {in_flight!r}. Three are enough on 4 GPUs.",
    )


def require_buffer(max_buffer_bytes: object) -> None:
    """Raise `IntegrationError` unless a buffer can have this size."""
    require(
        type(max_buffer_bytes) is int and max_buffer_bytes >= LEAST_BUFFER_BYTES,
        IntegrationError,
        f"max_buffer_bytes must be {LEAST_BUFFER_BYTES} or more; found {max_buffer_bytes!r}. Leave it out, or raise it.",
    )


def require_switch(**switches: object) -> None:
    """Raise `IntegrationError` unless these are True or False."""
    for name, found in switches.items():
        require(
            isinstance(found, bool), IntegrationError, f"{name} must be True or False; found {found!r}. Pass one of them."
        )


def uses_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether NCCL does the group's collectives on this kind of device."""
    try:
        return str(group._get_backend(device).name()) == "nccl"
    except RuntimeError:  # the group has no backend for such a device
        return False


def warn_from_first_rank(message: str, *args: object, group: dist.ProcessGroup | None = None) -> None:
    """Log a warning on the first rank of the group, or in a process without a rank, so that it appears once."""
    if not dist.is_initialized() or dist.get_rank(group) == 0:
        logger.warning(f"counterpoint: {message}", *args)


def streams_of(tensor: torch.Tensor) -> list[Any]:
    """Return the tensor's current stream, if its device has streams."""
    return [torch.cuda.current_stream(tensor.device)] if tensor.is_cuda else []


def future_of(result: torch.Tensor, streams: Sequence[Any], value: Any = None) -> torch.futures.Future[Any]:
    """Return a future of a result that these streams compute: waiting for it waits for them. `value` is its value, if
    that is not the result itself.
    """
    value = result if value is None else value
    if not result.is_cuda:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(value)
        return future
    future = torch.futures.Future(devices=[result.device])
    *others, last = streams
    # a future records the streams that are current when it is set
    is_current = last == torch.cuda.current_stream(result.device)
    with nullcontext() if is_current else torch.cuda.stream(last):
        for stream in others:
            last.wait_stream(stream)
        result.record_stream(last)
        future.set_result(value)
    return future


def all_reduce(lane: AbstractLane, levels: HostLevels, bucket: torch.Tensor, wire: AbstractWire) -> int:
    """Replace the flat bucket by the mean or sum of all ranks' buckets in the wire format.

    Returns the bytes that copies sent from this rank. Raises `RefusedTogetherError` before the bucket has changed.
    """

    def issue() -> int:
        blocks = wire.encode(bucket, lane.num_ranks)
        num_bytes = _all_reduce_blocks(lane, levels, [[block] for block in blocks], wire)
        wire.decode(blocks, bucket)
        return num_bytes

    return _repeat(lane, levels, (*wire.key, bucket), issue) if wire.key else issue()


def all_reduce_in_place(lane: AbstractLane, levels: HostLevels, pieces: Pieces) -> int:
    """Replace several flat pieces of memory by the means of all ranks' pieces, on one host.

    Returns the bytes that copies sent from this rank. Raises `RefusedTogetherError` before anything has changed.
    """

    def issue() -> int:
        num_elements = sum(piece.numel() for piece in pieces)
        blocks = cut(pieces, block_elements(num_elements, lane.num_ranks), lane.num_ranks)
        return _all_reduce_blocks(lane, levels, blocks, AsIs())

    return _repeat(lane, levels, ("all_reduce in place", *pieces), issue)


def _all_reduce_blocks(lane: AbstractLane, levels: HostLevels, blocks: Sequence[Pieces], wire: AbstractWire) -> int:
    """Replace blocks, one for each rank, by the means or sums of all ranks' blocks. Return the bytes that copies sent."""
    own, sizes = blocks[lane.rank], [sum(int(piece.nbytes) for piece in block) for block in blocks]
    levels.reserve(lane, max(sizes))
    arrived = lane.exchange(blocks)
    shared = lane.shared(arrived.rows.shape[1], arrived.rows.dtype)
    wire.reduce(arrived, shared, levels.num_hosts, into_own=levels.num_hosts == 1)
    lane.release()
    levels.all_reduce(shared)
    lane.fetch(blocks)
    if levels.num_hosts > 1:
        torch._foreach_copy_(list(own), shared.split([piece.numel() for piece in own]))
    return sum(sizes) + (lane.num_ranks - 2) * sizes[lane.rank]


def cut(pieces: Pieces, num_elements: int, num_blocks: int) -> list[list[torch.Tensor]]:
    """Cut flat pieces of memory into blocks of this many elements each; the last ones may be shorter, or empty."""
    blocks: list[list[torch.Tensor]] = [[] for _ in range(num_blocks)]
    start = 0
    for piece in pieces:
        done = 0
        while done < piece.numel():
            number, within = divmod(start, num_elements)
            part = piece[done : done + num_elements - within]
            blocks[number].append(part)
            done += len(part)
            start += len(part)
    return [block or [pieces[0][:0]] for block in blocks]


def reduce_scatter(
    lane: AbstractLane, levels: HostLevels, output: torch.Tensor, blocks: torch.Tensor, divisor: float
) -> int:
    """Compute the divided sum over ranks of this rank's block (flat); `blocks` has a row for each rank of the group.

    Returns the bytes that copies sent from this rank. Raises `RefusedTogetherError` before anything has changed.
    """

    def issue() -> int:
        num_bytes = levels.num_hosts * int(output.nbytes)
        levels.reserve(lane, num_bytes)
        arrived = lane.exchange([[levels.of_place(peer, blocks)] for peer in range(lane.num_ranks)])
        here = output if levels.num_hosts == 1 else output.new_empty(levels.num_hosts * output.numel())
        sum_arrived(arrived, here, divisor)
        lane.release()
        if here is not output:
            levels.reduce_scatter(output, here)
        return (lane.num_ranks - 1) * num_bytes

    return _repeat(lane, levels, ("reduce_scatter", divisor, output, blocks), issue)


def all_gather(lane: AbstractLane, levels: HostLevels, outputs: torch.Tensor, given: torch.Tensor) -> int:
    """Fill row p of `outputs` with the `given` (flat) of the group's rank p.

    Returns the bytes that copies sent from this rank. Raises `RefusedTogetherError` before anything has changed.
    """

    def issue() -> int:
        num_bytes = levels.num_hosts * int(given.nbytes)
        levels.reserve(lane, num_bytes)
        if levels.num_hosts == 1:
            _exchange(lane, [given] * lane.num_ranks, outputs)
        else:
            shared = lane.shared(levels.num_hosts * given.numel(), given.dtype)
            levels.gather(shared, given)
            targets = [levels.of_place(peer, outputs) for peer in range(lane.num_ranks)]
            own = targets[lane.rank]
            own.copy_(shared.view(own.shape))
            lane.fetch([[target] for target in targets])
        return (lane.num_ranks - 1) * num_bytes

    return _repeat(lane, levels, ("all_gather", outputs, given), issue)


def all_to_all(lane: AbstractLane, levels: HostLevels, outputs: torch.Tensor, given: torch.Tensor) -> int:
    """Fill row p of `outputs` with this rank's row of the `given` of rank p, on one host.

    Returns the bytes that copies sent from this rank. Raises `RefusedTogetherError` before anything has changed.
    """

    def issue() -> int:
        num_bytes = int(given[lane.rank].nbytes)
        levels.reserve(lane, num_bytes)
        _exchange(lane, list(given), outputs)
        return (lane.num_ranks - 1) * num_bytes

    return _repeat(lane, levels, ("all_to_all", outputs, given), issue)


def _exchange(lane: AbstractLane, blocks: Sequence[torch.Tensor], outputs: torch.Tensor) -> None:
    """Send block p to rank p, and place what the ranks sent in the rows of `outputs`.

    Nothing is copied before it is sent: such a copy needs SMs, and behind a matmul that holds all of them the transfer would
    begin when the matmul ends.
    """
    arrived = lane.exchange([[block] for block in blocks])
    for peer, output in enumerate(outputs):
        source = blocks[peer] if peer == lane.rank else arrived.rows[peer]
        if output.data_ptr() != source.data_ptr():
            output.copy_(source)
    lane.release()


def gather_into_buffer(lane: AbstractLane, levels: HostLevels, output: torch.Tensor) -> None:
    """Fill in all parts of `output` (flat), which the lane's `gathered` returned, but the group's own."""

    def issue() -> int:
        parts = output.view(levels.group.size(), -1)
        places = [levels.of_place(peer, parts) for peer in range(lane.num_ranks)]
        if levels.num_hosts > 1:
            own = places[lane.rank]
            arrived = output.new_empty(own.numel())
            levels.gather(arrived, parts[levels.group.rank()])
            own.copy_(arrived.view(own.shape))
        lane.gather(places)
        return 0

    _repeat(lane, levels, ("gather", output), issue)


def _repeat(lane: AbstractLane, levels: HostLevels, key: tuple[Any, ...], issue: Callable[[], int]) -> int:
    """Issue, or replay a recording of the same at the same addresses. The library's part between hosts is never recorded."""
    if levels.num_hosts > 1:
        return issue()
    return lane.repeat(tuple(_place_of(part) if isinstance(part, torch.Tensor) else part for part in key), issue)


def _place_of(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
