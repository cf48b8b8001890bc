"""Reads every file that a user names: traces, plans, machines, workloads; never more than its limit. Names the cache.

Regular files and pipes are read. Devices are refused, because many never end, and a pipe may be silent only for a
limited time. Gzip is recognized by its first bytes, not by the file name, and unpacked piece by piece. The reader stops
at the limit, and earlier if a file unpacks to far more than its size. This module does not know what the bytes mean.
"""

import os
import select
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from counterpoint.errors import CounterpointError, shown_path
from counterpoint.units import GIB, MIB, format_bytes

GZIP_MAGIC = b"\x1f\x8b"
UTF8_MARK = b"\xef\xbb\xbf"  # some editors write it at the start of a text file
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
MAX_TEXT_BYTES = 64 * MIB  # plans, machines, workloads: the largest plan of a shipped trace has 60 KiB
MAX_TRACE_BYTES = 32 * GIB  # some 120 million events; what the reader keeps of them takes about a sixth of the file's size
MAX_PACKED_BYTES = MAX_TRACE_BYTES // 4
MAX_RATIO = 250  # the shipped traces shrink 15 times; deflate reaches 1,032 times if a single byte repeats
LEAST_SUSPECT_BYTES = 64 * MIB  # below this size, a high ratio does no harm
PIECE_BYTES = MIB
SILENCE_S = 10.0
REMEDY = "copy or record it again"  # for a damaged file


def cache_folder() -> Path:
    """Return the absolute path of the cache: $COUNTERPOINT_CACHE_DIR, else `counterpoint` in the user's cache folder.

    Raises `CounterpointError` if neither a setting nor a home folder exists.
    """
    chosen = os.environ.get("COUNTERPOINT_CACHE_DIR")
    if chosen:
        return Path(os.path.abspath(chosen))  # a child of the job may have another working folder
    users = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(users):  # the XDG specification treats an empty or relative path as not set
        return Path(users) / "counterpoint"
    try:
        return Path.home() / ".cache" / "counterpoint"
    except RuntimeError as problem:
        raise CounterpointError(
            "This user has no home folder (HOME is not set and there is no entry in the password file); "
            "set COUNTERPOINT_CACHE_DIR to a folder of this user's."
        ) from problem


def read_limited(path: Path | str, error: type[CounterpointError], remedy: str) -> bytearray:
    """Return the bytes of a file or pipe without a byte-order mark.

    Raises `error`, one line that ends with `remedy` ("give a .toml file"), if the file cannot be read, is a device, or
    is larger than `MAX_TEXT_BYTES`.
    """
    raw = bytearray()
    try:
        for piece in read_pieces(path, error, remedy, most=MAX_TEXT_BYTES, is_unpacked=False):
            raw += piece
    except MemoryError as problem:
        raise error(f"{shown_path(path)} is too large for the memory of this machine; {remedy}.") from problem
    return raw


def read_pieces(
    path: Path | str,
    error: type[CounterpointError],
    remedy: str,
    *,
    most: int,
    is_unpacked: bool,
    on_progress: Callable[[int, int], None] | None = None,
) -> Iterator[bytes]:
    """Yield the bytes of a file or pipe without a byte-order mark, `most` at most, piece by piece in bounded memory; with
    `is_unpacked`, gzip is unpacked.

    `on_progress` gets the number of bytes read from the file as stored, and the file's size (0 for a pipe). Raises what
    `read_limited` raises, after the pieces that came before. For damaged gzip the cause is the decoder's own error.
    """
    try:
        with _Source(path, error, most, on_progress) as source:
            head = source.read(len(UTF8_MARK))
            source.put_back(head)
            if is_unpacked and head.startswith(GZIP_MAGIC):
                source.limit(min(most, MAX_PACKED_BYTES), "compressed bytes")
                yield from _without_mark(path, _unpacked(path, source, error, most), error)
            else:
                yield from _without_mark(path, iter(lambda: source.read(PIECE_BYTES), b""), error)
    except OSError as problem:
        raise error(f"Cannot read {shown_path(path)}: {problem.strerror}; {remedy}.") from problem
    except ValueError as problem:
        if isinstance(problem, CounterpointError):
            raise
        raise error(f"Cannot read {shown_path(path)}: {problem}; {remedy}.") from problem


