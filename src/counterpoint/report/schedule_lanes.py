"""Draws a copy schedule's estimate as lanes of one rank: what arrives, its computation streams, its copies to others.

A lane is a row of brackets, one pair for each action, as wide as the action is long: `[a-------]`. If a label leaves no
room for both brackets, it has one or none. Labels that do not fit at all are listed in words. Arrivals get letters in
the order in which they start. A matmul piece carries the letters of what it needs, `>` and the ranks that its result
goes to, or `own`. This module draws the estimate and does not know how it was made.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from counterpoint.schedule import Action, CopySchedule
from counterpoint.schedule.actions import Region
from counterpoint.schedule.estimate import Estimate
from counterpoint.value import Value

ARRIVING = "arriving"
NUM_LETTERS = 26
ROUNDING = 1e-9  # share of a column: a column that lacks only float rounding counts as covered
SHORT_LABELS = {"sum": "sum", "activate": "act", "weight_gradient": "dW", "place": "put"}


class LaneSpan(Value, frozen=True, kw_only=True):
    """One action: its label, and when it runs."""

    label: str
    start_us: float
    end_us: float


class StreamLane(Value, frozen=True, kw_only=True):
    """One row of the picture: a stream of the rank, or what others send to it."""

    name: str
    spans: tuple[LaneSpan, ...]


def lanes_of(schedule: CopySchedule, estimated: Estimate, rank: int) -> tuple[StreamLane, ...]:
    """Return the lanes of `rank`: arrivals first, then its streams by name. `end`, and actions that take no time, have
    no span.
    """
    labels = label_actions(schedule, estimated, rank)
    arriving: list[LaneSpan] = []
    streams: dict[str, list[LaneSpan]] = {}
    for position, action in enumerate(schedule.actions):
        span = estimated.spans[position]
        if position not in labels or action.kind == "end" or span.start_us == span.end_us:
            continue
        shown = LaneSpan(label=labels[position], start_us=span.start_us, end_us=span.end_us)
        if action.rank == rank:
            streams.setdefault(action.stream, []).append(shown)
        else:
            arriving.append(shown)
    own = (StreamLane(name=name, spans=tuple(streams[name])) for name in sorted(streams, key=_stream_order))
    return *_packed(arriving), *own


def label_actions(schedule: CopySchedule, estimated: Estimate, rank: int) -> dict[int, str]:
    """Return the label of each action that runs on `rank` or sends to it, by position in the schedule."""
    incoming = [
        position
        for position, action in enumerate(schedule.actions)
        if action.kind == "copy" and action.writes[0].rank == rank and action.rank != rank
    ]
    incoming.sort(key=lambda position: (estimated.spans[position].start_us, position))
    order = {position: number for number, position in enumerate(incoming)}
    arrivals = [(schedule.actions[position].writes[0], number) for position, number in order.items()]
    for position in schedule.of_rank(rank):
        action = schedule.actions[position]
        if action.kind == "place":  # from then on, what arrived is somewhere else
            arrivals += [(action.writes[0], number) for number in _needs(action, arrivals)]
    departures = [
        (action.reads[0], action.writes[0].rank)
        for action in schedule.actions
        if action.kind == "copy" and action.rank == rank
    ]
    labels = {position: letters([number]) for position, number in order.items()}
    for position in schedule.of_rank(rank):
        labels[position] = _label(schedule.actions[position], arrivals, departures)
    return labels


def letters(numbers: Iterable[int]) -> str:
    """Write arrivals as letters, consecutive ones as a range: 0, 1, 2, 5 is `a-c,f`; number 26 is `a2`."""
    return _ranges(numbers, lambda number: f"{chr(ord('a') + number % NUM_LETTERS)}{_round(number)}")


def draw_lane(lane: StreamLane, num_columns: int, total_us: float) -> str:
    """Draw the lane over `total_us` microseconds in `num_columns` characters; a span too short for any label is `[-]` or
    `|`.
    """
    row = [" "] * num_columns
    for span, start, stop in _placed(lane, num_columns, total_us):
        row[start:stop] = _labelled(span.label, stop - start)
    return "".join(row)


def tell_order(lane: StreamLane, num_columns: int, total_us: float) -> str:
    """List the labels in their order if `draw_lane` has no room for all of them; otherwise return nothing."""
    if all(len(span.label) <= stop - start for span, start, stop in _placed(lane, num_columns, total_us)):
        return ""
    runs = ((label, len(list(equal))) for label, equal in groupby(span.label for span in lane.spans))
    return f"{lane.name}: {', '.join(label if count == 1 else f'{count} x {label}' for label, count in runs)}"


def _placed(lane: StreamLane, num_columns: int, total_us: float) -> Iterator[tuple[LaneSpan, int, int]]:
    """Yield every span with its first column and the one after its last; a span is dropped only if the columns are used
    up.
    """

    def column(time_us: float) -> int:
        return int(time_us / total_us * num_columns + ROUNDING)

    taken = 0
    for span in lane.spans:
        start = max(taken, min(num_columns - 1, column(span.start_us)))
        taken = max(taken, min(num_columns, max(start + 1, column(span.end_us))))
        yield span, min(start, num_columns), taken


def _labelled(label: str, width: int) -> str:
    """Return a label with as many of its brackets as fit. Two letters never follow each other within one label."""
    room = width - len(label)
    if room < 0:
        return f"[{'':-^{width - 2}}]" if width > 1 else "|" * width
    return f"[{label:-^{width - 2}}]" if room > 1 else f"{'[' * room}{label}"


def _label(action: Action, arrivals: Sequence[tuple[Region, int]], departures: Sequence[tuple[Region, int]]) -> str:
    if action.kind == "copy":
        return f">{action.writes[0].rank}"
    if action.kind in SHORT_LABELS:
        return SHORT_LABELS[action.kind]
    goes = {rank for region, rank in departures if any(region.overlaps(each) for each in action.writes)}
    label = letters(_needs(action, arrivals)) + (f">{_ranges(goes, str)}" if goes else "")
    return label or "own"


def _needs(action: Action, arrivals: Sequence[tuple[Region, int]]) -> list[int]:
    """Return the arrivals whose rows an action reads."""
    return [number for region, number in arrivals if any(region.overlaps(each) for each in action.reads)]


def _packed(spans: Sequence[LaneSpan]) -> list[StreamLane]:
    """Pack arrivals into as few lanes as possible without overlap."""
    lanes: list[list[LaneSpan]] = []
    for span in sorted(spans, key=lambda each: (each.start_us, each.end_us)):
        free = next((lane for lane in lanes if lane[-1].end_us <= span.start_us), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return [StreamLane(name=ARRIVING, spans=tuple(lane)) for lane in lanes]


def _ranges(numbers: Iterable[int], name: Callable[[int], str]) -> str:
    """Write numbers by their names, consecutive ones as first-last."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(name(run[0]) if len(run) == 1 else f"{name(run[0])}-{name(run[-1])}" for run in runs)


def _stream_order(name: str) -> tuple[int, str]:
    kind = name.split(" ", maxsplit=1)[0]
    return ("compute", "copy", "place").index(kind), name


def _round(number: int) -> str:
    return str(number // NUM_LETTERS + 1) if number >= NUM_LETTERS else ""
