"""Kernels' names for people: the function without namespaces, template arguments and parameters, mangled or not.

A mangled name is read by its identifiers alone (Itanium C++ ABI, 5.1), which suffices, also if the name was cut. A full
demangler writes repeated parts out again: a name of 280 letters can then take 400 MB. Plans, files and matching keep whole
names.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

from counterpoint.display import cut

LONGEST_NAME = 60
GENERIC_KERNEL = re.compile("elementwise_kernel|reduce_kernel|multi_tensor_apply_kernel")
DETAIL = re.compile(r"\w*(?:Functor|functor|Ops\b|kernel_cuda|kernel_impl|KernelImpl|copy_kernel|Gelu|silu)\w*")
FUNCTION = re.compile(r"_Z|void |(?:\w+::|\(anonymous namespace\)::)+\w|\w+[<(]")  # how a name of C++ begins
VAGUE = frozenset({"device_kernel", "Kernel", "Kernel2"})  # names that say nothing without the library in front
WILDCARD = re.compile(r"[*?[]")
# Of a mangled name behind its function: a literal ("Li8E"), a repeated part ("S0_", "T0_"), an identifier's length.
ARGUMENT = re.compile(r"L[a-z]n?\d+E|[ST][0-9A-Z]*_|E\d*_|(?P<length>\d{1,4})|.", re.DOTALL)
LENGTH = re.compile(r"\d{1,4}")


@lru_cache(maxsize=4096)
def short_name(name: str) -> str:
    """Return a kernel's name without namespaces and (template) arguments; for a generic kernel, also what it applies."""
    base, arguments = _parts(name)
    found = _detail(arguments) if GENERIC_KERNEL.search(base) else ""
    return cut(f"{base} ({found})" if found else base, LONGEST_NAME)


def base_name(name: str) -> str:
    """Return `short_name` without what a generic kernel applies; words that are no name of C++ stay as they are."""
    return _parts(name)[0] if _is_function(name) else name


def readable(text: str) -> str:
    """Return the short name if the text is a function's name in C++; other words, and patterns, are only cut if too long."""
    return short_name(text) if _is_function(text) else cut(text, LONGEST_NAME)


def _is_function(text: str) -> bool:
    return FUNCTION.match(text) is not None and not WILDCARD.search(_parts(text)[0])


def _parts(name: str) -> tuple[str, str]:
    """Return a function's name, and its arguments; of a mangled name, the identifiers among these."""
    if name.startswith("_Z"):
        return _of_mangled(name)
    plain = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    qualified = re.split(r"[<(]", plain, maxsplit=1)[0]
    return _without_namespaces(qualified.strip().split("::")) or plain, plain[len(qualified) :]


def _of_mangled(name: str) -> tuple[str, str]:
    """Return the parts of a mangled name ("_ZN7cutlass13device_kernelIN..."), which is lengths and identifiers."""
    is_nested = name.startswith("_ZN")
    place = 3 if is_nested else 2
    parts: list[str] = []
    while (is_nested or not parts) and (found := LENGTH.match(name, place)):
        place = found.end() + int(found.group())
        parts.append(name[found.end() : place])
    named = [part for part in parts if not part.startswith("_GLOBAL__N")]
    return _without_namespaces(named) or name, _identifiers(name, place)


def _without_namespaces(parts: Sequence[str]) -> str:
    """Return the last part of a qualified name; with the one before it, if it says nothing alone."""
    return "::".join(parts[-2:] if parts and parts[-1] in VAGUE else parts[-1:])


def _identifiers(name: str, place: int) -> str:
    """Return the identifiers of a mangled name from a place on."""
    found = []
    while token := ARGUMENT.match(name, place):
        place = token.end() + int(token["length"] or 0)
        if token["length"]:
            found.append(name[token.end() : place])
    return " ".join(found)


def _detail(arguments: str) -> str:
    """Return what a generic kernel applies, or nothing."""
    found = DETAIL.search(arguments)
    return found.group(0) if found else ""
