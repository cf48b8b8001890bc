"""Turn traced GPU operations into the kernels, collectives and copies of a step.

The module uses what the profiler writes with a launch and what the rules say of its name, but not when it ran. The profiler
gives the sum of static and dynamic shared memory; the module stores the sum as dynamic shared memory.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from math import ceil, prod

from msgspec.structs import replace

from counterpoint.errors import shown
from counterpoint.machine import Gpu, machine_for_device
from counterpoint.occupancy import residency
from counterpoint.step import Character, Collective, Copy, Dependency, Footprint, Kernel, Operation, UnevenParts
from counterpoint.traces.activity import ActivityTrace, GpuOperation, LaunchArguments, listed_numbers, ranks_of_group
from counterpoint.traces.classify import (
    Rule,
    classify_kernel,
    collective_kind,
    copy_direction,
    ctas_per_cluster,
    element_bytes,
    matmul_type,
    name_groups,
)
from counterpoint.units import format_count
from counterpoint.value import Value

COUNTER_BYTES = 4
"""cuBLAS and cuDNN clear a 4-byte tile counter by a memset before a work-sharing kernel (seen in the shipped traces)."""
FEWEST_RANKS = 2  # of a collective that runs a kernel; NCCL runs none for one rank
TURNOVER_US, TURNOVER_US_PER_THREAD = 0.066, 0.000045
"""How much longer torch's profiler makes it until an SM has its next CTA: 71, 75, 83 and 118 ns with CTAs of 128, 256, 512
and 1,024 threads that do nothing (one H200). It explains a depthwise convolution (41 us by this, 40 measured), sorting (10,
9), index copies (4, 5), norms of groups (7, 9) and 21 of 33 sizes of softmax. Some of softmax in bf16 take 250 to 570 ns
longer for each wave, which nobody can explain (docs/log.md)."""
TURNOVER_CAPABILITY = "9"  # the major compute capability of the GPU that this was measured on
OFTEN_LIMITED_BY_MEMORY: tuple[Character, ...] = ("streaming", "other")
LEAST_TURNOVER, MOST_TURNOVER = 0.005, 0.45
"""Of the profiled time: less is within the spread of kernels' times; an empty kernel with CTAs of 1,024 threads has most."""


class Timing(Value, frozen=True, kw_only=True):
    """The known times and order of one operation, apart from the operation itself."""

    lone_us: float
    waits_for: tuple[Dependency, ...]
    issued_us: float | None
    issued_after: int | None = None
    peer_wait_us: float = 0.0


class BuiltOperations(Value, frozen=True, kw_only=True):
    """The operations of a step, and notes on what the trace lacks."""

    operations: tuple[Operation, ...]
    notes: tuple[str, ...]


def build_operations(trace: ActivityTrace, indices: tuple[int, ...], timings: list[Timing]) -> BuiltOperations:
    """Return the step's operations, in the order of `indices`; `timings` are in the same order."""
    groups = name_groups(traced.arguments.process_group for traced in trace.operations if traced.arguments.collective_name)
    gpu = gpu_with_turnovers(trace.device_name) if trace.is_by_torch else None
    streams_with_counter: set[int] = set()
    built: list[Operation] = []
    for index, timing in zip(indices, timings, strict=True):
        traced = trace.operations[index]
        if traced.category != "kernel":
            if traced.category == "memset" and traced.arguments.num_bytes == COUNTER_BYTES:
                streams_with_counter.add(traced.stream)
            built.append(_copy(traced, timing))
            continue
        rule = classify_kernel(traced.name)
        if rule.kind == "communication":
            collective = _collective(trace, traced, rule, timing)
            built.append(replace(collective, process_group=groups.get(traced.arguments.process_group)))
            continue
        is_work_sharing = rule.is_work_sharing and traced.stream in streams_with_counter
        if is_work_sharing:
            streams_with_counter.discard(traced.stream)
        built.append(_kernel(trace, traced, rule, timing, is_work_sharing=is_work_sharing, gpu=gpu))
    return BuiltOperations(operations=tuple(built), notes=notes_on_collectives(trace, indices))


