"""What a watch needs of the CUDA driver: calls that say their number when they end, and waits that are freed.

The number is a word of pinned host memory, written by a stream memory operation, so looking at it takes no driver call:
the driver may be held by a thread whose queue is full.

Freeing raises all flags that this rank's streams wait for, from a CUDA context that is made when it comes to that. In the
job's own context nothing gets through once a thread is stuck issuing into a full queue, for it holds the driver's lock; nor
once a kernel is loaded behind a wait, because whatever is issued later waits for its code. Another context has locks and
queues of its own (H200, driver 580; docs/log.md, "how a wait is ended").
"""

from typing import Any, final

import torch
from cuda.bindings import driver as cu

from counterpoint.cuda.driver import check
from counterpoint.errors import DeviceError
from counterpoint.ops.watchdog import AbstractProgress

Handle = Any  # cuda-bindings has no types
SUCCESS = cu.CUresult.CUDA_SUCCESS
NON_BLOCKING = int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
THREAD_LOCAL = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


@final
class GpuProgress(AbstractProgress):
    """The calls of one transport or lane; `flags` is the address and the number of the words its streams wait for."""

    def __init__(self, flags: tuple[int, int]) -> None:
        address, self._num_flags = flags
        self._flags = cu.CUdeviceptr(address)
        self._context = check("Finding the CUDA context", cu.cuCtxGetCurrent())
        self._device = check("Finding the GPU", cu.cuCtxGetDevice())
        self._number = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        found = check("Finding the address of host memory", cu.cuMemHostGetDevicePointer(self._number.data_ptr(), 0))
        self._number_on_gpu = cu.CUdeviceptr(int(found))
        self._stream = check("Making a stream", cu.cuStreamCreate(NON_BLOCKING))  # for want of another context
        self._other_context: Handle | None = None
        self._freeing_stream: Handle | None = None

    def enter_thread(self) -> None:
        """See `AbstractProgress.enter_thread`."""
        check("Entering the CUDA context", cu.cuCtxSetCurrent(self._context))
        # otherwise a query here would end a capture that another thread has begun in the global mode, which is torch's
        check("Leaving captures alone", cu.cuThreadExchangeStreamCaptureMode(THREAD_LOCAL))

    def mark(self, number: int, stream: Handle) -> None:
        """See `AbstractProgress.mark`."""
        (result,) = cu.cuStreamWriteValue32(stream, self._number_on_gpu, number, 0)
        if result != SUCCESS:
            check("Marking a call", (result,))

    def last_ended(self) -> int:
        """See `AbstractProgress.last_ended`."""
        return int(self._number.item())

    def free_waits(self) -> None:
        """See `AbstractProgress.free_waits`. Raises `DeviceError` once if it has to be from the job's own context."""
        if self._freeing_stream is None:
            self._freeing_stream = self._stream
            self._enter_other_context()
        (result,) = cu.cuStreamQuery(self._freeing_stream)
        if result == SUCCESS:
            (result,) = cu.cuMemsetD32Async(self._flags, 1, self._num_flags, self._freeing_stream)
        if result != cu.CUresult.CUDA_ERROR_NOT_READY:  # the last round is still to come; the queue is not to fill up
            check("Ending a wait", (result,))

    def _enter_other_context(self) -> None:
        """Have this thread free from a context made for it. It takes about 0.5 GiB, and the GPU must allow a second one."""
        try:
            self._other_context = check("Making another CUDA context", cu.cuCtxCreate(None, 0, self._device))
        except DeviceError as problem:
            raise DeviceError(
                f"{problem} Waits are ended from the job's own context, unless the driver is stuck there."
            ) from None
        self._freeing_stream = cu.CUstream(0)  # the default stream of the thread's context, which it is now

    def close(self) -> None:
        """See `AbstractProgress.close`."""
        check("Waiting for the last wait to end", cu.cuStreamSynchronize(self._stream))  # it writes to flags, freed next
        check("Destroying a stream", cu.cuStreamDestroy(self._stream))
        if self._other_context is not None:
            check("Entering the other CUDA context", cu.cuCtxPushCurrent(self._other_context))
            ended = cu.cuCtxSynchronize()
            check("Leaving the other CUDA context", cu.cuCtxPopCurrent())
            check("Waiting for the last wait to end", ended)
            check("Destroying the other CUDA context", cu.cuCtxDestroy(self._other_context))
