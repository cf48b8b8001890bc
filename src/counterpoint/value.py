"""`Value`, the base of all values that parts of Counterpoint pass to each other, and how values are read and written.

A value is frozen, built by keyword, checked when built, comparable, printable, and round-trips through JSON and TOML.
"""

import gc
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from counterpoint.display import MOST_LETTERS, fields_in_short
from counterpoint.errors import CounterpointError, shown, shown_path
from counterpoint.files import GZIP_MAGIC, MAX_TEXT_BYTES, read_limited
from counterpoint.mismatch import describe_mismatch, kind_of, misfit, place_of
from counterpoint.units import format_choice

PACKAGE = Path(__file__).parent  # found so, since importlib.resources would take a fifth of `import counterpoint`
T = TypeVar("T")
_COMPRESSED = "compressed; give the TOML text itself (gunzip)."


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all values. Subclasses check themselves in `__post_init__` and raise a `CounterpointError`."""

    def __repr__(self) -> str:
        """Return every field; of a value that would take more than 1,000 letters, only the essentials."""
        whole = super().__repr__()
        return whole if len(whole) <= MOST_LETTERS else f"<{type(self).__name__} {self._in_short()}>"

    def _in_short(self) -> str:
        return fields_in_short((name, getattr(self, name)) for name in self.__struct_fields__)


def all_fields(value: object) -> object:
    """Return nested values as tuples of all fields, for keys and fingerprints that are equal in every process.

    Neither a `repr` nor JSON of a value shows all fields. JSON omits a default only if it is the same object, so the JSON
    of a value differs from that of its copy from another process.
    """
    if isinstance(value, Value):
        return (type(value).__name__, *(all_fields(getattr(value, name)) for name in value.__struct_fields__))
    if isinstance(value, dict):
        return tuple((key, all_fields(each)) for key, each in sorted(value.items()))
    return tuple(map(all_fields, value)) if isinstance(value, tuple) else value


def check_types(value: Value, error: type[CounterpointError], where: str = "") -> None:
    """Raise `error` if a field of a value built in Python is of another type than its class states."""
    if said := misfit(value):
        raise error(f"{where or type(value).__name__}: {said}.")


def require(condition: bool, error: type[CounterpointError], message: str) -> None:
    """Raise `error` with `message` unless `condition` holds."""
    if not condition:
        raise error(message)


@contextmanager
def cyclic_gc_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector while many values are built, because values form no reference cycles.

    With a million values in memory, the collector takes as long as building them. It is enabled again afterwards if it
    was before.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_toml(path: Path | str, kind: type[T], error: type[CounterpointError]) -> T:
    """Read a TOML file into `kind`; any problem becomes one `error` that names the file."""
    content = bytes(read_limited(path, error, "give a TOML file"))
    try:
        require(bool(content.strip()), error, "the file is empty; make it again.")  # an empty file would be a valid plan
        if content.startswith(GZIP_MAGIC):
            kind_of_text = "compressed JSON, as traces are; give a TOML file." if _holds_json(content) else _COMPRESSED
            raise error(f"the file is {kind_of_text}")
        require(not content.lstrip().startswith(b"{"), error, "the file is JSON; give a TOML file.")
        return msgspec.toml.decode(content, type=kind)
    except UnicodeDecodeError as problem:
        raise error(
            f"{shown_path(path)} is not text: {problem.reason} at byte {problem.start}; give a TOML file."
        ) from problem
    except CounterpointError as problem:
        raise error(f"{shown_path(path)}: {problem}") from problem
    except msgspec.ValidationError as problem:
        raise error(f"{shown_path(path)}: {_mismatch(problem, kind, content)}") from problem
    except (msgspec.DecodeError, ValueError, RecursionError) as problem:  # the last two: huge numbers or endless nesting
        raise error(
            f"{shown_path(path)} is not TOML: {_told(problem)}. Correct it there, or make the file again."
        ) from problem


def _holds_json(packed: bytes) -> bool:
    try:
        return zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(packed, MOST_LETTERS).lstrip().startswith(b"{")
    except zlib.error:
        return False


def decode_json(content: bytes, kind: type[T], error: type[CounterpointError], what: str, remedy: str) -> T:
    """Decode JSON into `kind`. Any problem becomes one `error`: `what` is wrong ("a.json is no plan"), why, and `remedy`."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        why = _told(problem)
        if isinstance(problem, msgspec.ValidationError) and not isinstance(problem.__cause__, CounterpointError):
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # in a part that was not reached before
                why, _ = describe_mismatch(problem, kind, msgspec.json.decode(content))
        raise error(f"{what}: {why}. {remedy}") from problem