def notes_on_collectives(trace: ActivityTrace, indices: Iterable[int]) -> tuple[str, ...]:
    """Return what a trace does not say of collectives that kernels do, with what is assumed; `indices` are operations."""
    missing: Counter[str] = Counter()
    for traced in map(trace.operations.__getitem__, indices):
        rule = classify_kernel(traced.name)
        if traced.category == "kernel" and rule.kind == "communication" and not rule.is_waiting:
            missing.update(_lacking(trace, traced.arguments, rule))
    return tuple(f"{format_count(count, 'collective')} {what}." for what, count in missing.items())


def _lacking(trace: ActivityTrace, arguments: LaunchArguments, rule: Rule) -> Iterator[str]:
    if not collective_kind(arguments.collective_name, rule)[1]:
        yield f"called '{shown(arguments.collective_name)}', which is unknown here: left as it is"
    elif not arguments.collective_name and rule.library == "nccl" and rule.collective == "send_recv":
        yield "whose kernel's name does not say which it is: counted as a send and receive"
    if arguments.in_elements is None or element_bytes(arguments.dtype) is None:
        yield "without an element count or with an unknown type: counted with 0 bytes"
    if not arguments.group_size:
        fewest = f"the fewest, {FEWEST_RANKS} ranks, are assumed"
        assumed = f"all {trace.world_size} ranks of the job are assumed" if trace.world_size else fewest
        yield f"without a group size: {assumed}"


def size_of_group(trace: ActivityTrace, arguments: LaunchArguments) -> int:
    """Return the ranks of a collective's group: as stated, else all of the job, else the fewest."""
    return arguments.group_size or trace.world_size or FEWEST_RANKS


def footprint_of(arguments: LaunchArguments, rule: Rule, compute_major: int) -> Footprint:
    """Return the footprint of a traced launch of a kernel of this rule."""
    num_ctas = prod(arguments.grid)
    return Footprint(
        num_ctas=num_ctas,
        threads_per_cta=prod(arguments.block),
        registers_per_thread=arguments.registers_per_thread,
        dynamic_shared_bytes=arguments.shared_bytes,
        ctas_per_cluster=ctas_per_cluster(rule, compute_major, num_ctas),
    )


def _operand(trace: ActivityTrace, traced: GpuOperation) -> str:
    """Return the type of the first input of the operator that launched the kernel, or "" if none was recorded."""
    return "" if traced.operator is None else trace.operators[traced.operator].dtype


def gpu_with_turnovers(device_name: str | None) -> Gpu | None:
    """Return the GPU of this name if torch's profiler is known to make its kernels longer."""
    machine = machine_for_device(device_name or "")
    if machine is None or not machine.gpu.compute_capability.startswith(TURNOVER_CAPABILITY):
        return None
    return machine.gpu


def without_turnovers(profiled_us: float, character: Character, footprint: Footprint, gpu: Gpu | None) -> float:
    """Return how long a kernel takes without the profiler, in microseconds; the profiled time where that is unknown.

    `gpu`: as `gpu_with_turnovers` gives it. A kernel takes longer by what the profiler adds until an SM has its next CTA,
    for each wave but the first. Kernels that the memory limits do not; a trace does not tell which elementwise kernels these
    are, and most are.
    """
    if gpu is None or character in OFTEN_LIMITED_BY_MEMORY:
        return profiled_us
    at_once = residency(gpu, footprint).ctas_per_sm * gpu.num_sms
    turnovers = max(0, ceil(footprint.num_ctas / at_once) - 1) if at_once else 0
    added_us = turnovers * (TURNOVER_US + TURNOVER_US_PER_THREAD * footprint.threads_per_cta)
    if added_us < LEAST_TURNOVER * profiled_us:
        return profiled_us
    return profiled_us - min(added_us, MOST_TURNOVER * profiled_us)


