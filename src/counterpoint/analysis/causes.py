"""Finds the cause of each exposed piece, as far as one rank's trace shows it, with evidence.

First it finds what kept computation from running in the piece, in this order:

1. own_stream: the collective runs on the stream that computes most. So does the next computation, which cannot begin.
2. tail: the step has no computation left.
3. dependent: the next computation waits for the collective, through events, stream order, or a wait of the host. The order
   within a CUDA graph is not in the trace: an operation that was launched with copies and does not start on an idle stream
   is taken to wait for them, or for those of peers. If it waits only for a collective queued behind this one: queued.
4. launched_late: the next computation had not been launched yet.
5. starved: the stream of the next computation was ready, but a sum or a staging copy of the collective took all SMs.
6. gap: a launch gap, a copy or a fill between two kernels of the computation, which needs nothing of the collective.

Dependent and tail time is then attributed to the delays of the collective (`delays.py`), for as long as they held it back:
without them, it would have begun and ended that much earlier. Time exposed by earlier collectives in the queue is
subtracted from the time that it was queued.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod

from msgspec.structs import replace

from counterpoint.analysis.collectives import RankCollectives
from counterpoint.analysis.delays import Delay, Delays
from counterpoint.analysis.exposure import ExposedPiece
from counterpoint.analysis.members import is_between_gpus
from counterpoint.analysis.roles import is_staging
from counterpoint.analysis.timed import TimedTrace, format_ns, ns_to_us
from counterpoint.analysis.values import Cause, ExposedInterval, Role
from counterpoint.kernel_names import short_name
from counterpoint.spans import Span
from counterpoint.value import Value

MOST_VISITED = 64
"""A dependency is followed back through at most this many operations."""
SHORT_GAP_NS = 20_000
RESPONSE_NS = 20_000
"""Computation that starts within this after a collective's end, and was launched before, is taken to have waited for it."""


class Reason(Value, frozen=True, kw_only=True):
    """Why computation did not run in part of a piece. `holds`: a needed collective queued behind the piece's collective."""

    start: int
    end: int
    cause: Cause
    evidence: str
    holds: int | None = None


