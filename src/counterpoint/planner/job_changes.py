"""Changes that a user could make to a job if no control pays, each simulated as a rearranged step.

A step records the order of its operations, not which data each of them needs. So each simulated time is a bound under an
assumption, which is part of the change's description. The user has to say whether the data flow allows it. Collectives
that are cut or joined keep their present rate.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from msgspec.structs import replace

from counterpoint.controls import OverlapMatmul
from counterpoint.machine import Machine
from counterpoint.measurement.values import LEAST_SIMULATED_GAIN
from counterpoint.metrics import measure
from counterpoint.plan import LEAVE_IT, Plan
from counterpoint.planner.movements import obstacle_to_moving
from counterpoint.sim.expert_layers import ExpertLayers, issued_sooner_us
from counterpoint.step import Collective, Dependency, Kernel, Operation, Step
from counterpoint.timeline import AbstractExecutor
from counterpoint.units import MIB
from counterpoint.value import Value

MOST_CHANGES = 3
LEAST_BUCKET_BYTES = MIB  # smaller all-reduces are no gradient buckets
LEAST_BUCKETS = 3
OWN_STREAM = (
    "issue each {} on a separate stream, beside the next matmul or attention kernel; possible if that kernel "
    "does not need its result"
)
PREFETCH = (
    "issue each all_gather one layer earlier (FSDP2: set_modules_to_forward_prefetch), at the cost of the "
    "memory of one more layer; possible if it gathers parameters"
)
GROUPED = (
    "multiply the experts of a layer by grouped matmuls, with fewer launches, as expert_parallel.overlap does; possible "
    "where all of a run of {} matmuls become one"
)
LARGER_BUCKETS = "gradient buckets twice as large (DDP: bucket_cap_mb)"
SMALLER_BUCKETS = "gradient buckets half as large (DDP: bucket_cap_mb)"

Entry = tuple[tuple[int, ...], Operation]  # the operations, by number, that it stands for, and what it is


class JobChange(Value, frozen=True, kw_only=True):
    """One change of the job in words, with the step's simulated makespan before and after it."""

    change: str
    baseline_us: float
    changed_us: float


class JobChanges(Value, frozen=True, kw_only=True):
    """All simulated changes, and those that would shorten the step noticeably, the shortest first."""

    simulated: tuple[JobChange, ...] = ()
    helpful: tuple[JobChange, ...] = ()


def find_job_changes(step: Step, machine: Machine, executor: AbstractExecutor, plan: Plan = LEAVE_IT) -> JobChanges:
    """Simulate each change that applies to `step` by itself, other than what operators of the plan do; report at most
    `MOST_CHANGES` as helpful.

    A helpful change saves at least `LEAST_SIMULATED_GAIN` of the makespan.
    """
    changed = list(_changed_steps(step, plan))
    if not changed:
        return JobChanges()
    baseline_us = measure(executor.run(step, machine, LEAVE_IT)).makespan_us
    found = [
        JobChange(
            change=words, baseline_us=baseline_us, changed_us=measure(executor.run(other, machine, LEAVE_IT)).makespan_us
        )
        for words, other in changed
    ]
    helpful = [each for each in found if each.changed_us <= (1 - LEAST_SIMULATED_GAIN) * baseline_us]
    helpful.sort(key=lambda each: each.changed_us)
    return JobChanges(simulated=tuple(found), helpful=tuple(helpful[:MOST_CHANGES]))


def _changed_steps(step: Step, plan: Plan = LEAVE_IT) -> Iterator[tuple[str, Step]]:
    """Yield each change in words with the changed step, only for changes that apply to the step."""
    kernels = Counter(operation.stream for operation in step.operations if isinstance(operation, Kernel))
    if not kernels:
        return
    main = kernels.most_common(1)[0][0]
    on_main = [number for number, each in _movable(step) if each.stream == main]
    if on_main:
        names = dict.fromkeys(each.collective for each in step.collectives().values())
        used = dict.fromkeys(step.collective(number).collective for number in on_main)
        yield OWN_STREAM.format(" and ".join(name for name in names if name in used)), _on_own_stream(step, main, on_main)
    gathers = _beside(step, main, "all_gather")
    if len(gathers) > 1:
        earlier = _prefetched(step, main, gathers)
        if earlier != step:
            yield PREFETCH, earlier
    if not _overlaps_experts(plan, step) and (runs := ExpertLayers(step).runs()):
        yield GROUPED.format(max(map(len, runs))), _grouped(step, runs)
    if buckets := _buckets(step, main):
        yield LARGER_BUCKETS, _merged(step, buckets)
        halves = _halved(step, main, buckets)
        if halves != step:
            yield SMALLER_BUCKETS, halves


