"""Which operations do the same work. Steps repeat, so what follows from an operation's work is computed once.

Described steps give each operation a name of its own. A name counts only by what costs read of it.
"""

from functools import lru_cache

from counterpoint.sim.loads import under_way
from counterpoint.sim.tiles import TILE_IN_NAME
from counterpoint.step import Kernel, Operation, work_key


def alike(operation: Operation) -> tuple[object, ...]:
    """Return a key that is equal for operations of the same work."""
    said = _said_by(operation.name) if isinstance(operation, Kernel) else ()
    return (*said, *work_key(operation))


@lru_cache(maxsize=4096)
def _said_by(kernel_name: str) -> tuple[object, ...]:
    """Return what `tiles.py` and `loads.py` read of a kernel's name: its tile, and the bytes on the way."""
    tile = TILE_IN_NAME.match(kernel_name)
    return tile and tile.groups(), under_way(kernel_name)
