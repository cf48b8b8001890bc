"""A heartbeat between ranks of several hosts, which tells, when their job fails, which of them were lost.

When a host is lost, its ranks are silent, and the errors of the others name a connection but no rank. So a thread of
every rank increments a counter in the process group's store once a second. If ranks end with an exception, the first
surviving rank finds the counters that stand still and prints one line. Rank 0 also checks while the job runs, because
with NCCL ranks may hang instead. Nothing is ended here: the job's own errors and time-outs do that.
"""

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import final

from counterpoint.ranks import Exchange
from counterpoint.supervised.handshake import Roll

ALIVE_TOPIC = "alive"
BEAT_S = 1.0
LOOK_BEATS = 3  # a rank that is silent for this long after another has failed is lost
SILENT_BEATS = 30  # the same while the job runs
THREAD_END_S = 2.0  # it may be in a request to the store
STORE_LIMIT_S = 10.0  # a store on a lost host may never answer
ENDED = -1
GONE_STORE = "the store of the process group does not answer, so the host that holds it is lost, most likely that of"


@final
class Heartbeat:
    """One rank's heartbeat; `end` it before the process ends normally."""

    def __init__(self, exchange: Exchange, roll: Roll, say: Callable[[str], None], beat_s: float = BEAT_S) -> None:
        self._exchange, self._roll, self._say, self._beat_s = exchange, roll, say, beat_s
        self._is_over = threading.Event()
        self._counts: dict[int, int] = {}  # on rank 0: the counters when the last one first stood still
        self._num_still: dict[int, int] = {}
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start counting, and check the others when this process ends with an exception."""
        self._thread = threading.Thread(target=self.count, name="counterpoint heartbeat", daemon=True)
        self._thread.start()
        told_before = sys.excepthook

        def tell(kind: type[BaseException], problem: BaseException, traceback: TracebackType | None) -> None:
            told_before(kind, problem, traceback)
            if issubclass(kind, Exception) and not self._is_over.is_set():
                self.tell_lost()

        sys.excepthook = tell

    def end(self) -> None:
        """Record that this rank ends normally, when the thread has ended: it must not outlive the interpreter."""
        if not self._is_over.is_set():
            self._is_over.set()
            if self._thread is not None:
                self._thread.join(THREAD_END_S)
            with suppress(RuntimeError):  # the store has ended, so no rank reads it any more
                self._exchange.note(ALIVE_TOPIC, ENDED)

    def tell_lost(self) -> None:
        """After a failure, check twice, and let the first surviving rank report which ranks are gone.

        The others stay for as long again: a launcher ends the ranks of its host when one ends, and the first may be later.
        """
        found: list[tuple[str, bool]] = []
        looking = threading.Thread(target=lambda: found.append(self._look_twice()), daemon=True)
        looking.start()
        looking.join(self._beat_s * LOOK_BEATS + STORE_LIMIT_S)
        line, is_first = found[0] if found else self._store_is_gone()
        if line and is_first:
            self._say(line)
        elif line:
            self._is_over.wait(self._beat_s * LOOK_BEATS)

    def count(self) -> None:
        """Run in the thread: count until this rank ends; on rank 0, check the others from time to time."""
        number = 0
        with suppress(RuntimeError):  # the store is gone: either the job's own calls fail as well, or the job has ended
            while not self._is_over.wait(self._beat_s):
                number += 1
                self._exchange.note(ALIVE_TOPIC, number)
                if self._exchange.rank == 0 and number % LOOK_BEATS == 0:
                    self._look_while_running()

    def _look_while_running(self) -> None:
        """On rank 0, from time to time: report once each rank that has been silent for too long."""
        counts = self._exchange.noted_by_rank(ALIVE_TOPIC)
        for rank in range(self._exchange.num_ranks):
            is_still = counts.get(rank, 0) == self._counts.get(rank, 0) and counts.get(rank) != ENDED
            self._num_still[rank] = self._num_still.get(rank, 0) + LOOK_BEATS if is_still else 0
        self._counts = counts
        just_lost = [rank for rank, beats in self._num_still.items() if SILENT_BEATS <= beats < SILENT_BEATS + LOOK_BEATS]
        if just_lost:
            self._say(self._describe(just_lost, self._beat_s * SILENT_BEATS))

    def _look_twice(self) -> tuple[str, bool]:
        """Return what to say of lost ranks, if there are any, and whether this rank is the one to say it."""
        try:
            before = self._exchange.noted_by_rank(ALIVE_TOPIC)
            self._is_over.wait(self._beat_s * LOOK_BEATS)
            after = self._exchange.noted_by_rank(ALIVE_TOPIC)
        except RuntimeError:
            return self._store_is_gone()
        everyone = range(self._exchange.num_ranks)
        lost = [rank for rank in everyone if after.get(rank, 0) == before.get(rank, 0) and after.get(rank) != ENDED]
        left = [rank for rank in everyone if rank not in lost and after.get(rank) != ENDED]
        is_first = not left or self._exchange.rank == left[0]
        return self._describe(lost, self._beat_s * LOOK_BEATS) if lost else "", is_first

    def _describe(self, lost: list[int], silent_s: float) -> str:
        verb = "has" if len(lost) == 1 else "have"
        return (
            f"{self._roll.describe(lost)} {verb} not been heard of for {silent_s:g} s: lost, or ended without a word. "
            "Look at the output there, and start all ranks again."
        )

    def _store_is_gone(self) -> tuple[str, bool]:
        """Return what to say if the store does not answer, and whether this rank says it: one of each `counterpoint run`,
        because ranks can no longer agree on one.
        """
        is_first = self._roll.runs[self._exchange.rank] == self._exchange.rank
        return f"{GONE_STORE} rank 0 ({self._roll.hosts[0]}). Look at the output there, and start all ranks again.", is_first
