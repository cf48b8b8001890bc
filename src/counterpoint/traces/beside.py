"""Finds out from a trace which kernels fit beside each other, and which ones only waited for the SMs of another kernel.

A persistent kernel has one CTA on each SM and keeps the SM until it ends. A kernel that starts in the middle of it fits
beside it, however warps are placed, if an SM has registers for both; otherwise the first did not hold every SM. CTAs of one
kernel do not end together: a kernel that cannot share an SM with them starts at the tail, SM by SM, and takes longer by it.
"""

from collections.abc import Iterable
from math import prod

from counterpoint.traces.activity import ActivityTrace, GpuOperation
from counterpoint.traces.classify import is_communication

MIDDLE = (0.25, 0.75)
"""All CTAs of a persistent kernel run in this part: tails of other kernels reach 13 % into it (asynchronous TP, H200)."""
LONGEST_TAIL = 0.25
"""If two kernels overlap by more than this share of the later one, they ran side by side, not one after the other."""
REGISTERS_PER_SM = 65536  # of every GPU since compute capability 3.5, except 3.7 (CUDA programming guide)


def find_pairs_beside(trace: ActivityTrace, indices: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return pairs of operation numbers: a persistent kernel, and a kernel that started in the middle of it. Pairs of equal
    launches are returned once.
    """
    kernels = [index for index in indices if trace.operations[index].category == "kernel"]
    kernels.sort(key=lambda index: trace.operations[index].start_us)
    holders: list[int] = []
    pairs: dict[tuple[object, object], tuple[int, int]] = {}
    for index in kernels:
        start_us = trace.operations[index].start_us
        holders = [holder for holder in holders if trace.operations[holder].end_us > start_us]
        for holder in holders:
            held = trace.operations[holder]
            is_middle = MIDDLE[0] <= (start_us - held.start_us) / held.duration_us <= MIDDLE[1]
            if is_middle and _registers(held) + _registers(trace.operations[index]) <= REGISTERS_PER_SM:
                pairs.setdefault((_launch(held), _launch(trace.operations[index])), (holder, index))
        if _is_persistent(trace, trace.operations[index]) and trace.operations[index].duration_us > 0:
            holders.append(index)
    return tuple(pairs.values())


def times_with_sms(trace: ActivityTrace) -> dict[int, float]:
    """Return, by number, the time of each kernel that started at the tail of another one, counted from the end of that other
    kernel, in microseconds.
    """
    persistent = [index for index, operation in enumerate(trace.operations) if _is_persistent(trace, operation)]
    persistent.sort(key=lambda index: trace.operations[index].start_us)
    found: dict[int, float] = {}
    for position, index in enumerate(persistent[1:], start=1):
        before, operation = trace.operations[persistent[position - 1]], trace.operations[index]
        waited_us = before.end_us - operation.start_us
        is_tail = 0 < waited_us <= LONGEST_TAIL * operation.duration_us and before.stream != operation.stream
        if is_tail and _registers(before) + _registers(operation) > REGISTERS_PER_SM:
            found[index] = operation.duration_us - waited_us
    return found


def _is_persistent(trace: ActivityTrace, operation: GpuOperation) -> bool:
    """Return whether the operation computes and has exactly one CTA for each SM."""
    arguments = operation.arguments
    return (
        operation.category == "kernel"
        and trace.num_sms is not None
        and prod(arguments.grid) == trace.num_sms
        and not is_communication(operation.category, operation.name)
    )


def _registers(operation: GpuOperation) -> int:
    return operation.arguments.registers_per_thread * prod(operation.arguments.block)


def _launch(operation: GpuOperation) -> tuple[object, ...]:
    arguments = operation.arguments
    return operation.name, arguments.grid, arguments.block, arguments.registers_per_thread, arguments.shared_bytes
