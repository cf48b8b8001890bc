"""The one reader of files that users name: traces, plans, machines, workloads. It never reads more than it was told to.

Regular files and pipes are read; devices are refused, because many never end, and a pipe may be silent only for a while.
What is gzip is known by its first bytes, not by its name, and is unpacked piece by piece: the reader stops at the limit, and
earlier where a file unpacks to far more than its size. It does not know what the bytes mean.
"""

import gzip
import io
import os
import select
import stat
import zlib
from pathlib import Path

from counterpoint.errors import CounterpointError, shown_path
from counterpoint.units import GIB, MIB, format_bytes

GZIP_MAGIC = b"\x1f\x8b"
UTF8_MARK = b"\xef\xbb\xbf"  # some editors begin a file of text with it
MAX_TEXT_BYTES = 64 * MIB  # plans, machines, workloads: the largest plan of a shipped trace has 60 KiB
MAX_TRACE_BYTES = 2 * GIB  # some 7 million events; the reader needs about five times as much memory
MAX_PACKED_BYTES = MAX_TRACE_BYTES // 4
MAX_RATIO = 250  # the shipped traces pack to a fifteenth; deflate reaches 1,032 where nothing but one letter follows
LEAST_SUSPECT_BYTES = 64 * MIB  # below this a high ratio harms nobody
PIECE_BYTES = MIB
SILENCE_S = 10.0


def read_limited(
    path: Path | str, error: type[CounterpointError], remedy: str, *, most: int = MAX_TEXT_BYTES, is_unpacked: bool = False
) -> bytearray:
    """The bytes of a file or pipe, without a UTF-8 mark; with `is_unpacked`, what is gzip comes unpacked.

    Raises `error`, one line that ends with `remedy` ("give a .toml file"), for what cannot be read, is a device, or is
    larger than `most` bytes.
    """
    try:
        raw = _read_raw(path, error, most)
        if is_unpacked and raw.startswith(GZIP_MAGIC):
            _refuse_larger(path, len(raw), min(most, MAX_PACKED_BYTES), "compressed bytes", error)
            raw = _unpacked(path, raw, error, most)
    except OSError as problem:
        raise error(f"Cannot read {shown_path(path)}: {problem.strerror}; {remedy}.") from problem
    except ValueError as problem:
        if isinstance(problem, CounterpointError):
            raise
        raise error(f"Cannot read {shown_path(path)}: {problem}; {remedy}.") from problem
    except MemoryError as problem:
        raise error(f"{shown_path(path)} is too large for the memory of this machine; {remedy}.") from problem
    return raw[len(UTF8_MARK) :] if raw.startswith(UTF8_MARK) else raw


def _read_raw(path: Path | str, error: type[CounterpointError], most: int) -> bytearray:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        facts = os.fstat(descriptor)
        is_pipe = stat.S_ISFIFO(facts.st_mode)
        if not (is_pipe or stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode)):
            raise error(f"{shown_path(path)} is a device, which may never end; give a file.")
        if not is_pipe:
            _refuse_larger(path, facts.st_size, most, "bytes", error)
        raw = bytearray()
        while piece := _next_piece(descriptor, path, error, is_pipe):
            raw += piece
            _refuse_larger(path, len(raw), most, "bytes or more", error)  # a pipe has no size, and files grow
        return raw
    finally:
        os.close(descriptor)


def _next_piece(descriptor: int, path: Path | str, error: type[CounterpointError], is_pipe: bool) -> bytes:
    if is_pipe:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(1000 * SILENCE_S):
            raise error(f"Nothing came through the pipe {shown_path(path)} for {SILENCE_S:g} s; give a file.")
    return os.read(descriptor, PIECE_BYTES)


def _refuse_larger(path: Path | str, found: int, most: int, what: str, error: type[CounterpointError]) -> None:
    if found > most:
        raise error(
            f"{shown_path(path)} has {found:,} {what}, and at most {most:,} ({format_bytes(most)}) are read. Give a smaller "
            "file: of a trace, profile fewer steps."
        )


def _unpacked(path: Path | str, packed: bytearray, error: type[CounterpointError], most: int) -> bytearray:
    found = bytearray()
    try:
        source = io.BytesIO(packed)
        with gzip.GzipFile(fileobj=source) as file:
            while piece := file.read(PIECE_BYTES):
                found += piece
                _refuse_larger(path, len(found), most, "bytes or more once unpacked", error)
                if len(found) > max(LEAST_SUSPECT_BYTES, MAX_RATIO * source.tell()):
                    raise error(
                        f"{shown_path(path)} unpacks to {len(found):,} bytes from {source.tell():,}, more than {MAX_RATIO} "
                        "times as many, which no trace does. Copy or record it again."
                    )
    except (gzip.BadGzipFile, EOFError, zlib.error) as problem:
        raise error(f"{shown_path(path)} is damaged gzip ({problem}); copy or record it again.") from problem
    return found
