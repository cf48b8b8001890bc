"""With which versions of torch the operators and integrations were tested; they use some of its private names."""

import logging
from functools import cache

import torch

OLDEST, NEWEST = (2, 11), (2, 15)  # pyproject.toml has the same bounds
USE_TESTED_TORCH = f"Use torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}."
LOGGER = logging.getLogger("counterpoint")


@cache
def is_newer() -> bool:
    """Return whether torch is newer than the versions tested."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) > NEWEST


@cache
def note_newer() -> None:
    """Log once that torch is newer than the versions tested."""
    if is_newer():
        LOGGER.warning(
            "torch %s is newer than %d.%d, the newest version tested with operators. If they fail, install torch<%d.%d.",
            torch.__version__,
            *NEWEST,
            NEWEST[0],
            NEWEST[1] + 1,
        )
