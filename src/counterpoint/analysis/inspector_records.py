"""Splits a log of NCCL Inspector into its records, and counts lines that hold none.

A record is a JSON object: on a line of its own, as the plugin writes it, behind another one, or indented over several lines.
A record that is cut short does not affect the next one. This module does not know what collectives are.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec

from counterpoint.units import MIB, format_count, format_numbered

MAX_RECORD_BYTES = MIB  # a verbose record of 64 channels has some 20 KiB
MOST_RANGES = 5  # of line numbers, in a sentence
BETWEEN_OBJECTS = re.compile(rb"(?<=\})[ \t]*(?=\{)")

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Time = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class _Header(msgspec.Struct):
    id: str | int
    rank: Count
    n_ranks: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
    comm_name: str | None = None


class _Metadata(msgspec.Struct):
    dump_timestamp_us: Count = 0


class _Collective(msgspec.Struct):
    """A collective: its function, sequence number, size and time."""

    function: str = msgspec.field(name="coll")
    number: Count = msgspec.field(name="coll_sn")
    num_bytes: Count = msgspec.field(name="coll_msg_size_bytes")
    time_us: Time = msgspec.field(name="coll_exec_time_us")
    timing_source: str = msgspec.field(name="coll_timing_source", default="")


class _PeerToPeer(msgspec.Struct):
    """A send or a receive: its function, sequence number, size and time."""

    function: str = msgspec.field(name="p2p")
    number: Count = msgspec.field(name="p2p_sn")
    num_bytes: Count = msgspec.field(name="p2p_msg_size_bytes")
    time_us: Time = msgspec.field(name="p2p_exec_time_us")
    timing_source: str = msgspec.field(name="p2p_timing_source", default="")


class Record(msgspec.Struct):
    """One collective, send or receive of one rank, with the communicator that it ran in."""

    header: _Header
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    coll_perf: _Collective | None = None
    p2p_perf: _PeerToPeer | None = None

    @property
    def performed(self) -> _Collective | _PeerToPeer | None:
        """The collective, send or receive that the record describes."""
        return self.coll_perf or self.p2p_perf

    @property
    def communicator(self) -> str:
        """The library's hash of the communicator, which is the same on all ranks."""
        return str(self.header.id)


class Lines:
    """Splits a log into records, whether a line holds one, several or part of one, and counts lines that hold none."""

    def __init__(self) -> None:
        self.bad: list[int] = []  # numbers of lines, from 1
        self._decoder = msgspec.json.Decoder(Record)
        self._held, self._held_from = b"", 0

    def records(self, pieces: Iterable[bytes]) -> Iterator[Record]:
        """Yield all records, in the order of the file."""
        for number, line in enumerate(_split(pieces), start=1):
            for part in BETWEEN_OBJECTS.split(line):
                record = self._take(part, number)
                if record is not None:
                    yield record
        self._drop()

    def describe_bad(self) -> str:
        """Return a sentence on lines that hold no record, and a space; return "" if there are none."""
        if not self.bad:
            return ""
        lines = format_numbered("line", self.bad, MOST_RANGES)
        return (
            f"{format_count(len(self.bad), 'entry', 'entries')} ({lines}) could not be read, and {left_out(len(self.bad))}. "
        )

    def _take(self, part: bytes, number: int) -> Record | None:
        """Return the record that ends here, if one does."""
        if not part.strip():
            return None
        if part.startswith(b"{"):  # a record begins: the text before it was not one
            self._drop()
        elif not self._held:
            self.bad.append(number)
            return None
        self._held_from = self._held_from if self._held else number
        self._held += part + b"\n"
        if len(self._held) > MAX_RECORD_BYTES:
            self._drop()
        elif part.rstrip().endswith(b"}") and part[:1] in b"{}":
            return self._decoded()
        return None

    def _decoded(self) -> Record | None:
        try:
            record = self._decoder.decode(self._held)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            record = None
        if record is None or record.performed is None or record.header.rank >= record.header.n_ranks:
            self._drop()
            return None
        self._held = b""
        return record

    def _drop(self) -> None:
        if self._held:
            self.bad.append(self._held_from)
            self._held = b""


def left_out(count: int) -> str:
    """Return words that say that this many entries were left out."""
    return "is left out" if count == 1 else "are left out"


def _split(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file; a line that is longer than any record comes in parts."""
    rest = b""
    for piece in pieces:
        rest += piece
        *lines, rest = rest.split(b"\n")
        yield from lines
        if len(rest) > MAX_RECORD_BYTES:
            yield rest
            rest = b""
    if rest:
        yield rest
