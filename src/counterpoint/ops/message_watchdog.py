"""Ends waits for messages that will not come because another rank refused the call: gloo itself waits until its
time-out.

A thread checks while this rank waits. A receive that times out at once makes gloo close the connections of the whole
group, so that other waits in it end with an error; the waiting code then asks the agreement why.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist

from counterpoint.ops.watchdog import stop_at_exit

POLL_S = 0.1
NO_TAG = 2**31 - 1  # no message has this tag: tags are positions in a schedule


@final
class MessageWatchdog:
    """Watches the waits of one group on CPUs; `overheard` returns why the present one will not end, or nothing."""

    def __init__(self, group: dist.ProcessGroup, overheard: Callable[[], str]) -> None:
        self._group, self._overheard = group, overheard
        self._is_waiting = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Watch a block in which this rank waits for others."""
        if self._thread is None and self._group.size() > 1:
            self._thread = threading.Thread(target=self._run, name="counterpoint-message-watchdog", daemon=True)
            self._thread.start()
            stop_at_exit(self)
        self._is_waiting.set()
        try:
            yield
        finally:
            self._is_waiting.clear()

    def stop(self, within_s: float | None = None) -> None:
        """Stop watching, and wait for the thread's end, `within_s` at most."""
        self._closed.set()
        self._is_waiting.set()
        if self._thread is not None:
            self._thread.join(within_s)

    def _run(self) -> None:
        while self._is_waiting.wait() and not self._closed.wait(POLL_S):
            if self._is_waiting.is_set() and self._overheard():
                self._end_waits()
                return

    def _end_waits(self) -> None:
        peer = dist.get_global_rank(self._group, (self._group.rank() + 1) % self._group.size())
        with suppress(RuntimeError):
            received = dist.irecv(torch.empty(1, dtype=torch.uint8, device="cpu"), peer, self._group, NO_TAG)
            received.wait(timedelta(milliseconds=1))
