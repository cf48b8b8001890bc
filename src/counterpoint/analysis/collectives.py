"""The collectives of one rank as values: kind, size, group, transport, step."""

from bisect import bisect_right

from msgspec.structs import replace

from counterpoint.analysis.members import Members, bytes_of_copies, find_members, kind_of_copies
from counterpoint.analysis.timed import TimedTrace, ns_to_us
from counterpoint.analysis.values import Role, TracedCollective
from counterpoint.kernel_names import short_name
from counterpoint.spans import Span, length, union
from counterpoint.step import CollectiveKind
from counterpoint.traces.activity import GpuOperation, listed_numbers, ranks_of_group
from counterpoint.traces.classify import Group, classify_kernel, collective_kind, element_bytes, name_groups
from counterpoint.traces.operations import size_of_group
from counterpoint.value import Value

COPIES = "copy_engine"


class RankCollectives(Value, frozen=True, kw_only=True):
    """A rank's collectives by start, the operations of each one, and the collective's number for each such operation."""

    values: tuple[TracedCollective, ...]
    members: tuple[Members, ...]
    by_operation: dict[int, int]


def find_collectives(timed: TimedTrace, roles: tuple[Role, ...], windows: tuple[Span, ...]) -> RankCollectives:
    """Return all collectives of a trace. Fields that depend on causes (`exposed_us`, `before`) are set later."""
    members = find_members(timed, roles, windows)
    groups = name_groups(each.arguments.process_group for each in timed.trace.operations if each.arguments.collective_name)
    counts: dict[str | None, int] = {}
    values = []
    for number, each in enumerate(members):
        value = _collective(timed, roles, each, number, groups)
        place = counts.get(value.process_group, 0)
        counts[value.process_group] = place + 1
        values.append(replace(value, group_number=place, step=step_of(windows, timed.starts[each.operations[0]])))
    by_operation = {index: number for number, each in enumerate(members) for index in each.operations}
    return RankCollectives(values=tuple(values), members=members, by_operation=by_operation)


def step_of(windows: tuple[Span, ...], time: int) -> int:
    """Return the step whose window holds a time, or -1."""
    place = bisect_right(windows, time, key=lambda window: window[0]) - 1
    return place if place >= 0 and time < windows[place][1] else -1


def imbalance(operation: GpuOperation) -> float:
    """Return the largest over the mean part of an all-to-all, sent or received, whichever is more uneven; 0 if unknown."""
    parts = [listed_numbers(operation.arguments.in_splits), listed_numbers(operation.arguments.out_splits)]
    return max((max(line) * len(line) / sum(line) for line in parts if sum(line) > 0), default=0.0)


def _collective(
    timed: TimedTrace, roles: tuple[Role, ...], members: Members, number: int, groups: dict[Group, str | None]
) -> TracedCollective:
    operations = [timed.trace.operations[index] for index in members.operations]
    first, operator = operations[0], timed.operator_of(members.operations[0])
    launches = [time for index in members.operations if (time := timed.launches[index]) is not None]
    waiting = sum(timed.ends[i] - timed.starts[i] for i in members.operations if roles[i] == "waiting")
    start, end = timed.starts[members.operations[0]], max(timed.ends[index] for index in members.operations)
    running = length(union((timed.starts[index], timed.ends[index]) for index in members.operations))
    kind, num_bytes, transport, name, group_size = _what(timed, members, operations)
    return TracedCollective(
        rank=timed.trace.rank or 0,
        number=number,
        group_number=0,
        step=-1,
        name=name,
        collective=kind,
        transport=transport,
        stream=first.stream,
        start_us=ns_to_us(start),
        end_us=ns_to_us(end),
        num_bytes=num_bytes,
        group_size=group_size,
        process_group=groups.get(first.arguments.process_group) if members.is_library else None,
        dtype=first.arguments.dtype,
        phase="unknown" if operator is None else operator.phase,
        module="" if operator is None else operator.module,
        group_ranks=ranks_of_group(first.arguments, group_size),
        issued_us=ns_to_us(min(launches)) if launches else None,
        waiting_us=ns_to_us(waiting),
        paused_us=ns_to_us(end - start - running),
        imbalance=imbalance(first) if kind == "all_to_all" else 0.0,
    )


def _what(timed: TimedTrace, members: Members, operations: list[GpuOperation]) -> tuple[CollectiveKind, int, str, str, int]:
    """Return the kind, bytes, transport, name and group size of a collective."""
    first, world_size = operations[0], timed.trace.world_size or 1
    if not members.is_library:
        kind = kind_of_copies(timed, members)
        signals = [operation for operation in operations if operation.category == "kernel"]
        is_signal = kind == "send_recv" and len(signals) == len(operations)
        name = short_name(first.name) if is_signal else f"{kind} by copies"
        transport = classify_kernel(first.name).library if is_signal else COPIES
        return kind, bytes_of_copies(timed, members, kind, world_size), transport, name, world_size
    rule, arguments = classify_kernel(first.name), first.arguments
    kind, is_known = collective_kind(arguments.collective_name, rule)
    elements = max(arguments.in_elements or 0, arguments.out_elements or 0)
    num_bytes = elements * (element_bytes(arguments.dtype) or 0) if is_known else 0
    return kind, num_bytes, rule.library, short_name(first.name), size_of_group(timed.trace, arguments)
