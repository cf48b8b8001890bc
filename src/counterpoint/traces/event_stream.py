"""Read the events of a Chrome JSON trace block by block, so that only a few blocks of the file are in memory at a time.

A block is cut behind an event, at a `}`, a comma and a `{` in a row. The same characters may occur inside a string or inside
an event's arguments; but then the text before the cut is not valid JSON, so decoding it tells whether the cut is right. If
no candidate is right, brackets and strings are followed from the start of the block. The text before and after the events is
kept and decoded as a file without events. The module does not know what events mean.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from counterpoint.errors import CounterpointError, TraceError
from counterpoint.files import REMEDY
from counterpoint.mismatch import describe_mismatch
from counterpoint.units import MIB, format_bytes
from counterpoint.value import require

BLOCK_BYTES = MIB  # four times as much takes a sixth longer, as blocks and their events no longer fit into the cache
MOST_AROUND_BYTES = 64 * MIB  # limit on the text before or after the events, and on the largest event
MOST_CANDIDATES = 8
WINDOW_BYTES = 65536  # a cut is first looked for within this distance of the block's end
UNESCAPED = "some releases of torch write such text with with_stack=True"  # pytorch#98432, #113001, #130622
NOT_STATED = -0.0  # a time that an event lacks: counts as 0, and its sign tells it from a 0 that the file states

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_CUT = re.compile(rb"\}(?=\s*,\s*\{)")
_CUT_BEFORE_PHASE = re.compile(rb'\}(?=\s*,\s*\{\s*"(?:ph|name|cat)"\s*:)')
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]]|"', re.DOTALL)
_PLACE = re.compile(r"\$\[(\d+)\]")


class Event(msgspec.Struct, gc=False):
    """One event; its arguments are not decoded."""

    name: str = ""
    cat: str = ""
    ts: float = NOT_STATED
    dur: float = NOT_STATED
    tid: int | str = 0
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Complete(Event, gc=False, tag_field="ph", tag="X"):
    """An event with a duration."""


def _skipped(phase: str) -> type[msgspec.Struct]:
    """Return the type of an event of which nothing is decoded."""
    return msgspec.defstruct("Skipped", [], gc=False, tag_field="ph", tag=phase)


# Arrows ("s", "t", "f") are a third of a trace. "M" is the name of a process or thread, "i" an instant.
_USUAL = _Complete | _skipped("s") | _skipped("t") | _skipped("f") | _skipped("M") | _skipped("i")


class Device(msgspec.Struct):
    """One GPU, as the profiler describes it."""

    id: int = 0
    name: str | None = None
    computeMajor: int = 0  # noqa: N815 (the profiler's own spelling)
    numSms: int | None = None  # noqa: N815
    warpSize: int | None = None  # noqa: N815
    totalGlobalMem: int | None = None  # noqa: N815


class Distributed(msgspec.Struct):
    """The profiler's description of the distributed job."""

    rank: int | None = None
    world_size: int | None = None
    nccl_version: str | None = None


class Surroundings(msgspec.Struct):
    """The contents of the file other than its events."""

    traceEvents: list[Event]  # noqa: N815
    deviceProperties: list[Device] = []  # noqa: N815
    distributedInfo: Distributed | None = None  # noqa: N815


