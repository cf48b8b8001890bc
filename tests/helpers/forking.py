"""What fork servers have in common: they import once what their forks need, and end with the process that started them."""

import ctypes
import gc
import signal
from collections.abc import Iterable
from importlib import import_module

PR_SET_PDEATHSIG = 1  # of Linux' prctl


def end_with_parent() -> None:
    """Have the kernel end this process when its parent ends, however that comes about."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def import_for_forks(names: Iterable[str]) -> None:
    """Import modules; forks do not look for garbage in them."""
    gc.disable()  # imports make much and drop little
    for name in names:
        import_module(name)
    gc.enable()
    gc.freeze()
