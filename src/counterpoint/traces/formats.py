"""The trace formats, one line each. A file is read by the first format that recognizes its content, whatever the file's
name.

A format turns the bytes of a file into an `ActivityTrace`. All later stages (steps, dependencies, lone times) are
the same for every format. To add a format, add a module beside `kineto.py` and a line in `FORMATS`.
"""

import os
import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from counterpoint.errors import TraceError
from counterpoint.files import GZIP_MAGIC, MAX_TRACE_BYTES, is_pipe, read_pieces
from counterpoint.traces import kineto, nsight
from counterpoint.traces.activity import ActivityTrace
from counterpoint.units import format_choice
from counterpoint.value import require

HEAD_BYTES = 4096  # enough bytes to recognize a format


class TraceFormat(NamedTuple):
    """`knows` recognizes the format by the first bytes. `read` takes the path, for messages, and the file in pieces.

    Both get uncompressed bytes. `suffixes` are the usual ones of files in this format, in lower case.
    """

    name: str
    suffixes: tuple[str, ...]
    knows: Callable[[bytes], bool]
    read: Callable[[Path, Iterator[bytes]], ActivityTrace]


FORMATS = (
    TraceFormat(name="torch.profiler", suffixes=(".json", ".json.gz"), knows=kineto.knows, read=kineto.read),
    TraceFormat(name="Nsight Systems", suffixes=(".sqlite",), knows=nsight.knows, read=nsight.read),
)
SUFFIXES = tuple(suffix for each in FORMATS for suffix in each.suffixes)
SUFFIXES_IN_WORDS = ", ".join(SUFFIXES)


def read_activity(path: Path | str, on_progress: Callable[[int, int], None] | None = None) -> ActivityTrace:
    """Read a trace, gzipped or not. Raises `TraceError` if the file is no trace, or holds no GPU activity.

    `on_progress` gets the number of bytes read and the file's size, which is 0 for a pipe. A file is read in pieces: memory
    depends on what is kept of it.
    """
    remedy = f"give a {format_choice(SUFFIXES)} file"
    path = Path(path)
    pieces = read_pieces(path, TraceError, remedy, most=MAX_TRACE_BYTES, is_unpacked=True, on_progress=on_progress)
    first = b""
    while len(first) < HEAD_BYTES and (piece := next(pieces, b"")):  # a pipe may return only a few bytes at once
        first = (first + piece).lstrip()
    require(bool(first), TraceError, f"{path} is empty; profile again and let the profiler finish writing.")
    head = first[:HEAD_BYTES]
    named = [each for each in FORMATS if path.name.lower().endswith(each.suffixes)]
    known = [each for each in FORMATS if each.knows(head)]
    possible = [*known, *named]
    require(bool(possible), TraceError, f"{path} is not a profiler trace: no format of traces begins in this way; {remedy}.")
    return possible[0].read(path, chain([first], pieces))


def is_trace(source: str) -> bool:
    """Return whether `source` names a trace: by its suffix, or by its content if it is a file that a format recognizes.

    A pipe counts as a trace, because its content can be read only once.
    """
    if source.lower().endswith(SUFFIXES) or is_pipe(source):
        return True
    if not os.path.isfile(source):
        return False
    try:
        with open(source, "rb") as file:
            head = file.read(HEAD_BYTES)
        if head.startswith(GZIP_MAGIC):
            head = zlib.decompressobj(wbits=31).decompress(head, HEAD_BYTES)
    except (OSError, zlib.error):
        return False
    return any(each.knows(head) for each in FORMATS)
