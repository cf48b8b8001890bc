"""Classifies kernels by name: the first matching rule of `rules.toml` decides.

The module knows nothing of traces or times. The rules are data, so supporting a new library takes a few lines of TOML; each
rule names the source of its kernel names. Only these rules decide which kernels communicate: the launch filter uses the
patterns of `communication_patterns`.
"""

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from counterpoint.errors import TraceError, shown
from counterpoint.machine import ElementType
from counterpoint.step import Character, CollectiveKind, CopyDirection
from counterpoint.value import Value, read_shipped, read_toml, require

COPY_DIRECTIONS: tuple[tuple[str, CopyDirection], ...] = (
    ("memset", "set"),
    ("ptop", "peer_to_peer"),
    ("htod", "host_to_device"),
    ("dtoh", "device_to_host"),
    ("dtod", "device_to_device"),
    ("hosttodevice", "host_to_device"),
    ("devicetohost", "device_to_host"),
    ("devicetodevice", "device_to_device"),
)


Group = tuple[str | None, str | None]  # a process group's name and its description


class Rule(Value, frozen=True, kw_only=True):
    """One rule: the kernel names that it matches, and what a kernel of such a name is.

    Either one of `names` matches the whole name (`*` and `?` as in a shell), or `pattern`, a regular expression, is found in
    it. `library` is the transport of a collective. `is_waiting`: the kernel only waits for other ranks or signals them.
    `priority` is that of the library's stream, where the trace does not say.
    """

    source: str
    names: tuple[str, ...] = ()
    pattern: str = ""
    kind: Literal["communication", "computation"] = "computation"
    library: str = ""
    collective: CollectiveKind = "send_recv"
    character: Character = "other"
    is_work_sharing: bool = False
    is_waiting: bool = False
    priority: int = 0
    ctas_per_cluster: int = 1

    def __post_init__(self) -> None:
        require(
            bool(self.names or self.pattern),
            TraceError,
            "a rule matches no kernel, because it has neither 'names' nor 'pattern'; give it one.",
        )
        require(
            not self.is_waiting or self.kind == "communication",
            TraceError,
            'only a communication kernel can be waiting; give the rule kind = "communication" or leave out is_waiting.',
        )
        try:
            re.compile(self.pattern)
        except re.error as problem:
            raise TraceError(
                f"the pattern '{shown(self.pattern)}' is not a regular expression: {problem}; correct it."
            ) from problem


class UserRules(Value, frozen=True, kw_only=True):
    """A user's file: rules that are tried before the shipped ones."""

    rule: tuple[Rule, ...]


class ClusterRule(Value, frozen=True, kw_only=True):
    """The cluster size that a library launches with on one GPU generation."""

    library: str
    compute_major: int
    ctas_per_cluster: int


class ElementTypeRule(Value, frozen=True, kw_only=True):
    """The element type of a matmul's operands if `pattern`, a regular expression, is found in the name of its kernel."""

    pattern: str
    type: ElementType
    source: str


class RuleTable(Value, frozen=True, kw_only=True):
    """All rules in order, and the tables that translate what the profiler writes with collectives and operators."""

    rule: tuple[Rule, ...]
    cluster: tuple[ClusterRule, ...]
    element_type: tuple[ElementTypeRule, ...]
    operand_types: dict[str, ElementType]
    collective_names: dict[str, CollectiveKind]
    dtype_bytes: dict[str, int]


UNKNOWN = Rule(source="no rule knows the name", pattern="^")
_IN_FORCE: dict[str, Path] = {}  # "user": the file of rules that this process was told to use


@cache
def load_rules(path: Path | str | None = None) -> RuleTable:
    """Return the shipped rule table, preceded by the rules of a user's TOML file if `path` is given.

    Raises `TraceError`, in one line, for a file that cannot be read or is not a table of rules.
    """
    shipped = read_shipped("traces/rules.toml", RuleTable, TraceError)
    if path is None:
        return shipped
    own = read_toml(path, UserRules, TraceError)
    return replace(shipped, rule=(*own.rule, *shipped.rule))


def use_rules(path: Path | str | None) -> None:
    """Try a user's rules first in this process from now on; None removes them.

    Raises `TraceError` for a bad file, and then changes nothing. The launch filter always uses the shipped table.
    """
    if path is None:
        _IN_FORCE.clear()
    else:
        load_rules(Path(path))
        _IN_FORCE["user"] = Path(path)
    classify_kernel.cache_clear()
    is_communication.cache_clear()
    _compiled_rules.cache_clear()


