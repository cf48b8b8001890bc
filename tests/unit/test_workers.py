"""Worker processes: how work ends that does not end by itself."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from counterpoint.errors import DeviceError
from counterpoint.workers import worker_processes


def send_myself(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_worker_that_is_killed_or_interrupted_prints_nothing_and_is_one_error(
    number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background may have it ignored
    try:
        with (
            pytest.raises(DeviceError, match=r"^The worker process was killed, .* Free memory, or stop\.$"),
            worker_processes(1, DeviceError, "stop") as pool,
        ):
            pool.submit(send_myself, number).result()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert capfd.readouterr() == ("", "")


def test_each_worker_begins_with_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BEGUN", raising=False)
    with worker_processes(1, DeviceError, "stop", os.putenv, "BEGUN", "yes") as pool:
        assert pool.submit(os.system, 'test "$BEGUN" = yes').result() == 0


def test_no_thread_of_a_pool_is_left_when_its_work_is_done_or_failed() -> None:
    before = threading.active_count()
    with worker_processes(1, DeviceError, "stop") as pool:
        assert pool.submit(abs, -1).result() == 1
        assert threading.active_count() > before
    assert threading.active_count() == before
    with pytest.raises(TypeError), worker_processes(2, DeviceError, "stop") as pool:
        list(pool.map(abs, [None, *range(100)]))
    assert threading.active_count() == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_workers_end_when_their_parent_is_killed(number: int) -> None:
    code = (
        "import os, signal, time\n"
        "from counterpoint.errors import DeviceError\n"
        "from counterpoint.workers import worker_processes\n"
        f"if {number} != signal.SIGKILL: signal.signal({number}, signal.SIG_DFL)\n"  # nohup ignores SIGHUP
        "with worker_processes(3, DeviceError, 'stop') as pool:\n"
        "    waits = [pool.submit(time.sleep, 60) for _ in range(3)]\n"
        "    print(*pool._processes, flush=True)\n"
        "    waits[0].result()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 3
    parent.send_signal(number)
    parent.communicate(timeout=60)
    limit = time.monotonic() + 60
    while any(Path(f"/proc/{pid}/stat").exists() and not is_zombie(pid) for pid in workers):
        assert time.monotonic() < limit
        time.sleep(0.05)


def is_zombie(pid: int) -> bool:
    """Whether a process has ended, and nobody has asked for its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
