"""Explains why a file does not match its type: where, what belongs there, what was found, what to do next; tells the kinds
of TOML files apart; and finds the name that a misspelt one most likely means.

The decoder's message names the place and the problem ("Expected `int`, got `str` - at `$.gpu.num_sms`"). The rest comes
from the requested type and the document. This module knows no value of the project, only a few fields that tell kinds of
files, and reads no file. It passes on messages in an unknown form unchanged.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from functools import cache, reduce
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

MAX_LISTED = 12
MAX_SHOWN = 40
Steps = tuple[str | int, ...]


class FileKind(NamedTuple):
    """A kind of TOML file: its name, which command or option takes it, and fields of which only such files have any."""

    name: str
    taker: str
    fields: frozenset[str]


FILE_KINDS = (  # a sweep file is a cluster file with one table more
    FileKind("sweep", "`counterpoint sweep`", frozenset({"sweep"})),
    FileKind("cluster", "`counterpoint simulate --cluster`", frozenset({"cluster"})),
    FileKind("machine", "--machine", frozenset({"gpu"})),
    FileKind("workload", "`counterpoint simulate`", frozenset({"num_ranks"})),
    FileKind("plan", "`counterpoint plan show`", frozenset({"verdict", "directives", "step_fingerprint"})),
    FileKind("calibration", "--calibration", frozenset({"device_name"})),
    FileKind("context", "`counterpoint check --context`", frozenset({"gpus", "environment", "filter_folder", "unknown"})),
)

_WILDCARDS = re.compile(r"[*?\[\]]+")
_WORD_START = re.compile(r"(?<![^\W_])[^\W_]")
_FORM = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?")
_STEP = re.compile(r"\.(?P<field>[^.\[\]]+)|\[(?P<position>\d+|\.\.\.)\]")
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table of fields",
    "null": "nothing",
    "datetime": "a date",
    "date": "a date",
    "time": "a time of day",
}
_KINDS: tuple[tuple[type[inspect.Type], str], ...] = (
    (inspect.BoolType, "bool"),
    (inspect.IntType, "int"),
    (inspect.FloatType, "float"),
    (inspect.StrType, "str"),
    (inspect.VarTupleType, "array"),
    (inspect.ListType, "array"),
    (inspect.StructType, "object"),
    (inspect.DictType, "object"),
)


_CLASSES: tuple[tuple[type[inspect.Type], tuple[type, ...]], ...] = (
    (inspect.BoolType, (bool,)),
    (inspect.IntType, (int,)),
    (inspect.FloatType, (int, float)),
    (inspect.StrType, (str,)),
    (inspect.VarTupleType, (tuple,)),
    (inspect.TupleType, (tuple,)),
    (inspect.ListType, (list,)),
    (inspect.DictType, (dict,)),
    (inspect.NoneType, (type(None),)),
)


def describe_mismatch(
    problem: msgspec.ValidationError, kind: object, document: object = None, whole: str = ""
) -> tuple[str, str]:
    """Return why `document` does not match `kind`, without a full stop, and a sentence on what to do.

    Without `document`, the message names no value found. `whole` is the name of the document if it is not a file.
    """
    what, steps = _read(problem)
    if not steps and (other := _other_kind(kind, document)):
        return other
    where, found = _where(steps, whole), _shown(document, steps)
    types = _types_at(inspect.type_info(kind), steps, document)
    if told := re.fullmatch(r"Expected (.*), got (.*)", what):
        return f"{where} must be {_in_words(types) or _as_told(told[1])}; found {found or _as_told(told[2])}", "Correct it."
    if told := re.fullmatch(r"Object missing required field `(.*)`", what):
        types = _types_at(inspect.type_info(kind), (*steps, told[1]), document)
        if types and all(isinstance(each, inspect.StructType) for each in types):
            return f"{where} has no [{told[1]}] table", "Add it."
        belongs = _in_words(types)
        return f"{where} lacks '{told[1]}'{f', {belongs}' if belongs else ''}", "Add it."
    if told := re.fullmatch(r"Object contains unknown field `(.*)`", what):
        return f"{where} has an unknown field '{told[1]}'", _instead(told[1], types)
    if told := re.fullmatch(r"Invalid (?:enum )?value (.*)", what):
        return f"{where} must be {_in_words(types) or 'another value'}; found {found or told[1]}", "Correct it."
    if what.endswith("out of range"):
        return f"{where} must be {_in_words(types) or 'a number'}; found {found or 'one'} out of range", "Correct it."
    return f"{where}: {what}", "Correct it."


def misfit(value: object) -> str:
    """Return which field of a value built in Python is of another type than its class states, in words; nothing if none is.

    Fields of values within it are not looked at. msgspec checks types only when it decodes.
    """
    if not isinstance(value, msgspec.Struct):
        return (
            f"a value such as Priority(priority=-5) or Dependency(operation=0) belongs here; found {_shortened(repr(value))}"
        )
    for name, kinds, choices, words in _fields_of(type(value)):
        found = getattr(value, name)
        if not isinstance(found, kinds) or (choices and found not in choices):
            return f"{name} must be {words}; found {_shortened(repr(found))}"
    return ""


@cache
def _fields_of(kind: type[msgspec.Struct]) -> tuple[tuple[str, tuple[type, ...], frozenset[object], str], ...]:
    """Return each field's name, the types of what it may hold, the values to which it may be limited, and these in words."""
    known = inspect.type_info(kind)
    assert isinstance(known, inspect.StructType)
    found = []
    for field in known.fields:
        members = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
        kinds = tuple(each for member in members for each in _classes(member))
        literals = {value for member in members if isinstance(member, inspect.LiteralType) for value in member.values}
        is_optional = any(isinstance(member, inspect.NoneType) for member in members)
        choices = frozenset(literals | ({None} if is_optional else set())) if literals else frozenset[object]()
        words = _in_words(members) if choices else " or ".join(dict.fromkeys(each.__name__ for each in kinds))
        found.append((field.name, kinds, choices, words.replace("NoneType", "None")))
    return tuple(found)


