"""Estimates how long each operation would take alone, from a trace in which some ran beside communication.

Kernels: If a kernel started at the tail of another one, its lone time counts from that one's end. If communication hardly
touched a kernel, its lone time is the traced time. A contended kernel gets the time of a like launch that ran alone: the
longest untouched time of the same name, grid, block and shared memory that is not longer, and at least 1/1.7 of it (one
launch configuration may serve several matmul sizes). If there is none, the share of the SMs that the collectives held is
subtracted.

Collectives: The lone time is the shortest time of like collectives that is no outlier, because a rank that arrives early
waits inside the kernel. Uneven all-to-alls are alike if their times per byte agree within the spread. Of the rest of a
collective's time, the part that simultaneous computation does not explain was waiting for other ranks. This module does
not know dependencies.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise

from counterpoint.traces.activity import ActivityTrace, GpuOperation
from counterpoint.traces.beside import times_with_sms
from counterpoint.traces.classify import is_communication
from counterpoint.traces.operations import stated_parts
from counterpoint.traces.steady import TracedSteps
from counterpoint.value import Value

UNTOUCHED_OVERLAP = 0.02
MOST_SLOWDOWN = 1.7
"""A neighbor of 24 CTAs on 132 SMs slowed no kernel by more than this factor (1.2 to 1.7 in the shipped traces)."""
SAME_WITHIN = 0.05
"""Like launches that ran alone differ by up to this share in the shipped traces."""
SLOWED_BESIDE = 0.15
"""Collectives take this much longer beside computation that loads the memory: 13 to 17 % (shipped traces, simulated)."""
SPREAD_BESIDE = 0.25
"""Times of like collectives beside different computation vary by this share (all-gathers of 416 MiB, shipped traces)."""

Signature = tuple[str, tuple[int, ...], tuple[int, ...], int, int]


class BusySpans(Value, frozen=True, kw_only=True):
    """The communication or computation of a trace by start: spans, the longest of them, and the SMs that each holds."""

    starts_us: tuple[float, ...]
    ends_us: tuple[float, ...]
    held_sms: tuple[int, ...]
    longest_us: float

    def beside(self, operation: GpuOperation) -> tuple[float, float]:
        """Return the time an operation overlaps the union of these spans, and the SM-microseconds that they held of it."""
        covered_us = held = 0.0
        reached_us = operation.start_us
        first = bisect_left(self.starts_us, operation.start_us - self.longest_us)
        for place in range(first, len(self.starts_us)):
            if self.starts_us[place] >= operation.end_us:
                break
            start_us, end_us = max(self.starts_us[place], operation.start_us), min(self.ends_us[place], operation.end_us)
            held += max(0.0, end_us - start_us) * self.held_sms[place]
            covered_us += max(0.0, end_us - max(start_us, reached_us))
            reached_us = max(reached_us, end_us)
        return covered_us, held


class LoneTimes(Value, frozen=True, kw_only=True):
    """The lone time of each operation of the steady step, in its order; and the number of kernels that were estimated from
    held SMs.

    `peer_wait_us` is how long each collective waited for other ranks; 0 for other operations.
    """

    lone_us: tuple[float, ...]
    peer_wait_us: tuple[float, ...]
    num_contended: int
    num_estimated: int


def find_lone_times(trace: ActivityTrace, steps: TracedSteps) -> LoneTimes:
    """Return the lone times of the steady step's operations, in microseconds."""
    communication, computation = _busy(trace, communicates=True), _busy(trace, communicates=False)
    untouched = [_untouched(trace, communication, steps.steady_operations)]
    untouched.append(_untouched(trace, communication, (i for step in steps.steps for i in step)))
    alike = _collective_times(trace, steps)
    uneven = _uneven_times(trace, steps)
    with_sms = times_with_sms(trace)
    lone: list[float] = []
    waits: list[float] = []
    num_contended = num_estimated = 0
    for index in steps.steady_operations:
        operation = trace.operations[index]
        traced_us = operation.duration_us
        waits.append(0.0)
        if is_communication(operation.category, operation.name):
            lone.append(min(traced_us, least_usual(alike[collective_signature(operation)])))
            if (parts := stated_parts(trace, operation)) is not None and parts.is_uneven:
                lone[-1] = min(lone[-1], _most_us(uneven[_uneven_signature(operation)], parts.as_equal_bytes))
            waits[-1] = _peer_wait(traced_us, lone[-1], computation.beside(operation)[0])
            continue
        if index in with_sms:
            lone.append(with_sms[index])
            continue
        covered_us, held = communication.beside(operation)
        if operation.category != "kernel" or covered_us <= UNTOUCHED_OVERLAP * traced_us:
            lone.append(traced_us)
            continue
        num_contended += 1
        like_us = _like(operation, untouched)
        num_estimated += like_us is None
        lone.append(_without_held(trace, traced_us, held) if like_us is None else like_us)
    return LoneTimes(
        lone_us=tuple(lone), peer_wait_us=tuple(waits), num_contended=num_contended, num_estimated=num_estimated
    )


def least_usual(times_us: Sequence[float]) -> float:
    """Return the least time that another one confirms, by being at most `SPREAD_BESIDE` longer; else the least time."""
    ascending = sorted(times_us)
    confirmed = (time for time, after in pairwise(ascending) if after <= time * (1 + SPREAD_BESIDE))
    return next(confirmed, ascending[0])


