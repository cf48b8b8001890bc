"""The modules of a process and their parameters, without the methods that a job's classes may override or forbid."""

import gc
from collections.abc import Iterator, Sequence
from typing import TypeVar

from torch import nn

T = TypeVar("T")


def alive(kind: type[T]) -> list[T]:
    """Return every live object of this type. The check uses `type`, not `isinstance`, which would run the code of lazy
    proxies.
    """
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def modules_of_process() -> list[nn.Module]:
    """Return every live module, without those whose `__init__` has not run yet."""
    return [each for each in alive(nn.Module) if "_modules" in vars(each)]


def roots_of(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return modules that no other module contains."""
    inner = {id(child) for module in modules for child in module._modules.values()}
    return [module for module in modules if id(module) not in inner]


def named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the module and all within it with their names, each once, in the order of `nn.Module.named_modules`."""
    seen: set[int] = set()
    waiting = [("", module)]
    while waiting:
        name, found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield name, found
        prefix = f"{name}." if name else ""
        inner = [(prefix + key, child) for key, child in found._modules.items() if child is not None]
        waiting.extend(reversed(inner))


def modules_within(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module and all within it, each once."""
    return (each for _, each in named_modules(module))


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that belong to the module itself."""
    return [each for each in module._parameters.values() if each is not None]
