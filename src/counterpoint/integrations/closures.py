"""Reads closures and code of functions: what frameworks bound into the functions that they left on a module."""

import inspect
from collections.abc import Callable
from functools import partial
from types import CellType, CodeType
from typing import Any

from torch import nn

Hook = Callable[..., Any]


def cells_of(hook: Hook | None) -> dict[str, CellType]:
    """Return the cells of a function's closure variables by name; nothing for objects that are no such function."""
    code, cells = getattr(hook, "__code__", None), getattr(hook, "__closure__", None)
    return {} if code is None or not cells else dict(zip(code.co_freevars, cells, strict=True))


def closure_of(hook: Hook | None) -> dict[str, Any]:
    """Return a function's closure variables by name; nothing for objects that are no such function."""
    return {name: cell.cell_contents for name, cell in cells_of(hook).items()}


def bound_in(hook: Hook, name: str) -> tuple[Any, ...]:
    """Return the arguments bound into the function that a hook of `distribute_module` calls."""
    function = closure_of(hook).get(name)
    return function.args if isinstance(function, partial) else ()


def original_forward(module: nn.Module) -> Hook:
    """Return the forward that transformers or torchtitan 0.3 wrapped; a module's own if none did."""
    found = closure_of(vars(module).get("forward"))
    forward: Hook = found.get("fn" if "parallel_dims" in found else "original_forward", module.forward)
    return forward


def uses(function: Callable[..., Any], names: frozenset[str]) -> bool:
    """Return whether the code of a function, or of functions defined within, has one of these names."""
    waiting = [getattr(inspect.unwrap(function), "__code__", None)]
    while waiting:
        code = waiting.pop()
        if isinstance(code, CodeType):
            if not names.isdisjoint(code.co_names):
                return True
            waiting += code.co_consts
    return False
