"""The base of every value that parts of Counterpoint pass to each other, and its way to and from files.

A value is frozen, built by keyword, checked when built, comparable, printable, and round-trips through JSON and TOML.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from counterpoint.errors import CounterpointError

T = TypeVar("T")


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all values. Subclasses check themselves in `__post_init__` and raise a `CounterpointError`."""


def require(condition: bool, error: type[CounterpointError], message: str) -> None:
    """Raise `error` with `message` unless `condition` holds."""
    if not condition:
        raise error(message)


def read_toml(path: Path, kind: type[T], error: type[CounterpointError]) -> T:
    """Read a TOML file into `kind`; whatever is wrong with it becomes one `error` that names the file."""
    try:
        content = path.read_bytes()
        require(bool(content.strip()), error, "the file is empty; make it again.")  # a plan of nothing would be a valid one
        return msgspec.toml.decode(content, type=kind)
    except OSError as problem:
        raise error(f"Cannot read {path}: {problem.strerror}; give a TOML file.") from problem
    except UnicodeDecodeError as problem:
        raise error(f"{path} is not text: {problem.reason} at byte {problem.start}; give a TOML file.") from problem
    except CounterpointError as problem:
        raise error(f"{path}: {problem}") from problem
    except msgspec.ValidationError as problem:
        cause = problem.__cause__ or problem
        raise error(f"{path}: {cause}" if isinstance(cause, CounterpointError) else f"{path}: {problem}.") from problem
    except (msgspec.DecodeError, ValueError, RecursionError) as problem:  # the last two: numbers or nesting without end
        raise error(f"{path} is not TOML: {problem}.") from problem


def check_outputs(outputs: Sequence[Path | None], inputs: Sequence[str | Path | None] = ()) -> None:
    """Refuse an output that cannot be written, or is a file of the command already, before any work is done."""
    taken = {Path(path).resolve() for path in inputs if path is not None}
    for path in outputs:
        if path is None:
            continue
        folder = path.absolute().parent
        if path.is_dir():
            raise CounterpointError(f"Cannot write '{path}': it is a folder. Name a file.")
        if not folder.is_dir():
            raise CounterpointError(
                f"Cannot write '{path}': the folder '{folder}' does not exist. Name a file in an existing folder."
            )
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise CounterpointError(f"Cannot write '{path}': permission denied. Name a file that you may write.")
        if path.resolve() in taken:
            raise CounterpointError(f"Cannot write '{path}': this command already uses that file. Name another.")
        taken.add(path.resolve())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file as a whole: a failure leaves the file that was there, or none. Raises `OSError`."""
    if path.is_symlink() or (path.exists() and not path.is_file()):  # links, devices and pipes are written in place
        path.write_bytes(content)
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_toml(value: object) -> str:
    """Write a value as TOML text."""
    return msgspec.toml.encode(value).decode()


def write_json(value: object) -> str:
    """Write a value as indented JSON text."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