def _told(problem: Exception) -> str:
    """Return why a text cannot be decoded, without a full stop."""
    if isinstance(problem, RecursionError):
        return "it is nested too deeply"
    if isinstance(problem, UnicodeDecodeError):
        return f"it is not text ({problem.reason})"
    return str(problem.__cause__ or problem).rstrip(".")


def _mismatch(problem: msgspec.ValidationError, kind: type[T], content: bytes) -> str:
    """Return a value's own error with its place, unless the error names that; otherwise the decoder's error in words."""
    cause, document = problem.__cause__, msgspec.toml.decode(content)
    if not isinstance(cause, CounterpointError):
        return ". ".join(describe_mismatch(problem, kind, document))
    place = place_of(problem, document)
    return f"{place}: {cause}" if place and not str(cause).startswith(place) else str(cause)


class OutputKind(NamedTuple):
    """A kind of file that is written: what it is called, the endings of its name (none: any), and whether bytes are one."""

    name: str
    suffixes: tuple[str, ...]
    is_own: Callable[[bytes], bool]


def toml_output(name: str) -> OutputKind:
    """Return the kind of output that `mismatch.FILE_KINDS` calls so."""
    return OutputKind(name, (".toml",), lambda content: _toml_kind(content) == name)


def copy_output(name: str, text: str) -> OutputKind:
    """Return the kind of a template that users edit: only an unchanged copy of `text` may be written again."""
    return OutputKind(name, (".toml",), lambda content: content == text.encode())


def json_output(name: str, *fields: str) -> OutputKind:
    """Return the kind of a JSON file that has all these fields at its top."""
    return OutputKind(name, (".json",), lambda content: set(fields) <= _json_fields(content))


def text_output(name: str, suffixes: tuple[str, ...], *heads: str) -> OutputKind:
    """Return the kind of a text that begins with one of `heads`."""
    return OutputKind(name, suffixes, lambda content: content.startswith(tuple(map(str.encode, heads))))


def _toml_kind(content: bytes) -> str:
    """Return which kind of TOML file this is; empty if it is none that is known."""
    try:
        found = kind_of(msgspec.toml.decode(content, type=dict[str, object]).keys())
    except (msgspec.DecodeError, ValueError, RecursionError):
        return ""
    return "" if found is None else found.name


def _json_fields(content: bytes) -> set[str]:
    try:
        return set(msgspec.json.decode(content, type=dict[str, msgspec.Raw]))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return set()


def check_suffix(path: Path, kind: OutputKind, error: type[CounterpointError]) -> None:
    """Raise `error` for a file whose name does not end as its kind says; it might be something else, which would be lost."""
    if kind.suffixes and not path.name.lower().endswith(kind.suffixes):
        article = "An" if kind.name[0] in "aeiou" else "A"
        endings = format_choice(kind.suffixes)
        raise error(f"{article} {kind.name} file must end in {endings}; found '{shown_path(path.name)}'. Rename it.")