def _peer_wait(traced_us: float, lone_us: float, beside_us: float) -> float:
    """Return a collective's time beyond its lone time, less what computation beside it for so long explains."""
    return max(0.0, traced_us - lone_us - SLOWED_BESIDE * min(beside_us, lone_us))


def _without_held(trace: ActivityTrace, traced_us: float, held: float) -> float:
    """Return the traced time less the share of the SMs that communication held, or the traced time if the SMs are unknown.

    The share is limited to all SMs but one: communication cannot have held all of them, because the kernel did run.
    """
    if trace.num_sms is None:
        return traced_us
    return traced_us * max(1 / trace.num_sms, 1 - held / (traced_us * trace.num_sms))


def signature(operation: GpuOperation) -> Signature:
    """Return what two like launches have in common: name, grid, block, shared memory, bytes."""
    arguments = operation.arguments
    return operation.name, arguments.grid, arguments.block, arguments.shared_bytes, arguments.num_bytes


def collective_signature(operation: GpuOperation) -> tuple[object, ...]:
    """Return what two like collectives have in common: launch, elements, type and group."""
    arguments = operation.arguments
    return (
        signature(operation),
        arguments.in_elements,
        arguments.out_elements,
        arguments.dtype,
        arguments.group_size,
        arguments.group_name,
    )


def _uneven_signature(operation: GpuOperation) -> tuple[object, ...]:
    """Return what two uneven all-to-alls that differ only in sizes have in common: launch, type, group."""
    arguments = operation.arguments
    return signature(operation), arguments.dtype, arguments.group_size, arguments.group_name


def _uneven_times(trace: ActivityTrace, steps: TracedSteps) -> dict[tuple[object, ...], list[tuple[int, float]]]:
    """Return bytes and times of uneven all-to-alls: hardly two have the same size, and most of them may have waited."""
    found: dict[tuple[object, ...], list[tuple[int, float]]] = {}
    for index in (index for step in steps.steps for index in step):
        operation = trace.operations[index]
        parts = stated_parts(trace, operation)
        if parts is not None and parts.is_uneven:
            times = found.setdefault(_uneven_signature(operation), [])
            times.append((parts.as_equal_bytes, operation.duration_us))
    return found


def _most_us(times: Sequence[tuple[int, float]], num_bytes: int) -> float:
    """Return the limit of an uneven all-to-all alone, from the least usual time per byte at half to twice its size."""
    near = [time_us / each for each, time_us in times if num_bytes <= 2 * each <= 4 * num_bytes]
    return (1 + SPREAD_BESIDE) * num_bytes * least_usual(near)


def _busy(trace: ActivityTrace, *, communicates: bool) -> BusySpans:
    """Return the spans of communication, or of the kernels that compute."""
    found = sorted(
        (operation.start_us, operation.end_us, min(_num_ctas(operation), trace.num_sms or 0))
        for operation in trace.operations
        if is_communication(operation.category, operation.name) == communicates
        and (communicates or operation.category == "kernel")
    )
    return BusySpans(
        starts_us=tuple(start for start, _, _ in found),
        ends_us=tuple(end for _, end, _ in found),
        held_sms=tuple(held for _, _, held in found),
        longest_us=max((end - start for start, end, _ in found), default=0.0),
    )


def _num_ctas(operation: GpuOperation) -> int:
    """Return the CTAs of a launch; 0 for a copy, which holds no SM."""
    return math.prod(operation.arguments.grid) if operation.category == "kernel" else 0


def _untouched(trace: ActivityTrace, communication: BusySpans, indices: Iterable[int]) -> dict[Signature, list[float]]:
    """Return the traced times of kernels that communication hardly touched, in ascending order, by signature."""
    times: dict[Signature, list[float]] = {}
    for index in indices:
        operation = trace.operations[index]
        if operation.category == "kernel" and not is_communication(operation.category, operation.name):
            covered_us, _ = communication.beside(operation)
            if covered_us <= UNTOUCHED_OVERLAP * operation.duration_us:
                times.setdefault(signature(operation), []).append(operation.duration_us)
    return {key: sorted(line) for key, line in times.items()}


def _like(operation: GpuOperation, untouched: list[dict[Signature, list[float]]]) -> float | None:
    """Return the longest untouched time of a like launch that may be this one's, from the steady step, else from any step.

    If none is shorter and one is hardly longer, communication did not slow the launch, and its traced time is its lone time.
    """
    traced_us = operation.duration_us
    for times in untouched:
        alike = times.get(signature(operation), [])
        fitting = [time for time in alike if traced_us / MOST_SLOWDOWN <= time <= traced_us]
        if fitting:
            return fitting[-1]
        if any(traced_us < time <= traced_us * (1 + SAME_WITHIN) for time in alike):
            return traced_us
    return None


def _collective_times(trace: ActivityTrace, steps: TracedSteps) -> dict[tuple[object, ...], list[float]]:
    """Return traced times of communication by signature."""
    times: dict[tuple[object, ...], list[float]] = {}
    for index in (index for step in steps.steps for index in step):
        operation = trace.operations[index]
        if is_communication(operation.category, operation.name):
            times.setdefault(collective_signature(operation), []).append(operation.duration_us)
    return times
