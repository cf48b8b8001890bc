"""The sequential path, without a schedule: the library's collective, then one matmul, or the other way round.

It is the baseline for schedules, the heuristic's pick if cutting does not pay, and the fallback if GPUs cannot access
each other's memory. Collectives that need equal blocks get padded ones. `operators.py` lists the calls of each operator.
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple, final

import torch
import torch.distributed as dist

from counterpoint.errors import cause_of
from counterpoint.ops.agreement import Agreement
from counterpoint.ops.message_watchdog import MessageWatchdog
from counterpoint.ops.transport import AbstractCompiledSchedule, Tensors, Weights
from counterpoint.schedule.actions import Operation, split

# The library's own functions, also if a job's functions are replaced. torch 2.13 renamed two, and the old names warn there
library_all_reduce = inspect.unwrap(dist.all_reduce)
library_all_gather = inspect.unwrap(getattr(dist, "all_gather_single", dist.all_gather_into_tensor))
library_reduce_scatter = inspect.unwrap(getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor))
library_all_to_all = inspect.unwrap(dist.all_to_all_single)
# phrases of gloo's messages when a rank is missing; "Socket closed" if it was noticed before the call
LOST = ("timed out", "timeout", "connection", "closed by peer", "socket closed", "broken pipe")


def is_of_lost_rank(problem: RuntimeError, tensor: torch.Tensor) -> bool:
    """Return whether a collective of the library failed because a rank is missing; on CPUs only, where gloo says so."""
    return tensor.is_cpu and any(words in cause_of(problem).lower() for words in LOST)


class Ranks(NamedTuple):
    """A group, its agreement, and its watchdog for messages."""

    group: dist.ProcessGroup
    agreement: Agreement
    watchdog: MessageWatchdog

    def together(self, what: str, collective: Callable[..., object], first: torch.Tensor, *others: object) -> None:
        """Run a collective of the library; on CPUs, a rank that did not do `what` becomes a one-line error."""
        try:
            with self.watchdog.waiting() if first.is_cpu else nullcontext():
                collective(first, *others, group=self.group)
        except RuntimeError as problem:
            if not is_of_lost_rank(problem, first):
                raise
            raise self.agreement.give_up(f"a rank of the group did not {what} in time, or ended") from problem


@final
class Collectives(AbstractCompiledSchedule):
    """One pass of an operator by whole collectives of the group's backend, which its `sequential` form calls."""

    is_by_library = True

    def __init__(self, ranks: Ranks, sized: tuple[Operation, int], sequential: "Sequential") -> None:
        self._group, self._ranks = ranks.group, ranks
        self._operation, num_rows = sized
        self._sequential = sequential
        self._blocks = split(num_rows, self._group.size())
        self._longest = max(stop - start for start, stop in self._blocks)
        self._rank = self._group.rank()

    def run(self, tensors: Tensors, weights: Weights) -> bool:
        """See `AbstractCompiledSchedule.run`."""
        self._sequential(self, tensors, weights)
        return False

    def gather(self, shard: torch.Tensor) -> torch.Tensor:
        """Return all ranks' shards, one below the other."""
        num_ranks = len(self._blocks)
        gathered = shard.new_empty(num_ranks * self._longest, shard.shape[1])
        padded = shard.contiguous()
        if shard.shape[0] < self._longest:
            padded = torch.cat([shard, shard.new_zeros(self._longest - shard.shape[0], shard.shape[1])])
        self._together(library_all_gather, gathered, padded)
        if gathered.shape[0] == self._blocks[-1][1]:
            return gathered
        parts = gathered.view(num_ranks, self._longest, -1)
        return torch.cat([part[: stop - start] for part, (start, stop) in zip(parts, self._blocks, strict=True)])

    def reduce(self, partial: torch.Tensor, product: torch.Tensor) -> None:
        """Fill `product` with this rank's block of the sum of all ranks' `partial`, which may be overwritten."""
        num_ranks = len(self._blocks)
        if partial.is_cpu:  # gloo reduces whole tensors only
            self._together(library_all_reduce, partial)
            product.copy_(partial[slice(*self._blocks[self._rank])])
            return
        if partial.shape[0] == num_ranks * self._longest:
            library_reduce_scatter(product, partial, group=self._group)
            return
        padded = partial.new_zeros(num_ranks, self._longest, partial.shape[1])
        for number, (start, stop) in enumerate(self._blocks):
            padded[number, : stop - start] = partial[start:stop]
        reduced = partial.new_empty(self._longest, partial.shape[1])
        library_reduce_scatter(reduced, padded.flatten(0, 1), group=self._group)
        product.copy_(reduced[: product.shape[0]])

    def reduce_all(self, product: torch.Tensor) -> None:
        """Sum all ranks' `product` in place."""
        self._together(library_all_reduce, product)

    def exchange(self, tokens: torch.Tensor, *, is_return: bool = False) -> torch.Tensor:
        """Return this rank's block of every rank's tokens; `is_return` sends back what arrived."""
        lengths = [stop - start for start, stop in self._blocks]
        own = [lengths[self._rank]] * len(lengths)
        sent, received = (own, lengths) if is_return else (lengths, own)
        result = tokens.new_empty(sum(received), tokens.shape[1])
        self._together(library_all_to_all, result, tokens.contiguous(), received, sent)
        return result

    def _together(self, collective: Callable[..., object], first: torch.Tensor, *others: object) -> None:
        """Run a collective of the library, of which a missing rank becomes a one-line error."""
        self._ranks.together(f"reach {self._operation}", collective, first, *others)


Sequential = Callable[[Collectives, Tensors, Weights], None]  # one pass of an operator that fills in its results
