"""What a watch needs of the CUDA driver: calls that say their number when they end, and waits that are freed.

The number is a word of pinned host memory, written by a stream memory operation, so looking at it takes no driver call:
the driver may be held by a thread whose queue is full. Freeing raises all flags that this rank's streams wait for.
"""

from typing import Any, final

import torch
from cuda.bindings import driver as cu

from counterpoint.cuda.driver import check
from counterpoint.ops.watch import AbstractCalls

Handle = Any  # cuda-bindings has no types
SUCCESS = cu.CUresult.CUDA_SUCCESS
NON_BLOCKING = int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
THREAD_LOCAL = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
# In one hardware queue with a stream that waits, what ends the wait would lie behind it. CUDA has 8 such queues by default
# and gives them to streams in turn (assumed), so one of as many streams has a queue that nothing blocks, if there is one.
NUM_FREEING_STREAMS = 8


@final
class NumberedCalls(AbstractCalls):
    """The calls of one transport or lane; `flags` is the address and the number of the words its streams wait for."""

    def __init__(self, flags: tuple[int, int]) -> None:
        address, self._num_flags = flags
        self._flags = cu.CUdeviceptr(address)
        self._context = check("Finding the CUDA context", cu.cuCtxGetCurrent())
        self._number = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        found = check("Finding the address of host memory", cu.cuMemHostGetDevicePointer(self._number.data_ptr(), 0))
        self._number_on_gpu = cu.CUdeviceptr(int(found))
        _, greatest = check("Asking for priorities", cu.cuCtxGetStreamPriorityRange())
        # a priority that nobody else is likely to take (assumed: streams of other priorities have other queues)
        priority = min(0, int(greatest) + 1)
        self._streams = [
            check("Making a stream", cu.cuStreamCreateWithPriority(NON_BLOCKING, priority))
            for _ in range(NUM_FREEING_STREAMS)
        ]

    def enter_thread(self) -> None:
        """See `AbstractCalls.enter_thread`."""
        check("Entering the CUDA context", cu.cuCtxSetCurrent(self._context))
        # otherwise a query here would end a capture that another thread has begun in the global mode, which is torch's
        check("Leaving captures alone", cu.cuThreadExchangeStreamCaptureMode(THREAD_LOCAL))

    def mark(self, number: int, stream: Handle) -> None:
        """See `AbstractCalls.mark`."""
        (result,) = cu.cuStreamWriteValue32(stream, self._number_on_gpu, number, 0)
        if result != SUCCESS:
            check("Marking a call", (result,))

    def last_ended(self) -> int:
        """See `AbstractCalls.last_ended`."""
        return int(self._number.item())

    def free_waits(self) -> None:
        """See `AbstractCalls.free_waits`."""
        results = []
        for stream in self._streams:
            (result,) = cu.cuStreamQuery(stream)
            if result == SUCCESS:
                (result,) = cu.cuMemsetD32Async(self._flags, 1, self._num_flags, stream)
            if result != cu.CUresult.CUDA_ERROR_NOT_READY:  # its last round is still to come; its queue is not to fill up
                results.append(result)
        for result in results:
            check("Ending a wait", (result,))

    def close(self) -> None:
        """See `AbstractCalls.close`."""
        for stream in self._streams:
            check("Waiting for the last wait to end", cu.cuStreamSynchronize(stream))  # it writes to flags, freed next
            check("Destroying a stream", cu.cuStreamDestroy(stream))
