"""Finds the kernels of FSDP2 that copies in place make unnecessary.

FSDP2 gathers parameters into a flat buffer and copies them out of it, and copies gradients into one before it reduces
them. `fsdp2.use_copy_engines` moves both without those buffers. A trace tells these kernels by their names (torch 2.11 to
2.13). It does not tell how parameters are sharded, or how many there are, so all are taken to be moved in place.
"""

import re
from collections.abc import Sequence
from typing import final

from counterpoint.step import Collective, Kernel, Step

COPIED_OUT = "split_with_sizes_copy_out_contiguous_no_cast"
COPIED_IN = "chunk_cat_cuda_kernel<"
WIDENED = re.compile(r"chunk_cat_cuda_kernel<float, c10::(BFloat16|Half)>")
MOST_CUT = 1  # gathers or kernels of a step whose counterpart is in the step before or after


@final
class FlatBuffers:
    """The kernels that copy out of or into a flat buffer, by the number of its collective; the gathered buffer's copy comes
    after the gather, the reduced buffer's before the reduction.

    `widened`: reductions of buffers whose elements have twice the size of the gradients'.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self.kernel_of = self._of_gathers()
        self.widened: set[int] = set()
        for number, operation in enumerate(step.operations):
            if isinstance(operation, Collective) and operation.collective == "reduce_scatter":
                for wait in operation.waits_for:
                    name = step.operations[wait.operation].name
                    if COPIED_IN in name:
                        self.kernel_of[number] = wait.operation
                        if WIDENED.search(name):
                            self.widened.add(number)

    def _of_gathers(self) -> dict[int, int]:
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


def _in_order(gathers: Sequence[int], kernels: Sequence[int]) -> dict[int, int]:
    """Pair each kernel with the first gather before it that has none."""
    found: dict[int, int] = {}
    waiting = list(gathers)
    for kernel in kernels:
        if waiting and waiting[0] < kernel:
            found[waiting.pop(0)] = kernel
    return found