class EventStream:
    """Iterates over the events of one file in lists of some thousand; `surroundings` is set at the end.

    Once the events are read, `damage` says why the file is incomplete, or is None if it is complete.
    """

    def __init__(self, path: Path, pieces: Iterator[bytes]) -> None:
        self.path, self.pieces = path, pieces
        self.surroundings = Surroundings(traceEvents=[])
        self.damage: str | None = None
        self._head, self._rest, self._num_events = b"", b"", 0
        self._decoder = msgspec.json.Decoder(list[Event])
        self._usual_decoder: msgspec.json.Decoder[list[Event]] | None = msgspec.json.Decoder(list[_USUAL])  # type: ignore[valid-type]

    def __iter__(self) -> Iterator[list[Event]]:
        """Yield lists of events. Raises `TraceError` if the file is no trace; if it ends early, sets `damage` instead."""
        if not self._find_events():
            self.surroundings = self._decode_surroundings(self._rest)
            yield self.surroundings.traceEvents
            return
        enough = BLOCK_BYTES
        while piece := self._more():
            self._rest += piece
            if len(self._rest) < enough:
                continue
            events = self._cut()
            if events is not None:
                enough = BLOCK_BYTES
                yield events
            elif self._ends_within():
                break
            else:
                enough = 2 * len(self._rest)
        yield from self._last()

    def _more(self) -> bytes:
        """Return the next piece; return none at the end, or if a compressed file is damaged."""
        try:
            return next(self.pieces, b"")
        except CounterpointError as problem:
            if problem.__cause__ is None or not self._head or isinstance(problem.__cause__, OSError):
                raise
            self.damage = str(problem).removesuffix(f"; {REMEDY}.")
            return b""

    def _find_events(self) -> bool:
        """Read until the events begin; return whether they do."""
        found = None
        while found is None and (piece := self._more()):
            begin = max(0, len(self._rest) - 100)
            self._rest += piece
            found = _EVENTS.search(self._rest, begin)
            require(
                found is not None or len(self._rest) <= MOST_AROUND_BYTES,
                TraceError,
                f"{self.path} is not a profiler trace: its first {format_bytes(MOST_AROUND_BYTES)} hold no "
                "'traceEvents'; give the file that torch.profiler exported.",
            )
        if found is None:
            return False
        self._head, self._rest = self._rest[: found.end()], self._rest[found.end() :]
        return True

    def _cut(self) -> list[Event] | None:
        """Return the events up to the last cut of the block, or None if there is no cut."""
        self._drop_comma()
        for end in self._candidates():
            events = self._decode(end)
            if events is not None:
                self._take(end, len(events))
                return _complete(events)
        require(
            len(self._rest) <= MOST_AROUND_BYTES,
            TraceError,
            f"{self.path} is not a profiler trace: an event is larger than {format_bytes(MOST_AROUND_BYTES)}, or its "
            "JSON is damaged; record it again.",
        )
        return None

    def _candidates(self) -> Iterator[int]:
        """Yield the positions at which the block may be cut, the most likely one first; the last one is certain."""
        begin = max(0, len(self._rest) - WINDOW_BYTES)
        for pattern in (_CUT_BEFORE_PHASE, _CUT):
            found = [match.end() for match in pattern.finditer(self._rest, begin)]
            yield from reversed(found[-MOST_CANDIDATES:])
        certain, _ = follow(self._rest)
        if certain:
            yield certain

    def _take(self, end: int, num_events: int) -> None:
        self._rest = self._rest[end:]
        self._num_events += num_events

    def _drop_comma(self) -> None:
        """Remove the comma after the previous event, so that the remaining text begins with an event."""
        if self._num_events:
            self._rest = self._rest.lstrip().removeprefix(b",")

    def _decode(self, end: int | None) -> list[Event] | None:
        """Return the events up to a position, or None if the text up to there is not valid JSON."""
        text = b"".join((b"[", memoryview(self._rest)[:end], b"]"))  # copied once
        if self._usual_decoder is not None:
            try:
                return self._usual_decoder.decode(text)
            except msgspec.ValidationError:  # an unusual phase, or an item that is no event: the code below finds out which
                self._usual_decoder = None
            except (msgspec.DecodeError, UnicodeDecodeError):
                return None
            except RecursionError as problem:
                raise self._no_trace(problem) from problem
        try:
            return self._decoder.decode(text)
        except msgspec.ValidationError as problem:
            place = _PLACE.sub(lambda found: f"$.traceEvents[{self._num_events + int(found[1])}]", str(problem), count=1)
            raise self._no_trace(msgspec.ValidationError(place)) from problem
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        except RecursionError as problem:
            raise self._no_trace(problem) from problem

    def _ends_within(self) -> bool:
        """Return whether the events end in the text read so far; if so, also read the rest of the file."""
        _, end = follow(self._rest)
        if end is None:
            return False
        while piece := self._more():
            self._rest += piece
            require(
                len(self._rest) <= MOST_AROUND_BYTES + end,
                TraceError,
                f"{self.path} is not a profiler trace: more than {format_bytes(MOST_AROUND_BYTES)} follow its events; "
                "give the file torch.profiler exported.",
            )
        return True

    def _last(self) -> Iterator[list[Event]]:
        """Yield the last events, and decode the text around the events."""
        self._drop_comma()
        certain, end = None, self._likely_end()
        if end is None:
            certain, end = follow(self._rest)
        if end is None:
            self.damage = self.damage or f"{self.path} is not whole JSON: {self._damage_of(self._rest)}"
        events = self._decode(certain if end is None else end)
        if events is None:
            raise TraceError(f"{self.path} is not whole JSON: {self._damage_of(self._rest)}; {REMEDY}.")
        yield _complete(events)
        if end is None:
            with suppress(TraceError):  # what stands before the events is whole, unless they are within something else
                self.surroundings = self._decode_surroundings(self._head + b"]}")
            return
        self.surroundings = self._decode_surroundings(self._head + self._rest[end:])
        require(
            not self.surroundings.traceEvents,
            TraceError,
            f"{self.path} is not a profiler trace: it holds 'traceEvents' twice; give the file torch.profiler exported.",
        )

    def _likely_end(self) -> int | None:
        """Return where the events end if one of the last brackets ends them: the text on both sides is then valid JSON."""
        end = len(self._rest)
        for _ in range(MOST_CANDIDATES):
            end = self._rest.rfind(b"]", 0, end)
            if end < 0:
                break
            try:
                msgspec.json.decode(self._head + self._rest[end:], type=Surroundings)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            if self._decode(end) is not None:
                return end
        return None

    def _damage_of(self, rest: bytes) -> str:
        """Return the decoder's message for a file whose events end in this text."""
        try:
            msgspec.json.decode(b"[" + rest.lstrip())
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
            said = re.sub(r" \(byte \d+\)$", "", str(problem).removeprefix("JSON is malformed: "))
            return said if "truncated" in said else f"{said}; {UNESCAPED}"
        return "it ends after the events"

    def _decode_surroundings(self, text: bytes) -> Surroundings:
        try:
            return msgspec.json.decode(text, type=Surroundings)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
            raise self._no_trace(problem) from problem

    def _no_trace(self, problem: Exception) -> TraceError:
        remedy = "give the file torch.profiler exported"
        if isinstance(problem, msgspec.ValidationError):
            said, _ = describe_mismatch(problem, Surroundings)
            return TraceError(f"{self.path} is not a profiler trace: {said}; {remedy}.")
        if isinstance(problem, RecursionError):
            return TraceError(f"{self.path} is not a profiler trace: it is nested too deeply; {remedy}.")
        said = str(problem).removeprefix("JSON is malformed: ")
        return TraceError(f"{self.path} is not whole JSON: {said}; {REMEDY}.")


def _complete(events: list[Event]) -> list[Event]:
    """Return the events without those of which nothing was decoded."""
    return [event for event in events if isinstance(event, Event)]


def follow(text: bytes) -> tuple[int, int | None]:
    """Return where the last whole object of a list ends, and where the list ends or None; `text` begins inside the list."""
    depth = last = 0
    for match in _TOKEN.finditer(text):
        token = text[match.start() : match.start() + 1]
        if token in b"{[":
            depth += 1
        elif token in b"}]":
            depth -= 1
            if depth < 0:
                return last, match.start()
            if depth == 0:
                last = match.end()
        elif match.end() - match.start() == 1:  # a string that does not end in this text
            break
    return last, None