def _without_mark(path: Path | str, pieces: Iterator[bytes], error: type[CounterpointError]) -> Iterator[bytes]:
    """Yield the pieces without the mark of UTF-8; refuse text whose mark says UTF-16."""
    first = next(pieces, b"")
    if first.startswith(UTF16_MARKS):
        raise error(f"{shown_path(path)} is UTF-16 text, as PowerShell's redirection writes it; save it as UTF-8.")
    if rest := first.removeprefix(UTF8_MARK):
        yield rest
    yield from pieces


def is_pipe(path: Path | str) -> bool:
    """Return whether the path names a pipe; what does not exist is none."""
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except (OSError, ValueError):  # a ValueError for a name with a null character
        return False


class _Source:
    """A file or pipe that is opened without blocking, counts the bytes read, and refuses devices and files that are too
    large.
    """

    def __init__(
        self, path: Path | str, error: type[CounterpointError], most: int, on_progress: Callable[[int, int], None] | None
    ) -> None:
        self.path, self.error, self.on_progress = path, error, on_progress
        self.most, self.what, self.num_read, self.size, self.kept = most, "bytes", 0, 0, b""
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def __enter__(self) -> "_Source":
        try:
            facts = os.fstat(self.descriptor)
            self.is_pipe = stat.S_ISFIFO(facts.st_mode)
            if not (self.is_pipe or stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode)):
                raise self.error(f"{shown_path(self.path)} is a device, which may never end; give a file.")
            self.size = 0 if self.is_pipe else facts.st_size
            self.limit(self.most, "bytes")
        except BaseException:
            os.close(self.descriptor)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def limit(self, most: int, what: str) -> None:
        """Refuse more than `most` bytes from here on; `what` is their name in the error."""
        self.most, self.what = most, what
        _refuse_larger(self.path, self.size, most, what, self.error)

    def put_back(self, piece: bytes) -> None:
        """Put `piece` back, to be read again."""
        self.kept = piece

    def read(self, most: int = PIECE_BYTES) -> bytes:
        """Return the next bytes, `most` at most; empty at the end."""
        if self.kept:
            piece, self.kept = self.kept[:most], self.kept[most:]
            return piece
        piece = _next_piece(self.descriptor, self.path, self.error, self.is_pipe, most)
        self.num_read += len(piece)
        # A pipe has no size, and files grow.
        _refuse_larger(self.path, self.num_read, self.most, f"{self.what} or more", self.error)
        if self.on_progress is not None:
            self.on_progress(self.num_read, self.size)
        return piece


def _next_piece(descriptor: int, path: Path | str, error: type[CounterpointError], is_pipe: bool, most: int) -> bytes:
    if is_pipe:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(1000 * SILENCE_S):
            raise error(f"Nothing arrived through the pipe {shown_path(path)} for {SILENCE_S:g} s; give a file.")
    return os.read(descriptor, most)


def _refuse_larger(path: Path | str, found: int, most: int, what: str, error: type[CounterpointError]) -> None:
    if found > most:
        raise error(
            f"{shown_path(path)} has {found:,} {what}; the limit is {most:,} ({format_bytes(most)}). Give a "
            "smaller file; for a trace, profile fewer steps."
        )


def _unpacked(path: Path | str, source: _Source, error: type[CounterpointError], most: int) -> Iterator[bytes]:
    """Yield the members of a gzip file one after the other; zeros may follow them."""
    found = 0
    decoder = zlib.decompressobj(wbits=31)
    packed, piece = source.read(), b""
    try:
        while packed or piece:
            piece = decoder.decompress(packed, PIECE_BYTES)
            found += len(piece)
            _refuse_larger(path, found, most, "bytes or more once unpacked", error)
            used = source.num_read - len(decoder.unconsumed_tail) - len(decoder.unused_data)
            if found > max(LEAST_SUSPECT_BYTES, MAX_RATIO * used):
                raise error(
                    f"{shown_path(path)} unpacks to {found:,} bytes from {used:,}, more than {MAX_RATIO} times "
                    "its size, which no trace does. Copy or record it again."
                )
            if piece:
                yield piece
            packed = decoder.unconsumed_tail or decoder.unused_data or source.read()
            while decoder.eof:
                packed = packed.lstrip(b"\0")
                if packed:
                    decoder = zlib.decompressobj(wbits=31)
                elif not (packed := source.read()):
                    return
        raise EOFError("it ends before its end-of-stream marker")
    except (EOFError, zlib.error) as problem:
        raise error(f"{shown_path(path)} is damaged gzip ({problem}); {REMEDY}.") from problem
