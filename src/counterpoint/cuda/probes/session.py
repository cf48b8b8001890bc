"""Gives probes this rank's GPU, the other ranks, a deadline, and times by events on the GPU.

The host runs ahead: a kernel of one CTA holds the stream while work is issued, so that times contain no launch by the host.
Every wait for the GPU has a limit: a collective whose peer is gone never ends by itself.
"""

import time
from collections.abc import Callable
from itertools import pairwise

import torch

from counterpoint.cuda.probes.occupying import Marks, ProbeLaunch, occupy
from counterpoint.cuda.rendezvous import Rendezvous
from counterpoint.errors import DeviceError
from counterpoint.machine import Machine

Issue = Callable[[], object]
ROUNDS = 5
ROUNDS_BESIDE = 3
ISSUE_US = 40.0  # time that the host may take for one call; a larger value only lengthens the probe
MOST_HOLD_US = 5000.0
DELAY_BYTES = 1 << 20
RANKS_LIMIT_S = 60.0


class Session:
    """A calibration on this rank. `machine` is the shipped machine of this GPU, or the nearest one."""

    def __init__(self, machine: Machine, rank: int, num_ranks: int) -> None:
        self.machine, self.gpu = machine, machine.gpu
        self.rank, self.num_ranks = rank, num_ranks
        self.num_sms = torch.cuda.get_device_properties().multi_processor_count
        self.rendezvous = Rendezvous(RANKS_LIMIT_S)
        self._limit_s, self._deadline = RANKS_LIMIT_S, time.monotonic() + RANKS_LIMIT_S
        self._marks = Marks(1)
        self._on_host = torch.zeros(DELAY_BYTES, dtype=torch.uint8, pin_memory=True)
        self._on_gpu = torch.zeros(DELAY_BYTES, dtype=torch.uint8, device="cuda")

    def begin(self, limit_s: float) -> None:
        """Give the next probe `limit_s`, and the ranks a new exchange: a probe that failed left the old one unfinished."""
        self.rendezvous = Rendezvous(limit_s)
        self._limit_s, self._deadline = limit_s, time.monotonic() + limit_s

    def wait(self, *events: torch.cuda.Event) -> None:
        """Wait for events on the GPU, by default for the current stream's work. Raises `DeviceError` after the limit."""
        awaited = events or (self.mark(),)
        is_over = False
        while not is_over:
            is_over = all(event.query() for event in awaited)
            if time.monotonic() > self._deadline:
                raise DeviceError(f"it took longer than its limit of {self._limit_s:g} s")

    @staticmethod
    def mark(stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
        """Record an event after the work that the stream holds, by default the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream())
        return event

    def hold(self, duration_us: float) -> None:
        """Keep the current stream busy, so that the host gets ahead."""
        occupy(ProbeLaunch(num_ctas=1, threads=32), self._marks, min(duration_us, MOST_HOLD_US))

    def delay_without_sm(self) -> None:
        """Keep the current stream busy for about 20 us with a copy from the host, which uses no SM."""
        self._on_gpu.copy_(self._on_host, non_blocking=True)

    def keep_busy(self, issue: Issue, seconds: float) -> None:
        """Call `issue` repeatedly for `seconds`, a few calls ahead of the GPU."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(4):
                issue()
            self.wait()

    def times_us(self, issue: Issue, *, rounds: int = ROUNDS, calls: int = 1) -> list[float]:
        """Return the time of one call in each round of `calls`, all back to back after one that is not timed."""
        issue()
        self.wait()
        self.hold(ISSUE_US * (rounds + 1) * calls)
        issue()
        marks = [self.mark()]
        for _ in range(rounds):
            for _ in range(calls):
                issue()
            marks.append(self.mark())
        self.wait(marks[-1])
        return [1000 * start.elapsed_time(end) / calls for start, end in pairwise(marks)]

    def times_of_ranks_us(self, issue: Issue, *, rounds: int = ROUNDS, calls: int = 1) -> list[float]:
        """Run `times_us` on all ranks together, and return the slowest rank's time of each round."""
        self.rendezvous.meet()
        return self.rendezvous.slowest_of(self.times_us(issue, rounds=rounds, calls=calls))

    def times_beside_us(
        self, issue: Issue, other: Issue, *, num_others: int, stream: torch.cuda.Stream | None = None
    ) -> list[float]:
        """Return the time of a call while `num_others` calls of `other` run on the current stream; they must outlast two.

        The call runs on `stream`, else on a new one of equal priority. A first call of each is not timed: with several
        ranks, the one that is a collective synchronizes them. Raises `DeviceError` if the other calls end first.
        """
        side, times = stream or torch.cuda.Stream(), []
        for _ in range(ROUNDS_BESIDE):
            self.wait()
            self.hold(ISSUE_US * (num_others + 4))
            other()
            side.wait_event(self.mark())  # the others are under way
            for _ in range(num_others):
                other()
            last = self.mark()
            with torch.cuda.stream(side):
                issue()
                start = self.mark()
                issue()
                end = self.mark()
            self.wait(last, end)
            if end.elapsed_time(last) < 0:
                raise DeviceError(f"what should run beside it ended {-1000 * end.elapsed_time(last):.0f} us too early")
            times.append(1000 * start.elapsed_time(end))
        return times