def _classes(kind: inspect.Type) -> tuple[type, ...]:
    """Return the Python types of the values that a type allows."""
    if isinstance(kind, inspect.StructType):
        return (kind.cls,)
    if isinstance(kind, inspect.LiteralType):
        return tuple({type(value) for value in kind.values})
    return next((classes for family, classes in _CLASSES if isinstance(kind, family)), (object,))


def _other_kind(kind: object, document: object) -> tuple[str, str] | None:
    """Return which other kind of file a document is, with what to do; None if it is not of another kind."""
    wanted = inspect.type_info(kind)
    if not isinstance(wanted, inspect.StructType) or not isinstance(document, dict):
        return None
    known = {field.encode_name for field in wanted.fields}
    needed, found = kind_of(known), kind_of(document.keys() - known)
    if found is None:
        return None
    name = f"{found.name} file"
    wanted_kind = f", and a {needed.name} file is needed" if needed is not None else ""
    return f"the file looks like a {name}{wanted_kind}", f"A {name} is for {found.taker}."


def kind_of(fields: Collection[str]) -> FileKind | None:
    """Return the kind of TOML file that has these fields at its top, or None if that is unknown."""
    return next((kind for kind in FILE_KINDS if not kind.fields.isdisjoint(fields)), None)


def place_of(problem: msgspec.ValidationError, document: object) -> str:
    """Return the place in the document, as in "directives[0].match"; empty for the whole document and for a value with a
    name.
    """
    _, steps = _read(problem)
    found = reduce(_inside, steps, document)
    has_name = isinstance(found, dict) and "name" in found
    return "" if has_name or not steps else _where(steps, "")


def _read(problem: msgspec.ValidationError) -> tuple[str, Steps]:
    """Split the decoder's message into problem and place (fields and positions); "..." stands for any value of a table
    with free keys.
    """
    form = _FORM.fullmatch(" ".join(str(problem).split()))
    assert form is not None, "every text matches this pattern"
    found = ((step["field"], step["position"]) for step in _STEP.finditer(form["path"] or ""))
    return form["what"], tuple(field or (int(position) if position.isdigit() else position) for field, position in found)


def _where(steps: Steps, whole: str) -> str:
    named = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps if step != "...")
    place = f"{whole}{named}".removeprefix(".") or "the file"
    return f"a value of {place}" if "..." in steps else place


