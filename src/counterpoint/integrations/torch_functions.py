"""Lets functions of `torch.distributed` call ours, for everyone who holds a reference to them.

torch wraps each of these functions: in one that logs exceptions, and its manager of coalesced collectives in that of
`contextlib`. The wrapper stays and calls ours, so it does not matter how, or when, a job got the function. DeepSpeed and
Megatron-LM keep references of their own from before.
"""

import contextlib
import functools
from collections.abc import Callable
from types import CellType
from typing import Any

import torch
from torch.distributed import c10d_logger, distributed_c10d

from counterpoint.integrations.closures import cells_of


class TorchFunctions:
    """The functions that call ours, until `restore`."""

    def __init__(self) -> None:
        self._changed: list[tuple[CellType, Any, Any]] = []  # what a wrapper calls, torch's function, and ours

    def __bool__(self) -> bool:
        return bool(self._changed)

    def replace(self, name: str, ours: Callable[..., Any]) -> None:
        """Let a collective of this name call `ours`, except while dynamo compiles, which makes torch's functional. Nothing
        happens if this torch has none, or if other code replaced it by one without torch's.
        """
        called = _called_by(c10d_logger.__name__, getattr(distributed_c10d, name, None))
        if called is not None:
            theirs = called.cell_contents

            @functools.wraps(theirs)
            def collective(*arguments: Any, **named: Any) -> Any:
                return (theirs if torch.compiler.is_compiling() else ours)(*arguments, **named)

            self._change(called, collective)

    def replace_coalescing(self, ours: Callable[..., Any]) -> None:
        """Let torch's manager of coalesced collectives call `ours`, a generator function, with torch's as first argument."""
        called = _called_by(contextlib.__name__, distributed_c10d._coalescing_manager)
        if called is not None:
            self._change(called, functools.partial(ours, called.cell_contents))

    def _change(self, called: CellType, ours: Any) -> None:
        self._changed.append((called, called.cell_contents, ours))
        called.cell_contents = ours

    def restore(self) -> None:
        """Let torch's functions call their own again, except those that were replaced once more: ours pass calls through."""
        for called, theirs, ours in self._changed:
            if called.cell_contents is ours:
                called.cell_contents = theirs
        self._changed.clear()


def _called_by(module: str, function: Any) -> CellType | None:
    """Return the closure's cell from which the wrapper that this module put around torch's function takes what it calls.
    Wrappers of others around it stay in place. None if other code put a function without it in its place.
    """
    while function is not None and getattr(function, "__globals__", {}).get("__name__") != module:
        function = getattr(function, "__wrapped__", None)
    return cells_of(function).get("func")