class CauseFinder:
    """Finds the cause of exposed pieces of one trace."""

    def __init__(
        self, timed: TimedTrace, roles: tuple[Role, ...], found: RankCollectives, windows: Sequence[Span], main: int | None
    ) -> None:
        self._timed, self._roles, self._found, self._windows, self._main = timed, roles, found, windows, main
        self._computation = [index for index in timed.by_start if roles[index] == "computation"]
        self._starts = [timed.starts[index] for index in self._computation]
        self._delays = Delays(timed, roles, found, self._computation)

    def intervals(self, pieces: Sequence[ExposedPiece]) -> list[ExposedInterval]:
        """Return every piece with its cause, in order of time; pieces are cut where their cause changes."""
        reasons = [(piece, reason) for piece in pieces for reason in self._reasons(piece)]
        of_collective: dict[tuple[int, int], list[tuple[ExposedPiece, Reason]]] = {}
        kept: list[tuple[ExposedPiece, Reason]] = []
        in_queue: Counter[tuple[int, int]] = Counter()
        for piece, reason in reasons:
            if reason.holds is not None:
                in_queue[piece.step, reason.holds] += reason.end - reason.start
            if reason.cause in ("dependent", "tail"):
                of_collective.setdefault((piece.step, piece.collective), []).append((piece, reason))
            else:
                kept.append((piece, reason))
        for (step, number), line in of_collective.items():
            kept += _with_delays(line, _without_queue(self._delays.of(number), in_queue[step, number]))
        kept.sort(key=lambda pair: pair[1].start)
        return [self._interval(piece, reason) for piece, reason in kept]

    def _interval(self, piece: ExposedPiece, reason: Reason) -> ExposedInterval:
        return ExposedInterval(
            rank=self._timed.trace.rank or 0,
            step=piece.step,
            start_us=ns_to_us(reason.start),
            end_us=ns_to_us(reason.end),
            collective=piece.collective,
            cause=reason.cause,
            evidence=reason.evidence,
        )

    def _reasons(self, piece: ExposedPiece) -> Iterator[Reason]:
        """Yield the reasons why computation did not run in a piece, from its start to its end."""
        timed, name = self._timed, self._found.values[piece.collective].name
        place = bisect_left(self._starts, piece.stretch_end)
        follower = self._computation[place] if place < len(self._computation) else None
        is_held = follower is None or timed.stream_of(follower) == self._main
        if is_held and timed.stream_of(piece.operation) == self._main:
            said = f"{name} runs on stream {self._main}, on which most of the computation runs."
            yield Reason(start=piece.start, end=piece.end, cause="own_stream", evidence=said)
            return
        if follower is None or timed.starts[follower] >= self._windows[piece.step][1]:
            said = f"Step {piece.step} has no computation left after {name} began to be exposed."
            yield Reason(start=piece.start, end=piece.end, cause="tail", evidence=said)
            return
        waited = self._waited_for(follower, piece)
        if waited is not None:
            yield waited
            return
        launch = timed.launches[follower]
        late_until = piece.start if launch is None else min(max(launch, piece.start), piece.end)
        if late_until > piece.start:
            yield self._computation_late(piece, follower, late_until)
        answer = self._answer(follower, piece, late_until) if late_until < piece.end else None
        if answer is not None:
            yield Reason(start=late_until, end=piece.end, cause="dependent", evidence=answer)
            return
        held_until = self._held_until(piece, follower, late_until)
        if held_until > late_until:
            yield self._starved(piece, follower, late_until, held_until)
        if held_until < piece.end:
            yield self._gap(piece, follower, held_until)

    def _waited_for(self, follower: int, piece: ExposedPiece) -> Reason | None:
        """Return the reason if the next computation waits for communication of the piece, directly or through the host."""
        timed = self._timed
        kernel, name = short_name(timed.trace.operations[follower].name), self._found.values[piece.collective].name
        reached, held = self._reached(follower, piece.start)
        # what the host issues only later kept nothing from running yet
        direct = {number for number in reached if self._is_issued(number, piece.end)}
        queued = {number: needed for number, needed in held.items() if self._is_issued(needed, piece.end)}
        cause: Cause = "dependent"
        holds: int | None = None
        ends = timed.ends[piece.operation]
        after = format_ns(max(0, timed.starts[follower] - ends))
        if piece.collective in direct:
            said = f"{kernel} needs its result and starts {after} after it ends."
        elif piece.collective in queued:
            cause, holds = "queued", queued[piece.collective]
            said = f"{kernel} needs {self._found.values[holds].name}, which is queued behind {name}."
        elif direct:
            other = self._found.values[min(direct)]
            said = f"{kernel} needs the result of {other.name} on stream {other.stream}, which runs at the same time."
        elif self._host_waited(follower, piece):
            said = f"The host waited for the GPU until {name} had ended before it issued {kernel}."
        else:
            return None
        return Reason(start=piece.start, end=piece.end, cause=cause, evidence=said, holds=holds)

    def _reached(self, follower: int, since: int) -> tuple[set[int], dict[int, int]]:
        """Return collectives running since a time that an operation waits for, and collectives queued before one of those.

        The second result maps such a queued collective to the needed one that it holds up.
        """
        timed, found = self._timed, self._found
        direct: set[int] = set()
        queued: dict[int, int] = {}
        seen = {follower}
        stack: list[tuple[int, int | None]] = [(follower, None)]  # an operation, and the needed collective it holds up
        while stack and len(seen) < MOST_VISITED:
            index, holds = stack.pop()
            own = found.by_operation.get(index)
            for other in timed.held_by(index):
                if other in seen or timed.ends[other] <= since:
                    continue
                seen.add(other)
                number = found.by_operation.get(other)
                held = holds
                if number is not None and own is not None and number != own and self._is_queue(index, other):
                    held = own if holds is None else holds
                if number is not None and held is None:
                    direct.add(number)
                elif number is not None and held is not None:
                    queued.setdefault(number, held)
                stack.append((other, held))
        return direct, queued

    def _is_issued(self, number: int, before: int) -> bool:
        """Return whether the host had issued a collective before a time."""
        first = self._found.members[number].operations[0]
        launch = self._timed.launches[first]
        return (self._timed.starts[first] if launch is None else launch) < before

    def _is_queue(self, index: int, other: int) -> bool:
        """Return whether two collectives are ordered only because they share a stream or a communicator."""
        numbers = (self._found.by_operation[index], self._found.by_operation[other])
        groups = {self._found.values[number].process_group for number in numbers}
        return self._timed.stream_of(index) == self._timed.stream_of(other) or len(groups) == 1

    def _host_waited(self, follower: int, piece: ExposedPiece) -> bool:
        """Return whether the host was blocked until the collective had ended, and only then issued the next computation."""
        launch = self._timed.launches[follower]
        wait = None if launch is None else self._timed.waited_host(piece.start, launch)
        ends = self._timed.ends[piece.operation]
        return wait is not None and launch is not None and wait[0] <= ends <= wait[1] <= launch

    def _answer(self, follower: int, piece: ExposedPiece, launched: int) -> str | None:
        """Return evidence from times alone that the next computation waited for the collective; None if there is none."""
        timed, found = self._timed, self._found
        kernel, name = short_name(timed.trace.operations[follower].name), found.values[piece.collective].name
        ends, started = timed.ends[piece.operation], timed.starts[follower]
        is_last = found.members[piece.collective].operations[-1] == piece.operation
        begun = timed.starts[found.members[piece.collective].operations[0]]
        is_between = begun >= piece.start >= launched  # computation stopped, the collective ran, computation went on
        is_long = piece.stretch_end - launched > SHORT_GAP_NS
        if is_last and 0 <= started - ends <= RESPONSE_NS and (is_long or is_between):
            return f"{kernel} had been launched and starts {format_ns(started - ends)} after {name} ends."
        if is_long and self._is_of_its_graph(follower, piece):
            return (
                f"{kernel} was launched with {name}, in one graph, and starts {format_ns(started - launched)} "
                "later: copies hold no SMs, so it waited for this copy or a peer's."
            )
        return None

    def _is_of_its_graph(self, follower: int, piece: ExposedPiece) -> bool:
        """Return whether one graph launch holds the next computation and the exposed copy between GPUs."""
        operations = self._timed.trace.operations
        launch = operations[piece.operation].graph_launch
        is_copy = is_between_gpus(operations[piece.operation])
        return is_copy and launch is not None and operations[follower].graph_launch == launch

    def _computation_late(self, piece: ExposedPiece, follower: int, until: int) -> Reason:
        kernel = short_name(self._timed.trace.operations[follower].name)
        wait = self._timed.waited_host(piece.start, until)
        why = "; it had waited for the GPU" if wait is not None else ""
        said = f"The host issued the next computation, {kernel}, {format_ns(until - piece.start)} into it{why}."
        return Reason(start=piece.start, end=until, cause="launched_late", evidence=said)

    def _held_until(self, piece: ExposedPiece, follower: int, start: int) -> int:
        """Return until when a sum or staging copy of the collective kept the computation's stream from starting anything.

        Both take all SMs: the driver runs a copy within the GPU as a kernel.
        """
        timed = self._timed
        operation = timed.trace.operations[piece.operation]
        num_sms = timed.trace.num_sms or 0
        takes_all = is_staging(operation) or (
            operation.category == "kernel" and prod(operation.arguments.grid) >= num_sms > 0
        )
        until = min(timed.starts[self._first_after(follower, start)], piece.end)
        return until if takes_all and until - start > SHORT_GAP_NS else start

    def _first_after(self, follower: int, start: int) -> int:
        """Return the first operation on the stream of the next computation that ends after a time."""
        first = follower
        while (before := self._timed.before_on_stream(first)) is not None and self._timed.ends[before] > start:
            first = before
        return first

    def _starved(self, piece: ExposedPiece, follower: int, start: int, end: int) -> Reason:
        timed = self._timed
        kernel, holder = (short_name(timed.trace.operations[index].name) for index in (follower, piece.operation))
        name = self._found.values[piece.collective].name
        time = format_ns(end - start)
        said = f"{kernel}, or an operation before it, was launched and waited {time} for SMs that {holder} of {name} held."
        return Reason(start=start, end=end, cause="starved", evidence=said)

    def _gap(self, piece: ExposedPiece, follower: int, start: int) -> Reason:
        timed = self._timed
        kernel = short_name(timed.trace.operations[follower].name)
        before = timed.before_on_stream(follower)
        is_copy = before is not None and self._roles[before] == "copy"
        if (
            before is not None
            and is_copy
            and 2 * (timed.ends[before] - max(start, timed.starts[before])) > piece.end - start
        ):
            said = f"{short_name(timed.trace.operations[before].name)} runs on the computation's stream before {kernel}."
        else:
            said = f"{kernel} starts {format_ns(timed.starts[follower] - start)} later and needs no collective."
        first = self._first_after(follower, start)
        if (waited := timed.starts[first] - start) > SHORT_GAP_NS:
            name = short_name(timed.trace.operations[first].name)
            said = f"{name} on the computation's stream starts {format_ns(waited)} later; the trace does not show why."
        return Reason(start=start, end=piece.end, cause="gap", evidence=said)


def _without_queue(delays: list[Delay], time: int) -> list[Delay]:
    """Subtract the given time from queue delays, because other intervals already account for it."""
    left = [replace(delay, time=max(0, delay.time - time)) if delay.cause == "queued" else delay for delay in delays]
    return [delay for delay in left if delay.time]


def _with_delays(line: list[tuple[ExposedPiece, Reason]], delays: list[Delay]) -> Iterator[tuple[ExposedPiece, Reason]]:
    """Attribute the last parts of one collective's pieces to its delays; the last delay takes the last part."""
    left = [(delay, delay.time) for delay in delays]
    for piece, reason in sorted(line, key=lambda pair: -pair[1].start):
        end = reason.end
        while left and end > reason.start:
            delay, time = left.pop()
            taken = min(time, end - reason.start)
            yield piece, Reason(start=end - taken, end=end, cause=delay.cause, evidence=delay.evidence)
            end -= taken
            if taken < time:
                left.append((delay, time - taken))
        if end > reason.start:
            yield piece, Reason(start=reason.start, end=end, cause=reason.cause, evidence=reason.evidence)
