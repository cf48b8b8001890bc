"""Signals of the supervising process: held from the command's start until Counterpoint's work ends, so that none is
lost.

A signal that this process gets is passed on to the command, unless the command has it already: if both are in one
process group, a terminal sends Ctrl-C, Ctrl-Z and its hang-up to both. Once the command has ended, further signals have
no effect: results are saved and reported, and the exit status is the command's, however often a scheduler repeats its
signal.
"""

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import final

SI_KERNEL = 0x80  # asm-generic/siginfo.h: sent by the kernel, not by a process
ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
STOPPING = frozenset({signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU})
OF_BACKGROUND = frozenset({signal.SIGINT, signal.SIGQUIT})  # ignored in background jobs of shells
OF_TERMINAL = STOPPING | {signal.SIGINT, signal.SIGQUIT, signal.SIGHUP}
PASSED_ON = frozenset(
    {
        *ENDING,
        *STOPPING,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGCONT,
        signal.SIGALRM,
        signal.SIGVTALRM,
        signal.SIGPROF,
        signal.SIGXCPU,
        signal.SIGXFSZ,
        signal.SIGIO,
        signal.SIGPWR,
        signal.SIGABRT,
        *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
    }
)


@final
class HeldSignals:
    """The signals to pass on to a command, blocked from `hold` to the end of the `with` block.

    The process ends with the block, so the signals stay without effect after it.
    """

    def __init__(self) -> None:
        # ignored signals stay ignored: the command of a `nohup` inherits that. Shells start their background jobs with two
        # of them ignored, and the command may handle these nevertheless
        self.ignored = frozenset(number for number in PASSED_ON if signal.getsignal(number) == signal.SIG_IGN)
        self.wanted = PASSED_ON - (self.ignored - OF_BACKGROUND)
        self.mask_before: frozenset[int] = frozenset()
        self._is_held = False
        self._child_before: object = None

    def hold(self) -> None:
        """Block the signals, if they are not blocked already."""
        if self._is_held:
            return
        self.mask_before = frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, self.wanted | {signal.SIGCHLD}))
        self._child_before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an ignored signal cannot be waited for
        self._is_held = True

    def wait(self) -> tuple[int, bool]:
        """Return the next signal, and whether a terminal sent it to its whole foreground group."""
        found = signal.sigwaitinfo(self.wanted | {signal.SIGCHLD})
        number = found.si_signo
        is_of_terminal = found.si_code == SI_KERNEL and number in OF_TERMINAL
        # if the terminal is gone, only the session's leader gets the signal
        return number, is_of_terminal and not (number == signal.SIGHUP and os.getsid(0) == os.getpid())

    def wait_for(self, numbers: Iterable[int], limit_s: float) -> int | None:
        """Return the next of these signals within a limit; the others stay pending."""
        found = signal.sigtimedwait(numbers, limit_s)
        return None if found is None else found.si_signo

    def stop_like(self, number: int) -> None:
        """Stop this process with the command's stop signal, so that the shell sees it; returns when it is continued."""
        if number not in STOPPING & self.wanted:
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        signal.pthread_sigmask(signal.SIG_BLOCK, {number})

    def __enter__(self) -> "HeldSignals":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._is_held:
            return
        for number in self.wanted:  # pending ones, too
            with suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, self._child_before)  # type: ignore[arg-type]
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask_before)
        self._is_held = False
