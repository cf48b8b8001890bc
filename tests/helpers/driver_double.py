"""Makes room for a double of the CUDA driver's bindings where the real ones are installed."""

import sys
from types import ModuleType

import pytest


def forget_modules_on_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the test, each module of ours that an earlier test imported on the driver's bindings is imported anew."""
    ours = {name: vars(module) for name, module in sys.modules.items() if name.startswith("counterpoint.")}
    found: set[str] = set()
    while more := {name for name in set(ours) - found if any(_is_on(value, name, found) for value in ours[name].values())}:
        found |= more
    for name in found:
        monkeypatch.delitem(sys.modules, name)


def _is_on(value: object, name: str, found: set[str]) -> bool:
    """Whether this value of the module `name` is from the bindings or from a module that was found. A package also holds its
    own modules, which do not count.
    """
    home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    if not isinstance(home, str) or (isinstance(value, ModuleType) and home.rpartition(".")[0] == name):
        return False
    return home.startswith("cuda.bindings") or home in found
