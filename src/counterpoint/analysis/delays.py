"""Finds why a collective started later than it could have: issued late by the host, queued behind another, without SMs,
or in a hardware queue.

A collective is ready once what it waits for has ended and the host has launched it. Each cause's delay follows the one
before:

- late: from the end of what it waits for to its launch;
- queued: from then to the end of the previous collective on its stream or communicator; but starved for as long as kernels
  kept the SMs from those ahead of it since the queue was last empty: otherwise it would have come that much earlier;
- starved: from then to its start, if kernels ran that leave its CTAs no room (by footprints; a pair of kernels that the
  trace shows side by side fits, whatever footprints say);
- hardware queue: from then to its start, if SMs were free but more streams were in use than there are hardware queues, or
  if it started only after the operation issued before it on another stream had started.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from math import prod

from counterpoint.analysis.collectives import RankCollectives
from counterpoint.analysis.timed import TimedTrace, format_ns
from counterpoint.analysis.values import Cause, Role
from counterpoint.errors import CounterpointError
from counterpoint.kernel_names import short_name
from counterpoint.machine import Gpu, machine_for_device
from counterpoint.occupancy import room_beside
from counterpoint.step import Footprint
from counterpoint.traces.activity import GpuOperation
from counterpoint.traces.classify import classify_kernel
from counterpoint.traces.issue import LATE_LATENCY_US
from counterpoint.traces.operations import footprint_of
from counterpoint.units import NS_PER_US
from counterpoint.value import Value

LEAST_DELAY_NS = 10_000
"""Launches and events take up to this long; a shorter delay needs no cause."""
JUST_STARTED_NS = 20_000
DEFAULT_CONNECTIONS = 8
"""Hardware queues of a process, unless CUDA_DEVICE_MAX_CONNECTIONS says otherwise (CUDA programming guide)."""
DRAINING_SHARE = 0.2
"""In the last part of a persistent kernel its CTAs end one by one: what starts then need not fit beside the kernel."""
FARTHEST_BACK = 200


class Delay(Value, frozen=True, kw_only=True):
    """The time for which one cause held a collective back, and the evidence in words."""

    cause: Cause
    time: int
    evidence: str


class Delays:
    """Finds what held collectives of one trace back."""

    def __init__(
        self, timed: TimedTrace, roles: tuple[Role, ...], found: RankCollectives, computation: Sequence[int]
    ) -> None:
        """`computation` holds the trace's operations of that role, by start."""
        self._timed, self._roles, self._found, self._computation = timed, roles, found, computation
        self._starts = [timed.starts[index] for index in computation]
        machine = machine_for_device(timed.trace.device_name) if timed.trace.device_name else None
        self._gpu = machine.gpu if machine else None
        self._seen = self._pairs_seen()
        self._starved: dict[int, tuple[int, str]] = {}

    def of(self, number: int) -> list[Delay]:
        """Return what held a collective back, in order of time."""
        timed = self._timed
        index = self._found.members[number].operations[0]
        start, launch = timed.starts[index], timed.launches[index]
        if launch is None or launch > start:
            return []
        data, data_end, queue, queue_end = self._before(number, index)
        delays: list[Delay] = []
        others = max(data_end, queue_end)
        if data is not None and launch > others and start - launch <= LATE_LATENCY_US * NS_PER_US:
            delays.append(self._late(index, data if data_end >= queue_end else queue, launch - others))
        if queue is not None and queue_end > max(data_end, launch):
            delays += self._queued(queue, queue_end - max(data_end, launch))
        held = self._held(index, max(launch, others), start) if data is not None else []
        return [delay for delay in (*delays, *held) if delay.time >= LEAST_DELAY_NS]

    def _before(self, number: int, index: int) -> tuple[int | None, int, int | None, int]:
        """Return what it needs and what it is queued behind: the last of each to end, and when (-1 if none is known)."""
        timed, group = self._timed, self._found.values[number].process_group
        stream = timed.stream_of(index)
        needed: list[tuple[int, int]] = []
        queue: list[tuple[int, int]] = []
        for other in timed.held_by(index):
            of = self._found.by_operation.get(other)
            is_queue = of is not None and (timed.stream_of(other) == stream or self._found.values[of].process_group == group)
            if timed.ends[other] <= timed.starts[index]:
                (queue if is_queue else needed).append((timed.ends[other], other))
        if not needed:  # its producers are unknown: assume nothing later than the last computation issued before it
            needed = self._issued_earlier(index)
        data_end, data = max(needed, default=(-1, None))
        queue_end, behind = max(queue, default=(-1, None))
        return data, data_end, behind, queue_end

    def _issued_earlier(self, index: int) -> list[tuple[int, int]]:
        """Return the last computation issued before an operation, on another stream, that had ended by its start."""
        timed = self._timed
        for other in range(index - 1, max(-1, index - FARTHEST_BACK), -1):
            is_other = timed.stream_of(other) != timed.stream_of(index) and self._roles[other] == "computation"
            if is_other and timed.ends[other] <= timed.starts[index]:
                return [(timed.ends[other], other)]
        return []

    def _queued(self, behind: int, waited: int) -> list[Delay]:
        """Return the delays in the queue behind an operation of the previous collective: starved time, and the rest."""
        what = self._found.values[self._found.by_operation[behind]]
        said = (
            f"It was ready {format_ns(waited)} before {what.name} on stream {what.stream} ended, and was queued behind that."
        )
        total, holder = self._starved_in_queue(behind)
        starved = min(total, waited)
        because = f"{said} The queue had waited {format_ns(total)} for SMs. For the last operation in it: {holder}"
        return [
            Delay(cause="queued", time=waited - starved, evidence=said),
            Delay(cause="starved", time=starved, evidence=because),
        ]

    def _starved_in_queue(self, index: int) -> tuple[int, str]:
        """Return how long an operation and those queued before it waited for SMs since the queue was last empty, and why."""
        line: list[tuple[int, int, str]] = []
        place: int | None = index
        while place is not None and place not in self._starved:
            start, launch = self._timed.starts[place], self._timed.launches[place]
            data, data_end, queue, queue_end = self._before(self._found.by_operation[place], place)
            begun = max(data_end, start if launch is None else launch)
            is_known = data is not None or queue is not None
            held = self._held(place, max(begun, queue_end), start) if is_known else []
            own = next((delay for delay in held if delay.cause == "starved"), None)
            line.append((place, own.time if own else 0, own.evidence if own else ""))
            place = queue if queue_end > begun else None
        total, said = self._starved[place] if place is not None else (0, "")
        for number, time, evidence in reversed(line):
            total, said = total + time, evidence or said
            self._starved[number] = (total, said)
        return total, said

    def _late(self, index: int, after: int | None, time: int) -> Delay:
        timed = self._timed
        launch = timed.launches[index] or 0
        wait = timed.waited_host(launch - time, launch)
        why = " The host had waited for the GPU." if wait is not None and wait[1] - wait[0] > LEAST_DELAY_NS else ""
        name = "" if after is None else f" after {short_name(timed.trace.operations[after].name)} ended"
        later = format_ns(timed.starts[index] - launch)
        said = f"The host issued it {format_ns(time)}{name}, and it started {later} later.{why}"
        return Delay(cause="launched_late", time=time, evidence=said)

    def _held(self, index: int, ready: int, start: int) -> list[Delay]:
        """Return what held it once it was ready: kernels on the SMs, or a hardware queue. Copies need no SMs."""
        waited, operation = start - ready, self._timed.trace.operations[index]
        if waited < LEAST_DELAY_NS or operation.category != "kernel":
            return []
        beside = self._running(ready, start)
        covered = sum(time for time, _ in beside)
        holder = max(beside, default=None)
        if holder is not None and 2 * covered >= waited and not self._fits(operation, holder[1]):
            kernel = self._timed.trace.operations[holder[1]]
            said = (
                f"It was launched and ready {format_ns(waited)} before it started. For {format_ns(holder[0])} of that, "
                f"{short_name(kernel.name)} ({prod(kernel.arguments.grid)} CTAs) ran and left its CTAs no room."
            )
            return [Delay(cause="starved", time=waited, evidence=said)]
        before = self._issued_before(index)
        num_streams = len(self._timed.streams)
        if num_streams > DEFAULT_CONNECTIONS or before is not None:
            name = (
                ""
                if before is None
                else f"; it began as soon as {short_name(self._timed.trace.operations[before].name)} had"
            )
            said = (
                f"It was launched and ready {format_ns(waited)} before it started, and SMs were free{name}. {num_streams} "
                f"streams share the hardware queues (CUDA_DEVICE_MAX_CONNECTIONS, {DEFAULT_CONNECTIONS} unless it is set)."
            )
            return [Delay(cause="hardware_queue", time=waited, evidence=said)]
        return []

    def _running(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the computation that ran in a span, and for how long."""
        timed = self._timed
        found = []
        place = bisect_left(self._starts, end)
        for index in self._computation[max(0, place - FARTHEST_BACK) : place]:
            time = min(timed.ends[index], end) - max(timed.starts[index], begin)
            if time > 0:
                found.append((time, index))
        return found

    def _issued_before(self, index: int) -> int | None:
        """Return the operation issued directly before on another stream, if it began within moments of this one's start."""
        timed = self._timed
        for other in range(index - 1, max(-1, index - 3), -1):
            if timed.stream_of(other) != timed.stream_of(index) and self._roles[other] == "computation":
                return other if 0 <= timed.starts[index] - timed.starts[other] <= JUST_STARTED_NS else None
        return None

    def _fits(self, collective: GpuOperation, kernel_index: int) -> bool:
        """Return whether CTAs of a collective find room beside a kernel. Copies need none."""
        kernel = self._timed.trace.operations[kernel_index]
        if collective.category != "kernel" or (_pair(collective), _pair(kernel)) in self._seen:
            return True
        num_sms = self._timed.trace.num_sms or (self._gpu.num_sms if self._gpu else 0)
        if prod(kernel.arguments.grid) + prod(collective.arguments.grid) <= num_sms:
            return True
        if self._gpu is None:
            return False
        return _fits_beside(self._gpu, _footprint(self._timed, kernel), _footprint(self._timed, collective))

    def _pairs_seen(self) -> set[tuple[str, str]]:
        """Return pairs of a collective and a kernel of which one started well within the other: they fit side by side."""
        timed, seen = self._timed, set()
        for number in range(len(self._found.members)):
            index = self._found.members[number].operations[0]
            operation = timed.trace.operations[index]
            place = bisect_left(self._starts, timed.starts[index] - 1000) - 1
            if place < 0 or operation.category != "kernel":
                continue
            kernel = self._computation[place]
            if timed.ends[kernel] - timed.starts[index] > DRAINING_SHARE * (timed.ends[kernel] - timed.starts[kernel]):
                seen.add((_pair(operation), _pair(timed.trace.operations[kernel])))
        return seen


def _pair(operation: GpuOperation) -> str:
    return f"{operation.name} {operation.arguments.grid} {operation.arguments.block}"


def _footprint(timed: TimedTrace, operation: GpuOperation) -> Footprint:
    return footprint_of(operation.arguments, classify_kernel(operation.name), timed.trace.compute_major)


@cache
def _fits_beside(gpu: Gpu, kernel: Footprint, collective: Footprint) -> bool:
    try:
        return room_beside(gpu, kernel, collective) > 0
    except CounterpointError:
        return False