def _beside(step: Step, main: int, collective: str) -> list[int]:
    """Return collectives of one kind that run on streams without computation."""
    found = [(number, each) for number, each in _movable(step) if each.stream != main]
    return [number for number, each in found if each.collective == collective]


def _movable(step: Step) -> list[tuple[int, Collective]]:
    """Return the collectives, with their numbers, that move data between GPUs, or may."""
    return [(number, each) for number, each in step.collectives().items() if obstacle_to_moving(each) is None]


def _on_own_stream(step: Step, main: int, moved: Sequence[int]) -> Step:
    """Move collectives from the computation's stream to a new one; what follows the next matmul there waits for each.

    What a collective awaits of other streams still delays the next operation of its old stream.
    """
    operations = list(step.operations)
    own = max(operation.stream for operation in operations) + 1
    rest = [n for n, each in enumerate(step.operations) if each.stream == main and n not in set(moved)]
    for number in moved:
        before = max((n for n in rest if n < number), default=None)
        waits = () if before is None else (before,)
        operations[number] = replace(_waiting(operations[number], waits), stream=own)
        after = [n for n in rest if n > number]
        for beside in after[:1]:
            awaited = (wait.operation for wait in step.operations[number].waits_for)
            others = [n for n in awaited if step.operations[n].stream != main]
            operations[beside] = _waiting(operations[beside], others)
        large = next((place for place, n in enumerate(after) if _is_large(step.operations[n])), len(after))
        for consumer in after[large + 1 : large + 2]:
            operations[consumer] = _waiting(operations[consumer], (number,))
    return replace(step, operations=tuple(operations))


def _is_large(operation: Operation) -> bool:
    return isinstance(operation, Kernel) and operation.character in ("matmul", "attention")


def _waiting(operation: Operation, numbers: Iterable[int]) -> Operation:
    """Return the operation with these dependencies added."""
    known = {wait.operation for wait in operation.waits_for}
    added = tuple(Dependency(operation=number) for number in numbers if number not in known)
    return replace(operation, waits_for=(*operation.waits_for, *added))


def _prefetched(step: Step, main: int, gathers: Sequence[int]) -> Step:
    """Issue each all-gather, with its preparation, one layer earlier: it waits for no later computation than the
    previous one does now.
    """
    operations = list(step.operations)
    latest = -1
    for previous, gather in zip([-1, *gathers], gathers, strict=False):
        part = _prepared_by(step, main, gather, previous)
        needed = [wait.operation for n in part for wait in step.operations[n].waits_for]
        newest = max((n for n in needed if step.operations[n].stream == main), default=-1)
        if previous >= 0 and newest > latest:
            for number in part:
                operations[number] = _waiting_no_later(step, number, main, latest)
        latest = max(latest, newest)
    return replace(step, operations=tuple(operations))


def _waiting_no_later(step: Step, number: int, main: int, latest: int) -> Operation:
    """Return operation `number` with `latest` in place of its later dependencies on the main stream, and not delayed by
    the host.
    """
    operation = step.operations[number]
    kept = [
        wait for wait in operation.waits_for if step.operations[wait.operation].stream != main or wait.operation <= latest
    ]
    is_changed = len(kept) < len(operation.waits_for)
    issued_us = step.operations[latest].issued_us if latest >= 0 else None
    fewer = replace(operation, waits_for=tuple(kept), issued_us=issued_us)
    return _waiting(fewer, (latest,) if is_changed and latest >= 0 else ())


def _prepared_by(step: Step, main: int, gather: int, previous: int) -> list[int]:
    """Return the gather and its dependencies on other streams since the previous gather, direct or indirect."""
    part, left = {gather}, [gather]
    while left:
        for wait in step.operations[left.pop()].waits_for:
            number = wait.operation
            if number > previous and number not in part and step.operations[number].stream != main:
                part.add(number)
                left.append(number)
    return sorted(part)


def _overlaps_experts(plan: Plan, step: Step) -> bool:
    """Return whether the plan lets operators run expert layers, which multiply by grouped matmuls."""
    controls = plan.controls_of(step)
    return any(isinstance(each, OverlapMatmul) for layer in ExpertLayers(step).found for each in controls[layer.dispatch])


def _grouped(step: Step, runs: Sequence[tuple[int, ...]]) -> Step:
    """Replace each run of matmuls by one, which takes as long as they do on their streams; the host issues what follows
    sooner.
    """
    run_of = {number: run for run in runs for number in run}
    entries: list[Entry] = []
    for number, (operation, sooner_us) in enumerate(zip(step.operations, issued_sooner_us(step, runs), strict=True)):
        run, issued_us = run_of.get(number, ()), operation.issued_us
        if issued_us is not None:
            operation = replace(operation, issued_us=max(0.0, issued_us - sooner_us))  # noqa: PLW2901
        if run[:1] == (number,):
            matmuls = [step.kernel(each) for each in run]
            waiting = _waiting(operation, (wait.operation for each in matmuls[1:] for wait in each.waits_for))
            lone_us = sum(each.lone_us or 0.0 for each in matmuls) / len({each.stream for each in matmuls})
            entries.append((run, replace(waiting, lone_us=lone_us or None)))
        elif not run:
            entries.append(((number,), operation))
    return _assembled(step, entries)