def check_replaced(path: Path, kind: OutputKind, error: type[CounterpointError]) -> None:
    """Raise `error` if writing a file of this kind would replace something else, or a template that was edited."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        content = file.read(MAX_TEXT_BYTES)
    if not content.strip() or kind.is_own(content):
        return
    other = _toml_kind(content) if ".toml" in kind.suffixes else ""
    found = f"no {kind.name}" if not other else f"another {other}" if other == kind.name else f"a {other}, not a {kind.name}"
    raise error(f"'{shown_path(path)}' would be replaced, and holds {found}. Name another file, or remove it first.")


def check_continued(
    path: Path, names: Sequence[str], conditions: tuple[Mapping[str, object], Mapping[str, object]], remedy: str
) -> None:
    """Raise `CounterpointError` if results may not be added to a file: `conditions`, those of the file and those of now,
    differ in one of these names.
    """
    for name in names:
        before, now = (str(each.get(name, "unknown")) for each in conditions)
        if before != now:
            raise CounterpointError(
                f"{shown_path(path)} was measured with {name} {shown(before)}, and now it is {shown(now)}. {remedy}."
            )


def shipped_names(folder: str) -> list[str]:
    """Return the names of the TOML files in a folder of this package, sorted."""
    return sorted(file.stem for file in PACKAGE.joinpath(folder).glob("*.toml"))


def read_shipped(name: str, kind: type[T], error: type[CounterpointError]) -> T:
    """Read a TOML file of this package, named as in "calibrations/h200.toml", into `kind`."""
    return read_toml(PACKAGE / name, kind, error)


def shipped_text(name: str) -> str:
    """Return the text of a file of this package, named as in "calibrations/h200.toml"."""
    return (PACKAGE / name).read_text("utf-8")


def save_toml(path: Path | str, value: object, kind: OutputKind, error: type[CounterpointError]) -> None:
    """Write `value` as TOML; if that is impossible, or would replace something else, raise one `error`."""
    save_text(path, write_toml(value), kind, error)


def save_text(path: Path | str, text: str, kind: OutputKind, error: type[CounterpointError]) -> None:
    """Write a text; if that is impossible, or would replace something else, raise one `error`."""
    file = Path(path)
    check_suffix(file, kind, error)
    try:
        check_replaced(file, kind, error)
        write_whole(file, text.encode())
    except OSError as problem:
        raise error(
            f"Cannot write the {kind.name} to {shown_path(path)}: {problem.strerror}. Name a file that you may write."
        ) from problem


def check_outputs(outputs: Sequence[tuple[Path | None, OutputKind]], inputs: Sequence[str | Path | None] = ()) -> None:
    """Refuse, before any work is done, an output that cannot be written, that the command already uses, that is called like
    another kind of file, or that is one.
    """
    # not `Path.resolve`, which raises an error of its own where links lead in a circle
    taken = {Path(os.path.realpath(path)) for path in inputs if path is not None}
    for path, _ in outputs:
        if path is None:
            continue
        if str(path) == "-":
            raise CounterpointError(
                "'-' cannot be used as a file: standard output has the report. Name a file, as in ./plan.toml."
            )
        target = Path(os.path.realpath(path))
        if target.is_symlink():
            raise CounterpointError(f"Cannot write '{shown_path(path)}': its links lead in a circle. Name another file.")
        folder = target.parent
        if path.is_dir():
            raise CounterpointError(f"Cannot write '{shown_path(path)}': it is a folder. Name a file.")
        if not folder.is_dir():
            raise CounterpointError(
                f"Cannot write '{shown_path(path)}': the folder '{shown_path(folder)}' does not exist. Name a file "
                f"in an existing folder."
            )
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise CounterpointError(f"Cannot write '{shown_path(path)}': permission denied. Name a file that you may write.")
        if target in taken:
            raise CounterpointError(f"Cannot write '{shown_path(path)}': this command already uses that file. Name another.")
        taken.add(target)
    for path, kind in outputs:
        if path is not None:
            check_suffix(path, kind, CounterpointError)
            check_replaced(path, kind, CounterpointError)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: after a failure, the previous file or none is there. Raises `OSError`."""
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
