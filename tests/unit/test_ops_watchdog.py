"""When calls are given up: one that does not end always, slow ones never; and what happens then, on a double of the GPU."""

import io
import subprocess
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import DeviceError, OperatorError

watch_module = pytest.importorskip("counterpoint.ops.watchdog")
StallTimer, Watchdog, POLL_S = watch_module.StallTimer, watch_module.Watchdog, watch_module.POLL_S

LIMIT_S = 10
WAIT_S = 30  # of a test, for a thread
GAPS = st.lists(st.integers(0, 3 * LIMIT_S), min_size=1, max_size=20)


@given(gaps=GAPS, data=st.data(), looks=GAPS)
def test_calls_that_end_within_the_limit_are_never_given_up_however_long_their_queue(
    gaps: list[int], data: st.DataObject, looks: list[int]
) -> None:
    issued = list(accumulate(gaps))
    ended: list[int] = []
    for time in issued:
        ended.append(max([time, *ended[-1:]]) + data.draw(st.integers(0, LIMIT_S)))
    patience = StallTimer(LIMIT_S)
    for now in accumulate(looks):
        assert not patience.is_over(bisect_right(issued, now), bisect_right(ended, now), now)


@given(gaps=GAPS, num_ended=st.integers(0, 19), goes_on=st.booleans())
def test_a_call_that_never_ends_is_given_up_in_time_though_calls_before_it_ended_and_others_follow(
    gaps: list[int], num_ended: int, goes_on: bool
) -> None:
    issued = list(accumulate(gaps))
    num_ended = min(num_ended, len(issued) - 1)
    stuck_at = issued[num_ended]
    issued = issued if goes_on else issued[: num_ended + 1]
    patience, now = StallTimer(LIMIT_S), 0.0
    while not patience.is_over(bisect_right(issued, now), bisect_right(issued[:num_ended], now), now):
        now += POLL_S
        assert now <= stuck_at + LIMIT_S + 2 * POLL_S
    assert now > stuck_at + LIMIT_S


class Gpu(watch_module.AbstractProgress):
    """Calls end when they are marked, or if it is stuck, when they are freed."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.is_stuck, self.fault, self.can_free = False, "", True
        self.marked: list[int] = []
        self.ended = self.num_closed = self.num_freed = 0
        self.statuses: list[int] = []
        self.thread: threading.Thread | None = None

    def enter_thread(self) -> None:
        self.thread = threading.current_thread()

    def mark(self, number: int, stream: Any) -> None:
        self.marked.append(number)
        if not self.is_stuck:
            self.ended = number

    def last_ended(self) -> int:
        return self.ended

    def free_waits(self) -> None:
        assert threading.current_thread() is self.thread
        with self.changed:
            self.num_freed += 1
            if self.can_free:
                self.ended = self.marked[-1]
            self.changed.notify_all()
        if self.fault:
            raise DeviceError(self.fault)

    def close(self) -> None:
        self.num_closed += 1

    def end_process(self, status: int) -> None:
        with self.changed:
            self.statuses.append(status)
            self.changed.notify_all()

    def wait_until(self, holds: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(holds, WAIT_S)


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def watch(gpu: Gpu) -> Iterator[Any]:
    opened = Watchdog(gpu, 0, gpu.end_process)
    yield opened
    opened.close()


def test_a_call_right_after_one_that_ended_is_watched_and_given_up_with_one_line(
    gpu: Gpu, watch: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    watch.sample("stream")
    watch.require_sound()
    gpu.is_stuck = True
    watch.sample("stream")
    gpu.wait_until(lambda: gpu.ended == 2)
    with pytest.raises(
        OperatorError, match="did not end on the GPU within 0 s: it waits for a rank that is gone"
    ) as problem:
        watch.require_sound()
    assert capfd.readouterr().err == f"counterpoint: {problem.value}\n"


def test_calls_that_the_host_was_still_issuing_when_others_were_given_up_are_freed_too_without_another_line(
    gpu: Gpu, capfd: pytest.CaptureFixture[str]
) -> None:
    gpu.is_stuck = True
    # with less, the thread that ends the process may look twice before the one that frees has looked once
    with closing(Watchdog(gpu, 2 * POLL_S, gpu.end_process)) as watch:
        for number in (1, 2, 3):
            watch.sample("stream")
            gpu.wait_until(lambda number=number: gpu.ended == number)
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_a_driver_that_cannot_free_is_one_line_and_the_watch_can_be_closed(
    gpu: Gpu, watch: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    gpu.is_stuck, gpu.fault = True, "Ending a wait failed."
    watch.sample("stream")
    gpu.wait_until(lambda: gpu.ended == 1)
    tried = gpu.num_freed
    gpu.wait_until(lambda: gpu.num_freed > tried)
    watch.close()
    assert gpu.statuses == []
    assert capfd.readouterr().err.splitlines()[1:] == ["counterpoint: Ending a wait failed."]
    with pytest.raises(OperatorError):
        watch.require_sound()


def test_a_process_whose_waits_cannot_be_ended_is_ended_with_a_line(
    gpu: Gpu, watch: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    gpu.is_stuck, gpu.can_free = True, False
    watch.sample("stream")
    gpu.wait_until(lambda: gpu.statuses == [1])
    watch.close()
    _, line = capfd.readouterr().err.splitlines()
    assert line == "counterpoint: The stream still waits after another 0 s, so this process ends."


def test_waits_are_freed_though_nobody_listens_any_more(gpu: Gpu, watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    gpu.is_stuck = True
    watch.sample("stream")
    gpu.wait_until(lambda: gpu.ended == 1)


def test_closing_ends_the_thread_and_gives_back_what_the_driver_holds_once(gpu: Gpu, watch: Any) -> None:
    watch.sample("stream")
    watch.close()
    watch.close()
    assert gpu.num_closed == 1
    assert gpu.thread is None or not gpu.thread.is_alive()


def test_numbers_of_calls_begin_anew_before_they_outgrow_their_word(
    gpu: Gpu, watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "LAST_NUMBER", 3)
    for _ in range(7):
        watch.sample("stream")
    assert gpu.marked == [1, 2, 3, 1, 2, 3, 1]


def test_the_thread_ends_at_exit_unless_a_call_is_in_flight(gpu: Gpu, watch: Any) -> None:
    watch.sample("stream")
    watch.stop(WAIT_S)
    assert not watch._thread.is_alive()
    stuck = Gpu()
    stuck.is_stuck = True
    other = Watchdog(stuck, LIMIT_S, end_process=stuck.end_process)
    other.sample("stream")
    other.stop(0.01)
    assert other._thread.is_alive()
    stuck.ended = 1
    other.close()


MANY_WATCHDOGS = """
import time
import torch
import counterpoint.ops.watchdog as module
module.POLL_S = 0.001

class Progress(module.AbstractProgress):
    number = torch.zeros(1, dtype=torch.int32)
    enter_thread = mark = free_waits = close = lambda *_: None

    def last_ended(self):
        return int(self.number.item())  # torch gives up the interpreter's lock here

watchdogs = [module.Watchdog(Progress(), 60.0) for _ in range(40)]
end_s = time.monotonic() + 0.3
while time.monotonic() < end_s:
    pass
"""


def test_a_process_with_many_watchdogs_ends_without_an_abort() -> None:
    """Without the stop at exit two of five such processes abort."""
    done = subprocess.run([sys.executable, "-c", MANY_WATCHDOGS], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