def _buckets(step: Step, main: int) -> list[int]:
    """Return the longest run of all-reduces in which no operation waits for one before the next is issued, as with
    gradient buckets; none if it has fewer than `LEAST_BUCKETS`.
    """
    reductions = [n for n in _beside(step, main, "all_reduce") if step.collective(n).num_bytes >= LEAST_BUCKET_BYTES]
    first_use: dict[int, int] = {}
    for number, operation in enumerate(step.operations):
        for wait in operation.waits_for:
            first_use.setdefault(wait.operation, number)
    runs: list[list[int]] = []
    for number in reductions:
        last = runs[-1][-1] if runs else None
        if last is not None and first_use.get(last, len(step.operations)) > number and _are_alike(step, last, number):
            runs[-1].append(number)
        else:
            runs.append([number])
    longest = max(runs, key=len, default=[])
    return longest if len(longest) >= LEAST_BUCKETS else []


def _are_alike(step: Step, one: int, other: int) -> bool:
    first, second = step.collective(one), step.collective(other)
    return (first.stream, first.group_size, first.process_group) == (second.stream, second.group_size, second.process_group)


def _merged(step: Step, buckets: Sequence[int]) -> Step:
    """Join every second bucket with the one before it."""
    partner = dict(zip(buckets[1::2], buckets[::2], strict=False))
    gone = set(partner.values())
    entries: list[Entry] = []
    for number, operation in enumerate(step.operations):
        if number in gone:
            continue
        if number not in partner:
            entries.append(((number,), operation))
            continue
        first, second = step.collective(partner[number]), step.collective(number)
        together = replace(
            _waiting(second, (wait.operation for wait in first.waits_for)),
            num_bytes=first.num_bytes + second.num_bytes,
            lone_us=None if first.lone_us is None or second.lone_us is None else first.lone_us + second.lone_us,
        )
        entries.append(((partner[number], number), together))
    return _assembled(step, entries)


def _halved(step: Step, main: int, buckets: Sequence[int]) -> Step:
    """Cut every bucket but the first in two; the first half is sent when half of its gradients are there.

    Gradients are assumed to arrive evenly over the computation since the previous bucket was full.
    """
    halves: dict[int, int] = {}  # the operation after which the first half of a bucket is issued
    for before, number in pairwise(buckets):
        filled, full = _filled_by(step, main, before), _filled_by(step, main, number)
        filling = [n for n in range(filled + 1, full + 1) if step.operations[n].stream == main]
        middle = filling[len(filling) // 2 - 1] if len(filling) > 1 else before
        if middle > before:
            halves[middle] = number
    cut = set(halves.values())
    entries: list[Entry] = []
    for number, operation in enumerate(step.operations):
        entries.append(((number,), _half(step, number, 1) if number in cut else operation))
        if number in halves:
            first = _half(step, halves[number], 0)
            entries.append(((), replace(first, waits_for=(Dependency(operation=number),), issued_us=operation.issued_us)))
    return _assembled(step, entries) if cut else step


def _filled_by(step: Step, main: int, bucket: int) -> int:
    """Return the last computation that a bucket waits for."""
    waits = (wait.operation for wait in step.operations[bucket].waits_for)
    return max((number for number in waits if step.operations[number].stream == main), default=bucket)


def _half(step: Step, number: int, which: int) -> Collective:
    whole = step.collective(number)
    num_bytes = whole.num_bytes // 2
    return replace(
        whole,
        num_bytes=whole.num_bytes - num_bytes if which else num_bytes,
        lone_us=None if whole.lone_us is None else whole.lone_us / 2,
        peer_wait_us=whole.peer_wait_us / 2,
    )


def _assembled(step: Step, entries: Sequence[Entry]) -> Step:
    """Build a step of these entries; their dependencies, given by the numbers of `step`, are renumbered."""
    places = {number: place for place, (numbers, _) in enumerate(entries) for number in numbers}
    operations: list[Operation] = []
    for _, operation in entries:
        place = len(operations)
        waits = sorted({places[wait.operation] for wait in operation.waits_for} - {place})
        after = None if operation.issued_after is None else places[operation.issued_after]
        dependencies = tuple(Dependency(operation=each) for each in waits)
        operations.append(replace(operation, waits_for=dependencies, issued_after=after))
    return replace(step, operations=tuple(operations))
