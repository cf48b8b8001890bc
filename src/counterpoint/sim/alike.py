"""Which operations do the same work. Steps repeat, so what follows from an operation's work is computed once.

Described steps give each operation a name of its own. A name counts only by what costs read of it: `tiles.py` reads the
tile of cuBLAS's matmuls, and `loads.py` the bytes that a thread has on the way. A function that reads more of a name has to
be called here, too.
"""

from collections.abc import Hashable, Iterable
from functools import lru_cache

from counterpoint.sim.loads import under_way
from counterpoint.sim.tiles import TILE_IN_NAME
from counterpoint.step import Collective, Copy, Kernel, Operation

NOT_OF_WORK = ("name", "stream", "priority", "waits_for", "issued_us", "issued_after")
OF_WORK = {
    kind: tuple(name for name in kind.__struct_fields__ if name not in NOT_OF_WORK) for kind in (Kernel, Collective, Copy)
}


@lru_cache(maxsize=16384)
def alike(operation: Operation) -> tuple[object, ...]:
    """Return a key that is equal for operations of the same work, wherever and whenever they are launched."""
    said = _said_by(operation.name) if isinstance(operation, Kernel) else ()
    return (*said, *[getattr(operation, name) for name in OF_WORK[type(operation)]])


def first_alike(keys: Iterable[Hashable]) -> list[int]:
    """Return for each key the number of the first one that is equal to it.

    What follows from a key is then found for the numbers in the result, each once.
    """
    found: dict[Hashable, int] = {}
    return [found.setdefault(key, number) for number, key in enumerate(keys)]


@lru_cache(maxsize=4096)
def _said_by(kernel_name: str) -> tuple[object, ...]:
    """Return what `tiles.py` and `loads.py` read of a kernel's name: its tile, and the bytes on the way."""
    tile = TILE_IN_NAME.match(kernel_name)
    return tile and tile.groups(), under_way(kernel_name)
