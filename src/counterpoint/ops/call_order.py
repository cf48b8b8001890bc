"""Orders a group's calls on one GPU: each follows the previous one, whatever streams they are issued on.

Eager calls and calls in a user's capture have separate end events: an eager stream cannot wait for an event that was
recorded in a capture.

A stream of its own tells the watchdog that a call has ended, because the write takes 2 to 7 us, which would delay what
follows the call. No other stream has its priority, so that none shares its hardware queue and waits for the call there.
"""

from collections.abc import Callable
from typing import final

import torch
from cuda.bindings import driver as cu

from counterpoint.cuda.driver import SUCCESS, Handle, check
from counterpoint.ops.watchdog import Watchdog

WATCH_PRIORITY = -2  # as torch counts; lanes and kernels for experts have others
NO_TIMING = int(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)


@final
class CallOrder:
    """Begins and ends the calls of one group; the watchdog watches those that are not captured."""

    def __init__(self, watch: Watchdog, watch_stream: torch.cuda.Stream) -> None:
        self._watch = watch
        self._watch_stream = cu.CUstream(watch_stream.cuda_stream)
        self.start_event, *ends = (check("Making an event", cu.cuEventCreate(NO_TIMING)) for _ in range(3))
        self._ends = dict(zip(("eager", "captured"), ends, strict=True))
        self._end_event: Handle = self._ends["eager"]  # end event of the call being issued
        self.is_in_capture = False  # whether the call being issued is captured by its caller
        self._last: dict[str, tuple[int, int]] = {}  # stream and capture of the last call of each kind
        self._handles: dict[int, Handle] = {}  # of streams, by torch's number
        self.has_captured = False  # whether graphs of users hold calls

    def follow(self, stream: int) -> Handle:
        """Order this call after the last one, which may have been issued on another stream; return the stream's handle."""
        self._watch.require_sound()
        current = self._handles.get(stream)
        if current is None:
            current = self._handles[stream] = cu.CUstream(stream)
        capture = _capture_id(current)
        kind = "captured" if capture else "eager"
        last = self._last.get(kind)
        if last != (stream, capture):
            if last is not None and last[0] != stream and last[1] == capture:
                check("Ordering calls", cu.cuStreamWaitEvent(current, self._ends[kind], 0))
            self._last[kind] = stream, capture
        self.is_in_capture = bool(capture)
        self.has_captured |= self.is_in_capture
        self._end_event = self._ends[kind]
        return current

    def finish(self, current: Handle) -> None:
        """Mark the end of a call."""
        (result,) = cu.cuEventRecord(self._end_event, current)
        if result != SUCCESS:
            check("Ending a call", (result,))
        if not self.is_in_capture:
            (result,) = cu.cuStreamWaitEvent(self._watch_stream, self._end_event, 0)
            if result != SUCCESS:
                check("Watching a call", (result,))
            self._watch.sample(self._watch_stream)

    def watch_wait(self, issue: Callable[[Handle], None]) -> None:
        """Let the watchdog watch a wait that is issued before the end of its call: `issue` repeats it on the watchdog's
        stream. Otherwise no watchdog would watch a host that blocks in the middle of a call, as it does when the driver
        loads a kernel.
        """
        issue(self._watch_stream)
        self._watch.sample(self._watch_stream)

    def close(self) -> None:
        """Free what the driver holds."""
        for event in (self.start_event, *self._ends.values()):
            check("Destroying an event", cu.cuEventDestroy(event))


def _capture_id(stream: Handle) -> int:
    """Return the number of the graph capture that the stream is in; 0 outside of any."""
    if not torch.cuda.is_current_stream_capturing():
        return 0
    return int(check("Asking for the capture", cu.cuStreamGetCaptureInfo(stream))[1])
