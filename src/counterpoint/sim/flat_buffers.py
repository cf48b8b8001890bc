"""Finds the kernels of FSDP2 and DDP that copies in place make unnecessary.

FSDP2 gathers parameters into a flat buffer and copies them out of it, and copies gradients into one before it reduces
them. `fsdp2.use_copy_engines` moves both without those buffers. A trace tells these kernels by their names (torch 2.11 to
2.13). It does not tell how parameters are sharded, or how many there are, so all are taken to be moved in place.

DDP multiplies every gradient into a bucket, and the bucket's all-reduce waits for the last of these kernels. Unless
gradients are views of buckets, DDP copies them back at the end. `ddp.register` averages them where they are. A job may
multiply by numbers itself, so a bucket's kernels only count if they take no longer than such kernels should, and if
other kernels, which make the gradients, run between them.
"""

import re
from collections.abc import Sequence
from typing import final

from counterpoint.step import Collective, Copy, Kernel, Operation, Step

COPIED_OUT = "split_with_sizes_copy_out_contiguous_no_cast"
COPIED_IN = "chunk_cat_cuda_kernel<"
WIDENED = re.compile(r"chunk_cat_cuda_kernel<float, c10::(BFloat16|Half)>")
MULTIPLIED = re.compile(r"elementwise_kernel<.*AUnaryFunctor<.*MulFunctor<")
MOST_SLOWER = 2.0  # by which a bucket's kernels may take longer for a byte than those of the fastest
MOST_CUT = 1  # gathers or kernels of a step whose counterpart is in the step before or after


@final
class FlatBuffers:
    """The operations that copy into or out of a flat buffer, by the number of its collective: out of it after a gather,
    into it before a reduction, and both around the all-reduce of a bucket.

    `widened`: reductions of buffers whose elements have twice the size of the gradients'. `bucket_bytes`: what all buckets
    of DDP hold.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self.copies_of: dict[int, tuple[int, ...]] = self._of_gathers()
        self.widened: set[int] = set()
        buckets: dict[int, tuple[int, ...]] = {}
        for number, operation in step.collectives().items():
            for wait in operation.waits_for:
                name = step.operations[wait.operation].name
                if operation.collective == "reduce_scatter" and COPIED_IN in name:
                    self.copies_of[number] = (wait.operation,)
                    if WIDENED.search(name):
                        self.widened.add(number)
                elif operation.collective == "all_reduce" and MULTIPLIED.search(name):
                    start = max((kernels[-1] for kernels in buckets.values()), default=-1) + 1
                    if kernels := self._multiplied(start, wait.operation):
                        buckets[number] = kernels
        back = self._out_of_buckets(list(buckets))
        self.bucket_bytes = sum(self._num_bytes(number) for number in buckets)
        for number in self._only_filled(buckets):
            self.copies_of[number] = (*buckets[number], *back.get(number, ()))

    def _of_gathers(self) -> dict[int, tuple[int, ...]]:
        """Return each gather's kernel: they follow one another in the same order. If gathers of some streams are others',
        those of one stream must be as many as the kernels.
        """
        kernels: list[int] = []
        gathers: dict[int, list[int]] = {}
        for number, operation in enumerate(self._step.operations):
            if isinstance(operation, Kernel) and COPIED_OUT in operation.name:
                kernels.append(number)
            elif isinstance(operation, Collective) and operation.collective == "all_gather":
                gathers.setdefault(operation.stream, []).append(number)
        everything = sorted(number for line in gathers.values() for number in line)
        nearest = min((everything, *gathers.values()), key=lambda line: abs(len(line) - len(kernels)))
        return _in_order(nearest, kernels) if kernels and abs(len(nearest) - len(kernels)) <= MOST_CUT else {}

    def _multiplied(self, first: int, last: int) -> tuple[int, ...]:
        """Return the kernels from `first` to `last` that multiply; none if no other kernel is there to make gradients."""
        kernels = [each for each in range(first, last + 1) if isinstance(self._step.operations[each], Kernel)]
        found = [each for each in kernels if MULTIPLIED.search(self._step.operations[each].name)]
        return tuple(found) if len(found) < len(kernels) else ()

    def _only_filled(self, buckets: dict[int, tuple[int, ...]]) -> list[int]:
        """Return the buckets whose kernels do nothing else, by their times."""
        us_per_byte = {
            number: sum(self._step.operations[each].lone_us or 0.0 for each in kernels) / max(1, self._num_bytes(number))
            for number, kernels in buckets.items()
        }
        fastest = min(us_per_byte.values(), default=0.0)
        return [number for number, us in us_per_byte.items() if us <= MOST_SLOWER * fastest]

    def _out_of_buckets(self, buckets: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Return the copies after the last all-reduce, by bucket, if their sizes are those of the buckets."""
        operations = self._step.operations
        following = list(enumerate(operations))[max(buckets, default=len(operations)) + 1 :]
        copies = [number for number, operation in following if _is_local(operation)]
        found: dict[int, tuple[int, ...]] = {}
        for bucket in buckets:
            left, taken = self._num_bytes(bucket), 0
            while left > 0 and taken < len(copies):
                left -= self._num_bytes(copies[taken])
                taken += 1
            if left:
                return {}
            found[bucket], copies = tuple(copies[:taken]), copies[taken:]
        return found

    def _num_bytes(self, number: int) -> int:
        operation = self._step.operations[number]
        return 0 if isinstance(operation, Kernel) else operation.num_bytes


def _is_local(operation: Operation) -> bool:
    return isinstance(operation, Copy) and operation.direction == "device_to_device"


def _in_order(gathers: Sequence[int], kernels: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Pair each kernel with the first gather before it that has none."""
    found: dict[int, tuple[int, ...]] = {}
    waiting = list(gathers)
    for kernel in kernels:
        if waiting and waiting[0] < kernel:
            found[waiting.pop(0)] = (kernel,)
    return found
