"""What each GPU operation does: computation, communication, waiting for other ranks, or a copy that hides nothing.

A kernel's name says most of it (`traces/rules.toml`). If copies carry a collective, some parts of it have names that do not
tell: staging copies into and out of the buffers that peers read, and sums of what arrived. Their position tells:

- On a stream that mostly communicates: every copy within the GPU and every streaming kernel, from the first copy between
  GPUs, or what directly precedes it, to what directly follows the last one. Such a stream runs no matmul and no attention,
  and its streaming kernels take no longer than its copies, sums and signals.
- On a stream that also computes: copies within the GPU directly beside a signal or a copy between GPUs of about as many
  bytes, and sums between two signals.
"""

import re

from counterpoint.analysis.timed import TimedTrace
from counterpoint.analysis.values import Role
from counterpoint.traces.activity import GpuOperation
from counterpoint.traces.classify import classify_kernel, copy_direction

MOST_STAGED = 2  # times the bytes that copies between GPUs move beside it: of two ranks one sends half of what is staged
SUMS = re.compile("(?i)reduce_kernel.*(sum|mean)|^counterpoint_add_blocks")


def find_roles(timed: TimedTrace) -> tuple[Role, ...]:
    """Return the role of each operation, in the trace's order."""
    operations = timed.trace.operations
    kinds = {(operation.category, operation.name) for operation in operations}
    by_name = {kind: _role_by_name(*kind) for kind in kinds}
    roles = [by_name[operation.category, operation.name] for operation in operations]
    for line in timed.streams.values():
        carries = [place for place, index in enumerate(line) if _carries(operations[index], roles[index])]
        if not carries:
            continue
        parts = _parts_beside(timed, line, roles) if _computes(timed, line, roles) else _parts_between(timed, line, carries)
        for index in parts:
            roles[index] = "communication"
    return tuple(roles)


def _role_by_name(category: str, name: str) -> Role:
    if category != "kernel":
        return "communication" if copy_direction(name) == "peer_to_peer" else "copy"
    rule = classify_kernel(name)
    if rule.kind != "communication":
        return "computation"
    return "waiting" if rule.is_waiting else "communication"


def is_sum(operation: GpuOperation) -> bool:
    """Return whether a kernel adds up what arrived, judging by its name."""
    return operation.category == "kernel" and SUMS.search(operation.name) is not None


def is_staging(operation: GpuOperation) -> bool:
    """Return whether an operation copies within the GPU."""
    return operation.category == "memcpy" and copy_direction(operation.name) == "device_to_device"


def _carries(operation: GpuOperation, role: Role) -> bool:
    """Return whether an operation belongs to a collective carried by copies, judging by its name alone."""
    return role == "waiting" or (role == "communication" and operation.category != "kernel")


def _computes(timed: TimedTrace, line: tuple[int, ...], roles: list[Role]) -> bool:
    """Return whether a stream runs matmuls or attention, or computes longer than it moves and adds up data."""
    computing_us = moving_us = 0.0
    for index in line:
        operation = timed.trace.operations[index]
        if roles[index] != "computation" or is_sum(operation):
            moving_us += operation.duration_us
        elif classify_kernel(operation.name).character in ("matmul", "attention"):
            return True
        else:
            computing_us += operation.duration_us
    return computing_us > moving_us


def _parts_between(timed: TimedTrace, line: tuple[int, ...], carries: list[int]) -> list[int]:
    """Return parts on a stream that only communicates: operations between its copies, and directly before and after them."""
    is_part = [_may_belong(timed.trace.operations[index]) for index in line]
    first, last = carries[0], carries[-1]
    while first and is_part[first - 1]:
        first -= 1
    while last + 1 < len(line) and is_part[last + 1]:
        last += 1
    return [line[place] for place in range(first, last + 1) if is_part[place]]


def _may_belong(operation: GpuOperation) -> bool:
    if operation.category == "kernel":
        rule = classify_kernel(operation.name)
        return rule.kind == "computation" and rule.character == "streaming"
    return is_staging(operation)


def _parts_beside(timed: TimedTrace, line: tuple[int, ...], roles: list[Role]) -> list[int]:
    """Return parts on a stream that also computes: staging copies beside signals or copies, and sums between signals."""
    operations = timed.trace.operations
    kept = [index for index in line if operations[index].category != "memset"]
    found = []
    for place, index in enumerate(kept):
        before, after = kept[max(0, place - 1)], kept[min(place + 1, len(kept) - 1)]
        beside = [_carries(operations[other], roles[other]) for other in dict.fromkeys((before, after)) if other != index]
        is_part = is_staging(operations[index]) and any(beside) and _is_moved(timed, kept, place, roles)
        if is_part or (is_sum(operations[index]) and place and all(beside)):  # also the last on its stream
            found.append(index)
    return found


def _is_moved(timed: TimedTrace, line: list[int], place: int, roles: list[Role]) -> bool:
    """Return whether the copies between GPUs directly before or after a staging copy move about as many bytes; where only
    signals are beside it, or bytes are unknown, it counts as moved.
    """
    operations = timed.trace.operations
    for direction in (-1, 1):
        moved, other = [], place + direction
        while 0 <= other < len(line) and _carries(operations[line[other]], roles[line[other]]):
            moved += [operations[line[other]].arguments.num_bytes] * (roles[line[other]] == "communication")
            other += direction
        is_beside, is_known = other != place + direction, bool(moved) and all(moved)
        if is_beside and (not is_known or operations[line[place]].arguments.num_bytes <= MOST_STAGED * sum(moved)):
            return True
    return False
