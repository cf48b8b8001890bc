"""Runs a command as a shell would, with its streams, signals and exit status, and leaves nothing of it behind.

With a terminal, the command stays in this process's group, as it would without Counterpoint. The terminal's signals and
its rules for reading and writing then apply to the command, also in a pipeline and in the background. When the command is
stopped, this process stops too, so that the shell sees it. Without a terminal, the command leads its own group, and every
signal sent to this process reaches it once.

This process adopts processes whose parent ends (a Linux subreaper). If a signal ended the command, this process asks the
processes that are still there to end, and kills them after a time limit: launchers such as torchrun start their workers in
sessions that no other signal reaches. If the command ended without a signal, they are left alone: the command may have
meant them to go on. If this process is killed, the kernel sends the command a SIGTERM. This module knows nothing of plans.
"""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from counterpoint.supervised.signals import ENDING, HeldSignals
from counterpoint.value import Value

LEFTOVER_LIMIT_S = 10.0
SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


class Ended(Value, frozen=True, kw_only=True):
    """How the command ended: its status as a shell gives it (128 + signal), and how many leftover processes were ended."""

    exit_status: int
    num_leftover: int = 0


def supervise(command: Sequence[str], environment: Mapping[str, str], signals: HeldSignals) -> Ended:
    """Run `command` to its end; `signals` are held from here on. Raises `OSError` if it cannot be started."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signals.hold()
    has_terminal = _has_terminal()
    prepare = _in_child(prctl, signals.mask_before, os.getpid())
    group = None if has_terminal else 0
    # only one thread runs here, so the child cannot meet a lock that another thread held
    options: dict[str, Any] = {"env": environment, "process_group": group, "close_fds": False}
    process = subprocess.Popen(command, preexec_fn=prepare, **options)  # noqa: PLW1509
    status, received = _wait(process.pid, signals, has_terminal)
    process.returncode = status  # it was already reaped here
    is_interrupted = status < 0 or bool(received & ENDING - signals.ignored)
    num_leftover = _end_leftovers(signals) if is_interrupted else 0
    return Ended(exit_status=128 - status if status < 0 else status, num_leftover=num_leftover)


def _in_child(prctl: Callable[..., int], mask: Iterable[int], parent: int) -> Callable[[], None]:
    """Return the function that runs in the child between fork and exec."""

    def prepare() -> None:
        prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # the parent was killed before the line above
            os._exit(128 + signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return prepare


def _has_terminal() -> bool:
    """Return whether this session has a terminal, on whatever stream or on none."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _wait(child: int, signals: HeldSignals, has_terminal: bool) -> tuple[int, set[int]]:
    """Pass signals on until the child ends; return its exit code, negative for a signal, and the signals received."""
    received: set[int] = set()
    while True:
        number, is_for_group = signals.wait()
        if number == signal.SIGCHLD:
            for pid, status in _reap():
                if pid != child:
                    continue
                if not os.WIFSTOPPED(status):
                    return os.waitstatus_to_exitcode(status), received
                if has_terminal:
                    signals.stop_like(os.WSTOPSIG(status))
            continue
        received.add(number)
        if has_terminal and (is_for_group or (number == signal.SIGCONT and _state_and_parent(child)[0] != "T")):
            continue  # the child, in the same group, has received it as well
        _send(number, child)


def _send(number: int, pid: int) -> None:
    """Send a signal to a process, unless it has ended, or runs as another user (sudo)."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _state_and_parent(pid: int) -> tuple[str, int]:
    """Return the letter of a process's state, and its parent; "" and 0 for a process that has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return "", 0
    state, parent, *_ = text.rpartition(")")[2].split()  # the name in parentheses may hold anything
    return state, int(parent)


def _reap() -> Iterator[tuple[int, int]]:
    """Yield processes whose state changed, children and adopted ones; those that ended are reaped."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if pid == 0:
                return
            yield pid, status


def _end_leftovers(signals: HeldSignals) -> int:
    """End the adopted processes that are still there; return how many there were. Ctrl-C shortens the wait."""
    asked: set[int] = set()
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline, told = time.monotonic() + LEFTOVER_LIMIT_S, set[int]()
        while (left_s := deadline - time.monotonic()) > 0:
            for _ in _reap():
                pass
            children = _children()
            if not children:
                return len(asked)
            for pid in children - told:  # ending one may make this process adopt its children
                _send(number, pid)
            told |= children
            asked |= children
            if signals.wait_for({signal.SIGCHLD, signal.SIGINT}, left_s) == signal.SIGINT:
                break
    return len(asked)


def _children() -> set[int]:
    """Return the present children, including adopted ones and those that ended but were not reaped yet."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return {pid for pid in pids if _state_and_parent(pid)[1] == os.getpid()}