@cache
def communication_patterns() -> tuple[str, ...]:
    """Return name patterns of all kernels that communicate, in the launch filter's syntax; no pattern covers another one."""
    names = tuple(dict.fromkeys(name for rule in load_rules().rule if rule.kind == "communication" for name in rule.names))
    return tuple(name for name in names if not any(other != name and _covers(other, name) for other in names))


@lru_cache(maxsize=4096)
def classify_kernel(name: str) -> Rule:
    """Return the first rule that matches `name`; a rule of character "other" if none does."""
    for rule, expression in _compiled_rules():
        if expression.search(name):
            return rule
    return UNKNOWN


@cache
def _compiled_rules() -> tuple[tuple[Rule, re.Pattern[str]], ...]:
    return tuple(
        (rule, re.compile("|".join(filter(None, (*map(_whole, rule.names), rule.pattern)))))
        for rule in load_rules(_IN_FORCE.get("user")).rule
    )


def _whole(pattern: str) -> str:
    """Return a shell pattern as a regular expression for the whole name."""
    words = "".join({"*": ".*", "?": "."}.get(letter, re.escape(letter)) for letter in pattern)
    return rf"\A(?s:{words})\Z"


def _covers(wide: str, narrow: str) -> bool:
    """Return whether every name that matches `narrow` matches `wide`. This is so if `wide` matches the text of `narrow`, its
    stars read as ordinary characters.
    """
    words = "".join({"*": ".*", "?": "[^*]"}.get(letter, re.escape(letter)) for letter in wide)
    return re.fullmatch(words, narrow) is not None


def ctas_per_cluster(rule: Rule, compute_major: int, num_ctas: int) -> int:
    """Return the CTAs per cluster of this launch: the rule's value, or the library's on this GPU.

    The result is 1 if the grid is no multiple of it: the driver refuses such a launch, so the library cannot have used one.
    """
    size = rule.ctas_per_cluster
    for cluster in load_rules().cluster:
        if rule.library == cluster.library and compute_major == cluster.compute_major:
            size = cluster.ctas_per_cluster
    return size if num_ctas % size == 0 else 1


def collective_kind(traced_name: str | None, rule: Rule) -> tuple[CollectiveKind, bool]:
    """Return the kind of collective, and whether the traced name is known; an unknown name counts as a send and receive."""
    if not traced_name:
        return rule.collective, True
    known = known_collective(traced_name)
    return (known, True) if known is not None else ("send_recv", False)


def known_collective(traced_name: str) -> CollectiveKind | None:
    """Return the collective that torch calls by this name, or None for a name that the table does not hold."""
    return load_rules().collective_names.get(traced_name.lower().strip("_ "))


def element_bytes(dtype: str | None) -> int | None:
    """Return the bytes of one element of a PyTorch type, or None for a type that the table does not hold."""
    return load_rules().dtype_bytes.get(dtype) if dtype else None


@lru_cache(maxsize=4096)
def matmul_type(name: str, operand: str) -> ElementType | None:
    """Return the type of a matmul's operands: from its kernel's name, else from its operator's first input, else None."""
    rules = load_rules()
    for rule in rules.element_type:
        if re.search(rule.pattern, name):
            return rule.type
    return rules.operand_types.get(operand)


def name_groups(groups: Iterable[Group]) -> dict[Group, str | None]:
    """Return a name for each process group, from its name and description, that stays the same when a job is restarted.

    torch names groups by a counter, in the order of their creation. A description ("default_pg", "mesh_tp") is preferred
    unless it is missing ("undefined") or several groups share it.
    """
    distinct = set(groups)
    shared = Counter(description for _, description in distinct)
    return {
        group: group[1] if group[1] not in (None, "", "undefined") and shared[group[1]] == 1 else group[0] or None
        for group in distinct
    }


def copy_direction(name: str) -> CopyDirection:
    """Return the direction of a copy from the profiler's name for it ("Memcpy PtoP (Device -> Device)")."""
    squeezed = name.lower().replace("_", "").replace(" ", "")
    for word, direction in COPY_DIRECTIONS:
        if word in squeezed:
            return direction
    return "device_to_device"


@lru_cache(maxsize=4096)
def is_communication(category: str, name: str) -> bool:
    """Return whether a GPU operation moves data between GPUs: a collective's kernel or a peer-to-peer copy."""
    if category == "kernel":
        return classify_kernel(name).kind == "communication"
    return copy_direction(name) == "peer_to_peer"
