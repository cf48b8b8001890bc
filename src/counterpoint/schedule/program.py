"""One rank's part of a schedule: the steps it issues, what each waits for, and the flags between ranks.

Waits that a stream has already made, directly or for later work on the same stream, are left out; only the waits that the
hardware needs remain. A flag belongs to one dependency of one rank on another; both ranks give it the same number, because
they derive all numbers from the same schedule.
"""

from counterpoint.schedule.actions import FIRST_COMPUTE, Action, CopySchedule
from counterpoint.value import Value

FREE = 0  # the flag by which a rank says that it has begun: its symmetric buffers may be written, and its flags raised


class Flag(Value, frozen=True, kw_only=True):
    """Flag `number` between this rank and `peer`."""

    peer: int
    number: int


class Instruction(Value, frozen=True, kw_only=True):
    """An action of this rank, or a copy that another rank sends to it (`is_incoming`).

    `announces`: flags of others to raise first. `takes`: flags to wait for. `waits`: earlier steps, by position in the
    schedule, on other streams of this rank. `raises`: flags of others to raise when it is done. `is_awaited`: another
    stream of this rank waits for it.

    `begin` lowers all flags that later steps take, and then announces. So steps that take flags wait for it, and no other
    step lowers one; those that `begin` itself takes it lowers afterwards.
    """

    position: int
    action: Action
    announces: tuple[Flag, ...] = ()
    takes: tuple[Flag, ...] = ()
    waits: tuple[int, ...] = ()
    raises: tuple[Flag, ...] = ()
    is_awaited: bool = False
    is_incoming: bool = False


class Program(Value, frozen=True, kw_only=True):
    """The steps of one rank in issue order, its streams, and how many flag numbers it shares with a peer at most."""

    rank: int
    steps: tuple[Instruction, ...]
    streams: tuple[str, ...]
    num_flags: int


class _Waits:
    """What every stream has waited for so far: the latest position on each other stream."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, str, int, str], int] = {}

    def is_new(self, action: Action, earlier: Action, position: int) -> bool:
        """Return whether the stream needs this wait, and record it."""
        key = (action.rank, action.stream, earlier.rank, earlier.stream)
        if self._latest.get(key, -1) >= position:
            return False
        self._latest[key] = position
        return True


def make_program(schedule: CopySchedule, rank: int) -> Program:
    """Return the part of `rank`. Copies to it are steps, too, for transports on which the receiver has to act."""
    takes, raises, waits = _edges(schedule)
    peers = [peer for peer in range(schedule.num_ranks) if peer != rank]
    awaited = {position for positions in waits.values() for position in positions}
    steps = []
    for position, action in enumerate(schedule.actions):
        is_incoming = action.kind == "copy" and action.rank != rank and action.writes[0].rank == rank
        if action.rank != rank:
            if is_incoming:
                steps.append(Instruction(position=position, action=action, is_incoming=True))
            continue
        free = tuple(Flag(peer=peer, number=FREE) for peer in peers) if action.kind == "begin" else ()
        steps.append(
            Instruction(
                position=position,
                action=action,
                announces=free,
                takes=free or tuple(takes.get(position, ())),
                waits=tuple(waits.get(position, ())),
                raises=tuple(raises.get(position, ())),
                is_awaited=position in awaited,
            )
        )
    streams = sorted({step.action.stream for step in steps if not step.is_incoming} | {FIRST_COMPUTE})
    most = max((flag.number for step in steps for flag in (*step.takes, *step.raises)), default=FREE)
    return Program(rank=rank, steps=tuple(steps), streams=tuple(streams), num_flags=most + 1)


def _edges(schedule: CopySchedule) -> tuple[dict[int, list[Flag]], dict[int, list[Flag]], dict[int, list[int]]]:
    """Return the flags taken and raised, and the local waits, by position; flags are numbered over the whole schedule."""
    known = _Waits()
    takes: dict[int, list[Flag]] = {}
    raises: dict[int, list[Flag]] = {}
    waits: dict[int, list[int]] = {}
    numbers: dict[tuple[int, int], int] = {}
    begins = {action.rank: position for position, action in enumerate(schedule.actions) if action.kind == "begin"}
    for position, action in enumerate(schedule.actions):
        for before in action.after:
            earlier = schedule.actions[before]
            if not known.is_new(action, earlier, before):
                continue
            if earlier.rank == action.rank:
                waits.setdefault(position, []).append(before)
                continue
            pair = (earlier.rank, action.rank)
            numbers[pair] = numbers.get(pair, FREE) + 1
            raises.setdefault(before, []).append(Flag(peer=action.rank, number=numbers[pair]))
            takes.setdefault(position, []).append(Flag(peer=earlier.rank, number=numbers[pair]))
            begin = begins[action.rank]
            if action.stream != schedule.actions[begin].stream and known.is_new(action, schedule.actions[begin], begin):
                waits.setdefault(position, []).append(begin)
    return takes, raises, waits