def _kernel(
    trace: ActivityTrace, traced: GpuOperation, rule: Rule, timing: Timing, *, is_work_sharing: bool, gpu: Gpu | None
) -> Kernel:
    footprint = footprint_of(traced.arguments, rule, trace.compute_major)
    return Kernel(
        name=traced.name,
        stream=traced.stream,
        footprint=footprint,
        character=rule.character,
        lone_us=without_turnovers(timing.lone_us, rule.character, footprint, gpu),
        matmul_sizes=traced.matmul_sizes if rule.character == "matmul" else None,
        element_type=matmul_type(traced.name, _operand(trace, traced)) if rule.character == "matmul" else None,
        is_work_sharing=is_work_sharing,
        priority=_priority(traced, rule),
        waits_for=timing.waits_for,
        issued_us=timing.issued_us,
        issued_after=timing.issued_after,
    )


def _collective(trace: ActivityTrace, traced: GpuOperation, rule: Rule, timing: Timing) -> Collective:
    arguments = traced.arguments
    kind, is_known = collective_kind(arguments.collective_name, rule)
    elements = max(arguments.in_elements or 0, arguments.out_elements or 0)
    group_size = size_of_group(trace, arguments)
    parts = stated_parts(trace, traced) if kind == "all_to_all" else None
    return Collective(
        name=traced.name,
        stream=traced.stream,
        collective=kind,
        num_bytes=elements * (element_bytes(arguments.dtype) or 0) if is_known else 0,
        group_size=group_size,
        ranks=ranks_of_group(arguments, group_size),
        parts=parts,
        has_unknown_parts=kind == "all_to_all" and parts is None and _gives_sizes(arguments),
        priority=_priority(traced, rule),
        library=rule.library,
        footprint=footprint_of(traced.arguments, rule, trace.compute_major),
        lone_us=timing.lone_us,
        peer_wait_us=timing.peer_wait_us,
        waits_for=timing.waits_for,
        issued_us=timing.issued_us,
        issued_after=timing.issued_after,
    )


def _priority(traced: GpuOperation, rule: Rule) -> int:
    """Return the priority of an operation's stream: as traced, or as the library asks for it."""
    return rule.priority if traced.arguments.priority is None else traced.arguments.priority


def _gives_sizes(arguments: LaunchArguments) -> bool:
    """Return whether an all-to-all's call gives sizes of parts, even if the trace cuts the list of a large group short.

    torch also calls those without sizes `all_to_allv`, with empty lists; a trace without lists does not tell more than this.
    """
    lists = [arguments.in_splits, arguments.out_splits]
    if lists == [None, None]:
        return "all_to_allv" in str(arguments.collective_name)
    return any(re.search(r"\d", str(each)) for each in lists)


def stated_parts(trace: ActivityTrace, traced: GpuOperation) -> UnevenParts | None:
    """Return the parts of an all-to-all, if the profiler lists their sizes and states which rank it traced.

    Splits are counted in rows; the number of elements gives the length of a row.
    """
    arguments = traced.arguments
    sent, received = listed_numbers(arguments.in_splits), listed_numbers(arguments.out_splits)
    size = size_of_group(trace, arguments)
    ranks = ranks_of_group(arguments, size)
    if not len(sent) == len(received) == size or trace.rank not in ranks:
        return None
    rows, elements = max((sum(sent), arguments.in_elements or 0), (sum(received), arguments.out_elements or 0))
    row_bytes = elements // rows * (element_bytes(arguments.dtype) or 0) if rows else 0
    return UnevenParts(
        sent_bytes=tuple(each * row_bytes for each in sent),
        received_bytes=tuple(each * row_bytes for each in received),
        group_rank=ranks.index(trace.rank),
    )


def _copy(traced: GpuOperation, timing: Timing) -> Copy:
    return Copy(
        name=traced.name,
        stream=traced.stream,
        direction=copy_direction(traced.name),
        num_bytes=traced.arguments.num_bytes,
        lone_us=timing.lone_us,
        waits_for=timing.waits_for,
        issued_us=timing.issued_us,
        issued_after=timing.issued_after,
    )
