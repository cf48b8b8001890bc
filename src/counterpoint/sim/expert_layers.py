"""Finds the all-to-alls of a step that bring tokens to experts and back, with the matmuls between them, and estimates how
much of their time operators would leave exposed, and how much sooner the host would issue what follows.

Two all-to-alls of one group belong together if the second returns what the first brought and matmuls lie between them. A
smaller one may go with either of them, such as that of the tokens' probabilities in Megatron-LM.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from counterpoint.schedule.expert_choice import CallSize, obstacle_to_exchange, size_for
from counterpoint.schedule.expert_layout import num_parts_of
from counterpoint.sim.calibration import Calibration
from counterpoint.sim.costs import CostModel
from counterpoint.sim.matmul_pairs import MatmulPair
from counterpoint.step import Collective, Copy, Kernel, Operation, Step, UnevenParts, is_fill
from counterpoint.units import US_PER_S
from counterpoint.value import Value

MOST_COUNTS_BYTES = 1 << 16  # most bytes of an all-to-all of counts: 8 bytes for each of 8,192 experts
LEAST_GROUPED = 8  # matmuls directly after each other; chosen: fewer cost the host little
# Kernels that put rows in another order, or find out in which: torch's cat, index, index_put, gather, their gradients, sorts
# and scans of indices, fills (of padding), torchtitan's own, TransformerEngine's (torch 2.11, torchtitan 0.2.2,
# TransformerEngine 2.20)
REORDERS = re.compile(
    r"(?i)index|gather|scatter|CatArray|Fill|fill_indices|RadixSort|DeviceScan|direct_copy|arange|chunk|Memcpy DtoD|Memset"
)


class ExpertLayer(Value, frozen=True, kw_only=True):
    """The two all-to-alls of an expert layer in one direction, by number, and what runs between them.

    `matmuls` are in order. `reorders` are kernels that only reorder rows, `companions` all-to-alls that go with the two.
    `counts` is the all-to-all of the sizes before it.
    """

    dispatch: int
    combine: int
    matmuls: tuple[int, ...]
    reorders: tuple[int, ...]
    companions: tuple[int, ...] = ()
    counts: int | None = None

    @property
    def others(self) -> tuple[int, ...]:
        """The other all-to-alls of the layer, which an operator replaces as well."""
        return self.companions if self.counts is None else (self.counts, *self.companions)

    @property
    def unneeded(self) -> tuple[int, ...]:
        """What an operator for the layer makes unnecessary."""
        return self.reorders + self.companions


class ExpertLayers:
    """The expert layers of one step, and why other all-to-alls with stated parts do not belong to one."""

    def __init__(self, step: Step) -> None:
        self._step, self._operations = step, step.operations
        self.found: list[ExpertLayer] = []
        self.obstacles: dict[int, str] = {}
        groups: dict[tuple[str | None, int], list[int]] = {}
        for index, operation in enumerate(step.operations):
            if isinstance(operation, Collective) and operation.parts is not None and operation.group_size > 1:
                groups.setdefault((operation.process_group, operation.group_size), []).append(index)
        for line in groups.values():
            self._pair(line)
        self.layer_of = {index: layer for layer in self.found for index in (layer.dispatch, layer.combine)}
        self.others = {index for layer in self.found for index in layer.others}

    def runs(self) -> list[tuple[int, ...]]:
        """Return the matmuls that the host launches one after the other, with nothing between but fills of their workspace:
        one grouped matmul does the same.

        In the backward pass, gradients of weights follow those of inputs. They may go to totals by a matmul for each expert,
        so no run is longer than the longest of the first half, which is that of the forward pass.
        """
        found: list[list[int]] = []
        for number in (number for layer in self.found for number in layer.matmuls):
            if found and all(is_fill(each) for each in self._operations[found[-1][-1] + 1 : number]):
                found[-1].append(number)
            else:
                found.append([number])
        most = max(map(len, found[: -(-len(found) // 2)]), default=0)
        return [tuple(run[:most]) for run in found if len(run) >= LEAST_GROUPED and most >= LEAST_GROUPED]

    def _pair(self, whole: Sequence[int]) -> None:
        companions = self._companions(whole)
        line = [number for number in whole if number not in companions.values()]
        place, counts = 0, None
        while place < len(line):
            here = line[place]
            layer = self._layer(here, line[place + 1]) if place + 1 < len(line) else None
            if layer is not None:
                others = tuple(companions[each] for each in (layer.dispatch, layer.combine) if each in companions)
                layer = msgspec.structs.replace(layer, companions=others, counts=counts)
                self.found.append(layer)
                place, counts = place + 2, None
                continue
            counts = here if self._is_small(here) else None
            self.obstacles[here] = "no all-to-all returns what it brings to experts' matmuls"
            place += 1

    def _companions(self, line: Sequence[int]) -> dict[int, int]:
        """Return the all-to-all that goes with another one, directly before or after it. Counts, which are equal parts, go
        with none.
        """
        found: dict[int, int] = {}
        for earlier, later in pairwise(line):
            for small, large in ((later, earlier), (earlier, later)):
                parts, is_taken = self._parts(small), large in found or small in found.values()
                is_counts = self._is_small(small) and not parts.is_uneven
                if not is_taken and not is_counts and parts.goes_with(self._parts(large)):
                    found[large] = small
        return found

    def _layer(self, dispatch: int, combine: int) -> ExpertLayer | None:
        """Return the layer between two all-to-alls, if they belong together."""
        brought, returned = self._parts(dispatch), self._parts(combine)
        if not returned.returns(brought):
            return None
        between = range(dispatch + 1, combine)
        streams = Counter(self._operations[number].stream for number in between if self._is_matmul(number))
        if not streams:
            return None
        most = max(streams.values())
        mains = {stream for stream, number in streams.items() if 2 * number >= most}  # TransformerEngine has four
        matmuls = tuple(number for number in between if self._operations[number].stream in mains and self._is_matmul(number))
        places = mains | {self._operations[dispatch].stream}
        line = [number for number in between if self._operations[number].stream in places]
        outside = [number for number in line if not matmuls[0] <= number <= matmuls[-1]]
        reorders = tuple(number for number in outside if _is_reorder(self._operations[number]))
        return ExpertLayer(dispatch=dispatch, combine=combine, matmuls=matmuls, reorders=reorders)

    def _is_small(self, number: int) -> bool:
        return self._step.collective(number).num_bytes <= MOST_COUNTS_BYTES

    def _parts(self, number: int) -> UnevenParts:
        parts = self._step.collective(number).parts
        assert parts is not None, "asked for those with parts only"
        return parts

    def _is_matmul(self, number: int) -> bool:
        operation = self._operations[number]
        return isinstance(operation, Kernel) and operation.character == "matmul"


def issued_sooner_us(step: Step, runs: Sequence[Sequence[int]]) -> list[float]:
    """Return how much sooner the host issues each operation of a step if it launches one matmul for each of these runs. What
    it issues after a wait for the GPU is not sooner because of what it issued before.
    """
    first_of = {number: run[0] for run in runs for number in range(run[0], run[-1] + 1)}
    last = {run[-1] for run in runs}
    saved_us: dict[int | None, float] = defaultdict(float)  # by what the host waited for last
    found: list[float] = []
    for number, operation in enumerate(step.operations):
        first, own_us = step.operations[first_of.get(number, number)], 0.0
        if operation.issued_us is not None and first.issued_us is not None and first.issued_after == operation.issued_after:
            own_us = max(0.0, operation.issued_us - first.issued_us)
        found.append(saved_us[operation.issued_after] + own_us)
        if number in last:
            saved_us[operation.issued_after] += own_us
    return found


class ExpertExchange(Value, frozen=True, kw_only=True):
    """One all-to-all of an expert layer as part of an operator: the time that stays exposed, and the matmuls that hide
    the rest.
    """

    pair: MatmulPair
    exposed_us: float
    is_combine: bool


class ExpertModel:
    """Estimates for the expert layers of one step on one machine."""

    def __init__(self, step: Step, costs: CostModel, calibration: Calibration) -> None:
        self._step, self._costs = step, costs
        self._least_us = calibration.gather_exposed_us.value
        self.layers = ExpertLayers(step)

    def estimate(self, index: int) -> ExpertExchange | str:
        """Return the all-to-all as part of its layer's operator, or why the operator would not pay."""
        layer = self.layers.layer_of.get(index)
        if layer is None:
            return self.layers.obstacles.get(index, "it brings no tokens to experts")
        collective = self._step.collective(index)
        assert collective.parts is not None, "with parts"
        parts = collective.parts
        size = CallSize(parts.most_crossing_bytes, max(parts.leaving_bytes, parts.arriving_bytes))
        if obstacle := obstacle_to_exchange(size):
            return obstacle
        middle = -(-len(layer.matmuls) // 2)
        is_combine = index == layer.combine
        matmuls = layer.matmuls[middle:] if is_combine else layer.matmuls[:middle]
        return ExpertExchange(
            pair=MatmulPair(collective=index, matmuls=matmuls or layer.matmuls, follower=self._follower(layer, matmuls)),
            exposed_us=max(
                self._least_us, self._exposed_us(layer, collective, size_for(size).num_groups, is_combine=is_combine)
            ),
            is_combine=is_combine,
        )

    def _exposed_us(self, layer: ExpertLayer, collective: Collective, num_groups: int, *, is_combine: bool) -> float:
        """Return the exposed time: the copy of the first or last group's rows, or what the other groups' matmuls do not hide
        if that is more; or the copy of own results beside the last group's.
        """
        copied_us = self._costs.copied_us(collective)
        matmuls_us = self._matmuls_us(layer)
        share = 1 / num_parts_of(num_groups)
        hidden_us = matmuls_us * (1 - share)
        own_bytes = 2 * collective.parts.kept_bytes if is_combine and collective.parts else 0  # read, and written
        own_us = US_PER_S * own_bytes / self._costs.hbm_bytes_per_s
        return max(copied_us * share, copied_us - hidden_us, own_us)

    def _matmuls_us(self, layer: ExpertLayer) -> float:
        """Return the time of a layer's matmuls, which on several streams run beside each other."""
        by_stream: dict[int, float] = defaultdict(float)
        for number in layer.matmuls:
            operation = self._step.operations[number]
            by_stream[operation.stream] += self._costs.lone_us(operation)
        return max(by_stream.values())

    def _follower(self, layer: ExpertLayer, matmuls: Sequence[int]) -> int | None:
        """Return the layer's next matmul after these, which needs their results."""
        return next((number for number in layer.matmuls if matmuls and number > matmuls[-1]), None)


def _is_reorder(operation: Operation) -> bool:
    is_small = isinstance(operation, Copy) or (
        isinstance(operation, Kernel) and operation.character in ("streaming", "other")
    )
    return is_small and REORDERS.search(operation.name) is not None
