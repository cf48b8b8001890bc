"""Run a command as a shell would: its streams, its signals, its exit status; and leave nothing of it behind.

The command is the leader of a process group of its own. At a terminal that group is put in the foreground, so that
Ctrl-C, Ctrl-Z and reading reach it as they would without us; everywhere else each signal that we get goes on to it, once.
Processes whose parent ends come to us (a subreaper, Linux): where the command was ended by a signal, those still there
are asked to end, and killed after a limit, because launchers such as torchrun start their workers in sessions that no
other signal reaches. After an end without a signal they are left alone: a command may have meant them to go on. If we are
killed ourselves, the kernel sends the command a SIGTERM. Knows nothing of plans.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from counterpoint.value import Value

PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
)
ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
LEFTOVER_LIMIT_S = 10.0
SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


class Ended(Value, frozen=True, kw_only=True):
    """How the command ended: its status as a shell gives it (128 + signal), and how many leftover processes were ended."""

    exit_status: int
    num_leftover: int = 0


def supervise(command: Sequence[str], environment: Mapping[str, str]) -> Ended:
    """Run `command` to its end. Raises `OSError` if it cannot be started."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wanted = {number for number in PASSED_ON if signal.getsignal(number) != signal.SIG_IGN}  # nohup stays nohup
    with _waiting_for(wanted | {signal.SIGCHLD}) as mask_before, _Terminal() as terminal:
        prepare = _in_child(prctl, terminal, mask_before, os.getpid())
        # one thread runs here, so what the child does before exec cannot meet a lock that another thread held
        process = subprocess.Popen(command, env=environment, process_group=0, preexec_fn=prepare)  # noqa: PLW1509
        status, received = _wait(process.pid, wanted, terminal)
        process.returncode = status  # it was reaped here
        is_interrupted = status < 0 or bool(received & ENDING)
        num_leftover = _end_leftovers() if is_interrupted else 0
    return Ended(exit_status=128 - status if status < 0 else status, num_leftover=num_leftover)


def _in_child(prctl: Callable[..., int], terminal: "_Terminal", mask: Iterable[int], parent: int) -> Callable[[], None]:
    """What runs in the child between fork and exec."""

    def prepare() -> None:
        prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # we were killed before the line above
            os._exit(128 + signal.SIGTERM)
        terminal.give_to(os.getpid())
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return prepare


@contextmanager
def _waiting_for(signals: Iterable[int]) -> Iterator[set[signal.Signals | int]]:
    """Block the signals, so that none is lost between two looks; yields the mask from before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    child_before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, nothing can be waited for
    try:
        yield before
    finally:
        signal.signal(signal.SIGCHLD, child_before)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Terminal:
    """The terminal on standard input, while our process group is the one in its foreground; else nothing."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        with suppress(OSError, ValueError, AttributeError):  # no standard input, or one that is no terminal
            descriptor = sys.stdin.fileno()
            if os.isatty(descriptor) and os.tcgetpgrp(descriptor) == os.getpgrp():
                self._descriptor = descriptor

    def __enter__(self) -> "_Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.give_to(os.getpgrp())

    def give_to(self, group: int) -> None:
        """Put a process group into the foreground."""
        if self._descriptor is None:
            return
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})  # else a background group is stopped for it
        with suppress(OSError):  # the terminal was closed, or the group has ended
            os.tcsetpgrp(self._descriptor, group)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def stop_with(self, child: int) -> None:
        """The child was stopped by Ctrl-Z: stop as well, so that the shell sees it; when continued, continue the child."""
        if self._descriptor is None:
            return
        self.give_to(os.getpgrp())
        os.kill(os.getpid(), signal.SIGSTOP)
        if os.tcgetpgrp(self._descriptor) == os.getpgrp():
            self.give_to(child)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGCONT)


def _wait(child: int, wanted: set[signal.Signals], terminal: _Terminal) -> tuple[int, set[int]]:
    """Pass signals on until the child ends; its exit code, negative for a signal, and the signals that were passed on."""
    received: set[int] = set()
    while True:
        number = signal.sigwaitinfo(wanted | {signal.SIGCHLD}).si_signo
        if number != signal.SIGCHLD:
            received.add(number)
            with suppress(ProcessLookupError):
                os.kill(child, number)
            continue
        for pid, status in _reap():
            if os.WIFSTOPPED(status):
                if pid == child:
                    terminal.stop_with(child)
            elif pid == child:
                return os.waitstatus_to_exitcode(status), received


def _reap() -> Iterator[tuple[int, int]]:
    """Processes whose state changed; those that ended are gone with it. Ours, and those that came to us."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if pid == 0:
                return
            yield pid, status


def _end_leftovers() -> int:
    """End the processes that came to us and are still there; how many there were."""
    asked: set[int] = set()
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline, told = time.monotonic() + LEFTOVER_LIMIT_S, set[int]()
        while (left_s := deadline - time.monotonic()) > 0:
            for _ in _reap():
                pass
            children = _children()
            if not children:
                return len(asked)
            for pid in children - told:  # ending one may bring its children to us
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            told |= children
            asked |= children
            signal.sigtimedwait({signal.SIGCHLD}, left_s)
    return len(asked)


def _children() -> set[int]:
    """Our children at this moment, adopted ones and those that have ended but were not reaped yet as well."""
    own, found = os.getpid(), set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                # the name in parentheses may hold anything; the state and the parent's number follow the last one
                parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
                if int(parent) == own:
                    found.add(int(entry.name))
    return found
