"""The CUDA part of the watchdog: counts calls that have ended, and releases stuck waits.

Each call writes its number to a word of pinned host memory by a stream memory operation when it ends. Reading it takes
no driver call, because a thread whose queue is full may hold the driver's lock.

Releasing waits sets all flags that this rank's streams wait for, from a CUDA context that is created for it. The job's
own context is unusable once a thread is stuck issuing into a full queue, because that thread holds the driver's lock. It
is also unusable once a kernel is loaded behind a wait, because later work waits for the kernel's code. Another context
has its own locks and queues (H200, driver 580; docs/log.md, "how a wait is ended").
"""

from collections.abc import Callable
from typing import final

import torch
from cuda.bindings import driver as cu

from counterpoint.cuda.driver import SUCCESS, Handle, check
from counterpoint.errors import DeviceError
from counterpoint.ops.watchdog import AbstractProgress

NON_BLOCKING = int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
THREAD_LOCAL = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


@final
class GpuProgress(AbstractProgress):
    """The calls of one transport or lane; `flags` are the address and number of the words that its streams wait for, and
    `freeing` returns a value that ends these waits.
    """

    def __init__(self, flags: tuple[int, int], freeing: Callable[[], int] = lambda: 1) -> None:
        (address, self._num_flags), self._freeing = flags, freeing
        self._flags = cu.CUdeviceptr(address)
        self._context = check("Finding the CUDA context", cu.cuCtxGetCurrent())
        self._device = check("Finding the GPU", cu.cuCtxGetDevice())
        self._number = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        self._number_on_host = self._number.numpy()  # read without giving up the interpreter's lock, as `item()` does
        found = check("Finding the address of host memory", cu.cuMemHostGetDevicePointer(self._number.data_ptr(), 0))
        self._number_on_gpu = cu.CUdeviceptr(int(found))
        self._stream = check("Making a stream", cu.cuStreamCreate(NON_BLOCKING))  # because another context is not available
        self._other_context: Handle | None = None
        self._freeing_stream: Handle | None = None

    def enter_thread(self) -> None:
        """See `AbstractProgress.enter_thread`."""
        check("Entering the CUDA context", cu.cuCtxSetCurrent(self._context))
        # otherwise a query here would end a capture that another thread began in torch's global mode
        check("Leaving captures alone", cu.cuThreadExchangeStreamCaptureMode(THREAD_LOCAL))

    def mark(self, number: int, stream: Handle) -> None:
        """See `AbstractProgress.mark`."""
        (result,) = cu.cuStreamWriteValue32(stream, self._number_on_gpu, number, 0)
        if result != SUCCESS:
            check("Marking a call", (result,))

    def last_ended(self) -> int:
        """See `AbstractProgress.last_ended`."""
        return int(self._number_on_host[0])

    def free_waits(self) -> None:
        """See `AbstractProgress.free_waits`. Raises `DeviceError` once if the job's own context has to be used."""
        if self._freeing_stream is None:
            self._freeing_stream = self._stream
            self._enter_other_context()
        (result,) = cu.cuStreamQuery(self._freeing_stream)
        if result == SUCCESS:
            (result,) = cu.cuMemsetD32Async(self._flags, self._freeing(), self._num_flags, self._freeing_stream)
        if result != cu.CUresult.CUDA_ERROR_NOT_READY:  # the last round is still pending; the queue must not fill up
            check("Ending a wait", (result,))

    def _enter_other_context(self) -> None:
        """Let this thread use a context created for it. It takes about 0.5 GiB, and the GPU must allow a second one."""
        try:
            self._other_context = check("Making another CUDA context", cu.cuCtxCreate(None, 0, self._device))
        except DeviceError as problem:
            raise DeviceError(
                f"{problem} Waits are ended from the job's own context instead, which works unless the driver "
                "is stuck there."
            ) from None
        self._freeing_stream = cu.CUstream(0)  # the default stream of the thread's context, which is the new one now

    def close(self) -> None:
        """See `AbstractProgress.close`."""
        # it writes to flags, which are freed next
        check("Waiting for the last wait to end", cu.cuStreamSynchronize(self._stream))
        check("Destroying a stream", cu.cuStreamDestroy(self._stream))
        if self._other_context is not None:
            check("Entering the other CUDA context", cu.cuCtxPushCurrent(self._other_context))
            ended = cu.cuCtxSynchronize()
            check("Leaving the other CUDA context", cu.cuCtxPopCurrent())
            check("Waiting for the last wait to end", ended)
            check("Destroying the other CUDA context", cu.cuCtxDestroy(self._other_context))
