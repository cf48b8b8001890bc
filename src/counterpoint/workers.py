"""Worker processes that share work among the cores. Ctrl-C ends them without a word, and one that is killed is one line.

By default a worker answers Ctrl-C with a traceback, goes on with the work that waits for it, and stays when its parent is
killed.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from counterpoint.errors import CounterpointError


def num_cores() -> int:
    """Return how many cores this process may use: a container, Slurm or taskset may give it fewer than the machine has."""
    return len(os.sched_getaffinity(0))


@contextmanager
def worker_processes(
    number: int, error: type[CounterpointError], remedy: str, begin: Callable[..., object] | None = None, *words: Any
) -> Iterator[ProcessPoolExecutor]:
    """Give a pool of `number` processes, each of which calls `begin(*words)` first; work that has not begun is canceled at
    the end.

    Raises `error`, one line that ends with `remedy` ("name fewer files at once"), if a process is killed.
    """
    pool = ProcessPoolExecutor(number, initializer=_begin, initargs=(begin, words))
    try:
        yield pool
    except BrokenProcessPool as problem:
        what = f"One of {number} worker processes" if number > 1 else "The worker process"
        raise error(f"{what} was killed, as happens when memory runs out. Free memory, or {remedy}.") from problem
    finally:
        pool.shutdown(cancel_futures=True)  # without the wait, Python's exit may print a traceback


def _begin(begin: Callable[..., object] | None, words: tuple[Any, ...]) -> None:
    """Prepare a worker."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a shell ignores it for jobs in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    if begin is not None:
        begin(*words)


def _leave_with_parent() -> None:
    """End this process when its parent has ended, whatever ended it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
