"""Notices GPU work that waits for a rank which does not come, and ends the wait, so that a fault is an error and not a
hang.

A stream that waits for a flag waits for ever. A thread samples calls: it looks whether one call in flight ends within
the limit. If not, it says so on standard error, raises this rank's own flags until the GPU is through (results are
then meaningless), and every later call of the group raises the same error. Calls inside replayed graphs are not
sampled.
"""

import sys
import threading
import time
from typing import Any, final

from cuda.bindings import driver as cu

from counterpoint.cuda.driver import check
from counterpoint.errors import DeviceError, OperatorError

Handle = Any  # cuda-bindings has no types
NO_TIMING = int(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)
NON_BLOCKING = 1
POLL_S = 0.25
FREEING_S = 10.0


@final
class Watch:
    """Watches the calls of one transport; `flags` is the address and the number of the words its streams wait for."""

    def __init__(self, flags: tuple[int, int], limit_s: float) -> None:
        self._flags, self._limit_s = flags, limit_s
        self._context = check("Finding the CUDA context", cu.cuCtxGetCurrent())
        self._event = check("Making an event", cu.cuEventCreate(NO_TIMING))
        self._stream = check("Making a stream", cu.cuStreamCreate(NON_BLOCKING))
        self._sampled_at: float | None = None
        self._problem = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="counterpoint-watch", daemon=True)
        self._thread.start()

    def require_sound(self) -> None:
        """Raise `OperatorError` if an earlier call was given up."""
        if self._problem:
            raise OperatorError(self._problem)

    def sample(self, stream: Handle) -> None:
        """A call was issued that ends on `stream`; it is looked at if none other is."""
        if self._sampled_at is None:
            check("Marking a call", cu.cuEventRecord(self._event, stream))
            self._sampled_at = time.monotonic()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        cu.cuCtxSetCurrent(self._context)
        while not self._closed.wait(POLL_S):
            if self._sampled_at is None:
                continue
            if self._is_done():
                self._sampled_at = None
            elif time.monotonic() - self._sampled_at > self._limit_s:
                self._give_up()
                return

    def _is_done(self) -> bool:
        return bool(cu.cuEventQuery(self._event)[0] == cu.CUresult.CUDA_SUCCESS)

    def _give_up(self) -> None:
        self._problem = (
            f"An operator did not end on the GPU within {self._limit_s:g} s: it waits for a rank that is gone, or that runs "
            "other operators. Its results are meaningless. Look at the other ranks' output, and start all of them again."
        )
        print(f"counterpoint: {self._problem}", file=sys.stderr, flush=True)
        deadline = time.monotonic() + FREEING_S
        address, count = self._flags
        try:
            while not self._is_done() and time.monotonic() < deadline:
                check("Ending a wait", cu.cuMemsetD32Async(cu.CUdeviceptr(address), 1, count, self._stream))
                time.sleep(POLL_S / 10)
        except DeviceError as problem:
            print(f"counterpoint: {problem}", file=sys.stderr, flush=True)
