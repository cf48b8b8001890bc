"""Checks whether a schedule is correct. Five checks apply to any schedule, however it was made; each says in one line
what is wrong.

- `order`: every dependency is on an earlier action, so all ranks can issue in the order of actions, and no dependencies
  form a cycle.
- `buffers`: every region lies in its buffer, and nothing is read before all of it is written. If two actions access the
  same rows, and one of them writes, one always ends before the other starts. Two consecutive calls are checked.
- `delivery`: executed in order, the results hold what the operator's definition says, each part once, and no row crosses a
  link twice.
- `signals`: no signal is sent again before the previous call's signal was received.
- `ports`: in no turn does a GPU receive more than the turn has time for; uneven blocks have no turns.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from counterpoint.errors import ScheduleError
from counterpoint.schedule.actions import Action, CopySchedule, Region
from counterpoint.schedule.delivery import delivery_faults
from counterpoint.schedule.happens_before import HappensBefore
from counterpoint.spans import union, without

NUM_CALLS = 2
Access = tuple[int, Region, bool]  # the action that accesses rows, the rows, and whether it writes


def check_schedule(schedule: CopySchedule) -> None:
    """Raise `ScheduleError` with the first fault of the first check that finds one."""
    for name, check in CHECKS:
        for fault in check(schedule):
            raise ScheduleError(
                f"The schedule fails its check of {name}: {fault}. Report it with the description and sizes."
            )


def order_faults(schedule: CopySchedule) -> Iterator[str]:
    """Yield dependencies on later actions, and ranks that do not begin and end exactly once."""
    for position, action in enumerate(schedule.actions):
        for before in action.after:
            if not 0 <= before < position:
                yield f"{_name(schedule, position)} waits for action {before}, which does not precede it"
    for kind in ("begin", "end"):
        ranks = sorted(action.rank for action in schedule.actions if action.kind == kind)
        if ranks != list(range(schedule.num_ranks)):
            yield f"the ranks with a '{kind}' are {ranks}, not each of {schedule.num_ranks} once"


def buffer_faults(schedule: CopySchedule) -> Iterator[str]:
    """Yield rows outside of their buffer, rows read before they are written, and rows that two actions access in no
    fixed order.
    """
    outside = list(_outside(schedule))
    if outside:
        yield from outside
        return
    happens = HappensBefore(schedule, NUM_CALLS)
    homes = {buffer.name: buffer.home for buffer in schedule.buffers}
    yield from _unwritten(schedule, happens, homes)
    for accesses in _accesses(schedule, homes).values():
        for (one, first, first_writes), (other, _, second_writes) in _meeting(accesses):
            is_conflict = (first_writes or second_writes) and one != other
            if is_conflict and not happens.are_ordered(one, other):
                size = len(schedule.actions)
                names = f"{_name(schedule, one % size)} and {_name(schedule, other % size)}"
                yield f"{names} may access rows of '{first.buffer}' on rank {first.rank} at the same time"


def signal_faults(schedule: CopySchedule) -> Iterator[str]:
    """Yield signals that may be sent in one call before they were received in the call before, or before the sender has
    begun: `begin` waits until every rank has reset the flags that stand for its signals.
    """
    happens = HappensBefore(schedule, NUM_CALLS)
    size = len(schedule.actions)
    begins = {action.rank: number for number, action in enumerate(schedule.actions) if action.kind == "begin"}
    for position, action in enumerate(schedule.actions):
        for before in action.after:
            sender = schedule.actions[before].rank
            if sender == action.rank:
                continue
            signal = f"{_name(schedule, before)} may signal {_name(schedule, position)}"
            if not happens.is_before(position, size + before):
                yield f"{signal} again before it has received the last signal"
            if before != begins[sender] and not happens.is_before(begins[sender], before):
                yield f"{signal} before rank {sender} has begun"
    ends = {action.rank: number for number, action in enumerate(schedule.actions) if action.kind == "end"}
    for position, action in enumerate(schedule.actions):
        if action.kind == "begin":
            for rank, end in ends.items():
                if not happens.is_before(size + position, size + end):
                    yield f"rank {rank} may end before {_name(schedule, position)} of the same call"


def port_faults(schedule: CopySchedule) -> Iterator[str]:
    """Yield ranks that must receive more in a turn than the turn has time for.

    A turn is one copy on every copy stream: the n-th copies into one buffer on all streams of all ranks. It has time for
    as many copies as any rank sends in it, each as long as the longest, and for one row per rank and slice, by which unequal
    blocks shift turns; where chunks grow, for one more copy, because a small chunk may have no row of a shorter block.
    Uneven blocks have no turns: the routing determines what a rank receives.
    """
    if schedule.routing is not None:
        return
    num_slices = 1 if schedule.description.along == "rows" else schedule.description.chunks
    is_shifting = schedule.description.chunk_growth != 1 and schedule.num_rows % schedule.num_ranks != 0
    turns: dict[tuple[str, int], list[Action]] = {}
    for key, action in _turns(schedule):
        turns.setdefault(key, []).append(action)
    for (buffer, turn), copies in turns.items():
        sent, received = Counter(copy.rank for copy in copies), Counter[int]()
        for copy in copies:
            received[copy.writes[0].rank] += copy.writes[0].num_rows
        longest = max(copy.writes[0].num_rows for copy in copies)
        capacity = (max(sent.values()) + is_shifting) * longest + schedule.num_ranks * num_slices
        for rank, num_rows in received.items():
            if num_rows > capacity:
                yield f"rank {rank} receives {num_rows} rows in turn {turn} of '{buffer}', which has time for {capacity}"


CHECKS: tuple[tuple[str, Callable[[CopySchedule], Iterable[str]]], ...] = (
    ("order", order_faults),
    ("buffers", buffer_faults),
    ("delivery", delivery_faults),
    ("signals", signal_faults),
    ("ports", port_faults),
)


def _turns(schedule: CopySchedule) -> Iterator[tuple[tuple[str, int], Action]]:
    counts = Counter[tuple[int, str, str]]()
    for action in schedule.actions:
        if action.kind == "copy":
            buffer = action.writes[0].buffer
            key = (action.rank, action.stream, buffer)
            yield (buffer, counts[key]), action
            counts[key] += 1


def _outside(schedule: CopySchedule) -> Iterator[str]:
    buffers = {buffer.name: buffer for buffer in schedule.buffers}
    for position, action in enumerate(schedule.actions):
        for region in (*action.reads, *action.writes):
            if region.buffer not in buffers:
                yield f"{_name(schedule, position)} accesses '{region.buffer}', which is not a buffer of the schedule"
            elif not 0 <= region.start <= region.stop <= (most := buffers[region.buffer].rows_of(region.rank)):
                rows = f"rows {region.start} to {region.stop} of the {most} of '{region.buffer}'"
                yield f"{_name(schedule, position)} touches {rows}"


def _unwritten(schedule: CopySchedule, happens: HappensBefore, homes: Mapping[str, str]) -> Iterator[str]:
    writes: dict[tuple[int, str], list[tuple[int, Region]]] = {}
    for position, action in enumerate(schedule.actions):
        for region in action.writes:
            writes.setdefault((region.rank, region.buffer), []).append((position, region))
    for position, action in enumerate(schedule.actions):
        for wanted in action.reads:
            if homes[wanted.buffer] == "given" or not wanted.num_rows:
                continue
            earlier = writes.get((wanted.rank, wanted.buffer), [])
            written = union((each.start, each.stop) for number, each in earlier if happens.is_before(number, position))
            if without([(wanted.start, wanted.stop)], written):
                yield f"{_name(schedule, position)} reads rows of '{wanted.buffer}' that may not be written yet"


def _meeting(accesses: Iterable[Access]) -> Iterator[tuple[Access, Access]]:
    """Yield pairs of accesses of one buffer that share a row."""
    by_start = sorted((access for access in accesses if access[1].num_rows), key=lambda access: access[1].start)
    for number, access in enumerate(by_start):
        for other in itertools.islice(by_start, number + 1, None):
            if other[1].start >= access[1].stop:
                break
            yield access, other


def _accesses(schedule: CopySchedule, homes: Mapping[str, str]) -> dict[tuple[int, str, int], list[Access]]:
    """Return the accesses by buffer; buffers that each call creates anew are separate for each call."""
    found: dict[tuple[int, str, int], list[Access]] = {}
    for call in range(NUM_CALLS):
        for position, action in enumerate(schedule.actions):
            number = call * len(schedule.actions) + position
            for regions, is_write in ((action.reads, False), (action.writes, True)):
                for region in regions:
                    is_kept = homes[region.buffer] == "symmetric"
                    key = (region.rank, region.buffer, 0 if is_kept else call)
                    found.setdefault(key, []).append((number, region, is_write))
    return found


def _name(schedule: CopySchedule, position: int) -> str:
    action = schedule.actions[position]
    return f"action {position} ({action.kind} of rank {action.rank} on '{action.stream}')"
