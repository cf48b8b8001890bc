"""The way without a schedule: the library's collective, then one matmul, or the other way round.

It is the baseline that schedules are compared with, what the heuristic picks where cutting does not pay, and what is
left where GPUs cannot reach each other's memory. Collectives that need equal blocks get padded ones.
"""

from collections.abc import Callable
from typing import final

import torch
import torch.distributed as dist

from counterpoint.errors import cause_of
from counterpoint.ops.agreement import Agreement
from counterpoint.ops.computation import multiply
from counterpoint.ops.transport import AbstractPrepared, Tensors, Weights, parts_of
from counterpoint.schedule.actions import Operation, Pass, split

# torch 2.13 renamed both; the old names warn there
library_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
library_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
LOST = ("timed out", "timeout", "connection", "closed by peer", "broken pipe")  # in what gloo says when a rank is missing


@final
class Collectives(AbstractPrepared):
    """One operator in one direction, by whole collectives of the group's backend."""

    def __init__(
        self, group: dist.ProcessGroup, agreement: Agreement, operation: Operation, direction: Pass, num_rows: int
    ) -> None:
        self._group, self._agreement = group, agreement
        self._operation, self._direction = operation, direction
        self._blocks = split(num_rows, group.size())
        self._longest = max(stop - start for start, stop in self._blocks)
        self._rank = group.rank()

    def run(self, tensors: Tensors, weights: Weights) -> None:
        """See `AbstractPrepared.run`."""
        runs = {
            ("all_gather_matmul", "forward"): self._gather_matmul,
            ("all_gather_matmul", "backward"): self._gather_matmul_backward,
            ("matmul_reduce_scatter", "forward"): self._matmul_reduce,
            ("matmul_reduce_scatter", "backward"): self._matmul_reduce_backward,
            ("matmul_all_reduce", "forward"): self._matmul_all_reduce,
            ("all_to_all_matmul", "forward"): self._exchange_matmul,
            ("all_to_all_matmul", "backward"): self._exchange_matmul_backward,
        }
        runs[self._operation, self._direction](tensors, weights)

    def _gather_matmul(self, tensors: Tensors, weights: Weights) -> None:
        gathered = self._gather(tensors["shard"])
        for weight, product in zip(weights, parts_of(tensors, "product"), strict=True):
            torch.mm(gathered, weight, out=product)

    def _gather_matmul_backward(self, tensors: Tensors, weights: Weights) -> None:
        self._matmul_reduce(tensors, weights)
        gathered = self._gather(tensors["shard"])
        for gradient, out in zip(parts_of(tensors, "activation"), parts_of(tensors, "weight_gradient"), strict=True):
            torch.mm(gathered.t(), gradient, out=out)

    def _matmul_reduce(self, tensors: Tensors, weights: Weights) -> None:
        first, *others = zip(parts_of(tensors, "activation"), weights, strict=True)
        partial = multiply(*first)
        for activation, weight in others:
            torch.addmm(partial, activation, weight, out=partial)
        self._reduce(partial, tensors["product"])

    def _matmul_reduce_backward(self, tensors: Tensors, weights: Weights) -> None:
        gathered = self._gather(tensors["shard"])
        torch.mm(gathered, weights[0], out=tensors["product"])
        torch.mm(tensors["activation"].t(), gathered, out=tensors["weight_gradient"])

    def _matmul_all_reduce(self, tensors: Tensors, weights: Weights) -> None:
        torch.mm(tensors["activation"], weights[0], out=tensors["product"])
        self._together(dist.all_reduce, tensors["product"])

    def _exchange_matmul(self, tensors: Tensors, weights: Weights) -> None:
        torch.mm(self._exchange(tensors["shard"], is_return=False), weights[0], out=tensors["product"])

    def _exchange_matmul_backward(self, tensors: Tensors, weights: Weights) -> None:
        gradient = tensors["activation"]
        tensors["product"].copy_(self._exchange(multiply(gradient, weights[0]), is_return=True))
        torch.mm(self._exchange(tensors["shard"], is_return=False).t(), gradient, out=tensors["weight_gradient"])

    def _gather(self, shard: torch.Tensor) -> torch.Tensor:
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

    def _reduce(self, partial: torch.Tensor, product: torch.Tensor) -> None:
        num_ranks = len(self._blocks)
        if partial.is_cpu:  # gloo reduces whole tensors only
            self._together(dist.all_reduce, partial)
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

    def _exchange(self, tokens: torch.Tensor, *, is_return: bool) -> torch.Tensor:
        lengths = [stop - start for start, stop in self._blocks]
        own = [lengths[self._rank]] * len(lengths)
        sent, received = (own, lengths) if is_return else (lengths, own)
        result = tokens.new_empty(sum(received), tokens.shape[1])
        self._together(dist.all_to_all_single, result, tokens.contiguous(), received, sent)
        return result

    def _together(self, collective: Callable[..., object], first: torch.Tensor, *others: object) -> None:
        """Run a collective of the library; on CPUs a rank that is missing is one line."""
        try:
            collective(first, *others, group=self._group)
        except RuntimeError as problem:
            if not (first.is_cpu and any(words in cause_of(problem).lower() for words in LOST)):
                raise
            raise self._agreement.give_up(
                f"a rank of the group did not come to {self._operation} in time, or ended"
            ) from problem
