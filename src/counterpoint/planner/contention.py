"""Finds the kernels that a collective waits for, and those that race it, in a timeline. It does not guess from names.

A collective is ready when everything it waits for has ended. Its blockers are the kernels that hold SMs from then until
the collective starts. A blocker that started after the collective was ready won a race; a head start would change the
winner.
"""

from collections.abc import Iterator, Mapping, Sequence

from counterpoint.controls import Control, OverlapMatmul, Transport
from counterpoint.plan import LEAVE_IT, Plan
from counterpoint.step import Collective, Kernel, Step, is_fill, predecessors
from counterpoint.timeline import Interval, Timeline
from counterpoint.value import Value

RACE_WINDOW_US = 5.0
NEGLIGIBLE_US = 1.0


class Contention(Value, frozen=True, kw_only=True):
    """One collective's wait: how long it was ready but not started, and behind which kernels (operation numbers)."""

    collective: int
    waited_us: float
    blockers: tuple[int, ...]
    racers: tuple[int, ...]
    companions: tuple[int, ...]


def find_contention(step: Step, timeline: Timeline, plan: Plan = LEAVE_IT) -> tuple[Contention, ...]:
    """Return one entry per collective that runs on SMs under `plan`, in the order of the step.

    `timeline` is the step's under that plan; `companions` are the kernels that ran beside the collective.
    """
    spans = {interval.operation: interval for interval in timeline.of_rank(timeline.ranks()[0])}
    kernels = [(index, spans[index]) for index, operation in enumerate(step.operations) if isinstance(operation, Kernel)]
    kernels.sort(key=lambda entry: entry[1].start_us)
    found = []
    for index, (operation, controls) in enumerate(zip(step.operations, plan.controls_of(step), strict=True)):
        if isinstance(operation, Collective) and not _uses_copy_engine(operation, controls):
            found.append(_contention_of(step, index, spans, kernels))
    return tuple(found)


def _uses_copy_engine(collective: Collective, controls: Sequence[Control]) -> bool:
    if any(isinstance(control, OverlapMatmul) for control in controls):
        return True
    planned = [control.transport for control in controls if isinstance(control, Transport)]
    return [collective.transport, *planned][-1] == "copy_engine"


def _contention_of(step: Step, index: int, spans: Mapping[int, Interval], kernels: list[tuple[int, Interval]]) -> Contention:
    ready_us = _ready_us(step, index, spans)
    span = spans[index]
    blockers, racers, companions = [], [], []
    for number, interval in kernels:
        if interval.start_us > span.end_us:
            break
        overlaps_wait = interval.end_us > ready_us + NEGLIGIBLE_US and interval.start_us < span.start_us
        if overlaps_wait and span.start_us > ready_us + RACE_WINDOW_US:
            blockers.append(number)
            if interval.start_us >= ready_us - NEGLIGIBLE_US:
                racers.append(number)
        if interval.end_us > span.start_us + NEGLIGIBLE_US:
            companions.append(number)
    return Contention(
        collective=index,
        waited_us=max(0.0, span.start_us - ready_us),
        blockers=tuple(blockers),
        racers=tuple(racers[:1]),
        companions=tuple(companions),
    )


def _ready_us(step: Step, index: int, spans: Mapping[int, Interval]) -> float:
    """Return when everything that the operation waits for had ended."""
    operation = step.operations[index]
    earlier = [number for number in range(index) if step.operations[number].stream == operation.stream][-1:]
    ends = [spans[number].end_us for number in [*earlier, *(wait.operation for wait in operation.waits_for)]]
    waited_us = 0.0 if operation.issued_after is None else spans[operation.issued_after].end_us
    return max([waited_us + (operation.issued_us or 0.0), *ends])


def find_rivals(step: Step) -> tuple[int, ...]:
    """Return the numbers of kernels that wait for the same operation as a collective of another stream.

    Both become ready at the same moment and the driver decides which it places first, so a simulation cannot predict the
    winner. The same holds for a kernel behind a fill that waits for it, as cuBLAS and cuDNN put before their kernels.
    """
    followers: dict[int, list[int]] = {}
    of_fills: dict[int, set[int]] = {}  # by fill, what it waits for
    for index, awaited in enumerate(predecessors(step)):
        earlier = awaited | {number for fill in awaited for number in of_fills.get(fill, ())}
        if is_fill(step.operations[index]):
            of_fills[index] = earlier
        for number in earlier:
            followers.setdefault(number, []).append(index)
    return tuple(sorted({kernel for together in followers.values() for kernel in _racing(step, together)}))


def _racing(step: Step, together: Sequence[int]) -> Iterator[int]:
    """Yield, of operations that become ready together, the kernels for which a collective of another stream becomes
    ready as well.
    """
    streams = {step.operations[number].stream for number in together if isinstance(step.operations[number], Collective)}
    for number in together:
        operation = step.operations[number]
        if isinstance(operation, Kernel) and streams - {operation.stream}:
            yield number
