"""A watchdog: detects GPU work that waits for a missing rank, and ends the wait, so that a fault becomes an error and
not a hang.

A stream that waits for a flag has no time-out. So calls are numbered, and the stream on which a call ends writes the
call's number. A thread checks: if calls are in flight and none has ended within the limit, it prints that on standard
error, and every later call of the group raises the same error. Then it releases all waits, until the group is released,
because the host may have been stuck while issuing a call and may issue more waits. Results are invalid from then on. If
releasing waits has no effect within the limit again (`gpu_progress.py` says when), a second thread, which needs no driver,
ends the process, because nothing else could.

If another rank has refused a call that is in flight here, the wait ends at once, with that rank's error.

The timer restarts whenever a call ends, so a long queue is no fault. Calls of one watchdog end in the order of their
issue: a transport orders its calls, and users of a lane order theirs. Calls in graphs that the caller captured are not
watched. `gpu_progress.py` has the driver's part.
"""

import atexit
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, final

from counterpoint.errors import DeviceError, OperatorError, say

Handle = Any  # cuda-bindings has no types
POLL_S = 0.25
EXIT_S = 2.0  # for all threads together, when the process ends; one may be in a request to a store
EXIT_POLL_S = 0.005  # between looks at calls in flight when the process ends
FREEING_S = 0.001  # between two rounds: each releases one wait of every queue, and a queue may hold a thousand
LAST_NUMBER = 2**31 - 1
STATUS = 1  # exit status of a process that is ended


class AbstractProgress(ABC):
    """What a watchdog needs from the GPU."""

    @abstractmethod
    def enter_thread(self) -> None:
        """Prepare the calling thread for calls of `free_waits`."""

    @abstractmethod
    def mark(self, number: int, stream: Handle) -> None:
        """Let the stream write this number when all its work so far is done."""

    @abstractmethod
    def last_ended(self) -> int:
        """Return the number written last; 0 before any. Never waits for the driver, which may be stuck."""

    @abstractmethod
    def free_waits(self) -> None:
        """End this rank's waits that have begun. Raises `DeviceError` if that fails."""

    @abstractmethod
    def close(self) -> None:
        """Free what the driver holds; nothing is in flight any more."""


@final
class StallTimer:
    """Detects a stall: calls are in flight, and none has ended for longer than the limit."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._ended = -1  # the call that had ended last when the timer was started; -1: nothing was in flight
        self._since_s = 0.0

    def is_over(self, last_issued: int, last_ended: int, now_s: float) -> bool:
        """Return whether to give up now."""
        if last_ended == last_issued:
            self._ended = -1
        elif last_ended != self._ended:
            self._ended, self._since_s = last_ended, now_s
        return self._ended >= 0 and now_s - self._since_s > self._limit_s


class HasThread(Protocol):
    """What has a background thread."""

    def stop(self, within_s: float) -> None:
        """Let the thread end, and wait for that at most so long."""


_running: "weakref.WeakSet[HasThread]" = weakref.WeakSet()


def stop_at_exit(owner: HasThread) -> None:
    """Stop the owner's thread when the process ends, unless nothing refers to the owner any more.

    CPython ends a daemon thread that asks for the interpreter's lock while it shuts down by unwinding its stack. If C++ code
    of torch gave up that lock, as `Tensor.item()` does, the process aborts instead, after a job that has done all its work:
    "terminate called without an active exception".
    """
    _running.add(owner)


@atexit.register
def _stop_all() -> None:
    deadline_s = time.monotonic() + EXIT_S
    for owner in list(_running):
        owner.stop(max(0.0, deadline_s - time.monotonic()))


@final
class Watchdog:
    """Watches the calls of one transport or lane."""

    def __init__(
        self,
        calls: AbstractProgress,
        limit_s: float,
        end_process: Callable[[int], object] = os._exit,
        overheard: Callable[[], str] = lambda: "",
    ) -> None:
        self._calls, self._limit_s, self._end_process, self._overheard = calls, limit_s, end_process, overheard
        self._last_issued = 0
        self._problem = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="counterpoint-watch", daemon=True)
        self._thread.start()
        stop_at_exit(self)

    def require_sound(self) -> None:
        """Raise `OperatorError` if an earlier call was given up."""
        if self._problem:
            raise OperatorError(self._problem)

    def sample(self, stream: Handle) -> None:
        """Record a call that ends on `stream`."""
        number = self._last_issued % LAST_NUMBER + 1
        self._calls.mark(number, stream)
        self._last_issued = number

    def stop(self, within_s: float) -> None:
        """Stop watching because the process ends. Calls that are still in flight by then stay watched."""
        deadline_s = time.monotonic() + within_s
        while self._calls.last_ended() != self._last_issued and time.monotonic() < deadline_s:
            time.sleep(EXIT_POLL_S)
        if not self._closed.is_set() and self._calls.last_ended() == self._last_issued:
            self._closed.set()
            self._thread.join(within_s)

    def close(self) -> None:
        """Stop watching, when everything has ended."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            self._calls.close()

    def _run(self) -> None:
        try:
            self._calls.enter_thread()
        except DeviceError as problem:
            say(str(problem))
            return
        why = self._wait_for_stall(self._overheard)
        if why:
            self._give_up(why)

    def _wait_for_stall(self, overheard: Callable[[], str] = lambda: "") -> str:
        """Wait for a stall and return the reason: none has ended for longer than the limit, or another rank refused one
        of them. Return nothing if watching ends before.
        """
        timer = StallTimer(self._limit_s)
        while not self._closed.wait(POLL_S):
            last_ended = self._calls.last_ended()
            if timer.is_over(self._last_issued, last_ended, time.monotonic()):
                return (
                    f"An operator did not end on the GPU within {self._limit_s:g} s: it waits for a rank that "
                    "is gone, or that runs other operators. Its results are meaningless. Look at the other "
                    "ranks' output, and start all ranks again."
                )
            refused = overheard() if last_ended != self._last_issued else ""
            if refused:
                return refused
        return ""

    def _give_up(self, why: str) -> None:
        self._problem = why
        say(why)
        threading.Thread(target=self._end_if_stuck, name="counterpoint-last-resort", daemon=True).start()
        said, pause_s = "", 0.0
        while not self._closed.wait(pause_s):
            try:
                self._calls.free_waits()
            except DeviceError as problem:
                if str(problem) != said:
                    said = str(problem)
                    say(said)
            pause_s = POLL_S if self._calls.last_ended() == self._last_issued else FREEING_S

    def _end_if_stuck(self) -> None:
        if self._wait_for_stall():
            say(f"The stream still waits after another {self._limit_s:g} s, so this process ends.")
            self._end_process(STATUS)