def _shown(document: object, steps: Steps) -> str:
    """Return the value in the document, or nothing if it cannot be shown."""
    if document is None or "..." in steps:
        return ""
    for step in steps:
        if isinstance(step, int):
            inside = isinstance(document, list) and step < len(document)
        else:
            inside = isinstance(document, dict) and step in document
        if not inside:
            return ""
        document = document[step]  # type: ignore[index]
    if isinstance(document, dict | list):
        return f"a list of {len(document)}" if isinstance(document, list) else _WORDS["object"]
    if isinstance(document, bool) or document is None:
        return {True: "true", False: "false", None: "nothing"}[document]
    shown = _shortened(str(document))
    return f"'{shown}'" if isinstance(document, str) else shown


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def _types_at(kind: inspect.Type, steps: Steps, document: object) -> list[inspect.Type]:
    """Return the types allowed at a place: several if the document does not say which member of a union it is."""
    candidates = list(_alternatives(kind, document))
    for step in steps:
        document = _inside(document, step)
        inner = [below for candidate in candidates for below in _below(candidate, step)]
        candidates = [alternative for below in inner for alternative in _alternatives(below, document)]
    return candidates


def _inside(document: Any, step: str | int) -> object:
    if isinstance(step, int):
        return document[step] if isinstance(document, list) and step < len(document) else None
    return document.get(step) if isinstance(document, dict) else None


def _alternatives(kind: inspect.Type, document: object) -> Iterator[inspect.Type]:
    """Yield the members of a union, without those that the document's tag rules out."""
    members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    structs = [member for member in members if isinstance(member, inspect.StructType)]
    tagged = [member for member in structs if isinstance(document, dict) and document.get(member.tag_field) == member.tag]
    for member in members:
        if not isinstance(member, inspect.NoneType) and not (tagged and member in structs and member not in tagged):
            yield member


def _below(kind: inspect.Type, step: str | int) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.StructType) and step == kind.tag_field:
        yield inspect.LiteralType(values=(kind.tag,))
    elif isinstance(kind, inspect.StructType):
        yield from (field.type for field in kind.fields if field.encode_name == step)
    elif isinstance(kind, inspect.DictType):
        yield kind.value_type
    elif isinstance(kind, inspect.VarTupleType | inspect.ListType):
        yield kind.item_type
    elif isinstance(kind, inspect.TupleType) and isinstance(step, int) and step < len(kind.item_types):
        yield kind.item_types[step]


def _in_words(types: Sequence[inspect.Type]) -> str:
    """Describe the allowed values: "a whole number", "one of 'a', 'b'"; nothing if unknown."""
    literals = [repr(value) for kind in types if isinstance(kind, inspect.LiteralType) for value in kind.values]
    parts = [f"one of {', '.join(dict.fromkeys(literals))}" if len(literals) > 1 else literals[0]] if literals else []
    for kind in types:
        if isinstance(kind, inspect.TupleType):
            parts.append(f"a list of {len(kind.item_types)}")
        parts += [_WORDS[name] for family, name in _KINDS if isinstance(kind, family)]
    return " or ".join(dict.fromkeys(parts))


def _as_told(text: str) -> str:
    """Translate the decoder's names for types into words."""
    names = re.findall(r"\w+", text)
    return " or ".join(_WORDS.get(name, name) for name in names if name != "null" or len(names) == 1)


def _instead(name: str, types: Sequence[inspect.Type]) -> str:
    """Suggest what to write in place of an unknown field."""
    structs = [kind for kind in types if isinstance(kind, inspect.StructType)]
    fields = [field.encode_name for kind in structs for field in kind.fields]
    close = nearest(name, fields)
    if close:
        return f"Did you mean '{close}'? Correct or remove it."
    return f"Remove it; the known fields are {', '.join(fields)}." if 0 < len(fields) <= MAX_LISTED else "Remove it."


def nearest(name: str, names: Collection[str]) -> str:
    """Return which of `names` a misspelt name is most like; empty if it is like none.

    Of a shell pattern, the longest part without wildcards is compared with what begins at each word of a name.
    """
    spelt = max(_WILDCARDS.split(name), key=len)
    parts = {each: each for each in sorted(names)}
    if spelt != name:
        parts = {each[start.start() :][: len(spelt)]: each for each in parts for start in _WORD_START.finditer(each)}
    close = get_close_matches(spelt, parts, n=1) if spelt else ()
    return parts[close[0]] if close else ""
